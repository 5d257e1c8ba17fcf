package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/bench/riverjobs"
	"onejob/internal/servers"
)

// pressurePlan is for how long onejob and River are put under pressure of several kinds, side
// by side. The kinds are those of the public harness for job queues on Postgres,
// https://github.com/hardbyte/postgresql-job-queue-benchmarking; the way of measuring is ours.
type pressurePlan struct {
	Dir      string        `json:"-"`
	Out      string        `json:"-"`
	Pictures string        `json:"-"`
	Only     string        `json:"only,omitempty"`
	Subjects string        `json:"subjects"`
	Warm     time.Duration `json:"warm_up_ns"`
	Before   time.Duration `json:"before_ns"`
	During   time.Duration `json:"during_ns"`
	After    time.Duration `json:"after_ns"`
	Overload time.Duration `json:"overload_ns"`
	Recovery time.Duration `json:"recovery_ns"` // at most, after the overload and the burst
	Every    time.Duration `json:"every_ns"`
	Burst    int           `json:"burst_rows"`
}

func (p *pressurePlan) flags(flags *flag.FlagSet) {
	flags.StringVar(&p.Dir, "dir", "/var/tmp", "folder on a disk for the servers' data")
	flags.StringVar(&p.Out, "out", "results/pressure.json", "file for the results")
	flags.StringVar(&p.Pictures, "pictures", "../docs/images", "folder for the pictures")
	flags.StringVar(&p.Only, "only", "", "only these kinds of pressure, such as snapshot,kills")
	flags.StringVar(&p.Subjects, "subjects", "onejob,river", "who is put under it")
	flags.DurationVar(&p.Warm, "warm", 20*time.Second, "how long to run before anything counts")
	flags.DurationVar(&p.Before, "before", time.Minute, "how long to watch before the pressure begins")
	flags.DurationVar(&p.During, "during", 3*time.Minute, "how long the pressure lasts")
	flags.DurationVar(&p.After, "after", time.Minute, "how long to watch afterwards")
	flags.DurationVar(&p.Overload, "overload", 10*time.Minute, "how long twice as many tasks come as can be done")
	flags.DurationVar(&p.Recovery, "recovery", 20*time.Minute, "how long to wait, at most, until a backlog is done")
	flags.DurationVar(&p.Every, "every", 5*time.Second, "time between looks")
	flags.IntVar(&p.Burst, "burst", 1_000_000, "rows that a burst inserts at once")
}

// Tasks take pressureWork and pressureSlots of them run at once, so 2,000 a second can be done
// at the very most, by both subjects: the machine is half idle and pick-up is not the time in
// a queue.
const (
	pressureWork  = 100 * time.Millisecond
	pressureSlots = 200
	pressureRate  = 1_000 // tasks a second
	pressureMost  = float64(pressureSlots) / (float64(pressureWork) / float64(time.Second))

	pressureWaiting = 20_000 // tasks that always wait where there is no rate
	readersAtOnce   = 4
	reportLasts     = 5 * time.Second // at least, of each of them
	feedEvery       = 20 * time.Millisecond
	killEvery       = 20 * time.Second
	startAfter      = 5 * time.Second // the kill
)

// pressure is one kind of it. Tasks do nothing where slots is 2,000 (pressureSlots otherwise).
type pressure struct {
	name, title string

	replicas int     // 0: one
	quick    bool    // tasks do nothing, and 2,000 run at once
	full     bool    // pressureWaiting tasks always wait; else there are rates
	rate     float64 // tasks a second before
	during   float64 // and while the pressure lasts
	after    float64
	backlog  bool // the end is when what waits has been done
	atOnce   bool // the backlog comes in one INSERT: the clock starts before that, not after the pressure
	restarts bool // connections to Postgres break
	kills    bool // workers end

	lasts func(*pressurePlan) time.Duration

	// begin puts the run under pressure, and does not wait for that: what takes a while closes
	// pressedRun.over when it is done. What it returns takes the pressure away. Nil: the rates
	// are all.
	begin func(context.Context, *pressedRun) (end func() error, err error)
}

