package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// runTimeout bounds one measurement.
const runTimeout = 5 * time.Minute

// afterLast is how long after the last task is final the processor time is read: onejob releases
// its last locks then. It does not count as time that the tasks took.
const afterLast = 200 * time.Millisecond

// A case is one thing whose throughput is measured in every round.
type benchCase struct {
	name     string
	subject  subject
	replicas int
	warm     int // tasks done uncounted, so that connections, plans and caches are there
	tasks    int // counted

	// maxWait is how long to wait for others on the machine to become calm.
	maxWait time.Duration

	// template holds what is in the table before; empty means nothing.
	template string
	// before is how many finished tasks the template holds.
	before int
	// behind is how many more tasks than the counted ones, and those for
	// warming up, the template holds, all of them due. The subject starts in
	// front of them, and is not idle until the end. If it is zero, the counted
	// tasks become visible all at once to an idle subject.
	behind int

	// meanwhile, if there is any, is called when the counted tasks are done and
	// everything still runs.
	meanwhile func(m *meter) error
}

// An outcome is what one case gave in one round.
type outcome struct {
	Rate         float64            `json:"tasks_per_second"`
	CPU          map[string]float64 `json:"cpu_us_per_task"`
	ConsulWrites float64            `json:"consul_writes_per_task"`
	GivenBack    float64            `json:"given_back_ratio"` // of onejob's claims, those that did not become an attempt
	PeakMB       float64            `json:"rss_peak_mb"`      // of the biggest replica
	Others       float64            `json:"others_share"`     // of the machine, used by others meanwhile
}

// cost returns the processor time of a task in µs, all processes together.
func (o outcome) cost() float64 {
	all := 0.0
	for _, used := range o.CPU {
		all += used
	}
	return all
}

func (o outcome) costWithoutConsul() float64 { return o.cost() - o.CPU["consul"] }

// errTooFew says that the counted tasks were done before counting could begin.
var errTooFew = errors.New("tasks are too few to be timed")

// measure runs one case. If locks is not nil, onejob reaches Consul through a
// proxy that counts in it.
//
// Where few tasks are counted with others behind them, this process may get no processor
// until all are done. That gives no figure, and the case is run again.
func (g *environment) measure(ctx context.Context, c benchCase, locks *lockCounter) (o outcome, err error) {
	for range 5 {
		if o, err = g.measureOnce(ctx, c, locks); !errors.Is(err, errTooFew) {
			break
		}
	}
	return o, err
}

func (g *environment) measureOnce(ctx context.Context, c benchCase, locks *lockCounter) (o outcome, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, runTimeout, fmt.Errorf("%s did not end within %v", c.name, runTimeout))
	defer cancel()
	also := func(f func() error) {
		if e := f(); e != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", c.name, e))
		}
	}
	template := c.template
	if template == "" {
		template = c.subject.jobs.template
	}
	database, err := g.database(ctx, template)
	if err != nil {
		return o, err
	}
	defer also(func() error { return g.drop(database) })
	m := &meter{environment: g}
	at := place{environment: g, dsn: g.postgres.DSN(database)}
	if c.subject.consul {
		if m.consul, err = g.startConsul(ctx); err != nil {
			return o, err
		}
		defer also(m.consul.Close)
		at.consul = m.consul.Addr()
	}
	if locks != nil {
		proxy, err := startProxy(at.consul, locks.see)
		if err != nil {
			return o, err
		}
		defer proxy.close()
		at.consul = proxy.address
	}
	if m.progress, err = connectProgress(ctx, at.dsn, c.subject.jobs); err != nil {
		return o, err
	}
	defer m.progress.close()
	defer also(func() error { return stopAll(m.processes) })
	if c.behind > 0 { // there will be no idle moment later
		if err := calm(ctx, c.maxWait); err != nil {
			return o, err
		}
	}
	for at.number = 1; at.number <= c.replicas; at.number++ {
		p, err := c.subject.start(at)
		if err != nil {
			return o, err
		}
		m.processes = append(m.processes, p)
	}
	if c.replicas > 1 {
		if err := m.consul.await(ctx, c.replicas); err != nil {
			return o, err
		}
	}
	return m.count(ctx, c)
}

