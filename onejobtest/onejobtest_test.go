package onejobtest_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"onejob"
	"onejob/boottime"
	"onejob/lock"
	"onejob/onejobtest"
	"onejob/tasks"
	execkind "onejob/tasks/kinds/exec"
)

type greeting struct {
	Name string `json:"name"`
}

func greet(ctx context.Context, a *onejob.Attempt, p greeting) (string, error) {
	fmt.Fprintf(a.Output, "attempt %d under fence %d", a.Attempt, a.Fence)
	return "hello " + p.Name, ctx.Err()
}

// wait waits until its context ends, and returns why it did.
func wait(ctx context.Context, _ *onejob.Attempt, _ struct{}) (struct{}, error) {
	<-ctx.Done()
	return struct{}{}, context.Cause(ctx)
}

func Example() {
	a := onejobtest.NewAttempt("greet", greeting{"Zoë"})
	a.Fence = 7
	result, err := onejobtest.Run(context.Background(), onejob.Handle("greet", greet), a)
	fmt.Println(string(result.Value), err)
	fmt.Println(a.Output)
	// Output:
	// "hello Zoë" <nil>
	// attempt 1 under fence 7
}

func TestPayloads(t *testing.T) {
	t.Parallel()
	kinds := onejob.Handle("greet", greet)
	for payload, good := range map[string]bool{`{"name": "Zoë"}`: true, `{}`: true, `{"nmae": "Zoë"}`: false, `{"name": 1}`: false, `[]`: false} {
		_, err := onejobtest.Run(t.Context(), kinds, onejobtest.NewAttempt("greet", json.RawMessage(payload)))
		if (err == nil) != good || !good && !tasks.IsPermanent(err) {
			t.Errorf("%s: %v", payload, err)
		}
	}
	raw := json.RawMessage(`{ "name": "<Zoë>" }`)
	if a := onejobtest.NewAttempt("greet", raw); string(a.Payload) != string(raw) {
		t.Errorf("the payload is %s, want %s", a.Payload, raw)
	}
	for _, text := range []string{string(raw), `{"name": `} {
		a := onejobtest.NewAttempt("greet", nil)
		a.Payload = json.RawMessage(text)
		if _, err := onejobtest.Run(t.Context(), kinds, a); (err == nil) != json.Valid(a.Payload) {
			t.Errorf("%s: %v", text, err)
		}
	}
	if _, err := onejobtest.Run(t.Context(), kinds, onejobtest.NewAttempt("greet", nil)); err != nil {
		t.Errorf("no payload: %v", err)
	}
	if _, err := onejobtest.Run(t.Context(), kinds, onejobtest.NewAttempt("other", nil)); err == nil {
		t.Error("a kind that is not there was run")
	}
	_, err := onejobtest.Run(t.Context(), tasks.Kinds{"exec": new(execkind.Kind)}, onejobtest.NewAttempt("exec", map[string]string{"command": "backup"}))
	if _, requeue := tasks.RequeueDelay(err); !requeue || !errors.Is(err, tasks.ErrUnknown) {
		t.Errorf("a command that is not configured: %v", err)
	}
}

// What no row can have, no attempt has.
func TestPayloadsThatNoTaskCanHave(t *testing.T) {
	t.Parallel()
	for why, payload := range map[string]any{
		"it has 4194305 bytes, of at most 4194304":  strings.Repeat("x", 4<<20-1),
		"unsupported Unicode escape sequence":       map[string]string{"name": "\x00"},
		"invalid input syntax for type json":        json.RawMessage(`{"name": "\ud83d"}`),
		`invalid byte sequence for encoding "UTF8"`: json.RawMessage("\"\xff\""),
		"use json.RawMessage if it is JSON":         []byte(`{}`),
	} {
		func() {
			defer func() {
				if got := fmt.Sprint(recover()); !strings.HasSuffix(got, ": "+why) {
					t.Errorf("%.30v: the panic is %q, want one that ends with %q", payload, got, why)
				}
			}()
			onejobtest.NewAttempt("greet", payload)
		}()
	}
	onejobtest.NewAttempt("greet", strings.Repeat("x", 4<<20-2))
}

// A replica does not begin a handler whose attempt has ended before.
func TestHandlerThatDoesNotBegin(t *testing.T) {
	t.Parallel()
	var begun atomic.Bool
	kinds := onejob.Handle("mark", func(context.Context, *onejob.Attempt, struct{}) (struct{}, error) {
		begun.Store(true)
		return struct{}{}, nil
	})
	for _, want := range []error{tasks.ErrCancelled, tasks.ErrShutdown, lock.ErrLost, tasks.ErrTimeout} {
		ctx, end := context.WithCancelCause(t.Context())
		a := onejobtest.NewAttempt("mark", nil)
		switch want {
		case lock.ErrLost:
			a.Deadline = onejobtest.LeaseFor(-time.Second)
		case tasks.ErrTimeout:
			a.Timeout = 1
		default:
			end(want)
		}
		if _, err := onejobtest.Run(ctx, kinds, a); !errors.Is(err, want) || begun.Swap(false) {
			t.Errorf("it ended with %v, want %v and a handler that did not begin", err, want)
		}
		end(nil)
	}
}

