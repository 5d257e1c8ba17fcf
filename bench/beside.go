package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"

	"onejob/store"
)

// A besidePlan measures pick-up in a large table, alone and beside what people do there.
type besidePlan struct {
	Dir      string `json:"-"`
	Out      string `json:"-"`
	Finished int    `json:"finished_tasks"`
	Due      int    `json:"due_tasks"` // of a paused queue
	Retried  int    `json:"retried_tasks"`
	Inserts  int    `json:"inserts"` // in each phase, one by one
	Rounds   int    `json:"rounds"`  // of throughput, alone and watched in turn
	Tasks    int    `json:"tasks"`   // in each half of a round
}

func (p *besidePlan) flags(flags *flag.FlagSet) {
	flags.StringVar(&p.Dir, "dir", "/var/tmp", "folder on a disk for the servers' data")
	flags.StringVar(&p.Out, "out", "results/beside.json", "file for the results")
	flags.IntVar(&p.Finished, "finished", 10_000_000, "tasks that have succeeded")
	flags.IntVar(&p.Due, "due", 1_000_000, "tasks that are due, in a paused queue")
	flags.IntVar(&p.Retried, "retried", 500_000, "failed tasks that are retried at once, of the paused queue")
	flags.IntVar(&p.Inserts, "inserts", 600, "INSERTs of one task whose pick-up is measured, in each phase; 20 a second")
	flags.IntVar(&p.Rounds, "rounds", 7, "rounds of throughput, alone and beside an overview every two seconds")
	flags.IntVar(&p.Tasks, "tasks", 40_000, "tasks that are inserted at once in each half of a round")
}

// A besidePhase is pick-up beside something.
type besidePhase struct {
	P50 float64 `json:"pickup_p50_ms"`
	P99 float64 `json:"pickup_p99_ms"`
	Max float64 `json:"pickup_max_ms"`
	N   int     `json:"inserts"`
}

func phaseOf(delays []float64) besidePhase {
	return besidePhase{percentile(delays, 50), percentile(delays, 99), percentile(delays, 100), len(delays)}
}

func (p besidePhase) String() string {
	return fmt.Sprintf("pick-up p50 %.1f ms, p99 %.1f, at most %.1f, of %d", p.P50, p.P99, p.Max, p.N)
}

// besideResult is what is written.
type besideResult struct {
	Machine *machine    `json:"machine"`
	Plan    besidePlan  `json:"plan"`
	Alone   besidePhase `json:"alone"`

	// Beside somebody who looks at the page: one overview every two seconds.
	Watched       besidePhase `json:"watched"`
	WatchedRatio  float64     `json:"watched_p99_ratio"`
	OverviewP50MS float64     `json:"overview_p50_ms"`
	OverviewMaxMS float64     `json:"overview_max_ms"`

	// Tasks per second, alone and watched, by round.
	AloneRates        []float64 `json:"tasks_per_s"`
	WatchedRates      []float64 `json:"watched_tasks_per_s"`
	WatchedThroughput float64   `json:"watched_throughput_ratio"` // the median of the rounds' ratios

	// Beside "onejob tasks retry" of all failed tasks.
	Retry      besidePhase `json:"retry"`
	RetryRatio float64     `json:"retry_p99_ratio"`
	RetryS     float64     `json:"retry_s"`
	RetryMB    float64     `json:"retry_rss_mb"` // the most memory that the command had
}

