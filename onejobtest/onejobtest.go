// Package onejobtest runs handlers in tests, without Postgres and Consul.
//
//	a := onejobtest.NewAttempt("greet", Greeting{Name: "Zoë"})
//	a.Fence = 7
//	result, err := onejobtest.Run(t.Context(), onejob.Handle("greet", greet), a)
//
// A test ends an attempt early through the context that it gives to [Run]:
//
//	ctx, end := context.WithCancelCause(t.Context())
//	time.AfterFunc(time.Second, func() { end(tasks.ErrCancelled) })
//
// tasks.ErrShutdown and the errors of package lock work in the same way. The timeout of
// the task and the end of the lease are those of the attempt: set Timeout, and Deadline
// with [LeaseFor].
package onejobtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"
	"unicode/utf8"

	"onejob/boottime"
	"onejob/internal/pgjson"
	"onejob/lock"
	"onejob/tasks"
)

// NewAttempt returns the first attempt of five at a task of that kind, with ID 1 and
// fence 1, under a lease of one hour. All fields can be changed before Run. The payload is
// encoded as JSON, a json.RawMessage is taken as it is, and nil is {}.
//
// It panics if the payload cannot be encoded, and if no task of a replica can have it: one
// longer than 4 MiB, that is no JSON, or has the character U+0000 or half of a surrogate pair.
// A []byte is refused as by onejob.Enqueue.
//
// Postgres keeps payloads as jsonb, which changes their form: spaces, the order of fields,
// 1e2 to 100, and of equal names only the last is left. NewAttempt does not do that. It makes a
// difference only to kinds that read the text of a payload.
func NewAttempt(kind string, payload any) *tasks.Attempt {
	raw, isRaw := payload.(json.RawMessage)
	switch {
	case payload == nil, isRaw && len(raw) == 0: // as of a NewTask
		raw = json.RawMessage("{}")
	case !isRaw:
		if _, is := payload.([]byte); is {
			panic("onejobtest: the payload is a []byte, which JSON has as base64: use json.RawMessage if it is JSON")
		}
		var err error
		if raw, err = json.Marshal(payload); err != nil {
			panic(fmt.Sprintf("onejobtest: encode the payload: %v", err))
		}
	}
	if why := unstorable(raw); why != "" {
		panic("onejobtest: no task can have this payload: " + why)
	}
	const id = 1
	now := time.Now()
	return &tasks.Attempt{
		Task: tasks.Task{
			ID: id, Kind: kind, Payload: raw, Queue: "default", LockKey: strconv.Itoa(id), Attempt: 1, MaxAttempts: 5, Fence: 1,
			Session: "00000000-0000-0000-0000-000000000001", Replica: "onejobtest", CreatedAt: now, StartedAt: now, HeardAt: boottime.Now(),
		},
		Deadline: LeaseFor(time.Hour),
		Output:   tasks.NewOutput(0),
	}
}

// LeaseFor returns the Deadline of a lease that ends so long from now.
func LeaseFor(d time.Duration) func() boottime.Instant {
	at := boottime.Now().Add(d)
	return func() boottime.Instant { return at }
}

// Run does what a replica does with an attempt. It looks for the kind, has it prepare the
// payload, and runs the handler under a context that ends
//
//   - when ctx does, with its cause,
//   - after a.Timeout, with tasks.ErrTimeout as the cause,
//   - when a.Deadline has passed, with lock.ErrLost as the cause. Deadline may return a
//     later moment from call to call, as it does when heartbeats extend a lease.
//
// If one of these is so before the handler begins, the handler is not called, and Run returns
// that cause. A test of a handler that is stopped has to end ctx while the handler runs.
//
// A payload that the kind refuses is a permanent error, see tasks.IsPermanent, or
// a requeue if only this replica cannot run it. A result that Postgres would not keep is a
// *tasks.ResultError: one longer than tasks.MaxResult, or that is no JSON, or has the
// character U+0000. Not found are numbers and nesting beyond what Postgres takes. A panic of
// the handler is not recovered.
func Run(ctx context.Context, kinds tasks.Kinds, a *tasks.Attempt) (tasks.Result, error) {
	kind := kinds[a.Kind]
	if kind == nil {
		return tasks.Result{}, fmt.Errorf("onejobtest: there is no kind %q among %q", a.Kind, kinds.Names())
	}
	handler, err := kind.Prepare(a.Payload)
	if errors.Is(err, tasks.ErrUnknown) {
		return tasks.Result{}, tasks.Requeue(0, err)
	} else if err != nil {
		return tasks.Result{}, tasks.Permanent(err)
	}
	ctx, end := context.WithCancelCause(ctx)
	var lease sync.WaitGroup
	defer lease.Wait()
	defer end(nil)
	lease.Go(func() {
		for left := a.Deadline().Until(); left > 0; left = a.Deadline().Until() {
			select {
			case <-time.After(left):
			case <-ctx.Done():
				return
			}
		}
		end(lock.ErrLost)
	})
	timed := ctx // another variable: the goroutine above reads ctx
	if a.Timeout > 0 {
		var stop context.CancelFunc
		timed, stop = context.WithTimeoutCause(ctx, a.Timeout, tasks.ErrTimeout)
		defer stop()
	}
	if a.Deadline().Passed() {
		return tasks.Result{}, lock.ErrLost
	}
	if timed.Err() != nil {
		return tasks.Result{}, context.Cause(timed)
	}
	result, err := handler(timed, a)
	if why := unstorable(result.Value); err == nil && !result.Committed && why != "" {
		return tasks.Result{}, &tasks.ResultError{Written: tasks.Completion{
			ID: a.ID, Fence: a.Fence, Session: a.Session, Outcome: tasks.Failed, Next: tasks.StatusFailed, Error: "the result cannot be stored: " + why,
		}}
	}
	return result, err
}

// unstorable returns why a result cannot be stored, or why no task has such a payload, or "".
// The words are those of the store and of Postgres. Both have the same limit of length.
func unstorable(value json.RawMessage) string {
	switch {
	case len(value) == 0:
		return ""
	case pgjson.TooLong(value, tasks.MaxResult) != "":
		return pgjson.TooLong(value, tasks.MaxResult)
	case !utf8.Valid(value):
		return `invalid byte sequence for encoding "UTF8"`
	case !json.Valid(value):
		return "invalid input syntax for type json"
	}
	high := false // a surrogate that needs a low one behind it
	for i := 0; i < len(value); i++ {
		if value[i] != '\\' || value[i+1] != 'u' {
			if high {
				return "invalid input syntax for type json"
			}
			if value[i] == '\\' {
				i++
			}
			continue
		}
		r, _ := strconv.ParseUint(string(value[i+2:i+6]), 16, 16)
		isHigh, isLow := r >= 0xd800 && r < 0xdc00, r >= 0xdc00 && r < 0xe000
		switch {
		case r == 0:
			return "unsupported Unicode escape sequence"
		case high != isLow:
			return "invalid input syntax for type json"
		}
		high, i = isHigh, i+5
	}
	return ""
}
