// Package metrics is what a replica shows to Prometheus at /metrics.
//
// Names, units and labels follow Prometheus' conventions. Labels have few values: names that
// come out of rows (kinds, queues, limits) are bounded, see [Replica.Worker], [Backlog] and
// [Limits].
//
// What the whole cluster shares (the backlog, limits) is shown by the leader alone, so
// that a sum over all replicas counts it once and Postgres is asked once.
package metrics

import (
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"onejob/lock/consul"
	"onejob/worker"
)

// Replica holds the metrics of one replica. Its methods may be called by many goroutines
// at once.
type Replica struct {
	registry *prometheus.Registry

	claims      prometheus.Histogram
	claimed     prometheus.Histogram
	pickup      *prometheus.HistogramVec
	run         *prometheus.HistogramVec
	attempts    *prometheus.CounterVec
	retries     *prometheus.CounterVec
	requeues    *prometheus.CounterVec
	refused     *prometheus.CounterVec
	conflicts   prometheus.Counter
	takeovers   *prometheus.CounterVec
	silence     prometheus.Histogram
	quarantined *prometheus.CounterVec
	occurrences *prometheus.CounterVec
	overlaps    prometheus.Counter
	late        prometheus.Histogram
	heartbeats  *prometheus.HistogramVec
	lost        prometheus.Counter
	batches     *prometheus.HistogramVec
	rounds      *prometheus.HistogramVec

	kinds kinds
}

// maxKinds is how many kinds have labels of their own before rows of others are counted as
// otherKinds. The kinds that a replica serves always have one; those of rows that it takes
// over may be anything that somebody has written.
const maxKinds = 200

const otherKinds = "other"

// kinds are the labels that were given out.
type kinds struct {
	labels sync.Map // from a kind to its label
	known  atomic.Int64
}

// label returns the label of a kind. Prometheus takes UTF-8 alone, a database of encoding
// SQL_ASCII any bytes.
func (k *kinds) label(kind string, served bool) string {
	if label, ok := k.labels.Load(kind); ok {
		return label.(string)
	}
	if !served && k.known.Load() >= maxKinds {
		return otherKinds
	}
	label, there := k.labels.LoadOrStore(kind, strings.ToValidUTF8(kind, "?"))
	if !there {
		k.known.Add(1)
	}
	return label.(string)
}

// Buckets, in seconds. A pick-up takes milliseconds or, behind a backlog, hours; a round
// trip takes milliseconds or does not come back.
var (
	waits  = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200}
	trips  = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}
	counts = []float64{0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512}
)

// New returns the metrics of a replica of that version of onejob.
func New(version string) *Replica {
	m := &Replica{registry: prometheus.NewRegistry()}
	counter := func(name, help string) prometheus.Counter {
		return register(m, prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help}))
	}
	counters := func(name, help string, labels ...string) *prometheus.CounterVec {
		return register(m, prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels))
	}
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return register(m, prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}))
	}
	histograms := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		return register(m, prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels))
	}

	m.claims = histogram("onejob_claim_duration_seconds", "Time until Postgres answered a claim.", trips)
	m.claimed = histogram("onejob_claim_tasks", "Tasks that one claim took.", counts)
	m.pickup = histograms("onejob_task_pickup_seconds", "Time from when a task was due, or enqueued if that was later, until its handler began.", waits, "kind")
	m.run = histograms("onejob_task_run_seconds", "Time that the handler of an attempt ran.", waits, "kind")
	m.attempts = counters("onejob_attempts_total", "Attempts whose outcome is durable in Postgres.", "kind", "outcome")
	m.retries = counters("onejob_retries_total", "Attempts that ended and will be followed by another one.", "kind")
	m.requeues = counters("onejob_requeues_total", "Claimed tasks that did not begin and were put back without using up an attempt.", "cause")
	m.refused = counters("onejob_completions_refused_total", "Completions that Postgres refused because the attempt no longer held the row.", "kind")
	m.conflicts = counter("onejob_lock_conflicts_total", "Locks that were held when they were requested.")
	m.takeovers = counters("onejob_takeovers_total", "Tasks that this replica took over from dead ones.", "kind")
	m.silence = histogram("onejob_takeover_silence_seconds", "Time from the last heartbeat of a dead replica until this one took over a task of it.", []float64{.25, .5, 1, 2, 3, 5, 7, 9, 11, 13, 15, 20, 30, 60})
	m.quarantined = counters("onejob_quarantined_total", "Tasks that failed because replicas died or stalled while they ran.", "kind")
	m.occurrences = counters("onejob_occurrences_total", "Due times of schedules, by what became of them: enqueued, missed, overlap or capped. Counted by the leader.", "result")
	m.overlaps = counter("onejob_overlaps_found_total", "Pairs of attempts on one lock key that overlapped within the hour before the leader found them. Expected only of Go handlers and HTTP requests of a replica that was frozen.")
	m.late = histogram("onejob_timer_lateness_seconds", "How late a timer of this process was, measured five times a second. Leases are lost when it comes near consul.check_ttl.", []float64{.001, .005, .01, .05, .1, .25, .5, 1, 2, 3, 5, 7, 10, 15, 30})
	m.heartbeats = histograms("onejob_heartbeat_duration_seconds", "Time until a heartbeat was acknowledged: by the agent, by Consul's servers or by Postgres.", trips, "target")
	m.lost = counter("onejob_sessions_lost_total", "Consul sessions that this replica lost.")
	m.batches = histograms("onejob_batch_tasks", "Tasks that one round trip carried.", counts[1:], "operation")
	m.rounds = histograms("onejob_batch_duration_seconds", "Time that one round trip took.", trips, "operation")

	info := register(m, prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "onejob_build_info", Help: "1, with the version of onejob and of Go."}, []string{"version", "goversion"}))
	info.WithLabelValues(version, runtime.Version()).Set(1)
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	// Counters that alerts look at are there from the beginning: a rate needs a zero to rise from.
	for _, result := range []string{"enqueued", "missed", "overlap", "capped"} {
		m.occurrences.WithLabelValues(result)
	}
	return m
}

