package worker_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"
	"pgregory.net/rapid"

	"onejob/internal/testenv"
	"onejob/store"
	"onejob/tasks"
	"onejob/worker"
)

// hostileRow draws the columns and values of an INSERT, over the whole range that
// Postgres can hold. Many are refused; what is not must harm no other row.
func hostileRow(r *rapid.T) (columns []string, values []any) {
	set := func(column string, value any) { columns, values = append(columns, column), append(values, value) }
	one := func(column string, of ...any) {
		if rapid.IntRange(0, 9).Draw(r, column) == 0 {
			set(column, rapid.SampledFrom(of).Draw(r, column))
		}
	}
	word := rapid.StringOf(rapid.RuneFrom([]rune("aé🕰'\"\\%/.: \u00a0\u202e"))).Draw(r, "word")
	kind := rapid.SampledFrom([]string{"noop", "noop", "note", "exec", "http", "sql", "mystery", word}).Draw(r, "kind")
	set("kind", kind)
	one("payload", `{}`, `null`, `[]`, `"x"`, `1e400`, `{"command": "no"}`, `{"a": "\u202e"}`, `[`+strings.Repeat("1e131071,", 30)+`1]`, strings.Repeat("[", 3000)+strings.Repeat("]", 3000), `"`+strings.Repeat("x", 100_000)+`"`)
	one("queue", "default", "other", word, strings.Repeat("q", 100))
	one("priority", math.MinInt16, -1000, 0, 1000, math.MaxInt16)
	times := []any{"-infinity", "infinity", "4713-01-01 BC", "0001-01-01 UTC", "1970-01-01 UTC", "9999-12-31 UTC", "294276-01-01 UTC", "now", "tomorrow"}
	one("run_at", times...)
	one("created_at", times...)
	one("lock_key", "1", "k", "..", "../leader", word, strings.Repeat("🕰", 128))
	one("limit_name", "none", ".lock", word, strings.Repeat("l", 100))
	one("unique_key", word+uuid.NewString(), "")
	one("attempt", -1, 0, 999_999, 1_000_000, math.MaxInt32)
	one("max_attempts", 0, 1, 1000, math.MaxInt32)
	one("crashes", -1, 0, 2, 1_000_000, math.MaxInt32)
	intervals := []any{"0", "1 microsecond", "1 day", "100 years", "178000000 years", "213503 days 23:34:34.709552", "-1 year",
		"-5965232 years 2147483647 days", "5965232 years -2147483500 days", "-292271 years 9223372000000 s", "1000 years -359999 days", "-1000 years 365000 days 8000000 hours"}
	one("timeout", intervals...)
	one("keep_for", intervals...)
	// What only onejob writes: in one row of four, and mostly as it would.
	if rapid.IntRange(0, 3).Draw(r, "written by hand") == 0 {
		status := rapid.SampledFrom([]string{"running", "running", "succeeded", "failed", "cancelled"}).Draw(r, "status")
		set("status", status)
		mostly := func(column string, of ...any) {
			if rapid.IntRange(0, 9).Draw(r, column) > 0 {
				set(column, rapid.SampledFrom(of).Draw(r, column))
			}
		}
		mostly("fence", math.MinInt64, 0, 1, math.MaxInt64)
		mostly("started_at", append(times, "now", "now", "now")...)
		if status == "running" {
			mostly("session", uuid.NewString(), uuid.Nil.String())
			mostly("replica", "", "r", word)
		} else {
			mostly("finished_at", append(times, "now", "now", "now")...)
		}
	}
	one("cancel_requested", true, false)
	one("result", `{}`, `1e400`)
	one("schedule_id", -1, 1, math.MaxInt64)
	return columns, values
}

