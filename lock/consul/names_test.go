package consul

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/boottime"
	"onejob/internal/retry"
	"onejob/internal/testenv"
	"onejob/lock"
)

func tryTask(l *Locker, id int64) (lock.Lease, error) {
	return l.Acquire(context.Background(), lock.Request{Session: l.Session(), Key: fmt.Sprint(id), Task: id, Value: []byte(`{"fence":1}`)})
}

func acquireTask(t testing.TB, l *Locker, id int64) lock.Lease {
	t.Helper()
	return granted(t, fmt.Sprint("task ", id), func() (lock.Lease, error) { return tryTask(l, id) })
}

func wantTask(t testing.TB, l *Locker, id int64, want error) {
	t.Helper()
	var lease lock.Lease
	err := persist(func() (err error) {
		lease, err = tryTask(l, id)
		return err
	})
	if err == nil {
		release(t, lease)
	}
	if !errors.Is(err, want) {
		t.Errorf("acquire task %d: got error %v, want %v", id, err, want)
	}
}

func keysBelow(t testing.TB, kv *testenv.KV, folder string) []string {
	t.Helper()
	keys, _, err := kv.Client.KV().Keys(kv.Prefix+folder, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

// reusing starts a locker, and waits until it knows that it may reuse names.
func reusing(t testing.TB, cfg Config) *Locker {
	t.Helper()
	l := start(t, cfg)
	testenv.Eventually(t, maxWait, "names are reused", l.membership.reusing.Load)
	return l
}

// x and y share a reused name, which is running/5.
const x, y = 5, 5 + names

func TestReusedNames(t *testing.T) {
	for name, test := range map[string]func(t *testing.T, kv *testenv.KV, a, b *Locker){
		"KeysDoNotGrowWithTasks": func(t *testing.T, kv *testenv.KV, a, b *Locker) {
			for i := range int64(20) {
				release(t, acquireTask(t, []*Locker{a, b}[i%2], x+i*names))
			}
			if keys := keysBelow(t, kv, "/running/"); len(keys) != 1 || len(keysBelow(t, kv, "/tasks/")) != 0 {
				t.Errorf("keys are left: %v", keys)
			}
			if s := holder(t, kv, "running/5"); s != "" {
				t.Errorf("the name is still held by %s", s)
			}
		},
		"AnotherTaskWithTheNameIsNotWaitedFor": func(t *testing.T, kv *testenv.KV, a, b *Locker) {
			for _, second := range []*Locker{b, a} { // another replica, or the same
				ly, lx := acquireTask(t, a, y), acquireTask(t, second, x)
				if s := holder(t, kv, "running/5"); s != a.Session() {
					t.Errorf("the reused name is held by %q", s)
				}
				if s := holder(t, kv, "tasks/5"); s != second.Session() {
					t.Errorf("the own name is held by %q", s)
				}
				release(t, lx)
				release(t, ly)
			}
		},
		"ATaskCollidesUnderTheReusedName": func(t *testing.T, kv *testenv.KV, a, b *Locker) {
			lx := acquireTask(t, a, x)
			wantTask(t, b, x, lock.ErrHeld)
			wantTask(t, a, x, lock.ErrHeld)
			release(t, lx)
			wantTask(t, b, x, nil)
		},
		"ATaskCollidesUnderItsOwnName": func(t *testing.T, kv *testenv.KV, a, b *Locker) {
			ly, lx := acquireTask(t, a, y), acquireTask(t, a, x)
			wantTask(t, b, x, lock.ErrHeld)
			release(t, ly) // the reused name is free now
			for range 2 {  // with and without knowing of the marker
				wantTask(t, b, x, lock.ErrHeld)
				wantTask(t, b, y, nil)
			}
			release(t, lx)
			wantTask(t, b, x, nil)
			if keys := keysBelow(t, kv, "/tasks/"); len(keys) != 0 {
				t.Errorf("keys are left: %v", keys)
			}
		},
		"AValueThatIsNotUnderstoodIsNotAnotherTask": func(t *testing.T, kv *testenv.KV, a, b *Locker) {
			lx := acquireTask(t, a, x)
			for _, value := range []string{"", "by hand", "77", "-1 {}", "5", `{"task_id":77}`} {
				if _, err := kv.Client.KV().Put(&api.KVPair{Key: kv.Prefix + "/running/5", Value: []byte(value)}, nil); err != nil {
					t.Fatal(err)
				}
				wantTask(t, b, x, lock.ErrHeld)
			}
			release(t, lx)
		},
		"MarkersGo": func(t *testing.T, kv *testenv.KV, a, b *Locker) {
			ly, lx := acquireTask(t, a, y), acquireTask(t, b, x)
			live, m := a.current(), fmt.Sprint("overflow/", groupOf(x))
			sweep := func() {
				for range 3 {
					a.findLeaked(t.Context(), live.leases)
					retry.Pause(t.Context(), lockDelay)
				}
			}
			sweep()
			if len(keysBelow(t, kv, "/"+m)) != 1 {
				t.Error("the marker is gone while a task is held under its own name")
			}
			release(t, lx)
			sweep()
			if len(keysBelow(t, kv, "/"+m)) != 0 {
				t.Error("the marker stays")
			}
			wantTask(t, b, x, nil)
			release(t, ly)
		},
		"ALeaseEndsIfItsNameIsGivenToAnother": func(t *testing.T, kv *testenv.KV, a, b *Locker) {
			lx := acquireTask(t, a, x)
			put := func(value string) {
				if _, err := kv.Client.KV().Put(&api.KVPair{Key: kv.Prefix + "/running/5", Value: []byte(value)}, nil); err != nil {
					t.Fatal(err)
				}
			}
			put(fmt.Sprint(x, " by hand"))
			a.verify(t.Context(), a.current().leases)
			if lx.Context().Err() != nil {
				t.Errorf("the lease ended though the key still names its task: %v", context.Cause(lx.Context()))
			}
			put(fmt.Sprint(y, " as a restored snapshot may say"))
			ended(t, lx, lock.ErrRevoked)
			_ = lx.Release(t.Context())
		},
		"LeakedNamesAreUnlocked": func(t *testing.T, kv *testenv.KV, a, b *Locker) {
			release(t, acquireTask(t, a, x))
			if ok, _, err := kv.Client.KV().Acquire(&api.KVPair{Key: kv.Prefix + "/running/5", Value: []byte("5 "), Session: a.Session()}, nil); !ok || err != nil {
				t.Fatal(ok, err)
			}
			a.findLeaked(t.Context(), a.current().leases)
			testenv.Eventually(t, maxWait, "the name is free", func() bool { return holder(t, kv, "running/5") == "" })
			wantTask(t, b, x, nil)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			kv := testenv.Consul(t)
			test(t, kv, reusing(t, patient(t, kv)), reusing(t, patient(t, kv)))
		})
	}
}

// TestLockDelayOfReusedNames ends the session of a holder: nobody gets its task before the lock-delay
// is over, under whichever name.
func TestLockDelayOfReusedNames(t *testing.T) {
	for name, hold := range map[string]func(t *testing.T, a, b *Locker) lock.Lease{
		"TheHolderHasItsOwnName": func(t *testing.T, a, b *Locker) lock.Lease {
			ly := acquireTask(t, b, y)
			defer release(t, ly)
			return acquireTask(t, a, x)
		},
		"TheReplicaHasAnotherTaskWithTheName": func(t *testing.T, a, b *Locker) lock.Lease {
			lx := acquireTask(t, a, x)
			acquireTask(t, b, y)
			return lx
		},
		"NamesAreNotReused": func(t *testing.T, a, b *Locker) lock.Lease {
			lx := acquireTask(t, a, x)
			b.membership.reuse(false)
			return lx
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			kv := testenv.Consul(t)
			cfg := config(t, kv)
			cfg.LockDelay = 5 * time.Second // the machine may be busy
			a, b := reusing(t, cfg), reusing(t, cfg)
			lx := hold(t, a, b)
			if _, err := kv.Client.Session().Destroy(a.Session(), nil); err != nil {
				t.Fatal(err)
			}
			wantTask(t, b, x, lock.ErrDelayed)
			ended(t, lx, lock.ErrLost)
			testenv.Eventually(t, maxWait, "the task is locked after the lock-delay", func() bool {
				lease, err := tryTask(b, x)
				if err == nil {
					release(t, lease)
				}
				return err == nil
			})
		})
	}
}

