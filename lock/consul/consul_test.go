package consul

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/internal/testenv"
	"onejob/lock"
	"onejob/lock/locktest"
)

func TestMain(m *testing.M) {
	if os.Getenv(holderEnv) != "" {
		holdUntilKilled()
	}
	testenv.Main(m)
}

const (
	maxWait   = 90 * time.Second
	lockDelay = time.Second
)

// config is a configuration for a test's own keys, with short times.
func config(t testing.TB, kv *testenv.KV) Config {
	log, _ := testenv.Logger(t)
	client := api.DefaultConfig()
	client.Address = kv.Addr
	return Config{
		Client: client, Prefix: kv.Prefix, Log: log,
		CheckTTL: 4 * time.Second, Heartbeat: 300 * time.Millisecond, Margin: 300 * time.Millisecond,
		SessionTTL: 10 * time.Second, Renew: time.Second,
		LockDelay: lockDelay, Verify: 200 * time.Millisecond,
	}
}

// patient is config for tests in which no session ends: one outlives a machine that stands still for a while.
func patient(t testing.TB, kv *testenv.KV) Config {
	cfg := config(t, kv)
	cfg.CheckTTL, cfg.SessionTTL = time.Minute, 2*time.Minute
	return cfg
}

// persist calls f again while Consul does not answer in time: one that stands still for a while may need
// longer for a request than that may take.
func persist(f func() error) (err error) {
	for range testenv.Tries(maxWait) {
		if err = f(); !Unavailable(err) {
			break
		}
	}
	return err
}

func TestLocker(t *testing.T) {
	for _, liveness := range []Liveness{Check, TTL} {
		t.Run(string(liveness), func(t *testing.T) {
			t.Parallel()
			locktest.Run(t, func(t *testing.T) locktest.Backend {
				kv := testenv.Consul(t)
				return locktest.Backend{
					LockDelay: lockDelay,
					New: func(t *testing.T) lock.Locker {
						cfg := config(t, kv)
						cfg.Liveness = liveness
						cfg.CheckTTL, cfg.Heartbeat = 5*time.Second, time.Second
						return create(t, cfg)
					},
					EndSession: func(t *testing.T, session string) {
						if _, err := kv.Client.Session().Destroy(session, nil); err != nil {
							t.Fatal(err)
						}
					},
					DeleteKey: func(t *testing.T, key string) {
						if _, err := kv.Client.KV().Delete(kv.Prefix+"/tasks/"+key, nil); err != nil {
							t.Fatal(err)
						}
					},
				}
			})
		})
	}
}

func create(t testing.TB, cfg Config) *Locker {
	t.Helper()
	l, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// run runs a locker until the test ends, or stop is called, which returns how
// long Run took to end.
func run(t testing.TB, l *Locker) (stop func() time.Duration) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx, nil) }()
	stop = sync.OnceValue(func() time.Duration {
		began := time.Now()
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		return time.Since(began)
	})
	t.Cleanup(func() { stop() })
	return stop
}

// start runs a locker until the test ends, and waits for its session.
func start(t testing.TB, cfg Config) *Locker {
	t.Helper()
	l := create(t, cfg)
	run(t, l)
	ready(t, l)
	return l
}

func ready(t testing.TB, l *Locker) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), maxWait)
	defer cancel()
	if err := l.Ready(ctx); err != nil {
		t.Fatal(err)
	}
}

// refusal waits until there is a session, or an answer that keeps it from coming, which it
// returns. It waits through requests that a busy server does not answer in time.
func refusal(t testing.TB, l *Locker) error {
	t.Helper()
	over, cancel := context.WithCancel(t.Context())
	cancel()
	var err error
	testenv.Eventually(t, maxWait, "there is an answer", func() bool {
		err = l.Ready(over)
		return err == nil || err.Error() != "consul: no session yet" && !errors.Is(err, context.DeadlineExceeded)
	})
	return err
}

func try(l *Locker, key string) (lock.Lease, error) {
	return l.Acquire(context.Background(), lock.Request{Session: l.Session(), Key: key, Value: []byte(`{"test":true}`)})
}

