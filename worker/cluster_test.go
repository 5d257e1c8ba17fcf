package worker_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/internal/procfs"
	"onejob/internal/servers"
	"onejob/internal/testenv"
)

// Three replicas, each a supervisor and its working process, go through what happens to
// a whole cluster: upgrades, a power cut, an outage of Postgres and Consul together.
// None of it may be held against a task.

// scaled returns a number from the environment. The default keeps a test short.
func scaled(t *testing.T, variable string, byDefault int) int {
	t.Helper()
	n, err := strconv.Atoi(cmp.Or(os.Getenv(variable), strconv.Itoa(byDefault)))
	if err != nil || n < 1 {
		t.Fatalf("%s: %q is not a number above zero", variable, os.Getenv(variable))
	}
	return n
}

// trio starts three replicas.
func (c *cluster) trio(t *testing.T, config string, settings ...string) []*process {
	t.Helper()
	var all []*process
	for _, name := range []string{"a", "b", "c"} {
		all = append(all, c.process(t, name, config, settings...))
	}
	return all
}

// breakdown says how the tasks stand, for when a test fails.
func (c *cluster) breakdown(t *testing.T) string {
	t.Helper()
	rows, err := c.pool.Query(t.Context(), `
SELECT format('%s tasks %s, attempt %s, crashes %s, %s', count(*), status, attempt, crashes, coalesce(error, 'no error'))
  FROM onejob.tasks
 GROUP BY status, attempt, crashes, error
 ORDER BY count(*) DESC
 LIMIT 20`)
	if err != nil {
		t.Fatal(err)
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(lines, "\n")
}

// wantNone fails the test if a query counts anything.
func (c *cluster) wantNone(t *testing.T, what, sql string, args ...any) {
	t.Helper()
	if n := get[int](t, c, sql, args...); n != 0 {
		t.Errorf("%d %s:\n%s", n, what, c.breakdown(t))
	}
}

// TestGracefulRestartsUseUpNoAttempt stops and starts replicas under a backlog, one, two
// and three of them at a time. Each task has a single attempt. TEST_RESTARTS=36 restarts
// 36 times under a backlog of 15,000.
func TestGracefulRestartsUseUpNoAttempt(t *testing.T) {
	t.Parallel()
	restarts := scaled(t, "TEST_RESTARTS", 6)
	backlog := restarts * 15000 / 36
	c := newCluster(t)
	c.exec(t, `CREATE TABLE public.effects (task_id bigint NOT NULL)`)
	const config = `
kinds:
  sql:
    statements:
      nap: {sql: "INSERT INTO public.effects SELECT current_setting('onejob.task_id')::bigint FROM pg_sleep(0.05)"}
`
	// Most tasks take a while, so that restarts meet tasks in each part of their lives.
	enqueue := func(n int) {
		c.exec(t, `
INSERT INTO onejob.tasks (kind, payload, max_attempts, lock_key)
SELECT CASE WHEN i % 3 = 0 THEN 'noop' ELSE 'sql' END,
       CASE WHEN i % 3 = 0 THEN '{}'::jsonb ELSE '{"statement": "nap"}' END,
       1,
       CASE WHEN i % 5 = 0 THEN 'key ' || i END
  FROM generate_series(1, $1) i`, n)
	}
	count := func(where string, args ...any) int {
		return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE "+where, args...)
	}
	settings := []string{"ONEJOB_LOG_LEVEL=info"}
	enqueue(backlog)
	replicas := c.trio(t, config, settings...)

	next, restarted, waiting := 0, 0, 0
	for together := 1; restarted < restarts; together = together%len(replicas) + 1 {
		var stopping []int
		for range min(together, restarts-restarted) {
			stopping = append(stopping, next%len(replicas))
			next++
		}
		if count("status = 'pending'") < 500 {
			enqueue(1000)
		}
		for _, i := range stopping {
			p := replicas[i]
			testenv.Eventually(t, maxWait, p.name+" works", func() bool { return count("status = 'running' AND replica = $1", p.name) > 0 })
		}
		for _, i := range stopping {
			replicas[i].signal(t, syscall.SIGTERM)
		}
		for _, i := range stopping {
			p := replicas[i]
			select {
			case <-p.exited:
			case <-time.After(2 * maxWait):
				t.Fatalf("%s does not end", p.name)
			}
			if code := p.cmd.ProcessState.ExitCode(); code != 0 {
				t.Errorf("%s exited with %d", p.name, code)
			}
		}
		if count("status = 'pending'") > 0 { // or the others were quicker than those that stopped
			waiting++
		}
		for _, i := range stopping {
			replicas[i] = c.process(t, replicas[i].name, config, settings...)
			restarted++
		}
	}
	c.awaitAll(t, 5*time.Minute)
	n := count("true")
	t.Logf("%d graceful restarts under %d tasks; there was a backlog after %d rounds", restarted, n, waiting)
	if waiting == 0 {
		t.Error("nothing was ever waiting when the replicas had stopped: the restarts prove less than they should")
	}

	c.wantNone(t, "tasks did not succeed", "SELECT count(*) FROM onejob.tasks WHERE status <> 'succeeded'")
	c.wantNone(t, "tasks are not at their first attempt", "SELECT count(*) FROM onejob.tasks WHERE attempt <> 1")
	c.wantNone(t, "tasks have crashed", "SELECT count(*) FROM onejob.tasks WHERE crashes <> 0")
	c.wantNone(t, "tasks have a history of other than one success", `
SELECT count(*)
  FROM onejob.tasks t
 WHERE (SELECT coalesce(string_agg(a.attempt || a.outcome, ' '), '') FROM onejob.attempts a WHERE a.task_id = t.id) <> '1succeeded'`)
	if got := get[int](t, c, "SELECT count(*) FROM onejob.attempts"); got != n {
		t.Errorf("the history has %d rows for %d tasks", got, n)
	}
	if effects, want := get[string](t, c, "SELECT count(*) || ' of ' || count(DISTINCT task_id) FROM public.effects"), count("kind = 'sql'"); effects != fmt.Sprint(want, " of ", want) {
		t.Errorf("there are %s effects, want %d of as many", effects, want)
	}
	if got := get[string](t, c, "SELECT string_agg(state || ' ' || n, ', ' ORDER BY state) FROM (SELECT state, count(*) AS n FROM onejob.replicas GROUP BY state) s"); got != fmt.Sprintf("stopped %d, working 3", restarts) {
		t.Errorf("the replicas' sessions are: %s; want %d stopped and 3 working", got, restarts)
	}
	c.noOverlaps(t)
}

// long is a configuration with the command "long", which testifies and goes on until
// finish is called. An attempt that is not the first says whether the process of the one
// before is dead.
func (w recorder) long() string {
	const script = `say() { echo "$1 $ONEJOB_LOCK_KEY $ONEJOB_TASK_ID $ONEJOB_ATTEMPT $ONEJOB_FENCE $$" >> "$W"; }
began() { cut -d ' ' -f 22 "/proc/$1/stat" 2>/dev/null; }
P="$W.$ONEJOB_TASK_ID"
if [ -f "$P" ]; then
  read pid at < "$P"
  if [ "$(began "$pid")" = "$at" ]; then say alive; else say dead; fi
fi
echo "$$ $(began $$)" > "$P"
say begin
until [ -e "$W.go" ]; do sleep 1; done
say end`
	quoted, err := json.Marshal(script)
	if err != nil {
		panic(err)
	}
	return fmt.Sprintf("kinds: {exec: {commands: {long: {path: /bin/sh, args: [\"-c\", %s], env: {W: %q}, grace: 1s}}}}\n", quoted, w.path)
}

// finish lets long commands end.
func (w recorder) finish(t *testing.T) {
	t.Helper()
	if err := os.WriteFile(w.path+".go", nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

// insertLong adds n tasks that run the command "long".
func (c *cluster) insertLong(t *testing.T, n, maxAttempts int) {
	t.Helper()
	c.exec(t, `INSERT INTO onejob.tasks (kind, payload, max_attempts) SELECT 'exec', '{"command": "long"}', $2 FROM generate_series(1, $1)`, n, maxAttempts)
}

// awaitRunning waits until n tasks run in replicas that work, and have begun so many
// times in all.
func (c *cluster) awaitRunning(t *testing.T, w recorder, n, begun int) {
	t.Helper()
	// Enough for many, and too little for tasks that begin one a minute.
	const limit = 2 * time.Minute
	running := 0
	for deadline := time.Now().Add(limit); ; time.Sleep(50 * time.Millisecond) {
		err := c.pool.QueryRow(t.Context(), `
SELECT count(*)
  FROM onejob.tasks t
  JOIN onejob.replicas r USING (session)
 WHERE t.status = 'running'
   AND r.ended_at IS NULL`).Scan(&running)
		switch {
		case err != nil:
			c.pool.Reset() // of connections to a server that was stopped
		case running == n && w.count(t, "begin") >= begun:
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d tasks run after %v, and %d of %d commands have begun (%v):\n%s", running, n, limit, w.count(t, "begin"), begun, err, c.breakdown(t))
		}
	}
}

// noneIsBlamed fails the test if a task was quarantined or called the cause of a crash.
func (c *cluster) noneIsBlamed(t *testing.T) {
	t.Helper()
	c.wantNone(t, "tasks were quarantined", "SELECT count(*) FROM onejob.tasks WHERE error LIKE 'quarantined%'")
	c.wantNone(t, "tasks were blamed for crashes", "SELECT count(*) FROM onejob.tasks WHERE crashes <> 0")
}

// familyOf returns the processes below the replicas' supervisors.
func familyOf(t *testing.T, replicas []*process) (family []procfs.Process) {
	t.Helper()
	all, err := procfs.Processes()
	if err != nil && !errors.Is(err, procfs.ErrOdd) {
		t.Fatal(err)
	}
	in := map[int]bool{}
	for _, p := range replicas {
		in[p.cmd.Process.Pid] = true
	}
	for grown := true; grown; {
		grown = false
		for _, p := range all {
			if in[p.Parent] && !in[p.PID] {
				in[p.PID], grown = true, true
				family = append(family, p)
			}
		}
	}
	return family
}

// awaitGone waits until none of the processes lives.
func awaitGone(t *testing.T, family []procfs.Process) {
	t.Helper()
	testenv.Eventually(t, maxWait, fmt.Sprintf("all of %d processes are gone", len(family)), func() bool {
		for _, p := range family {
			if now, err := procfs.Read(p.PID); err == nil && now.Start == p.Start && !now.Dead {
				return false
			}
		}
		return true
	})
}

// TestWholeClusterIsKilled kills all replicas at once, while Consul loses all its data,
// as a power cut does where Consul keeps nothing. TEST_CLUSTER_KILLS=3 does it three
// times, which would quarantine every task if it was to blame.
func TestWholeClusterIsKilled(t *testing.T) {
	t.Parallel()
	kills := scaled(t, "TEST_CLUSTER_KILLS", 1)
	server, kv := testenv.OwnConsul(t, servers.ConsulConfig{})
	c, w := migratedCluster(t, migrated.Postgres(t), kv), newRecorder(t)
	const n = 45
	c.insertLong(t, n, 1000)
	start := func() []*process { return c.trio(t, w.long(), "ONEJOB_WORKER_CONCURRENCY=16") } // none of them can have all
	replicas := start()
	c.awaitRunning(t, w, n, n)

	began := time.Now()
	for kill := range kills {
		if kill > 0 { // or those that die now would excuse the tasks of those that died before, and the other way round
			<-time.After(10 * time.Second)
		}
		family := familyOf(t, replicas)
		if len(family) < 2*n {
			t.Errorf("only %d processes were found below the supervisors", len(family))
		}
		for _, p := range replicas {
			p.signal(t, syscall.SIGKILL)
		}
		if kill%2 == 1 { // or else the kernel and the guards see to them
			for _, p := range family {
				if now, err := procfs.Read(p.PID); err == nil && now.Start == p.Start {
					_ = syscall.Kill(p.PID, syscall.SIGKILL)
				}
			}
		}
		if err := server.Wipe(); err != nil {
			t.Fatal(err)
		}
		for _, p := range replicas {
			<-p.exited
		}
		awaitGone(t, family)
		if err := server.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		replicas = start() // on the same machine, they see that nobody is at work under the old Consul
		c.awaitRunning(t, w, n, n*(kill+2))
		c.noneIsBlamed(t)
	}
	t.Logf("killed %d times within %.0f s", kills, time.Since(began).Seconds())

	w.finish(t)
	c.awaitAll(t, maxWait)
	c.wantNone(t, "tasks did not succeed", "SELECT count(*) FROM onejob.tasks WHERE status <> 'succeeded'")
	c.noneIsBlamed(t)
	for id, times := range w.check(t) {
		if times != 1 {
			t.Errorf("task %d ended %d times", id, times)
		}
	}
	if dead := w.count(t, "dead"); dead != n*kills {
		t.Errorf("%d attempts found the process of the one before dead, want %d", dead, n*kills)
	}
	c.noOverlaps(t)
}

// TestOutagesOfBothUseUpNoAttempt takes Consul and Postgres away together, in another way
// each time, for longer than any lease lasts. Each task has a single attempt.
// TEST_OUTAGES=3 makes three outages of 30 s.
func TestOutagesOfBothUseUpNoAttempt(t *testing.T) {
	t.Parallel()
	outages, lasts := scaled(t, "TEST_OUTAGES", 1), 10*time.Second
	if outages > 1 {
		lasts = 30 * time.Second
	}
	kvServer, kv := testenv.OwnConsul(t, servers.ConsulConfig{})
	dbServer, db := testenv.OwnPostgres(t)
	c, w := clusterOn(t, db, kv), newRecorder(t)
	behind, toPostgres, toConsul := c.behind(t)
	const n = 12
	c.insertLong(t, n, 1)
	replicas := behind.trio(t, w.long(), "ONEJOB_WORKER_CONCURRENCY=5")
	c.awaitRunning(t, w, n, n)

	ways := []struct {
		name       string
		begin, end func() error
	}{
		{"cut off", func() error { toPostgres.Cut(); toConsul.Cut(); return nil }, func() error { toPostgres.Heal(); toConsul.Heal(); return nil }},
		{"stopped", func() error { return errors.Join(kvServer.Stop(), dbServer.Stop(servers.Immediate)) },
			func() error {
				return errors.Join(dbServer.Start(context.Background()), kvServer.Start(context.Background()))
			}},
		{"frozen", func() error { toPostgres.Cut(); return kvServer.Freeze() }, func() error { toPostgres.Heal(); return kvServer.Thaw() }},
	}
	for i := range outages {
		way := ways[i%len(ways)]
		if err := way.begin(); err != nil {
			t.Fatalf("%s: %v", way.name, err)
		}
		<-time.After(lasts) // how long it lasts is what is tested
		if err := way.end(); err != nil {
			t.Fatalf("%s: %v", way.name, err)
		}
		c.awaitRunning(t, w, n, n*(i+2))
		c.noneIsBlamed(t)
		for _, p := range replicas {
			if got := p.count("worker_crashed"); got != 0 {
				t.Errorf("%s: %d working processes of %s crashed", way.name, got, p.name)
			}
		}
		t.Logf("%s for %v, and all work again", way.name, lasts)
	}

	w.finish(t)
	c.awaitAll(t, maxWait)
	c.wantNone(t, "tasks did not succeed", "SELECT count(*) FROM onejob.tasks WHERE status <> 'succeeded'")
	c.wantNone(t, "tasks used up an attempt", "SELECT count(*) FROM onejob.tasks WHERE attempt <> 1")
	c.wantNone(t, "attempts crashed", "SELECT count(*) FROM onejob.attempts WHERE outcome NOT IN ('succeeded', 'lease_lost')")
	c.noneIsBlamed(t)
	for id, times := range w.check(t) {
		if times != 1 {
			t.Errorf("task %d ended %d times", id, times)
		}
	}
	c.noOverlaps(t)
}
