package store_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"onejob/store"
	"onejob/tasks"
)

// backlog plants what may stand in a claim's way, a multiple of n rows of each
// kind, without telling the planner. It returns how many can be claimed.
func (b *bench) backlog(n int) {
	b.t.Helper()
	b.sql(`INSERT INTO onejob.tasks (kind, run_at) SELECT 'noop', now() - interval '1 hour' + i * interval '1 ms' FROM generate_series(1, $1) i`, n)
	b.sql(`INSERT INTO onejob.tasks (kind, priority, run_at) SELECT 'noop', 500, now() + interval '1 day' + i * interval '1 ms' FROM generate_series(1, $1) i`, n)
	b.sql(`INSERT INTO onejob.tasks (kind, run_at) SELECT 'mystery', now() - interval '2 hours' + i * interval '1 ms' FROM generate_series(1, $1) i`, n/2)
	b.sql(`INSERT INTO onejob.tasks (kind, priority, run_at, lock_key) SELECT 'noop', 1, now() - interval '3 hours' + i * interval '1 ms', 'busy' FROM generate_series(1, $1) i`, n/10)
	other := *b
	other.session = uuid.NewString()
	if list := other.claimNext(1); len(list) != 1 || list[0].LockKey != "busy" {
		b.t.Fatalf("%d tasks are claimed, want one of the lock_key: %v", len(list), ids(list))
	}
}

// A replica comes to a table that is empty, or small, and has been vacuumed; its
// statements are prepared, and Postgres keeps their plans. Then somebody inserts
// a lot, and nobody analyzes. The plan of then must do for now.
func TestPlansMadeOnASmallTableStayGood(t *testing.T) {
	t.Parallel()
	for _, before := range []struct{ name, statement string }{
		{"Empty", `DELETE FROM onejob.tasks`},
		{"AllDone", `UPDATE onejob.tasks SET status = 'succeeded', session = NULL, finished_at = now()`},
		{"AllRunning", `UPDATE onejob.tasks SET status = 'running', session = gen_random_uuid(), replica = 'r', fence = id, started_at = now()`},
	} {
		t.Run(before.name, func(t *testing.T) {
			t.Parallel()
			b := newBareBench(t)
			// One connection, so that each statement has one plan.
			b.Store = open(t, store.Config{DSN: b.dsn, MaxConns: 1})
			b.sql(`INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, 200)`)
			b.sql(before.statement)
			b.sql(`ALTER TABLE onejob.tasks SET (autovacuum_enabled = false)`)
			b.sql(`VACUUM ANALYZE onejob.tasks`)

			round := func() (rows int64) {
				seen := b.read()
				list := b.claimNext(64)
				completions := make([]tasks.Completion, len(list))
				for i, task := range list {
					completions[i] = succeeded(task)
				}
				if len(list) == 0 {
					completions = []tasks.Completion{{ID: 1, Fence: -1, Session: uuid.NewString(), Outcome: tasks.Failed, Next: tasks.StatusFailed}}
				}
				b.gathered(completions)
				if err := b.Requeue(t.Context(), &tasks.Task{ID: 1, Fence: -1, Session: uuid.NewString()}, 0); err != nil {
					t.Fatal(err)
				}
				if _, err := b.CancelRequests(t.Context(), b.session); err != nil {
					t.Fatal(err)
				}
				if _, err := b.Sessions(t.Context(), b.session); err != nil {
					t.Fatal(err)
				}
				if _, _, err := b.TakeOver(t.Context(), []string{b.session}, 3); err != nil {
					t.Fatal(err)
				}
				if _, err := b.UnknownKinds(t.Context(), nil); err != nil {
					t.Fatal(err)
				}
				return b.read() - seen
			}
			for range 8 { // five times Postgres plans anew, before it keeps a plan
				round()
			}
			b.backlog(20000)
			round() // meets what the INSERTs left to clean up
			if rows := round(); rows > 15000 {
				t.Errorf("one round of statements read %d rows of a table of 52000", rows)
			}
		})
	}
}

// A claim reads what it takes and one row a lane, not a window of each lane; and of
// lower priorities nothing at all when there is enough above them.
func TestClaimsFromManyLanesReadFewRows(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, columns string
		most          int64
	}{
		{"Priorities", `i % 1000 - 500, 'default'`, 2000},
		{"Queues", `0, 'queue ' || i % 1000`, 4500},
		{"QueuesInTurn", `0, 'queue ' || i / 50`, 4500},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			b := newBareBench(t)
			b.Store = open(t, store.Config{DSN: b.dsn, MaxConns: 1})
			b.sql(`INSERT INTO onejob.tasks (kind, run_at, priority, queue)
SELECT 'noop', now() - interval '1 hour' + i * interval '1 ms', ` + test.columns + ` FROM generate_series(0, 49999) i`)
			b.claimNext(64) // meets what the INSERTs left to clean up
			before := b.read()
			claimed, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Max: 64})
			if err != nil {
				t.Fatal(err)
			}
			if n := len(claimed.Tasks); n < 20 {
				t.Errorf("%d tasks were claimed of 64", n)
			}
			if rows := b.read() - before; rows > test.most {
				t.Errorf("a claim read %d rows, want at most %d", rows, test.most)
			}
		})
	}
}