// TestMarkerDeleted deletes a marker as an operator may: the lease that needs it ends.
func TestMarkerDeleted(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	a := reusing(t, patient(t, kv))
	ly, lx := acquireTask(t, a, y), acquireTask(t, a, x)
	deleteKey(t, kv, fmt.Sprint("overflow/", groupOf(x)))
	ended(t, lx, lock.ErrRevoked)
	if own := keysBelow(t, kv, fmt.Sprint("/tasks/", x)); len(own) != 1 {
		t.Fatalf("the task has the keys %v of its own", own)
	}
	if err := lx.Release(t.Context()); !errors.Is(err, lock.ErrRevoked) {
		t.Errorf("release: got error %v, want %v", err, lock.ErrRevoked)
	}
	if own := keysBelow(t, kv, fmt.Sprint("/tasks/", x)); len(own) > 0 {
		t.Errorf("the task has the keys %v of its own, and nobody works under them", own)
	}
	release(t, ly)
}

// A task that is held under its own name is held for a replica, too, that has seen no marker of its
// group, and finds the reused name free.
func TestOwnNameIsSeenByOthers(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	a, b := reusing(t, patient(t, kv)), reusing(t, patient(t, kv))
	ly, lx := acquireTask(t, a, y), acquireTask(t, a, x)
	release(t, ly)
	if b.markers.has(groupOf(x)) {
		t.Fatal("it knows of the marker")
	}
	wantTask(t, b, x, lock.ErrHeld)
	release(t, lx)
	release(t, acquireTask(t, b, x))
}

