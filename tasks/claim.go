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

	// Server is when the server was started that must take the claim; another one
	// answers ErrOtherServer. Zero means any.
	Server time.Time

	// FencesFrom is added to the numbers of onejob.fences.
	FencesFrom int64

	// MaxBytes is how much text of payloads the replica has room for; tasks beyond it
	// are requeued. One task is always read. Zero means any amount.
	MaxBytes int

	// Taken, if it is not nil, is called with those rows that this claim is about to
	// commit whose locks can be asked for meanwhile: a task without a lock_key that has
	// ended no replica. It must return soon. They are the session's own only when they are
	// among the tasks that are returned; the commit may fail, and Taken be called again.
	Taken func([]Taken)
}

// Taken is a row that a claim is about to make the session's own.
type Taken struct {
	ID, Fence int64
}

// Claimed is the answer to a claim.
type Claimed struct {
	Tasks   []*Task    // the most urgent first
	Refused []RowError // rows that could not be claimed or read, each because of what it holds
	More    bool       // there may be more that is due; ask again at once
}

// RowError is what is wrong with one row. It is nobody else's error.
type RowError struct {
	ID     int64
	Failed bool // the row has failed and says why; or else it was left as it is
	Err    error
}

// Abandoned is a task whose replica died, and what became of it.
type Abandoned struct {
	ID      int64
	Kind    string
	LockKey string
	Attempt int
	Crashes int
	Stalls  int
	Fence   int64  // of the attempt that ended with the crash
	Replica string // that died
	Next    Status
	Since   time.Duration // since that attempt began

	Quarantined bool // it has failed as the one cause of too many deaths, not because its attempts are used up
}

// SuspectTime is how soon after its beginning a task that ends its replica is expected
// to do so, as far as quarantine is concerned. One that takes longer ends when its
// attempts are used up.
const SuspectTime = 15 * time.Second

// Signal says why a store wakes a replica.
type Signal int

// The signals.
const (
	SignalListening Signal = iota // signals come from now on; what was before went unheard
	SignalDue                     // tasks were enqueued
	SignalCancel                  // somebody wants tasks cancelled
	SignalDeaf                    // no signals come until the next SignalListening
)
