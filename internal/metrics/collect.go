package metrics

import (
	"cmp"
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"onejob/lock"
	"onejob/store"
	"onejob/worker"
)

// backlogTimeout bounds what a scrape asks of Postgres.
const backlogTimeout = 2 * time.Second

// limitsTimeout bounds what a scrape asks of the limits' backend. In RabbitMQ a look at a limit
// is some round trips and a second in which its holders may answer, and eight are looked at at
// a time.
const limitsTimeout = 4 * time.Second

// AnswerTimeout is how long an answer to a scrape may take. Prometheus waits for 10 s unless it
// is configured otherwise.
const AnswerTimeout = limitsTimeout + time.Second

// cacheFor is for how long an answer of a source that others share is shown again.
const cacheFor = 2 * time.Second

// maxLimits is how many limits are shown, by name. Each costs a request for each scrape.
const maxLimits = 50

// Process shows what a replica is doing now.
type Process struct {
	Status    func() worker.Status
	LeaseLeft func() time.Duration
	Pool      func() *pgxpool.Stat

	LinesDropped func() uint64
}

var (
	runningDesc     = prometheus.NewDesc("onejob_running_attempts", "Attempts that take a slot of this replica: from claim until the handler has returned, or with a lock key until the release.", nil, nil)
	concurrencyDesc = prometheus.NewDesc("onejob_concurrency", "Attempts that this replica may have at once.", nil, nil)
	payloadDesc     = prometheus.NewDesc("onejob_payload_bytes", "Payloads that are held in memory or that memory is reserved for.", nil, nil)
	leaderDesc      = prometheus.NewDesc("onejob_leader", "1 if this replica runs schedules and retention.", nil, nil)
	sessionDesc     = prometheus.NewDesc("onejob_session_live", "1 if this replica has a live Consul session.", nil, nil)
	leaseDesc       = prometheus.NewDesc("onejob_lease_remaining_seconds", "Time that leases would last if no further heartbeat were acknowledged.", nil, nil)
	poolDesc        = prometheus.NewDesc("onejob_postgres_connections", "Connections of the pool to Postgres, by state.", []string{"state"}, nil)
	poolMaxDesc     = prometheus.NewDesc("onejob_postgres_connections_max", "Connections that the pool may have.", nil, nil)
	poolWaitDesc    = prometheus.NewDesc("onejob_postgres_acquire_wait_seconds_total", "Time that statements waited for a connection.", nil, nil)
	linesDesc       = prometheus.NewDesc("onejob_log_lines_dropped_total", "Log lines that were dropped because nobody read them.", nil, nil)
)

// Describe implements prometheus.Collector.
func (p Process) Describe(c chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{runningDesc, concurrencyDesc, payloadDesc, leaderDesc, sessionDesc, leaseDesc, poolDesc, poolMaxDesc, poolWaitDesc, linesDesc} {
		c <- d
	}
}

