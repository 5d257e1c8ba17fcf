package tasks

import (
	"encoding/json"
	"time"

	"onejob/boottime"
)

// Outcome says how one attempt ended, as its row in onejob.attempts tells it.
type Outcome string

// The outcomes.
const (
	Succeeded Outcome = "succeeded"
	Failed    Outcome = "failed"
	TimedOut  Outcome = "timeout"
	LeaseLost Outcome = "lease_lost" // stopped, because exclusion could no longer be promised
	Crashed   Outcome = "crashed"    // the replica's session ended; written by the replica that takes over
	Cancelled Outcome = "cancelled"
	Shutdown  Outcome = "shutdown" // stopped because its replica shut down gracefully
	Refused   Outcome = "refused"  // it ended, but its fence was superseded and nothing else noted it
)

// Status says where a task stands.
type Status string

// The states that a completion can lead to; [StatusRunning] is the one between.
const (
	StatusPending   Status = "pending"
	StatusRunning   Status = "running"
	StatusSucceeded Status = "succeeded"
	StatusFailed    Status = "failed"
	StatusCancelled Status = "cancelled"
)

// MaxResult is the longest result, in bytes of its JSON, that a store keeps. Numbers count as
// Postgres writes them out: 1e20 has 21 digits. A task whose result is longer fails, so a
// handler that can cut its result should.
const MaxResult = 4 << 20

// A Completion is how an attempt ended, and what becomes of its task.
type Completion struct {
	ID      int64
	Fence   int64
	Session string // under which the attempt ran
	Outcome Outcome
	Next    Status

	// Delay is how long a task that goes back to pending waits at least.
	Delay time.Duration

	// Requeue says that the attempt does not count: it ended for a reason
	// that is not the task's.
	Requeue bool

	// Stalled says that the lease was lost because the replica itself did not run: the
	// task may be the cause.
	Stalled bool

	// Begun is when the handler began; zero if that is not known.
	Begun boottime.Instant

	// StoppedAt is the earliest moment, by Postgres' clock, at which all that the handler
	// had started can have been over; zero if that is not known.
	StoppedAt time.Time

	Error    string
	ExitCode *int // of an exec task's process that ended by itself
	Result   json.RawMessage
	Output   string
}

// ResultError is returned by a store that has made a completion durable, but not as
// it was given: the result could not be kept, so the task has failed.
type ResultError struct{ Written Completion }

func (e *ResultError) Error() string { return e.Written.Error }
