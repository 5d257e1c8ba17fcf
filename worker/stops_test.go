package worker_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"onejob/internal/servers"
	"onejob/internal/testenv"
	"onejob/tasks"
	"onejob/worker"
)

// serveBriefly runs onejob serve, and sends SIGTERM when moment returns. It returns what the replica
// logged.
func (c *cluster) serveBriefly(t *testing.T, what string, moment func(log func() string)) (log string) {
	t.Helper()
	c.configure(worker.Config{Replica: "brief"})
	var out testenv.Output
	cmd := exec.Command(testenv.Binary(t), "serve")
	cmd.Env = append(os.Environ(), "ONEJOB_POSTGRES_DSN="+c.dsnOf("brief"), "ONEJOB_REPLICA=brief", "CONSUL_HTTP_ADDR="+c.kv.Addr, "ONEJOB_CONSUL_PREFIX="+c.kv.Prefix,
		"ONEJOB_HTTP_LISTEN=", "ONEJOB_LOG_FORMAT=json", "ONEJOB_LOG_LEVEL=debug")
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		_ = cmd.Wait()
	}()
	moment(out.String)
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Errorf("SIGTERM %s: %v", what, err)
	}
	select {
	case <-exited:
	case <-time.After(maxWait):
		_ = cmd.Process.Kill()
		<-exited
		t.Fatalf("SIGTERM %s did not end the replica within %v:\n%s", what, maxWait, out.String())
	}
	// Before there is a handler, the signal itself ends it.
	if status := cmd.ProcessState.Sys().(syscall.WaitStatus); status.ExitStatus() != 0 && status.Signal() != syscall.SIGTERM || strings.Contains(out.String(), "panic: ") {
		t.Errorf("after SIGTERM %s: %v:\n%s", what, cmd.ProcessState, out.String())
	}
	return out.String()
}

// SIGTERM ends a replica at any moment of its start: before it has a session, before it
// has a working process, and as soon as it has begun to exist.
func TestStopAtAnyMomentOfTheStart(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	silent := 0
	for delay := time.Duration(0); delay < 60*time.Millisecond; delay += time.Millisecond {
		log := c.serveBriefly(t, fmt.Sprint(delay, " after the start"), func(func() string) {
			<-time.After(delay) // what is tested: any moment of the start
		})
		if log == "" {
			silent++
		}
	}
	t.Logf("%d of 60 replicas ended without a line", silent)

	// However slow the machine is: at each line until the last one of the start.
	upTo := func(event string) func(log func() string) {
		return func(log func() string) {
			testenv.Eventually(t, maxWait, event, func() bool {
				text := log()
				return strings.Contains(text, `"`+event+`"`) || strings.Contains(text, `"session_started"`)
			})
		}
	}
	log, _, _ := strings.Cut(c.serveBriefly(t, "when it works", upTo("session_started")), `"session_started"`)
	events := []string{"session_started"}
	for line := range strings.Lines(log) {
		if event := jsonField([]byte(line), "event"); event != "" && !slices.Contains(events, event) {
			events = append(events, event)
		}
	}
	for _, event := range events {
		c.serveBriefly(t, "at "+event, upTo(event))
	}
	t.Logf("stopped at %v", events)
}

// A replica that is stopped while Postgres is unavailable cannot put its work back. It
// has not crashed for all that.
func TestStopWithoutPostgres(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	stopWithoutPostgres(t, c, func() {})
}

// Nor has one that heard nothing from Postgres any more before that was restarted.
func TestStopBesideARestartOfPostgres(t *testing.T) {
	t.Parallel()
	server, db := testenv.OwnPostgres(t)
	c := clusterOn(t, db, testenv.Consul(t))
	stopWithoutPostgres(t, c, func() {
		if err := server.Restart(t.Context(), servers.Fast); err != nil {
			t.Fatal(err)
		}
	})
}

func stopWithoutPostgres(t *testing.T, c *cluster, meanwhile func()) {
	t.Helper()
	w := newRecorder(t)
	behind, toPostgres, _ := c.behind(t)
	const n = 3
	c.insertLong(t, n, 1)
	far := behind.process(t, "far", w.long(), "ONEJOB_WORKER_SHUTDOWN_GRACE=1s")
	c.awaitRunning(t, w, n, n)
	c.process(t, "near", w.long())
	toPostgres.Cut()
	meanwhile()
	far.signal(t, syscall.SIGTERM)
	<-far.exited
	toPostgres.Heal()
	w.finish(t)
	c.awaitAll(t, maxWait)
	c.wantNone(t, "tasks did not succeed", "SELECT count(*) FROM onejob.tasks WHERE status <> 'succeeded'")
	c.wantNone(t, "tasks used up an attempt", "SELECT count(*) FROM onejob.tasks WHERE attempt <> 1")
	c.noneIsBlamed(t)
	c.noOverlaps(t)
}

