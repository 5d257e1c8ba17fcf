package locktest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"onejob/lock"
)

// A SemaphoreBackend is a service with semaphores that the suite may do things
// to. Each call of a test's New must lead to the same semaphores.
type SemaphoreBackend struct {
	// New returns a locker that is not running yet, and its semaphores.
	New func(t *testing.T) (lock.Locker, lock.Semaphores)

	// EndSession ends a replica's session as an operator would, behind its
	// owner's back.
	EndSession func(t *testing.T, session string)

	// Revoke takes a slot away from its holder as an operator would.
	Revoke func(t *testing.T, name string, holder lock.SlotHolder)

	// Spoil puts something that is no semaphore where that of the name would
	// be, and Damaged tells whether it is still as it was. Both are nil if nothing
	// else can stand there.
	Spoil   func(t *testing.T, name string)
	Damaged func(t *testing.T, name string) bool

	// LockDelay is how long the slots of a dead holder stay taken.
	LockDelay time.Duration

	// Exact says that ErrFull is answered only when no slot was free at one moment of
	// the call. Who looks at one slot after the other cannot know.
	Exact bool
}

// RunSemaphores runs the suite for semaphores. Each test gets a backend, with
// semaphores of its own, from open.
func RunSemaphores(t *testing.T, open func(t *testing.T) SemaphoreBackend) {
	for _, test := range []struct {
		name string
		run  func(t *testing.T, b SemaphoreBackend)
	}{
		{"CreateListDestroy", createListDestroy},
		{"BadNamesAndCounts", badNamesAndCounts},
		{"NoSuchSemaphore", noSuchSemaphore},
		{"NeverOverwritesWhatIsNotOurs", damaged},
		{"FullForAll", fullForAll},
		{"AllOrNone", allOrNone},
		{"ResizeUpAndDown", resizeUpAndDown},
		{"InspectTellsTheHolders", inspectHolders},
		{"ReleaseSlotTwice", releaseSlotTwice},
		{"DrainWaits", drainWaits},
		{"DestroyOnlyByForceWhenHeld", destroyHeld},
		{"DestroyedByForceAndMadeAgain", destroyedAndMadeAgain},
		{"LostSessionEndsItsSlots", lostSession},
		{"RevokedSlotEndsAlone", revokedSlot},
		{"AwaitWakesAtOnce", awaitWakes},
		{"AwaitEndsWithItsContext", awaitEnds},
		{"GoodByeGivesSlotsBack", goodByeSlots},
		{"NeverMoreThanTheLimit", neverMoreThanTheLimit},
		{"History", historyOfSlots},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			test.run(t, open(t))
		})
	}
}

// replica is a running locker with its semaphores.
type replica struct {
	lock.Locker
	lock.Semaphores
	stop func()
}

func (b SemaphoreBackend) start(t *testing.T) replica {
	t.Helper()
	var r replica
	_, r.stop = running(t, Backend{New: func(t *testing.T) lock.Locker {
		r.Locker, r.Semaphores = b.New(t)
		return r.Locker
	}})
	return r
}

func create(t *testing.T, s lock.Semaphores, name string, slots int) {
	t.Helper()
	again := false
	err := persist(func() error {
		err := s.Create(t.Context(), name, slots)
		if again && errors.Is(err, lock.ErrExists) { // by the request before
			err = nil
		}
		again = true
		return err
	})
	if err != nil {
		t.Fatalf("create %s: %v", name, err)
	}
}

func resize(t *testing.T, s lock.Semaphores, name string, slots int) {
	t.Helper()
	if err := persist(func() error { return s.Resize(t.Context(), name, slots) }); err != nil {
		t.Fatalf("resize %s: %v", name, err)
	}
}

func take(t *testing.T, s lock.Semaphores, name string, n int) []lock.Lease {
	t.Helper()
	var leases []lock.Lease
	var err error
	unsure := false // slots that were not answered in time may be there for a while
	for began := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		if leases, err = s.Take(context.Background(), name, n, fmt.Appendf(nil, `{"n":%d}`, serial.Add(1))); err == nil {
			break
		}
		if unsure = unsure || late(err); !unsure || time.Since(began) > maxWait {
			t.Fatalf("take %d of %s: %v", n, name, err)
		}
	}
	if len(leases) != n {
		t.Fatalf("take %d of %s: got %d leases", n, name, len(leases))
	}
	return leases
}

