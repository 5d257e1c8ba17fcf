package worker_test

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/internal/servers"
	"onejob/internal/testenv"
)

// underRules starts a replica with a token of its own. It returns the token's rules, and what
// changes them.
func underRules(t *testing.T, settings ...string) (c *cluster, p *process, rules string, grant func(string)) {
	t.Helper()
	_, kv := testenv.OwnConsul(t, servers.ConsulConfig{ManagementToken: "8f0cf8a5-3f5e-4c55-8d0c-5f6fd7a0a1f2"})
	c = migratedCluster(t, migrated.Postgres(t), kv)
	rules = fmt.Sprintf(`
key_prefix %q { policy = "write" }
service "onejob" { policy = "write" }
session_prefix "" { policy = "write" }
node_prefix "" { policy = "read" }
`, kv.Prefix)
	policy, _, err := kv.Client.ACL().PolicyCreate(&api.ACLPolicy{Name: "replica", Rules: rules}, nil)
	if err != nil {
		t.Fatal(err)
	}
	token, _, err := kv.Client.ACL().TokenCreate(&api.ACLToken{Policies: []*api.ACLLink{{ID: policy.ID}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	p = c.process(t, "a", `kinds: {exec: {commands: {sleep: {path: /bin/sleep, args: ['5']}}}}`, append(settings, "CONSUL_HTTP_TOKEN="+token.SecretID)...)
	c.await(t, c.insert(t, "kind", "noop"), "succeeded")
	return c, p, rules, func(rules string) {
		t.Helper()
		if _, _, err := kv.Client.ACL().PolicyUpdate(&api.ACLPolicy{ID: policy.ID, Name: policy.Name, Rules: rules}, nil); err != nil {
			t.Fatal(err)
		}
	}
}

// While no lock can be had, because the token may not write the keys of tasks, tasks are
// not claimed and given back again and again: each time costs a fence and two writes.
func TestFencesAreNotUsedUpWhileLocksFail(t *testing.T) {
	t.Parallel()
	c, p, rules, grant := underRules(t)
	kv := c.kv

	narrowed := rules
	for _, folder := range []string{"/tasks/", "/running/"} {
		narrowed += fmt.Sprintf("key_prefix %q { policy = \"read\" }\n", kv.Prefix+folder)
	}
	grant(narrowed)
	c.exec(t, "INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, 100)")
	p.logged(t, "lock_failed")
	fences := func() int64 { return get[int64](t, c, "SELECT last_value FROM onejob.fences") }
	// What had been claimed by then, and what is claimed before Consul knows the rules.
	time.Sleep(2 * time.Second)
	before, since := fences(), time.Now()
	time.Sleep(5 * time.Second) // nothing is to happen
	if n, most := fences()-before, int64(math.Ceil(time.Since(since).Seconds()))+2; n > most {
		t.Errorf("%d fences were used up while no lock could be had, want %d at most: one a second", n, most)
	}

	grant(rules)
	p.logged(t, "lock_recovered")
	c.awaitAll(t, maxWait)
	c.wantNone(t, "tasks did not succeed", "SELECT count(*) FROM onejob.tasks WHERE status <> 'succeeded'")
}

// Lock keys that the token may not write keep no other tasks, however urgent theirs are.
func TestLockKeysThatConsulRefusesStopNoOthers(t *testing.T) {
	t.Parallel()
	c, p, rules, grant := underRules(t)
	grant(rules + fmt.Sprintf("key_prefix %q { policy = \"deny\" }\n", c.kv.Prefix+"/tasks/secret"))
	c.insert(t, "kind, priority, lock_key", "noop", 9, "secret")
	p.logged(t, "lock_failed")
	c.exec(t, "INSERT INTO onejob.tasks (kind, priority, lock_key) SELECT 'noop', 9, 'secret-' || i FROM generate_series(1, 100) i")
	c.exec(t, "INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, 300)")
	testenv.Eventually(t, maxWait, "all others have succeeded", func() bool {
		return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE lock_key IS NULL AND status <> 'succeeded'") == 0
	})
	grant(rules)
	c.awaitAll(t, maxWait)
	c.wantNone(t, "tasks did not succeed", "SELECT count(*) FROM onejob.tasks WHERE status <> 'succeeded'")
}

// A replica that has lost the right to write says that it cannot give back the lock of a task that has
// ended, and gives it back by ending its session.
func TestLocksAreGivenBackWithoutTheRightTo(t *testing.T) {
	t.Parallel()
	c, p, rules, grant := underRules(t, "ONEJOB_CONSUL_VERIFY=300ms")
	id := c.insert(t, "kind, payload, lock_key", "exec", `{"command": "sleep"}`, "k")
	c.await(t, id, "running")
	holder := func() string {
		pair, _, err := c.kv.Client.KV().Get(c.kv.Prefix+"/tasks/k", nil)
		if err != nil {
			t.Fatal(err)
		}
		if pair == nil {
			return ""
		}
		return pair.Session
	}
	testenv.Eventually(t, maxWait, "the task is locked", func() bool { return holder() != "" })
	grant(strings.Replace(rules, `policy = "write"`, `policy = "read"`, 1))
	p.logged(t, "release_failed")
	testenv.Eventually(t, maxWait, "the lock is free", func() bool { return holder() == "" })
	c.await(t, id, "succeeded")
	grant(rules)
	c.await(t, c.insert(t, "kind, lock_key", "noop", "k"), "succeeded")
}