// What a replica without work says in Consul when it stops, because Postgres cannot be reached,
// goes to the list, and is not kept.
func TestStopWithoutPostgresLeavesNothing(t *testing.T) {
	t.Parallel()
	c, w := newCluster(t), newRecorder(t)
	behind, toPostgres, _ := c.behind(t)
	far := behind.process(t, "far", w.long())
	testenv.Eventually(t, maxWait, "the replica is on the list", func() bool { return c.states(t, "far") == "working" })
	c.process(t, "near", w.long())
	toPostgres.Cut()
	far.signal(t, syscall.SIGTERM)
	<-far.exited
	stopped := func() int {
		keys, _, err := c.kv.Client.KV().Keys(c.kv.Prefix+"/stopped/", "", nil)
		if err != nil {
			t.Fatal(err)
		}
		return len(keys)
	}
	// If it took its time, the other replica has brought that to the list by now.
	if n := stopped(); n != 1 && c.states(t, "far") != "stopped" {
		t.Errorf("%d replicas said that they stopped", n)
	}
	testenv.Eventually(t, maxWait, "the list says that it has stopped", func() bool { return c.states(t, "far") == "stopped" })
	testenv.Eventually(t, maxWait, "Consul has forgotten it", func() bool { return stopped() == 0 })
}

// silentStore is a Postgres that stops answering after a claim, at the moment at which the
// replica begins to stop. A real one cannot be stopped at that moment.
type silentStore struct {
	worker.Store
	answered func(*tasks.Claimed) // is called with the first tasks
	silent   atomic.Bool
}

func (s *silentStore) Claim(ctx context.Context, c tasks.Claim) (tasks.Claimed, error) {
	if s.silent.Load() { // a claim that is sent is completed, and a store bounds it itself
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		<-ctx.Done()
		return tasks.Claimed{}, ctx.Err()
	}
	claimed, err := s.Store.Claim(ctx, c)
	if len(claimed.Tasks) == 0 {
		return claimed, err
	}
	s.silent.Store(true)
	s.answered(&claimed)
	return claimed, errors.New("the connection was reset") // so that an audit is due
}

func (s *silentStore) Requeue(ctx context.Context, t *tasks.Task, after time.Duration) error {
	if s.silent.Load() {
		<-ctx.Done()
		return ctx.Err()
	}
	return s.Store.Requeue(ctx, t, after)
}

func (s *silentStore) Held(ctx context.Context, session string) ([]*tasks.Task, error) {
	if s.silent.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return s.Store.Held(ctx, session)
}

// A replica stops even if Postgres stops answering between a claim and the stop, when claimed
// tasks have to be requeued.
func TestStopWithClaimedTasksAndNoPostgres(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		limit  any
		change func(*tasks.Claimed)
	}{
		"claimed":                 {nil, func(*tasks.Claimed) {}},
		"claimed under a limit":   {"one", func(*tasks.Claimed) {}},
		"its fence has gone back": {nil, func(c *tasks.Claimed) { c.Tasks[0].Fence = -1 }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			s := &silentStore{}
			stopping := make(chan struct{})
			ready := make(chan struct{})
			var a *replica
			s.answered = func(claimed *tasks.Claimed) {
				<-ready
				a.cancel()
				test.change(claimed)
				close(stopping)
			}
			a = c.limited(t, "a", tasks.Kinds{"k": tasks.Noop{}}, func(w *worker.Config) {
				s.Store, w.Store = w.Store, s
				w.ShutdownGrace, w.LimitSlots = 10*time.Millisecond, map[string]int{"one": 1}
			})
			close(ready)
			c.insert(t, "kind, limit_name", "k", test.limit)
			testenv.Eventually(t, maxWait, "the task was claimed", func() bool { return s.silent.Load() })
			<-stopping
			stopped := make(chan error, 1)
			stop := a.stop
			go func() { stopped <- stop() }()
			a.stop = func() error { return nil }
			select {
			case <-stopped: // with an error perhaps: nothing could be put back
			case <-time.After(maxWait):
				t.Fatalf("Run has not returned within %v", maxWait)
			}
		})
	}
}

// Tasks that the next crash would quarantine begin one at a time. Those that wait for
// their turn, and have not begun, are not to blame if the replica dies.
func TestSuspectsThatWaitAreNotBlamed(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.exec(t, `
INSERT INTO onejob.tasks (kind, payload, max_attempts, crashes)
SELECT CASE i WHEN 0 THEN 'die' ELSE 'busy' END,
       CASE i WHEN 0 THEN '{"How": "kill -9", "Always": true}'::jsonb ELSE '{"Millis": 10}' END,
       100,
       CASE i WHEN 0 THEN 0 ELSE 2 END
  FROM generate_series(0, 30) i`)
	p := c.program(t, "a", 32)
	testenv.Eventually(t, maxWait, "the process died and works again", func() bool { return p.count("session_started") >= 2 })
	testenv.Eventually(t, maxWait, "the crash was counted", func() bool {
		return get[bool](t, c, "SELECT crashes > 0 FROM onejob.tasks WHERE kind = 'die'")
	})
	// What begins notes so before the log has a line of it.
	c.wantNone(t, "tasks were quarantined that had not begun", "SELECT count(*) FROM onejob.tasks WHERE error LIKE 'quarantined%' AND begun_at IS NULL")
}

