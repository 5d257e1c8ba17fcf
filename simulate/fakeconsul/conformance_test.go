package fakeconsul_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/consul/api"
	"go.uber.org/zap"

	"onejob/internal/testenv"
	"onejob/lock"
	"onejob/lock/consul"
	"onejob/lock/locktest"
	"onejob/simulate/fakeconsul"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// servers are the fake and the real one. Each test runs against both.
var servers = map[string]func(t *testing.T) *server{
	"fake": func(t *testing.T) *server {
		agent := fakeconsul.New(fakeconsul.Config{MinTTL: time.Second}).Agent("node")
		return newServer(t, "127.0.0.1:1", "service/test", agent)
	},
	"real": func(t *testing.T) *server {
		kv := testenv.Consul(t)
		return newServer(t, kv.Addr, kv.Prefix, nil)
	},
}

type server struct {
	addr, prefix string
	transport    http.RoundTripper // nil for the usual one
	api          *api.Client
}

// late is how much later than promised something may be seen. The fake runs on the clock of a
// bubble, where nothing but the pauses of the test takes time; the real one on a busy machine.
func (s *server) late() time.Duration {
	if s.transport != nil {
		return 50 * time.Millisecond
	}
	return time.Minute
}

func newServer(t *testing.T, addr, prefix string, transport http.RoundTripper) *server {
	t.Helper()
	s := &server{addr: addr, prefix: prefix, transport: transport}
	own := transport
	if own == nil {
		usual := http.DefaultTransport.(*http.Transport).Clone()
		t.Cleanup(usual.CloseIdleConnections)
		own = usual
	}
	client, err := api.NewClient(&api.Config{Address: addr, HttpClient: &http.Client{Transport: own}})
	if err != nil {
		t.Fatal(err)
	}
	s.api = client
	return s
}

// both runs a test against both servers, and against the fake in a bubble, so run starts no
// subtests.
func both(t *testing.T, run func(t *testing.T, s *server)) {
	t.Run("fake", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) { run(t, servers["fake"](t)) })
	})
	t.Run("real", func(t *testing.T) {
		t.Parallel()
		run(t, servers["real"](t))
	})
}

const lockDelay = time.Second

func (s *server) config(t *testing.T, liveness consul.Liveness) consul.Config {
	client := api.DefaultConfig()
	client.Address = s.addr
	return consul.Config{
		Client: client, RoundTripper: s.transport, Prefix: s.prefix, Liveness: liveness, Log: zap.NewNop(),
		CheckTTL: 5 * time.Second, Heartbeat: time.Second, Margin: 300 * time.Millisecond,
		SessionTTL: 10 * time.Second, Renew: time.Second, LockDelay: lockDelay, Verify: 200 * time.Millisecond,
	}
}

func (s *server) locker(t *testing.T, liveness consul.Liveness) *consul.Locker {
	t.Helper()
	l, err := consul.New(s.config(t, liveness))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func (s *server) destroy(t *testing.T, session string) {
	t.Helper()
	if _, err := s.api.Session().Destroy(session, nil); err != nil {
		t.Fatal(err)
	}
}

func (s *server) remove(t *testing.T, key string) {
	t.Helper()
	if _, err := s.api.KV().Delete(s.prefix+"/"+key, nil); err != nil {
		t.Fatal(err)
	}
}

// The lock suite of every backend.
func TestLocker(t *testing.T) {
	for _, liveness := range []consul.Liveness{consul.Check, consul.TTL} {
		t.Run(string(liveness), func(t *testing.T) {
			for name, open := range servers {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					locktest.Run(t, func(t *testing.T) locktest.Backend {
						s := open(t)
						return locktest.Backend{
							LockDelay:  lockDelay,
							New:        func(t *testing.T) lock.Locker { return s.locker(t, liveness) },
							EndSession: s.destroy,
							DeleteKey:  func(t *testing.T, key string) { s.remove(t, "tasks/"+key) },
						}
					})
				})
			}
		})
	}
}

