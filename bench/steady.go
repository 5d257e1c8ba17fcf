package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/internal/testenv/processes"
)

// steadyPlan is how one replica is kept busy for long, while it deletes what it
// has done a little earlier.
type steadyPlan struct {
	Dir       string        `json:"-"`
	Out       string        `json:"-"`
	For       time.Duration `json:"for_ns"`
	Window    time.Duration `json:"window_ns"` // at the beginning and at the end, which are compared
	Every     time.Duration `json:"every_ns"`
	Rate      float64       `json:"rate"`      // tasks a second; 0 keeps Waiting rows waiting
	Waiting   int           `json:"waiting"`   // rows that always wait, if there is no rate
	LockKeys  int           `json:"lock_keys"` // that the tasks use in turn; 0: none, each is its own
	Retention time.Duration `json:"retention_ns"`
	Warm      time.Duration `json:"warm_up_ns"`
	HoldXmin  bool          `json:"hold_xmin"` // a snapshot is held open after the warm-up

	calibration calibration
	pauses      pauses
	probes      *probes // nil without a rate: pick-up is the time in the queue then
	began       time.Time
}

func (s *steadyPlan) flags(flags *flag.FlagSet) {
	flags.StringVar(&s.Dir, "dir", "/var/tmp", "folder on a disk for the servers' data")
	flags.StringVar(&s.Out, "out", "", "file for the results; results/steady.json if empty, with -hold-xmin results/steady-hold-xmin.json")
	flags.DurationVar(&s.For, "for", 30*time.Minute, "how long")
	flags.DurationVar(&s.Window, "window", 5*time.Minute, "how much of the beginning is compared with how much of the end")
	flags.DurationVar(&s.Every, "every", 10*time.Second, "time between looks")
	flags.Float64Var(&s.Rate, "rate", 0, "tasks enqueued a second; 0: as many as the replica does")
	flags.IntVar(&s.Waiting, "waiting", 20_000, "tasks that always wait when there is no rate")
	flags.IntVar(&s.LockKeys, "lock-keys", 0, "how many lock_keys the tasks have in turn; 0: they have none")
	flags.DurationVar(&s.Retention, "retention", time.Minute, "how long finished tasks are kept")
	flags.DurationVar(&s.Warm, "warm", 0, "how long to run before the beginning")
	flags.BoolVar(&s.HoldXmin, "hold-xmin", false, "hold one snapshot open from the end of -warm to the end, so that Postgres can remove no dead row")
}

// A sample is one look at everything.
type sample struct {
	At            float64          `json:"at_s"`   // since the beginning
	Done          int64            `json:"done"`   // tasks, since the beginning
	Queued        int64            `json:"queued"` // tasks that are not done
	Rate          float64          `json:"tasks_per_second"`
	Bytes         map[string]int64 `json:"bytes"` // of tables and indexes
	DeadRows      map[string]int64 `json:"dead_rows"`
	ReplicaMB     float64          `json:"replica_rss_mb"`
	ConsulMB      float64          `json:"consul_rss_mb"`
	ReplicaCPU    float64          `json:"replica_cpu_percent"`
	PostgresCPU   float64          `json:"postgres_cpu_percent"`
	ConsulCPU     float64          `json:"consul_cpu_percent"`
	ConsulWrites  float64          `json:"consul_writes_per_s"`
	Others        float64          `json:"others_share"` // of the machine, since the look before
	CalibrationMS float64          `json:"yardstick_ms"` // what the same work took each time: the machine's own speed

	// All from the start on.
	Unread       int     `json:"consul_metrics_unread"` // times that they could not be had
	Removals     int     `json:"consul_tombstone_removals"`
	RemovingS    float64 `json:"consul_tombstone_removal_s"` // for so long they stopped Consul's state machine
	LongestS     float64 `json:"consul_tombstone_removal_longest_s"`
	SessionsLost int     `json:"sessions_lost"`
	LeasesLost   int     `json:"leases_lost"` // by attempts at a task
}

