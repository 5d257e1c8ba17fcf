package rabbitmq

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"go.uber.org/zap"

	"onejob/lock"
	"onejob/lock/internal/hold"
)

// A slot is a lease on one slot of a semaphore: it implements lock.Lease.
//
// From before its B queue is declared until that is gone it is in its session's
// table, as the broker would let the same connection declare it twice.
//
// Its delay queue exists from before the slot is granted until the holder releases it; if
// the holder dies without a release, for some seconds more.
type slot struct {
	hold.Lease
	t         *session
	semaphore string
	number    int
	queue     string // B
	delay     string // its delay queue
	value     []byte
	since     time.Time
	shielded  atomic.Bool   // the delay queue is there, and we consume from it, as far as we know
	ch        *amqp.Channel // gets the messages that are sent to B
}

// declare makes a B queue ours.
func (t *session) declare(name string, n names, number int, value []byte) (*slot, error) {
	queue := n.b(number)
	s := &slot{t: t, semaphore: name, number: number, queue: queue, delay: n.d(number), value: value, since: time.Now()}
	s.Init(t.Session)
	if err := t.reserve(s); err != nil {
		s.Abandon(err)
		return nil, err
	}
	messages, err := s.open()
	if err != nil {
		t.remove(s)
		t.readers.Done()
		s.Abandon(err)
		if is(err, amqp.ResourceLocked, amqp.NotFound) {
			return nil, errRace
		}
		return nil, explain("take queue "+queue, err)
	}
	go func() {
		defer t.readers.Done()
		s.read(messages)
	}()
	return s, nil
}

// open declares B on a channel of its own, which is closed if somebody else's
// connection has it.
func (s *slot) open() (messages <-chan amqp.Delivery, err error) {
	if s.ch, err = s.t.wire.conn.Channel(); err != nil {
		return nil, err
	}
	if err := declareOwn(s.ch, s.queue); err != nil {
		return nil, err
	}
	messages, err = s.ch.Consume(s.queue, "", true, true, false, false, nil)
	if err != nil && !is(err, amqp.NotFound) {
		_ = s.t.requests.delete(s.queue, false) // it is ours, and only cannot be read
	}
	return messages, err
}

// shield declares the slot's delay queue, which must not be there, and consumes
// from it. Our B queue keeps others from doing so, unless somebody deletes it.
// Then two may meet here, of whom one is refused: the consumer is exclusive.
func (s *slot) shield() error {
	if !s.t.more() {
		return errRace
	}
	s.shielded.Store(true)
	ch, gone, err := s.consume()
	if err != nil {
		s.t.readers.Done()
		if nodeDown(err) {
			s.shielded.Store(false)
			return fmt.Errorf("%w, or has lost RabbitMQ: %w", lock.ErrDelayed, err) // a holder's, on a node that cannot be reached
		}
		if is(err, amqp.AccessRefused) && strings.Contains(err.Error(), "exclusive use") || is(err, amqp.NotFound, amqp.PreconditionFailed) && !tooMany(err) {
			s.shielded.Store(false) // it is another's
			return errRace
		}
		return explain("take queue "+s.delay, err)
	}
	go func() {
		defer s.t.readers.Done()
		s.keep(ch, gone)
	}()
	return nil
}

// nodeDown reports whether the broker refused a durable queue because it is on a node of the cluster
// that cannot be reached.
func nodeDown(err error) bool {
	return is(err, amqp.NotFound) && strings.Contains(err.Error(), "home node")
}

// consume declares the delay queue and returns what ends when it is gone. It does so
// on a channel of its own: when the broker closes one for an error, a delivery to
// another consumer there may follow, for which the library closes the connection.
func (s *slot) consume() (ch *amqp.Channel, gone <-chan amqp.Delivery, err error) {
	if ch, err = s.t.wire.conn.Channel(); err != nil {
		return nil, nil, err
	}
	if _, err = ch.QueueDeclare(s.delay, true, false, false, false, delayArguments(s.t.s.cfg.delay())); err == nil {
		gone, err = ch.Consume(s.delay, "", true, true, false, false, nil)
	}
	if err != nil {
		_ = ch.Close()
	}
	return ch, gone, err
}