func register[C prometheus.Collector](m *Replica, c C) C {
	m.registry.MustRegister(c)
	return c
}

// Watch adds collectors that are asked at every scrape.
func (m *Replica) Watch(c ...prometheus.Collector) { m.registry.MustRegister(c...) }

// Handler answers scrapes. What cannot be shown is left out: it does not hide the rest.
func (m *Replica) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError, MaxRequestsInFlight: 4, Timeout: AnswerTimeout})
}

// Worker takes what a worker measures, see worker.Config.Measure.
func (m *Replica) Worker(w worker.Measurement) {
	took := w.Took.Seconds()
	kind := m.kinds.label(w.Kind, w.What != worker.MeasureTakeover && w.What != worker.MeasureQuarantine)
	switch w.What {
	case worker.MeasureClaim:
		m.claims.Observe(took)
		m.claimed.Observe(float64(w.Count))
	case worker.MeasureStart:
		m.pickup.WithLabelValues(kind).Observe(took)
	case worker.MeasureEnd:
		m.run.WithLabelValues(kind).Observe(took)
		m.attempts.WithLabelValues(kind, w.Cause).Inc()
	case worker.MeasureRetry:
		m.retries.WithLabelValues(kind).Inc()
	case worker.MeasureRequeue:
		m.requeues.WithLabelValues(w.Cause).Inc()
	case worker.MeasureRefused:
		m.refused.WithLabelValues(kind).Inc()
	case worker.MeasureConflict:
		m.conflicts.Inc()
	case worker.MeasureTakeover:
		m.takeovers.WithLabelValues(kind).Add(float64(w.Count))
		if took > 0 {
			m.silence.Observe(took)
		}
	case worker.MeasureQuarantine:
		m.quarantined.WithLabelValues(kind).Inc()
	case worker.MeasureHeartbeat:
		m.heartbeats.WithLabelValues("postgres").Observe(took)
	case worker.MeasureLate:
		m.late.Observe(took)
	case worker.MeasureOccurrence:
		result := w.Cause
		if result == "" {
			result = "enqueued"
		}
		m.occurrences.WithLabelValues(result).Add(float64(w.Count))
	case worker.MeasureOverlap:
		m.overlaps.Add(float64(w.Count))
	}
}

// Consul takes what the locks measure, see consul.Config.Measure.
func (m *Replica) Consul(what consul.Measure, count int, took time.Duration) {
	switch what {
	case consul.MeasureHeartbeat:
		m.heartbeats.WithLabelValues("agent").Observe(took.Seconds())
	case consul.MeasureRenewal:
		m.heartbeats.WithLabelValues("consul").Observe(took.Seconds())
	case consul.MeasureAcquire:
		m.batch("lock", count, took)
	case consul.MeasureRelease:
		m.batch("release", count, took)
	case consul.MeasureLost:
		m.lost.Inc()
	}
}

// Store takes rounds of completions, see store.Config.Measure.
func (m *Replica) Store(completions int, took time.Duration) { m.batch("complete", completions, took) }

func (m *Replica) batch(operation string, count int, took time.Duration) {
	m.batches.WithLabelValues(operation).Observe(float64(count))
	m.rounds.WithLabelValues(operation).Observe(took.Seconds())
}
