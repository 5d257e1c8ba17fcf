package store_test

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/store"
	"onejob/tasks"
)

// BenchmarkTableSettings measures what fillfactor and autovacuum settings of
// onejob.tasks do to a steady stream of tasks: see
// docs/decisions/table-settings.md. It goes through all of them in turn, several
// times, and prints the medians as a table.
//
// Autovacuum looks around every second here, not every minute, so that a run of
// seconds sees as many of its rounds as minutes would. ONEJOB_BENCH_TASKS is how
// many tasks go through in each run, ONEJOB_BENCH_ROUNDS how many runs there are,
// ONEJOB_BENCH_HISTORY how many finished tasks are there before.
func BenchmarkTableSettings(bm *testing.B) {
	const eager = "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0"
	var variants []variant
	for _, s := range []string{
		"fillfactor = 100",
		"fillfactor = 70",
		"fillfactor = 50",
		"fillfactor = 100, autovacuum_enabled = false",
		"fillfactor = 100, " + eager,
		"fillfactor = 100, " + strings.Replace(eager, "5000", "20000", 1),
	} {
		variants = append(variants, variant{s, []string{
			`ALTER TABLE onejob.tasks RESET (fillfactor, autovacuum_vacuum_scale_factor, autovacuum_vacuum_threshold, autovacuum_vacuum_cost_delay)`,
			`ALTER TABLE onejob.tasks SET (` + s + `)`,
		}})
	}
	compareVariants(bm, variants)
}

// BenchmarkSchemas measures what Postgres would save with less to write for each task, at the
// very most: each variant leaves something out and takes its promise away. See
// docs/decisions/rows.md.
func BenchmarkSchemas(bm *testing.B) {
	compareVariants(bm, []variant{
		{"as it is", nil},
		{"no row of history (a trigger drops it)", []string{
			`CREATE FUNCTION onejob.dropped() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'`,
			`CREATE TRIGGER dropped BEFORE INSERT ON onejob.attempts FOR EACH ROW EXECUTE FUNCTION onejob.dropped()`,
		}},
		{"no index for the end of retention", []string{`DROP INDEX onejob.tasks_finished_kept_until`}},
		{"no index for running lock keys", []string{`DROP INDEX onejob.one_running_task_per_lock_key`}},
		{"an integer for running lock keys", []string{
			`DROP INDEX onejob.one_running_task_per_lock_key`,
			`CREATE UNIQUE INDEX one_running_task_per_lock_key ON onejob.tasks (id) WHERE status = 'running'`,
		}},
		{"history in partitions by fence", []string{
			`ALTER TABLE onejob.attempts RENAME TO attempts_whole`,
			`CREATE TABLE onejob.attempts (LIKE onejob.attempts_whole INCLUDING DEFAULTS INCLUDING CONSTRAINTS) PARTITION BY RANGE (fence)`,
			`CREATE TABLE onejob.attempts_1 PARTITION OF onejob.attempts FOR VALUES FROM (0) TO (20000)`,
			`CREATE TABLE onejob.attempts_2 PARTITION OF onejob.attempts FOR VALUES FROM (20000) TO (1000000000)`,
			`CREATE UNIQUE INDEX ON onejob.attempts (task_id, fence)`,
		}},
		{"no checks on the tables", []string{`DO $$
DECLARE c record;
BEGIN
    FOR c IN SELECT conrelid::regclass AS t, conname FROM pg_constraint WHERE contype = 'c' AND conrelid IN ('onejob.tasks'::regclass, 'onejob.attempts'::regclass) LOOP
        EXECUTE format('ALTER TABLE %s DROP CONSTRAINT %I', c.t, c.conname);
    END LOOP;
END $$`}},
	})
}

// A variant is a schema that was changed by statements.
type variant struct {
	name       string
	statements []string
}