// A lock key with many rows under a limit costs a claim what it looks at, not what there
// is, and is asked for as a whole, not row by row.
func TestADeepLockKeyUnderALimitReadsFewRows(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	b.sql(`ALTER DATABASE ` + b.one(`SELECT current_database()`) + ` SET track_functions = 'all'`)
	b.Store = open(t, store.Config{DSN: b.dsn, MaxConns: 1})
	b.sql(`INSERT INTO onejob.tasks (kind, limit_name, lock_key, run_at) SELECT 'noop', 'l', 'deep', now() - interval '1 hour' + i * interval '1 ms' FROM generate_series(1, 20000) i`)
	c := tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Limit: "l", Max: 1}
	look := func() (rows int64, list []*tasks.Task) {
		before := b.read()
		claimed, err := b.Claim(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		return b.read() - before, claimed.Tasks
	}
	_, list := look()
	equal(t, "the first task", ids(list), "1")
	before := b.calls("onejob.reserve_lock_key(text)")
	if before == 0 {
		t.Fatal("calls of functions are not counted")
	}
	var rows []int64
	for range 20 {
		n, list := look()
		equal(t, "what was claimed beside it", ids(list), "")
		rows = append(rows, n)
	}
	slices.Sort(rows)
	if median := rows[len(rows)/2]; median >= 5000 {
		t.Errorf("half of the claims read more than %d rows; all of them: %v", median, rows)
	}
	if n := b.calls("onejob.reserve_lock_key(text)") - before; n >= 100 {
		t.Errorf("in 20 claims a lock key was reserved, or found busy, %d times", n)
	}
}

