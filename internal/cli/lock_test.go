package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"onejob/internal/testenv"
	"onejob/internal/testenv/proxy"
	"onejob/lock"
	"onejob/lock/consul"
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
func (n *noToken) unavailable(error) bool                    { return false }
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
	asked   int
}

func (s *shared) Run(context.Context) error   { return nil }
func (s *shared) Ready(context.Context) error { return nil }
func (s *shared) ask(ctx context.Context, _ []byte) (lock.Lease, error) {
	s.asked++
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
func (s *shared) unavailable(err error) bool                { return errors.Is(err, syscall.ECONNREFUSED) }
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
			_, err := obtain(t.Context(), &shared{answers: c.answers, until: c.until, began: began}, c.maxWait)
			if took := time.Since(began); err == nil != c.had || took != c.after {
				t.Errorf("%s: %v after %v, want a slot: %v, after %v", c.name, err, took, c.had, c.after)
			}
		})
	}
}

// An outage of the servers ends a wait when it has lasted for 15 s, or for the time that the command may wait.
// What will not pass ends it at once.
func TestObtainThroughAnOutage(t *testing.T) {
	const never = time.Hour
	refused := fmt.Errorf("acquire locks: %w", syscall.ECONNREFUSED)
	denied := errors.New("permission denied")
	for _, c := range []struct {
		name     string
		answers  []error
		until    []time.Duration
		maxWait  time.Duration
		code     int           // 0: it gets the lock
		err      error         // with the code
		from, to time.Duration // when it ends
	}{
		{"for a moment", []error{refused}, []time.Duration{time.Millisecond}, 0, 0, nil, 0, time.Second},
		{"for almost as long as is waited", []error{refused}, []time.Duration{14 * time.Second}, 0, 0, nil, 14 * time.Second, 16 * time.Second},
		{"for longer", []error{refused}, []time.Duration{never}, 0, exitLockError, refused, 15 * time.Second, 15 * time.Second},
		{"for a while, no wait", []error{refused}, []time.Duration{7 * time.Second}, -1, 0, nil, 7 * time.Second, 10 * time.Second},
		{"for longer, no wait", []error{refused}, []time.Duration{never}, -1, exitLockError, refused, answerTimeout, answerTimeout},
		{"for longer than it may wait", []error{refused}, []time.Duration{never}, 3 * time.Second, exitLockError, refused, 3 * time.Second, 3 * time.Second},
		{"for longer, and it may wait for long", []error{refused}, []time.Duration{never}, time.Minute, exitLockError, refused, 15 * time.Second, 15 * time.Second},
		{"until after the end of the session", []error{refused, lock.ErrLost}, []time.Duration{9 * time.Second, 12 * time.Second}, 0, 0, nil, 12 * time.Second, 15 * time.Second},
		{"for long after the end of the session", []error{refused, lock.ErrLost}, []time.Duration{9 * time.Second, never}, 0, exitLockError, refused, 15 * time.Second, 15 * time.Second},
		{"twice", []error{refused, lock.ErrFull, refused}, []time.Duration{12 * time.Second, 20 * time.Second, 32 * time.Second}, 0, 0, nil, 32 * time.Second, 35 * time.Second},
		{"the holder has died, no wait", []error{lock.ErrDelayed, refused, lock.ErrDelayed}, []time.Duration{time.Second, 3 * time.Second, 8 * time.Second}, -1, 0, nil, 8 * time.Second, 9500 * time.Millisecond},
		{"a right is missing", []error{denied}, []time.Duration{never}, 0, exitLockError, denied, 0, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			it := &shared{answers: c.answers, until: c.until, began: time.Now()}
			_, err := obtain(t.Context(), it, c.maxWait)
			took, code := time.Since(it.began), 0
			if e, ok := errors.AsType[*exitError](err); ok {
				code = e.code
			}
			if code != c.code || !errors.Is(err, c.err) || took < c.from || took > c.to {
				t.Errorf("%s: %v (code %d) after %v, want code %d, %v after %v to %v", c.name, err, code, took, c.code, c.err, c.from, c.to)
			}
			if it.asked > 50 || c.err == denied && it.asked != 1 {
				t.Errorf("%s: it was asked for %d times", c.name, it.asked)
			}
		})
	}
}

// unready is a lock whose servers cannot be reached from the beginning.
type unready struct{ shared }

func (u *unready) Ready(ctx context.Context) error {
	<-ctx.Done()
	return syscall.ECONNREFUSED
}

// It waits for them no longer than for the lock.
func TestObtainWithoutServers(t *testing.T) {
	for maxWait, want := range map[time.Duration]time.Duration{2 * time.Second: 2 * time.Second, -1: answerTimeout, 0: outageTimeout, time.Minute: outageTimeout} {
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			_, err := obtain(t.Context(), &unready{}, maxWait)
			e, ok := errors.AsType[*exitError](err)
			if took := time.Since(began); !ok || e.code != exitLockError || took != want {
				t.Errorf("with a wait of %v it ends after %v: %v", maxWait, took, err)
			}
		})
	}
}

// interrupted is a lock whose Consul cannot be reached when it is asked for, the first time.
type interrupted struct {
	wholeLock
	cut func()
}

func (r *interrupted) ask(ctx context.Context, value []byte) (lock.Lease, error) {
	if cut := r.cut; cut != nil {
		r.cut = nil
		cut()
	}
	return r.wholeLock.ask(ctx, value)
}

// A Consul that cannot be reached for a while when the lock is asked for does not end the wait.
func TestObtainWhileConsulIsAway(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	way, err := proxy.New(kv.Addr)
	if err != nil {
		t.Fatal(err)
	}
	defer way.Close()
	cfg := defaults()
	cfg.Consul.Address, cfg.Consul.Prefix = way.Addr(), kv.Prefix
	locks, err := consul.New(cfg.consulConfig())
	if err != nil {
		t.Fatal(err)
	}
	it := &interrupted{wholeLock{locks, "k"}, func() {
		way.Lead("127.0.0.1:1") // where nobody listens
		time.AfterFunc(2*time.Second, func() { way.Lead(kv.Addr) })
	}}
	defer background(t.Context(), it.Run)()
	began := time.Now()
	lease, err := obtain(t.Context(), it, 0)
	if err != nil || it.cut != nil {
		t.Fatalf("after %v: %v", time.Since(began), err)
	}
	_ = lease.Release(t.Context())
}
