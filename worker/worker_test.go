package worker_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"
	"go.uber.org/zap"

	"onejob/internal/testenv"
	"onejob/lock/consul"
	"onejob/store"
	"onejob/tasks"
	execkind "onejob/tasks/kinds/exec"
	httpkind "onejob/tasks/kinds/http"
	sqlkind "onejob/tasks/kinds/sql"
	"onejob/worker"
)

// Replicas here run inside the test, under the race detector.

type none struct{}

// kinds returns what most tests run. "wait" tells on began that it runs, and
// waits until its context ends.
func kinds(began chan<- string) tasks.Kinds {
	k := tasks.Kinds{"noop": tasks.Noop{}}
	tasks.Handle(k, "greet", func(_ context.Context, a *tasks.Attempt, p struct{ Name string }) (map[string]string, error) {
		fmt.Fprintln(a.Output, "greeting", p.Name)
		return map[string]string{"greeting": "hello " + p.Name}, nil
	})
	tasks.Handle(k, "fail", func(_ context.Context, a *tasks.Attempt, _ none) (none, error) {
		return none{}, fmt.Errorf("attempt %d went wrong", a.Attempt)
	})
	tasks.Handle(k, "hopeless", func(context.Context, *tasks.Attempt, none) (none, error) {
		return none{}, tasks.Permanent(errors.New("it will never work"))
	})
	tasks.Handle(k, "nul", func(context.Context, *tasks.Attempt, none) (string, error) { return "\x00", nil })
	tasks.Handle(k, "panic", func(context.Context, *tasks.Attempt, none) (none, error) { panic("at the disco") })
	tasks.Handle(k, "wait", func(ctx context.Context, a *tasks.Attempt, _ none) (none, error) {
		if began != nil {
			began <- a.Replica
		}
		<-ctx.Done()
		return none{}, context.Cause(ctx)
	})
	return k
}