func notTaken(t *testing.T, s lock.Semaphores, name string, n int, want error) {
	t.Helper()
	err := persist(func() error {
		leases, err := s.Take(context.Background(), name, n, nil)
		releaseAll(t, leases)
		return err
	})
	if !errors.Is(err, want) {
		t.Fatalf("take %d of %s: got error %v, want %v", n, name, err, want)
	}
}

func releaseAll(t *testing.T, leases []lock.Lease) {
	t.Helper()
	for _, lease := range leases {
		release(t, lease)
	}
}

func inspect(t *testing.T, s lock.Semaphores, name string) lock.Semaphore {
	t.Helper()
	var sem lock.Semaphore
	err := persist(func() (err error) {
		sem, err = s.Inspect(t.Context(), name)
		return err
	})
	if err != nil {
		t.Fatalf("inspect %s: %v", name, err)
	}
	return sem
}

// stands checks a semaphore's limit, and how many hold a slot.
func stands(t *testing.T, s lock.Semaphores, name string, slots, held int) {
	t.Helper()
	if sem := inspect(t, s, name); sem.Slots != slots || len(sem.Holders) != held {
		t.Errorf("%s: %d slots, %d held; want %d and %d", name, sem.Slots, len(sem.Holders), slots, held)
	}
}

func createListDestroy(t *testing.T, b SemaphoreBackend) {
	a, z := b.start(t), b.start(t)
	if names, err := a.List(t.Context()); err != nil || len(names) != 0 {
		t.Errorf("list before: %q, %v", names, err)
	}
	for _, name := range []string{"reports", "reports2", "a.b", "Zoë✓", "a?b#c%2F", strings.Repeat("x", 100)} {
		create(t, a, name, 2)
		stands(t, z, name, 2, 0)
	}
	if err := z.Create(t.Context(), "reports", 2); !errors.Is(err, lock.ErrExists) {
		t.Errorf("create twice: got error %v, want %v", err, lock.ErrExists)
	}
	releaseAll(t, take(t, a, "reports", 2))
	want := []string{"Zoë✓", "a.b", "a?b#c%2F", "reports", "reports2", strings.Repeat("x", 100)}
	if names, err := z.List(t.Context()); err != nil || !slices.Equal(names, want) {
		t.Errorf("list: got %q, %v; want %q", names, err, want)
	}
	if err := z.Destroy(t.Context(), "reports", false); err != nil {
		t.Errorf("destroy: %v", err)
	}
	notTaken(t, a, "reports", 1, lock.ErrNoSemaphore)
	leases := take(t, a, "reports2", 2) // whose name begins the same
	create(t, a, "reports", 3)
	stands(t, z, "reports", 3, 0)
	if n := inspect(t, z, "reports").Waiting; n > 0 {
		t.Errorf("%d wait for reports, where others hold reports2", n)
	}
	releaseAll(t, leases)
}

func badNamesAndCounts(t *testing.T, b SemaphoreBackend) {
	a := b.start(t)
	for _, name := range []string{"", ".lock", "a/b", "a b", "a\nb", "\xff", strings.Repeat("x", 101)} {
		if err := a.Create(t.Context(), name, 1); err == nil {
			t.Errorf("create %q: no error", name)
		}
		if _, err := a.Take(t.Context(), name, 1, nil); err == nil {
			t.Errorf("take one of %q: no error", name)
		}
		if err := a.Await(t.Context(), name); err == nil {
			t.Errorf("await %q: no error", name)
		}
	}
	for _, slots := range []int{-1, lock.MaxSlots + 1} {
		if err := a.Create(t.Context(), "k", slots); err == nil {
			t.Errorf("create with %d slots: no error", slots)
		}
	}
	create(t, a, "k", 1)
	if err := a.Resize(t.Context(), "k", -1); err == nil {
		t.Error("resize to -1 slots: no error")
	}
	for _, n := range []int{-1, 0, lock.MaxTake + 1} {
		if _, err := a.Take(t.Context(), "k", n, nil); err == nil {
			t.Errorf("take %d: no error", n)
		}
	}
	stands(t, a, "k", 1, 0)
}