// runSteady keeps one replica busy, and writes down how that went.
func runSteady(ctx context.Context, s steadyPlan) (err error) {
	if s.For < 2*s.Window {
		return fmt.Errorf("-for %v is shorter than twice -window %v", s.For, s.Window)
	}
	if s.LockKeys < 0 || s.LockKeys > 0 && s.LockKeys < s.Waiting {
		return fmt.Errorf("-lock-keys %d is fewer than -waiting %d: tasks would wait for each other", s.LockKeys, s.Waiting)
	}
	if s.Out == "" {
		s.Out = "results/steady.json"
		if s.HoldXmin {
			s.Out = "results/steady-hold-xmin.json"
		}
	}
	also := func(f func() error) { err = errors.Join(err, f()) }
	say("building onejob, starting Postgres and Consul")
	g, err := prepareEnvironment(ctx, s.Dir)
	if err != nil {
		return err
	}
	defer also(g.close)
	about := &machine{}
	if err := about.look(ctx, g); err != nil {
		return err
	}
	if err := g.template(ctx, onejobTable.template, migrateOnejob); err != nil {
		return err
	}
	database, err := g.database(ctx, onejobTable.template)
	if err != nil {
		return err
	}
	m := &meter{environment: g}
	if m.consul, err = g.startConsul(ctx); err != nil {
		return err
	}
	defer also(m.consul.Close)
	at := place{environment: g, dsn: g.postgres.DSN(database), consul: m.consul.Addr()}
	if m.progress, err = connectProgress(ctx, at.dsn, onejobTable); err != nil {
		return err
	}
	defer m.progress.close()
	config := []string{fmt.Sprintf("retention: {succeeded: %v}", s.Retention)}
	if s.Rate > 0 {
		if s.probes, err = startProbes(); err != nil {
			return err
		}
		defer also(s.probes.close)
		config = append(config, fmt.Sprintf("kinds: {http: {allow: [%q]}}", s.probes.url))
	}
	replica, err := startOnejob(at, onejobConcurrency, config...)
	if err != nil {
		return err
	}
	defer also(replica.stop)
	m.processes = []*process{replica}

	s.calibration, s.pauses = newCalibration(), pauses{consul: m.consul, log: replica.log}
	samples, err := s.watch(ctx, m)
	if len(samples) == 0 {
		return err
	}
	r := report{"samples": some(samples, keptSamples), "plan": s, "machine": about, "settings": settings()}
	if err == nil {
		first, last := rateBetween(samples, 0, s.Window), rateBetween(samples, s.For-s.Window, s.For)
		r["first_tasks_per_second"], r["last_tasks_per_second"], r["steady_ratio"] = first, last, last/first
		fmt.Printf("first %v: %.0f tasks/s, last: %.0f tasks/s, ratio %.3f (to reach: 0.95)\n", s.Window, first, last, last/first)
		began, ended := calibrationBetween(samples, 0, s.Window), calibrationBetween(samples, s.For-s.Window, s.For)
		r["first_yardstick_ms"], r["last_yardstick_ms"], r["steady_ratio_by_yardstick"] = began, ended, last*ended/(first*began)
		fmt.Printf("the same work took %.0f ms in the first, %.0f in the last; ratio of tasks for that time %.3f\n", began, ended, last*ended/(first*began))
		s.compareWindows(samples, r)
	}
	return errors.Join(err, writeJSON(s.Out, r))
}

// keptSamples is about how many samples are written to the file.
const keptSamples = 30

// some returns about n elements of a list, at equal distances, the last one among them.
func some[T any](list []T, n int) (kept []T) {
	step := max(1, (len(list)+n-2)/n)
	for i := (len(list) - 1) % step; i < len(list); i += step {
		kept = append(kept, list[i])
	}
	return kept
}

// watch keeps the replica fed and looks at everything from time to time. It
// returns what it has seen, also when it was told to stop.
func (s *steadyPlan) watch(ctx context.Context, m *meter) (samples []sample, err error) {
	feeder, err := pgx.ConnectConfig(ctx, m.progress.conn.Config())
	if err != nil {
		return nil, err
	}
	defer feeder.Close(context.WithoutCancel(ctx))
	m.ours = append(m.ours, int(feeder.PgConn().PID()))
	if err := s.feed(ctx, feeder, m.progress, 1); err != nil {
		return nil, err
	}
	if _, err := m.progress.pass(ctx, 1, m.processes); err != nil { // it has come up
		return nil, err
	}
	if samples, err = s.phase(ctx, feeder, m, s.Warm); err != nil {
		return samples, err
	}
	if s.HoldXmin {
		holder, err := holdSnapshot(ctx, m.progress.conn.Config().ConnString())
		if err != nil {
			return nil, err
		}
		defer func() { _ = holder.close(context.WithoutCancel(ctx)) }()
		samples, err = s.phase(ctx, feeder, m, s.For)
		if err == nil {
			err = holder.still(ctx, m.progress.conn)
		}
		return samples, err
	}
	return s.phase(ctx, feeder, m, s.For)
}