var pressures = []pressure{
	{name: "snapshot", title: "a transaction with an old snapshot stays open", rate: pressureRate, during: pressureRate, after: pressureRate, begin: openSnapshot},
	{name: "snapshot-full", title: "a transaction with an old snapshot stays open, and there is always more to do", quick: true, full: true, begin: openSnapshot},
	{name: "readers", title: "four long reports read the table all the time", rate: pressureRate, during: pressureRate, after: pressureRate, begin: readReports},
	{name: "overload", title: "twice as many tasks come as can be done", rate: pressureRate, during: 2 * pressureMost, after: pressureRate / 2, backlog: true,
		lasts: func(p *pressurePlan) time.Duration { return p.Overload }},
	{name: "burst", title: "a million tasks come at once", quick: true, rate: 500, during: 500, after: 500, backlog: true, atOnce: true, begin: insertBurst,
		lasts: func(*pressurePlan) time.Duration { return time.Second }},
	{name: "restart", title: "Postgres is restarted", rate: pressureRate, during: pressureRate, after: pressureRate, restarts: true, begin: restartPostgres,
		lasts: func(p *pressurePlan) time.Duration { return min(p.During, 30*time.Second) }},
	{name: "kills", title: "one of three workers is killed every 20 s", replicas: 3, rate: pressureRate, during: pressureRate, after: pressureRate, kills: true, begin: killWorkers},
}

// pressedSubjects are who is put under pressure.
var pressedSubjects = []pressedSubject{
	{name: "onejob", jobs: onejobTable, consul: true,
		enqueue:    `INSERT INTO onejob.tasks (kind, payload) SELECT 'stamp', jsonb_build_object('sent', sent) FROM unnest($1::bigint[]) AS sent`,
		unfinished: `SELECT count(*) FROM onejob.tasks WHERE status IN ('pending', 'running')`,
		report:     reportOf(`SELECT avg(extract(epoch FROM finished_at - run_at)) + max(length(payload::text)) FROM onejob.tasks`)},
	{name: "river", jobs: riverTable,
		enqueue: `
WITH jobs AS (
    INSERT INTO river_job (kind, args, max_attempts)
    SELECT 'stamp', jsonb_build_object('sent', sent), 25
      FROM unnest($1::bigint[]) AS sent
 RETURNING 1
)
SELECT pg_notify(concat(current_schema(), '.river_insert'), '{"queue": "default"}') FROM (SELECT FROM jobs LIMIT 1) AS one`,
		unfinished: `SELECT count(*) FROM river_job WHERE state IN ('available', 'running', 'retryable', 'scheduled', 'pending')`,
		report:     reportOf(`SELECT avg(extract(epoch FROM finalized_at - scheduled_at)) + max(length(args::text)) FROM river_job`)},
}

// reportOf returns a statement that reads a table again and again, for $1 seconds and until it
// is through, and returns how often. The condition makes Postgres read it anew each time.
func reportOf(reading string) string {
	return `
WITH RECURSIVE passes(n, value) AS (
    SELECT 0, NULL::float8
     UNION ALL
    SELECT n + 1, (` + reading + ` WHERE passes.n >= 0)::float8
      FROM passes
     WHERE clock_timestamp() < statement_timestamp() + make_interval(secs => $1::float8)
)
SELECT max(n) FROM passes`
}

type pressedSubject struct {
	name       string
	jobs       table
	consul     bool
	enqueue    string // statement that adds a task for each element of $1, which it was sent at
	unfinished string // statement that counts them
	report     string // statement that reads the whole table for $1 seconds
}

// pressedSample is what one look saw. Times of pick-up are of tasks that were due to be enqueued
// since the look before, whenever they began.
type pressedSample struct {
	At       float64 `json:"at_s"` // since the beginning
	Rate     float64 `json:"tasks_per_second"`
	Waiting  int64   `json:"unfinished"`
	P50      float64 `json:"pickup_p50_ms"` // zero if no task has begun
	P99      float64 `json:"pickup_p99_ms"`
	DeadRows int64   `json:"dead_rows"`
	MB       float64 `json:"tables_mb"`    // with indexes
	Others   float64 `json:"others_share"` // of the machine, since the look before
}