// tryAgain is try, again while Consul does not answer in time. The lock may be there then for a while.
func tryAgain(l *Locker, key string) (lease lock.Lease, err error) {
	late := false
	for range testenv.Tries(maxWait) {
		lease, err = try(l, key)
		late = late || Unavailable(err)
		if !Unavailable(err) && !(late && errors.Is(err, lock.ErrHeldHere)) {
			break
		}
	}
	return lease, err
}

func acquire(t testing.TB, l *Locker, key string) lock.Lease {
	t.Helper()
	return granted(t, key, func() (lock.Lease, error) { return try(l, key) })
}

// granted asks for a lock, again if Consul has not answered in time. The lock may be there then for a while.
func granted(t testing.TB, what string, ask func() (lock.Lease, error)) (lease lock.Lease) {
	t.Helper()
	late := false
	testenv.Eventually(t, maxWait, "Consul answers", func() bool {
		var err error
		lease, err = ask()
		if late = late || Unavailable(err); err != nil && !late {
			t.Fatalf("acquire %s: %v", what, err)
		}
		return err == nil
	})
	return lease
}

// release gives a lock back, later if Consul does not answer in time.
func release(t testing.TB, lease lock.Lease) {
	t.Helper()
	switch err := lease.Release(context.Background()); {
	case errors.Is(err, context.DeadlineExceeded):
		t.Logf("release: %v", err)
	case err != nil:
		t.Errorf("release: %v", err)
	}
}

// ended waits for the end of a lease, and returns when it came.
func ended(t testing.TB, lease lock.Lease, want error) time.Time {
	t.Helper()
	select {
	case <-lease.Context().Done():
	case <-time.After(maxWait):
		t.Fatalf("the lease did not end within %v", maxWait)
	}
	at := time.Now()
	if cause := context.Cause(lease.Context()); !errors.Is(cause, want) {
		t.Errorf("the lease ended with %v, want %v", cause, want)
	}
	if !lease.Deadline().Passed() {
		t.Errorf("the deadline of a lease that has ended lies %v ahead", lease.Deadline().Until())
	}
	return at
}

// holder returns which session holds a key, past any proxy; "" if none.
func holder(t testing.TB, kv *testenv.KV, key string) string {
	t.Helper()
	pair, _, err := kv.Client.KV().Get(kv.Prefix+"/"+key, &api.QueryOptions{RequireConsistent: true})
	if err != nil {
		t.Fatal(err)
	}
	if pair == nil {
		return ""
	}
	return pair.Session
}

// again waits until l has another session than before, and can lock with it.
func again(t testing.TB, l *Locker, before string) {
	t.Helper()
	testenv.Eventually(t, maxWait, "another session", func() bool { s := l.Session(); return s != "" && s != before })
	testenv.Eventually(t, maxWait, "a lock under the other session", func() bool {
		lease, err := try(l, fmt.Sprintf("again-%d", time.Now().UnixNano()))
		if err == nil {
			release(t, lease)
		}
		return err == nil
	})
}

// A command that ignores its end is killed by its guard when the lease is over, a moment
// later. The session lives until then, but not for a holder that never lets go.
func TestEndWaitsForHolders(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	for name, lets := range map[string]bool{"one lets go": true, "one never does": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := config(t, kv)
			cfg.Margin = time.Second
			cfg.CheckTTL = 10 * time.Second
			l := create(t, cfg)
			stop := run(t, l)
			ready(t, l)
			session := l.Session()
			lease := acquire(t, l, name)
			ended := make(chan struct{})
			began := time.Now()
			go func() {
				defer close(ended)
				<-lease.Context().Done()
				// On a busy machine the answer may come when the session need not live any more.
				if s := holder(t, kv, "tasks/"+name); s != session && time.Since(began) < cfg.Margin {
					t.Errorf("when the lease ended the key was held by %q, want %s", s, session)
				}
				if lets {
					_ = lease.Release(context.Background())
				}
			}()
			stop()
			<-ended
			if entry, _, err := kv.Client.Session().Info(session, nil); entry != nil || err != nil {
				t.Errorf("the session is left: %v, %v", entry, err)
			}
		})
	}
}
