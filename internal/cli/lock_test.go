package cli

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"onejob/lock"
	"onejob/lock/rabbitmq"
)

// noToken is a lock that nobody may have any more, as when a token has ended: there is no
// session, and every request fails at once.
type noToken struct{ asked int }

func (n *noToken) Run(context.Context) error   { return nil }
func (n *noToken) Ready(context.Context) error { return nil }
func (n *noToken) ask(context.Context, []byte) (lock.Lease, error) {
	n.asked++
	return nil, lock.ErrLost
}
func (n *noToken) await(context.Context) error               { return errors.New("403") }
func (n *noToken) delays() time.Duration                     { return 0 }
func (n *noToken) notHad(_ context.Context, err error) error { return err }

// Who waits for a lock that cannot even be waited for does not ask again and again.
func TestObtainPauses(t *testing.T) {
	t.Parallel()
	var n noToken
	_, err := obtain(t.Context(), &n, 1500*time.Millisecond)
	if e, ok := errors.AsType[*exitError](err); !ok || e.code != exitNotLocked {
		t.Errorf("obtain: %v", err)
	}
	if n.asked < 1 || n.asked > 3 {
		t.Errorf("it asked %d times", n.asked)
	}
}

// disagreeing is a backend whose nodes disagree on whether there is the limit. It is a fake: real
// ones do so for a moment, after a partition.
type disagreeing struct {
	lock.Semaphores // what is not overridden is not called
	made            int
}

func (d *disagreeing) Inspect(context.Context, string) (lock.Semaphore, error) {
	return lock.Semaphore{}, lock.ErrNoSemaphore
}

func (d *disagreeing) Create(context.Context, string, int) error {
	d.made++
	return lock.ErrExists
}

func (d *disagreeing) Take(context.Context, string, int, []byte) ([]lock.Lease, error) {
	return nil, lock.ErrNoSemaphore
}

// A limit that is there for one node and not for another is asked for once, and made again when
// it is asked for next.
func TestASlotOnWhichNodesDisagree(t *testing.T) {
	t.Parallel()
	var nodes disagreeing
	slot := oneSlot{limits: &nodes, name: "l", slots: 1}
	for n := range 3 {
		if _, err := slot.ask(t.Context(), nil); !errors.Is(err, lock.ErrFull) || nodes.made != n+1 {
			t.Errorf("asked for the %d. time: %v, made %d times", n+1, err, nodes.made)
		}
	}
}

// quicker is a backend on which somebody else makes the limit just after it was looked for.
type quicker struct {
	disagreeing
	looked bool
}

func (q *quicker) Inspect(context.Context, string) (lock.Semaphore, error) {
	if !q.looked {
		q.looked = true
		return lock.Semaphore{}, lock.ErrNoSemaphore
	}
	return lock.Semaphore{Name: "l", Slots: 7}, nil
}

// Of two who make a limit at the same moment, the one who was slower hears that it has another number
// of slots.
func TestASlotOfALimitThatSomebodyElseMakes(t *testing.T) {
	t.Parallel()
	slot := oneSlot{limits: &quicker{}, name: "l", slots: 2}
	if _, err := slot.ask(t.Context(), nil); err == nil || !strings.Contains(err.Error(), "7 slots, not 2") {
		t.Errorf("the error: %v", err)
	}
}

// A limit that is deleted and made again with another number of slots while somebody waits is as good as
// one that was changed.
func TestASlotOfALimitThatIsMadeAgain(t *testing.T) {
	t.Parallel()
	slot := oneSlot{limits: &quicker{looked: true}, name: "l", slots: 7}
	for n := range 3 { // each time it is gone when a slot is asked for
		if _, err := slot.ask(t.Context(), nil); !errors.Is(err, lock.ErrFull) {
			t.Errorf("asked for the %d. time: %v", n+1, err)
		}
		slot.slots = 2
	}
}

// silent is a lock of which no server tells anything.
type silent struct{ noToken }

func (*silent) ask(ctx context.Context, _ []byte) (lock.Lease, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// A command that does not want to wait for a lock does not wait for servers without an end either.
func TestNoWaitEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		_, err := obtain(t.Context(), &silent{}, -1)
		if e, ok := errors.AsType[*exitError](err); !ok || e.code != exitNotLocked || time.Since(began) > time.Minute {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
	})
}

// shared is a slot that has each answer for a while, one after the other, and then is free.
type shared struct {
	answers []error
	until   []time.Duration // since began
	began   time.Time
}

func (s *shared) Run(context.Context) error   { return nil }
func (s *shared) Ready(context.Context) error { return nil }
func (s *shared) ask(ctx context.Context, _ []byte) (lock.Lease, error) {
	for i, answer := range s.answers {
		if time.Since(s.began) < s.until[i] {
			return nil, answer
		}
	}
	return nil, ctx.Err()
}

func (s *shared) await(ctx context.Context) error {
	select {
	case <-time.After(time.Second):
	case <-ctx.Done():
	}
	return ctx.Err()
}
func (s *shared) delays() time.Duration                     { return 11 * time.Second }
func (s *shared) notHad(_ context.Context, err error) error { return err }

// Each process counts for itself how long a holder has been dead. One that does not wait for
// others, or not for long, has the slot of a dead one nevertheless.
func TestObtainWaitsForTheDead(t *testing.T) {
	const never = time.Hour
	for _, c := range []struct {
		name    string
		answers []error
		until   []time.Duration
		maxWait time.Duration
		had     bool
		after   time.Duration
	}{
		{"it is held, no wait", []error{lock.ErrFull}, []time.Duration{never}, -1, false, 0},
		{"its holder has died, no wait", []error{lock.ErrDelayed}, []time.Duration{10 * time.Second}, -1, true, 10 * time.Second},
		{"its holder has died, a short wait", []error{lock.ErrDelayed}, []time.Duration{10 * time.Second}, 3 * time.Second, true, 10 * time.Second},
		{"its holder has died, and another one is quicker, no wait", []error{lock.ErrDelayed, lock.ErrFull}, []time.Duration{5 * time.Second, never}, -1, false, 5 * time.Second},
		{"its holder has died, and another one is quicker, a short wait", []error{lock.ErrDelayed, lock.ErrFull}, []time.Duration{5 * time.Second, never}, 3 * time.Second, false, 5 * time.Second},
		{"holders die all the time, no wait", []error{lock.ErrDelayed}, []time.Duration{never}, -1, false, 11 * time.Second},
		{"its holder dies while others wait", []error{lock.ErrFull, lock.ErrDelayed}, []time.Duration{2 * time.Second, 12 * time.Second}, 3 * time.Second, true, 12 * time.Second},
		{"it is held, a long wait", []error{lock.ErrFull}, []time.Duration{20 * time.Second}, 30 * time.Second, true, 20 * time.Second},
		{"the broker is stalled", []error{rabbitmq.ErrUnanswered}, []time.Duration{time.Minute}, 0, true, time.Minute},
		{"the broker is stalled, no wait", []error{rabbitmq.ErrUnanswered}, []time.Duration{time.Minute}, -1, false, 0},
		{"for ever", []error{lock.ErrFull, lock.ErrDelayed, lock.ErrFull}, []time.Duration{time.Minute, 2 * time.Minute, 3 * time.Minute}, 0, true, 3 * time.Minute},
	} {
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			_, err := obtain(t.Context(), &shared{c.answers, c.until, began}, c.maxWait)
			if took := time.Since(began); err == nil != c.had || took != c.after {
				t.Errorf("%s: %v after %v, want a slot: %v, after %v", c.name, err, took, c.had, c.after)
			}
		})
	}
}
