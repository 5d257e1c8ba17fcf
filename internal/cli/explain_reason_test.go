package cli

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/hashicorp/consul/api"

	"onejob/internal/testenv"
)

// Who holds the lock key in Consul is said only if it may be why the task waits. Not parallel: the
// commands read the environment.
func TestExplainNamesTheLockOnlyIfItMatters(t *testing.T) {
	db, kv := testenv.Postgres(t), testenv.Consul(t)
	t.Setenv("ONEJOB_POSTGRES_DSN", db.DSN)
	t.Setenv("CONSUL_HTTP_ADDR", kv.Addr)
	t.Setenv("ONEJOB_CONSUL_PREFIX", kv.Prefix)
	t.Setenv("ONEJOB_CONFIG", "")
	onejob := func(args ...string) string {
		t.Helper()
		var out bytes.Buffer
		if code := run(t.Context(), Program{}, args, strings.NewReader(""), &out, &out); code != 0 {
			t.Fatalf("%v: exit code %d, %s", args, code, out.String())
		}
		return out.String()
	}
	onejob("migrate", "up")
	pool := db.Pool(t)
	sql := func(text string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), text); err != nil {
			t.Fatal(err)
		}
	}
	sql(`
INSERT INTO onejob.replicas (session, process, name, host, pid, version, kinds, queues, names, concurrency, running, state, heartbeat_at)
SELECT gen_random_uuid(), gen_random_uuid(), 'r', 'h', 1, 'v', '{noop,exec}', '{}', names, 5, 0, 'working', now() + interval '1 hour'
  FROM (VALUES ('{"exec": {"command": ["backup", "report"]}}'::jsonb), ('{"exec": {"command": ["backup"]}}')) n (names)`)
	session, _, err := kv.Client.Session().CreateNoChecks(&api.SessionEntry{TTL: "1h", LockDelay: 1}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_, _ = kv.Client.Session().Destroy(session, new(api.WriteOptions).WithContext(context.Background()))
	})
	pair := &api.KVPair{Key: kv.Prefix + "/tasks/held", Value: []byte(`{"replica":"onejob lock on here","pid":7}`), Session: session}
	if ok, _, err := kv.Client.KV().Acquire(pair, nil); !ok || err != nil {
		t.Fatal(ok, err)
	}
	const nobody, held, nothing = "In Consul, nobody holds its lock key now", "In Consul, its lock key is held by onejob lock on here", ""
	for _, test := range []struct{ name, columns, values, why, want string }{
		{"NotDue", "kind, run_at", "'noop', now() + interval '1 hour'", "is not due", nothing},
		{"KindUnknown", "kind", "'pdf'", "knows its kind", nothing},
		{"CommandUnknown", "kind, payload", `'exec', '{"command": "vacuum"}'`, "has its command", nothing},
		{"CommandUnknownToOne", "kind, payload, fence, lock_key", `'exec', '{"command": "report"}', 1, 'free'`, "1 of 2 live replicas", nothing},
		{"CommandUnknownToOneAndKeyHeld", "kind, payload, fence, lock_key", `'exec', '{"command": "report"}', 1, 'held'`, "1 of 2 live replicas", held},
		{"GivenBack", "kind, fence, lock_key", `'noop', 1, 'free'`, "was claimed and given back", nobody},
		{"GivenBackAndKeyHeld", "kind, fence, lock_key", `'noop', 1, 'held'`, "was claimed and given back", held},
		{"NoReason", "kind, lock_key", "'noop', 'free'", "nothing is in its way", nobody},
		{"NoReasonForLong", "kind, created_at, run_at", "'noop', now() - interval '1 hour', now() - interval '1 hour'", "nothing in Postgres is in its way", nobody},
	} {
		t.Run(test.name, func(t *testing.T) {
			sql(`DELETE FROM onejob.tasks`)
			sql(`INSERT INTO onejob.tasks (id, ` + test.columns + `) OVERRIDING SYSTEM VALUE VALUES (17, ` + test.values + `)`)
			out := onejob("tasks", "explain", "17")
			if strings.Contains(out, "tasks explain") {
				t.Errorf("it names itself: %s", out)
			}
			first, rest, _ := strings.Cut(out, "\n")
			if !strings.Contains(first, test.why) || !strings.HasPrefix(rest, test.want) || (test.want == "" && rest != "") {
				t.Errorf("%s\n%s, want %q and %q", first, rest, test.why, test.want)
			}
		})
	}
}