func noSuchSemaphore(t *testing.T, b SemaphoreBackend) {
	a := b.start(t)
	_, inspected := a.Inspect(t.Context(), "k")
	for what, err := range map[string]error{
		"inspect": inspected,
		"resize":  a.Resize(t.Context(), "k", 1),
		"drain":   a.Drain(t.Context(), "k"),
		"destroy": a.Destroy(t.Context(), "k", true),
		"await":   a.Await(t.Context(), "k"),
	} {
		if !errors.Is(err, lock.ErrNoSemaphore) {
			t.Errorf("%s: got error %v, want %v", what, err, lock.ErrNoSemaphore)
		}
	}
	notTaken(t, a, "k", 1, lock.ErrNoSemaphore)
}

func damaged(t *testing.T, b SemaphoreBackend) {
	if b.Spoil == nil {
		return
	}
	a := b.start(t)
	b.Spoil(t, "k")
	_, inspected := a.Inspect(t.Context(), "k")
	for what, err := range map[string]error{
		"create":  a.Create(t.Context(), "k", 1),
		"inspect": inspected,
		"resize":  a.Resize(t.Context(), "k", 1),
		"drain":   a.Drain(t.Context(), "k"),
		"destroy": a.Destroy(t.Context(), "k", true),
		"await":   a.Await(t.Context(), "k"),
	} {
		if !errors.Is(err, lock.ErrForeign) {
			t.Errorf("%s: got error %v, want %v", what, err, lock.ErrForeign)
		}
	}
	notTaken(t, a, "k", 1, lock.ErrForeign)
	if !b.Damaged(t, "k") {
		t.Error("it was changed")
	}
}

func fullForAll(t *testing.T, b SemaphoreBackend) {
	a, z := b.start(t), b.start(t)
	create(t, a, "k", 3)
	one := take(t, a, "k", 1)
	two := take(t, a, "k", 1) // one replica may hold several
	three := take(t, z, "k", 1)
	notTaken(t, a, "k", 1, lock.ErrFull)
	notTaken(t, z, "k", 1, lock.ErrFull)
	stands(t, z, "k", 3, 3)
	releaseAll(t, two)
	ended(t, two[0], lock.ErrReleased)
	two = take(t, z, "k", 1) // at once
	notTaken(t, a, "k", 1, lock.ErrFull)
	create(t, a, "other", 1)
	other := take(t, a, "other", 1)
	for _, leases := range [][]lock.Lease{one, two, three, other} {
		releaseAll(t, leases)
	}
	stands(t, a, "k", 3, 0)
}

func allOrNone(t *testing.T, b SemaphoreBackend) {
	a, z := b.start(t), b.start(t)
	create(t, a, "k", 5)
	three := take(t, a, "k", 3)
	notTaken(t, z, "k", 3, lock.ErrFull)
	stands(t, z, "k", 5, 3)
	two := take(t, z, "k", 2)
	releaseAll(t, three)
	releaseAll(t, two[:1])
	stands(t, a, "k", 5, 1)
	notTaken(t, a, "k", 5, lock.ErrFull)
	notTaken(t, a, "k", 6, lock.ErrFull) // more than there ever are
	four := take(t, a, "k", 4)
	releaseAll(t, four)
	releaseAll(t, two[1:])
}

func resizeUpAndDown(t *testing.T, b SemaphoreBackend) {
	a, z := b.start(t), b.start(t)
	create(t, a, "k", 1)
	leases := take(t, a, "k", 1)
	notTaken(t, z, "k", 1, lock.ErrFull)
	resize(t, z, "k", 3)
	leases = append(leases, take(t, a, "k", 2)...)
	resize(t, a, "k", 1)
	stands(t, z, "k", 1, 3)
	for _, lease := range leases {
		if err := lease.Context().Err(); err != nil {
			t.Errorf("a fall threw a holder out: %v", context.Cause(lease.Context()))
		}
		notTaken(t, z, "k", 1, lock.ErrFull)
		release(t, lease)
	}
	resize(t, a, "k", 0)
	notTaken(t, z, "k", 1, lock.ErrFull)
	resize(t, a, "k", 1)
	releaseAll(t, take(t, z, "k", 1))
}