// The suite of limits. The real server has passed it in lock/consul.
func TestSemaphores(t *testing.T) {
	for _, liveness := range []consul.Liveness{consul.Check, consul.TTL} {
		t.Run(string(liveness), func(t *testing.T) {
			t.Parallel()
			locktest.RunSemaphores(t, func(t *testing.T) locktest.SemaphoreBackend {
				s := servers["fake"](t)
				const garbage = `{"Limit": 1, "Holders": {}, "Colour": "green"}`
				return locktest.SemaphoreBackend{
					LockDelay: lockDelay,
					New: func(t *testing.T) (lock.Locker, lock.Semaphores) {
						l := s.locker(t, liveness)
						return l, l.Semaphores()
					},
					Exact:      true,
					EndSession: s.destroy,
					Revoke:     func(t *testing.T, name string, h lock.SlotHolder) { s.remove(t, "limits/"+name+"/"+h.Session) },
					Spoil: func(t *testing.T, name string) {
						if _, err := s.api.KV().Put(&api.KVPair{Key: s.prefix + "/limits/" + name + "/.lock", Value: []byte(garbage)}, nil); err != nil {
							t.Fatal(err)
						}
					},
					Damaged: func(t *testing.T, name string) bool {
						pair, _, err := s.api.KV().Get(s.prefix+"/limits/"+name+"/.lock", nil)
						if err != nil || pair == nil {
							t.Fatal(pair, err)
						}
						return string(pair.Value) == garbage
					},
				}
			})
		})
	}
}

// An exchange is a request, and what must come back: the same from both servers. KEY, OTHER
// and so on are replaced by what the test knows; what differs from server to server is
// replaced by words before it is compared.
type exchange struct {
	method, path, body string
	status             int
	want               string // a part of the answer
}

