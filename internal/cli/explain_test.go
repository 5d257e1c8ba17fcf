package cli

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/hashicorp/consul/api"

	"onejob/internal/testenv"
)

// The lock of a task without a lock_key is that of its reused name, and its own name if another task
// has the reused one. Not parallel: the commands read the environment.
func TestExplainATaskWithoutALockKey(t *testing.T) {
	db, kv := testenv.Postgres(t), testenv.Consul(t)
	t.Setenv("ONEJOB_POSTGRES_DSN", db.DSN)
	t.Setenv("CONSUL_HTTP_ADDR", kv.Addr)
	t.Setenv("ONEJOB_CONSUL_PREFIX", kv.Prefix)
	t.Setenv("ONEJOB_CONFIG", "")
	os.Unsetenv("ONEJOB_CONFIG")
	onejob := func(args ...string) string {
		t.Helper()
		var out bytes.Buffer
		if code := run(t.Context(), Program{}, args, strings.NewReader(""), &out, &out); code != 0 {
			t.Fatalf("%v: exit code %d, %s", args, code, out.String())
		}
		return out.String()
	}
	onejob("migrate", "up")
	if _, err := db.Pool(t).Exec(t.Context(), `
INSERT INTO onejob.replicas (session, process, name, host, pid, version, kinds, queues, concurrency, running, state, heartbeat_at)
VALUES (gen_random_uuid(), gen_random_uuid(), 'r', 'h', 1, 'v', '{noop}', '{}', 5, 0, 'working', now() + interval '1 hour')`); err != nil {
		t.Fatal(err)
	}
	onejob("enqueue", "noop")
	session, _, err := kv.Client.Session().CreateNoChecks(&api.SessionEntry{TTL: "1h", LockDelay: 1}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = kv.Client.Session().Destroy(session, nil) })
	const nobody, locked, task = "nobody holds its lock key now", `{"replica":"onejob lock on here","pid":7}`, `{"task_id":1,"fence":3}`
	for _, test := range []struct{ name, reused, own, want string }{
		{"Free", "", "", nobody},
		{"ItsReusedName", "1 " + task, "", "its lock key is held by task 1 (session "},
		{"TheReusedNameOfAnother", `16385 {"task_id":16385,"fence":3}`, "", nobody},
		{"ItsOwnName", `16385 {"task_id":16385,"fence":3}`, task, "its lock key is held by task 1 (session "},
		{"ItsOwnNameSinceAnotherHadTheReusedOne", "", task, "its lock key is held by task 1 (session "},
		{"OnejobLockHasItsOwnName", `16385 {"task_id":16385,"fence":3}`, locked, "its lock key is held by onejob lock on here, process 7 (session "},
		{"OnejobLockIsNotInItsWay", "", locked, nobody},
		{"AReusedNameThatAPersonWrote", "x", "", `its lock key is held by another program: "x" (session `},
	} {
		t.Run(test.name, func(t *testing.T) {
			for key, value := range map[string]string{"/running/1": test.reused, "/tasks/1": test.own} {
				pair := &api.KVPair{Key: kv.Prefix + key, Value: []byte(value), Session: session}
				if value == "" {
					continue
				}
				if ok, _, err := kv.Client.KV().Acquire(pair, nil); !ok || err != nil {
					t.Fatalf("%s: %t, %v", key, ok, err)
				}
				defer func() { _, _ = kv.Client.KV().Delete(pair.Key, nil) }()
			}
			if out := onejob("tasks", "explain", "1"); !strings.Contains(out, test.want) {
				t.Errorf("%s, want %q", out, test.want)
			}
		})
	}

	t.Run("AReusedNameIsKeptUnlocked", func(t *testing.T) {
		if _, err := kv.Client.KV().Put(&api.KVPair{Key: kv.Prefix + "/running/1", Value: []byte("1 " + task)}, nil); err != nil {
			t.Fatal(err)
		}
		if out := onejob("tasks", "explain", "1"); !strings.Contains(out, nobody) {
			t.Errorf("%s, want %q", out, nobody)
		}
	})
}
