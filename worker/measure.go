package worker

import "time"

// A Measurement is something that a replica did, as it is passed to Config.Measure.
type Measurement struct {
	What  Measure
	Kind  string        // of the task, where the measurement is about one
	Cause string        // an outcome, or why; see What
	Count int           // how many, where there may be several
	Took  time.Duration // see What
}

// Measure says what a measurement is about.
type Measure int

const (
	// MeasureClaim is a claim that brought Count tasks and was answered after Took.
	MeasureClaim Measure = iota

	// MeasureStart is a handler that begins, Took after its task came due or was enqueued,
	// whichever was later.
	MeasureStart

	// MeasureEnd is an attempt whose outcome is durable. Cause is the outcome, or Requeued,
	// and Took is how long the handler ran.
	MeasureEnd

	// MeasureRetry is an attempt that ended and that will be followed by another one.
	MeasureRetry

	// MeasureRequeue is a claimed task that did not begin and was put back. Cause says why.
	MeasureRequeue

	// MeasureRefused is a completion that Postgres refused: the attempt no longer held the row.
	MeasureRefused

	// MeasureConflict is a lock that was held when it was asked for.
	MeasureConflict

	// MeasureTakeover is Count tasks of a dead replica that this one took over, Took after
	// the last heartbeat that it knows of; zero if it knows of none.
	MeasureTakeover

	// MeasureQuarantine is a task that failed because replicas died or stalled over it.
	MeasureQuarantine

	// MeasureHeartbeat is a heartbeat that Postgres acknowledged after Took.
	MeasureHeartbeat

	// MeasureLate is how late a timer of this process was. It is measured five times a second.
	MeasureLate

	// MeasureOccurrence is Count due times of schedules. Cause is empty for those that made
	// a task, or else why they were skipped.
	MeasureOccurrence

	// MeasureOverlap is Count pairs of attempts that overlapped within the last hour,
	// found by the leader.
	MeasureOverlap
)

// Requeued is the Cause of a MeasureEnd whose handler returned a [tasks.Requeue]. Such an
// attempt is failed in onejob.attempts, but a handler that waits for something is not a
// handler that fails.
const Requeued = "requeued"

// measure tells cfg.Measure, if anybody listens.
func (w *Worker) measure(m Measurement) {
	if w.cfg.Measure != nil {
		w.cfg.Measure(m)
	}
}

// Status is what a replica is doing now.
type Status struct {
	Running     int  // attempts, from claim until the handler has returned (with a lock key, until its lock is released)
	Concurrency int  // how many there may be
	Payload     int  // bytes of payloads that are held or reserved
	Leading     bool // this replica runs schedules and retention
}

// Status returns what the replica is doing now. It may be called at any time.
func (w *Worker) Status() Status {
	running, bytes := w.running.load(w.cfg.Concurrency)
	return Status{Running: running, Concurrency: w.cfg.Concurrency, Payload: bytes, Leading: w.leader.leading.Load()}
}