func TestOutcomes(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.handlersDecide()
	began := make(chan string, 100)
	k := kinds(began)
	var calls atomic.Int32
	tasks.Handle(k, "notyet", func(context.Context, *tasks.Attempt, none) (none, error) {
		if calls.Add(1) < 3 {
			return none{}, tasks.Requeue(time.Millisecond, errors.New("not yet"))
		}
		return none{}, nil
	})
	tasks.Handle(k, "never", func(context.Context, *tasks.Attempt, none) (none, error) {
		return none{}, tasks.Requeue(time.Millisecond, tasks.Permanent(errors.New("never")))
	})
	var requeued, failed atomic.Int32 // attempts of the kind notyet, as they are measured
	r := c.replica(t, "a", k, func(w *worker.Config) {
		w.Measure = func(m worker.Measurement) {
			switch {
			case m.What != worker.MeasureEnd || m.Kind != "notyet":
			case m.Cause == worker.Requeued:
				requeued.Add(1)
			case m.Cause == "failed":
				failed.Add(1)
			}
		}
	})

	t.Run("SuccessKeepsResultAndOutput", func(t *testing.T) {
		id := c.insert(t, "kind, payload", "greet", `{"Name": "Zoë"}`)
		c.await(t, id, "succeeded")
		if got := get[string](t, c, "SELECT result->>'greeting' FROM onejob.tasks WHERE id = $1", id); got != "hello Zoë" {
			t.Errorf("result: %q", got)
		}
		if got := get[string](t, c, "SELECT output FROM onejob.attempts WHERE task_id = $1", id); got != "greeting Zoë\n" {
			t.Errorf("output: %q", got)
		}
	})
	t.Run("FailureIsRetriedUntilMaxAttempts", func(t *testing.T) {
		id := c.insert(t, "kind, max_attempts", "fail", 3)
		c.await(t, id, "failed")
		if got := c.outcomes(t, id); got != "failed failed failed" {
			t.Errorf("outcomes: %s", got)
		}
		if got := get[string](t, c, "SELECT error FROM onejob.tasks WHERE id = $1", id); got != "attempt 3 went wrong" {
			t.Errorf("error: %q", got)
		}
	})
	t.Run("PermanentErrorIsNotRetried", func(t *testing.T) {
		id := c.insert(t, "kind", "hopeless")
		c.await(t, id, "failed")
		if got := c.outcomes(t, id); got != "failed" {
			t.Errorf("outcomes: %s", got)
		}
	})
	t.Run("PayloadThatDoesNotFitFailsAtOnce", func(t *testing.T) {
		id := c.insert(t, "kind, payload", "greet", `{"Name": 7}`)
		c.await(t, id, "failed")
		if got := c.outcomes(t, id); got != "failed" {
			t.Errorf("outcomes: %s", got)
		}
		t.Log(get[string](t, c, "SELECT error FROM onejob.tasks WHERE id = $1", id))
	})
	t.Run("PanicFailsThatAttemptOnly", func(t *testing.T) {
		id := c.insert(t, "kind, max_attempts", "panic", 2)
		c.await(t, id, "failed")
		if got := c.outcomes(t, id); got != "failed failed" {
			t.Errorf("outcomes: %s", got)
		}
		c.await(t, c.insert(t, "kind", "noop"), "succeeded")
	})
	t.Run("ResultThatCannotBeKeptFailsTheTask", func(t *testing.T) {
		id := c.insert(t, "kind", "nul")
		c.await(t, id, "failed")
		testenv.Eventually(t, maxWait, "task_failed is logged", func() bool {
			return r.events.FilterMessage("task_failed").FilterField(zap.Int64("task_id", id)).Len() == 1
		})
	})
	t.Run("Timeout", func(t *testing.T) {
		id := c.insert(t, "kind, timeout, max_attempts", "wait", time.Second, 2)
		c.await(t, id, "failed")
		if got := c.outcomes(t, id); got != "timeout timeout" {
			t.Errorf("outcomes: %s", got)
		}
		for len(began) > 0 { // not both, if the time was over before the handler began
			<-began
		}
	})
	t.Run("CancelWaiting", func(t *testing.T) {
		id := c.insert(t, "kind, run_at", "noop", time.Now().Add(time.Hour))
		if !get[bool](t, c, "SELECT onejob.cancel($1)", id) {
			t.Error("cancel said false")
		}
		c.await(t, id, "cancelled")
		if get[bool](t, c, "SELECT onejob.cancel($1)", id) {
			t.Error("cancelling twice said true")
		}
	})
	t.Run("CancelRunning", func(t *testing.T) {
		id := c.insert(t, "kind", "wait")
		<-began
		asked := time.Now()
		c.exec(t, "UPDATE onejob.tasks SET cancel_requested = true WHERE id = $1", id)
		c.await(t, id, "cancelled")
		t.Logf("cancelled after %v", time.Since(asked))
		if got := c.outcomes(t, id); got != "cancelled" {
			t.Errorf("outcomes: %s", got)
		}
	})
	t.Run("RetryStartsAnew", func(t *testing.T) {
		id := c.insert(t, "kind", "hopeless")
		c.await(t, id, "failed")
		if !get[bool](t, c, "SELECT onejob.retry($1)", id) {
			t.Error("retry said false")
		}
		testenv.Eventually(t, maxWait, "a second attempt", func() bool { return c.outcomes(t, id) == "failed failed" })
	})
	t.Run("UnknownKindWaitsAndIsReportedOnce", func(t *testing.T) {
		id := c.insert(t, "kind", "later")
		if got := r.logged(t, "kind_unknown")["kind"]; got != "later" {
			t.Errorf("reported kind %v", got)
		}
		later := kinds(nil)
		later["later"] = tasks.Noop{}
		c.replica(t, "b", later, nil)
		c.await(t, id, "succeeded")
		if n := r.events.FilterMessage("kind_unknown").Len(); n != 1 {
			t.Errorf("reported %d times", n)
		}
	})
	t.Run("RequeueUsesUpNoAttempt", func(t *testing.T) {
		id := c.insert(t, "kind, max_attempts", "notyet", 1)
		c.await(t, id, "succeeded")
		if got := c.outcomes(t, id); got != "failed failed succeeded" {
			t.Errorf("outcomes: %s", got)
		}
		if got := get[int](t, c, "SELECT attempt FROM onejob.tasks WHERE id = $1", id); got != 1 {
			t.Errorf("attempt: %d, want 1", got)
		}
		if n := r.events.FilterMessage("task_requeued").FilterField(zap.Int64("task_id", id)).Len(); n != 2 {
			t.Errorf("task_requeued was logged %d times, want 2", n)
		}
		if n, f := requeued.Load(), failed.Load(); n != 2 || f != 0 {
			t.Errorf("%d attempts were measured as requeued and %d as failed, want 2 and 0", n, f)
		}
	})
	t.Run("RequeueThatIsPermanentFails", func(t *testing.T) {
		id := c.insert(t, "kind", "never")
		c.await(t, id, "failed")
		if got := c.outcomes(t, id); got != "failed" {
			t.Errorf("outcomes: %s", got)
		}
	})
	t.Run("LockKeysAreReleased", func(t *testing.T) {
		testenv.Eventually(t, maxWait, "no lock keys left", func() bool {
			keys, _, err := c.kv.Client.KV().Keys(c.kv.Prefix+"/tasks/", "", nil)
			if err != nil || len(keys) > 0 {
				return false
			}
			names, _, err := c.kv.Client.KV().List(c.kv.Prefix+"/running/", nil)
			return err == nil && len(names) > 0 && !slices.ContainsFunc(names, func(p *api.KVPair) bool { return p.Session != "" })
		})
	})
	c.noOverlaps(t)
}