// Every healthy row among hostile ones runs, and people can look at all of them.
func TestHealthyRowsAmongHostileOnes(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	a := c.limited(t, "a", kinds(nil), func(w *worker.Config) { w.LimitSlots = map[string]int{"good": 2} })
	accepted, refused := 0, 0
	defer func() {
		t.Logf("%d rows were accepted, %d refused", accepted, refused)
		if accepted == 0 || refused == 0 {
			t.Error("there were none of a kind")
		}
	}()
	rapid.Check(t, func(r *rapid.T) {
		for range 40 {
			columns, values := hostileRow(r)
			marks := make([]string, len(values))
			for i, v := range values {
				marks[i] = fmt.Sprintf("$%d", i+1)
				values[i] = fmt.Sprint(v) // every type reads itself from text
			}
			sql := fmt.Sprintf("INSERT INTO onejob.tasks (%s) VALUES (%s)", strings.Join(columns, ", "), strings.Join(marks, ", "))
			if tag, err := c.pool.Exec(t.Context(), sql, values...); err == nil && tag.RowsAffected() == 1 {
				accepted++
			} else if pg := (*pgconn.PgError)(nil); errors.As(err, &pg) && (strings.HasPrefix(pg.Code, "22") || strings.HasPrefix(pg.Code, "23")) {
				refused++
			} else {
				r.Fatalf("%s %.200q: %v, %v", sql, values, tag, err)
			}
		}
		var healthy []int64
		for i := range 6 {
			columns, values := "kind, priority", []any{"noop", i - 3}
			switch i % 3 {
			case 1:
				columns, values = columns+", lock_key", append(values, "healthy")
			case 2:
				columns, values = columns+", limit_name", append(values, "good")
			}
			healthy = append(healthy, c.insert(t, columns, values...))
		}
		for _, id := range healthy {
			c.await(t, id, "succeeded")
		}
		list, err := a.store.List(t.Context(), store.Filter{Limit: 60})
		if err != nil {
			r.Fatal(err)
		}
		for _, row := range list.Rows {
			_, _, err := a.store.Show(t.Context(), row.ID)
			if err != nil && c.there(t, row.ID) { // or retention was quicker: some rows are kept for no time
				r.Fatal(err)
			}
		}
		if _, _, err := a.store.TakeOver(t.Context(), []string{uuid.NewString()}, 3); err != nil {
			r.Fatal(err)
		}
	})
}

