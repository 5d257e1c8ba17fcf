// Package locktest is what every backend of package lock must do, as one suite
// of tests that runs against a real server.
package locktest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"onejob/boottime"
	"onejob/lock"
)

// A Backend is a lock service that the suite may do things to. Each call of a
// test's New must lead to the same keys.
type Backend struct {
	// New returns a locker that is not running yet.
	New func(t *testing.T) lock.Locker

	// EndSession ends a session as an operator would, behind its owner's back.
	EndSession func(t *testing.T, session string)

	// DeleteKey removes a lock's key as an operator would.
	DeleteKey func(t *testing.T, key string)

	// LockDelay is how long the keys of a dead session stay locked.
	LockDelay time.Duration
}

// Run runs the suite. Each test gets a backend, with keys of its own, from
// open.
func Run(t *testing.T, open func(t *testing.T) Backend) {
	for _, test := range []struct {
		name string
		run  func(t *testing.T, b Backend)
	}{
		{"OneHolder", oneHolder},
		{"NotTwiceInOneSession", notTwiceInOneSession},
		{"OnlyUnderThePresentSession", onlyUnderThePresentSession},
		{"StrangeKeys", strangeKeys},
		{"DeadlineMoves", deadlineMoves},
		{"ReleaseTwice", releaseTwice},
		{"EndedSessionEndsItsLeases", endedSession},
		{"DeletedKeyEndsThatLeaseAlone", deletedKey},
		{"DeadAfterTheLockDelay", deadAfterTheLockDelay},
		{"GoodByeLeavesNothingBehind", goodBye},
		{"NeverTwoInside", neverTwoInside},
		{"OneLeads", oneLeads},
		{"LeaderResigns", leaderResigns},
		{"LeaderDies", leaderDies},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			test.run(t, open(t))
		})
	}
}

const maxWait = 90 * time.Second

// running starts a locker, waits for its session, and stops it at the end of
// the test unless the test did.
func running(t *testing.T, b Backend) (l lock.Locker, stop func()) {
	t.Helper()
	l = b.New(t)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx, nil) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(stop)
	until(t, l, "a session", func() bool { return l.Session() != "" })
	return l, stop
}

// until waits until condition holds, looking at every change.
func until(t *testing.T, l lock.Locker, what string, condition func() bool) {
	t.Helper()
	deadline := time.After(maxWait)
	for {
		changed := l.Changed()
		if condition() {
			return
		}
		select {
		case <-changed:
		case <-time.After(50 * time.Millisecond):
		case <-deadline:
			t.Fatalf("waited %v in vain for %s", maxWait, what)
		}
	}
}

// acquire locks a key, again if the backend has not answered in time. The lock may be there then for a while.
func acquire(t *testing.T, l lock.Locker, key string) lock.Lease {
	t.Helper()
	unsure := false
	for began := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		lease, err := try(l, key)
		if err == nil {
			return lease
		}
		if unsure = unsure || late(err); !unsure || time.Since(began) > maxWait {
			t.Fatalf("acquire %q: %v", key, err)
		}
	}
}

// late reports whether a backend has not answered in time, as one that stands still for a while.
func late(err error) bool { return errors.Is(err, context.DeadlineExceeded) }

// persist calls f again while the backend does not answer in time.
func persist(f func() error) error {
	for began := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		if err := f(); !late(err) || time.Since(began) > maxWait {
			return err
		}
	}
}

var serial atomic.Int64

func try(l lock.Locker, key string) (lock.Lease, error) {
	return l.Acquire(context.Background(), lock.Request{Session: l.Session(), Key: key, Value: fmt.Appendf(nil, `{"n":%d}`, serial.Add(1))})
}

func refused(t *testing.T, l lock.Locker, key string, want error) {
	t.Helper()
	err := persist(func() error {
		lease, err := try(l, key)
		if err == nil {
			_ = lease.Release(context.Background())
		}
		return err
	})
	if !errors.Is(err, want) {
		t.Fatalf("acquire %q: got error %v, want %v", key, err, want)
	}
}

func release(t *testing.T, lease lock.Lease) {
	t.Helper()
	switch err := lease.Release(context.Background()); {
	case late(err): // it is given back later
		t.Logf("release: %v", err)
	case err != nil:
		t.Errorf("release: %v", err)
	}
}