// What a replica's configuration lacks, another's may have: while a configuration
// is rolled out, tasks wait for the replicas that have the new one already.
func TestNamesThatAReplicaLacksWaitForOneThatKnowsThem(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.handlersDecide()
	c.exec(t, "CREATE TABLE effects (task text)")
	received := make(chan struct{}, 100)
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { received <- struct{}{} }))
	t.Cleanup(server.Close)
	db, err := store.Open(store.Config{DSN: c.dsnOf("new")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(db.Close)
	configured := func(commands map[string]execkind.Command, byName map[string]sqlkind.Statement, allow ...string) tasks.Kinds {
		call, err := httpkind.New(httpkind.Config{Allow: allow})
		if err != nil {
			t.Fatal(err)
		}
		exec, err := execkind.New(execkind.Config{Commands: commands})
		if err != nil {
			t.Fatal(err)
		}
		return tasks.Kinds{"noop": tasks.Noop{}, "exec": exec, "sql": statements(t, db, byName), "http": call}
	}
	old := c.replica(t, "old", configured(map[string]execkind.Command{"known": {Path: "/bin/true"}}, nil), nil)

	var ids []int64
	for range 5 { // one attempt each: a single one that counts fails the task
		ids = append(ids,
			c.insert(t, "kind, payload, max_attempts", "exec", `{"command": "new"}`, 1),
			c.insert(t, "kind, payload, max_attempts", "sql", `{"statement": "new"}`, 1),
			c.insert(t, "kind, payload, max_attempts", "http", fmt.Sprintf(`{"url": "%s/new?token=s3cret"}`, server.URL), 1))
	}
	wrong := c.insert(t, "kind, payload", "exec", `{"command": "new", "arg": ["typo"]}`)
	c.await(t, wrong, "failed") // nowhere could it run
	testenv.Eventually(t, maxWait, "each task was claimed and put back", func() bool {
		return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE id = ANY ($1) AND fence IS NOT NULL AND status = 'pending' AND attempt = 0 AND run_at > created_at", ids) == len(ids)
	})
	if n := get[int](t, c, "SELECT count(*) FROM onejob.attempts WHERE task_id = ANY ($1)", ids); n != 0 {
		t.Errorf("attempts that did not begin have left %d rows", n)
	}
	c.await(t, c.insert(t, "kind, payload", "exec", `{"command": "known"}`), "succeeded")

	c.replica(t, "new", configured(map[string]execkind.Command{"new": {Path: "/bin/true"}},
		map[string]sqlkind.Statement{"new": {SQL: "INSERT INTO effects SELECT current_setting('onejob.task_id')"}}, server.URL), nil)
	// The old one may claim a task again, and puts it back for up to 30 s each time.
	testenv.Eventually(t, 5*maxWait, "the new one has done all", func() bool {
		return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE id = ANY ($1) AND status = 'succeeded'", ids) == len(ids)
	})
	for _, id := range ids {
		if got := c.outcomes(t, id); got != "succeeded" {
			t.Errorf("outcomes: %s", got)
		}
	}
	if n := get[int](t, c, "SELECT count(*) FROM effects"); n != 5 || len(received) != 5 {
		t.Errorf("%d effects and %d requests, want 5 of each", n, len(received))
	}
	named := map[string]string{}
	for _, e := range old.events.FilterMessage("name_unknown").All() {
		f := e.ContextMap()
		kind := f["kind"].(string)
		if named[kind] != "" {
			t.Errorf("%s: reported a second time: %v", kind, f)
		}
		named[kind] = fmt.Sprint(f["name"])
		if strings.Contains(fmt.Sprint(f), "s3cret") {
			t.Errorf("the log has the query of a URL: %v", f)
		}
	}
	want := map[string]string{"exec": "new", "sql": "new", "http": server.URL}
	if !maps.Equal(named, want) {
		t.Errorf("reported %v, want %v", named, want)
	}
	c.noOverlaps(t)
}

// Whoever may INSERT must not be able to fill the log, or the memory.
func TestOnlySoManyUnknownNamesAreReported(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.exec(t, "INSERT INTO onejob.tasks (kind, payload) SELECT 'exec', jsonb_build_object('command', 'c' || i || repeat('x', 1000)) FROM generate_series(1, 400) i")
	c.exec(t, "INSERT INTO onejob.tasks (kind) SELECT 'k' || i FROM generate_series(1, 20000) i")
	r := c.replica(t, "a", tasks.Kinds{"noop": tasks.Noop{}, "exec": new(execkind.Kind)}, nil)
	if f := r.logged(t, "kinds_unknown"); f["unknown"] != int64(20000) {
		t.Errorf("kinds_unknown: %v", f)
	}
	r.logged(t, "names_unknown")
	c.await(t, c.insert(t, "kind", "noop"), "succeeded")
	testenv.Eventually(t, maxWait, "each task was claimed and put back", func() bool {
		return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE kind = 'exec' AND fence IS NOT NULL") == 400
	})
	for event, want := range map[string]int{"kind_unknown": 256, "kinds_unknown": 1, "name_unknown": 256, "names_unknown": 1} {
		if n := r.events.FilterMessage(event).Len(); n != want {
			t.Errorf("%s was logged %d times, want %d", event, n, want)
		}
	}
	for _, e := range r.events.FilterMessage("name_unknown").All() {
		if n := len(fmt.Sprint(e.ContextMap())); n > 2000 {
			t.Fatalf("a line of %d bytes: %v", n, e.ContextMap())
		}
	}
}

func TestQuarantine(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	// Running rows whose sessions have ended long ago.
	abandoned := `INSERT INTO onejob.tasks (kind, status, session, replica, fence, started_at, begun_at, attempt, max_attempts, crashes)
               VALUES ('noop', 'running', gen_random_uuid(), 'ghost', nextval('onejob.fences'), now(), now(), $1, $2, $3) RETURNING id`
	again := get[int64](t, c, abandoned, 1, 5, 1)
	poison := get[int64](t, c, abandoned, 3, 5, 2)
	spent := get[int64](t, c, abandoned, 1, 1, 0)
	// Two under one session: either may be the cause, so neither is quarantined, and their attempts are used up.
	c.exec(t, `INSERT INTO onejob.tasks (kind, status, session, replica, fence, started_at, begun_at, attempt, max_attempts, crashes)
               SELECT 'noop', 'running', session, 'ghost', nextval('onejob.fences'), now(), now(), 5, 5, 2 FROM gen_random_uuid() session, generate_series(1, 2)`)
	r := c.replica(t, "a", kinds(nil), nil)
	c.await(t, again, "succeeded")
	c.await(t, poison, "failed")
	c.await(t, spent, "failed")
	if got := get[string](t, c, "SELECT error FROM onejob.tasks WHERE id = $1", poison); len(got) < 11 || got[:11] != "quarantined" {
		t.Errorf("error of the quarantined task: %q", got)
	}
	testenv.Eventually(t, maxWait, "three tasks have failed with their attempts used up", func() bool {
		return r.events.FilterMessage("task_failed_after_crashes").Len() == 3
	})
	r.logged(t, "task_quarantined") // once the takeover was answered, which may come after what it wrote
	if n := r.events.FilterMessage("task_quarantined").Len(); n != 1 {
		t.Errorf("the quarantine was logged %d times", n)
	}
	if got := c.outcomes(t, again); got != "crashed succeeded" {
		t.Errorf("outcomes: %s", got)
	}
}

func TestLongTasksAreNotRescued(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	began := make(chan string, 10)
	a := c.replica(t, "a", kinds(began), nil)
	id := c.insert(t, "kind", "wait")
	<-began
	c.exec(t, "UPDATE onejob.tasks SET started_at = now() - interval '100 days', run_at = now() - interval '101 days' WHERE id = $1", id)
	b := c.replica(t, "b", kinds(began), nil)
	for range 20 { // it has had every occasion to look for abandoned tasks
		c.await(t, c.insert(t, "kind", "noop"), "succeeded")
	}
	if abandoned, err := b.store.Sessions(t.Context(), b.locks.Session()); err != nil || len(abandoned) != 1 {
		t.Fatalf("sessions of running tasks: %v, %v", abandoned, err)
	} else if dead, err := b.locks.Dead(t.Context(), abandoned); err != nil || len(dead) != 0 {
		t.Errorf("a live session is called dead: %v, %v", dead, err)
	}
	if got := get[string](t, c, "SELECT replica FROM onejob.tasks WHERE id = $1 AND status = 'running'", id); got != "a" {
		t.Errorf("the task is held by %q", got)
	}
	c.exec(t, "SELECT onejob.cancel($1)", id)
	c.await(t, id, "cancelled")
	_ = a
}

func TestPrioritiesAndQueues(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	var order []int64
	k := tasks.Kinds{}
	tasks.Handle(k, "note", func(_ context.Context, a *tasks.Attempt, _ none) (none, error) {
		order = append(order, a.ID) // one slot: no two at once
		return none{}, nil
	})
	low := c.insert(t, "kind, priority", "note", -5)
	first := c.insert(t, "kind", "note")
	second := c.insert(t, "kind", "note")
	high := c.insert(t, "kind, priority", "note", 5)
	future := c.insert(t, "kind, priority, run_at", "note", 100, time.Now().Add(time.Hour))
	elsewhere := c.insert(t, "kind, queue", "note", "other")
	r := c.replica(t, "a", k, func(w *worker.Config) { w.Concurrency, w.Queues = 1, []string{"default"} })
	c.await(t, low, "succeeded")
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	if fmt.Sprint(order) != fmt.Sprint([]int64{high, first, second, low}) {
		t.Errorf("ran in the order %v, want %v", order, []int64{high, first, second, low})
	}
	for _, id := range []int64{future, elsewhere} {
		if got := get[string](t, c, "SELECT status FROM onejob.tasks WHERE id = $1", id); got != "pending" {
			t.Errorf("task %d is %s, want pending", id, got)
		}
	}
	c.replica(t, "all queues", k, nil)
	c.await(t, elsewhere, "succeeded")
}

func TestClaimsNoMoreThanItCanStart(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	began := make(chan string, 10)
	c.exec(t, "INSERT INTO onejob.tasks (kind) SELECT 'wait' FROM generate_series(1, 10)")
	c.replica(t, "a", kinds(began), func(w *worker.Config) { w.Concurrency = 2; w.ShutdownGrace = time.Millisecond })
	<-began
	<-began
	if n := get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'running'"); n != 2 {
		t.Errorf("%d tasks are claimed with 2 slots", n)
	}
}