func inspectHolders(t *testing.T, b SemaphoreBackend) {
	a, z := b.start(t), b.start(t)
	create(t, a, "k", 3)
	one, err := a.Take(t.Context(), "k", 1, []byte("one of a"))
	if err != nil {
		t.Fatal(err)
	}
	two, err := z.Take(t.Context(), "k", 2, []byte("two of z"))
	if err != nil {
		t.Fatal(err)
	}
	sem := inspect(t, a, "k")
	var values []string
	sessions := map[string]bool{}
	for _, h := range sem.Holders {
		values = append(values, string(h.Value))
		sessions[h.Session] = true
	}
	slices.Sort(values)
	if want := []string{"one of a", "two of z", "two of z"}; sem.Name != "k" || sem.Slots != 3 || !slices.Equal(values, want) || len(sessions) != 3 {
		t.Errorf("got %+v, want 3 slots, held by three who say %q", sem, want)
	}
	releaseAll(t, append(one, two...))
}

func releaseSlotTwice(t *testing.T, b SemaphoreBackend) {
	a := b.start(t)
	create(t, a, "k", 1)
	first := take(t, a, "k", 1)
	releaseAll(t, first)
	second := take(t, a, "k", 1) // it may well be by the same session
	releaseAll(t, first)
	stands(t, a, "k", 1, 1)
	if err := second[0].Context().Err(); err != nil {
		t.Errorf("the other's lease ended: %v", context.Cause(second[0].Context()))
	}
	releaseAll(t, second)
}

func drainWaits(t *testing.T, b SemaphoreBackend) {
	a, z := b.start(t), b.start(t)
	create(t, a, "k", 3)
	leases := take(t, a, "k", 3)
	if err := z.Drain(t.Context(), "k"); err != nil { // no more are held than may be
		t.Errorf("drain: %v", err)
	}
	resize(t, z, "k", 1)
	begun, drained := make(chan struct{}), make(chan error, 1)
	go func() {
		close(begun)
		drained <- z.Drain(t.Context(), "k")
	}()
	<-begun
	release(t, leases[0])
	select {
	case err := <-drained:
		t.Errorf("drained with 2 of 1 slots held (%v)", err)
	case <-time.After(100 * time.Millisecond):
	}
	release(t, leases[1])
	select {
	case err := <-drained:
		if err != nil {
			t.Errorf("drain: %v", err)
		}
	case <-time.After(maxWait):
		t.Fatal("drain did not end")
	}
	release(t, leases[2])
}

func destroyHeld(t *testing.T, b SemaphoreBackend) {
	a, z := b.start(t), b.start(t)
	create(t, a, "k", 2)
	create(t, a, "other", 2)
	leases, other := take(t, a, "k", 2), take(t, a, "other", 1)
	if err := z.Destroy(t.Context(), "k", false); !errors.Is(err, lock.ErrInUse) {
		t.Errorf("destroy: got error %v, want %v", err, lock.ErrInUse)
	}
	if err := z.Destroy(t.Context(), "k", true); err != nil {
		t.Errorf("destroy by force: %v", err)
	}
	for _, lease := range leases {
		ended(t, lease, lock.ErrRevoked)
		if err := lease.Release(context.Background()); !errors.Is(err, lock.ErrRevoked) {
			t.Errorf("release: got error %v, want %v", err, lock.ErrRevoked)
		}
	}
	notTaken(t, a, "k", 1, lock.ErrNoSemaphore)
	releaseAll(t, other)
}

// destroyedAndMadeAgain: whose slot was revoked may still be working, so nobody
// gets it before he has let go.
func destroyedAndMadeAgain(t *testing.T, b SemaphoreBackend) {
	a, z := b.start(t), b.start(t)
	create(t, a, "k", 1)
	lease := take(t, a, "k", 1)[0]
	if err := z.Destroy(t.Context(), "k", true); err != nil {
		t.Errorf("destroy by force: %v", err)
	}
	create(t, z, "k", 1)
	if leases, err := z.Take(t.Context(), "k", 1, nil); err == nil {
		if lease.Context().Err() == nil {
			t.Error("the slot was granted anew before its holder could notice")
		}
		releaseAll(t, leases)
	}
	ended(t, lease, lock.ErrRevoked)
	_ = lease.Release(context.Background())
	until(t, z, "a slot", func() bool {
		leases, err := z.Take(t.Context(), "k", 1, nil)
		releaseAll(t, leases)
		return err == nil
	})
}