// ended waits for the end of a lease, whose deadline must not lie ahead then.
func ended(t *testing.T, lease lock.Lease, want error) {
	t.Helper()
	select {
	case <-lease.Context().Done():
	case <-time.After(maxWait):
		t.Fatalf("the lease's context did not end within %v", maxWait)
	}
	if cause := context.Cause(lease.Context()); !errors.Is(cause, want) {
		t.Errorf("the lease's context ended with %v, want %v", cause, want)
	}
	if !errors.Is(want, lock.ErrReleased) && !lease.Deadline().Passed() {
		t.Errorf("the deadline of a lease that has ended lies %v ahead", lease.Deadline().Until())
	}
}

func oneHolder(t *testing.T, b Backend) {
	a, _ := running(t, b)
	z, _ := running(t, b)
	lease := acquire(t, a, "k")
	refused(t, z, "k", lock.ErrHeld)
	other := acquire(t, z, "other")
	release(t, lease)
	ended(t, lease, lock.ErrReleased)
	lease = acquire(t, z, "k") // at once: a release leaves no delay
	refused(t, a, "k", lock.ErrHeld)
	release(t, lease)
	release(t, other)
}

func notTwiceInOneSession(t *testing.T, b Backend) {
	a, _ := running(t, b)
	lease := acquire(t, a, "k")
	refused(t, a, "k", lock.ErrHeld)
	release(t, lease)
	release(t, acquire(t, a, "k"))
}

func onlyUnderThePresentSession(t *testing.T, b Backend) {
	a, _ := running(t, b)
	z, _ := running(t, b)
	_, err := a.Acquire(context.Background(), lock.Request{Session: z.Session(), Key: "k"})
	if !errors.Is(err, lock.ErrLost) {
		t.Errorf("acquire under another session: got error %v, want %v", err, lock.ErrLost)
	}
	stopped := b.New(t)
	_, err = stopped.Acquire(context.Background(), lock.Request{Session: stopped.Session(), Key: "k"})
	if !errors.Is(err, lock.ErrLost) {
		t.Errorf("acquire before Run: got error %v, want %v", err, lock.ErrLost)
	}
}

