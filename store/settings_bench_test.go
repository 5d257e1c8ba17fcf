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
	total, rounds, history := number("ONEJOB_BENCH_TASKS", 60_000), number("ONEJOB_BENCH_ROUNDS", 3), number("ONEJOB_BENCH_HISTORY", 400_000)
	const eager = "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0"
	settings := []string{
		"fillfactor = 100",
		"fillfactor = 70",
		"fillfactor = 50",
		"fillfactor = 100, autovacuum_enabled = false",
		"fillfactor = 100, " + eager,
		"fillfactor = 100, " + strings.Replace(eager, "5000", "20000", 1),
	}
	_, db := testenv.OwnPostgres(bm)
	b := &bench{Store: open(bm, store.Config{DSN: db.DSN}), t: bm, pool: db.Pool(bm), dsn: db.DSN, session: "6f1ed002-ab59-42fb-a0b4-0123456789ab"}
	b.sql(`ALTER SYSTEM SET autovacuum_naptime = '1s'`)
	b.sql(`SELECT pg_reload_conf()`)

	results := make([][]steady, len(settings))
	for bm.Loop() {
		for range rounds {
			for i, s := range settings {
				results[i] = append(results[i], b.steady(s, total, history))
			}
		}
	}
	fmt.Printf("%-110s %9s %7s %7s %8s %8s %8s %7s\n", "settings", "tasks/s", "p50 ms", "p99 ms", "table MB", "index MB", "dead", "HOT %")
	for i, s := range settings {
		median := func(field func(steady) float64) float64 {
			var list []float64
			for _, r := range results[i] {
				list = append(list, field(r))
			}
			slices.Sort(list)
			return list[len(list)/2]
		}
		fmt.Printf("%-110s %9.0f %7.2f %7.2f %8.1f %8.1f %8.0f %7.2f\n", s,
			median(func(r steady) float64 { return r.rate }), median(func(r steady) float64 { return r.p50 }), median(func(r steady) float64 { return r.p99 }),
			median(func(r steady) float64 { return r.table }), median(func(r steady) float64 { return r.index }),
			median(func(r steady) float64 { return r.dead }), median(func(r steady) float64 { return r.hot }))
	}
}

// steady is what one run gave.
type steady struct{ rate, p50, p99, table, index, dead, hot float64 }

func (b *bench) steady(settings string, total, history int) (r steady) {
	b.t.Helper()
	b.sql(`DROP SCHEMA IF EXISTS onejob CASCADE`)
	if err := b.Migrate(b.t.Context(), nil); err != nil {
		b.t.Fatal(err)
	}
	b.sql(`ALTER TABLE onejob.tasks RESET (fillfactor, autovacuum_vacuum_scale_factor, autovacuum_vacuum_threshold, autovacuum_vacuum_cost_delay)`)
	b.sql(`ALTER TABLE onejob.tasks SET (` + settings + `)`)
	b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at) SELECT 'noop', 'succeeded', now() FROM generate_series(1, $1)`, history)
	b.sql(`VACUUM ANALYZE onejob.tasks`)
	b.sql(`CHECKPOINT`)

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