// pressedPhase sums up the samples before, during or after the pressure. One is taken at both
// ends of each, so that it has no other seconds than its own.
type pressedPhase struct {
	Rate     float64 `json:"tasks_per_second"`
	P50      float64 `json:"pickup_p50_ms"`
	P99      float64 `json:"pickup_p99_ms"`
	Max      float64 `json:"pickup_max_ms"`
	DeadRows int64   `json:"dead_rows_most"`
	MB       float64 `json:"tables_mb_most"`
	Begun    int     `json:"attempts_begun"`
	Others   float64 `json:"others_share"`
}

// pressedOutcome is what one subject did under one pressure.
type pressedOutcome struct {
	// Nil without a sample.
	Before *pressedPhase `json:"before,omitempty"`
	During *pressedPhase `json:"during,omitempty"`
	After  *pressedPhase `json:"after,omitempty"`

	// Before the pressure, of all processes of a kind.
	CPU          map[string]float64 `json:"before_cpu_us_per_task"`
	ConsulWrites float64            `json:"before_consul_writes_per_task"`

	BeganAt    float64         `json:"pressure_began_s"`
	EndedAt    float64         `json:"pressure_ended_s"`
	CaughtUp   float64         `json:"caught_up_s"`                         // after the pressure, or since one INSERT began, until less than a second's tasks waited; -1: not before the end
	Draining   float64         `json:"draining_tasks_per_second,omitempty"` // done in that time, where there was a backlog
	Passes     int64           `json:"report_passes,omitempty"`             // how often reports have read the whole table
	Unfinished int64           `json:"unfinished_at_the_end"`
	Failed     int64           `json:"failed"`
	Samples    []pressedSample `json:"samples"`
}

// pressedRun is one subject under one pressure.
type pressedRun struct {
	plan     *pressurePlan
	pressure pressure
	subject  pressedSubject
	at       place
	consul   *consul // nil if the subject has none
	replicas []*process
	progress *progress
	feed     *feeder
	fed      chan error    // how the feeder ended
	over     chan struct{} // of a pressure that takes a while, closed when it is done; else nil

	began   time.Time
	files   []string     // with start times
	done    float64      // tasks at the last look
	looked  float64      // when that was
	use     processorUse // then
	passes  atomic.Int64 // of reports
	outcome pressedOutcome
}

// runPressure puts both subjects under all that the plan asks for, and writes it down.
func runPressure(ctx context.Context, p pressurePlan) (err error) {
	chosen := slices.DeleteFunc(slices.Clone(pressures), func(k pressure) bool {
		return p.Only != "" && !slices.Contains(strings.Split(p.Only, ","), k.name)
	})
	if len(chosen) == 0 {
		return fmt.Errorf("there is no pressure named %q", p.Only)
	}
	began := time.Now()
	say("building onejob, starting Postgres")
	g, err := prepareEnvironment(ctx, p.Dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.close()) }()
	about := &machine{}
	if err := about.look(ctx, g); err != nil {
		return err
	}
	for name, fill := range map[string]func(context.Context, string) error{onejobTable.template: migrateOnejob, riverTable.template: riverjobs.Migrate} {
		if err := g.template(ctx, name, fill); err != nil {
			return err
		}
	}
	found := map[string]map[string]*pressedOutcome{}
	for _, k := range chosen {
		found[k.name] = map[string]*pressedOutcome{}
		for _, s := range pressedSubjects {
			if !slices.Contains(strings.Split(p.Subjects, ","), s.name) {
				continue
			}
			say("%s: %s", s.name, k.title)
			r := &pressedRun{plan: &p, pressure: k, subject: s}
			if err := r.run(ctx, g); err != nil {
				return fmt.Errorf("%s under %s: %w", s.name, k.name, err)
			}
			found[k.name][s.name] = &r.outcome
			r.outcome.print(s.name)
		}
		if err := drawPressure(filepath.Join(p.Pictures, "pressure-"+k.name+".svg"), k.title, found[k.name]); err != nil {
			return err
		}
		for _, o := range found[k.name] {
			o.Samples = some(o.Samples, keptSamples)
		}
		// After each of them, since all together take hours.
		if err := writeJSON(p.Out, pressureReport(about, p, found, began)); err != nil {
			return err
		}
	}
	return nil
}

