package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"onejob/internal/retry"
	"onejob/lock"
)

const (
	// mutexMaxWait is how long to wait for another administrator. One who died
	// silently is noticed by the broker after two or three heartbeats.
	mutexMaxWait = 40 * time.Second

	// drainInterval is how often Drain looks, more or less.
	drainInterval = 200 * time.Millisecond
)

// administer checks the name and the slots, and calls work with the administration mutex of the
// semaphore. The connection that does the work has the mutex: without it nothing more can be done.
// When ctx ends the work is cut short; what was done of it stays done.
func (s *Semaphores) administer(ctx context.Context, what, name string, slots int, work func(o *reader) error) error {
	if err := lock.CheckSemaphore(name, slots); err != nil {
		return err
	}
	o, err := s.visit(ctx, name)
	if err != nil {
		return fmt.Errorf("%s limit %s: %w", what, name, err)
	}
	defer o.end()
	if err = o.lock(ctx); err == nil {
		err = work(o)
	}
	if err != nil && ctx.Err() != nil {
		err = errors.Join(context.Cause(ctx), err)
	}
	if err != nil {
		return fmt.Errorf("%s limit %s: %w", what, name, err)
	}
	return nil
}

// lock acquires the mutex, which is given back with the connection.
func (o *reader) lock(ctx context.Context) error {
	for end := time.Now().Add(mutexMaxWait); ; {
		err := o.line.own(o.mutex())
		switch {
		case err == nil:
			return nil
		case !is(err, amqp.ResourceLocked):
			return explain("declare queue "+o.mutex(), err)
		case o.line.shared(o.mutex()):
			return fmt.Errorf("%w: %w", foreign(o.mutex()), err)
		case time.Now().After(end):
			return fmt.Errorf("another administrator has been at work for %v: %w", mutexMaxWait, err)
		}
		retry.Pause(ctx, 20*time.Millisecond+rand.N(80*time.Millisecond))
		if ctx.Err() != nil {
			return err
		}
	}
}

// Create implements lock.Semaphores.
func (s *Semaphores) Create(ctx context.Context, name string, slots int) error {
	return s.administer(ctx, "create", name, slots, func(o *reader) error {
		switch _, err := o.look(ctx); {
		case err == nil:
			return lock.ErrExists
		case !errors.Is(err, lock.ErrNoSemaphore):
			return err
		}
		// A semaphore that was destroyed by force may have left holders who are
		// about to let go, on any slot.
		v := view{reach: -1, top: s.farthest}
		if err := v.seek(ctx, o, o.names); err != nil {
			return err
		}
		return o.create(ctx, v, slots)
	})
}

// create makes a limit that is not there; v says who still holds slots of it. The first
// slot is made last, and with it all others count: cut short, it leaves no limit, or a whole one.
func (o *reader) create(ctx context.Context, v view, slots int) error {
	there, err := exist(ctx, o, o.as(1, v.top))
	if err != nil {
		return err
	}
	for slot := v.top; slot > slots; slot-- { // of one that was cut short
		if there[slot-1] {
			if err := o.delete(o.a(slot)); err != nil {
				return err
			}
		}
	}
	for slot := slots; slot > 1; slot-- {
		if !there[slot-1] {
			if err := o.declare(o.a(slot)); err != nil {
				return err
			}
		}
	}
	if slots == 0 || v.highest() > slots+overshoot { // those who look would not look that far
		if err := o.declare(o.reach(reachFor(max(slots, v.highest())))); err != nil {
			return err
		}
	}
	if slots > 0 {
		if err := o.declare(o.a(1)); err != nil {
			return err
		}
	}
	return o.announce(ctx, 1, slots)
}

// announce tells those who wait of new slots, and lowers or makes the reach.
func (o *reader) announce(ctx context.Context, first, slots int) error {
	if _, err := o.send(ctx, notifications(o.wakeup(), first, slots)); err != nil {
		return fmt.Errorf("tell those who wait: %w", err)
	}
	return o.lowerReach(ctx, slots)
}

// Resize implements lock.Semaphores. The limit moves slot by slot, and is there
// when Resize returns; after an error it may be anywhere in between.
func (s *Semaphores) Resize(ctx context.Context, name string, slots int) error {
	return s.administer(ctx, "resize", name, slots, func(o *reader) error {
		v, err := o.look(ctx)
		if err != nil {
			return err
		}
		return o.resize(ctx, v, slots)
	})
}

// resize moves the limit from what v says, and clears away what lies beyond a gap,
// as far as there ever were slots.
func (o *reader) resize(ctx context.Context, v view, slots int) error {
	return o.clear(ctx, v, slots, max(v.slots, slots, v.reach)+overshoot)
}

