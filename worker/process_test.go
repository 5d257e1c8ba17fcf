package worker_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"onejob/internal/procfs"
	"onejob/internal/servers"
	"onejob/internal/testenv"
	"onejob/internal/testenv/processes"
)

// Replicas here are processes of the real binary, and what they did is judged
// by a file that the commands themselves write.

// quickly are settings with which sessions end soon.
var quickly = []string{"ONEJOB_CONSUL_CHECK_TTL=4s", "ONEJOB_CONSUL_HEARTBEAT=500ms", "ONEJOB_CONSUL_MARGIN=1s", "ONEJOB_CONSUL_LOCK_DELAY=1s", "ONEJOB_CONSUL_VERIFY=500ms"}

func (c *cluster) stuck(t *testing.T, w recorder) int64 {
	t.Helper()
	id := c.insert(t, "kind, payload, lock_key", "exec", `{"command": "stuck"}`, "shared")
	testenv.Eventually(t, maxWait, "the command is inside", func() bool { return w.count(t, "begin") == 1 })
	return id
}

// holder returns which of the processes works on the task, and the rest.
func (c *cluster) holder(t *testing.T, id int64, all ...*process) (holder *process, others []*process) {
	t.Helper()
	name := get[string](t, c, "SELECT replica FROM onejob.tasks WHERE id = $1", id)
	for _, p := range all {
		if p.name == name {
			holder = p
		} else {
			others = append(others, p)
		}
	}
	if holder == nil {
		t.Fatalf("task %d is held by %q", id, name)
	}
	return holder, others
}

func TestTenReplicasRaceForTasks(t *testing.T) {
	t.Parallel()
	c, w := newCluster(t), newRecorder(t)
	const n = 2000
	c.exec(t, `INSERT INTO onejob.tasks (kind, payload, lock_key)
               SELECT 'exec', '{"command": "quick"}', CASE WHEN i % 2 = 0 THEN 'key-' || i % 50 END
                 FROM generate_series(1, $1) i`, n)
	for i := range 10 {
		c.process(t, fmt.Sprint("r", i), w.config(), "ONEJOB_WORKER_CONCURRENCY=8")
	}
	c.awaitAll(t, 10*maxWait)
	ended := w.check(t)
	for id, times := range ended {
		if times != 1 {
			t.Errorf("task %d ended %d times", id, times)
		}
	}
	if len(ended) != n {
		t.Errorf("%d tasks ended, want %d", len(ended), n)
	}
	if got := get[int](t, c, "SELECT count(*) FROM onejob.attempts WHERE outcome = 'succeeded'"); got != n {
		t.Errorf("%d accepted successes, want %d", got, n)
	}
	c.noOverlaps(t)
}

func TestKilledReplicaIsTakenOver(t *testing.T) {
	t.Parallel()
	c, w := newCluster(t), newRecorder(t)
	a, z := c.process(t, "a", w.config()), c.process(t, "z", w.config()) // with the default times
	id := c.stuck(t, w)
	holder, _ := c.holder(t, id, a, z)

	killed := time.Now()
	holder.signal(t, syscall.SIGKILL)
	c.await(t, id, "succeeded")
	t.Logf("taken over and done %.2f s after kill -9", time.Since(killed).Seconds())
	if w.count(t, "dead") != 2 {
		t.Errorf("the second attempt found %d of 2 processes of the first dead", w.count(t, "dead"))
	}
	w.check(t)
	if got := c.outcomes(t, id); got != "crashed succeeded" {
		t.Errorf("outcomes: %s", got)
	}
	if crashes := get[int](t, c, "SELECT crashes FROM onejob.tasks WHERE id = $1", id); crashes != 1 {
		t.Errorf("crashes = %d, want 1", crashes)
	}
	c.noOverlaps(t)
}

