package consul

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/boottime"
	"onejob/internal/testenv"
	"onejob/lock"
	"onejob/lock/internal/hold"
)

// semaphoreAt starts a locker behind a proxy, with a semaphore k.
func semaphoreAt(t *testing.T, slots int) (*Locker, *proxy, *testenv.KV) {
	t.Helper()
	kv := testenv.Consul(t)
	p := newProxy(t, kv.Addr)
	cfg := config(t, kv)
	cfg.Client.Address = p.Addr
	l := start(t, cfg)
	createLimit(t, l, "k", slots)
	return l, p, kv
}

func txns(s seen) bool { return s.path == "/v1/txn" }

// empty waits until nothing is left of the slots.
func empty(t *testing.T, l *Locker, kv *testenv.KV) {
	t.Helper()
	testenv.Eventually(t, maxWait, "nothing is left of the slots", func() bool {
		keys, _, err := kv.Client.KV().Keys(kv.Prefix+"/limits/", "", nil)
		return err == nil && len(keys) <= 1 && len(look(t, l, "k").Holders) == 0
	})
}

// TestDamagedUnderHolders writes things of other purposes over a .lock under its
// holders: their slots are revoked, and it stays as it is.
func TestDamagedUnderHolders(t *testing.T) {
	t.Parallel()
	for name, garbage := range map[string]string{
		"no JSON":              "garbage",
		"nothing":              "",
		"another's JSON":       `{"state":"applied"}`,
		"a list":               `[1,2]`,
		"no holders":           `{"Limit":2}`,
		"no limit":             `{"Holders":{}}`,
		"a limit below zero":   `{"Limit":-1,"Holders":{}}`,
		"a limit that is text": `{"Limit":"2","Holders":{}}`,
		"holders of a kind":    `{"Limit":2,"Holders":"me"}`,
		"more than we know":    `{"Limit":2,"Holders":{},"Owner":"me"}`,
		"two values":           `{"Limit":2,"Holders":{}} {}`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, _, kv := semaphoreAt(t, 2)
			lease := takeOne(t, l, "k")
			put(t, kv, "limits/k/.lock", garbage)
			notOne(t, l, "k", lock.ErrForeign)
			ended(t, lease, lock.ErrRevoked)
			if err := lease.Release(t.Context()); !errors.Is(err, lock.ErrRevoked) {
				t.Errorf("release: got error %v, want %v", err, lock.ErrRevoked)
			}
			if err := l.Semaphores().Resize(t.Context(), "k", 3); !errors.Is(err, lock.ErrForeign) {
				t.Errorf("resize: got error %v, want %v", err, lock.ErrForeign)
			}
			keys, _, err := kv.Client.KV().Keys(kv.Prefix+"/limits/", "", nil)
			if got := string(get(t, kv, "limits/k/.lock").Value); got != garbage || err != nil || len(keys) != 1 {
				t.Errorf("the .lock is %q, among %q (%v)", got, keys, err)
			}
			deleteKey(t, kv, "limits/k/.lock")
			release(t, awaitOne(t, l, "k"))
		})
	}
}

// TestForeignFlags leaves a .lock alone whose flags are not a semaphore's, or
// that somebody holds as a mutex, and a record that is none of ours.
func TestForeignFlags(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	l := start(t, config(t, kv))
	pair := &api.KVPair{Key: kv.Prefix + "/limits/k/.lock", Value: []byte(`{"Limit":2,"Holders":{}}`), Flags: api.LockFlagValue}
	if _, err := kv.Client.KV().Put(pair, nil); err != nil {
		t.Fatal(err)
	}
	notOne(t, l, "k", lock.ErrForeign)
	pair = &api.KVPair{Key: kv.Prefix + "/limits/held/.lock", Value: pair.Value, Session: l.Session()}
	if ok, _, err := kv.Client.KV().Acquire(pair, nil); !ok || err != nil {
		t.Fatalf("lock the .lock: %v, %v", ok, err)
	}
	notOne(t, l, "held", lock.ErrForeign)
	for _, record := range []string{"3", `{"limit":"3"}`, `{"limit":10001}`, `{}`} {
		put(t, kv, "limit-settings/other", record)
		notOne(t, l, "other", lock.ErrForeign)
	}
	put(t, kv, "limit-settings/other", `{"limit":1}`) // by hand will do
	release(t, awaitOne(t, l, "other"))
}

