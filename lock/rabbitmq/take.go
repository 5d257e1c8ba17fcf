package rabbitmq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"onejob/internal/retry"
	"onejob/lock"
)

// races is how many races for slots a Take may lose before it gives up.
const races = 8

// sureDelays is how many looks of a Take must find that a holder has died.
const sureDelays = 3

// nodeDownPause is how long, at least, a Take goes on that finds a delay queue on a node that is down.
const nodeDownPause = 500 * time.Millisecond

// errRace says that others were faster, or that the limit moved meanwhile.
var errRace = errors.New("lost a race")

// errElsewhere says that a queue that the session has declared a moment ago is not there, as the
// connection sees it that looks for queues. Somebody deleted it, or that one leads to another broker,
// which counts other holders.
var errElsewhere = errors.New("the connection that looks for queues does not see one that was just declared: do all connections lead to the same broker?")

// Take implements lock.Semaphores. It looks at ctx between requests. A request that the broker does
// not answer outlasts Take: what it takes is given back when the answer comes.
//
// Two callers that are about to enter may count each other, and one or both step
// back: ErrFull may be said of a semaphore with a slot to spare, when many come at
// once.
func (s *Semaphores) Take(ctx context.Context, name string, n int, value []byte) ([]lock.Lease, error) {
	if err := lock.CheckSemaphore(name, 0); err != nil {
		return nil, err
	}
	if n < 1 || n > lock.MaxTake {
		return nil, fmt.Errorf("take slots of limit %s: %d is not between 1 and %d", name, n, lock.MaxTake)
	}
	t := s.current()
	if t == nil {
		return nil, lock.ErrLost
	}
	delays := 0
	last := fmt.Errorf("%w, as far as could be seen: others were faster %d times", lock.ErrFull, races)
	for lost := 0; lost < races; lost++ {
		if lost > 0 {
			retry.Pause(ctx, rand.N(5*time.Millisecond<<lost)) // so that the same ones do not collide again
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		slots, err := t.attempt(ctx, name, n, value)
		switch {
		case err == nil:
			return slots, nil
		case t.gone() != nil:
			return nil, t.gone()
		case errors.Is(err, lock.ErrDelayed):
			// A slot that was taken while we looked shows the same once: no B queue, and
			// then a delay queue.
			if delays++; delays == sureDelays {
				if nodeDown(err) { // no look sees that queue, so Await would return at once
					retry.Pause(ctx, nodeDownPause+rand.N(nodeDownPause))
				}
				return nil, fmt.Errorf("limit %s: %w", name, err)
			}
		case errors.Is(err, errElsewhere):
			last = err
		case !errors.Is(err, errRace):
			return nil, fmt.Errorf("limit %s: %w", name, err)
		}
	}
	return nil, fmt.Errorf("limit %s: %w", name, last)
}

// attempt is take, and returns soon after the end of ctx, or of the session, or when one request has
// taken longer than requestTimeout.
func (t *session) attempt(ctx context.Context, name string, n int, value []byte) ([]lock.Lease, error) {
	ctx, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	defer context.AfterFunc(t.Context(), func() { giveUp(t.Lost()) })()
	type taken struct {
		leases []lock.Lease
		err    error
	}
	result, err := await(ctx, t, func() taken {
		leases, err := t.take(ctx, giveUp, name, n, value)
		return taken{leases, err}
	}, func(late taken) {
		for _, l := range late.leases {
			_ = l.Release(context.Background())
		}
	})
	return result.leases, cmp.Or(err, result.err)
}

// take tries once. What it returns without is given back. It calls giveUp, which ends ctx, when the
// broker does not answer a request in time, and goes on waiting.
func (t *session) take(ctx context.Context, giveUp context.CancelCauseFunc, name string, n int, value []byte) (leases []lock.Lease, err error) {
	queues := t.s.cfg.names(name)
	v, wanted, err := t.choose(ctx, name, n)
	if err != nil {
		return nil, err
	}
	var slots []*slot
	defer func() {
		if err != nil {
			for _, s := range slots {
				s.Abandon(err)
				_ = s.leave() // if it fails the session tries again
			}
		}
	}()
	within := func(request func() error) error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		defer time.AfterFunc(requestTimeout, func() { giveUp(unanswered(requestTimeout)) }).Stop()
		return request()
	}
	for _, number := range wanted {
		err := within(func() error {
			s, err := t.declare(name, queues, number, value)
			if err == nil {
				slots = append(slots, s)
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	ok, err := settled(ctx, t.s.probeSession, queues, v, wanted)
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, errRace
	}
	for _, s := range slots {
		if err := within(s.shield); err != nil {
			return nil, err
		}
	}
	for _, s := range slots {
		if !s.Grant() {
			return nil, errRace
		}
		leases = append(leases, s)
	}
	if t.Deadline().Passed() {
		return nil, lock.ErrLost
	}
	return leases, context.Cause(ctx)
}

// choose returns n slots that are free, or were a moment ago, and what was seen.
func (t *session) choose(ctx context.Context, name string, n int) (view, []int, error) {
	// A caller that a wake-up has woken wants the slot that it names. What was seen
	// last will do: what has changed since then is found out by settled.
	if h := t.s.hinted(name); h != nil && n == 1 {
		return h.view, []int{h.slot}, nil
	}
	queues := t.s.cfg.names(name)
	v, err := t.s.look(ctx, queues)
	switch {
	case err != nil:
		return v, nil, err
	case !v.there():
		return v, nil, lock.ErrNoSemaphore
	}
	if err := recognise(t.requests, queues, v); err != nil {
		return v, nil, err
	}
	switch room := v.room(); {
	case room+len(v.shut) < n:
		return v, nil, lock.ErrFull
	case room < n:
		return v, nil, lock.ErrDelayed
	}
	free := v.free()
	start := rand.IntN(len(free)) // those who come at once do not all want the same
	var some []int
	for i := range n {
		some = append(some, free[(start+i)%len(free)])
	}
	return v, some, nil
}
