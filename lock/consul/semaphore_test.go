package consul

import (
	"testing"

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
