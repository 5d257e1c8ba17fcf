package worker_test

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/hashicorp/consul/api"

	"onejob/internal/servers"
	"onejob/internal/testenv"
	"onejob/lock"
	"onejob/lock/consul"
	"onejob/tasks"
	"onejob/worker"
)

// elsewhere is the same database with another Consul, as a wrong address gives it.
func (c *cluster) elsewhere(t *testing.T, kv *testenv.KV) *cluster {
	t.Helper()
	return &cluster{dsn: c.dsn, kv: kv, pool: c.pool, patient: c.patient, replicas: c.replicas}
}

// behind is the same cluster by ways that can be cut.
func (c *cluster) behind(t *testing.T) (b *cluster, toPostgres, toConsul *testenv.Proxy) {
	t.Helper()
	dsn, err := url.Parse(c.dsn)
	if err != nil {
		t.Fatal(err)
	}
	toPostgres, toConsul = testenv.NewProxy(t, dsn.Host), testenv.NewProxy(t, c.kv.Addr)
	dsn.Host = toPostgres.Addr
	b = c.elsewhere(t, &testenv.KV{Client: c.kv.Client, Addr: toConsul.Addr, Prefix: c.kv.Prefix})
	b.dsn = dsn.String()
	return b, toPostgres, toConsul
}

// states returns the states of the replicas of that name, in the order of their
// sessions.
func (c *cluster) states(t *testing.T, name string) string {
	t.Helper()
	return get[string](t, c, "SELECT coalesce(string_agg(state, ' ' ORDER BY began_at), '') FROM onejob.replicas WHERE name = $1", name)
}

// A replica with a wrong Consul address finds no session that it knows there. It must
// rob nobody, and work as soon as nobody else works elsewhere.
func TestWrongConsul(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.patient = true
	_, other := testenv.OwnConsul(t, servers.ConsulConfig{})
	began := make(chan string, 10)
	right := c.replica(t, "right", kinds(began), nil)
	id := c.insert(t, "kind, lock_key", "wait", "shared")
	<-began

	wrong := c.elsewhere(t, other).begin(t, "wrong", kinds(began), nil)
	why := wrong.logged(t, "consul_is_another")
	if text := why["error"].(string); !strings.Contains(text, "replica right") || !strings.Contains(text, "is this the right Consul") {
		t.Errorf("the error is %q", text)
	}
	c.await(t, c.insert(t, "kind", "noop"), "succeeded")
	time.Sleep(3 * time.Second) // nothing tells that it does nothing
	if got := get[string](t, c, "SELECT replica || ' ' || crashes || ' ' || attempt FROM onejob.tasks WHERE id = $1 AND status = 'running'", id); got != "right 0 1" {
		t.Errorf("the task is %q, want it with its replica", got)
	}
	if n := wrong.events.FilterMessage("consul_is_another").Len(); n != 1 {
		t.Errorf("it was said %d times", n)
	}
	if states := c.states(t, "wrong"); states != "" {
		t.Errorf("the stranger is on the list: %s", states)
	}

	c.exec(t, "SELECT onejob.cancel($1)", id)
	c.await(t, id, "cancelled")
	if err := right.stop(); err != nil {
		t.Error(err)
	}
	wrong.ready(t) // nobody is at work any more: it may be the right one
	c.await(t, c.insert(t, "kind", "noop"), "succeeded")

	// The other one is the stranger now.
	again := c.begin(t, "again", kinds(began), nil)
	again.logged(t, "consul_is_another")
	c.noOverlaps(t)
}

// Another cluster's Consul is not adopted while its replicas work there.
func TestConsulOfAnotherCluster(t *testing.T) {
	t.Parallel()
	theirs := newCluster(t)
	theirs.replica(t, "theirs", kinds(nil), nil)
	ours := migratedCluster(t, migrated.Postgres(t), theirs.kv)
	r := ours.begin(t, "ours", kinds(nil), nil)
	if text := r.logged(t, "consul_is_another")["error"].(string); !strings.Contains(text, "replicas of another database are at work here") {
		t.Errorf("the error is %q", text)
	}
	theirs.await(t, theirs.insert(t, "kind", "noop"), "succeeded")
}