// clear is resize, and looks for slots beyond a gap up to the edge.
func (o *reader) clear(ctx context.Context, v view, slots, edge int) error {
	// Those who look must look far enough before anybody can be there.
	if err := o.declare(o.reach(reachFor(max(slots, v.slots, v.highest())))); err != nil {
		return err
	}
	beyond, err := exist(ctx, o, o.as(v.slots+1, edge))
	if err != nil {
		return err
	}
	there := func(slot int) bool { return slot <= v.slots || beyond[slot-v.slots-1] }
	for slot := edge; slot > slots; slot-- {
		if there(slot) {
			if err := o.delete(o.a(slot)); err != nil {
				return err
			}
		}
	}
	for slot := v.slots + 1; slot <= slots; slot++ {
		if !there(slot) {
			if err := o.declare(o.a(slot)); err != nil {
				return err
			}
		}
	}
	return o.announce(ctx, v.slots+1, slots)
}

// lowerReach makes those who look spare what nobody holds any more. One who is
// about to take a slot up there will find its A queue missing and step back.
func (o *reader) lowerReach(ctx context.Context, slots int) error {
	v, err := look(ctx, o, o.names)
	if err != nil {
		return err
	}
	reach := reachFor(max(slots, v.highest()))
	if err := o.declare(o.reach(reach)); err != nil {
		return err
	}
	return o.deleteReaches(ctx, reach)
}

// deleteReaches deletes all reaches but one.
func (o *reader) deleteReaches(ctx context.Context, but int) error {
	found, err := exist(ctx, o, o.reaches())
	if err != nil {
		return err
	}
	for i := len(reaches) - 1; i >= 0; i-- {
		if found[i] && reaches[i] != but {
			if err := o.delete(o.reach(reaches[i])); err != nil {
				return err
			}
		}
	}
	return nil
}

// Drain implements lock.Semaphores.
func (s *Semaphores) Drain(ctx context.Context, name string) error {
	if err := lock.CheckSemaphore(name, 0); err != nil {
		return err
	}
	o, err := s.visit(ctx, name)
	if err != nil {
		return fmt.Errorf("drain limit %s: %w", name, err)
	}
	defer o.end()
	for {
		v, err := o.look(ctx)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			return fmt.Errorf("drain limit %s: %w", name, err)
		case len(v.taken) <= v.slots:
			return nil
		}
		retry.Pause(ctx, drainInterval/2+rand.N(drainInterval))
	}
}

// Destroy implements lock.Semaphores. Slots cannot be taken away from others over
// AMQP: with force, their holders are asked to let go. Those of this package do
// so at once; of other clients it is not known.
func (s *Semaphores) Destroy(ctx context.Context, name string, force bool) error {
	return s.administer(ctx, "destroy", name, 0, func(o *reader) error {
		v, err := o.look(ctx)
		if err != nil {
			return err
		}
		if len(v.taken) > 0 && !force {
			return fmt.Errorf("%w: %d", lock.ErrInUse, len(v.taken))
		}
		slots := v.slots
		if err := o.clear(ctx, v, 0, s.farthest); err != nil {
			return err
		}
		// Nobody enters any more. Somebody may have in between.
		if v, err = o.look(ctx); err != nil {
			return err
		}
		if len(v.taken) > 0 && !force {
			return errors.Join(fmt.Errorf("%w meanwhile: %d", lock.ErrInUse, len(v.taken)), o.resize(ctx, v, slots))
		}
		var messages []message
		for _, slot := range v.taken {
			messages = append(messages, message{to: o.b(slot), message: amqp.Publishing{Type: messageLeave, Expiration: "0"}})
		}
		if _, err := o.send(ctx, messages); err != nil {
			return fmt.Errorf("revoke its slots: %w", err)
		}
		if err := o.line.delete(o.wakeup(), false); err != nil {
			return explain("delete queue "+o.wakeup(), err)
		}
		return o.deleteReaches(ctx, -1)
	})
}

// declare makes a queue that outlives everybody.
func (o *reader) declare(queue string) error {
	err := o.line.do(func(ch *amqp.Channel) error { return declareDurable(ch, queue) })
	if is(err, amqp.ResourceLocked, amqp.PreconditionFailed) && !tooMany(err) {
		return fmt.Errorf("%w: %w", foreign(queue), err)
	}
	return explain("declare queue "+queue, err)
}

// delete deletes a queue and waits for the broker to say so. It is no error if
// the queue is gone already. One that somebody consumes from is not ours.
func (o *reader) delete(queue string) error {
	err := o.line.delete(queue, true)
	if is(err, amqp.ResourceLocked, amqp.PreconditionFailed) {
		return fmt.Errorf("%w: %w", foreign(queue), err)
	}
	return explain("delete queue "+queue, err)
}

// foreign is the error about a queue that is not what its name says.
func foreign(queue string) error {
	return fmt.Errorf("%w: queue %s is exclusive, in use, or of another kind", lock.ErrForeign, queue)
}