// TestLockDeleted deletes the .lock under a holder: he is told, and nobody of
// ours enters in his place before he has let go.
func TestLockDeleted(t *testing.T) {
	t.Parallel()
	l, _, kv := semaphoreAt(t, 1)
	other := start(t, config(t, kv))
	lease := takeOne(t, l, "k")
	deleteKey(t, kv, "limits/k/.lock")
	began := time.Now()
	notOne(t, other, "k", lock.ErrDelayed)
	ended(t, lease, lock.ErrRevoked)
	t.Logf("the holder was told after %v", time.Since(began).Round(time.Millisecond))
	notOne(t, other, "k", lock.ErrDelayed)
	if err := lease.Release(t.Context()); !errors.Is(err, lock.ErrRevoked) {
		t.Errorf("release: got error %v, want %v", err, lock.ErrRevoked)
	}
	release(t, awaitOne(t, other, "k"))
	empty(t, l, kv)
}

// TestMissingLockOfAHolderWhoNeverLetsGo is pruned after the time to notice and the
// lock-delay.
func TestMissingLockOfAHolderWhoNeverLetsGo(t *testing.T) {
	t.Parallel()
	for name, rob := range map[string]func(kv *testenv.KV, session string){
		"no .lock": func(kv *testenv.KV, _ string) { deleteKey(t, kv, "limits/k/.lock") },
		"no entry": func(kv *testenv.KV, session string) { deleteKey(t, kv, "limits/k/"+session) },
		"neither": func(kv *testenv.KV, _ string) { // as "consul kv delete -recurse" does
			if _, err := kv.Client.KV().DeleteTree(kv.Prefix+"/limits/", nil); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, _, kv := semaphoreAt(t, 1)
			other := start(t, config(t, kv))
			lease := takeOne(t, l, "k")
			holders := look(t, l, "k").Holders
			if len(holders) != 1 {
				t.Fatalf("%d slots are held, want 1", len(holders))
			}
			session := holders[0].Session
			began := time.Now()
			rob(kv, session)
			notOne(t, other, "k", lock.ErrDelayed)
			ended(t, lease, lock.ErrRevoked)
			if err := other.Semaphores().Await(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			theirs := takeOne(t, other, "k")
			if took, want := time.Since(began), lockDelay+other.cfg.Verify; took < want {
				t.Errorf("the slot was granted anew after %v, want %v at least", took, want)
			}
			_ = lease.Release(t.Context())
			release(t, theirs)
			empty(t, l, kv)
		})
	}
}

// TestAmbiguousTake: a take whose answer was lost is found to have been applied.
func TestAmbiguousTake(t *testing.T) {
	t.Parallel()
	l, p, kv := semaphoreAt(t, 3)
	p.inject(on(writes, 1, swallow))
	leases, err := l.Semaphores().Take(t.Context(), "k", 2, nil)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(look(t, l, "k").Holders); n != 2 {
		t.Errorf("%d slots are held, want 2", n)
	}
	p.inject(on(writes, 1, swallow))
	for _, lease := range leases {
		release(t, lease)
	}
	empty(t, l, kv)
	p.inject(on(writes, 1, answering(http.StatusInternalServerError, "rpc error")))
	lease := takeOne(t, l, "k")
	if n := len(look(t, l, "k").Holders); n != 1 {
		t.Errorf("%d slots are held, want 1", n)
	}
	release(t, lease)
	empty(t, l, kv)
}

