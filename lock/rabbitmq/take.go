package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"onejob/lock"
)

// races is how many races for slots a Take may lose before it gives up.
const races = 8

// errRace says that others were faster, or that the limit moved meanwhile.
var errRace = errors.New("lost a race")

// Take implements lock.Semaphores. It looks at ctx between requests.
//
// One who is about to enter may be counted by another who is, and either or both
// step back: ErrFull may be said of a semaphore with a slot to spare, when many
// come at once.
func (s *Semaphores) Take(ctx context.Context, name string, n int, value []byte) ([]lock.Lease, error) {
	if err := lock.CheckSemaphore(name, 0); err != nil {
		return nil, err
	}
	if n < 1 || n > lock.MaxTake {
		return nil, fmt.Errorf("take slots of limit %s: %d is not between 1 and %d", name, n, lock.MaxTake)
	}
	t := s.current()
	switch {
	case t == nil:
		return nil, lock.ErrLost
	case t.cooling():
		return nil, fmt.Errorf("limit %s: %w, or may have: the connection is new", name, lock.ErrDelayed)
	}
	for lost := 0; lost < races; lost++ {
		if lost > 0 {
			pause(ctx, rand.N(5*time.Millisecond<<lost)) // lest the same meet again
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		slots, err := t.take(ctx, name, n, value)
		switch {
		case err == nil:
			return slots, nil
		case t.gone() != nil:
			return nil, t.gone()
		case !errors.Is(err, errRace):
			return nil, fmt.Errorf("limit %s: %w", name, err)
		}
	}
	return nil, fmt.Errorf("limit %s: %w, as far as could be seen: others were faster %d times", name, lock.ErrFull, races)
}

// take tries once. What it returns without is given back.
func (t *term) take(ctx context.Context, name string, n int, value []byte) (leases []lock.Lease, err error) {
	queues := t.s.cfg.names(name)
	v, err := look(ctx, t.s.scout, queues)
	switch {
	case err != nil:
		return nil, err
	case !v.there():
		return nil, lock.ErrNoSemaphore
	}
	if err := recognise(t.pulse, queues, v); err != nil {
		return nil, err
	}
	if v.room() < n {
		return nil, lock.ErrFull
	}
	var slots []*slot
	defer func() {
		if err != nil {
			for _, s := range slots {
				s.state.Store(stateLeaving)
				s.cancel(err)
				_ = s.leave() // if it fails the term tries again
			}
		}
	}()
	free := v.free()
	start := rand.IntN(len(free)) // those who come at once do not all want the same
	var numbers []int
	for i := range n {
		number := free[(start+i)%len(free)]
		s, err := t.declare(name, queues.b(number), number, value)
		if err != nil {
			return nil, err
		}
		slots, numbers = append(slots, s), append(numbers, number)
	}
	ok, err := settled(ctx, t.s.scout, queues, v, numbers)
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, errRace
	}
	for _, s := range slots {
		if !s.state.CompareAndSwap(stateTaking, stateHeld) {
			return nil, errRace
		}
		leases = append(leases, s)
	}
	if t.deadline().Passed() {
		return nil, lock.ErrLost
	}
	return leases, ctx.Err()
}

// The pauses between two looks of one who waits.
const (
	shortestWait = 100 * time.Millisecond
	longestWait  = time.Second
)

// Await implements lock.Semaphores. It waits for the bell, and for a slot that is
// given back here. As RabbitMQ does not tell when a queue goes, it also looks,
// ever less often.
func (s *Semaphores) Await(ctx context.Context, name string) error {
	if err := lock.CheckSemaphore(name, 0); err != nil {
		return err
	}
	queues := s.cfg.names(name)
	var listening *term
	var rung <-chan amqp.Delivery
	stop := func() {}
	defer func() { stop() }()
	for wait := shortestWait; ; wait = min(2*wait, longestWait) {
		changed := s.Changed()
		if t := s.current(); t != nil && !t.cooling() {
			v, err := look(ctx, s.scout, queues)
			switch {
			case err != nil:
				return fmt.Errorf("limit %s: %w", name, err)
			case !v.there():
				return fmt.Errorf("limit %s: %w", name, lock.ErrNoSemaphore)
			}
			if err := recognise(t.pulse, queues, v); err != nil {
				return fmt.Errorf("limit %s: %w", name, err)
			}
			if v.room() > 0 {
				return nil
			}
			if t != listening {
				stop()
				listening = t
				rung, stop = t.listen(queues.bell())
				continue // somebody may have rung just before
			}
		}
		timer := time.NewTimer(wait/2 + rand.N(wait/2))
		select {
		case <-changed:
			pause(ctx, rand.N(20*time.Millisecond)) // not all at the same moment
		case _, ok := <-rung:
			if !ok {
				rung = nil
			}
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}