// phase feeds and looks for a while.
func (s *steadyPlan) phase(ctx context.Context, feeder *pgx.Conn, m *meter, length time.Duration) ([]sample, error) {
	began, base, enqueued := time.Now(), m.progress.at, 0
	s.began = began
	before, err := m.read(ctx)
	if err != nil {
		return nil, err
	}
	samples := []sample{{Queued: m.progress.last - m.progress.at}}
	var followed time.Time
	for next := s.Every; ; {
		if err := m.progress.look(ctx); err != nil {
			return samples, err
		}
		if time.Since(followed) >= metricsEvery {
			s.pauses.follow()
			followed = time.Now()
		}
		if err := m.processes[0].alive(); err != nil {
			return samples, err
		}
		elapsed := time.Since(began)
		if elapsed >= next || elapsed >= length {
			now, after, err := s.sample(ctx, m, before, began, base, samples[len(samples)-1])
			if err != nil {
				return samples, err
			}
			samples, before = append(samples, now), after
			if next += s.Every; length == s.For {
				say("%5.0f s: %6.0f tasks/s, %7d queued, replica %.0f MB, Consul %.0f MB, tables %d MB; tombstones removed %d times in %.1f s, %d leases lost",
					now.At, now.Rate, now.Queued, now.ReplicaMB, now.ConsulMB, now.Bytes["all"]>>20, now.Removals, now.RemovingS, now.LeasesLost)
			}
		}
		if elapsed >= length {
			return samples, nil
		}
		if s.probes != nil {
			inserted, err := s.probes.insert(ctx, feeder)
			if err != nil {
				return samples, err
			}
			if inserted {
				m.progress.last++
				enqueued++
			}
		}
		more := s.Waiting - int(m.progress.last-m.progress.at)
		if s.Rate > 0 {
			more = int(s.Rate*elapsed.Seconds()) - enqueued
		}
		if more >= 1_000 || s.Rate > 0 && more > 0 {
			if err := s.feed(ctx, feeder, m.progress, more); err != nil {
				return samples, err
			}
			enqueued += more
		}
		if err := sleep(ctx, lookEvery); err != nil {
			return samples, err
		}
	}
}

func (s *steadyPlan) feed(ctx context.Context, feeder *pgx.Conn, f *progress, n int) error {
	var err error
	if s.LockKeys == 0 {
		_, err = feeder.Exec(ctx, f.jobs.enqueue, n)
	} else {
		_, err = feeder.Exec(ctx, `
INSERT INTO onejob.tasks (kind, lock_key)
SELECT 'noop', 'key-' || (($2::bigint + i) % $3)
  FROM generate_series(1, $1) AS i`, n, f.last, s.LockKeys)
	}
	if err != nil {
		return fmt.Errorf("enqueue: %w", err)
	}
	f.last += int64(n)
	return nil
}

// sample looks at everything.
func (s *steadyPlan) sample(ctx context.Context, m *meter, before reading, began time.Time, base int64, previous sample) (sample, reading, error) {
	after, err := m.read(ctx)
	if err != nil {
		return sample{}, after, err
	}
	now := sample{At: time.Since(began).Seconds(), Done: m.progress.at - base, Queued: m.progress.last - m.progress.at}
	took := now.At - previous.At
	percent := func(name string) float64 { return 100 * (after.cpu[name] - before.cpu[name]).Seconds() / took }
	now.Rate = float64(now.Done-previous.Done) / took
	now.ReplicaCPU, now.PostgresCPU, now.ConsulCPU = percent("subject"), percent("postgres"), percent("consul")
	now.ConsulWrites = (after.writes - before.writes) / took
	now.Others = othersShare(before.machine, after.machine)
	if now.ReplicaMB, err = m.processes[0].memory("VmRSS"); err != nil {
		return now, after, err
	}
	if now.ConsulMB, err = processes.Status(m.consul.pid, "VmRSS"); err != nil {
		return now, after, err
	}
	yard, err := s.calibration.measure()
	if err != nil {
		return now, after, err
	}
	now.CalibrationMS = yard.Seconds() * 1000
	if err := s.pauses.count(); err != nil {
		return now, after, err
	}
	now.Unread, now.Removals = s.pauses.unread, s.pauses.removals
	now.RemovingS, now.LongestS = s.pauses.removing.Seconds(), s.pauses.longest.Seconds()
	now.SessionsLost, now.LeasesLost = s.pauses.sessionsLost, s.pauses.leasesLost
	now.Bytes, now.DeadRows, err = sizes(ctx, m.progress.conn)
	return now, after, err
}