// TestAnswers holds codes and texts.
func TestAnswers(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		session := func() string {
			id, _, err := s.api.Session().CreateNoChecks(&api.SessionEntry{TTL: "60s", Behavior: "delete", LockDelay: time.Minute}, nil)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _, _ = s.api.Session().Destroy(id, nil) })
			return id
		}
		a, b, dead := session(), session(), session()
		if ok, _, err := s.api.KV().Acquire(&api.KVPair{Key: s.prefix + "/delayed", Session: dead}, nil); !ok || err != nil {
			t.Fatalf("lock: %v, %v", ok, err)
		}
		s.destroy(t, dead)
		replace := strings.NewReplacer("P/", s.prefix+"/", "SA", a, "SB", b, "SDEAD", dead)
		back := strings.NewReplacer(s.prefix+"/", "P/", a, "SA", b, "SB", dead, "SDEAD")
		txn := func(ops ...string) string { return "[" + strings.Join(ops, ",") + "]" }
		op := func(verb, key, rest string) string {
			return fmt.Sprintf(`{"KV":{"Verb":%q,"Key":%q%s}}`, verb, "P/"+key, rest)
		}
		const asA, asB = `,"Session":"SA"`, `,"Session":"SB"`
		for i, e := range []exchange{
			{"GET", "kv/P/none", "", 404, ""},
			{"GET", "kv/P/none?recurse", "", 404, ""},
			{"GET", "kv/P/none?keys", "", 404, ""},
			{"PUT", "kv/P/plain", "text", 200, "true"},
			{"GET", "kv/P/plain", "", 200, `"Key":"P/plain","Flags":0,"Value":"dGV4dA==","CreateIndex"`},
			{"PUT", "kv/P/plain?cas=1", "other", 200, "false"},
			{"PUT", "kv/P/plain?cas=0", "other", 200, "false"},
			{"PUT", "kv/P/new?cas=0", "new", 200, "true"},
			{"DELETE", "kv/P/new?cas=1", "", 200, "false"},
			{"DELETE", "kv/P/new", "", 200, "true"},
			{"DELETE", "kv/P/new", "", 200, "true"},
			{"PUT", "kv/P/held?acquire=SA", "a", 200, "true"},
			{"PUT", "kv/P/held?acquire=SA", "a", 200, "true"},
			{"PUT", "kv/P/held?acquire=SB", "b", 200, "false"},
			{"PUT", "kv/P/held?release=SB", "b", 200, "false"},
			{"PUT", "kv/P/delayed?acquire=SB", "b", 200, "false"},
			{"PUT", "kv/P/free?acquire=SDEAD", "d", 500, "invalid session"},
			{"GET", "kv/P/held", "", 200, `"LockIndex":1,"Key":"P/held","Flags":0,"Value":"YQ==","Session":"SA"`},
			{"PUT", "kv/P/held", "written", 200, "true"},
			{"GET", "kv/P/held", "", 200, `"LockIndex":0,"Key":"P/held","Flags":0,"Value":"d3JpdHRlbg==","Session":"SA"`},
			{"PUT", "kv/P/held?release=SA", "r", 200, "true"},
			{"GET", "kv/P/held", "", 200, `"Key":"P/held","Flags":0,"Value":"cg==","CreateIndex"`},
			{"PUT", "kv/P/held?acquire=SB", "b", 200, "true"},
			{"PUT", "txn", txn(op("lock", "held", asA)), 409, `"OpIndex":0,"What":"failed to lock key \"P/held\", lock is already held"`},
			{"PUT", "txn", txn(op("lock", "mine", asA), op("lock", "delayed", asA)), 409, `"OpIndex":1,"What":"failed to lock key \"P/delayed\" due to lock delay"`},
			{"PUT", "txn", txn(op("lock", "mine", asA), op("lock", "held", asA), op("delete", "mine", ""), op("check-not-exists", "held", "")), 409, `"OpIndex":3,"What":"key \"P/held\" exists"`},
			{"GET", "kv/P/mine", "", 404, ""},
			{"PUT", "txn", txn(op("lock", "mine", `,"Session":"SDEAD"`)), 409, `invalid session`},
			{"PUT", "txn", txn(op("check-session", "held", asA)), 409, `failed session check for key \"P/held\"`},
			{"PUT", "txn", txn(op("check-session", "none", asA)), 409, `failed to check session, key \"P/none\" doesn't exist`},
			{"PUT", "txn", txn(op("check-index", "none", `,"Index":1`)), 409, `failed to check index, key \"P/none\" doesn't exist`},
			{"PUT", "txn", txn(op("check-index", "held", `,"Index":1`)), 409, `failed index check for key \"P/held\"`},
			{"PUT", "txn", txn(op("get", "none", "")), 409, `key \"P/none\" doesn't exist`},
			{"PUT", "txn", txn(op("get-or-empty", "none", "")), 200, `"Results":[{"KV":{"LockIndex":0,"Key":"P/none","Flags":0,"Value":null,"CreateIndex":0,"ModifyIndex":0}}]`},
			{"PUT", "txn", txn(op("get-tree", "he", "")), 200, `"Key":"P/held","Flags":0,"Value":"Yg==","Session":"SB"`},
			{"PUT", "txn", txn(op("cas", "held", `,"Index":1`)), 409, `failed to set key \"P/held\", index is stale`},
			{"PUT", "txn", txn(op("delete-cas", "held", `,"Index":1`)), 409, `failed to delete key \"P/held\", index is stale`},
			{"PUT", "txn", txn(op("delete-cas", "none", `,"Index":1`)), 200, `"Errors":null`},
			{"PUT", "txn", txn(op("unlock", "held", asA)), 409, `failed to unlock key \"P/held\", lock isn't held, or is held by another session`},
			{"PUT", "txn", txn(op("unlock", "none", asA)), 409, `"OpIndex":0,"What":"failed to unlock key \"P/none\", lock isn't held, or is held by another session"}`},
			{"PUT", "txn", txn(op("unlock", "held", "")), 409, `missing session`},
			{"PUT", "txn", txn(op("unlock", "plain", asA)), 409, `failed to unlock key \"P/plain\", lock isn't held, or is held by another session"}`},
			{"PUT", "txn", txn(op("lock", "short", asA+`,"Value":"YQ=="`)), 200, `"LockIndex":1,"Key":"P/short"`},
			{"PUT", "txn", txn(op("check-not-exists", "none", ""), op("check-session", "short", asA), op("unlock", "short", asA+`,"Value":"Yg=="`)), 200,
				`{"Results":[{"KV":{"LockIndex":1,"Key":"P/short","Flags":0,"Value":null,"Session":"SA"`},
			{"GET", "kv/P/short", "", 200, `"LockIndex":1,"Key":"P/short","Flags":0,"Value":"Yg==","CreateIndex"`},
			{"PUT", "txn", txn(op("unlock", "short", asA)), 409, `failed to unlock key \"P/short\", lock isn't held, or is held by another session"}`},
			{"PUT", "txn", txn(op("lock", "short", asB+`,"Value":"Yw=="`), op("unlock", "held", asA)), 409, `{"Results":null,"Errors":[{"OpIndex":1,"What":"failed to unlock key`},
			{"GET", "kv/P/short", "", 200, `"LockIndex":1,"Key":"P/short","Flags":0,"Value":"Yg==","CreateIndex"`},
			{"PUT", "txn", txn(op("lock", "short", asB+`,"Value":"Yw=="`)), 200, `"LockIndex":2,"Key":"P/short","Flags":0,"Value":null,"Session":"SB"`},
			{"PUT", "txn", txn(op("unlock", "short", asB+`,"Flags":7`), op("lock", "short", asA), op("get", "short", "")), 200, `"LockIndex":3,"Key":"P/short","Flags":0,"Value":null,"Session":"SA"`},
			{"PUT", "txn", txn(op("set", "short", `,"Value":"ZA==","Flags":3`), op("get", "short", "")), 200, `"Key":"P/short","Flags":3,"Value":"ZA==","Session":"SA"`},
			{"PUT", "txn", txn(op("check-not-exists", "short", "")), 409, `{"Results":null,"Errors":[{"OpIndex":0,"What":"key \"P/short\" exists"}]`},
			{"PUT", "txn", txn(op("check-not-exists", "none", "")), 200, `{"Results":[],"Errors":null`},
			{"PUT", "txn", txn(op("check-not-exists", "none", ""), op("delete", "none", "")), 200, `{"Results":[],"Errors":null`},
			{"PUT", "txn", txn(op("check-index", "short", `,"Index":INDEX`), op("delete-cas", "short", `,"Index":INDEX`)), 200, `"Key":"P/short","Flags":3,"Value":null,"Session":"SA"`},
			{"PUT", "txn", txn(op("check-index", "plain", `,"Index":1`)), 409, `{"Results":null,"Errors":[{"OpIndex":0,"What":"failed index check for key \"P/plain\", current modify index INDEX != 1"}]`},
			{"PUT", "txn", txn(op("lock", "mine", asA+`,"Value":"eA=="`), op("check-session", "held", asB), op("delete", "plain", "")), 200, `{"Results":[{"KV":{"LockIndex":1,"Key":"P/mine","Flags":0,"Value":null,"Session":"SA"`},
			{"PUT", "txn", txn(op("check-session", "mine", asA), op("delete", "mine", "")), 200, `"Errors":null`},
			{"GET", "kv/P/mine", "", 404, ""},
			{"GET", "kv/P/plain", "", 404, ""},
			{"GET", "session/info/SDEAD", "", 200, "[]"},
			{"GET", "session/info/SA", "", 200, `"ID":"SA"`},
			{"PUT", "session/renew/SDEAD", "", 404, "Session id 'SDEAD' not found"},
			{"PUT", "session/renew/SA", "", 200, `"ID":"SA"`},
			{"PUT", "session/destroy/SDEAD", "", 200, "true"},
			{"PUT", "session/create", `{"TTL":"500ms"}`, 500, "Invalid Session TTL"},
			{"PUT", "session/create", `{"TTL":"60s","NodeChecks":[],"ServiceChecks":[{"ID":"service:nobody"}]}`, 500, "Missing check 'service:nobody' registration"},
			{"PUT", "agent/check/update/service:nobody", `{"Status":"passing"}`, 404, `Unknown check ID "service:nobody"`},
			{"PUT", "agent/service/deregister/nobody", "", 404, `Unknown service ID "nobody"`},
		} {
			// INDEX is the ModifyIndex of the key that was named last.
			if i := strings.LastIndex(e.body, `"Key":"P/`); i >= 0 && strings.Contains(e.body+e.want, "INDEX") {
				key, _, _ := strings.Cut(e.body[i+len(`"Key":"P/`):], `"`)
				pair, _, err := s.api.KV().Get(s.prefix+"/"+key, &api.QueryOptions{RequireConsistent: true})
				if err != nil || pair == nil {
					t.Fatalf("%d: read key %s: %v, %v", i, key, pair, err)
				}
				index := strconv.FormatUint(pair.ModifyIndex, 10)
				e.body, e.want = strings.ReplaceAll(e.body, "INDEX", index), strings.ReplaceAll(e.want, "INDEX", index)
			}
			r, err := http.NewRequestWithContext(t.Context(), e.method, "http://"+s.addr+"/v1/"+replace.Replace(e.path), strings.NewReader(replace.Replace(e.body)))
			if err != nil {
				t.Fatal(err)
			}
			transport := s.transport
			if transport == nil {
				transport = http.DefaultTransport
			}
			response, err := transport.RoundTrip(r)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(response.Body)
			_ = response.Body.Close()
			if err != nil {
				t.Fatal(err)
			}
			var compact bytes.Buffer
			got := string(body)
			if json.Compact(&compact, body) == nil {
				got = compact.String()
			}
			if got = back.Replace(got); response.StatusCode != e.status || !strings.Contains(got, e.want) {
				t.Errorf("%d: %s %s %s: got %d %s, want %d with %s", i, e.method, e.path, e.body, response.StatusCode, got, e.status, e.want)
			}
		}
	})
}