// A process that dies with many tasks says little of any of them. Two such deaths, as of
// a host that loses power twice, do not make all of them wait for each other.
func TestCrashesThatHitManyTasks(t *testing.T) {
	t.Parallel()
	c, w := newCluster(t), newRecorder(t)
	const n = 20
	c.insertLong(t, n, 1000)
	a := c.process(t, "a", w.long())
	c.awaitRunning(t, w, n, n)
	for kill := range 2 {
		if err := syscall.Kill(a.worker(), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		c.awaitRunning(t, w, n, n*(kill+2))
	}
	w.finish(t)
	c.awaitAll(t, maxWait)
	c.wantNone(t, "tasks did not succeed", "SELECT count(*) FROM onejob.tasks WHERE status <> 'succeeded'")
	w.check(t)
	c.noOverlaps(t)
}

// reloading is a Postgres that has the replica reloaded between the answer to a claim and the attempt.
type reloading struct {
	worker.Store
	armed  atomic.Bool
	reload func()
}

func (s *reloading) Claim(ctx context.Context, c tasks.Claim) (tasks.Claimed, error) {
	claimed, err := s.Store.Claim(ctx, c)
	if len(claimed.Tasks) > 0 && s.armed.Swap(false) {
		s.reload()
	}
	return claimed, err
}

// I11: a reload uses up no attempt, neither of a task that runs nor of one that was claimed for a kind
// that is gone.
func TestReloadUsesUpNoAttempt(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.patient = true
	began, end := make(chan struct{}, 10), make(chan struct{})
	all := tasks.Kinds{"k": tasks.Noop{}}
	tasks.Handle(all, "hold", func(ctx context.Context, _ *tasks.Attempt, _ none) (none, error) {
		began <- struct{}{}
		select {
		case <-end:
		case <-ctx.Done():
		}
		return none{}, context.Cause(ctx)
	})
	s := &reloading{}
	a := c.replica(t, "a", all, func(w *worker.Config) { s.Store, w.Store = w.Store, s })
	reload := func(k tasks.Kinds) {
		if err := a.Reload(k, nil, nil); err != nil {
			t.Error(err)
		}
	}
	s.reload = func() { reload(tasks.Kinds{"other": tasks.Noop{}}) }
	runs := c.insert(t, "kind, max_attempts", "hold", 1)
	<-began
	s.armed.Store(true)
	claimed := c.insert(t, "kind, max_attempts", "k", 1)
	testenv.Eventually(t, maxWait, "the task was claimed and put back", func() bool {
		return get[bool](t, c, "SELECT fence IS NOT NULL AND status <> 'running' FROM onejob.tasks WHERE id = $1", claimed)
	})
	if got := get[string](t, c, "SELECT concat_ws(' ', status, attempt) FROM onejob.tasks WHERE id = $1", claimed); got != "pending 0" {
		t.Errorf("status and attempt of the task whose kind is gone: %s", got)
	}
	if got := c.outcomes(t, claimed); got != "" {
		t.Errorf("an attempt that did not begin is in the history: %s", got)
	}
	close(end)
	c.await(t, runs, "succeeded")
	reload(all)
	c.exec(t, "UPDATE onejob.tasks SET run_at = now() WHERE id = $1 AND status = 'pending'", claimed) // as if its pause was over
	c.await(t, claimed, "succeeded")
	for _, id := range []int64{runs, claimed} {
		if got := c.outcomes(t, id) + get[string](t, c, "SELECT ' ' || attempt FROM onejob.tasks WHERE id = $1", id); got != "succeeded 1" {
			t.Errorf("outcomes and attempt of task %d: %s", id, got)
		}
	}
	c.noOverlaps(t)
}

// slowToClaim is a Postgres that lets claims wait, as commits wait for a synchronous standby that does not answer.
type slowToClaim struct {
	worker.Store
	slow    atomic.Bool
	waiting chan struct{}
}

func (s *slowToClaim) Claim(ctx context.Context, c tasks.Claim) (tasks.Claimed, error) {
	if s.slow.Swap(false) {
		close(s.waiting)
		time.Sleep(20 * time.Second)
	}
	return s.Store.Claim(ctx, c)
}

// The grace counts from when the replica was asked to stop, not from the end of the claim that was under way.
func TestGraceBesideASlowClaim(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.patient = true
	began := make(chan string, 1)
	s := slowToClaim{waiting: make(chan struct{})}
	r := c.replica(t, "a", kinds(began), func(w *worker.Config) {
		s.Store, w.Store, w.ShutdownGrace = w.Store, &s, 25*time.Second
	})
	c.insert(t, "kind", "wait")
	<-began
	s.slow.Store(true)
	c.insert(t, "kind", "noop")
	<-s.waiting
	asked := time.Now()
	if err := r.stop(); err != nil {
		t.Error(err)
	}
	if took := time.Since(asked); took > 40*time.Second {
		t.Errorf("the stop took %v", took)
	}
}