func TestFrozenReplicaIsFencedOut(t *testing.T) {
	t.Parallel()
	c, w := newCluster(t), newRecorder(t)
	holder := c.process(t, "a", w.config(), quickly...)
	id := c.stuck(t, w)
	c.process(t, "z", w.config()) // with the default times: it is to live

	// The stale write must come while the successor works, when nothing but the
	// fence tells the two apart.
	resume := w.hold(t)
	holder.signal(t, syscall.SIGSTOP)
	testenv.Eventually(t, maxWait, "the second attempt is inside", func() bool { return w.count(t, "begin") == 2 })
	// That it wants to write proves that it lived: it is no crash any more.
	const row, blame = "SELECT (to_jsonb(t) - '{attempt,crashes,stalls}'::text[])::text FROM onejob.tasks t WHERE id = $1", "SELECT concat_ws(' ', crashes, stalls) FROM onejob.tasks WHERE id = $1"
	before := get[string](t, c, row, id)
	if got := get[string](t, c, blame, id); got != "1 0" {
		t.Errorf("crashes and stalls before it woke: %s", got)
	}
	holder.signal(t, syscall.SIGCONT)
	holder.logged(t, "completion_refused")
	if after := get[string](t, c, row, id); after != before {
		t.Errorf("the refused write changed the row from\n%s to\n%s", before, after)
	}
	if got := get[string](t, c, blame, id); got != "0 1" {
		t.Errorf("crashes and stalls after it woke: %s", got)
	}
	resume()
	c.await(t, id, "succeeded")

	c.wantDeadFirst(t, w, id, "lease_lost")
	// It comes back into the ring by itself.
	testenv.Eventually(t, maxWait, "the frozen replica has a new session", func() bool { return holder.count("session_started") >= 2 })
}

// wantDeadFirst looks at a task that succeeded in its second attempt: it found both
// processes of the first one dead, which ended so.
func (c *cluster) wantDeadFirst(t *testing.T, w recorder, id int64, first string) {
	t.Helper()
	if n := w.count(t, "dead"); n != 2 {
		t.Errorf("the second attempt found %d of 2 processes of the first dead", n)
	}
	w.check(t)
	if got := c.outcomes(t, id); got != first+" succeeded" {
		t.Errorf("outcomes: %s", got)
	}
	c.noOverlaps(t)
}

// A task over which one replica after the other freezes is quarantined, though each comes back.
func TestReplicasFreezeOverATask(t *testing.T) {
	t.Parallel()
	c, w := newCluster(t), newRecorder(t)
	settings := append([]string{"ONEJOB_WORKER_MAX_CRASHES=3"}, quickly...)
	a, b := c.process(t, "a", w.long(), settings...), c.process(t, "b", w.long(), settings...)
	c.insertLong(t, 1, 10)
	id := get[int64](t, c, "SELECT id FROM onejob.tasks")
	failed := func() bool {
		return get[string](t, c, "SELECT status FROM onejob.tasks WHERE id = $1", id) == "failed"
	}
	n := 0
	for ; !failed(); n++ {
		if n == 6 {
			t.Fatalf("%d replicas have frozen over it, and the next one works on it", n)
		}
		testenv.Eventually(t, maxWait, fmt.Sprintf("attempt %d is inside", n+1), func() bool { return w.count(t, "begin") == n+1 })
		holder, _ := c.holder(t, id, a, b)
		sessions := holder.count("session_started")
		holder.signal(t, syscall.SIGSTOP)
		testenv.Eventually(t, maxWait, "the next attempt is inside, or there is none", func() bool { return failed() || w.count(t, "begin") == n+2 })
		holder.signal(t, syscall.SIGCONT)
		testenv.Eventually(t, maxWait, "the replica that was frozen is back", func() bool { return holder.count("session_started") > sessions })
		testenv.Eventually(t, maxWait, "it is a stall, and no crash", func() bool {
			return failed() || get[string](t, c, "SELECT concat_ws(' ', crashes, stalls) FROM onejob.tasks WHERE id = $1", id) == fmt.Sprint("0 ", n+1)
		})
	}
	// On a busy machine the third one may be frozen too late after the task began.
	if n < 3 {
		t.Errorf("it was quarantined after %d replicas", n)
	}
	if text := get[string](t, c, "SELECT error FROM onejob.tasks WHERE id = $1", id); !strings.HasPrefix(text, fmt.Sprintf("quarantined: %d replicas died or stalled while they worked on it, the last was ", n)) {
		t.Errorf("the error is %q", text)
	}
	w.check(t)
	c.noOverlaps(t)
}

