package consul

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/internal/testenv"
	"onejob/lock"
	"onejob/lock/locktest"
)

func TestSemaphores(t *testing.T) {
	for _, liveness := range []Liveness{Check, TTL} {
		t.Run(string(liveness), func(t *testing.T) {
			t.Parallel()
			locktest.RunSemaphores(t, func(t *testing.T) locktest.SemaphoreBackend {
				kv := testenv.Consul(t)
				const garbage = `{"Limit": 1, "Holders": {}, "Colour": "green"}`
				return locktest.SemaphoreBackend{
					LockDelay: lockDelay,
					New: func(t *testing.T) (lock.Locker, lock.Semaphores) {
						cfg := config(t, kv)
						cfg.Liveness = liveness
						cfg.CheckTTL, cfg.Heartbeat = 5*cfg.Heartbeat*4, cfg.Heartbeat*3
						l := create(t, cfg)
						return l, l.Semaphores()
					},
					Exact:      true,
					EndSession: func(t *testing.T, session string) { destroySession(t, kv, session) },
					Revoke: func(t *testing.T, name string, h lock.SlotHolder) {
						deleteKey(t, kv, "limits/"+name+"/"+h.Session)
					},
					Spoil: func(t *testing.T, name string) { put(t, kv, "limits/"+name+"/.lock", garbage) },
					Damaged: func(t *testing.T, name string) bool {
						return string(get(t, kv, "limits/"+name+"/.lock").Value) == garbage
					},
				}
			})
		})
	}
}

func destroySession(t testing.TB, kv *testenv.KV, session string) {
	t.Helper()
	if _, err := kv.Client.Session().Destroy(session, nil); err != nil {
		t.Fatal(err)
	}
}

func put(t testing.TB, kv *testenv.KV, key, value string) {
	t.Helper()
	if _, err := kv.Client.KV().Put(&api.KVPair{Key: kv.Prefix + "/" + key, Value: []byte(value)}, nil); err != nil {
		t.Fatal(err)
	}
}

// get returns what stands in a key, and nil if it is not there.
func get(t testing.TB, kv *testenv.KV, key string) *api.KVPair {
	t.Helper()
	pair, _, err := kv.Client.KV().Get(kv.Prefix+"/"+key, &api.QueryOptions{RequireConsistent: true})
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

// waitingQueries counts the queries that wait for a change of a limit.
type waitingQueries struct {
	http.RoundTripper
	now, most atomic.Int32
}

func (w *waitingQueries) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Query().Get("index") == "" || !strings.Contains(r.URL.Path, "/limits/") {
		return w.RoundTripper.RoundTrip(r)
	}
	n := w.now.Add(1)
	defer w.now.Add(-1)
	for m := w.most.Load(); n > m && !w.most.CompareAndSwap(m, n); m = w.most.Load() {
	}
	return w.RoundTripper.RoundTrip(r)
}

// However many limits are full, a replica has few connections that wait for them, and
// notices when one has a slot again.
func TestManyFullLimits(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	cfg := config(t, kv)
	queries := &waitingQueries{RoundTripper: http.DefaultTransport.(*http.Transport).Clone()}
	cfg.RoundTripper = queries
	l := create(t, cfg)
	run(t, l)
	limits := l.Semaphores()
	const n = 3 * maxWaiting
	ctx, cancel := context.WithTimeout(t.Context(), 4*maxWait)
	defer cancel()
	freed := make(chan error, n)
	for i := range n {
		name := fmt.Sprint("full", i)
		if err := limits.Create(ctx, name, 0); err != nil {
			t.Fatal(err)
		}
		go func() { freed <- limits.Await(ctx, name) }()
	}
	testenv.Eventually(t, maxWait, "queries wait", func() bool { return queries.now.Load() == maxWaiting })
	for i := range n {
		if err := limits.Resize(ctx, fmt.Sprint("full", i), 1); err != nil {
			t.Fatal(err)
		}
	}
	for range n {
		if err := <-freed; err != nil {
			t.Error(err)
		}
	}
	if most := queries.most.Load(); most != maxWaiting {
		t.Errorf("%d queries waited at once", most)
	}
}

// What was amiss when somebody looked long ago, and is amiss now, may have been in order between.
func TestMissingLockOfLongAgo(t *testing.T) {
	t.Parallel()
	kv := testenv.Consul(t)
	l := start(t, config(t, kv))
	limits := l.Semaphores()
	if err := limits.Create(t.Context(), "few", 1); err != nil {
		t.Fatal(err)
	}
	if _, err := kv.Client.KV().Delete(kv.Prefix+"/limits/few/.lock", nil); err != nil {
		t.Fatal(err)
	}
	if _, err := limits.Inspect(t.Context(), "few"); err != nil {
		t.Fatal(err)
	}
	s := l.limits.open("few")
	defer s.done()
	s.mu.Lock()
	for session, at := range s.missed {
		s.missed[session] = at.Add(-time.Hour)
	}
	known := len(s.missed)
	s.looked = s.looked.Add(-time.Hour)
	s.mu.Unlock()
	if known != 1 {
		t.Fatalf("%d things were missed, want the lock alone", known)
	}
	if leases, err := limits.Take(t.Context(), "few", 1, []byte("{}")); !errors.Is(err, lock.ErrDelayed) {
		t.Errorf("taken: %d slots, %v; somebody may be inside", len(leases), err)
	}
	// It is had in the end.
	testenv.Eventually(t, maxWait, "a slot", func() bool {
		leases, err := limits.Take(t.Context(), "few", 1, []byte("{}"))
		if err == nil {
			release(t, leases[0])
		}
		return err == nil
	})
}