func pressureReport(about *machine, p pressurePlan, found map[string]map[string]*pressedOutcome, began time.Time) report {
	r := report{"machine": about, "plan": p, "settings": settings(), "pressures": found,
		"measured_at": began.UTC().Format(time.RFC3339), "took_s": int(time.Since(began).Seconds())}
	for name, o := range found["snapshot-full"] {
		key := map[string]string{"onejob": "held_snapshot_ratio", "river": "river_held_snapshot_ratio"}[name]
		if o.During != nil && o.Before != nil {
			r[key] = o.During.Rate / o.Before.Rate
		}
	}
	return r
}

func (o *pressedOutcome) print(name string) {
	for _, phase := range []struct {
		name string
		of   *pressedPhase
	}{{"before", o.Before}, {"during", o.During}, {"after", o.After}} {
		if p := phase.of; p != nil {
			fmt.Printf("%s, %s: %.0f tasks/s, pick-up p50 %.1f ms, p99 %.1f ms, at most %.0f ms; %d dead rows and %.0f MB at most; others used %.0f %% of the machine\n",
				name, phase.name, p.Rate, p.P50, p.P99, p.Max, p.DeadRows, p.MB, 100*p.Others)
		}
	}
	if o.During != nil && o.Before != nil {
		fmt.Printf("%s: throughput under the pressure %.3f of that before\n", name, o.During.Rate/o.Before.Rate)
	}
	fmt.Printf("%s, before: us of a processor for each task: %.0f, Postgres %.0f, Consul %.0f; Raft entries a task: %.2f\n",
		name, o.CPU["subject"], o.CPU["postgres"], o.CPU["consul"], o.ConsulWrites)
	if o.CaughtUp >= 0 {
		fmt.Printf("%s: had caught up after %.0f s\n", name, o.CaughtUp)
	}
	if o.Draining > 0 {
		fmt.Printf("%s: %.0f tasks/s until then\n", name, o.Draining)
	}
	if o.Passes > 0 {
		fmt.Printf("%s: reports have read the table %d times\n", name, o.Passes)
	}
	fmt.Printf("%s: %d tasks unfinished at the end, %d failed\n", name, o.Unfinished, o.Failed)
}

// run measures one subject under one pressure.
func (r *pressedRun) run(ctx context.Context, g *environment) (err error) {
	also := func(f func() error) { err = errors.Join(err, f()) }
	database, err := g.database(ctx, r.subject.jobs.template)
	if err != nil {
		return err
	}
	defer also(func() error { return g.reopen(database) })
	r.at = place{environment: g, dsn: g.postgres.DSN(database)}
	if r.subject.consul {
		if r.consul, err = g.startConsul(ctx); err != nil {
			return err
		}
		defer also(r.consul.Close)
		r.at.consul = r.consul.Addr()
	}
	if r.progress, err = connectProgress(ctx, r.at.dsn, r.subject.jobs); err != nil {
		return err
	}
	defer func() { r.progress.close() }()
	defer also(func() error { return stopAll(r.replicas) })
	for range max(1, r.pressure.replicas) {
		if err := r.start(len(r.replicas)); err != nil {
			return err
		}
	}
	if r.feed, err = startFeeder(ctx, r); err != nil {
		return err
	}
	defer r.feed.close()
	if err := r.feed.add(ctx, []int64{0}); err != nil {
		return err
	}
	r.progress.last = 1
	ready, cancel := context.WithTimeoutCause(ctx, time.Minute, errors.New("the first task was not done within a minute"))
	defer cancel()
	if _, err := r.progress.pass(ready, 1, r.replicas); err != nil {
		return err
	}
	return r.phases(ctx)
}

// start starts the replica with this number, or starts it again.
func (r *pressedRun) start(i int) error {
	file := filepath.Join(r.at.scratch, fmt.Sprintf("starts-%d", len(r.files)))
	r.files = append(r.files, file)
	arguments := []string{"stamp", "-subject", r.subject.name, "-dsn", r.at.dsn, "-out", file, "-replica", fmt.Sprint("replica-", i)}
	if r.subject.consul {
		arguments = append(arguments, "-consul", r.at.consul)
	}
	if !r.pressure.quick {
		arguments = append(arguments, "-slots", fmt.Sprint(pressureSlots/max(1, r.pressure.replicas)), "-work", pressureWork.String())
	}
	p, err := startProcess(r.subject.name, filepath.Join(r.at.scratch, fmt.Sprintf("pressed-%d.log", len(r.files))), r.at.self, arguments...)
	if err != nil {
		return err
	}
	if i < len(r.replicas) {
		r.replicas[i] = p
	} else {
		r.replicas = append(r.replicas, p)
	}
	return nil
}