// holdSnapshot keeps a snapshot open until the test ends.
func (b *bench) holdSnapshot() {
	b.t.Helper()
	tx, err := b.pool.BeginTx(b.t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	if _, err := tx.Exec(b.t.Context(), `SELECT FROM onejob.tasks`); err != nil { // it is taken here
		b.t.Fatal(err)
	}
}

// While a snapshot is held, the index entries of rows that are done stay. A claim does not
// read them all each time.
func TestClaimsUnderAHeldSnapshotReadFewRows(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	b.Store = open(t, store.Config{DSN: b.dsn, MaxConns: 1})
	b.sql(`ALTER TABLE onejob.tasks SET (autovacuum_enabled = false)`)
	b.holdSnapshot()
	const total = 60_000
	b.sql(`INSERT INTO onejob.tasks (kind, run_at) SELECT 'noop', now() - interval '1 hour' + i * interval '1 ms' FROM generate_series(1, $1) i`, total)
	for done := 0; done < total; {
		list := b.claimNext(512)
		if len(list) == 0 {
			t.Fatalf("nothing is claimed after %d of %d", done, total)
		}
		var completions []tasks.Completion
		for _, task := range list {
			completions = append(completions, succeeded(task))
		}
		b.gathered(completions)
		done += len(list)
	}
	var rows []int64
	for range 40 {
		id := b.insert()
		before := b.read()
		equal(t, "what was claimed", ids(b.claimNext(1)), id)
		rows = append(rows, b.read()-before)
	}
	slices.Sort(rows)
	if median := rows[len(rows)/2]; median >= 5000 {
		t.Errorf("half of the claims read more than %d rows; all of them: %v", median, rows)
	}
}

// Retention does not walk over all that it has deleted before.
func TestRetentionUnderAHeldSnapshotReadsFewRows(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	b.Store = open(t, store.Config{DSN: b.dsn, MaxConns: 1})
	b.sql(`ALTER TABLE onejob.tasks SET (autovacuum_enabled = false)`)
	const total, batch = 40_000, 1000
	b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at, attempt) SELECT 'noop', 'succeeded', now() - interval '1 day' + i * interval '1 ms', 1 FROM generate_series(1, $1) i`, total)
	b.holdSnapshot()
	var rows []int64
	for done := 0; done < total; done += batch {
		before := b.read()
		deleted, _, _, err := b.Purge(t.Context(), tasks.StatusSucceeded, time.Hour, batch)
		if err != nil || deleted != batch {
			t.Fatalf("after %d: %d deleted, %v", done, deleted, err)
		}
		rows = append(rows, b.read()-before)
	}
	if last := rows[len(rows)-1]; last > 10*batch {
		t.Errorf("the last %d rows took reading %d; all: %v", batch, last, rows)
	}
}

// flushCounts makes a store's one connection report what it has counted. By itself it does when it becomes
// idle, but no more than once a second.
func flushCounts(t testing.TB, db *pgxpool.Pool) {
	t.Helper()
	_, err := db.Exec(t.Context(), `SELECT pg_catalog.pg_stat_force_next_flush()`)
	if e, ok := errors.AsType[*pgconn.PgError](err); ok && e.Code == "42883" {
		t.Skip("Postgres before 15 cannot be asked to report its counts")
	}
	if err != nil {
		t.Fatal(err)
	}
}

// calls returns how often a function of the schema was called by the store's one
// connection, which must track functions.
func (b *bench) calls(function string) int64 {
	b.t.Helper()
	flushCounts(b.t, b.Pool())
	var n int64
	if err := b.Pool().QueryRow(b.t.Context(), `SELECT coalesce(pg_stat_get_function_calls($1::text::regprocedure), 0)`, function).Scan(&n); err != nil {
		b.t.Fatal(err)
	}
	return n
}

// read returns how many rows and index entries of tasks have been read so far.
func (b *bench) read() int64 {
	b.t.Helper()
	return b.readOf("onejob.tasks")
}

func (b *bench) readOf(table string) int64 {
	b.t.Helper()
	var n int64
	flushCounts(b.t, b.Pool())
	if err := b.Pool().QueryRow(b.t.Context(), `
SELECT pg_stat_get_tuples_returned($1::text::regclass) + pg_stat_get_tuples_fetched($1::text::regclass)
       + (SELECT sum(pg_stat_get_tuples_returned(indexrelid)) FROM pg_index WHERE indrelid = $1::text::regclass)`, table).Scan(&n); err != nil {
		b.t.Fatal(err)
	}
	return n
}

// BenchmarkClaim claims and completes batches of 64 from a million rows that are
// due, beside as many of the future at a high priority, half as many of a kind
// that nobody knows, and a tenth behind a busy lock key, with no statistics.
// ONEJOB_BENCH_ROWS is another number than a million.
func BenchmarkClaim(bm *testing.B) {
	n := number("ONEJOB_BENCH_ROWS", 1_000_000)
	b := newBareBench(bm)
	b.sql(`ALTER TABLE onejob.tasks SET (autovacuum_enabled = false)`)
	for range 8 {
		b.claimNext(64) // its plan is that of an empty table
	}
	b.backlog(n)
	for _, statistics := range []string{"none", "analyzed"} {
		if statistics == "analyzed" {
			b.sql(`VACUUM ANALYZE onejob.tasks`)
		}
		bm.Run(fmt.Sprintf("rows=%d/statistics=%s", n, statistics), func(bm *testing.B) {
			var took []time.Duration
			for bm.Loop() {
				began := time.Now()
				list := b.claimNext(64)
				took = append(took, time.Since(began))
				if len(list) != 64 {
					bm.Fatalf("claimed %d", len(list))
				}
				bm.StopTimer()
				var completions []tasks.Completion
				for _, task := range list {
					completions = append(completions, succeeded(task))
				}
				b.gathered(completions)
				bm.StartTimer()
			}
			slices.Sort(took)
			ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
			bm.ReportMetric(ms(took[len(took)/2]), "p50-ms")
			bm.ReportMetric(ms(took[len(took)*99/100]), "p99-ms")
		})
	}
}

// BenchmarkComplete makes so many tasks and their completions durable together: ns/op
// is the time per task.
func BenchmarkComplete(bm *testing.B) {
	for _, together := range []int{1, 128, 512} {
		bm.Run(fmt.Sprint(together), func(bm *testing.B) {
			b := newBareBench(bm)
			bm.ResetTimer()
			for i := 0; i < bm.N; i += together {
				bm.StopTimer()
				b.sql(`INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, $1)`, together)
				var completions []tasks.Completion
				for _, task := range b.claimNext(together) {
					completions = append(completions, succeeded(task))
				}
				if len(completions) != together {
					bm.Fatalf("claimed %d of %d", len(completions), together)
				}
				bm.StartTimer()
				b.gathered(completions)
			}
		})
	}
}

// What is asked every second costs nothing noticeable beside an old snapshot, which keeps
// an index entry of each task that ran since.
func TestCancelRequestsBesideAnOldSnapshot(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	b.Store = open(t, store.Config{DSN: b.dsn, MaxConns: 1})
	openTransaction(t, b.dsn, `BEGIN ISOLATION LEVEL REPEATABLE READ`, `SELECT count(*) FROM onejob.tasks`)
	b.sql(`INSERT INTO onejob.tasks (kind, lock_key) SELECT 'noop', to_char(i, 'FM00000') FROM generate_series(1, 20000) i`)
	b.sql(`UPDATE onejob.tasks SET status = 'running', session = gen_random_uuid(), replica = 'r', fence = id, started_at = now()`)
	b.sql(`ANALYZE onejob.tasks`) // the keys of running rows seem to be in order
	b.sql(`UPDATE onejob.tasks SET status = 'succeeded', session = NULL, finished_at = now()`)
	b.sql(`ANALYZE onejob.tasks`) // and there seem to be no running rows: an index of them seems to cost nothing
	mine := b.insert("status='running'", "session='"+b.session+"'", "replica='r'", "fence=100000", "started_at=now()", "cancel_requested=true")
	before := b.read()
	ids, err := b.CancelRequests(t.Context(), b.session)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "what is to be cancelled", fmt.Sprint(ids), "["+mine+"]")
	if rows := b.read() - before; rows > 10 {
		t.Errorf("it read %d rows", rows)
	}
}