// lostSession: the slots of a dead replica are granted again after the
// lock-delay, and not before.
func lostSession(t *testing.T, b SemaphoreBackend) {
	a, z := b.start(t), b.start(t)
	create(t, a, "k", 2)
	leases, other := take(t, a, "k", 1), take(t, z, "k", 1)
	session := a.Session()
	began := time.Now()
	b.EndSession(t, session)
	ended(t, leases[0], lock.ErrLost)
	if err := leases[0].Release(context.Background()); !errors.Is(err, lock.ErrLost) {
		t.Errorf("release a lost slot: got error %v, want %v", err, lock.ErrLost)
	}
	var again []lock.Lease
	ctx, cancel := context.WithTimeout(t.Context(), maxWait)
	defer cancel()
	for again == nil {
		var err error
		if again, err = z.Take(ctx, "k", 1, nil); err == nil {
			break
		}
		if !errors.Is(err, lock.ErrFull) && !errors.Is(err, lock.ErrDelayed) {
			t.Fatalf("take during the lock-delay: %v", err)
		}
		if err := z.Await(ctx, "k"); err != nil {
			t.Fatalf("await: %v", err)
		}
	}
	took := time.Since(began)
	t.Logf("the slot was granted again %v after its holder's death", took.Round(time.Millisecond))
	if took < b.LockDelay {
		t.Errorf("that is before the lock-delay of %v was over", b.LockDelay)
	}
	if err := other[0].Context().Err(); err != nil {
		t.Errorf("another replica's slot ended too: %v", context.Cause(other[0].Context()))
	}
	releaseAll(t, append(again, other...))
	until(t, a, "another session", func() bool { return a.Session() != "" && a.Session() != session })
	releaseAll(t, take(t, a, "k", 2))
}

func revokedSlot(t *testing.T, b SemaphoreBackend) {
	a, z := b.start(t), b.start(t)
	create(t, a, "k", 2)
	one, err := a.Take(t.Context(), "k", 1, []byte("one"))
	if err != nil {
		t.Fatal(err)
	}
	two, err := a.Take(t.Context(), "k", 1, []byte("two"))
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range inspect(t, z, "k").Holders {
		if string(h.Value) == "one" {
			b.Revoke(t, "k", h)
		}
	}
	ended(t, one[0], lock.ErrRevoked)
	if err := two[0].Context().Err(); err != nil {
		t.Errorf("the other lease ended too: %v", context.Cause(two[0].Context()))
	}
	if err := one[0].Release(context.Background()); !errors.Is(err, lock.ErrRevoked) {
		t.Errorf("release a revoked slot: got error %v, want %v", err, lock.ErrRevoked)
	}
	releaseAll(t, take(t, z, "k", 1)) // at once: its holder has let go
	releaseAll(t, two)
	stands(t, z, "k", 2, 0)
}

func awaitWakes(t *testing.T, b SemaphoreBackend) {
	a, z := b.start(t), b.start(t)
	create(t, a, "k", 1)
	if err := a.Await(t.Context(), "k"); err != nil { // one is free
		t.Fatal(err)
	}
	for _, test := range []struct {
		name   string
		waits  replica
		happen func(lease lock.Lease)
	}{
		{"a release here", a, func(lease lock.Lease) { release(t, lease) }},
		{"a release elsewhere", z, func(lease lock.Lease) { release(t, lease) }},
		{"a raise", z, func(lease lock.Lease) { resize(t, a, "k", 2) }},
	} {
		// Those who are not woken look now and then, which takes longer than this. On a busy machine
		// waking them may take as long once, but not each time.
		const slow, tries = 5 * time.Second, 5
		var took time.Duration
		for range tries {
			lease := take(t, a, "k", 1)[0]
			took = awaken(t, test.waits, func() { test.happen(lease) })
			t.Logf("%s woke all after %v", test.name, took.Round(100*time.Microsecond))
			release(t, lease)
			resize(t, a, "k", 1)
			if took <= slow {
				break
			}
		}
		if took > slow {
			t.Errorf("%s did not wake all within %v, in %d tries", test.name, slow, tries)
		}
	}
}