func TestSessionDestroyedByAnOperator(t *testing.T) {
	t.Parallel()
	c, w := newCluster(t), newRecorder(t)
	c.process(t, "a", w.config(), quickly...)
	c.process(t, "z", w.config(), quickly...)
	id := c.stuck(t, w)
	session := get[string](t, c, "SELECT session::text FROM onejob.tasks WHERE id = $1", id)
	if _, err := c.kv.Client.Session().Destroy(session, nil); err != nil {
		t.Fatal(err)
	}
	c.await(t, id, "succeeded")
	if w.count(t, "dead") != 2 {
		t.Errorf("the second attempt found %d of 2 processes of the first dead", w.count(t, "dead"))
	}
	w.check(t)
	c.noOverlaps(t)
}

func TestOneKeyDeletedByAnOperator(t *testing.T) {
	t.Parallel()
	c, w := newCluster(t), newRecorder(t)
	a := c.process(t, "a", w.config()) // with the default times: its session is to live
	id := c.stuck(t, w)
	other := c.insert(t, "kind, payload, lock_key", "exec", `{"command": "stuck"}`, "unharmed")
	testenv.Eventually(t, maxWait, "both commands are inside", func() bool { return w.count(t, "begin") == 2 })

	if _, err := c.kv.Client.KV().Delete(c.kv.Prefix+"/tasks/shared", nil); err != nil {
		t.Fatal(err)
	}
	c.await(t, id, "succeeded")
	a.logged(t, "lock_revoked")
	if got := c.outcomes(t, id); got != "lease_lost succeeded" {
		t.Errorf("outcomes: %s", got)
	}
	if got := get[string](t, c, "SELECT status FROM onejob.tasks WHERE id = $1", other); got != "running" {
		t.Errorf("the other task is %s, want running", got)
	}
	w.check(t)
}

func TestConsulAwayAndBack(t *testing.T) {
	t.Parallel()
	server, kv := testenv.OwnConsul(t, servers.ConsulConfig{})
	c, w := migratedCluster(t, migrated.Postgres(t), kv), newRecorder(t)
	settings := slices.Concat(quickly, []string{"ONEJOB_CONSUL_CHECK_TTL=15s"})
	a := c.process(t, "a", w.config(), settings...)
	c.process(t, "z", w.config(), settings...)
	id := c.stuck(t, w)

	if err := server.Stop(); err != nil {
		t.Fatal(err)
	}
	gone := time.Now()
	// Until their sessions end both replicas claim: all at first, and one a second once they know.
	const n = 20
	fences := func() int { return get[int](t, c, "SELECT last_value FROM onejob.fences") }
	before := fences()
	c.exec(t, `INSERT INTO onejob.tasks (kind, payload) SELECT 'exec', '{"command": "quick"}' FROM generate_series(1, $1)`, n)
	testenv.Eventually(t, maxWait, "the running work is stopped", func() bool {
		return get[string](t, c, "SELECT status FROM onejob.tasks WHERE id = $1", id) == "pending"
	})
	t.Logf("stopped and given back %.1f s after Consul went away", time.Since(gone).Seconds())
	a.logged(t, "consul_unavailable")
	// There is no event for nothing being claimed; the outage is what takes time.
	time.Sleep(max(10*time.Second, time.Until(gone.Add(30*time.Second))))
	if n := get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status <> 'pending'"); n != 0 {
		t.Errorf("%d tasks were claimed while Consul was away", n)
	}
	used, most := fences()-before, 2*n+2*(int(time.Since(gone).Seconds())+2)
	t.Logf("%d claims for nothing", used)
	if used == 0 || used > most {
		t.Errorf("%d fences were used up while Consul was away, want some, and %d at most", used, most)
	}
	if err := server.Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	c.awaitAll(t, maxWait)
	if got := c.outcomes(t, id); got != "lease_lost succeeded" {
		t.Errorf("outcomes: %s", got)
	}
	if attempt := get[int](t, c, "SELECT attempt FROM onejob.tasks WHERE id = $1", id); attempt != 1 {
		t.Errorf("attempt = %d: the outage used one up", attempt)
	}
	ended := w.check(t)
	if len(ended) != n+1 {
		t.Errorf("%d tasks ended, want %d", len(ended), n+1)
	}
	c.noOverlaps(t)
}

