package consul

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/boottime"
	"onejob/internal/servers"
	"onejob/internal/testenv"
	"onejob/lock"
)

// takeSnapshot takes a snapshot of a Consul, and returns what restores it.
func takeSnapshot(t *testing.T, kv *testenv.KV) (restore func()) {
	t.Helper()
	snapshot, _, err := kv.Client.Snapshot().Save(nil)
	if err != nil {
		t.Fatal(err)
	}
	saved, err := io.ReadAll(snapshot)
	if err := errors.Join(err, snapshot.Close()); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		if err := kv.Client.Snapshot().Restore(nil, bytes.NewReader(saved)); err != nil {
			t.Fatal(err)
		}
	}
}

// A snapshot brings back a lock and a slot that were held when it was taken, and
// have been given back since. Their session lives on, so nobody but its replica
// may release them, and it does. What is held now and was held then stays held.
func TestLeakedLocksOfARestoredSnapshotAreReleased(t *testing.T) {
	t.Parallel()
	_, kv := testenv.OwnConsul(t, servers.ConsulConfig{})
	holder, other := start(t, config(t, kv)), start(t, config(t, kv))
	if err := holder.Semaphores().Create(t.Context(), "k", 1); err != nil {
		t.Fatal(err)
	}
	if err := holder.Semaphores().Create(t.Context(), "busy", 1); err != nil {
		t.Fatal(err)
	}
	before, stays := acquire(t, holder, "given-back"), acquire(t, holder, "kept")
	slotBefore, slotStays := takeOne(t, holder, "k"), takeOne(t, holder, "busy")

	restore := takeSnapshot(t, kv)
	release(t, before)
	release(t, slotBefore)
	restore()
	if pair := get(t, kv, "tasks/given-back"); pair == nil || pair.Session != holder.Session() {
		t.Fatalf("after the restore the key is %+v, not the holder's", pair)
	}
	if _, err := try(other, "given-back"); !errors.Is(err, lock.ErrHeld) {
		t.Errorf("another's try: got error %v, want %v", err, lock.ErrHeld)
	}
	notOne(t, other, "k", lock.ErrFull)

	// Each 4 s, but a busy machine looks less often: see nextLeakScan.
	const within = 5 * time.Minute
	testenv.Eventually(t, within, "the key is released", func() bool { return get(t, kv, "tasks/given-back") == nil })
	release(t, acquire(t, other, "given-back"))
	testenv.Eventually(t, within, "the slot is released", func() bool { return len(look(t, other, "k").Holders) == 0 })
	release(t, awaitOne(t, other, "k"))

	for _, lease := range []lock.Lease{stays, slotStays} {
		if lease.Context().Err() != nil {
			t.Errorf("what was kept has ended: %v", lease.Context().Err())
		}
		release(t, lease)
	}
}

// A limit that a restored snapshot does not know at all: who has seen its holders lets nobody in,
// though the limit is made anew.
func TestLimitThatARestoredSnapshotForgets(t *testing.T) {
	t.Parallel()
	_, kv := testenv.OwnConsul(t, servers.ConsulConfig{})
	other := start(t, config(t, kv))
	restore := takeSnapshot(t, kv)
	if err := other.Semaphores().Create(t.Context(), "k", 1); err != nil {
		t.Fatal(err)
	}
	holder := stranger(t, kv, other.limitFolder("k"), 1)
	if _, err := holder.Acquire(nil); err != nil {
		t.Fatal(err)
	}
	notOne(t, other, "k", lock.ErrFull)
	began := boottime.Now()
	restore()
	notOne(t, other, "k", lock.ErrNoSemaphore)
	if err := other.Semaphores().Create(t.Context(), "k", 1); err != nil {
		t.Fatal(err)
	}
	notOne(t, other, "k", lock.ErrDelayed)
	release(t, awaitOne(t, other, "k"))
	if took, least := boottime.Now().Sub(began), other.membership.wait(end{}); took < least {
		t.Errorf("the slot was had %v after the restore, and its holder may have believed in it for %v", took, least)
	}
}