// A command such as onejob lock belongs to no cluster: it keeps no replica from adopting a Consul that
// has another id, as after a snapshot was restored.
func TestCommandsKeepNoConsulFromBeingAdopted(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	cfg := c.lockConfig()
	cfg.Log, _ = testenv.Logger(t)
	command, err := consul.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- command.Run(ctx, nil) }()
	defer func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	if err := command.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := c.kv.Client.KV().Put(&api.KVPair{Key: c.kv.Prefix + "/cluster", Value: []byte(uuid.NewString())}, nil); err != nil {
		t.Fatal(err)
	}
	c.replica(t, "r", kinds(nil), nil)
	c.await(t, c.insert(t, "kind", "noop"), "succeeded")
	if command.Session() == "" {
		t.Error("the command has lost its session")
	}
}

// The cluster's id in Consul is an ordinary key, which people delete and overwrite.
func TestClusterKeyIsTouched(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	began := make(chan string, 10)
	r := c.replica(t, "a", kinds(began), nil)
	id := c.insert(t, "kind", "wait")
	<-began
	session := r.locks.Session()
	key := c.kv.Prefix + "/cluster"
	ours := get[string](t, c, "SELECT id::text FROM onejob.cluster")
	value := func() string {
		pair, _, err := c.kv.Client.KV().Get(key, nil)
		if err != nil {
			t.Fatal(err)
		}
		if pair == nil {
			return ""
		}
		return string(pair.Value)
	}
	if value() != ours {
		t.Fatalf("Consul has %q, Postgres %q", value(), ours)
	}
	if _, err := c.kv.Client.KV().Delete(key, nil); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, maxWait, "the key is back", func() bool { return value() == ours })
	if r.locks.Session() != session {
		t.Error("the session was lost")
	}

	if _, err := c.kv.Client.KV().Put(&api.KVPair{Key: key, Value: []byte(uuid.NewString())}, nil); err != nil {
		t.Fatal(err)
	}
	r.logged(t, "session_lost")
	r.ready(t) // its own session alone was known here: it is its Consul
	testenv.Eventually(t, maxWait, "the task goes on", func() bool {
		return get[bool](t, c, "SELECT status = 'running' AND session::text <> $2 FROM onejob.tasks WHERE id = $1", id, session)
	})
	if value() != get[string](t, c, "SELECT id::text FROM onejob.cluster") {
		t.Error("Consul and Postgres have different ids")
	}
}

// A Consul that lost everything is adopted when the replicas that live have put their
// work back. Nothing of that is a crash.
func TestConsulIsWiped(t *testing.T) {
	t.Parallel()
	server, kv := testenv.OwnConsul(t, servers.ConsulConfig{})
	c := migratedCluster(t, migrated.Postgres(t), kv)
	began := make(chan string, 20)
	for _, name := range []string{"a", "b"} {
		c.replica(t, name, kinds(began), nil)
	}
	var ids []int64
	for range 4 {
		ids = append(ids, c.insert(t, "kind", "wait"))
		<-began
	}
	if err := server.Wipe(); err != nil {
		t.Fatal(err)
	}
	if err := server.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range ids {
		<-began
	}
	for _, id := range ids {
		testenv.Eventually(t, maxWait, "it runs again", func() bool {
			return get[bool](t, c, "SELECT status = 'running' FROM onejob.tasks WHERE id = $1", id)
		})
	}
	if got := get[int](t, c, "SELECT sum(crashes) FROM onejob.tasks"); got != 0 {
		t.Errorf("%d crashes were counted", got)
	}
	if got := get[int](t, c, "SELECT max(attempt) FROM onejob.tasks"); got != 1 {
		t.Errorf("attempts were used up: %d", got)
	}
	c.noOverlaps(t)
}