// phases warms up, and watches before, during and after the pressure.
func (r *pressedRun) phases(ctx context.Context) (err error) {
	m := &meter{environment: r.at.environment, progress: r.progress, consul: r.consul, processes: r.replicas, ours: r.feed.backends()}
	r.fed = make(chan error, 1)
	stop := make(chan struct{})
	go func() { r.fed <- r.feed.run(ctx, stop) }()
	feeding := true
	stopFeeding := func() error {
		if !feeding {
			return nil
		}
		feeding = false
		close(stop)
		return <-r.fed
	}
	defer func() { err = errors.Join(err, stopFeeding()) }()

	r.feed.pace(r.pressure.rate, false)
	if err := r.watch(ctx, r.plan.Warm, nil); err != nil {
		return err
	}
	r.feed.pace(r.pressure.rate, true)
	r.began = time.Now()
	var at float64
	if err := r.edge(ctx, &at); err != nil {
		return err
	}
	r.outcome.Samples = nil // there was nothing before it
	done := r.done
	costs, err := m.read(ctx)
	if err == nil {
		err = r.watch(ctx, r.plan.Before, r.sample)
	}
	if err == nil {
		err = r.edge(ctx, &r.outcome.BeganAt)
	}
	if err == nil {
		err = r.costs(ctx, m, costs, r.done-done)
	}
	if err != nil {
		return err
	}

	drained, from := r.done, &r.outcome.BeganAt
	r.feed.pace(r.pressure.during, true)
	end := func() error { return nil }
	if r.pressure.begin != nil {
		if end, err = r.pressure.begin(ctx, r); err != nil {
			return err
		}
	}
	lasts := r.plan.During
	if r.pressure.lasts != nil {
		lasts = r.pressure.lasts(r.plan)
	}
	if err = errors.Join(r.watch(ctx, lasts, r.sample), end()); err != nil {
		return err
	}
	r.over = nil
	if err := r.edge(ctx, &r.outcome.EndedAt); err != nil {
		return err
	}
	r.outcome.Passes = r.passes.Load()

	if !r.pressure.atOnce {
		drained, from = r.done, &r.outcome.EndedAt
	}
	r.feed.pace(r.pressure.after, true)
	r.outcome.CaughtUp = -1
	atMost := r.plan.After
	if r.pressure.backlog {
		atMost = max(atMost, r.plan.Recovery)
	}
	soon := int64(max(r.pressure.after, pressureRate/4))
	if r.pressure.full {
		soon = 0 // a backlog is meant to be there
	}
	err = r.watch(ctx, atMost, func(ctx context.Context) (enough bool, err error) {
		now, err := r.look(ctx)
		if err != nil {
			return false, err
		}
		if r.outcome.CaughtUp < 0 && now.Waiting < soon {
			if r.outcome.CaughtUp = now.At - *from; r.pressure.backlog {
				r.outcome.Draining = (r.done - drained) / r.outcome.CaughtUp
			}
		}
		return r.pressure.backlog && r.outcome.CaughtUp >= 0 && now.At > *from+r.outcome.CaughtUp+r.plan.After.Seconds(), nil
	})
	var ended float64
	if err == nil {
		err = r.edge(ctx, &ended)
	}
	if err = errors.Join(err, stopFeeding()); err != nil {
		return err
	}
	for ended := time.Now(); ; { // nothing is enqueued any more
		if err := r.progress.conn.QueryRow(ctx, r.subject.unfinished).Scan(&r.outcome.Unfinished); err != nil {
			return err
		}
		if r.outcome.Unfinished == 0 || time.Since(ended) > time.Minute {
			break
		}
		if err := sleep(ctx, time.Second/2); err != nil {
			return err
		}
	}
	if err := r.progress.conn.QueryRow(ctx, r.subject.jobs.failed).Scan(&r.outcome.Failed); err != nil {
		return err
	}
	if err := stopAll(r.replicas); err != nil { // they write the last start times
		return err
	}
	r.replicas = nil
	starts, err := readStarts(r.files)
	if err != nil {
		return err
	}
	r.outcome.sumUp(starts, r.began, ended)
	return nil
}