// compareVariants runs a stream of tasks through each variant in turn, several times, and
// prints the medians.
func compareVariants(bm *testing.B, variants []variant) {
	total, rounds, history := number("ONEJOB_BENCH_TASKS", 60_000), number("ONEJOB_BENCH_ROUNDS", 3), number("ONEJOB_BENCH_HISTORY", 400_000)
	_, db := testenv.OwnPostgres(bm)
	b := &bench{Store: open(bm, store.Config{DSN: db.DSN}), t: bm, pool: db.Pool(bm), dsn: db.DSN, session: "6f1ed002-ab59-42fb-a0b4-0123456789ab"}
	b.sql(`ALTER SYSTEM SET autovacuum_naptime = '1s'`)
	b.sql(`SELECT pg_reload_conf()`)

	results := make([][]steady, len(variants))
	for bm.Loop() {
		for range rounds {
			for i, v := range variants {
				results[i] = append(results[i], b.steady(v.statements, total, history))
			}
		}
	}
	fmt.Printf("%-110s %9s %7s %7s %7s %8s %8s %8s %7s %9s\n", "variant", "tasks/s", "ratio", "p50 ms", "p99 ms", "table MB", "index MB", "dead", "HOT %", "WAL bytes")
	for i, v := range variants {
		median := func(field func(steady) float64) float64 {
			var list []float64
			for _, r := range results[i] {
				list = append(list, field(r))
			}
			slices.Sort(list)
			return list[len(list)/2]
		}
		var ratios []float64 // to the first variant, in the same round
		for round, r := range results[i] {
			ratios = append(ratios, r.rate/results[0][round].rate)
		}
		slices.Sort(ratios)
		fmt.Printf("%-110s %9.0f %7.3f %7.2f %7.2f %8.1f %8.1f %8.0f %7.2f %9.0f\n", v.name,
			median(func(r steady) float64 { return r.rate }), ratios[len(ratios)/2],
			median(func(r steady) float64 { return r.p50 }), median(func(r steady) float64 { return r.p99 }),
			median(func(r steady) float64 { return r.table }), median(func(r steady) float64 { return r.index }),
			median(func(r steady) float64 { return r.dead }), median(func(r steady) float64 { return r.hot }), median(func(r steady) float64 { return r.wal }))
	}
}

// steady is what one run gave.
type steady struct {
	rate, p50, p99, table, index, dead, hot float64
	wal                                     float64 // bytes for each task
}

func (b *bench) steady(changes []string, total, history int) (r steady) {
	b.t.Helper()
	b.sql(`DROP SCHEMA IF EXISTS onejob CASCADE`)
	if err := b.Migrate(b.t.Context(), nil); err != nil {
		b.t.Fatal(err)
	}
	for _, change := range changes {
		b.sql(change)
	}
	b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at) SELECT 'noop', 'succeeded', now() FROM generate_series(1, $1)`, history)
	b.sql(`VACUUM ANALYZE onejob.tasks`)
	b.sql(`CHECKPOINT`)

	written := b.one(`SELECT pg_current_wal_insert_lsn()::text`)
	began := time.Now()
	var claims []time.Duration
	var running sync.WaitGroup
	for inserted, done := 0, 0; done < total; {
		if inserted-done < 5000 && inserted < total {
			b.sql(`INSERT INTO onejob.tasks (kind, payload) SELECT 'noop', '{"to": "somebody@example.com"}' FROM generate_series(1, 5000)`)
			inserted += 5000
		}
		at := time.Now()
		list := b.claimNext(64)
		claims = append(claims, time.Since(at))
		done += len(list)
		running.Wait() // one batch ends while the next is claimed
		for _, task := range list {
			running.Go(func() {
				if err := b.Complete(b.t.Context(), tasks.Completion{ID: task.ID, Fence: task.Fence, Session: task.Session, Outcome: tasks.Succeeded, Next: tasks.StatusSucceeded}); err != nil {
					b.t.Error(err)
				}
			})
		}
	}
	running.Wait()
	r.rate = float64(total) / time.Since(began).Seconds()
	slices.Sort(claims)
	r.p50, r.p99 = claims[len(claims)/2].Seconds()*1000, claims[len(claims)*99/100].Seconds()*1000

	var err error
	if r.wal, err = strconv.ParseFloat(b.one(`SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), $1::pg_lsn)::text`, written), 64); err != nil {
		b.t.Fatal(err)
	}
	r.wal /= float64(total)
	for column, field := range map[string]*float64{
		"pg_table_size(relid) / 1e6": &r.table, "pg_indexes_size(relid) / 1e6": &r.index,
		"n_dead_tup": &r.dead, "100.0 * n_tup_hot_upd / n_tup_upd": &r.hot,
	} {
		if *field, err = strconv.ParseFloat(b.one(`SELECT (`+column+`)::text FROM pg_stat_user_tables WHERE relid = 'onejob.tasks'::regclass`), 64); err != nil {
			b.t.Fatal(err)
		}
	}
	return r
}

func number(variable string, otherwise int) int {
	if n, err := strconv.Atoi(os.Getenv(variable)); err == nil {
		return n
	}
	return otherwise
}