// An attempt that has ended, and whose outcome Postgres refuses for as long as its replica lives, does not keep
// the cluster from a Consul that has lost its data: nobody works under its lock.
func TestConsulIsWipedBesideAnOutcomeThatIsRefused(t *testing.T) {
	t.Parallel()
	server, kv := testenv.OwnConsul(t, servers.ConsulConfig{})
	c := migratedCluster(t, migrated.Postgres(t), kv)
	var replicas []*replica
	for _, name := range []string{"a", "b"} {
		replicas = append(replicas, c.replica(t, name, kinds(nil), nil))
	}
	c.exec(t, `CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$`)
	refused := get[int64](t, c, `INSERT INTO onejob.tasks (kind, lock_key, run_at) VALUES ('noop', 'refused', 'infinity') RETURNING id`)
	c.exec(t, fmt.Sprintf(`CREATE TRIGGER refuse BEFORE UPDATE ON onejob.tasks FOR EACH ROW WHEN (OLD.id = %d AND OLD.status = 'running') EXECUTE FUNCTION public.refuse()`, refused))
	c.exec(t, `UPDATE onejob.tasks SET run_at = now() WHERE id = $1`, refused)
	testenv.Eventually(t, maxWait, "it is known that its outcome is refused", func() bool {
		return slices.ContainsFunc(replicas, func(r *replica) bool { return r.events.FilterMessage("completion_unwritable").Len() > 0 })
	})
	if err := server.Wipe(); err != nil {
		t.Fatal(err)
	}
	if err := server.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.await(t, c.insert(t, "kind", "noop"), "succeeded")
	c.exec(t, `DROP TRIGGER refuse ON onejob.tasks`)
	c.await(t, refused, "succeeded")
}

// Consul alone does not prove a death, nor does its silence prove a life.
func TestKeyWithoutASession(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	session := uuid.NewString()
	if _, err := c.kv.Client.KV().Put(&api.KVPair{Key: c.kv.Prefix + "/replicas/" + session, Value: []byte("{}")}, nil); err != nil {
		t.Fatal(err)
	}
	id := get[int64](t, c, `INSERT INTO onejob.tasks (kind, status, session, replica, fence, started_at, attempt)
		VALUES ('noop', 'running', $1, 'ghost', nextval('onejob.fences'), now(), 1) RETURNING id`, session)
	c.replica(t, "a", kinds(nil), nil)
	c.await(t, id, "succeeded")
}

// A replica that cannot reach Postgres, and nobody but it, goes on with its work:
// Consul hears of it. One that reaches neither stops, and is taken over.
func TestTwoWitnesses(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.patient = true
	began := make(chan string, 10)
	behind, toPostgres, toConsul := c.behind(t)
	far := behind.replica(t, "far", kinds(began), nil)
	id := c.insert(t, "kind", "wait")
	<-began
	session := far.locks.Session()
	near := c.replica(t, "near", kinds(began), nil)

	toPostgres.Cut()
	time.Sleep(2 * lock.Silence)
	if far.locks.Session() != session {
		t.Error("it lost its session, though Consul heard of it")
	}
	if got := get[string](t, c, "SELECT replica FROM onejob.tasks WHERE id = $1 AND status = 'running'", id); got != "far" {
		t.Errorf("the task is with %q", got)
	}
	if near.events.FilterMessage("replica_dead").Len() != 0 {
		t.Error("it was called dead")
	}

	cut := time.Now()
	toConsul.Cut()
	testenv.Eventually(t, maxWait, "it stops by itself", func() bool { return far.locks.Session() == "" })
	stopped := time.Since(cut)
	near.logged(t, "replica_dead")
	<-began
	t.Logf("it stopped by itself %.1f s after both were cut, and was taken over after %.1f s", stopped.Seconds(), time.Since(cut).Seconds())
	if got := get[string](t, c, "SELECT replica FROM onejob.tasks WHERE id = $1 AND status = 'running'", id); got != "near" {
		t.Errorf("the task is with %q", got)
	}
	toPostgres.Heal()
	toConsul.Heal()
	far.ready(t)
	c.exec(t, "SELECT onejob.cancel($1)", id)
	c.await(t, id, "cancelled")
	c.noOverlaps(t)
}