// runBeside fills a table, and inserts tasks one by one while nothing else happens, while
// somebody watches, and while somebody retries many tasks.
func runBeside(ctx context.Context, p besidePlan) (err error) {
	also := func(f func() error) { err = errors.Join(err, f()) }
	say("building onejob, starting Postgres and Consul")
	g, err := prepareEnvironment(ctx, p.Dir)
	if err != nil {
		return err
	}
	defer also(g.close)
	r := besideResult{Machine: &machine{}, Plan: p}
	if err := r.Machine.look(ctx, g); err != nil {
		return err
	}
	if err := g.template(ctx, onejobTable.template, migrateOnejob); err != nil {
		return err
	}
	database, err := g.database(ctx, onejobTable.template)
	if err != nil {
		return err
	}
	at := place{environment: g, dsn: g.postgres.DSN(database)}
	f, err := connectProgress(ctx, at.dsn, onejobTable)
	if err != nil {
		return err
	}
	defer f.close()
	say("filling the table with %d tasks", p.Finished+p.Due+p.Retried)
	if err := p.fill(ctx, f); err != nil {
		return err
	}
	consul, err := g.startConsul(ctx)
	if err != nil {
		return err
	}
	defer also(consul.Close)
	starts := at.file("starts")
	replica, err := startProcess("onejob", at.file("stamp.log"), g.self, "stamp", "-subject", "onejob", "-dsn", at.dsn, "-out", starts, "-consul", consul.Addr())
	if err != nil {
		return err
	}
	running := true
	defer also(func() error {
		if running {
			return replica.stop()
		}
		return nil
	})

	var counts []int // of start times, after each phase
	total := 0
	phase := func(name string, n int, more func() bool) error {
		say("%s", name)
		inserted, err := insertSinglyWhile(ctx, f, pickups[0].insert, n, more, replica)
		total += inserted
		counts = append(counts, total)
		return err
	}
	never := func() bool { return false }
	if err := warmUpSingly(ctx, f, pickups[0].insert, replica); err != nil {
		return err
	}
	if err := phase("alone", p.Inserts, never); err != nil {
		return err
	}
	stop := p.watch(ctx, at.dsn)
	err = phase("beside one overview every two seconds", p.Inserts, never)
	took, failed := stop()
	if err = errors.Join(err, failed); err != nil {
		return err
	}
	r.OverviewP50MS, r.OverviewMaxMS = percentile(took, 50), percentile(took, 100)

	began := time.Now()
	retry := exec.CommandContext(ctx, g.onejob, "tasks", "retry", "--kind", "noop", "--queue", "paused", "--yes")
	retry.Env = append(os.Environ(), "ONEJOB_POSTGRES_DSN="+at.dsn, "CONSUL_HTTP_ADDR="+consul.Addr())
	if err := retry.Start(); err != nil {
		return err
	}
	type end struct {
		took time.Duration
		err  error
	}
	ends := make(chan end, 1)
	go func() {
		err := retry.Wait()
		ends <- end{time.Since(began), err}
	}()
	var ended end
	going := true
	err = phase("beside a retry of all failed tasks", 0, func() bool {
		select {
		case ended = <-ends:
			going = false
		default:
		}
		return going
	})
	if err = errors.Join(err, ended.err); err != nil {
		return err
	}
	r.RetryS = ended.took.Seconds() // the phase goes on until its last task has run
	if usage, ok := retry.ProcessState.SysUsage().(*syscall.Rusage); ok {
		r.RetryMB = float64(usage.Maxrss) / 1024
	}
	say("throughput, alone and watched, %d times", p.Rounds)
	var ratios []float64
	for range p.Rounds {
		alone, err := p.rate(ctx, f, replica)
		if err != nil {
			return err
		}
		stop := p.watch(ctx, at.dsn)
		watched, err := p.rate(ctx, f, replica)
		_, failed := stop()
		if err = errors.Join(err, failed); err != nil {
			return err
		}
		r.AloneRates, r.WatchedRates, ratios = append(r.AloneRates, alone), append(r.WatchedRates, watched), append(ratios, watched/alone)
	}
	r.WatchedThroughput = percentile(ratios, 50)

	running = false
	if err := replica.stop(); err != nil { // it writes the start times
		return err
	}
	list, err := readStarts([]string{starts})
	if err != nil {
		return err
	}
	delays := each(list, func(d delay) float64 { return d.ms })
	if len(delays) != total || counts[2] == counts[1] { // the retry may have ended before the first INSERT
		return fmt.Errorf("%d of %d tasks left a start time, after phases of %v", len(delays), total, counts)
	}
	r.Alone, r.Watched, r.Retry = phaseOf(delays[:counts[0]]), phaseOf(delays[counts[0]:counts[1]]), phaseOf(delays[counts[1]:])
	r.WatchedRatio, r.RetryRatio = r.Watched.P99/r.Alone.P99, r.Retry.P99/r.Alone.P99
	fmt.Printf("%d finished and %d due tasks\nalone: %v\nwatched: %v; p99 against alone: %.2f; an overview takes %.0f ms, at most %.0f; throughput against alone: %.3f\nbeside a retry of %d tasks: %v; p99 against alone: %.2f; it took %.0f s and %.0f MB\n",
		p.Finished, p.Due, r.Alone, r.Watched, r.WatchedRatio, r.OverviewP50MS, r.OverviewMaxMS, r.WatchedThroughput, p.Retried, r.Retry, r.RetryRatio, r.RetryS, r.RetryMB)
	return writeJSON(p.Out, r)
}