// Indexes, as those who watch need them.
func TestIndexes(t *testing.T) {
	both(t, func(t *testing.T, s *server) {
		kv := s.api.KV()
		folder := s.prefix + "/folder/"
		put := func(key, value string) {
			t.Helper()
			if _, err := kv.Put(&api.KVPair{Key: folder + key, Value: []byte(value)}, nil); err != nil {
				t.Fatal(err)
			}
		}
		list := func() (int, uint64) {
			t.Helper()
			pairs, meta, err := kv.List(folder, nil)
			if err != nil {
				t.Fatal(err)
			}
			return len(pairs), meta.LastIndex
		}
		put("a", "1")
		put("b", "1")
		_, first := list()
		if _, err := kv.Put(&api.KVPair{Key: s.prefix + "/elsewhere"}, nil); err != nil {
			t.Fatal(err)
		}
		if _, same := list(); same != first {
			t.Errorf("a write elsewhere moved the index of the folder from %d to %d", first, same)
		}
		put("a", "1")
		if _, same := list(); same != first {
			t.Errorf("a write of the same value moved the index of the folder from %d to %d", first, same)
		}
		if _, err := kv.Delete(folder+"a", nil); err != nil {
			t.Fatal(err)
		}
		n, second := list()
		if n != 1 || second <= first {
			t.Errorf("after a deletion: %d keys with index %d, was %d", n, second, first)
		}

		// A blocking query waits for a change, and not for one elsewhere.
		got := make(chan uint64, 1)
		go func() {
			_, meta, err := kv.List(folder, &api.QueryOptions{WaitIndex: second, WaitTime: 5 * time.Minute})
			if err != nil {
				got <- 0
				return
			}
			got <- meta.LastIndex
		}()
		time.Sleep(100 * time.Millisecond)
		if _, err := kv.Put(&api.KVPair{Key: s.prefix + "/elsewhere", Value: []byte("2")}, nil); err != nil {
			t.Fatal(err)
		}
		select {
		case <-got:
			t.Error("a write elsewhere ended the wait")
		case <-time.After(100 * time.Millisecond):
		}
		put("c", "1")
		select {
		case third := <-got:
			if third <= second {
				t.Errorf("woken with index %d, was %d", third, second)
			}
		case <-time.After(time.Minute):
			t.Error("a write did not end the wait")
		}

		// It answers after its time, too.
		began := time.Now()
		if _, _, err := kv.Get(folder+"c", &api.QueryOptions{WaitIndex: 1 << 40, WaitTime: 300 * time.Millisecond}); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took < 300*time.Millisecond || took > 300*time.Millisecond+s.late() {
			t.Errorf("a wait of 300ms took %v", took)
		}
	})
}