func TestSharedLockKeysDoNotHideOtherTasks(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	began := make(chan string, 10)
	c.exec(t, "INSERT INTO onejob.tasks (kind, lock_key) SELECT 'wait', 'busy' FROM generate_series(1, 500)")
	free := c.insert(t, "kind", "noop")
	own := c.insert(t, "kind, lock_key", "noop", "quiet")
	c.replica(t, "a", kinds(began), func(w *worker.Config) { w.ShutdownGrace = time.Millisecond })
	<-began
	c.await(t, free, "succeeded")
	c.await(t, own, "succeeded")
	if n := get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'running'"); n != 1 {
		t.Errorf("%d tasks of one lock key run at once", n)
	}
}

func TestWorksWithoutNotifications(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.replica(t, "a", kinds(nil), func(w *worker.Config) { w.PollOnly = true })
	c.await(t, c.insert(t, "kind", "noop"), "succeeded")
}

func TestNotificationsSaveTheWait(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	began := make(chan string, 10)
	r := c.replica(t, "a", kinds(began), func(w *worker.Config) { w.Poll = "@every 10m" })
	// The first poll was at the start; from now on only notifications wake it.
	c.await(t, c.insert(t, "kind", "noop"), "succeeded")
	id := c.insert(t, "kind", "wait")
	<-began
	c.exec(t, "SELECT onejob.cancel($1)", id)
	c.await(t, id, "cancelled")
	_ = r
}