// costs notes what a task has cost before the pressure.
func (r *pressedRun) costs(ctx context.Context, m *meter, before reading, done float64) error {
	after, err := m.read(ctx)
	if err != nil {
		return err
	}
	r.outcome.CPU = map[string]float64{}
	for name := range after.cpu {
		r.outcome.CPU[name] = float64((after.cpu[name] - before.cpu[name]).Microseconds()) / done
	}
	r.outcome.ConsulWrites = (after.writes - before.writes) / done
	return nil
}

// watch sees to it that everything goes on, for so long and until the pressure is done, or
// until look, which is called from time to time, says that it is enough.
func (r *pressedRun) watch(ctx context.Context, length time.Duration, look func(context.Context) (enough bool, err error)) error {
	began := time.Now()
	going := func() bool {
		select {
		case <-r.over:
			return false
		default:
			return r.over != nil
		}
	}
	for looked := time.Now(); time.Since(began) < length || going(); {
		select {
		case err := <-r.fed:
			r.fed <- nil
			return errors.Join(err, context.Cause(ctx))
		default:
		}
		if !r.pressure.kills {
			for _, p := range r.replicas {
				if err := p.alive(); err != nil {
					return err
				}
			}
		}
		if look != nil && time.Since(looked) >= r.plan.Every {
			looked = time.Now()
			enough, err := look(ctx)
			if err != nil && (!r.pressure.restarts || ctx.Err() != nil) {
				return err
			}
			if err == nil && enough {
				return nil
			}
		}
		if err := sleep(ctx, 2*lookEvery); err != nil {
			return err
		}
	}
	return nil
}

// edge adds the sample between two phases, and notes when that was.
func (r *pressedRun) edge(ctx context.Context, at *float64) error {
	for end := time.Now().Add(time.Minute); ; {
		now, err := r.look(ctx)
		*at = now.At
		if err == nil || !r.pressure.restarts || time.Now().After(end) {
			return err
		}
		if err := sleep(ctx, 2*lookEvery); err != nil {
			return err
		}
	}
}

// sample adds one within a phase.
func (r *pressedRun) sample(ctx context.Context) (enough bool, err error) {
	_, err = r.look(ctx)
	return false, err
}

// look adds a sample. After a lost connection the next look has a new one.
func (r *pressedRun) look(ctx context.Context) (now pressedSample, err error) {
	if r.progress.conn.IsClosed() {
		again, err := connectProgress(ctx, r.at.dsn, r.subject.jobs)
		if err != nil {
			return now, err
		}
		r.progress.conn = again.conn
	}
	done, at, err := r.feed.done(ctx, r.progress.conn, &now.Waiting)
	if err != nil {
		return now, err
	}
	var bytes int64
	if err := r.progress.conn.QueryRow(ctx, `SELECT coalesce(sum(pg_total_relation_size(relid)), 0)::bigint, coalesce(sum(n_dead_tup), 0)::bigint FROM pg_stat_user_tables`).Scan(&bytes, &now.DeadRows); err != nil {
		return now, err
	}
	use, err := readProcessorUse()
	if err != nil {
		return now, err
	}
	now.At, now.MB = at.Sub(r.began).Seconds(), float64(bytes)/(1<<20)
	now.Rate, now.Others = (done-r.done)/(now.At-r.looked), othersShare(r.use, use)
	r.done, r.looked, r.use = done, now.At, use
	r.outcome.Samples = append(r.outcome.Samples, now)
	return now, nil
}