func strangeKeys(t *testing.T, b Backend) {
	a, _ := running(t, b)
	z, _ := running(t, b)
	long := make([]byte, 512)
	for i := range long {
		long[i] = 'x'
	}
	for _, key := range []string{"with space", "a/b", "a/b/", "/", "..", "a?b#c%2F", "Zoë ✓", `"\`, string(long)} {
		lease, err := try(a, key)
		if err != nil {
			t.Errorf("acquire %q: %v", key, err)
			continue
		}
		refused(t, z, key, lock.ErrHeld)
		release(t, lease)
	}
	for what, key := range map[string]string{"an empty key": "", "a key of 513 bytes": string(long) + "x", "a key that is no text": "\xff"} {
		if _, err := try(a, key); err == nil {
			t.Errorf("acquire %s: no error", what)
		}
	}
	// Keys that look alike are not.
	for _, key := range []string{"K", "k", "k ", "k/", "é", "e\u0301"} {
		defer release(t, acquire(t, a, key))
	}
}

func deadlineMoves(t *testing.T, b Backend) {
	a, _ := running(t, b)
	lease := acquire(t, a, "k")
	first := lease.Deadline()
	if first.Passed() {
		t.Errorf("the deadline of a new lease lies %v back", boottime.Now().Sub(first))
	}
	until(t, a, "a later deadline", func() bool { return first.Before(lease.Deadline()) })
	if err := lease.Context().Err(); err != nil {
		t.Errorf("the context of a live lease has ended: %v", context.Cause(lease.Context()))
	}
	release(t, lease)
}

func releaseTwice(t *testing.T, b Backend) {
	a, _ := running(t, b)
	z, _ := running(t, b)
	lease := acquire(t, a, "k")
	release(t, lease)
	other := acquire(t, z, "k")
	release(t, lease) // must not touch the other's key
	refused(t, a, "k", lock.ErrHeld)
	release(t, other)
}

func endedSession(t *testing.T, b Backend) {
	a, _ := running(t, b)
	z, _ := running(t, b)
	session := a.Session()
	one, two := acquire(t, a, "one"), acquire(t, a, "two")
	began := time.Now()
	b.EndSession(t, session)
	ended(t, one, lock.ErrLost)
	ended(t, two, lock.ErrLost)
	var lease lock.Lease
	free := func() bool {
		var err error
		if lease, err = try(z, "one"); err == nil && time.Since(began) < b.LockDelay {
			t.Errorf("the key was had before the lock-delay of %v was over", b.LockDelay)
		}
		if err != nil && !errors.Is(err, lock.ErrDelayed) && !late(err) {
			t.Fatalf("acquire during the lock-delay: got error %v, want %v", err, lock.ErrDelayed)
		}
		return err == nil
	}
	late := free() // on a busy machine the lock-delay may be over
	if err := one.Release(context.Background()); !errors.Is(err, lock.ErrLost) {
		t.Errorf("release a lost lease: got error %v, want %v", err, lock.ErrLost)
	}
	until(t, a, "another session", func() bool { return a.Session() != "" && a.Session() != session })
	until(t, z, "the end of the lock-delay", func() bool { return late || free() })
	release(t, lease)
	_ = two.Release(context.Background())
}

func deletedKey(t *testing.T, b Backend) {
	a, _ := running(t, b)
	one, two := acquire(t, a, "one"), acquire(t, a, "two")
	b.DeleteKey(t, "one")
	ended(t, one, lock.ErrRevoked)
	if err := two.Context().Err(); err != nil {
		t.Errorf("the other lease ended too: %v", context.Cause(two.Context()))
	}
	// Other work of the same replica must wait until this work has ended.
	refused(t, a, "one", lock.ErrHeld)
	if err := one.Release(context.Background()); !errors.Is(err, lock.ErrRevoked) {
		t.Errorf("release a revoked lease: got error %v, want %v", err, lock.ErrRevoked)
	}
	release(t, two)
	release(t, acquire(t, a, "one"))
}

func deadAfterTheLockDelay(t *testing.T, b Backend) {
	a, _ := running(t, b)
	z, _ := running(t, b)
	dies, lives := a.Session(), z.Session()
	until(t, z, "the other replica in sight", func() bool {
		dead, err := z.Dead(context.Background(), []string{dies, lives})
		return err == nil && len(dead) == 0
	})
	began := time.Now()
	b.EndSession(t, dies)
	until(t, z, "the session to be dead", func() bool {
		dead, err := z.Dead(context.Background(), []string{dies, lives})
		if slices.Contains(dead, lives) {
			t.Fatalf("a live session was called dead")
		}
		return err == nil && slices.Contains(dead, dies)
	})
	if took := time.Since(began); took < b.LockDelay {
		t.Errorf("the session was called dead after %v, before the lock-delay of %v was over", took, b.LockDelay)
	}
}

func goodBye(t *testing.T, b Backend) {
	a, stop := running(t, b)
	z, _ := running(t, b)
	session := a.Session()
	released, held := acquire(t, a, "released"), acquire(t, a, "held")
	release(t, released)
	began := time.Now()
	stop()
	ended(t, held, lock.ErrLost)
	release(t, acquire(t, z, "released")) // at once: nothing was left to a lock-delay

	// Who has not let go may be working still.
	until(t, z, "the key of who has not let go", func() bool {
		lease, err := try(z, "held")
		if err == nil {
			release(t, lease)
		}
		return err == nil
	})
	if took := time.Since(began); took < b.LockDelay {
		t.Errorf("the key of who has not let go was had after %v, before the lock-delay of %v was over", took, b.LockDelay)
	}
	until(t, z, "the other session to be dead", func() bool {
		dead, err := z.Dead(context.Background(), []string{session})
		return err == nil && len(dead) == 1
	})
}

// neverTwoInside lets many goroutines of several lockers fight for a few keys;
// the one inside looks around. No session is ended meanwhile: a backend's
// lock-delay need not hold against those who hammer a key, which is why there
// is a fence.
func neverTwoInside(t *testing.T, b Backend) {
	const keys, workers, rounds = 4, 8, 25
	var inside [keys]atomic.Int32
	var entries, refusals atomic.Int64
	lockers := []lock.Locker{}
	for range 3 {
		l, _ := running(t, b)
		lockers = append(lockers, l)
	}
	var wg sync.WaitGroup
	for i := range workers * len(lockers) {
		l := lockers[i%len(lockers)]
		wg.Go(func() {
			for range rounds {
				k := int(serial.Add(1)) % keys
				lease, err := try(l, fmt.Sprint("k", k))
				if err != nil {
					switch {
					case errors.Is(err, lock.ErrHeld):
						refusals.Add(1)
					case !errors.Is(err, lock.ErrDelayed) && !errors.Is(err, lock.ErrLost) && !late(err): // a busy machine may lose a session
						t.Errorf("acquire: %v", err)
					}
					time.Sleep(time.Millisecond)
					continue
				}
				if n := inside[k].Add(1); n != 1 {
					t.Errorf("%d holders of key %d at once", n, k)
				}
				entries.Add(1)
				time.Sleep(time.Millisecond) // the longer inside, the likelier to meet somebody
				inside[k].Add(-1)
				release(t, lease)
			}
		})
	}
	wg.Wait()
	if entries.Load() < workers || refusals.Load() == 0 {
		t.Errorf("only %d locks were granted, and %d refused because somebody held them", entries.Load(), refusals.Load())
	}
	t.Logf("%d locks granted, %d refused", entries.Load(), refusals.Load())
}

// leading runs Lead on a locker until the test ends. It tells on the channel
// when f begins; f runs until its context ends, or resign is called.
func leading(t *testing.T, l lock.Locker) (begun chan time.Time, resign func()) {
	t.Helper()
	begun = make(chan time.Time, 10)
	resigned := make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			_ = lock.Lead(ctx, l, func(ctx context.Context) error {
				begun <- time.Now()
				select {
				case <-ctx.Done():
				case <-resigned:
					cancel() // and do not stand again
				}
				return nil
			})
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
	return begun, sync.OnceFunc(func() { close(resigned) })
}

// standing is leading for one who does not get to lead for now. It waits a while:
// a bid in the very moment of the leader's death can slip past the lock-delay.
func standing(t *testing.T, l lock.Locker) chan time.Time {
	t.Helper()
	begun, _ := leading(t, l)
	select {
	case <-begun:
		t.Fatal("two lead")
	case <-time.After(300 * time.Millisecond):
	}
	return begun
}

// oneLeads lets three stand again and again for 3 s, and longer where that is too short for
// some terms.
func oneLeads(t *testing.T, b Backend) {
	const enough = 5
	var inside atomic.Int32
	var terms atomic.Int64
	var lockers []lock.Locker
	for range 3 {
		l, _ := running(t, b)
		lockers = append(lockers, l)
	}
	ctx, cancel := context.WithTimeout(t.Context(), maxWait)
	defer cancel()
	began := time.Now()
	var wg sync.WaitGroup
	for _, l := range lockers {
		wg.Go(func() {
			for ctx.Err() == nil {
				_ = lock.Lead(ctx, l, func(ctx context.Context) error {
					if n := inside.Add(1); n != 1 {
						t.Errorf("%d lead at once", n)
					}
					done := terms.Add(1) >= enough && time.Since(began) > 3*time.Second
					select { // it must be the end of f that ends the leadership, not the wish to end it
					case <-ctx.Done():
					case <-time.After(30 * time.Millisecond):
					}
					inside.Add(-1)
					if done {
						cancel()
					}
					return nil
				})
			}
		})
	}
	wg.Wait()
	if terms.Load() < enough {
		t.Errorf("only %d terms in %v, with resignations every 30 ms", terms.Load(), maxWait)
	}
}

func leaderResigns(t *testing.T, b Backend) {
	a, _ := running(t, b)
	z, _ := running(t, b)
	beganA, resignA := leading(t, a)
	<-beganA
	beganZ := standing(t, z)
	resigned := time.Now()
	resignA()
	select {
	case at := <-beganZ:
		t.Logf("the next one led %v after the resignation", at.Sub(resigned))
	case <-time.After(maxWait):
		t.Fatal("nobody leads after the resignation")
	}
}

func leaderDies(t *testing.T, b Backend) {
	a, _ := running(t, b)
	z, _ := running(t, b)
	session := a.Session()
	beganA, _ := leading(t, a)
	<-beganA
	beganZ := standing(t, z)
	died := time.Now()
	b.EndSession(t, session)
	select {
	case <-beganA: // it has a new session, and may stand again
	case <-beganZ:
	case <-time.After(maxWait):
		t.Fatal("nobody leads after the leader's death")
	}
	if took := time.Since(died); took < b.LockDelay {
		t.Errorf("somebody led %v after the leader's death, before the lock-delay of %v was over", took, b.LockDelay)
	}
}