func TestTwoReplicasWithOneName(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	a, b := c.replica(t, "twin", kinds(nil), nil), c.replica(t, "twin", kinds(nil), nil)
	c.exec(t, "INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, 500)")
	c.awaitAll(t, maxWait)
	if a.locks.Session() == b.locks.Session() {
		t.Error("they share a session")
	}
	if n := get[int](t, c, "SELECT count(DISTINCT session) FROM onejob.attempts"); n != 2 {
		t.Logf("%d of them worked", n)
	}
	c.noOverlaps(t)
}

// I5: when the lock is free, the outcome is there.
func TestOutcomeIsDurableBeforeTheLockIsReleased(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.patient = true
	began, end := make(chan struct{}, 10), make(chan struct{})
	k := tasks.Kinds{}
	tasks.Handle(k, "hold", func(context.Context, *tasks.Attempt, none) (none, error) {
		began <- struct{}{}
		<-end
		return none{}, nil
	})
	r := c.replica(t, "a", k, nil)
	outsider, err := consul.New(c.lockConfig())
	if err != nil {
		t.Fatal(err)
	}
	held := func() bool {
		t.Helper()
		session, _, err := outsider.Holder(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		return session != ""
	}
	for round := range 3 {
		id := c.insert(t, "kind, lock_key", "hold", "k")
		select {
		case <-began:
		case <-time.After(maxWait):
			t.Fatal("it has not begun")
		}
		// The outcome cannot be written while others have the row.
		tx, err := c.pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback(context.WithoutCancel(t.Context()))
		if _, err := tx.Exec(t.Context(), "SELECT FROM onejob.tasks WHERE id = $1 FOR UPDATE", id); err != nil {
			t.Fatal(err)
		}
		end <- struct{}{}
		testenv.Eventually(t, maxWait, "the outcome waits for the row", func() bool {
			return r.events.FilterMessage("completion_delayed").Len() > round
		})
		for range 20 {
			if !held() {
				t.Fatal("the key is free, and the outcome is not there")
			}
			time.Sleep(50 * time.Millisecond) // nothing is to happen
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, maxWait, "the key is free", func() bool { return !held() })
		if got := get[string](t, c, "SELECT status FROM onejob.tasks WHERE id = $1", id); got != "succeeded" {
			t.Fatalf("the key is free and task %d is %s", id, got)
		}
	}
}

// I6 for the sql kind: the effect and the status are there together, or neither.
func TestSQLTakesEffectExactlyOnce(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.handlersDecide()
	c.exec(t, "CREATE TABLE effects (task bigint, fence bigint, note text)")
	c.exec(t, "CREATE TABLE gate AS SELECT 1 AS n")
	db, err := store.Open(store.Config{DSN: c.dsnOf("a")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(db.Close)
	r := c.replica(t, "a", tasks.Kinds{"sql": statements(t, db, map[string]sqlkind.Statement{
		"note":  {SQL: "INSERT INTO effects SELECT current_setting('onejob.task_id')::bigint, current_setting('onejob.fence')::bigint, $1", Params: []string{"note"}},
		"typed": {SQL: "INSERT INTO effects (task) VALUES ($1::int)", Params: []string{"n"}},
		"slow":  {SQL: "INSERT INTO effects SELECT 0, 0, 'slow' FROM gate"},
	})}, nil)

	id := c.insert(t, "kind, payload", "sql", `{"statement": "note", "params": {"note": "it's done"}}`)
	c.await(t, id, "succeeded")
	if n := get[int](t, c, "SELECT count(*) FROM effects WHERE task = $1 AND note = 'it''s done'", id); n != 1 {
		t.Errorf("%d effects, want 1", n)
	}
	for _, bad := range []string{`{"params": {"note": 1}}`, `{"statement": "note"}`, `{"statement": "note", "params": {"note": 1, "more": 2}}`,
		`{"statement": "typed", "params": {"n": "seven"}}`, `[]`} {
		id := c.insert(t, "kind, payload", "sql", bad)
		c.await(t, id, "failed")
		if got := c.outcomes(t, id); got != "failed" {
			t.Errorf("%s: outcomes %s", bad, got)
		}
	}
	// The row is taken away in the middle of the statement.
	tx, err := c.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	if _, err := tx.Exec(t.Context(), "LOCK gate"); err != nil {
		t.Fatal(err)
	}
	stale := c.insert(t, "kind, payload", "sql", `{"statement": "slow"}`)
	testenv.Eventually(t, maxWait, "it waits", func() bool {
		return get[bool](t, c, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%FROM gate' AND wait_event_type = 'Lock')")
	})
	c.exec(t, "UPDATE onejob.tasks SET fence = nextval('onejob.fences') WHERE id = $1", stale)
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.logged(t, "completion_refused")
	if n := get[int](t, c, "SELECT count(*) FROM effects WHERE note = 'slow'"); n != 0 {
		t.Errorf("a stale replica left %d effects", n)
	}
}

func k0() tasks.Kinds { return tasks.Kinds{"noop": tasks.Noop{}} }

// behind says after each claim that more tasks are due.
type behind struct{ worker.Store }

func (b behind) Claim(ctx context.Context, c tasks.Claim) (tasks.Claimed, error) {
	time.Sleep(5 * time.Millisecond)
	claimed, err := b.Store.Claim(ctx, c)
	claimed.More = true
	return claimed, err
}

// A claim whose answer is lost leaves rows that are ours and that we know
// nothing of. The loss is made by hand: the rows are given our session.
func TestClaimsWithoutReplyAreRequeued(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*worker.Config){
		"Idle":         nil,
		"WithABacklog": func(w *worker.Config) { w.Store = behind{w.Store} },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			r := c.replica(t, "a", kinds(nil), change)
			id := get[int64](t, c, `INSERT INTO onejob.tasks (kind, status, session, replica, fence, started_at, attempt)
                            VALUES ('noop', 'running', $1, 'a', nextval('onejob.fences'), now(), 1) RETURNING id`, r.locks.Session())
			c.await(t, id, "succeeded")
			r.logged(t, "claim_reply_lost")
			if attempt := get[int](t, c, "SELECT attempt FROM onejob.tasks WHERE id = $1", id); attempt != 1 {
				t.Errorf("attempt = %d, want 1", attempt)
			}
		})
	}
}

func TestManyTasksInOneProcess(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	const n, keys = 3000, 20
	var inside [keys]atomic.Int32
	k := tasks.Kinds{}
	tasks.Handle(k, "look", func(_ context.Context, a *tasks.Attempt, p struct{ Key int }) (none, error) {
		if now := inside[p.Key].Add(1); now != 1 {
			t.Errorf("%d tasks of key %d at once", now, p.Key)
		}
		time.Sleep(time.Millisecond) // long enough for another one to be seen
		inside[p.Key].Add(-1)
		return none{}, nil
	})
	c.exec(t, `INSERT INTO onejob.tasks (kind, lock_key, payload)
               SELECT 'look', 'k' || i % $2, jsonb_build_object('Key', i % $2) FROM generate_series(1, $1) i`, n, keys)
	for i := range 3 {
		c.replica(t, fmt.Sprint("r", i), k, nil)
	}
	c.awaitAll(t, 2*maxWait)
	if got := get[int](t, c, "SELECT count(*) FROM onejob.attempts WHERE outcome = 'succeeded'"); got != n {
		t.Errorf("%d accepted successes, want %d", got, n)
	}
	c.noOverlaps(t)
}

func TestBadFieldsAreRefused(t *testing.T) {
	for _, c := range []worker.Config{{}, {Kinds: k0()}} {
		if _, err := worker.New(c); err == nil {
			t.Errorf("New(%+v): no error", c)
		}
	}
	for name, c := range map[string]worker.Config{
		"Concurrency":    {Concurrency: -1},
		"MaxCrashes":     {MaxCrashes: -1},
		"Timeout":        {Timeout: -1},
		"RetryBase":      {RetryBase: -1},
		"RetryMax":       {RetryMax: -1},
		"LockDelay":      {LockDelay: -1},
		"ShutdownGrace":  {ShutdownGrace: -1},
		"KeepSucceeded":  {KeepSucceeded: -1}, // or all that has succeeded would be deleted at once
		"KeepFailed":     {KeepFailed: -1},
		"RetentionEvery": {RetentionEvery: -1}, // or it would never rest
		"SnapshotAge":    {SnapshotAge: -1},
		"OverlapsEvery":  {OverlapsEvery: -1},
	} {
		c.Store, c.Locks, c.Kinds = new(store.Store), new(consul.Locker), k0()
		if _, err := worker.New(c); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s of -1: error %v", name, err)
		}
	}
	for _, poll := range []string{"every second", "CRON_TZ=UTC", "TZ=UTC", "TZ=UTC * * * * *"} {
		if _, err := worker.ParsePoll(poll); err == nil {
			t.Errorf("ParsePoll(%q): no error", poll)
		}
	}
	none := tasks.Kinds{"none": nil}
	if _, err := worker.New(worker.Config{Store: new(store.Store), Locks: new(consul.Locker), Kinds: none}); err == nil || !strings.Contains(err.Error(), `"none"`) {
		t.Errorf("New with a kind that is nil: error %v", err)
	}
	w, err := worker.New(worker.Config{Store: new(store.Store), Locks: new(consul.Locker), Kinds: k0()})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Reload(none, nil, nil); err == nil || !strings.Contains(err.Error(), `"none"`) {
		t.Errorf("Reload with a kind that is nil: error %v", err)
	}
}

