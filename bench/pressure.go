package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
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
	restarts bool // connections to Postgres break
	kills    bool // workers end

	lasts func(*pressurePlan) time.Duration

	// begin puts the run under pressure; what it returns takes that away. Nil: the rates are all.
	begin func(context.Context, *pressedRun) (end func() error, err error)
}

var pressures = []pressure{
	{name: "snapshot", title: "a transaction with an old snapshot stays open", rate: pressureRate, during: pressureRate, after: pressureRate, begin: openSnapshot},
	{name: "snapshot-full", title: "a transaction with an old snapshot stays open, and there is always more to do", quick: true, full: true, begin: openSnapshot},
	{name: "readers", title: "four long reports read the table all the time", rate: pressureRate, during: pressureRate, after: pressureRate, begin: readReports},
	{name: "overload", title: "twice as many tasks come as can be done", rate: pressureRate, during: 2 * pressureMost, after: pressureRate / 2, backlog: true,
		lasts: func(p *pressurePlan) time.Duration { return p.Overload }},
	{name: "burst", title: "a million tasks come at once", quick: true, rate: 500, during: 500, after: 500, backlog: true, begin: insertBurst,
		lasts: func(*pressurePlan) time.Duration { return time.Second }},
	{name: "restart", title: "Postgres is restarted", rate: pressureRate, during: pressureRate, after: pressureRate, restarts: true, begin: restartPostgres,
		lasts: func(p *pressurePlan) time.Duration { return min(p.During, 30*time.Second) }},
	{name: "kills", title: "one of three workers is killed every 20 s", replicas: 3, rate: pressureRate, during: pressureRate, after: pressureRate, kills: true, begin: killWorkers},
}

// pressedSubjects are who is put under pressure.
var pressedSubjects = []pressedSubject{
	{name: "onejob", jobs: onejobTable, consul: true,
		enqueue:    `INSERT INTO onejob.tasks (kind, payload) SELECT 'stamp', jsonb_build_object('sent', (extract(epoch FROM clock_timestamp()) * 1e9)::bigint) FROM generate_series(1, $1)`,
		unfinished: `SELECT count(*) FROM onejob.tasks WHERE status IN ('pending', 'running')`,
		report:     `SELECT status, count(*), avg(extract(epoch FROM finished_at - run_at)), max(length(payload::text)), pg_sleep(5) IS NULL FROM onejob.tasks GROUP BY status`},
	{name: "river", jobs: riverTable,
		enqueue: `
WITH jobs AS (
    INSERT INTO river_job (kind, args, max_attempts)
    SELECT 'stamp', jsonb_build_object('sent', (extract(epoch FROM clock_timestamp()) * 1e9)::bigint), 25
      FROM generate_series(1, $1)
 RETURNING 1
)
SELECT pg_notify(concat(current_schema(), '.river_insert'), '{"queue": "default"}') FROM (SELECT FROM jobs LIMIT 1) AS one`,
		unfinished: `SELECT count(*) FROM river_job WHERE state IN ('available', 'running', 'retryable', 'scheduled', 'pending')`,
		report:     `SELECT state, count(*), avg(extract(epoch FROM finalized_at - scheduled_at)), max(length(args::text)), pg_sleep(5) IS NULL FROM river_job GROUP BY state`},
}

type pressedSubject struct {
	name       string
	jobs       table
	consul     bool
	enqueue    string // statement that adds $1 tasks that say when they were sent
	unfinished string // statement that counts them
	report     string // statement that reads the whole table, and takes a while
}

// pressedSample is what one look saw. Times of pick-up are of tasks that were enqueued since
// the look before, whenever they began.
type pressedSample struct {
	At       float64 `json:"at_s"` // since the beginning
	Rate     float64 `json:"tasks_per_second"`
	Waiting  int64   `json:"unfinished"`
	P50      float64 `json:"pickup_p50_ms"` // zero if no task has begun
	P99      float64 `json:"pickup_p99_ms"`
	DeadRows int64   `json:"dead_rows"`
	MB       float64 `json:"tables_mb"` // with indexes
}

// pressedPhase sums up the samples before, during or after the pressure.
type pressedPhase struct {
	Rate     float64 `json:"tasks_per_second"`
	P50      float64 `json:"pickup_p50_ms"`
	P99      float64 `json:"pickup_p99_ms"`
	Max      float64 `json:"pickup_max_ms"`
	DeadRows int64   `json:"dead_rows_most"`
	MB       float64 `json:"tables_mb_most"`
	Begun    int     `json:"attempts_begun"`
}