// fill puts the tasks into the table that are there before.
func (p besidePlan) fill(ctx context.Context, f *progress) error {
	const portion = 500_000
	insert := func(n int, sql string) error {
		for from := 0; from < n; from += portion {
			if _, err := f.conn.Exec(ctx, sql, from+1, min(from+portion, n)); err != nil {
				return err
			}
		}
		return nil
	}
	if err := insert(p.Finished, `
INSERT INTO onejob.tasks (kind, status, attempt, started_at, finished_at, created_at)
SELECT 'noop', 'succeeded', 1, at, at, at
  FROM (SELECT now() - i * interval '1 ms' AS at FROM generate_series($1::int, $2::int) i) x`); err != nil {
		return err
	}
	if err := insert(p.Due, `INSERT INTO onejob.tasks (kind, queue) SELECT 'noop', 'paused' FROM generate_series($1::int, $2::int) i`); err != nil {
		return err
	}
	if err := insert(p.Retried, `
INSERT INTO onejob.tasks (kind, queue, status, attempt, started_at, finished_at, error)
SELECT 'noop', 'paused', 'failed', 5, now(), now(), 'connection refused: ' || i
  FROM generate_series($1::int, $2::int) i`); err != nil {
		return err
	}
	for _, sql := range []string{
		`INSERT INTO onejob.schedules (name, cron, kind, enabled) SELECT 'schedule ' || i, '@daily', 'noop', false FROM generate_series(1, 100) i`,
		`INSERT INTO onejob.occurrences (schedule_id, due_at, task_id) SELECT s.id, now() - i * interval '1 hour', i FROM onejob.schedules s CROSS JOIN generate_series(1, 100) i`,
		`SELECT onejob.pause_queue('paused')`,
		`VACUUM ANALYZE onejob.tasks`,
		`CHECKPOINT`,
	} {
		if _, err := f.conn.Exec(ctx, sql); err != nil {
			return err
		}
	}
	err := f.conn.QueryRow(ctx, `SELECT coalesce(max(id), 0) FROM onejob.tasks`).Scan(&f.last)
	f.at = f.last // what was there before is nobody's business
	return err
}

// rate inserts tasks at once, and returns how many end in a second.
func (p besidePlan) rate(ctx context.Context, f *progress, replica *process) (float64, error) {
	if _, err := f.conn.Exec(ctx, `INSERT INTO onejob.tasks (kind, payload) SELECT 'stamp', '{"sent": 0}' FROM generate_series(1, $1::int)`, p.Tasks); err != nil {
		return 0, err
	}
	f.last += int64(p.Tasks)
	began := time.Now()
	ended, err := f.pass(ctx, f.last, []*process{replica})
	return float64(p.Tasks) / ended.Sub(began).Seconds(), err
}

// watch takes an overview at once and every two seconds until stop is called, which returns
// how many milliseconds the statements of each took.
func (p besidePlan) watch(ctx context.Context, dsn string) (stop func() ([]float64, error)) {
	ctx, cancel := context.WithCancel(ctx)
	var took []float64
	done := make(chan error, 1)
	go func() {
		db, err := store.Open(store.Config{DSN: dsn})
		if err != nil {
			done <- err
			return
		}
		defer db.Close()
		for {
			o, err := db.Overview(context.WithoutCancel(ctx))
			if err = errors.Join(err, o.Replicas.Err, o.Waiting.Err, o.Paused.Err, o.Running.Err, o.Schedules.Err, o.Failures.Err, o.Overlaps.Err, o.Held.Err); err != nil {
				done <- err
				return
			}
			sum := o.Replicas.Took + o.Waiting.Took + o.Paused.Took + o.Running.Took + o.Schedules.Took + o.Failures.Took + o.Overlaps.Took + o.Held.Took
			took = append(took, float64(sum.Microseconds())/1000)
			select {
			case <-ctx.Done():
				done <- nil
				return
			case <-time.After(2 * time.Second):
			}
		}
	}()
	return func() ([]float64, error) {
		cancel()
		err := <-done
		return took, err
	}
}