// TestLookAtManyLeases has the regular look at held keys beside leases that come and go,
// more than fit into one request.
func TestLookAtManyLeases(t *testing.T) {
	t.Parallel()
	a := reusing(t, patient(t, testenv.Consul(t)))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	var looking sync.WaitGroup
	looking.Go(func() {
		for live := a.current(); live != nil && ctx.Err() == nil; live = a.current() {
			a.verify(ctx, live.leases)
		}
	})
	together(300, func(i int) {
		for ctx.Err() == nil {
			ls, err := tryTask(a, int64(1000+i))
			if errors.Is(err, lock.ErrLost) || Unavailable(err) { // on a busy machine
				return
			}
			if err != nil {
				t.Errorf("acquire task %d: %v", 1000+i, err)
				return
			}
			retry.Pause(ctx, 20*time.Millisecond)
			if err := ls.Release(ctx); err != nil && !errors.Is(err, lock.ErrLost) && !Unavailable(err) {
				t.Errorf("release: %v", err)
			}
		}
	})
	looking.Wait()
}

// TestLateLockOfAMarkedName applies a transaction late that was given up: its task is
// held under its own name by then, and stays so.
func TestLateLockOfAMarkedName(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	p := newProxy(t, kv.Addr)
	cfg := config(t, kv)
	cfg.Client.Address = p.Addr
	a, b := reusing(t, cfg), reusing(t, patient(t, kv))
	a.markers.add(groupOf(x))
	var late []byte
	var uri string
	var ly lock.Lease
	p.inject(on(func(r *http.Request) bool { return writes(r) && transacts(r, api.KVLock) }, 1, func(_ http.ResponseWriter, r *http.Request, _ http.HandlerFunc) {
		late, _ = io.ReadAll(r.Body)
		uri = r.URL.RequestURI()
		ly = acquireTask(t, b, y)
		panic(http.ErrAbortHandler)
	}))
	lx := acquireTask(t, a, x)
	p.inject(nil)
	release(t, ly)
	r, err := http.NewRequest(http.MethodPut, "http://"+kv.Addr+uri, bytes.NewReader(late))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusConflict {
		t.Errorf("the late request: status %d, want %d", resp.StatusCode, http.StatusConflict)
	}
	a.verify(t.Context(), a.current().leases)
	if err := context.Cause(lx.Context()); err != nil {
		t.Errorf("the lease has ended: %v", err)
	}
	release(t, lx)
}

