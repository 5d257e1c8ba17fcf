package tasks

import "time"

// Claim asks a store for tasks.
type Claim struct {
	Session string   // under which the replica lives
	Replica string   // its name
	Kinds   []string // what it can run
	Queues  []string // what it serves; empty means all
	Limit   string   // only tasks with this limit_name; empty means only those without one
	Max     int      // how many it can start
}

// Orphan is a task whose replica died, and what became of it.
type Orphan struct {
	ID      int64
	Kind    string
	LockKey string
	Attempt int
	Crashes int
	Fence   int64  // of the attempt that ended with the crash
	Replica string // that died
	Next    Status
	Since   time.Duration // since that attempt began
}

// Signal says why a store wakes a replica.
type Signal int

// The signals.
const (
	SignalListening Signal = iota // signals come from now on; what was before went unheard
	SignalDue                     // tasks were enqueued
	SignalCancel                  // somebody wants tasks cancelled
)