// keep keeps the delay queue there while the slot is held. If it is deleted it is
// declared again, or else the slot is given up: without it the next holder would not
// wait for what this one may leave behind.
func (s *slot) keep(ch *amqp.Channel, gone <-chan amqp.Delivery) {
	for {
		for range gone { // probes
		}
		_ = ch.Close()
		s.shielded.Store(false)
		s.check()
		if !s.wanted() || s.t.gone() != nil {
			return
		}
		var err error
		ch, gone, err = s.consume()
		switch {
		case err == nil:
			s.shielded.Store(true)
			if !s.wanted() { // a release that came meanwhile may have missed this queue
				_, _ = ch.QueueDelete(s.delay, false, false, false)
				_ = ch.Close()
				return
			}
			s.t.s.log.Warn("slot_delay_restored", zap.String("limit", s.semaphore), zap.Int("slot", s.number))
		case s.t.gone() != nil || s.Refuse(): // the one who is taking it will see
			return
		default:
			s.revoke("queue " + s.delay + " was deleted by somebody else")
			return
		}
	}
}

// wanted reports whether nobody has let go of the slot yet, nor taken it away.
func (s *slot) wanted() bool {
	state := s.State()
	return state == hold.Acquiring || state == hold.Held
}

// read answers what is sent to the holder of the slot, until the channel is
// closed or the queue deleted.
func (s *slot) read(messages <-chan amqp.Delivery) {
	for message := range messages {
		switch message.Type {
		case messageWho:
			s.answer(message.ReplyTo)
		case messageLeave:
			if s.Refuse() {
				continue // the one who is taking it will see
			}
			s.revoke("its semaphore was destroyed, or an operator asked for the slot")
		}
	}
	s.check()
}

// check revokes a slot whose queue is not ours any more.
func (s *slot) check() {
	if s.State() != hold.Held || s.t.Lost() != nil {
		return
	}
	if err := s.t.probe(s.t.checks, s.queue); is(err, amqp.NotFound, amqp.ResourceLocked) {
		s.revoke("queue " + s.queue + " was deleted by somebody else")
	}
}

// Release implements lock.Lease. It waits for the broker to have deleted the B
// queue, whatever ctx says, but no longer than a request may take: then the session ends.
func (s *slot) Release(context.Context) error {
	switch stood, lost := s.LetGo(); {
	case stood == hold.Revoked:
		_ = s.leave() // unless the queue is gone, it is still ours
		return s.revoked()
	case stood != hold.Held:
		return nil
	case lost != nil:
		s.t.remove(s)
		return lost
	}
	return s.leave()
}

// leave deletes the delay queue, and then B, which shows to others that the slot is
// free. When the connection is lost the broker does so, later.
func (s *slot) leave() error {
	err := s.t.requests.do(func(ch *amqp.Channel) error {
		if s.shielded.Load() {
			if _, err := ch.QueueDelete(s.delay, false, false, true); err != nil {
				return err
			}
		}
		_, err := ch.QueueDelete(s.queue, false, false, false)
		return err
	})
	switch {
	case err == nil:
		s.t.later(func() { _ = s.ch.Close() })
		s.t.remove(s)
		if !s.t.s.probeSession.notify(s.t.s.cfg.names(s.semaphore).wakeup(), s.number) {
			s.t.s.wake(s.semaphore)
		}
		return nil
	case is(err, amqp.ResourceLocked):
		s.t.later(func() { _ = s.ch.Close() })
		s.t.remove(s)
		return s.revoked() // the queue was deleted, and somebody else has declared it
	case s.t.gone() != nil:
		s.t.remove(s)
		return s.t.gone()
	}
	s.Leak() // the session tries again
	return explain("delete queue "+s.queue, err)
}

// revoke ends a slot that was taken away. It stays in the table until the holder
// lets go.
func (s *slot) revoke(why string) {
	if s.Revoke(fmt.Errorf("%w: %s", lock.ErrRevoked, why)) {
		s.t.s.log.Warn("slot_revoked", zap.String("limit", s.semaphore), zap.Int("slot", s.number), zap.String("why", why))
	}
}

func (s *slot) revoked() error {
	return fmt.Errorf("slot %d of %s: %w", s.number, s.semaphore, lock.ErrRevoked)
}