// TestOlderReplica has a replica on the list that knows nothing of reused names: it and
// the newer ones collide.
func TestOlderReplica(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	l := reusing(t, config(t, kv))
	older, _, err := kv.Client.Session().CreateNoChecks(&api.SessionEntry{Behavior: "delete", LockDelay: time.Millisecond}, nil)
	if err != nil {
		t.Fatal(err)
	}
	hold := func(key, value string) bool {
		ok, _, err := kv.Client.KV().Acquire(&api.KVPair{Key: kv.Prefix + "/" + key, Value: []byte(value), Session: older}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return ok
	}
	if !hold("replicas/"+older, `{"name":"older"}`) || !hold("tasks/5", `{"task_id":5}`) {
		t.Fatal("the older replica could not lock")
	}
	testenv.Eventually(t, maxWait, "the older replica is seen", func() bool { return !l.membership.reusing.Load() })
	wantTask(t, l, x, lock.ErrHeld)
	ly := acquireTask(t, l, y)
	if hold(fmt.Sprint("tasks/", y), "") {
		t.Error("the older replica locks a task that a newer one has")
	}
	release(t, ly)
	if _, err := kv.Client.Session().Destroy(older, nil); err != nil {
		t.Fatal(err)
	}
	// Under its own name: another lock of the older one may be in its lock-delay, as this one
	// is for a millisecond.
	testenv.Eventually(t, maxWait, "the older replica's lock is free", func() bool {
		ls, err := tryTask(l, x)
		if err == nil {
			release(t, ls)
		}
		return err == nil
	})
	if l.membership.reusing.Load() {
		t.Error("names are reused as soon as the older replica's session has ended")
	}
	testenv.Eventually(t, 4*maxWait, "the older replica has gone", l.membership.reusing.Load)
	lx := acquireTask(t, l, x)
	if s := holder(t, kv, "running/5"); s != l.Session() {
		t.Errorf("the reused name is held by %q", s)
	}
	release(t, lx)
}

// TestUnansweredNames loses answers: what may be applied late must not take the name of
// another task away, nor make two tasks of it.
func TestUnansweredNames(t *testing.T) {
	for name, lose := range map[string]struct {
		verb  api.KVOp
		fault fault
	}{
		"OfLocks": {api.KVLock, swallow}, "OfUnlocks": {api.KVUnlock, swallow},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			kv := testenv.Consul(t)
			p := newProxy(t, kv.Addr)
			cfg := config(t, kv)
			cfg.Client.Address = p.Addr
			a, b := reusing(t, cfg), reusing(t, patient(t, kv))
			match := func(r *http.Request) bool { return writes(r) && transacts(r, lose.verb) }
			if lose.verb == api.KVUnlock {
				lease := acquireTask(t, a, x)
				p.inject(on(match, 1, lose.fault))
				release(t, lease)
			} else {
				p.inject(on(match, 1, lose.fault))
				release(t, acquireTask(t, a, x))
			}
			p.inject(nil)
			live := a.current()
			testenv.Eventually(t, maxWait, "the request is too old to be applied", func() bool {
				live.leases.mu.Lock()
				defer live.leases.mu.Unlock()
				ls := live.leases.own[a.taskKey(fmt.Sprint(x))]
				if ls != nil && ls.doubt != 0 {
					ls.doubt = boottime.Now().Add(-lateness) // saves waiting for it
				}
				return ls == nil
			})
			ly := acquireTask(t, a, y)
			if s := holder(t, kv, fmt.Sprint("tasks/", y)); s != a.Session() {
				t.Errorf("a name about which a request was not answered is used again by its session")
			}
			wantTask(t, b, y, lock.ErrHeld)
			release(t, ly)
			wantTask(t, b, y, nil)
		})
	}
}

// TestNoTaskIsHeldTwice lets three replicas lock and release a few tasks that share two
// names, as fast as they can, while keys are swept. No session is ended meanwhile: a lock-delay
// need not hold against those who hammer a key.
func TestNoTaskIsHeldTwice(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	var replicas []*Locker
	for range 3 {
		replicas = append(replicas, reusing(t, patient(t, kv)))
	}
	ids := []int64{5, 5 + names, 5 + 2*names, 6, 6 + names, 5 + groupSize}
	var mu sync.Mutex
	holders := map[int64]int{}
	var taken, refused, diverted, swept atomic.Int64
	ctx, cancel := context.WithTimeout(t.Context(), 4*maxWait)
	defer cancel()
	began := time.Now()
	enough := func() bool { // both kinds of names were used, and for a while
		return time.Since(began) > 4*time.Second && swept.Load() > 0 && diverted.Load() > 0 && diverted.Load() < taken.Load()
	}
	together(24, func(i int) {
		l := replicas[i%len(replicas)]
		for ctx.Err() == nil && !enough() {
			id := ids[rand.N(len(ids))]
			ls, err := tryTask(l, id)
			if err != nil {
				if refused.Add(1); !errors.Is(err, lock.ErrHeld) && !errors.Is(err, lock.ErrLost) && !errors.Is(err, lock.ErrDelayed) && !Unavailable(err) {
					t.Errorf("acquire task %d: %v", id, err)
				}
				retry.Pause(ctx, rand.N(2*time.Millisecond))
				continue
			}
			mu.Lock()
			holders[id]++
			if holders[id] > 1 {
				t.Errorf("task %d has %d holders", id, holders[id])
			}
			mu.Unlock()
			if ls.(*lease).path == ls.(*lease).own {
				diverted.Add(1) // before taken, lest that seems to be more
			}
			taken.Add(1)
			retry.Pause(ctx, rand.N(3*time.Millisecond))
			mu.Lock()
			holders[id]--
			mu.Unlock()
			if err := ls.Release(ctx); err != nil && !errors.Is(err, lock.ErrLost) && !Unavailable(err) { // on a busy machine a session may be lost
				t.Errorf("release: %v", err)
			}
			if live := l.current(); live != nil && rand.N(50) == 0 {
				l.findLeaked(ctx, live.leases)
				swept.Add(1)
			}
		}
	})
	t.Logf("taken %d times, %d of them under their own names, refused %d times; swept %d times", taken.Load(), diverted.Load(), refused.Load(), swept.Load())
	if diverted.Load() == 0 || diverted.Load() == taken.Load() {
		t.Error("only one kind of name was used")
	}
	if swept.Load() == 0 {
		t.Error("no keys were swept")
	}
}