// Sessions end by their TTL and by their check, and leave a lock-delay behind.
func TestSessionsEnd(t *testing.T) {
	for name, test := range map[string]struct {
		byCheck  bool
		from, to time.Duration
	}{
		"by the TTL":   {false, time.Second, 2 * time.Second},
		"by the check": {true, time.Second, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			both(t, func(t *testing.T, s *server) { sessionEnds(t, s, test.byCheck, test.from, test.to) })
		})
	}
}

func sessionEnds(t *testing.T, s *server, byCheck bool, from, to time.Duration) {
	service := "svc-" + strings.ReplaceAll(s.prefix, "/", "-")
	err := s.api.Agent().ServiceRegister(&api.AgentServiceRegistration{ID: service, Name: service,
		Check: &api.AgentServiceCheck{CheckID: "service:" + service, TTL: "1s", Status: api.HealthPassing}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.api.Agent().ServiceDeregister(service) })
	entry := map[string]any{"TTL": "1s", "NodeChecks": []string{}, "Behavior": "delete", "LockDelay": "1s"}
	if byCheck {
		entry["TTL"], entry["ServiceChecks"] = "60s", []api.ServiceCheck{{ID: "service:" + service}}
	}
	const pause = 5 * time.Millisecond
	key := s.prefix + "/k"
	acquire := func(session string) (bool, error) {
		ok, _, err := s.api.KV().Acquire(&api.KVPair{Key: key, Session: session}, nil)
		return ok, err
	}

	// The servers hear of the check some time after the agent. On a slow machine it may have failed
	// again until then, or until the key is locked.
	var session string
	var began, alive time.Time // read before the last sign of life was given, and before the session was last seen
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(pause) {
		began = time.Now()
		if err := s.api.Agent().UpdateTTL("service:"+service, "", api.HealthPassing); err != nil {
			t.Fatal(err)
		}
		var out struct{ ID string }
		_, err := s.api.Raw().Write("/v1/session/create", entry, &out, nil)
		alive = time.Now()
		locked := false
		if session = out.ID; err == nil {
			locked, err = acquire(session)
		}
		if locked && err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("a session, and the key locked under it: %v, %v", locked, err)
		}
	}

	consistent := &api.QueryOptions{RequireConsistent: true}
	for ; ; time.Sleep(pause) {
		asked := time.Now()
		entry, _, err := s.api.Session().Info(session, consistent)
		if err != nil {
			t.Fatal(err)
		}
		if entry == nil {
			break
		}
		alive = asked
	}
	if took := time.Since(began); took < from || took > to+s.late() {
		t.Errorf("the session ended after %v, not between %v and %v", took, from, to)
	}
	if pair, _, err := s.api.KV().Get(key, consistent); pair != nil || err != nil {
		t.Errorf("the key is left: %v, %v", pair, err)
	}
	other, _, err := s.api.Session().CreateNoChecks(&api.SessionEntry{TTL: "60s"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.destroy(t, other)
	for ; ; time.Sleep(pause) {
		ok, err := acquire(other)
		if err != nil {
			t.Fatal(err)
		}
		if ok {
			break
		}
	}
	if took := time.Since(alive); took < time.Second || took > time.Second+s.late() {
		t.Errorf("the lock-delay of 1s took %v", took)
	}
}