func TestPostgresRestartsAmongCompletions(t *testing.T) {
	t.Parallel()
	server, db := testenv.OwnPostgres(t)
	c, w := clusterOn(t, db, testenv.Consul(t)), newRecorder(t)
	const n = 400
	c.exec(t, `INSERT INTO onejob.tasks (kind, payload) SELECT 'exec', '{"command": "quick"}' FROM generate_series(1, $1)`, n)
	c.process(t, "a", w.config(), "ONEJOB_WORKER_CONCURRENCY=8")
	c.process(t, "z", w.config(), "ONEJOB_WORKER_CONCURRENCY=8")
	for _, at := range []int{n / 4, n / 2} {
		testenv.Eventually(t, maxWait, "tasks are being worked on", func() bool { return w.count(t, "end") > at })
		if err := server.Restart(context.Background(), servers.Immediate); err != nil {
			t.Fatal(err)
		}
	}
	c.pool.Reset()
	c.awaitAll(t, maxWait)
	ended := w.check(t)
	if len(ended) != n {
		t.Errorf("%d tasks ended, want %d", len(ended), n)
	}
	if got := get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'succeeded'"); got != n {
		t.Errorf("%d tasks succeeded, want %d", got, n)
	}
	if got := get[int](t, c, "SELECT count(*) FROM onejob.attempts WHERE outcome = 'succeeded'"); got != n {
		t.Errorf("%d successes in the history, want %d", got, n)
	}
	again := 0
	for _, times := range ended {
		again += times - 1
	}
	if again > 0 { // allowed by "at least once", yet sessions lived through it
		t.Errorf("%d tasks were worked on again although no replica died", again)
	}
	c.noOverlaps(t)
}

func TestShutdownGivesWorkBack(t *testing.T) {
	t.Parallel()
	c, w := newCluster(t), newRecorder(t)
	settings := append([]string{"ONEJOB_WORKER_SHUTDOWN_GRACE=200ms"}, quickly...)
	a, z := c.process(t, "a", w.config(), settings...), c.process(t, "z", w.config(), settings...)
	id := c.stuck(t, w)
	holder, _ := c.holder(t, id, a, z)

	began := time.Now()
	holder.signal(t, syscall.SIGTERM)
	c.await(t, id, "succeeded")
	<-holder.exited
	t.Logf("given back and done elsewhere %.2f s after SIGTERM", time.Since(began).Seconds())
	if code := holder.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	if got := c.outcomes(t, id); got != "shutdown succeeded" {
		t.Errorf("outcomes: %s", got)
	}
	if attempt, crashes := get[int](t, c, "SELECT attempt FROM onejob.tasks WHERE id = $1", id), get[int](t, c, "SELECT crashes FROM onejob.tasks WHERE id = $1", id); attempt != 1 || crashes != 0 {
		t.Errorf("attempt = %d, crashes = %d: the shutdown was counted", attempt, crashes)
	}
	w.check(t)
	c.noOverlaps(t)
}

