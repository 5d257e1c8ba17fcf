package rabbitmq

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"go.uber.org/zap"

	"onejob/internal/boottime"
	"onejob/lock"
)

// The states of a slot.
const (
	stateTaking   int32 = iota
	stateHeld           // by somebody who works under it
	stateRevoked        // it was taken away; the holder has not let go yet
	stateLeaving        // the holder has let go, and the queue is being deleted
	stateLeftOver       // likewise, but that failed; it is tried again
)

// A slot is a lease on one slot of a semaphore: it implements lock.Lease.
//
// From before its B queue is declared until that is gone it is in its term's
// table, as the broker would let the same connection declare it twice.
type slot struct {
	t         *term
	semaphore string
	number    int
	queue     string // B
	value     []byte
	since     time.Time
	ctx       context.Context
	cancel    context.CancelCauseFunc
	state     atomic.Int32
	ended     atomic.Int64  // when it was revoked, as a boottime.Instant; zero if it was not
	ch        *amqp.Channel // gets the letters that are sent to B
}

// declare makes a B queue ours.
func (t *term) declare(name, queue string, number int, value []byte) (*slot, error) {
	s := &slot{t: t, semaphore: name, number: number, queue: queue, value: value, since: time.Now()}
	s.ctx, s.cancel = context.WithCancelCause(t.ctx)
	if !t.reserve(s) {
		s.cancel(errRace)
		return nil, errRace
	}
	letters, err := s.open()
	if err != nil {
		t.remove(s)
		t.readers.Done()
		s.cancel(err)
		if is(err, amqp.ResourceLocked, amqp.NotFound) {
			return nil, errRace
		}
		return nil, explain("take queue "+queue, err)
	}
	go func() {
		defer t.readers.Done()
		s.read(letters)
	}()
	return s, nil
}

// open declares B on a channel of its own, which is closed if somebody else's
// connection has it.
func (s *slot) open() (letters <-chan amqp.Delivery, err error) {
	if s.ch, err = s.t.wire.conn.Channel(); err != nil {
		return nil, err
	}
	if err := declareOwn(s.ch, s.queue); err != nil {
		return nil, err
	}
	letters, err = s.ch.Consume(s.queue, "", true, true, false, false, nil)
	if err != nil && !is(err, amqp.NotFound) {
		_ = s.t.delete(s.queue) // it is ours, and only cannot be read
	}
	return letters, err
}

// read answers what is sent to the holder of the slot, until the channel is
// closed or the queue deleted.
func (s *slot) read(letters <-chan amqp.Delivery) {
	for letter := range letters {
		switch letter.Type {
		case letterWho:
			s.answer(letter.ReplyTo)
		case letterLeave:
			if s.state.CompareAndSwap(stateTaking, stateLeaving) {
				continue // the one who is taking it will see
			}
			s.revoke("its semaphore was destroyed, or an operator asked for the slot")
		}
	}
	s.check()
}

// check revokes a slot whose queue is not ours any more.
func (s *slot) check() {
	if s.state.Load() != stateHeld || s.t.ctx.Err() != nil {
		return
	}
	if err := s.t.probe(s.queue); is(err, amqp.NotFound, amqp.ResourceLocked) {
		s.revoke("queue " + s.queue + " was deleted by somebody else")
	}
}

// Context implements lock.Lease.
func (s *slot) Context() context.Context { return s.ctx }

// Deadline implements lock.Lease.
func (s *slot) Deadline() boottime.Instant {
	d := s.t.deadline()
	if at := boottime.Instant(s.ended.Load()); at != 0 {
		return min(d, at)
	}
	return d
}

// Release implements lock.Lease. It waits for the broker to have deleted the B
// queue, whatever ctx says, but no longer than the lease would have lasted.
func (s *slot) Release(context.Context) error {
	if s.state.CompareAndSwap(stateRevoked, stateLeaving) {
		_ = s.leave() // unless the queue is gone, it is still ours
		return s.revoked()
	}
	if !s.state.CompareAndSwap(stateHeld, stateLeaving) {
		return nil
	}
	lost := context.Cause(s.ctx)
	s.cancel(lock.ErrReleased)
	if lost != nil {
		s.t.remove(s)
		return lost
	}
	return s.leave()
}

// leave deletes the B queue. When the connection is lost the broker does so.
func (s *slot) leave() error {
	err := s.t.delete(s.queue)
	switch {
	case err == nil:
		_ = s.ch.Close()
		s.t.remove(s)
		s.t.s.signal()
		s.t.s.scout.ring(s.t.s.cfg.names(s.semaphore).bell())
		return nil
	case is(err, amqp.ResourceLocked):
		_ = s.ch.Close()
		s.t.remove(s)
		return s.revoked() // the queue was deleted, and somebody else has declared it
	case s.t.gone() != nil:
		s.t.remove(s)
		return s.t.gone()
	}
	s.state.Store(stateLeftOver)
	return explain("delete queue "+s.queue, err)
}

// revoke ends a slot that was taken away. It stays in the table until the holder
// lets go.
func (s *slot) revoke(why string) {
	if !s.state.CompareAndSwap(stateHeld, stateRevoked) {
		return // it was being released just now
	}
	s.ended.Store(int64(boottime.Now()))
	s.t.s.log.Warn("slot_revoked", zap.String("limit", s.semaphore), zap.Int("slot", s.number), zap.String("why", why))
	s.cancel(fmt.Errorf("%w: %s", lock.ErrRevoked, why))
}

func (s *slot) revoked() error {
	return fmt.Errorf("slot %d of %s: %w", s.number, s.semaphore, lock.ErrRevoked)
}