// Who gives back a slot that a restored snapshot has brought back, or changes the limit, does
// not hide from others that it was restored.
func TestSlotThatIsGivenBackAfterARestore(t *testing.T) {
	t.Parallel()
	_, kv := testenv.OwnConsul(t, servers.ConsulConfig{})
	first, second := start(t, config(t, kv)), start(t, config(t, kv))
	if err := first.Semaphores().Create(t.Context(), "k", 2); err != nil {
		t.Fatal(err)
	}
	mine := awaitOne(t, first, "k")
	holder := stranger(t, kv, first.limitFolder("k"), 2)
	restore := takeSnapshot(t, kv)
	if _, err := holder.Acquire(nil); err != nil {
		t.Fatal(err)
	}
	notOne(t, first, "k", lock.ErrFull)
	notOne(t, second, "k", lock.ErrFull)
	restore()
	if err := mine.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := first.Semaphores().Resize(t.Context(), "k", 1); err != nil {
		t.Fatal(err)
	}
	if n := len(look(t, second, "k").Holders); n != 1 {
		t.Errorf("the .lock has %d holders, not the one of the snapshot", n)
	}
	notOne(t, second, "k", lock.ErrDelayed)
	release(t, awaitOne(t, second, "k"))
	if s := look(t, second, "k"); s.Slots != 1 {
		t.Errorf("the limit is %d", s.Slots)
	}
}

// One look for leaked locks that took long puts off nothing: it may have waited for a leader.
func TestNextLeakScan(t *testing.T) {
	t.Parallel()
	const verify = 3 * time.Second
	for _, test := range []struct{ took, before, want time.Duration }{
		{0, 0, time.Minute},
		{10 * time.Second, 0, time.Minute},
		{10 * time.Millisecond, 10 * time.Second, time.Minute},
		{time.Second, 2 * time.Second, 500 * time.Second},
		{8 * time.Second, 9 * time.Second, 10 * time.Minute},
	} {
		if got := nextLeakScan(verify, test.took, test.before); got != test.want {
			t.Errorf("after %v and %v: %v, want %v", test.before, test.took, got, test.want)
		}
	}
}

// stranger is a program of HashiCorp's at a limit: as a holder it changes nothing by itself when it
// loses its slot.
func stranger(t *testing.T, kv *testenv.KV, folder string, slots int) *api.Semaphore {
	t.Helper()
	session, _, err := kv.Client.Session().Create(&api.SessionEntry{TTL: "1m"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	s, err := kv.Client.SemaphoreOpts(&api.SemaphoreOptions{Prefix: folder, Limit: slots, Session: session})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// A restored snapshot has forgotten who took a slot since. Nobody else takes that as long as its
// holder may not have noticed: the .lock is an earlier one than was seen before.
func TestSlotThatARestoredSnapshotForgets(t *testing.T) {
	t.Parallel()
	_, kv := testenv.OwnConsul(t, servers.ConsulConfig{})
	other := start(t, config(t, kv))
	if err := other.Semaphores().Create(t.Context(), "k", 1); err != nil {
		t.Fatal(err)
	}
	holder := stranger(t, kv, other.limitFolder("k"), 1)
	restore := takeSnapshot(t, kv)
	if _, err := holder.Acquire(nil); err != nil {
		t.Fatal(err)
	}
	notOne(t, other, "k", lock.ErrFull)
	began := boottime.Now()
	restore()
	notOne(t, other, "k", lock.ErrDelayed)
	if n := len(look(t, other, "k").Holders); n != 0 {
		t.Errorf("the restored .lock has %d holders", n)
	}
	release(t, awaitOne(t, other, "k"))
	if took, least := boottime.Now().Sub(began), other.membership.wait(end{}); took < least {
		t.Errorf("the slot was had %v after the restore, and its holder may have believed in it for %v", took, least)
	}
}

// A sign of life that could not be seen may have been given: silence counts from when the keys
// of the replicas could not be had last.
func TestSilenceThatCouldNotBeHeard(t *testing.T) {
	t.Parallel()
	cfg := config(t, testenv.Consul(t))
	cfg.Client.Address = "127.0.0.1:1" // nothing listens there
	l, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	long := boottime.Now().Add(-time.Hour)
	l.membership.signs = map[string]sign{"held": {5, long}, "gone": {0, long}}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); l.membership.watch(ctx) }()
	testenv.Eventually(t, 30*time.Second, "the silence of a held key counts from anew", func() bool { return l.membership.quiet("held", 5, boottime.Now()) < time.Minute })
	cancel()
	<-ended
	if quiet := l.membership.quiet("gone", 0, boottime.Now()); quiet < time.Hour {
		t.Errorf("the session whose key has gone has been silent for %v", quiet)
	}
}