// awaken returns how long after happen those wake who wait for a slot.
func awaken(t *testing.T, waits replica, happen func()) time.Duration {
	t.Helper()
	const waiters = 5
	woken := make(chan error, waiters)
	var begun sync.WaitGroup
	for range waiters {
		begun.Add(1)
		go func() {
			begun.Done()
			woken <- waits.Await(t.Context(), "k")
		}()
	}
	begun.Wait()
	select {
	case err := <-woken:
		t.Errorf("woken with no slot free (%v)", err)
	case <-time.After(200 * time.Millisecond): // nothing tells that they wait
	}
	began := time.Now()
	happen()
	for range waiters {
		select {
		case err := <-woken:
			if err != nil {
				t.Errorf("await: %v", err)
			}
		case <-time.After(maxWait):
			t.Fatalf("not all were woken within %v", maxWait)
		}
	}
	return time.Since(began)
}

func awaitEnds(t *testing.T, b SemaphoreBackend) {
	a := b.start(t)
	create(t, a, "k", 0)
	ctx, cancel := context.WithCancel(t.Context())
	errs := make(chan error, 2)
	for range 2 {
		go func() { errs <- a.Await(ctx, "k") }()
	}
	cancel()
	for range 2 {
		if err := <-errs; !errors.Is(err, context.Canceled) {
			t.Errorf("await: got error %v, want %v", err, context.Canceled)
		}
	}
}

func goodByeSlots(t *testing.T, b SemaphoreBackend) {
	a, z := b.start(t), b.start(t)
	create(t, a, "k", 3)
	leases := take(t, a, "k", 3)
	releaseAll(t, leases[:1])
	began := time.Now()
	a.stop()
	for _, lease := range leases[1:] {
		ended(t, lease, lock.ErrLost)
	}
	releaseAll(t, take(t, z, "k", 1)) // at once: nothing was left to a lock-delay

	// Those who have not let go may be working still.
	defer func() {
		if took := time.Since(began); took < b.LockDelay-50*time.Millisecond {
			t.Errorf("the slots of those who have not let go were had after %v, before the lock-delay of %v was over", took, b.LockDelay)
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), maxWait)
	defer cancel()
	for {
		leases, err := z.Take(ctx, "k", 3, nil)
		if err == nil {
			releaseAll(t, leases)
			return
		}
		if !errors.Is(err, lock.ErrDelayed) && !errors.Is(err, lock.ErrFull) {
			t.Fatalf("take: got error %v", err)
		}
		if err := z.Await(ctx, "k"); err != nil {
			t.Fatalf("await: %v", err)
		}
	}
}

// neverMoreThanTheLimit lets many goroutines of several lockers fight for a few
// slots, one or two at a time; those inside look around. The first stays
// until he has company.
func neverMoreThanTheLimit(t *testing.T, b SemaphoreBackend) {
	const slots, workers, rounds = 3, 6, 12
	var inside, most atomic.Int32
	var entries atomic.Int64
	var replicas []replica
	for range 3 {
		replicas = append(replicas, b.start(t))
	}
	create(t, replicas[0], "k", slots)
	ctx, cancel := context.WithTimeout(t.Context(), 4*maxWait)
	defer cancel()
	var wg sync.WaitGroup
	began := time.Now()
	for i := range workers * len(replicas) {
		r := replicas[i%len(replicas)]
		n := 1 + i%4/3 // every fourth wants two
		wg.Go(func() {
			for done := 0; done < rounds; {
				leases, err := r.Take(ctx, "k", n, nil)
				switch {
				case err == nil:
				case ctx.Err() != nil:
					return
				case errors.Is(err, lock.ErrFull):
					_ = r.Await(ctx, "k")
					continue
				case late(err):
					continue
				default:
					t.Errorf("take: %v", err)
					return
				}
				now := inside.Add(int32(n))
				if now > slots {
					t.Errorf("%d of %d slots held at once", now, slots)
				}
				for m := most.Load(); now > m && !most.CompareAndSwap(m, now); m = most.Load() {
				}
				entries.Add(int64(n))
				for time.Sleep(5 * time.Millisecond); most.Load() < 2 && ctx.Err() == nil; {
					time.Sleep(time.Millisecond)
				}
				inside.Add(-int32(n))
				releaseAll(t, leases)
				done++
			}
		})
	}
	wg.Wait()
	t.Logf("%d slots granted in %v, at most %d held at once", entries.Load(), time.Since(began).Round(time.Millisecond), most.Load())
	if ctx.Err() != nil || most.Load() < 2 {
		t.Errorf("in %v at most %d of %d slots were held at once", time.Since(began), most.Load(), slots)
	}
	stands(t, replicas[0], "k", slots, 0)
}