// sumUp sums up the phases, the last of which ended at a time, given when tasks began.
func (o *pressedOutcome) sumUp(starts []delay, began time.Time, ended float64) {
	between := func(from, to float64) (ms []float64) {
		for _, s := range starts {
			if at := s.sent.Sub(began).Seconds(); at >= from && at < to {
				ms = append(ms, s.ms)
			}
		}
		return ms
	}
	from := 0.0
	for i := range o.Samples {
		if ms := between(from, o.Samples[i].At); len(ms) > 0 {
			o.Samples[i].P50, o.Samples[i].P99 = percentile(ms, 50), percentile(ms, 99)
		}
		from = o.Samples[i].At
	}
	for _, phase := range []struct {
		of       **pressedPhase
		from, to float64
	}{{&o.Before, 0, o.BeganAt}, {&o.During, o.BeganAt, o.EndedAt}, {&o.After, o.EndedAt, ended}} {
		var p pressedPhase
		var tasks, others, seconds float64
		last := 0.0
		for _, s := range o.Samples {
			if s.At > phase.from && s.At <= phase.to {
				took := s.At - last
				tasks, others, seconds = tasks+s.Rate*took, others+s.Others*took, seconds+took
				p.DeadRows, p.MB = max(p.DeadRows, s.DeadRows), max(p.MB, s.MB)
			}
			last = s.At
		}
		if seconds == 0 {
			continue
		}
		p.Rate, p.Others = tasks/seconds, others/seconds
		ms := between(phase.from, phase.to)
		if p.Begun = len(ms); len(ms) > 0 {
			p.P50, p.P99, p.Max = percentile(ms, 50), percentile(ms, 99), slices.Max(ms)
		}
		*phase.of = &p
	}
}

// openSnapshot holds a snapshot open.
func openSnapshot(ctx context.Context, r *pressedRun) (func() error, error) {
	holder, err := holdSnapshot(ctx, r.at.dsn)
	if err != nil {
		return nil, err
	}
	return func() error {
		ctx := context.WithoutCancel(ctx)
		return errors.Join(holder.still(ctx, r.progress.conn), holder.close(ctx))
	}, nil
}

// readReports reads the whole table on several connections, again and again.
func readReports(ctx context.Context, r *pressedRun) (func() error, error) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error)
	for range readersAtOnce {
		go func() { ended <- r.readUntil(ctx, min(reportLasts, r.plan.During/4)) }()
	}
	return func() error {
		cancel()
		var all error
		for range readersAtOnce {
			all = errors.Join(all, <-ended)
		}
		return all
	}, nil
}

func (r *pressedRun) readUntil(ctx context.Context, lasts time.Duration) error {
	conn, err := pgx.Connect(ctx, r.at.dsn)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	for ctx.Err() == nil {
		var passes int64
		if err := conn.QueryRow(ctx, r.subject.report, lasts.Seconds()).Scan(&passes); err != nil && ctx.Err() == nil {
			return fmt.Errorf("a report: %w", err)
		}
		r.passes.Add(passes)
	}
	return nil
}

// beside does what takes a while in a goroutine.
func (r *pressedRun) beside(f func() error) (end func() error) {
	over := make(chan struct{})
	var err error
	go func() {
		defer close(over)
		err = f()
	}()
	r.over = over
	return func() error { <-over; return err }
}

// insertBurst inserts many tasks in one statement, which all are due when it begins.
func insertBurst(ctx context.Context, r *pressedRun) (func() error, error) {
	sent := slices.Repeat([]int64{time.Now().UnixNano()}, r.plan.Burst)
	return r.beside(func() error { return r.feed.burst(ctx, sent) }), nil
}

// restartPostgres restarts it as an operator does who is in a hurry (pg_ctl restart -m fast).
func restartPostgres(ctx context.Context, r *pressedRun) (func() error, error) {
	return r.beside(func() error { return r.at.postgres.Restart(ctx, servers.Fast) }), nil
}

// killWorkers kills one worker after the other, and starts each again a little later.
func killWorkers(ctx context.Context, r *pressedRun) (func() error, error) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		var err error
		for i := 0; err == nil && ctx.Err() == nil; i = (i + 1) % len(r.replicas) {
			_ = r.replicas[i].cmd.Process.Kill()
			<-r.replicas[i].exited
			_ = sleep(ctx, startAfter)
			err = r.start(i) // also at the end, so that all are there afterwards
			_ = sleep(ctx, killEvery-startAfter)
		}
		ended <- err
	}()
	return func() error { cancel(); return <-ended }, nil
}

// reopen connects to Postgres anew if it was restarted, and drops a database.
func (g *environment) reopen(database string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := g.admin.Ping(ctx); err != nil {
		_ = g.admin.Close(ctx)
		if err := g.connect(ctx); err != nil {
			return err
		}
	}
	return g.drop(database)
}
