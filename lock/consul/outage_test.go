package consul

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/boottime"
	"onejob/internal/servers"
	"onejob/internal/testenv"
	"onejob/lock"
	"onejob/lock/internal/hold"
)

// TestConsulAway holds a lock while Consul goes away, in several ways. The lease
// must be over before Consul could have ended the session, nothing may hang, and
// when Consul is back so is a session.
func TestConsulAway(t *testing.T) {
	own := func(t *testing.T) (*servers.Consul, *testenv.KV) { return testenv.OwnConsul(t, servers.ConsulConfig{}) }
	for _, test := range []struct {
		name     string
		liveness Liveness
		open     func(t *testing.T) (cfg Config, leave, back func())
	}{
		{"killed", Check, func(t *testing.T) (Config, func(), func()) {
			server, kv := own(t)
			return config(t, kv), server.Kill, func() {
				if err := server.Start(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}},
		{"frozen", Check, func(t *testing.T) (Config, func(), func()) {
			server, kv := own(t)
			must := func(f func() error) func() {
				return func() {
					if err := f(); err != nil {
						t.Fatal(err)
					}
				}
			}
			return config(t, kv), must(server.Freeze), must(server.Thaw)
		}},
		{"silent", Check, throughSilence},
		{"silent", TTL, throughSilence},
	} {
		t.Run(test.name+"/"+string(test.liveness), func(t *testing.T) {
			t.Parallel()
			cfg, leave, back := test.open(t)
			cfg.Liveness = test.liveness
			l := start(t, cfg)
			session := l.Session()
			lease := acquire(t, l, "k")

			leave()
			gone, left := time.Now(), boottime.Now()
			took := ended(t, lease, lock.ErrLost).Sub(gone)
			ttl := cfg.CheckTTL
			if test.liveness == TTL {
				ttl = cfg.SessionTTL
			}
			// The last acknowledged heartbeat was sent before Consul left.
			if d := lease.Deadline().Sub(left); d >= ttl {
				t.Errorf("the lease was good for %v after Consul left; Consul may give the key away after %v", d, ttl)
			}
			t.Logf("the lease ended %.2f s after Consul left; Consul's patience is %v", took.Seconds(), ttl)
			if s := l.Session(); s != "" {
				t.Errorf("the session is %q, want none", s)
			}
			if _, err := try(l, "other"); err == nil {
				t.Error("a lock was granted without a session")
			}
			_ = lease.Release(t.Context())
			back()
			again(t, l, session)
		})
	}
}

func throughSilence(t *testing.T) (cfg Config, leave, back func()) {
	kv := testenv.Consul(t)
	p := newProxy(t, kv.Addr)
	cfg = config(t, kv)
	cfg.Client.Address = p.Addr
	return cfg, func() { p.inject(silence) }, func() { p.inject(nil) }
}

// TestEndWhileConsulIsAway shows that nobody waits long for a Consul that does
// not answer, however many locks are held.
func TestEndWhileConsulIsAway(t *testing.T) {
	t.Parallel()
	cfg, leave, _ := throughSilence(t)
	l := create(t, cfg)
	stop := run(t, l)
	ready(t, l)
	for _, lease := range acquireMany(t, l, 300) {
		defer func() { _ = lease.Release(t.Context()) }()
	}
	leave()
	took := stop()
	t.Logf("Run returned after %.2f s", took.Seconds())
	if took > 30*shutdownTimeout { // 300 locks one after the other: ten minutes
		t.Errorf("Run returned %v after it was told to stop", took)
	}
}

// TestSlowKeysDoNotSlowHeartbeats delays all that changes keys by more than the
// check's TTL: the leases must live on.
func TestSlowKeysDoNotSlowHeartbeats(t *testing.T) {
	t.Parallel()
	l, p, cfg := behindProxy(t)
	first := acquire(t, l, "first")
	before := first.Deadline()
	p.inject(on(func(r *http.Request) bool { return r.URL.Path == "/v1/txn" }, 0, func(w http.ResponseWriter, r *http.Request, forward http.HandlerFunc) {
		select {
		case <-time.After(cfg.CheckTTL + 500*time.Millisecond):
			forward(w, r)
		case <-r.Context().Done():
			panic(http.ErrAbortHandler)
		}
	}))
	second := acquire(t, l, "second")
	for name, lease := range map[string]lock.Lease{"first": first, "second": second} {
		testenv.Eventually(t, maxWait, "the "+name+" lease is extended by more than the check's TTL", func() bool {
			return lease.Context().Err() != nil || lease.Deadline().Sub(before) > cfg.CheckTTL
		})
		if err := lease.Context().Err(); err != nil {
			t.Errorf("the %s lease ended: %v", name, context.Cause(lease.Context()))
		}
	}
	p.inject(nil)
	release(t, first)
	release(t, second)
}

// TestNoAnswerUnderALostSession loses the session while Consul does not answer those who lock:
// they do not wait for it, nor does what comes after the session.
func TestNoAnswerUnderALostSession(t *testing.T) {
	t.Parallel()
	l, p, _ := behindProxy(t)
	var took time.Duration
	for range 5 { // on a busy machine one may take as long as without it, but not each
		ready(t, l)
		p.inject(on(func(r *http.Request) bool { return r.URL.Path == "/v1/txn" }, 0, silence))
		before := p.count(with(api.KVLock))
		failed := make(chan error, 2)
		for _, key := range []string{"first", "second"} {
			go func() {
				_, err := try(l, key)
				failed <- err
			}()
		}
		testenv.Eventually(t, maxWait, "Consul is asked", func() bool { return p.count(with(api.KVLock)) > before })
		began := time.Now()
		l.Lose(l.Session(), errors.New("a test says so"))
		for range 2 {
			if err := <-failed; !errors.Is(err, lock.ErrLost) {
				t.Errorf("acquire: got error %v, want %v", err, lock.ErrLost)
			}
		}
		took = time.Since(began)
		p.inject(nil)
		if took < requestTimeout/2 {
			return
		}
	}
	t.Errorf("an answer was waited for, for %v", took)
}

// TestBusyServerIsNotALostLock answers what keeps the session alive, and what
// changes keys, with refusals that come and go.
func TestBusyServerIsNotALostLock(t *testing.T) {
	for _, test := range []struct {
		name string
		code int
		body string
	}{
		{"429", 429, "Your IP is issuing too many concurrent connections, please rate limit your calls"},
		{"503", 503, "rate limit exceeded"},
		{"500", 500, "No cluster leader"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			kv := testenv.Consul(t)
			p := newProxy(t, kv.Addr)
			cfg := config(t, kv)
			cfg.Client.Address = p.Addr
			l := start(t, cfg)
			held := acquire(t, l, "held")

			busy := answering(test.code, test.body)
			p.inject(on(heartbeatRequests, 3, busy))
			before := held.Deadline()
			testenv.Eventually(t, maxWait, "the lease is extended again", func() bool { return before.Before(held.Deadline()) })

			p.inject(on(writes, 2, busy))
			release(t, acquire(t, l, "tried again"))

			p.inject(on(writes, 0, busy))
			if lease, err := try(l, "refused"); err == nil {
				t.Error("a lock was granted that Consul refused")
				release(t, lease)
			}
			p.inject(nil)
			if s := holder(t, kv, "tasks/refused"); s != "" {
				t.Errorf("session %s holds the key that was refused", s)
			}
			release(t, acquire(t, l, "refused")) // nothing is in doubt
			if err := held.Context().Err(); err != nil {
				t.Errorf("the lease is lost: %v", err)
			}
			release(t, held)
		})
	}
}

// TestLostReply loses the reply to a transaction that was applied.
func TestLostReply(t *testing.T) {
	open := func(t *testing.T) (*Locker, *proxy, *testenv.KV) {
		t.Parallel()
		kv := testenv.Consul(t)
		p := newProxy(t, kv.Addr)
		cfg := config(t, kv)
		cfg.Client.Address = p.Addr
		return start(t, cfg), p, kv
	}
	t.Run("of an acquire", func(t *testing.T) {
		l, p, kv := open(t)
		p.inject(on(writes, 1, swallow))
		lease := acquire(t, l, "k")
		if s := holder(t, kv, "tasks/k"); s != l.Session() {
			t.Errorf("the key is held by %q, not by session %s", s, l.Session())
		}
		release(t, lease)
		if s := holder(t, kv, "tasks/k"); s != "" {
			t.Errorf("the released key is held by %s", s)
		}
	})
	t.Run("of every acquire", func(t *testing.T) {
		l, p, kv := open(t)
		p.inject(on(writes, 0, swallow))
		if _, err := try(l, "k"); err == nil {
			t.Error("a lock was granted though no reply came")
		}
		if s := holder(t, kv, "tasks/k"); s == "" {
			t.Error("the key is free: this test tests nothing")
		}
		p.inject(nil)
		testenv.Eventually(t, maxWait, "the key is deleted", func() bool { return holder(t, kv, "tasks/k") == "" })
		if n := l.current().count(); n != 1 {
			t.Errorf("%d leases are on the list, want the one in doubt", n)
		}
	})
	t.Run("of a release", func(t *testing.T) {
		l, p, kv := open(t)
		lease := acquire(t, l, "k")
		p.inject(on(writes, 1, swallow))
		release(t, lease)
		if s := holder(t, kv, "tasks/k"); s != "" {
			t.Errorf("the released key is held by %s", s)
		}
	})
}

// TestLateRequest holds an acquire back until long after its caller got the lock
// by another try and released it. The key that then appears is nobody's, and
// must be deleted.
func TestLateRequest(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	p := newProxy(t, kv.Addr)
	cfg := config(t, kv)
	cfg.Client.Address = p.Addr
	l := start(t, cfg)

	late := make(chan func(), 1)
	p.inject(on(writes, 1, func(_ http.ResponseWriter, r *http.Request, forward http.HandlerFunc) {
		late <- func() { swallowed(r, forward) }
		panic(http.ErrAbortHandler)
	}))
	release(t, acquire(t, l, "k"))
	if s := holder(t, kv, "tasks/k"); s != "" {
		t.Fatalf("the released key is held by %s", s)
	}
	(<-late)()
	if s := holder(t, kv, "tasks/k"); s != l.Session() {
		t.Fatalf("the late request was not applied: the key is held by %q", s)
	}
	testenv.Eventually(t, maxWait, "the key is deleted", func() bool { return holder(t, kv, "tasks/k") == "" })
}

// TestHungRequest leaves one request that keeps the session alive without an
// answer, on a connection that stays open. The next ones must not wait for it.
func TestHungRequest(t *testing.T) {
	for _, path := range []string{"/v1/agent/check/update/", "/v1/session/renew/"} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			kv := testenv.Consul(t)
			p := newProxy(t, kv.Addr)
			cfg := config(t, kv)
			cfg.Client.Address = p.Addr
			if path == "/v1/session/renew/" {
				cfg.Liveness = TTL
			}
			l := start(t, cfg)
			lease := acquire(t, l, "k")
			hung := make(chan struct{})
			p.inject(on(func(r *http.Request) bool { return strings.HasPrefix(r.URL.Path, path) }, 1,
				func(w http.ResponseWriter, r *http.Request, forward http.HandlerFunc) {
					close(hung)
					silence(w, r, forward)
				}))
			<-hung
			before := lease.Deadline()
			testenv.Eventually(t, maxWait, "the lease is extended", func() bool { return before.Before(lease.Deadline()) })
			if lease.Context().Err() != nil {
				t.Errorf("the lease was lost: %v", context.Cause(lease.Context()))
			}
			release(t, lease)
		})
	}
}

