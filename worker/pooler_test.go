package worker_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/store"
	"onejob/tasks"
	sqlkind "onejob/tasks/kinds/sql"
	"onejob/worker"
)

// A transaction pooler in front of postgres.dsn needs no other setting. Without a
// way past it, tasks are found by polling.
func TestReplicasBehindAPooler(t *testing.T) {
	t.Parallel()
	for _, way := range []string{"AndListenPastIt", "Only"} {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			db := testenv.Postgres(t)
			c := clusterOn(t, db, testenv.Consul(t))
			c.dsn = testenv.Pooler(t, db, 4)
			if way == "AndListenPastIt" {
				c.listenDSN = db.DSN
			}
			c.exec(t, "CREATE TABLE effects (task bigint)")
			sql := func(w *worker.Config) {
				w.Kinds = tasks.Kinds{"noop": tasks.Noop{}, "sql": statements(t, w.Store.(*store.Store), map[string]sqlkind.Statement{
					"note":  {SQL: "INSERT INTO effects VALUES (current_setting('onejob.task_id')::bigint)"},
					"given": {SQL: "INSERT INTO effects VALUES ($1)", Params: []string{"n"}},
				})}
			}
			replicas := []*replica{c.replica(t, "a", tasks.Kinds{"noop": tasks.Noop{}}, sql), c.replica(t, "b", tasks.Kinds{"noop": tasks.Noop{}}, sql)}
			const n = 300
			for i := range n / 3 {
				c.exec(t, "INSERT INTO onejob.tasks (kind, lock_key) VALUES ('noop', $1)", fmt.Sprint("key ", i%7))
				c.exec(t, `INSERT INTO onejob.tasks (kind, payload) VALUES ('sql', '{"statement": "note"}')`)
				c.exec(t, `INSERT INTO onejob.tasks (kind, payload) VALUES ('sql', jsonb_build_object('statement', 'given', 'params', jsonb_build_object('n', $1::int)))`, -i)
			}
			c.awaitAll(t, maxWait)
			if got := get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'succeeded' AND attempt = 1"); got != n {
				t.Errorf("%d of %d succeeded at the first attempt", got, n)
			}
			if got := get[int](t, c, "SELECT count(DISTINCT task) FROM effects"); got != n/3*2 || got != get[int](t, c, "SELECT count(*) FROM effects") {
				t.Errorf("%d effects, want %d", got, n/3*2)
			}
			c.noOverlaps(t)
			if way == "Only" {
				replicas[0].logged(t, "listen_failed")
			}
			for _, r := range replicas {
				for _, event := range []string{"claim_failed", "completion_delayed", "requeue_delayed"} {
					if n := r.events.FilterMessage(event).Len(); n > 0 {
						t.Errorf("%d x %s: %v", n, event, r.events.FilterMessage(event).All()[0].ContextMap())
					}
				}
				if way == "AndListenPastIt" && r.events.FilterMessage("listen_failed").Len() > 0 {
					t.Error("notifications were not heard")
				}
			}
		})
	}
}

// Only the last try of this statement leaves its connection alive.
func TestBrokenConnectionsUseUpNoAttempt(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.exec(t, "CREATE SEQUENCE tries")
	r := c.replica(t, "a", tasks.Kinds{"noop": tasks.Noop{}}, func(w *worker.Config) {
		w.Kinds = tasks.Kinds{"sql": statements(t, w.Store.(*store.Store), map[string]sqlkind.Statement{
			"crash": {SQL: "SELECT CASE WHEN nextval('tries') < 3 THEN pg_terminate_backend(pg_backend_pid()) END"},
		})}
	})
	id := c.insert(t, "kind, payload, max_attempts", "sql", `{"statement": "crash"}`, 1)
	c.await(t, id, "succeeded")
	if got := get[int](t, c, "SELECT attempt FROM onejob.tasks WHERE id = $1", id); got != 1 {
		t.Errorf("%d attempts were used up", got)
	}
	if got, want := c.outcomes(t, id), "failed failed succeeded"; got != want {
		t.Errorf("the outcomes are %s, want %s", got, want)
	}
	r.logged(t, "task_requeued")
}