// crash kills the working process of the replica that works on a task, and returns
// the replica and when that was.
func (c *cluster) crash(t *testing.T, id int64, s syscall.Signal, all ...*process) (*process, time.Time) {
	t.Helper()
	holder, _ := c.holder(t, id, all...)
	worker := holder.worker()
	if worker == holder.cmd.Process.Pid {
		t.Fatalf("%s has no working process", holder.name)
	}
	at := time.Now()
	if err := syscall.Kill(worker, s); err != nil {
		t.Fatal(err)
	}
	return holder, at
}

// TestCrashedWorkerIsTakenOver kills working processes. With TEST_CRASHES=20 it
// measures how long a takeover takes.
func TestCrashedWorkerIsTakenOver(t *testing.T) {
	t.Parallel()
	n, err := strconv.Atoi(cmp.Or(os.Getenv("TEST_CRASHES"), "1"))
	if err != nil {
		t.Fatal(err)
	}
	var took []float64
	for i := range n {
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			took = append(took, testCrash(t))
		})
	}
	slices.Sort(took)
	if len(took) > 0 {
		t.Logf("takeover after %.2f s (median) and %.2f s (most) in %d crashes", took[len(took)/2], took[len(took)-1], len(took))
	}
}

func testCrash(t *testing.T) (took float64) {
	c, w := newCluster(t), newRecorder(t)
	a, z := c.process(t, "a", w.config()), c.process(t, "z", w.config()) // with the default times
	id := c.insert(t, "kind, payload, lock_key", "exec", `{"command": "escape"}`, "shared")
	testenv.Eventually(t, maxWait, "the command is inside", func() bool { return w.count(t, "begin") == 1 })

	holder, killed := c.crash(t, id, syscall.SIGKILL, a, z)
	c.await(t, id, "succeeded")
	took = get[float64](t, c, "SELECT extract(epoch FROM max(started_at) - $2::timestamptz)::float8 FROM onejob.attempts WHERE task_id = $1", id, killed)
	t.Logf("taken over %.2f s after kill -9 of the working process", took)
	if w.count(t, "dead") != 2 {
		t.Errorf("the second attempt found %d of 2 processes of the first dead", w.count(t, "dead"))
	}
	w.check(t)
	if got := c.outcomes(t, id); got != "crashed succeeded" {
		t.Errorf("outcomes: %s", got)
	}

	// The same replica works again.
	testenv.Eventually(t, maxWait, "the next working process has a session", func() bool { return holder.count("session_started") == 2 })
	if holder.count("worker_crashed") != 1 || holder.count("worker_restarted") != 1 {
		t.Errorf("it logged %d crashes and %d restarts", holder.count("worker_crashed"), holder.count("worker_restarted"))
	}
	for _, p := range []*process{a, z} {
		if p != holder {
			p.signal(t, syscall.SIGTERM)
			<-p.exited
		}
	}
	next := c.insert(t, "kind", "noop")
	c.await(t, next, "succeeded")
	if by := get[string](t, c, "SELECT replica FROM onejob.attempts WHERE task_id = $1", next); by != holder.name {
		t.Errorf("%s worked on the next task, not %s", by, holder.name)
	}
	// Its own memory. The pages of the program are shared with the working process, and how
	// many of them the kernel maps says nothing about the supervisor.
	own, err := processes.Status(holder.cmd.Process.Pid, "RssAnon")
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("the supervisor has %.1f MB of its own", own)
	if own <= 0 || own > 10 {
		t.Errorf("the supervisor has %.1f MB of its own", own)
	}
	holder.signal(t, syscall.SIGTERM)
	<-holder.exited
	if code := holder.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	c.noOverlaps(t)
	return took
}