func (c *cluster) there(t *testing.T, id int64) (is bool) {
	t.Helper()
	if err := c.pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM onejob.tasks WHERE id = $1)`, id).Scan(&is); err != nil {
		t.Fatal(err)
	}
	return is
}

// A row that Postgres refuses to make running fails, and the log names it, once. A
// healthy row that was claimed together with it runs.
func TestRefusedRowIsNamed(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.exec(t, `CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE numeric_value_out_of_range USING MESSAGE = 'not this one'; END $$`)
	c.exec(t, `CREATE TRIGGER refuse BEFORE UPDATE ON onejob.tasks FOR EACH ROW WHEN (NEW.status = 'running' AND NEW.payload = '"refused"') EXECUTE FUNCTION public.refuse()`)
	bad := c.insert(t, "kind, payload, priority", "noop", `"refused"`, 1)
	healthy := c.insert(t, "kind", "noop")
	r := c.replica(t, "a", kinds(nil), nil)
	c.await(t, bad, "failed")
	c.await(t, healthy, "succeeded")
	fields := r.logged(t, "row_refused")
	if fields["task_id"] != bad || fields["failed"] != true || !strings.Contains(fmt.Sprint(fields["error"]), "not this one (SQLSTATE 22003)") {
		t.Errorf("the event has the fields %v, want those of task %d, which has failed", fields, bad)
	}
	for range 3 { // claims go on
		c.await(t, c.insert(t, "kind", "noop"), "succeeded")
	}
	if n := r.events.FilterMessage("row_refused").Len(); n != 1 {
		t.Errorf("it was logged %d times", n)
	}
}

// A replica is frozen while it receives what it has claimed. Until its session ends
// its rows are its own; all others are nobody's business of its.
func TestAReplicaFrozenInItsClaim(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	// As stored they are small, so that many come with the claim; on their way they are not.
	c.exec(t, `INSERT INTO onejob.tasks (kind, payload) SELECT 'noop', to_jsonb(repeat('x', 300000)) FROM generate_series(1, 3000)`)
	f := c.process(t, "f", "", "ONEJOB_WORKER_CONCURRENCY=64", "ONEJOB_CONSUL_CHECK_TTL=10m", "ONEJOB_CONSUL_SESSION_TTL=20m")
	running := func() int { return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'running'") }
	for try := 1; ; try++ {
		testenv.Eventually(t, maxWait, "f has claimed", func() bool { return running() > 0 })
		f.signal(t, syscall.SIGSTOP)
		testenv.Eventually(t, maxWait, "what it had sent is done", func() bool {
			return get[bool](t, c, `SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'
			   AND state = 'active' AND wait_event IS DISTINCT FROM 'ClientWrite' AND pid <> pg_backend_pid())`)
		})
		if running() > 0 {
			break
		}
		if try == 20 {
			t.Fatalf("it was frozen %d times, and held nothing", try)
		}
		f.signal(t, syscall.SIGCONT)
	}
	g := c.process(t, "g", "")
	stopped := time.Now()
	g.logged(t, "task_succeeded")
	t.Logf("the other replica had its first success %.2f s after it was there", time.Since(stopped).Seconds())
	testenv.Eventually(t, 2*maxWait, "all is done but what the frozen replica holds", func() bool {
		return get[bool](t, c, "SELECT NOT EXISTS (SELECT FROM onejob.tasks WHERE status = 'pending' OR status = 'running' AND replica <> 'f')")
	})
	t.Logf("it holds %d tasks, and g did the rest in %.2f s", running(), time.Since(stopped).Seconds())
	f.signal(t, syscall.SIGCONT)
	c.awaitAll(t, maxWait)
	// On a slow machine the frozen one is called dead before all is done.
	if n := get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'succeeded' AND (attempt = 1 OR id IN (SELECT task_id FROM onejob.attempts WHERE replica = 'f'))"); n != 3000 {
		t.Errorf("%d of 3000 succeeded, in their first attempt or after that of the frozen replica", n)
	}
}

// A replica that is told to stop in the middle of a claim finishes it: what it has
// claimed and not begun is pending again when it is gone, with all its attempts.
func TestStopsLoseNoClaim(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.exec(t, `INSERT INTO onejob.tasks (kind, max_attempts) SELECT 'noop', 1 FROM generate_series(1, 20000)`)
	for i := range 8 {
		before := get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'succeeded'")
		r := c.replica(t, fmt.Sprint("r", i), kinds(nil), func(w *worker.Config) { w.Concurrency = 200 })
		testenv.Eventually(t, maxWait, "it is at work", func() bool {
			return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'succeeded'") > before
		})
		if err := r.stop(); err != nil {
			t.Fatal(err)
		}
		if n := get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'running'"); n > 0 {
			t.Errorf("stop %d: %d rows are still running", i, n)
		}
	}
	if n := get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'pending' AND attempt > 0 OR status NOT IN ('pending', 'succeeded')"); n > 0 {
		t.Errorf("%d tasks lost an attempt that never began", n)
	}
	c.wantNone(t, "tasks that were given back wait for a time", "SELECT count(*) FROM onejob.tasks WHERE status = 'pending' AND run_at > clock_timestamp()")
}

// tardy commits limited claims, says so, and answers 100 ms later: with the error of the
// context if that has ended by then, as if the connection had been given up.
type tardy struct {
	worker.Store
	committed chan struct{}
}

func (s tardy) Claim(ctx context.Context, c tasks.Claim) (tasks.Claimed, error) {
	claimed, err := s.Store.Claim(context.WithoutCancel(ctx), c)
	if c.Limit == "" || len(claimed.Tasks) == 0 {
		return claimed, err
	}
	select {
	case s.committed <- struct{}{}:
	default: // nobody counts any more
	}
	<-time.After(100 * time.Millisecond)
	if ctx.Err() != nil {
		return tasks.Claimed{}, ctx.Err()
	}
	return claimed, err
}

// The same goes for claims under a limit, of which there are many at once.
func TestStopsLoseNoLimitedClaim(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.exec(t, `INSERT INTO onejob.tasks (kind, max_attempts, limit_name) SELECT 'noop', 1, 'many' FROM generate_series(1, 5000)`)
	for i, claims := range []int{1, 5, 20, 100} {
		committed := make(chan struct{}, claims)
		r := c.limited(t, fmt.Sprint("r", i), kinds(nil), func(w *worker.Config) {
			w.Store, w.Concurrency, w.LimitSlots = tardy{w.Store, committed}, 200, map[string]int{"many": 50}
		})
		for range claims {
			select {
			case <-committed:
			case <-time.After(maxWait):
				t.Fatalf("stop %d: there were not %d claims within %v", i, claims, maxWait)
			}
		}
		if err := r.stop(); err != nil {
			t.Fatal(err)
		}
		c.wantNone(t, fmt.Sprintf("rows are running after stop %d", i), "SELECT count(*) FROM onejob.tasks WHERE status = 'running'")
	}
	c.wantNone(t, "tasks lost an attempt that never began", "SELECT count(*) FROM onejob.tasks WHERE status = 'pending' AND attempt > 0")
	c.wantNone(t, "tasks that were given back wait for a time", "SELECT count(*) FROM onejob.tasks WHERE status = 'pending' AND run_at > clock_timestamp()")
	c.wantNone(t, "tasks are neither waiting nor done", "SELECT count(*) FROM onejob.tasks WHERE status NOT IN ('pending', 'succeeded')")
	c.wantNone(t, "attempts did not succeed", "SELECT count(*) FROM onejob.attempts WHERE outcome <> 'succeeded'")
}
