// Package lifecycle is the state machine of a task's row: a table of the steps that are
// legal, and a replay of what Postgres noted of every change.
//
// Tests and the judge of chaos use it. The product never does: it is a second opinion,
// worked out from the contract and from the statements that change rows.
//
// A trigger notes each change of a row in the transaction that makes it, with the row
// before and after and the name of who made it (Schema, Read). Replay then looks for a
// rule for each step. A rule says from which status to which it leads, who may go that
// way, what must hold before, what the row must show after, and which columns may change.
// A step of a replica for which there is no rule is illegal. What people do by hand is
// legal, whatever it is.
//
// What this cannot see: which statement made a step, and the fence and session that were
// handed to it. A completion by the wrong replica shows, because it is not the holder's; a
// late completion of an earlier attempt by the same replica does not.
package lifecycle

import (
	"fmt"
	"math"
	"reflect"
	"strings"
	"time"
)

// Row is a row of onejob.tasks, without what the life of a task does not depend on. A
// column that is NULL has the zero value.
type Row struct {
	Status          string `json:"status,omitempty"` // empty if there is no row
	Kind            string `json:"kind,omitempty"`
	Queue           string `json:"queue,omitempty"`
	Priority        int    `json:"priority,omitempty"`
	RunAt           Time   `json:"run_at,omitempty"`
	LockKey         string `json:"lock_key,omitempty"`
	LimitName       string `json:"limit_name,omitempty"`
	UniqueKey       string `json:"unique_key,omitempty"`
	Attempt         int    `json:"attempt,omitempty"`
	MaxAttempts     int    `json:"max_attempts,omitempty"`
	Crashes         int    `json:"crashes,omitempty"`
	Stalls          int    `json:"stalls,omitempty"`
	Timeout         string `json:"timeout,omitempty"`
	KeepFor         string `json:"keep_for,omitempty"`
	Fence           int64  `json:"fence,omitempty"`
	Session         string `json:"session,omitempty"`
	Replica         string `json:"replica,omitempty"`
	StartedAt       Time   `json:"started_at,omitempty"`
	BegunAt         Time   `json:"begun_at,omitempty"`
	FinishedAt      Time   `json:"finished_at,omitempty"`
	CreatedAt       Time   `json:"created_at,omitempty"`
	Error           string `json:"error,omitempty"`
	HasResult       bool   `json:"has_result,omitempty"`
	CancelRequested bool   `json:"cancel_requested,omitempty"`
	ScheduleID      int64  `json:"schedule_id,omitempty"`
}

// The statuses of a row. The empty one is that of a row that is not there.
const (
	none      = ""
	Pending   = "pending"
	Running   = "running"
	Succeeded = "succeeded"
	Failed    = "failed"
	Cancelled = "cancelled"
)

// Final reports whether the task has ended.
func (r Row) Final() bool {
	return r.Status == Succeeded || r.Status == Failed || r.Status == Cancelled
}

// Step is one INSERT, UPDATE or DELETE of a row; or, without any row, a TRUNCATE of the
// table.
type Step struct {
	Task int64  `json:"task"` // zero for a TRUNCATE
	By   string `json:"by"`   // application_name of the connection
	At   Time   `json:"at"`   // by the clock that Schema was given

	// By Postgres' clock: when the transaction began, when the statement did, and when the
	// step was noted, which is at the end of the statement.
	Began     Time `json:"began"`
	Statement Time `json:"statement"`
	Noted     Time `json:"noted"`

	Was Row `json:"was"`
	Is  Row `json:"is"`
}

// String is a step in words.
func (s Step) String() string {
	was, is := s.Was.Status, s.Is.Status
	if was == none {
		was = "no row"
	}
	if is == none {
		is = "deleted"
	}
	var details []string
	for _, c := range changed(s.Was, s.Is) {
		if c != "status" && s.Was.Status != none && s.Is.Status != none {
			details = append(details, fmt.Sprintf("%s %v to %v", c, column(s.Was, c), column(s.Is, c)))
		}
	}
	return fmt.Sprintf("task %d (%s), %s to %s by %q at %v [%s]", s.Task, cmpOr(s.Is.Kind, s.Was.Kind), was, is, s.By, s.At, strings.Join(details, ", "))
}

func cmpOr(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// columns are the names of Row's fields in the table.
var columns = func() (names []string) {
	t := reflect.TypeFor[Row]()
	for i := range t.NumField() {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		names = append(names, name)
	}
	return names
}()

func column(r Row, name string) any {
	for i, c := range columns {
		if c == name {
			return reflect.ValueOf(r).Field(i).Interface()
		}
	}
	return nil
}

// changed returns the columns in which two rows differ.
func changed(a, b Row) (names []string) {
	if a == b {
		return nil
	}
	va, vb := reflect.ValueOf(a), reflect.ValueOf(b)
	for i, c := range columns {
		if va.Field(i).Interface() != vb.Field(i).Interface() {
			names = append(names, c)
		}
	}
	return names
}

// Time is a moment in microseconds since 1970, which is all that Postgres keeps. Zero is
// NULL.
type Time int64

// Postgres' infinities.
const (
	Infinity    Time = math.MaxInt64
	negInfinity Time = math.MinInt64
)

// At is t, as Postgres keeps it.
func At(t time.Time) Time { return Time(t.UnixMicro()) }

// Add returns the moment that is d later.
func (t Time) Add(d time.Duration) Time {
	if t == Infinity || t == negInfinity {
		return t
	}
	return t + Time(d.Microseconds())
}

// Sub returns how much later t is than u.
func (t Time) Sub(u Time) time.Duration { return time.Duration(t-u) * time.Microsecond }

func (t Time) String() string {
	switch t {
	case 0:
		return "NULL"
	case Infinity:
		return "infinity"
	case negInfinity:
		return "-infinity"
	}
	return time.UnixMicro(int64(t)).UTC().Format("15:04:05.000000")
}

// UnmarshalText reads what Postgres writes into JSON.
func (t *Time) UnmarshalText(text []byte) error {
	switch string(text) {
	case "infinity":
		*t = Infinity
		return nil
	case "-infinity":
		*t = negInfinity
		return nil
	}
	common, before := strings.CutSuffix(string(text), " BC")
	at, err := time.Parse(time.RFC3339Nano, common)
	if err != nil {
		return err
	}
	if before {
		at = at.AddDate(1-2*at.Year(), 0, 0)
	}
	*t = At(at)
	return nil
}

// MarshalText writes what UnmarshalText reads.
func (t Time) MarshalText() ([]byte, error) {
	if t == Infinity || t == negInfinity {
		return []byte(t.String()), nil
	}
	return []byte(time.UnixMicro(int64(t)).UTC().Format(time.RFC3339Nano)), nil
}