// Collect implements prometheus.Collector.
func (p Process) Collect(c chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		c <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	s := p.Status()
	gauge(runningDesc, float64(s.Running))
	gauge(concurrencyDesc, float64(s.Concurrency))
	gauge(payloadDesc, float64(s.Payload))
	gauge(leaderDesc, number(s.Leading))
	left := p.LeaseLeft()
	gauge(sessionDesc, number(left > 0))
	gauge(leaseDesc, left.Seconds())
	pool := p.Pool()
	gauge(poolDesc, float64(pool.AcquiredConns()), "in_use")
	gauge(poolDesc, float64(pool.IdleConns()), "idle")
	gauge(poolMaxDesc, float64(pool.MaxConns()))
	c <- prometheus.MustNewConstMetric(poolWaitDesc, prometheus.CounterValue, pool.AcquireDuration().Seconds())
	c <- prometheus.MustNewConstMetric(linesDesc, prometheus.CounterValue, float64(p.LinesDropped()))
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// cached keeps an answer for a while, so that it costs the same however many ask. While one
// caller asks the source, the others wait for its answer.
type cached[T any] struct {
	mu    sync.Mutex
	at    time.Time
	value T
	err   error
}

func (c *cached[T]) get(timeout time.Duration, ask func(context.Context) (T, error)) (T, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.at.IsZero() || time.Since(c.at) > cacheFor {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		c.value, c.err = ask(ctx)
		c.at = time.Now()
	}
	return c.value, c.err
}

// Backlog shows the tasks that are due, while this replica leads.
type Backlog struct {
	Leading func() bool
	Store   interface {
		Backlog(ctx context.Context) ([]store.Backlog, error)
	}

	cache cached[[]store.Backlog]
}

var (
	dueDesc = prometheus.NewDesc("onejob_tasks_due", "Tasks that are due and wait, by queue and kind; at most 10,001 of each are counted. Shown by the leader.", []string{"queue", "kind"}, nil)
	ageDesc = prometheus.NewDesc("onejob_tasks_due_age_seconds", "Time for which the longest waiting due task has been due, by queue and kind. Shown by the leader.", []string{"queue", "kind"}, nil)
	okDesc  = prometheus.NewDesc("onejob_scrape_success", "1 if the source of these metrics answered in time. Shown by the leader.", []string{"source"}, nil)
)

// Describe implements prometheus.Collector.
func (b *Backlog) Describe(c chan<- *prometheus.Desc) {
	c <- dueDesc
	c <- ageDesc
	c <- okDesc
}

// Collect implements prometheus.Collector.
func (b *Backlog) Collect(c chan<- prometheus.Metric) {
	if !b.Leading() {
		return
	}
	list, err := b.cache.get(backlogTimeout, b.Store.Backlog)
	for _, l := range list {
		queue, kind := strings.ToValidUTF8(l.Queue, "?"), strings.ToValidUTF8(l.Kind, "?") // of a database that takes any bytes
		c <- prometheus.MustNewConstMetric(dueDesc, prometheus.GaugeValue, float64(l.Due), queue, kind)
		c <- prometheus.MustNewConstMetric(ageDesc, prometheus.GaugeValue, l.Age.Seconds(), queue, kind)
	}
	c <- prometheus.MustNewConstMetric(okDesc, prometheus.GaugeValue, number(err == nil), "backlog")
}

// Limits shows the slots of limits, while this replica leads.
type Limits struct {
	Leading func() bool
	Limits  lock.Semaphores

	cache cached[[]lock.Semaphore]
}

var (
	slotsDesc = prometheus.NewDesc("onejob_limit_slots", "Slots that a limit has. Shown by the leader.", []string{"limit"}, nil)
	heldDesc  = prometheus.NewDesc("onejob_limit_slots_held", "Slots of a limit that are held, by tasks and by others. Shown by the leader.", []string{"limit"}, nil)
)

// Describe implements prometheus.Collector.
func (l *Limits) Describe(c chan<- *prometheus.Desc) {
	c <- slotsDesc
	c <- heldDesc
}

// Collect implements prometheus.Collector.
func (l *Limits) Collect(c chan<- prometheus.Metric) {
	if !l.Leading() {
		return
	}
	list, err := l.cache.get(limitsTimeout, l.inspect)
	for _, s := range list {
		c <- prometheus.MustNewConstMetric(slotsDesc, prometheus.GaugeValue, float64(s.Slots), s.Name)
		c <- prometheus.MustNewConstMetric(heldDesc, prometheus.GaugeValue, float64(len(s.Holders)), s.Name)
	}
	c <- prometheus.MustNewConstMetric(okDesc, prometheus.GaugeValue, number(err == nil), "limits")
}

// inspect returns the first limits by name, and an error if one of them could not be read. A
// limit whose key another program writes in a format of its own is left out: the backend has
// answered, and tasks of the other limits run. The web page and "onejob status" name it.
func (l *Limits) inspect(ctx context.Context) (list []lock.Semaphore, err error) {
	names, err := l.Limits.List(ctx)
	if errors.Is(err, lock.ErrCannotList) { // nobody has named one, and the backend works
		err = nil
	}
	sems, errs := lock.InspectAll(ctx, l.Limits, names[:min(len(names), maxLimits)])
	for i, s := range sems {
		switch {
		case errs[i] == nil:
			list = append(list, s)
		case errors.Is(errs[i], lock.ErrNoSemaphore), errors.Is(errs[i], lock.ErrForeign): // the first: it was deleted meanwhile
		default:
			err = cmp.Or(err, errs[i])
		}
	}
	return list, err
}