// TestConsulRebuilt puts another Consul in the place of the first, which knows
// nothing of it, as after the loss of all its data.
func TestConsulRebuilt(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	_, fresh := testenv.OwnConsul(t, servers.ConsulConfig{})
	p := newProxy(t, kv.Addr)
	cfg := config(t, kv)
	cfg.Client.Address = p.Addr
	l, observer := start(t, cfg), start(t, cfg)
	session := l.Session()
	lease := acquire(t, l, "k")

	p.lead(fresh.Addr)
	ended(t, lease, lock.ErrLost)
	_ = lease.Release(t.Context())
	again(t, l, session)
	testenv.Eventually(t, maxWait, "the new session is seen", func() bool {
		observer.membership.mu.Lock()
		defer observer.membership.mu.Unlock()
		_, alive := observer.membership.alive[l.Session()]
		return alive
	})
	testenv.Eventually(t, maxWait, "the old session is dead", func() bool {
		dead, err := observer.Dead(t.Context(), []string{session, l.Session()})
		return err == nil && len(dead) == 1 && dead[0] == session
	})
}

// TestSnapshotRestored takes Consul back to a time before the session.
func TestSnapshotRestored(t *testing.T) {
	t.Parallel()
	_, kv := testenv.OwnConsul(t, servers.ConsulConfig{})
	restore := takeSnapshot(t, kv)
	l := start(t, config(t, kv))
	session := l.Session()
	lease := acquire(t, l, "k")
	restore()
	ended(t, lease, lock.ErrLost)
	_ = lease.Release(t.Context())
	again(t, l, session)
}