// guard returns the guard of the one command that a replica runs.
func (p *process) guard(t *testing.T) int {
	t.Helper()
	var guards []int
	for _, member := range familyOf(t, []*process{p}) {
		if name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", member.PID)); string(name) == "task-guard\n" {
			guards = append(guards, member.PID)
		}
	}
	if len(guards) != 1 {
		t.Fatalf("%s has the guards %v, want one", p.name, guards)
	}
	return guards[0]
}

// The working process and the guard of its command are killed in the same moment, or the
// guard is stopped and sees nothing of it: neither of them can end the command. The
// supervisor does, before anybody can begin.
func TestWorkerAndGuardAreKilledTogether(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"the guard is killed too", "the guard is left stopped"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			c, w := newCluster(t), newRecorder(t)
			a, z := c.process(t, "a", w.config()), c.process(t, "z", w.config())
			id := c.insert(t, "kind, payload, lock_key", "exec", `{"command": "escape"}`, "shared")
			testenv.Eventually(t, maxWait, "the command is inside", func() bool { return w.count(t, "begin") == 1 })
			holder, _ := c.holder(t, id, a, z)
			family := familyOf(t, []*process{holder})
			both := []int{holder.worker(), holder.guard(t)}
			for _, pid := range both { // neither sees the other die
				testenv.Freeze(t, pid)
			}
			if what == "the guard is left stopped" {
				both = both[:1]
			}
			for _, pid := range both {
				if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
			}
			holder.logged(t, "worker_crashed")
			for _, p := range family { // a replica that starts would look for survivors, and later
				if now, err := procfs.Read(p.PID); err == nil && now.Start == p.Start && !now.Dead {
					t.Errorf("process %d is there when the crash is reported", p.PID)
				}
			}
			c.await(t, id, "succeeded")
			c.wantDeadFirst(t, w, id, "crashed")
		})
	}
}

// A Go program that panics exits with 2, as one does that refuses its configuration.
// So does one that gets SIGQUIT.
func TestPanickedWorkerIsRestarted(t *testing.T) {
	t.Parallel()
	c, w := newCluster(t), newRecorder(t)
	a := c.process(t, "a", w.config())
	id := c.stuck(t, w)
	c.crash(t, id, syscall.SIGQUIT, a)
	c.await(t, id, "succeeded") // by the next working process
	w.check(t)
	if got := c.outcomes(t, id); got != "crashed succeeded" {
		t.Errorf("outcomes: %s", got)
	}
	c.noOverlaps(t)
}