// TestTakeAppliedLate: Consul applies a take after we gave up on it. Nobody
// believes in the slot, and it is given back.
func TestTakeAppliedLate(t *testing.T) {
	t.Parallel()
	l, p, kv := semaphoreAt(t, 2)
	late := make(chan func(), 100)
	p.inject(func(w http.ResponseWriter, r *http.Request, forward http.HandlerFunc) {
		switch {
		case writes(r):
			r = r.WithContext(context.WithoutCancel(r.Context()))
			late <- func() { swallowed(r, forward) }
			http.Error(w, "rpc error", http.StatusInternalServerError)
		default:
			forward(w, r)
		}
	})
	if leases, err := l.Semaphores().Take(t.Context(), "k", 1, nil); err == nil {
		t.Fatalf("take: %d leases", len(leases))
	}
	(<-late)()
	if pair := get(t, kv, "limits/k/.lock"); strings.Count(string(pair.Value), "true") != 1 {
		t.Fatalf("the late take was not applied: %s", pair.Value)
	}
	p.inject(nil)
	empty(t, l, kv)
	leases, err := l.Semaphores().Take(t.Context(), "k", 2, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, lease := range leases {
		release(t, lease)
	}
}

// TestReleaseFails: a slot that could not be given back is, later.
func TestReleaseFails(t *testing.T) {
	t.Parallel()
	l, p, kv := semaphoreAt(t, 1)
	lease := takeOne(t, l, "k")
	p.inject(on(func(r *http.Request) bool { return r.URL.Path == "/v1/txn" }, 0, answering(http.StatusServiceUnavailable, "busy")))
	if err := lease.Release(t.Context()); err == nil {
		t.Error("release with a busy server: no error")
	}
	p.inject(nil)
	empty(t, l, kv)
	release(t, takeOne(t, l, "k"))
}

// TestSlotSessionLost ends one slot's session: it takes nothing else with it,
// and the next Take does without it.
func TestSlotSessionLost(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(kv *testenv.KV, s *slotSession){
		"destroyed": func(kv *testenv.KV, s *slotSession) { destroySession(t, kv, s.id) },
		"not renewed in time": func(_ *testenv.KV, s *slotSession) {
			s.Begin(hold.TTL, s.cfg.session(), 0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, _, kv := semaphoreAt(t, 3)
			session := l.Session()
			one, two := takeOne(t, l, "k"), takeOne(t, l, "k")
			task := acquire(t, l, "task")
			end(kv, one.(*slot).session)
			ended(t, one, lock.ErrLost)
			if two.Context().Err() != nil || task.Context().Err() != nil || l.Session() != session {
				t.Error("more was lost than that slot")
			}
			if err := one.Release(t.Context()); !errors.Is(err, lock.ErrLost) {
				t.Errorf("release: got error %v, want %v", err, lock.ErrLost)
			}
			release(t, takeOne(t, l, "k"))
			release(t, two)
			release(t, task)
			empty(t, l, kv)
		})
	}
}

// TestIdleSessionEnds ends a pooled session that nobody knows to have ended.
func TestIdleSessionEnds(t *testing.T) {
	t.Parallel()
	l, _, kv := semaphoreAt(t, 1)
	lease := takeOne(t, l, "k")
	release(t, lease)
	destroySession(t, kv, lease.(*slot).session.id)
	release(t, takeOne(t, l, "k"))
	empty(t, l, kv)
}

// TestSessionsAreReused counts the sessions that slots cost: as many as are held
// of one semaphore at once. Idle ones end after a while, all with the replica.
func TestSessionsAreReused(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	p := newProxy(t, kv.Addr)
	cfg := config(t, kv)
	cfg.Client.Address = p.Addr
	l := create(t, cfg)
	stop := run(t, l)
	ready(t, l)
	s := l.Semaphores()
	for _, name := range []string{"a", "b"} {
		if err := s.Create(t.Context(), name, 4); err != nil {
			t.Fatal(err)
		}
	}
	const own = 1
	for range 5 {
		var all []lock.Lease
		for _, name := range []string{"a", "b"} {
			leases, err := s.Take(t.Context(), name, 4, nil)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, leases...)
		}
		together(len(all), func(i int) { release(t, all[i]) })
	}
	if n := p.count(func(s seen) bool { return s.path == "/v1/session/create" }); n < own+4 || n > own+4+20 {
		t.Errorf("%d sessions were asked for, want %d", n, own+4)
	}
	live := l.current()
	pool := live.slots.living()
	if len(pool) != 4 {
		t.Fatalf("the pool has %d sessions, want 4", len(pool))
	}
	testenv.Eventually(t, maxWait, "all sessions are renewed", func() bool {
		for _, ss := range pool {
			if p.count(func(s seen) bool { return s.path == "/v1/session/renew/"+ss.id }) == 0 {
				return false
			}
		}
		return true
	})
	ends := func(ss *slotSession) bool {
		entry, _, err := kv.Client.Session().Info(ss.id, nil)
		return err == nil && entry == nil
	}
	live.slots.mu.Lock()
	pool[3].idle = boottime.Now().Add(-2 * poolIdle)
	live.slots.mu.Unlock()
	testenv.Eventually(t, maxWait, "the idle one ends", func() bool { return ends(pool[3]) })
	if p.count(func(s seen) bool { return s.path == "/v1/session/destroy/"+pool[3].id }) == 0 {
		t.Error("it was left to its TTL")
	}
	if ends(pool[0]) {
		t.Error("one that was just used has ended")
	}
	stop()
	for _, ss := range pool {
		if !ends(ss) {
			t.Errorf("session %s is left", ss.id)
		}
	}
}