// reports is a kind of which each attempt has this result.
type reports string

func (r reports) Prepare(json.RawMessage) (tasks.Handler, error) {
	return func(context.Context, *tasks.Attempt) (tasks.Result, error) {
		return tasks.Result{Value: json.RawMessage(r)}, nil
	}, nil
}

// What a replica could not store of a result is an error here, too.
func TestResults(t *testing.T) {
	t.Parallel()
	long := `"` + strings.Repeat("x", tasks.MaxResult-2) + `"`
	for value, why := range map[string]string{
		"":                       "",
		`{"a": "\u00e9"}`:        "",
		`"\\u0000 \ud83d\ude00"`: "",
		long:                     "",
		long + " ":               "it has 4194305 bytes, of at most 4194304",
		`"\u0000"`:               "unsupported Unicode escape sequence",
		"[" + strings.Repeat("1e131071,", 32) + "1]": "it has 4194563 bytes when its numbers are written out, of at most 4194304",
		`["a\\\u0000b"]`: "unsupported Unicode escape sequence",
		`"\ud83d"`:       "invalid input syntax for type json",
		`"\ude00"`:       "invalid input syntax for type json",
		`"\ud83d\ud83d"`: "invalid input syntax for type json",
		`"\ud83d\n"`:     "invalid input syntax for type json",
		`{"a": `:         "invalid input syntax for type json",
		"\"\x00\"":       "invalid input syntax for type json",
		"\"\xff\"":       `invalid byte sequence for encoding "UTF8"`,
	} {
		kinds := tasks.Kinds{"report": reports(value)}
		result, err := onejobtest.Run(t.Context(), kinds, onejobtest.NewAttempt("report", nil))
		var refused *tasks.ResultError
		switch {
		case why == "" && (err != nil || string(result.Value) != value):
			t.Errorf("%.20q: %v", value, err)
		case why != "" && (!errors.As(err, &refused) || err.Error() != "the result cannot be stored: "+why || refused.Written.Outcome != tasks.Failed || result.Value != nil):
			t.Errorf("%.20q: %v, want %s", value, err, why)
		}
	}
	nul := onejob.Handle("nul", func(context.Context, *onejob.Attempt, struct{}) (string, error) { return "a\x00", nil })
	_, err := onejobtest.Run(t.Context(), nul, onejobtest.NewAttempt("nul", nil))
	if refused := new(tasks.ResultError); !errors.As(err, &refused) {
		t.Errorf("a result with a zero byte: %v", err)
	}
}

func TestContextEnds(t *testing.T) {
	t.Parallel()
	kinds := onejob.Handle("wait", wait)
	for name, test := range map[string]struct {
		set  func(a *onejob.Attempt, end context.CancelCauseFunc)
		want error
	}{
		"lease over": {func(a *onejob.Attempt, _ context.CancelCauseFunc) {
			a.Deadline = onejobtest.LeaseFor(20 * time.Millisecond)
		}, lock.ErrLost},
		"lease over already": {func(a *onejob.Attempt, _ context.CancelCauseFunc) { a.Deadline = onejobtest.LeaseFor(-1) }, lock.ErrLost},
		"timeout":            {func(a *onejob.Attempt, _ context.CancelCauseFunc) { a.Timeout = 20 * time.Millisecond }, tasks.ErrTimeout},
		"cancelled": {func(_ *onejob.Attempt, end context.CancelCauseFunc) {
			time.AfterFunc(20*time.Millisecond, func() { end(tasks.ErrCancelled) })
		}, tasks.ErrCancelled},
		"shutdown": {func(_ *onejob.Attempt, end context.CancelCauseFunc) {
			time.AfterFunc(20*time.Millisecond, func() { end(tasks.ErrShutdown) })
		}, tasks.ErrShutdown},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, end := context.WithCancelCause(t.Context())
			a := onejobtest.NewAttempt("wait", nil)
			test.set(a, end)
			if _, err := onejobtest.Run(ctx, kinds, a); !errors.Is(err, test.want) {
				t.Errorf("it ended with %v, want %v", err, test.want)
			}
		})
	}
}

// A lease that is extended before it ends goes on.
func TestLeaseIsExtended(t *testing.T) {
	t.Parallel()
	a := onejobtest.NewAttempt("wait", nil)
	var extended atomic.Bool
	first, last := onejobtest.LeaseFor(20*time.Millisecond), onejobtest.LeaseFor(200*time.Millisecond)
	a.Deadline = func() boottime.Instant {
		if extended.Swap(true) {
			return last()
		}
		return first()
	}
	_, err := onejobtest.Run(t.Context(), onejob.Handle("wait", wait), a)
	if !errors.Is(err, lock.ErrLost) || !last().Passed() {
		t.Errorf("it ended with %v, %v before its deadline", err, last().Until())
	}
}