// endSession ends a replica's session by hand, whichever it has by now.
func (c *cluster) endSession(t *testing.T, r *replica) {
	t.Helper()
	testenv.Eventually(t, maxWait, "a session is ended", func() bool {
		id := r.locks.Session()
		if id == "" {
			return false
		}
		_, err := c.kv.Client.Session().Destroy(id, nil)
		return err == nil
	})
}

// withAgent returns a cluster beside a Consul server of its own, and the same cluster as
// those see it who reach that server through a client agent.
func withAgent(t *testing.T) (c, hosted *cluster, server, agent *servers.Consul) {
	t.Helper()
	server, kv := testenv.OwnConsul(t, servers.ConsulConfig{})
	agent, err := servers.StartConsulAgent(t.Context(), server)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = agent.Close() })
	c = migratedCluster(t, migrated.Postgres(t), kv)
	return c, c.elsewhere(t, &testenv.KV{Client: agent.Client(), Addr: agent.Addr(), Prefix: kv.Prefix}), server, agent
}

// A lost host takes its Consul agent with it. Nobody is left who could fail its health
// check, so Consul itself would keep the session for up to twice its TTL.
func TestHostAndAgentAreLost(t *testing.T) {
	t.Parallel()
	c, hosted, _, agent := withAgent(t)
	w := newRecorder(t)
	// Consul alone would keep this session for longer than the test waits.
	lost := hosted.process(t, "lost", w.config(), "ONEJOB_CONSUL_CHECK_TTL=10m", "ONEJOB_CONSUL_SESSION_TTL=20m")
	id := c.stuck(t, w)
	c.patient = true
	near := c.replica(t, "near", kinds(nil), nil)
	session := near.locks.Session()
	c.process(t, "heir", w.config())

	agent.Kill()
	lost.signal(t, syscall.SIGKILL)
	gone := time.Now()
	c.await(t, id, "succeeded")
	t.Logf("taken over and done %.1f s after the loss of host and agent", time.Since(gone).Seconds())
	if n := near.events.FilterMessage("session_lost").Len(); n != 0 || near.locks.Session() != session {
		t.Errorf("a replica beside it lost %d sessions", n)
	}
	if got := c.states(t, "lost"); got != "dead" {
		t.Errorf("the lost replica is %q", got)
	}
	if got := c.outcomes(t, id); got != "crashed succeeded" {
		t.Errorf("outcomes: %s", got)
	}
	c.noOverlaps(t)
}