// TestWhatItCosts counts requests.
func TestWhatItCosts(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	p := newProxy(t, kv.Addr)
	cfg := config(t, kv)
	cfg.Verify = time.Hour // or its requests would count
	holder := start(t, cfg)
	cfg.Client.Address = p.Addr
	l := start(t, cfg)
	s := l.Semaphores()
	if err := s.Create(t.Context(), "k", 10); err != nil {
		t.Fatal(err)
	}
	held, err := holder.Semaphores().Take(t.Context(), "k", 10, nil)
	if err != nil {
		t.Fatal(err)
	}

	before := p.count(txns)
	notOne(t, l, "k", lock.ErrFull)
	if n := p.count(txns) - before; n != 1 {
		t.Errorf("ErrFull took %d requests, want 1", n)
	}

	// Many wait by one query.
	isWatch := func(s seen) bool { return strings.HasSuffix(s.path, "/limits/k/.lock") }
	const waiters = 50
	var wg sync.WaitGroup
	errs := make([]error, waiters)
	for i := range waiters {
		wg.Go(func() { errs[i] = s.Await(t.Context(), "k") })
	}
	testenv.Eventually(t, maxWait, "they wait", func() bool { return p.count(isWatch) > 0 })
	for _, lease := range held {
		release(t, lease)
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Errorf("await: %v", err)
	}
	if n := p.count(isWatch); n > 10 {
		t.Errorf("%d waited with %d queries", waiters, n)
	}

	// What comes together travels together.
	release(t, takeOne(t, l, "k")) // which makes a session
	if err := s.Resize(t.Context(), "k", waiters); err != nil {
		t.Fatal(err)
	}
	before = p.count(txns)
	leases := make([]lock.Lease, waiters)
	together(waiters, func(i int) {
		one, err := s.Take(t.Context(), "k", 1, []byte("ours"))
		if errs[i] = err; err == nil {
			leases[i] = one[0]
		}
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatalf("take: %v", err)
	}
	taken := p.count(txns) - before
	together(waiters, func(i int) { release(t, leases[i]) })
	left := p.count(txns) - before - taken
	t.Logf("%d slots: %d requests to take them one by one, %d to give them back", waiters, taken, left)
	if taken > waiters || left > waiters { // alone each would be two
		t.Error("that is too many")
	}
	empty(t, l, kv)
}

// TestManySlotsAtOnce takes more than one transaction holds.
func TestManySlotsAtOnce(t *testing.T) {
	t.Parallel()
	l, _, kv := semaphoreAt(t, 250)
	errs := make([]error, 5)
	together(5, func(i int) {
		for range testenv.Tries(maxWait) { // a busy Consul may take longer for one of the five than there is
			leases, err := l.Semaphores().Take(t.Context(), "k", 50, []byte(fmt.Sprint(i)))
			together(len(leases), func(i int) { release(t, leases[i]) })
			if errs[i] = err; err == nil {
				break
			}
		}
	})
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
	empty(t, l, kv)
}

// TestWithoutSession does what an operator's command does, with a Locker that
// does not run.
func TestWithoutSession(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	l := create(t, config(t, kv))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	defer l.Run(ctx, nil) // which closes its connections
	s := l.Semaphores()
	for what, err := range map[string]error{
		"create":  s.Create(t.Context(), "k", 1),
		"resize":  s.Resize(t.Context(), "k", 2),
		"drain":   s.Drain(t.Context(), "k"),
		"await":   s.Await(t.Context(), "k"),
		"destroy": s.Destroy(t.Context(), "k", false),
	} {
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	notOne(t, l, "k", lock.ErrLost)
}