// Either service may be unavailable when a worker crashes. What it held is released,
// and the next one works, when both are back.
func TestCrashWhileAServiceIsUnavailable(t *testing.T) {
	t.Parallel()
	for _, away := range []string{"consul", "postgres"} {
		t.Run(away, func(t *testing.T) {
			t.Parallel()
			kv, db := testenv.Consul(t), testenv.Postgres(t)
			var stop, start func() error
			if away == "consul" {
				server, own := testenv.OwnConsul(t, servers.ConsulConfig{})
				kv, stop, start = own, server.Stop, func() error { return server.Start(context.Background()) }
			} else {
				server, own := testenv.OwnPostgres(t)
				db, stop, start = own, func() error { return server.Stop(servers.Immediate) }, func() error { return server.Start(context.Background()) }
			}
			c, w := clusterOn(t, db, kv), newRecorder(t)
			a := c.process(t, "a", w.config())
			id := c.stuck(t, w)
			holder, _ := c.holder(t, id, a)
			if err := stop(); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Kill(holder.worker(), syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			other := map[string]string{"consul": "postgres", "postgres": "consul"}[away]
			testenv.Eventually(t, maxWait, other+" knows of the death", func() bool { return a.buried(other) })
			if a.buried(away) {
				t.Errorf("%s knows of the death while it is unavailable", away)
			}
			if err := start(); err != nil {
				t.Fatal(err)
			}
			c.pool.Reset()
			testenv.Eventually(t, maxWait, away+" knows of the death", func() bool { return a.buried(away) })
			c.await(t, id, "succeeded")
			w.check(t)
			c.noOverlaps(t)
		})
	}
}

// readable returns a copy of a program that any user can run.
func readable(t *testing.T, program string) (path string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "onejob-readable-") // not t.TempDir, which is ours alone
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path = filepath.Join(dir, filepath.Base(program))
	content, err := os.ReadFile(program)
	if err == nil {
		err = errors.Join(os.WriteFile(path, content, 0o755), os.Chmod(path, 0o755), os.Chmod(dir, 0o755))
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// A replica that does not run as root is hidden from the other processes of its user: its
// environment has passwords. The kernel gives the files of such a process in /proc to
// root.
func TestReplicaIsHiddenFromItsUser(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("this needs root, to become another user")
	}
	const nobody = 65534
	as := func(cmd *exec.Cmd) *exec.Cmd {
		cmd.Dir, cmd.SysProcAttr = "/", &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		return cmd
	}
	owner := func(t *testing.T, pid int) uint32 {
		t.Helper()
		info, err := os.Stat(fmt.Sprintf("/proc/%d/environ", pid))
		if err != nil {
			t.Fatal(err)
		}
		return info.Sys().(*syscall.Stat_t).Uid
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name     string
		program  string
		args     []string
		settings []string
		kind     string
	}{
		{"onejob serve", testenv.Binary(t), []string{"serve"}, nil, "noop"},
		{"a program of worker.Supervise", self, nil, []string{programVariable + "=a", "ONEJOB_WORKER_CONCURRENCY=1"}, "busy"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			p := c.run(t, "a", as(exec.Command(readable(t, test.program), test.args...)), test.settings...)
			if p.worker() == p.cmd.Process.Pid {
				t.Fatal("it has no working process")
			}
			for what, pid := range map[string]int{"supervisor": p.cmd.Process.Pid, "working process": p.worker()} {
				if uid := owner(t, pid); uid != 0 {
					t.Errorf("the environment of the %s belongs to user %d, not to root", what, uid)
				}
			}
			c.await(t, c.insert(t, "kind, payload", test.kind, `{}`), "succeeded")
		})
	}
	t.Run("the test would notice", func(t *testing.T) {
		t.Parallel()
		sleep := as(exec.Command("/bin/sleep", "1000"))
		if err := sleep.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = sleep.Process.Kill(); _ = sleep.Wait() }()
		testenv.Eventually(t, maxWait, "its environment is its user's", func() bool { return owner(t, sleep.Process.Pid) == nobody })
	})
}

// What a replica of onejob serve has left running is ended by the next replica on the
// machine, if that is a program with a worker of its own, too.
func TestProgramKillsSurvivors(t *testing.T) {
	t.Parallel()
	c, w := newCluster(t), newRecorder(t)
	a := c.process(t, "a", w.config())
	c.stuck(t, w)
	family, guard := familyOf(t, []*process{a}), a.guard(t)
	a.signal(t, syscall.SIGSTOP) // nobody sees another one die, and ends what is left
	testenv.Freeze(t, guard)
	for _, pid := range []int{guard, a.cmd.Process.Pid} {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	<-a.exited
	alive := func(p procfs.Process) bool {
		now, err := procfs.Read(p.PID)
		return err == nil && now.Start == p.Start && !now.Dead
	}
	testenv.Eventually(t, maxWait, "the guard is gone", func() bool {
		return !slices.ContainsFunc(family, func(p procfs.Process) bool { return p.PID == guard && alive(p) })
	})
	if !slices.ContainsFunc(family, alive) {
		t.Fatal("nothing has survived")
	}
	c.program(t, "b", 1)
	for _, p := range family {
		if alive(p) {
			t.Errorf("process %d of the dead replica is still there", p.PID)
		}
	}
}

// buried reports whether the supervisor has made a death known there.
func (p *process) buried(where string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.ContainsFunc(p.events, func(e map[string]any) bool { return e["event"] == "process_death_reported" && e["where"] == where })
}