// A program with a configuration of its own may have times with which a command outlives its lock.
// Its worker does not run; without commands it may have them.
func TestCommandsNeedTime(t *testing.T) {
	t.Parallel()
	for field, cfg := range map[string]consul.Config{
		"consul.margin":     {Margin: 100 * time.Millisecond},
		"consul.lock_delay": {LockDelay: 10 * time.Millisecond},
	} {
		locks, err := consul.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		kind, err := execkind.New(execkind.Config{Commands: map[string]execkind.Command{"true": {Path: "/bin/true"}}})
		if err != nil {
			t.Fatal(err)
		}
		start := func(kind tasks.Kind) *worker.Worker {
			w, err := worker.New(worker.Config{Store: new(store.Store), Locks: locks, Kinds: tasks.Kinds{"exec": kind}})
			if err != nil {
				t.Fatal(err)
			}
			return w
		}
		refused := func(err error) bool {
			return err != nil && strings.Contains(err.Error(), field) && strings.Contains(err.Error(), "too short for commands")
		}
		if err := start(kind).Run(t.Context()); !refused(err) {
			t.Errorf("%s: Run returns %v", field, err)
		}
		if err := start(tasks.Noop{}).Reload(tasks.Kinds{"exec": kind}, nil, nil); !refused(err) {
			t.Errorf("%s: Reload returns %v", field, err)
		}
		none, err := execkind.New(execkind.Config{})
		if err != nil {
			t.Fatal(err)
		}
		if err := none.Enable(locks.Times()); err != nil {
			t.Errorf("%s, without commands: %v", field, err)
		}
	}
}

// statements returns the kind that runs them.
func statements(t *testing.T, db *store.Store, byName map[string]sqlkind.Statement) *sqlkind.Kind {
	t.Helper()
	k, err := sqlkind.New(sqlkind.Config{Statements: byName}, db)
	if err != nil {
		t.Fatal(err)
	}
	return k
}