// sizes returns the bytes of onejob's tables and indexes and of all together,
// and how many dead rows each table has, as far as Postgres knows.
func sizes(ctx context.Context, conn *pgx.Conn) (bytes, dead map[string]int64, err error) {
	rows, err := conn.Query(ctx, `
SELECT c.relname, pg_relation_size(c.oid), coalesce(s.n_dead_tup, 0), c.relkind = 'r'
  FROM pg_class c
  LEFT JOIN pg_stat_all_tables s ON s.relid = c.oid
 WHERE c.relnamespace = 'onejob'::regnamespace
   AND c.relkind IN ('r', 'i')`)
	if err != nil {
		return nil, nil, err
	}
	bytes, dead = map[string]int64{}, map[string]int64{}
	var name string
	var size, n int64
	var isTable bool
	_, err = pgx.ForEachRow(rows, []any{&name, &size, &n, &isTable}, func() error {
		bytes[name] = size
		bytes["all"] += size
		if isTable {
			dead[name] = n
		}
		return nil
	})
	return bytes, dead, err
}

// compareWindows adds to the report how many tasks waited in the first and in the
// last window, and how long pick-up took, if it was measured.
func (s *steadyPlan) compareWindows(samples []sample, r report) {
	p99 := map[string]float64{}
	for _, w := range []struct {
		name string
		from time.Duration
	}{{"first", 0}, {"last", s.For - s.Window}} {
		waiting := waitingBetween(samples, w.from, w.from+s.Window)
		r[w.name+"_waiting_p50"], r[w.name+"_waiting_max"] = percentile(waiting, 50), percentile(waiting, 100)
		fmt.Printf("%s %v: %.0f tasks not done at a look (median), %.0f at most", w.name, s.Window, percentile(waiting, 50), percentile(waiting, 100))
		if s.probes != nil {
			if ms := s.probes.between(s.began.Add(w.from), s.began.Add(w.from+s.Window)); len(ms) > 0 {
				p99[w.name] = percentile(ms, 99)
				r[w.name+"_pickups"], r[w.name+"_pickup_p50_ms"], r[w.name+"_pickup_p99_ms"] = len(ms), percentile(ms, 50), p99[w.name]
				fmt.Printf("; pick-up p50 %.1f ms, p99 %.1f ms of %d", percentile(ms, 50), p99[w.name], len(ms))
			}
		}
		fmt.Println()
	}
	if p99["first"] > 0 {
		r["pickup_p99_ratio"] = p99["last"] / p99["first"]
		fmt.Printf("pick-up p99, last against first: %.2f\n", p99["last"]/p99["first"])
	}
}

// waitingBetween returns how many tasks were not done at the looks of that time.
func waitingBetween(samples []sample, from, to time.Duration) (waiting []float64) {
	for _, s := range between(samples, from, to) {
		waiting = append(waiting, float64(s.Queued))
	}
	return waiting
}

// between returns the samples of that time. The first of them looks back.
func between(samples []sample, from, to time.Duration) []sample {
	const early = 0.5 // seconds by which a sample may miss its moment
	first, _ := slices.BinarySearchFunc(samples, from.Seconds()-early, sampleAt)
	last, _ := slices.BinarySearchFunc(samples, to.Seconds()+early, sampleAt)
	return samples[first:last]
}

func sampleAt(s sample, at float64) int { return cmp.Compare(s.At, at) }

// rateBetween returns the tasks a second between two moments, as far as there
// are samples of that time.
func rateBetween(samples []sample, from, to time.Duration) float64 {
	list := between(samples, from, to)
	if len(list) < 2 {
		return 0
	}
	first, last := list[0], list[len(list)-1]
	return float64(last.Done-first.Done) / (last.At - first.At)
}

// calibrationBetween returns the mean of what the calibration took after the first of
// the same samples.
func calibrationBetween(samples []sample, from, to time.Duration) float64 {
	list := between(samples, from, to)
	if len(list) < 2 {
		return 0
	}
	sum := 0.0
	for _, s := range list[1:] {
		sum += s.CalibrationMS
	}
	return sum / float64(len(list)-1)
}
