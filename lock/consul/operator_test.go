package consul

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/internal/retry"
	"onejob/internal/testenv"
	"onejob/lock"
)

// acquireMany locks n keys at the same time.
func acquireMany(t testing.TB, l *Locker, n int) []lock.Lease {
	t.Helper()
	leases := make([]lock.Lease, n)
	together(n, func(i int) {
		var err error
		if leases[i], err = try(l, fmt.Sprint("many-", i)); err != nil {
			t.Errorf("acquire: %v", err)
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	return leases
}

// together calls f with 0 to n-1 from as many goroutines.
func together(n int, f func(int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { f(i) })
	}
	wg.Wait()
}

func deleteKey(t *testing.T, kv *testenv.KV, key string) {
	t.Helper()
	if _, err := kv.Client.KV().Delete(kv.Prefix+"/"+key, nil); err != nil {
		t.Fatal(err)
	}
}

// TestManyTogether locks and releases many keys at once, some of which another
// replica holds, and counts the transactions.
func TestManyTogether(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	p := newProxy(t, kv.Addr)
	cfg := patient(t, kv)
	cfg.Verify = time.Minute
	other := start(t, cfg)
	cfg.Client.Address = p.Addr
	l := start(t, cfg)

	const n = 256
	taken := map[int]lock.Lease{}
	for i := 0; i < n; i += 16 {
		taken[i] = acquire(t, other, fmt.Sprint("key-", i))
	}
	leases, errs := make([]lock.Lease, n), make([]error, n)
	together(n, func(i int) { leases[i], errs[i] = tryAgain(l, fmt.Sprint("key-", i)) })
	for i, err := range errs {
		if taken[i] != nil && !errors.Is(err, lock.ErrHeld) || taken[i] == nil && err != nil {
			t.Errorf("key %d, held by another: %v: got error %v", i, taken[i] != nil, err)
		}
	}
	if t.Failed() {
		t.FailNow()
	}
	together(n, func(i int) {
		if leases[i] != nil {
			release(t, leases[i])
		}
	})
	locks, deletes := p.count(with(api.KVLock)), p.count(with(api.KVDelete))
	t.Logf("%d keys: %d transactions to lock, %d to release", n, locks, deletes)
	if locks > n/8 || deletes > n/8 {
		t.Errorf("%d keys took %d transactions to lock and %d to release", n, locks, deletes)
	}
	for _, lease := range taken {
		release(t, lease)
	}
}

// TestReleaseBatch releases keys in one transaction of which an operator has
// deleted one, given away another, and written to a third.
func TestReleaseBatch(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	cfg := patient(t, kv)
	cfg.Verify = time.Hour // or it would notice first
	other := start(t, cfg)
	l := start(t, cfg)
	var list []*lease
	for _, key := range []string{"a", "deleted", "b", "given away", "written to", "c"} {
		list = append(list, acquire(t, l, key).(*lease))
	}
	deleteKey(t, kv, "tasks/deleted")
	deleteKey(t, kv, "tasks/given away")
	theirs := acquire(t, other, "given away")
	if _, err := kv.Client.KV().Put(&api.KVPair{Key: kv.Prefix + "/tasks/written to", Value: []byte("by hand")}, nil); err != nil {
		t.Fatal(err)
	}

	l.deleteKeys(t.Context(), list)
	for _, ls := range list {
		var want error
		if ls.key == "given away" {
			want = lock.ErrRevoked
		}
		if !errors.Is(ls.err, want) {
			t.Errorf("release %s: got error %v, want %v", ls.key, ls.err, want)
		}
	}
	for _, key := range []string{"a", "deleted", "b", "written to", "c"} {
		if s := holder(t, kv, "tasks/"+key); s != "" {
			t.Errorf("key %s is still held by %s", key, s)
		}
	}
	if s := holder(t, kv, "tasks/given away"); s != other.Session() {
		t.Errorf("the key of another session was taken from it: it is held by %q", s)
	}
	release(t, theirs)
}

// TestKeyReleasedByOperator releases a key as `?release=` does, which leaves it
// there without a session: the lease ends, and the key can be locked again.
func TestKeyReleasedByOperator(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	l := start(t, patient(t, kv))
	lease := acquire(t, l, "k")
	if ok, _, err := kv.Client.KV().Release(&api.KVPair{Key: kv.Prefix + "/tasks/k", Session: l.Session()}, nil); !ok || err != nil {
		t.Fatal(ok, err)
	}
	ended(t, lease, lock.ErrRevoked)
	if _, err := try(l, "k"); !errors.Is(err, lock.ErrHeldHere) {
		t.Errorf("acquire before the holder let go: got error %v, want %v", err, lock.ErrHeldHere)
	}
	if err := lease.Release(t.Context()); !errors.Is(err, lock.ErrRevoked) {
		t.Errorf("release: got error %v, want %v", err, lock.ErrRevoked)
	}
	ctx, cancel := context.WithTimeout(t.Context(), maxWait)
	defer cancel()
	if err := l.Await(ctx, "k"); err != nil {
		t.Errorf("await: %v", err)
	}
	release(t, acquire(t, l, "k"))
}

// TestReplicaKeyDeleted deletes the key that shows a replica to the others: it
// comes back, and nobody dies of it, then or later.
func TestReplicaKeyDeleted(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	l, observer := start(t, config(t, kv)), start(t, config(t, kv))
	session := l.Session()
	lease := acquire(t, l, "k")
	seen := func() bool {
		observer.membership.mu.Lock()
		defer observer.membership.mu.Unlock()
		_, alive := observer.membership.alive[session]
		return alive
	}
	notDead := func() {
		t.Helper()
		if dead, err := observer.Dead(t.Context(), []string{session}); err != nil || len(dead) != 0 {
			t.Errorf("dead are %v (%v), want nobody", dead, err)
		}
	}
	testenv.Eventually(t, maxWait, "the replica is seen", seen)
	deleteKey(t, kv, "replicas/"+session)
	testenv.Eventually(t, maxWait, "the key is back", func() bool { notDead(); return holder(t, kv, "replicas/"+session) == session })
	testenv.Eventually(t, maxWait, "the replica is seen", seen)
	notDead()
	if lease.Context().Err() != nil || l.Session() != session {
		t.Errorf("the session was lost: %v", context.Cause(lease.Context()))
	}

	// A look that falls into the time when the key is away.
	observer.membership.update(t.Context(), map[string]uint64{observer.Session(): 1})
	notDead()

	// The lock-delay is counted from the session's end, and not from the time
	// when its key was away.
	retry.Pause(t.Context(), lockDelay) // so that the one would be over
	end := time.Now()
	if _, err := kv.Client.Session().Destroy(session, nil); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, maxWait, "the session is dead", func() bool {
		dead, err := observer.Dead(t.Context(), []string{session})
		return err == nil && len(dead) == 1
	})
	if took := time.Since(end); took < lockDelay {
		t.Errorf("the session was called dead after %v, before the lock-delay of %v was over", took, lockDelay)
	}
	_ = lease.Release(t.Context())
}

// TestAgentForgetsTheCheck takes the registration away from the agent: the
// session ends, which is noticed at once.
func TestAgentForgetsTheCheck(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	cfg := config(t, kv)
	cfg.CheckTTL = 2 * time.Minute // a deadline does not come into it
	l := start(t, cfg)
	session := l.Session()
	lease := acquire(t, l, "k")
	if err := kv.Client.Agent().ServiceDeregister(l.current().service); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	took := ended(t, lease, lock.ErrLost).Sub(began)
	if took > cfg.CheckTTL/2 {
		t.Errorf("the lease ended %v later", took)
	}
	_ = lease.Release(t.Context())
	again(t, l, session)
}

// TestSessionEndsUnderVerify ends the session while the keys are being looked
// at all the time: every lease is lost, and none revoked.
func TestSessionEndsUnderVerify(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	cfg := config(t, kv)
	cfg.Verify = 100 * time.Millisecond
	cfg.LockDelay = time.Millisecond // the same keys are asked for again
	l := start(t, cfg)
	for range 5 {
		ready(t, l)
		session := l.Session()
		leases := acquireMany(t, l, 8)
		live := l.current()
		if _, err := kv.Client.Session().Destroy(session, nil); err != nil {
			t.Fatal(err)
		}
		l.verify(t.Context(), live.leases)
		for _, lease := range leases {
			ended(t, lease, lock.ErrLost)
			_ = lease.Release(t.Context())
		}
		testenv.Eventually(t, maxWait, "another session", func() bool { s := l.Session(); return s != "" && s != session })
	}
}

// TestLockDelayIsNotHammered waits for a key whose holder died, as `onejob lock`
// does, and counts how often it asks.
func TestLockDelayIsNotHammered(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	p := newProxy(t, kv.Addr)
	cfg := config(t, kv)
	dying := start(t, cfg)
	cfg.Client.Address = p.Addr
	l := start(t, cfg)
	lease := acquire(t, dying, "k")
	if _, err := try(l, "k"); !errors.Is(err, lock.ErrHeld) || errors.Is(err, lock.ErrHeldHere) {
		t.Fatalf("acquire: got error %v, want %v", err, lock.ErrHeld)
	}
	got := make(chan lock.Lease, 1)
	testenv.Go(t, func() {
		for {
			if err := l.Await(t.Context(), "k"); err != nil {
				t.Errorf("await: %v", err)
				close(got)
				return
			}
			lease, err := try(l, "k")
			if err == nil || !errors.Is(err, lock.ErrDelayed) {
				if err != nil {
					t.Errorf("acquire: %v", err)
				}
				got <- lease
				return
			}
		}
	})
	began := time.Now()
	if _, err := kv.Client.Session().Destroy(dying.Session(), nil); err != nil {
		t.Fatal(err)
	}
	theirs := <-got
	if took := time.Since(began); took < lockDelay {
		t.Errorf("the key was had %v after its holder's death, before the lock-delay was over", took)
	}
	if n := p.count(with(api.KVLock)); n > 8 {
		t.Errorf("%d transactions asked for the key in a lock-delay of %v", n, lockDelay)
	}
	if theirs != nil {
		release(t, theirs)
	}
	_ = lease.Release(t.Context())
}
