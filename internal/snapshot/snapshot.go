// Package snapshot is what an operator sees of a cluster at one moment: which replicas
// live, what runs, what waits, what fails, and what needs somebody. The web page and
// "onejob status" show the same one.
//
// A Source takes one snapshot every two seconds, however many look, and none if nobody
// does. What Postgres costs is bounded, see store.Overview: counts end at 10,000, and a
// statement ends after half a second. A block that could not be read shows what it showed
// before, and since when.
//
// Ages are by Postgres' clock. At and AsOf are by the clock of this machine.
package snapshot

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"time"

	"onejob/store"
	"onejob/tasks"
)

// Snapshot is a cluster at one moment.
type Snapshot struct {
	At      time.Time `json:"at"`      // when it was taken, by this machine's clock
	Now     time.Time `json:"now"`     // the same, by Postgres' clock
	Verdict string    `json:"verdict"` // one line
	Level   Level     `json:"level"`   // of the verdict

	Needs     []Need     `json:"needs"`
	Leader    *Leader    `json:"leader"` // nil: there is none, or it is not known
	Replicas  []Replica  `json:"replicas"`
	Running   Running    `json:"running"`
	Queues    []Queue    `json:"queues"`
	Limits    []Limit    `json:"limits"`
	Schedules []Schedule `json:"schedules"`
	Failures  []Failure  `json:"failures"`

	// ReplicasLeftOut is how many replicas Replicas does not list. Live ones are listed first.
	ReplicasLeftOut int `json:"replicas_left_out,omitempty"`

	// Stale are the blocks that could not be read this time.
	Stale []Stale `json:"stale"`

	// Err is why nothing could be read from Postgres.
	Err error `json:"-"`
}

// Level says how bad something is.
type Level string

// The levels.
const (
	Good    Level = "good"
	Warning Level = "warning"
	Bad     Level = "bad"
)

// The blocks, as Stale names them.
const (
	BlockReplicas  = "replicas"
	BlockQueues    = "queues"
	BlockPaused    = "paused"
	BlockNames     = "names"
	BlockRates     = "rates"
	BlockRunning   = "running"
	BlockSchedules = "schedules"
	BlockFailures  = "failures"
	BlockOverlaps  = "overlaps"
	BlockVacuum    = "vacuum"
	BlockLimits    = "limits"
	BlockLeader    = "leader"
)

// Stale is a block that could not be read, and from when what is shown of it is.
type Stale struct {
	Block string     `json:"block"`
	Error string     `json:"error"`
	AsOf  *time.Time `json:"as_of"` // nil: it was never read
}

// StaleBlock returns why a block could not be read, or nil.
func (s *Snapshot) StaleBlock(block string) *Stale {
	for i := range s.Stale {
		if s.Stale[i].Block == block {
			return &s.Stale[i]
		}
	}
	return nil
}

// Need is something that somebody has to do something about.
type Need struct {
	Level Level  `json:"level"`
	Text  string `json:"text"`
	Do    string `json:"do"`                // what can be done; may be empty
	Task  int64  `json:"task_id,omitempty"` // an example; zero: none

	// Kind is the kind of the tasks whose payloads Text quotes; empty if it quotes none.
	// Without is the text without them.
	Kind    string `json:"-"`
	Without string `json:"-"`
}

// Leader is who leads. A program other than a replica has no name.
type Leader struct {
	Name    string    `json:"name"`
	Host    string    `json:"host"`
	Since   time.Time `json:"since"`
	Session string    `json:"session"`
}

// Replica is a replica that has not ended, or ended within the last ten minutes.
type Replica struct {
	Name        string             `json:"name"`
	State       tasks.ReplicaState `json:"state"`
	Leads       bool               `json:"leads"`
	Host        string             `json:"host"`
	PID         int                `json:"pid"`
	Version     string             `json:"version"`
	Queues      []string           `json:"queues"` // empty: all
	Kinds       []string           `json:"kinds"`
	Running     int                `json:"running"`
	Concurrency int                `json:"concurrency"`
	Heartbeat   Seconds            `json:"heartbeat_age_seconds"` // it is written while the leases are valid
	ClockAhead  *Seconds           `json:"clock_ahead_seconds"`   // of Postgres' clock; null: it has not said so yet
	BeganAt     store.Time         `json:"began_at"`
	Session     string             `json:"session"`
}

// Clock says how far a live replica's wall clock is ahead of Postgres' clock, or behind it.
func (r Replica) Clock() string {
	if r.ClockAhead == nil || !r.Live() {
		return ""
	}
	ahead := time.Duration(*r.ClockAhead)
	switch {
	case ahead.Abs() < 100*time.Millisecond:
		return "right"
	case ahead < 0:
		return fmt.Sprintf("%v behind", Seconds(ahead.Abs()))
	}
	return fmt.Sprintf("%v ahead", Seconds(ahead))
}

// Live reports whether the replica has not ended.
func (r Replica) Live() bool { return !r.State.Final() }

// Silent reports whether a replica that has not ended misses heartbeats.
func (r Replica) Silent() bool { return r.Live() && time.Duration(r.Heartbeat) > silentAfter }

// silentAfter is several heartbeats, and less than the shortest lease.
const silentAfter = 4 * time.Second

// Running is what runs, the oldest first.
type Running struct {
	Count Count         `json:"count"`
	Tasks []RunningTask `json:"tasks"`
}