// A statement under which the connection breaks each time may be what ends the server: in the end it
// uses up its attempts: one each time, after the first three. A retry begins anew.
func TestConnectionsThatAlwaysBreakUseUpAttempts(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.replica(t, "a", tasks.Kinds{"noop": tasks.Noop{}}, func(w *worker.Config) {
		w.RetryBase = 10 * time.Millisecond
		w.Kinds = tasks.Kinds{"sql": statements(t, w.Store.(*store.Store), map[string]sqlkind.Statement{
			"crash": {SQL: "SELECT pg_terminate_backend(pg_backend_pid())"},
		})}
	})
	for _, maxAttempts := range []int{1, 2} {
		id := c.insert(t, "kind, payload, max_attempts", "sql", `{"statement": "crash"}`, maxAttempts)
		want := strings.Repeat(" failed", 3+maxAttempts)
		for round := range 2 {
			if round > 0 {
				c.exec(t, "SELECT onejob.retry($1)", id)
			}
			testenv.Eventually(t, maxWait, "it has failed", func() bool { // as if the pauses were over
				c.exec(t, "UPDATE onejob.tasks SET run_at = now() WHERE id = $1 AND status = 'pending' AND run_at > now()", id)
				return get[string](t, c, "SELECT status FROM onejob.tasks WHERE id = $1", id) == "failed"
			})
			if got, want := c.outcomes(t, id), strings.TrimSpace(strings.Repeat(want, round+1)); got != want {
				t.Errorf("max_attempts %d, retries %d: the outcomes are %s, want %s", maxAttempts, round, got, want)
			}
			last := fmt.Sprintf("as %d times before, the connection broke under the statement: ", 2+maxAttempts)
			if got := get[string](t, c, "SELECT error FROM onejob.tasks WHERE id = $1", id); !strings.HasPrefix(got, last) {
				t.Errorf("max_attempts %d, retries %d: the error is %q, want %q", maxAttempts, round, got, last)
			}
		}
	}
}

// While statements hold all connections that there are for them, tasks of other kinds run, and no task
// that waits for a connection fails.
func TestStatementsKeepNoOthersWaiting(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.exec(t, "CREATE TABLE held (n int)")
	tx, err := c.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	if _, err := tx.Exec(t.Context(), "LOCK held"); err != nil {
		t.Fatal(err)
	}
	r := c.replica(t, "a", tasks.Kinds{"noop": tasks.Noop{}}, func(w *worker.Config) {
		w.Concurrency = 10
		w.Kinds = tasks.Kinds{"noop": tasks.Noop{}, "sql": statements(t, w.Store.(*store.Store), map[string]sqlkind.Statement{
			"wait": {SQL: "SELECT FROM held"},
		})}
	})
	wait := func(n int) {
		for range n {
			c.insert(t, "kind, payload, max_attempts, priority", "sql", `{"statement": "wait"}`, 1, 9)
		}
	}
	wait(store.DefaultMaxConns)
	testenv.Eventually(t, maxWait, "as many statements wait as there are connections", func() bool {
		return get[int](t, c, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query = 'SELECT FROM held' AND wait_event_type = 'Lock'") == store.DefaultMaxConns
	})
	// The first one that waits in vain: after that no more are claimed than can begin.
	short := c.insert(t, "kind, payload, max_attempts, priority, timeout", "sql", `{"statement": "wait"}`, 9, 10, "500 milliseconds")
	testenv.Eventually(t, maxWait, "it was claimed and put back", func() bool {
		return get[bool](t, c, "SELECT fence IS NOT NULL AND status = 'pending' FROM onejob.tasks WHERE id = $1", short)
	})
	r.logged(t, "kind_full")
	wait(12 - store.DefaultMaxConns)
	for range 3 {
		c.await(t, c.insert(t, "kind", "noop"), "succeeded")
	}
	if got := c.outcomes(t, short); got != "" {
		t.Errorf("an attempt that waited for a connection is in the history: %s", got)
	}
	c.exec(t, "UPDATE onejob.tasks SET timeout = NULL WHERE id = $1", short)
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.awaitAll(t, maxWait)
	if got := get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'succeeded' AND attempt = 1 AND id <> $1", short); got != 15 {
		t.Errorf("%d of 15 others succeeded at the first attempt", got)
	}
}