// pressedOutcome is what one subject did under one pressure.
type pressedOutcome struct {
	Before pressedPhase `json:"before"`
	During pressedPhase `json:"during"`
	After  pressedPhase `json:"after"`

	// Before the pressure, of all processes of a kind.
	CPU          map[string]float64 `json:"before_cpu_us_per_task"`
	ConsulWrites float64            `json:"before_consul_writes_per_task"`

	BeganAt    float64         `json:"pressure_began_s"`
	EndedAt    float64         `json:"pressure_ended_s"`
	CaughtUp   float64         `json:"caught_up_s"` // after the pressure until less than a second's tasks waited; -1: not before the end
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
	feed     feeder

	began   time.Time
	files   []string // with start times
	done    float64  // tasks at the last look
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
		r[key] = o.During.Rate / o.Before.Rate
	}
	return r
}

func (o *pressedOutcome) print(name string) {
	for _, phase := range []struct {
		name string
		pressedPhase
	}{{"before", o.Before}, {"during", o.During}, {"after", o.After}} {
		fmt.Printf("%s, %s: %.0f tasks/s, pick-up p50 %.1f ms, p99 %.1f ms, at most %.0f ms; %d dead rows and %.0f MB at most\n",
			name, phase.name, phase.Rate, phase.P50, phase.P99, phase.Max, phase.DeadRows, phase.MB)
	}
	fmt.Printf("%s: throughput under the pressure %.3f of that before\n", name, o.During.Rate/o.Before.Rate)
	fmt.Printf("%s, before: us of a processor for each task: %.0f, Postgres %.0f, Consul %.0f; Raft entries a task: %.2f\n",
		name, o.CPU["subject"], o.CPU["postgres"], o.CPU["consul"], o.ConsulWrites)
	if o.CaughtUp >= 0 {
		fmt.Printf("%s: had caught up %.0f s after the pressure\n", name, o.CaughtUp)
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
	r.feed = feeder{dsn: r.at.dsn, enqueue: r.subject.enqueue}
	defer r.feed.close()
	if err := r.feed.add(ctx, 1); err != nil {
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

// phases watches before, during and after the pressure.
func (r *pressedRun) phases(ctx context.Context) error {
	m := &meter{environment: r.at.environment, progress: r.progress, consul: r.consul, processes: r.replicas}
	r.began = time.Now()
	costs, err := m.read(ctx)
	if err == nil {
		err = r.watch(ctx, r.pressure.rate, r.plan.Before, nil)
	}
	if err == nil {
		err = r.costs(ctx, m, costs)
	}
	if err != nil {
		return err
	}
	r.outcome.BeganAt = time.Since(r.began).Seconds()
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
	if err = errors.Join(r.watch(ctx, r.pressure.during, lasts, nil), end()); err != nil {
		return err
	}
	r.outcome.EndedAt, r.outcome.CaughtUp = time.Since(r.began).Seconds(), -1
	atMost := r.plan.After
	if r.pressure.backlog {
		atMost = max(atMost, r.plan.Recovery)
	}
	soon := int64(max(r.pressure.after, pressureRate/4))
	if r.pressure.full {
		soon = 0 // a backlog is meant to be there
	}
	err = r.watch(ctx, r.pressure.after, atMost, func(now pressedSample) bool {
		if r.outcome.CaughtUp < 0 && now.Waiting < soon {
			r.outcome.CaughtUp = now.At - r.outcome.EndedAt
		}
		return r.pressure.backlog && r.outcome.CaughtUp >= 0 && now.At > r.outcome.EndedAt+r.outcome.CaughtUp+r.plan.After.Seconds()
	})
	if err != nil {
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
	return r.sumUp()
}

// costs notes what a task has cost before the pressure.
func (r *pressedRun) costs(ctx context.Context, m *meter, before reading) error {
	after, err := m.read(ctx)
	if err != nil {
		return err
	}
	var waiting int64
	if err := r.progress.conn.QueryRow(ctx, r.subject.unfinished).Scan(&waiting); err != nil {
		return err
	}
	done := float64(r.progress.last - 1 - waiting)
	r.outcome.CPU = map[string]float64{}
	for name := range after.cpu {
		r.outcome.CPU[name] = float64((after.cpu[name] - before.cpu[name]).Microseconds()) / done
	}
	r.outcome.ConsulWrites = (after.writes - before.writes) / done
	return nil
}

// watch enqueues tasks and looks at everything from time to time, for so long or until enough
// says so.
func (r *pressedRun) watch(ctx context.Context, rate float64, length time.Duration, enough func(pressedSample) bool) error {
	began, given := time.Now(), 0
	for looked := time.Now(); time.Since(began) < length; {
		more := int(rate*time.Since(began).Seconds()) - given
		if r.pressure.full {
			if err := r.progress.look(ctx); err != nil {
				return err
			}
			if more = pressureWaiting - int(r.progress.last-r.progress.at); more < 1_000 {
				more = 0
			}
		}
		if more > 0 {
			if err := r.feed.add(ctx, more); err == nil {
				given += more
				r.progress.last += int64(more)
			} else if !r.pressure.restarts || ctx.Err() != nil {
				return err
			}
		}
		if !r.pressure.kills {
			for _, p := range r.replicas {
				if err := p.alive(); err != nil {
					return err
				}
			}
		}
		if time.Since(looked) >= r.plan.Every {
			looked = time.Now()
			now, err := r.look(ctx)
			if err != nil && (!r.pressure.restarts || ctx.Err() != nil) {
				return err
			}
			if err == nil && enough != nil && enough(now) {
				return nil
			}
		}
		if err := sleep(ctx, 2*lookEvery); err != nil {
			return err
		}
	}
	return nil
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
	if err := r.progress.conn.QueryRow(ctx, r.subject.unfinished).Scan(&now.Waiting); err != nil {
		return now, err
	}
	var bytes int64
	if err := r.progress.conn.QueryRow(ctx, `SELECT coalesce(sum(pg_total_relation_size(relid)), 0)::bigint, coalesce(sum(n_dead_tup), 0)::bigint FROM pg_stat_user_tables`).Scan(&bytes, &now.DeadRows); err != nil {
		return now, err
	}
	now.At, now.MB = time.Since(r.began).Seconds(), float64(bytes)/(1<<20)
	done := float64(r.progress.last - now.Waiting)
	if before := len(r.outcome.Samples); before > 0 {
		now.Rate = (done - r.done) / (now.At - r.outcome.Samples[before-1].At)
	} else {
		now.Rate = (done - 1) / now.At
	}
	r.done = done
	r.outcome.Samples = append(r.outcome.Samples, now)
	return now, nil
}

// sumUp reads when tasks began, and sums up the phases.
func (r *pressedRun) sumUp() error {
	starts, err := readStarts(r.files)
	if err != nil {
		return err
	}
	o := &r.outcome
	between := func(from, to float64) (ms []float64) {
		for _, s := range starts {
			if at := s.sent.Sub(r.began).Seconds(); at >= from && at < to {
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
	end := time.Since(r.began).Seconds()
	for _, phase := range []struct {
		of       *pressedPhase
		from, to float64
	}{{&o.Before, 0, o.BeganAt}, {&o.During, o.BeganAt, o.EndedAt}, {&o.After, o.EndedAt, end}} {
		ms := between(phase.from, phase.to)
		if phase.of.Begun = len(ms); len(ms) > 0 {
			phase.of.P50, phase.of.P99, phase.of.Max = percentile(ms, 50), percentile(ms, 99), slices.Max(ms)
		}
		var tasks, seconds float64
		last := 0.0
		for _, s := range o.Samples {
			if s.At >= phase.from && s.At < phase.to {
				tasks, seconds = tasks+s.Rate*(s.At-last), seconds+s.At-last
				phase.of.DeadRows, phase.of.MB = max(phase.of.DeadRows, s.DeadRows), max(phase.of.MB, s.MB)
			}
			last = s.At
		}
		if seconds > 0 {
			phase.of.Rate = tasks / seconds
		}
	}
	return nil
}

// feeder enqueues tasks over a connection that it opens again when it was lost.
type feeder struct {
	dsn     string
	enqueue string
	conn    *pgx.Conn
}

func (f *feeder) add(ctx context.Context, n int) error {
	if f.conn == nil || f.conn.IsClosed() {
		var err error
		if f.conn, err = pgx.Connect(ctx, f.dsn); err != nil {
			return fmt.Errorf("enqueue: %w", err)
		}
	}
	if _, err := f.conn.Exec(ctx, f.enqueue, n); err != nil {
		return fmt.Errorf("enqueue: %w", err)
	}
	return nil
}

func (f *feeder) close() {
	if f.conn != nil {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = f.conn.Close(ctx)
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
		go func() { ended <- readUntil(ctx, r.at.dsn, r.subject.report) }()
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

func readUntil(ctx context.Context, dsn, statement string) error {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	for ctx.Err() == nil {
		if _, err := conn.Exec(ctx, statement); err != nil && ctx.Err() == nil {
			return fmt.Errorf("a report: %w", err)
		}
	}
	return nil
}

// insertBurst inserts many tasks in one statement.
func insertBurst(ctx context.Context, r *pressedRun) (func() error, error) {
	err := r.feed.add(ctx, r.plan.Burst)
	r.progress.last += int64(r.plan.Burst)
	return func() error { return nil }, err
}

// restartPostgres restarts it as an operator does who is in a hurry (pg_ctl restart -m fast).
func restartPostgres(ctx context.Context, r *pressedRun) (func() error, error) {
	err := r.at.postgres.Restart(ctx, servers.Fast)
	return func() error { return nil }, err
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