// RunningTask is an attempt that is under way.
type RunningTask struct {
	ID              int64      `json:"id"`
	Kind            string     `json:"kind"`
	Target          string     `json:"target"` // the command, URL or statement; of other kinds the payload
	Queue           string     `json:"queue"`
	LockKey         *string    `json:"lock_key"`
	Limit           *string    `json:"limit_name"`
	Replica         string     `json:"replica"`
	Attempt         int        `json:"attempt"`
	MaxAttempts     int        `json:"max_attempts"`
	Fence           int64      `json:"fence"`
	StartedAt       store.Time `json:"started_at"`
	Age             Seconds    `json:"age_seconds"`
	TimeoutLeft     *Seconds   `json:"timeout_left_seconds"` // by the row's own timeout
	CancelRequested bool       `json:"cancel_requested"`

	// Progress is what the task has said of how far it is; null if it has said nothing.
	Progress *store.TaskProgress `json:"progress"`
}

// Queue is what waits in a queue, under a limit or not.
type Queue struct {
	Name      string   `json:"name"`
	Due       Count    `json:"due"`
	OldestDue Seconds  `json:"oldest_due_seconds"` // since it was due, or enqueued if that was later
	Later     Count    `json:"later"`              // due at some later time, such as retries; without parked tasks
	Enqueued  Count    `json:"enqueued_last_minute"`
	Ended     Count    `json:"ended_last_minute"` // for good
	Kinds     []string `json:"kinds"`
	Replicas  int      `json:"replicas"` // live ones that serve it
	Paused    *Pause   `json:"paused"`   // null: it is not
}

// Pause is why nothing is claimed from a queue, or a schedule creates nothing.
type Pause struct {
	By     string     `json:"by"`
	At     store.Time `json:"at"`
	Until  store.Time `json:"until"` // infinite: until somebody ends it
	Reason string     `json:"reason"`
}

// Limit is a limit and who holds its slots.
type Limit struct {
	Name    string   `json:"name"`
	Slots   int      `json:"slots"`
	Held    int      `json:"held"`    // not known, and zero, if there is an Error
	Waiting int      `json:"waiting"` // that have asked for a slot; -1: the backend does not tell
	Due     Count    `json:"due"`     // tasks that name it and are due
	Holders []Holder `json:"holders"` // the first of them
	Error   string   `json:"error,omitempty"`
}

// Holder holds a slot.
type Holder struct {
	Who   string     `json:"who"`
	Since *time.Time `json:"since"`
}

// Schedule is a schedule with its last due times, the oldest first.
type Schedule struct {
	Name        string       `json:"name"`
	Cron        string       `json:"cron"`
	TimeZone    string       `json:"time_zone"`
	Kind        string       `json:"kind"`
	Enabled     bool         `json:"enabled"`
	Paused      *Pause       `json:"paused"` // null: it is not
	NextAt      *store.Time  `json:"next_at"`
	LastAt      *store.Time  `json:"last_at"`
	Behind      bool         `json:"behind"` // its next due time has passed, and nobody has dealt with it
	Error       string       `json:"error,omitempty"`
	Occurrences []Occurrence `json:"occurrences"`
}

// Occurrence is a due time of a schedule, and what became of it: the status of its task,
// "deleted", or why it was skipped: missed, overlap or capped.
type Occurrence struct {
	DueAt  time.Time `json:"due_at"`
	Task   int64     `json:"task_id,omitempty"`
	Became string    `json:"became"`
}

// Failure is how often tasks of a kind failed with the same error within a day. In the error,
// numbers are masked. It counts among the newest 10,000 failed tasks.
type Failure struct {
	Kind   string     `json:"kind"`
	Error  string     `json:"error"`
	Count  int64      `json:"count"`
	First  store.Time `json:"first"`
	Last   store.Time `json:"last"`
	Recent bool       `json:"recent"` // the last one was within the hour
	Sample int64      `json:"sample_task_id"`

	// Pattern matches the errors of the group, as part of LIKE and in a store.TaskFilter.
	Pattern string `json:"-"`
}

// Count is a number of tasks, of which there may be more.
type Count struct {
	N    int64
	More bool
}

// String returns the number, such as "1,234", and "10,000+" if there are more.
func (c Count) String() string {
	n := min(c.N, store.MostCounted)
	digits := strconv.FormatInt(n, 10)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	if c.More || c.N > n {
		return digits + "+"
	}
	return digits
}

// MarshalJSON returns {"at_least": N, "exact": true}.
func (c Count) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		AtLeast int64 `json:"at_least"`
		Exact   bool  `json:"exact"`
	}{min(c.N, store.MostCounted), !c.More && c.N <= store.MostCounted})
}

// Seconds is a duration that is seconds in JSON.
type Seconds time.Duration

// MarshalJSON returns the seconds, with three digits after the point.
func (s Seconds) MarshalJSON() ([]byte, error) {
	return strconv.AppendFloat(nil, time.Duration(s).Seconds(), 'f', 3, 64), nil
}

// String returns the duration in two digits or three, such as 250 ms, 4.2 s, 3 min or 12 d.
func (s Seconds) String() string {
	switch d := time.Duration(s); {
	case d < 0: // there is no -math.MinInt64, which is what Time.Sub returns of times that are too far apart
		return "-" + Seconds(-max(d, -math.MaxInt64)).String()
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < 2*time.Minute:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%d min", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h", int(d.Hours()))
	default:
		return fmt.Sprintf("%d d", int(d.Hours()/24))
	}
}