// A lease survives what happens every day, with the default times: the agent is restarted,
// the servers are for a moment without a leader, the process does not get to run.
func TestShortOutagesLoseNoLease(t *testing.T) {
	t.Parallel()
	c, hosted, server, agent := withAgent(t)
	w := newRecorder(t)
	holder := hosted.process(t, "holder", w.config())
	c.replica(t, "near", kinds(nil), nil) // it would take over

	const away = 3 * time.Second
	start := func(server *servers.Consul) {
		t.Helper()
		if err := server.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	// try has an outage while a task runs, and returns whether the task kept its lease.
	tries := 0
	try := func(outage func()) bool {
		tries++
		lost := holder.count("session_lost")
		testenv.Eventually(t, maxWait, "the holder has a session", func() bool { return holder.count("session_started") == lost+1 })
		id := c.insert(t, "kind, payload, lock_key", "exec", `{"command": "stuck"}`, fmt.Sprint("try-", tries))
		testenv.Eventually(t, maxWait, "the command is inside", func() bool { return w.began(t, id) })
		outage()
		// Leases that would be lost are lost by now.
		time.Sleep(lock.Silence + away)
		c.exec(t, "SELECT onejob.cancel($1)", id)
		c.awaitAll(t, 2*maxWait)
		return holder.count("session_lost") == lost && c.outcomes(t, id) == "cancelled"
	}
	for what, outage := range map[string]func(){
		"the agent is restarted": func() { agent.Kill(); time.Sleep(away); start(agent) },
		"there is no leader":     func() { _ = server.Freeze(); time.Sleep(away); _ = server.Thaw() },
		"the process stalls": func() {
			holder.signal(t, syscall.SIGSTOP)
			time.Sleep(away)
			holder.signal(t, syscall.SIGCONT)
		},
	} {
		t.Log(what)
		// The machine may keep the replica away for longer than the outage does.
		for n := 1; !try(outage); n++ {
			if n == 5 {
				t.Errorf("%s: the lease was lost %d times of %d", what, n, n)
				break
			}
		}
	}
}

// A replica that stops in order says so, and one whose session is ended by hand is not
// dead.
func TestReplicasAreListed(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	r := c.replica(t, "a", kinds(nil), func(w *worker.Config) { w.Version, w.Queues = "v1", []string{"default", "mail"} })
	testenv.Eventually(t, maxWait, "the replica is listed", func() bool {
		return get[string](t, c, "SELECT concat_ws(' ', version, array_to_string(queues, ','), concurrency, pid > 0) FROM onejob.replicas WHERE state = 'working' UNION ALL SELECT '' LIMIT 1") == "v1 default,mail 32 t"
	})
	if err := r.Reload(tasks.Kinds{"other": tasks.Noop{}}, nil, nil); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, maxWait, "the kinds are those of the new configuration", func() bool {
		return get[string](t, c, "SELECT string_agg(array_to_string(kinds, ','), ' ') FROM onejob.replicas WHERE state = 'working'") == "other"
	})
	c.endSession(t, r)
	// A busy machine ends sessions too: there may be more than one that is lost.
	lostBut := func(last string) bool {
		states := strings.Fields(c.states(t, "a"))
		n := len(states) - 1
		return n > 0 && states[n] == last && !slices.ContainsFunc(states[:n], func(s string) bool { return s != "lost" })
	}
	testenv.Eventually(t, maxWait, "a second session, and the first one lost", func() bool { return lostBut("working") })
	if err := r.stop(); err != nil {
		t.Error(err)
	}
	if !lostBut("stopped") {
		t.Errorf("the states are %q", c.states(t, "a"))
	}
}

// Consul and Postgres go together where Patroni keeps its own state in that Consul. No
// process ends of that, so nothing crashed.
func TestBothUnavailable(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	behind, toPostgres, toConsul := c.behind(t)
	began := make(chan string, 100)
	for _, name := range []string{"a", "b"} {
		behind.replica(t, name, kinds(began), nil)
	}
	const n = 6
	for range n {
		c.insert(t, "kind", "wait")
		<-began
	}
	for range 2 {
		toConsul.Cut()
		toPostgres.Cut()
		time.Sleep(12 * time.Second) // long enough for every lease to end
		toPostgres.Heal()
		toConsul.Heal()
		for range n {
			<-began
		}
	}
	if got := get[string](t, c, "SELECT concat_ws(' ', count(*), max(crashes), max(attempt)) FROM onejob.tasks WHERE status IN ('running', 'pending')"); got != fmt.Sprint(n, " 0 1") {
		t.Errorf("tasks, crashes and attempts are %s", got)
	}
	if got := get[int](t, c, "SELECT count(*) FROM onejob.attempts WHERE outcome = 'crashed'"); got != 0 {
		t.Errorf("%d crashes were counted", got)
	}
	c.noOverlaps(t)
}