// TestNoCheckNoDeadlineByIt holds for liveness ttl, for as long as the session
// is renewed.
// An outage of Postgres ends no lease, however long the margin is: there is time for two signs of
// life to Consul before nobody has heard of the replica for too long.
func TestLongMarginsLeaveTimeToSpeak(t *testing.T) {
	t.Parallel()
	for margin := 100 * time.Millisecond; margin <= 5*time.Second; margin += 100 * time.Millisecond {
		cfg := Config{Margin: margin}.WithDefaults()
		if first := cfg.listWait() + time.Second; first > lock.Silence-margin-cfg.listWait() || cfg.listWait() > listMaxWait {
			t.Errorf("with a margin of %v the first sign comes up to %v after the last heartbeat, and the lease ends after %v", margin, first, lock.Silence-margin)
		}
	}
	cfg := config(t, testenv.Consul(t))
	cfg.Margin, cfg.CheckTTL, cfg.SessionTTL, cfg.Heartbeat = 5*time.Second, 15*time.Second, 15*time.Second, time.Second
	l := create(t, cfg)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx, &alone{}) }()
	defer func() { cancel(); <-done }()
	ready(t, l)
	// A lease of two seconds may end on a machine that stands still: one that lives on is enough.
	testenv.Eventually(t, maxWait, "a session lives on, as Consul hears of it", func() bool {
		session := l.Session()
		time.Sleep(lock.Silence)
		return session != "" && l.Session() == session
	})
}

func TestNoCheckNoDeadlineByIt(t *testing.T) {
	t.Parallel()
	cfg := config(t, testenv.Consul(t))
	cfg.Liveness = TTL
	live := start(t, cfg).current()
	if ago := live.Silent(hold.Check, lock.Timing{}); ago > -365*24*time.Hour {
		t.Errorf("without a check, the session ends in %v whatever happens", -ago)
	}
}
