// Package observer sees what tasks do, from outside: a process of its own, with
// one clock, that believes nothing but what tasks show it.
//
// A task that runs as a process or as a Go handler opens a connection and says
// who it is; the answer is what makes it begin. It is inside from then on until
// it says that it ends and was heard, or until its connection closes, which the
// kernel sees to when a process dies. While it is inside it beats. The target
// of http tasks is the observer itself. What sql tasks do is witnessed in the
// database, not here.
//
// Stamps are in the order of what happened: when somebody begins, all who are
// inside are looked at first, and those whose connection has closed by then are
// stamped before.
package observer

import "time"

// Claim is what a task says of itself when it comes.
type Claim struct {
	Task    int64  `json:"task"`
	Attempt int    `json:"attempt"`
	Fence   int64  `json:"fence"`
	Key     string `json:"key"`             // its lock key
	Limit   string `json:"limit,omitempty"` // the limit it runs under
	Kind    string `json:"kind"`
	Replica string `json:"replica,omitempty"` // empty for http: the target cannot know
	Part    string `json:"part,omitempty"`    // of the attempt: empty, or a process that it started
	PID     int    `json:"pid,omitempty"`     // exec: the process
	Parent  int    `json:"parent,omitempty"`  // exec: what started it, which is its guard

	// Outsider is the name of a command that runs under "onejob lock", each of which has
	// another one. It is no task, so it has neither a row nor a fence: it may come after any.
	Outsider string `json:"outsider,omitempty"`
}

// Lease is what was said last of the lease of an attempt that goes on.
type Lease struct {
	Deadline Time `json:"deadline"` // when it ends, unless a heartbeat moves that
	Told     Time `json:"told"`     // when that was said
}

// Over returns when the work had to begin to end: at the deadline, or when a lease was said
// to have ended before that.
func (l Lease) Over() Time { return max(l.Deadline, l.Told) }

// How a stay ended.
const (
	Succeeded = "succeeded" // it said so
	Failed    = "failed"    // it said so, as it was meant to
	Stopped   = "stopped"   // it was told to stop, and said so
	Gone      = "gone"      // its connection closed
	Open      = "open"      // it was still inside when the observer was sent home
)

// Time is a moment by the observer's clock, in nanoseconds since 1970.
type Time int64

// Sub returns how long t is after u.
func (t Time) Sub(u Time) time.Duration { return time.Duration(t - u) }

// Add returns the moment d after t.
func (t Time) Add(d time.Duration) Time { return t + Time(d) }

// At returns the same moment by the wall clock.
func At(t time.Time) Time { return Time(t.UnixNano()) }

// Stay is one attempt's time inside, or one process's of it.
type Stay struct {
	Claim
	Begin Time   `json:"begin"`
	End   Time   `json:"end"`
	How   string `json:"how"`
	Beats int    `json:"beats"`
	// Silence is the longest time without a beat. A process that works beats
	// every 50 ms.
	Silence time.Duration `json:"silence"`
}

// Stale is somebody who came with a lower fence than one that was there before.
// It was turned away and never inside.
type Stale struct {
	Claim
	At Time `json:"at"`
}

// Mark is something that was done to the cluster, as its doer says when it
// begins and ends.
type Mark struct {
	ID     int    `json:"id"`
	Kind   string `json:"kind"`
	Target string `json:"target"`
	Alone  bool   `json:"alone"` // nothing else was going on, nor was to
	Begin  Time   `json:"begin"`
	End    Time   `json:"end"` // zero while it goes on

	Keys []string `json:"keys,omitempty"` // of Consul, that are deleted by hand
}

// Seen is all that the observer has to say.
type Seen struct {
	Stays []Stay  `json:"stays"`
	Stale []Stale `json:"stale"`
	Marks []Mark  `json:"marks"`

	// Leases are those of attempts whose replica says what it knows of them, by fence.
	Leases map[int64]Lease `json:"leases,omitempty"`
}