// count lets the subject warm up and then counts.
func (m *meter) count(ctx context.Context, c benchCase) (o outcome, err error) {
	f := m.progress
	f.at, f.last = int64(c.before), int64(c.before)
	warm := f.last + int64(c.warm)
	var counted pgx.Tx // its commit makes the counted tasks visible
	if c.behind > 0 {
		f.last = warm + int64(c.tasks+c.behind)
	} else if err := f.enqueue(ctx, c.warm); err != nil {
		return o, err
	}
	began, err := f.pass(ctx, warm, m.processes)
	if err != nil {
		return o, err
	}
	if c.behind == 0 {
		if counted, err = m.prepare(ctx, c); err != nil {
			return o, err
		}
	}
	from, until := f.at, warm+int64(c.tasks)
	if from >= until {
		return o, fmt.Errorf("%s: %d %w", c.name, c.tasks, errTooFew)
	}
	before, err := m.read(ctx)
	if err != nil {
		return o, err
	}
	if counted != nil {
		began = time.Now()
		if err := counted.Commit(ctx); err != nil {
			return o, err
		}
	}
	ended, err := f.pass(ctx, until, m.processes)
	if err != nil {
		return o, err
	}
	if c.behind == 0 {
		if err := sleep(ctx, afterLast); err != nil {
			return o, err
		}
	}
	after, err := m.read(ctx)
	if err != nil {
		return o, err
	}
	if c.meanwhile != nil {
		if err := c.meanwhile(m); err != nil {
			return o, err
		}
	}
	done := float64(f.at - from)
	o.Rate = done / ended.Sub(began).Seconds()
	o.Others = othersShare(before.machine, after.machine)
	o.CPU = map[string]float64{}
	for name := range after.cpu {
		o.CPU[name] = float64((after.cpu[name] - before.cpu[name]).Microseconds()) / done
	}
	o.ConsulWrites = (after.writes - before.writes) / done
	if claims := float64(after.claims - before.claims); claims > 0 && c.behind == 0 {
		o.GivenBack = 1 - done/claims
	}
	for _, p := range m.processes {
		mb, err := p.memory("VmHWM")
		if err != nil {
			return o, err
		}
		o.PeakMB = max(o.PeakMB, mb)
	}
	return o, m.verify(ctx, c)
}

// prepare sweeps what warming up has left, waits for a calm moment and stages
// the counted tasks.
func (m *meter) prepare(ctx context.Context, c benchCase) (pgx.Tx, error) {
	for _, sql := range []string{`VACUUM ANALYZE`, `CHECKPOINT`} {
		if _, err := m.progress.conn.Exec(ctx, sql); err != nil {
			return nil, err
		}
	}
	if err := calm(ctx, c.maxWait); err != nil {
		return nil, err
	}
	return m.progress.stage(ctx, c.tasks)
}

// verify checks that all counted tasks ended well: a rate of tasks that failed
// would be worth nothing.
func (m *meter) verify(ctx context.Context, c benchCase) error {
	var done, failed int64
	if err := m.progress.conn.QueryRow(ctx, m.progress.jobs.done).Scan(&done); err != nil {
		return err
	}
	if err := m.progress.conn.QueryRow(ctx, m.progress.jobs.failed).Scan(&failed); err != nil {
		return err
	}
	// If rows wait behind, the subject is still at work; but all that the front has passed are done.
	due := m.progress.last
	if c.behind > 0 {
		due = m.progress.at
	}
	if failed > 0 || done < due || c.behind == 0 && done != due {
		return fmt.Errorf("%s: of %d tasks %d succeeded and %d failed", c.name, due, done, failed)
	}
	return nil
}
