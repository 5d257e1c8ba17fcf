package tasks

import "time"

// A Replica is a row of onejob.replicas: one session of a process that works on tasks.
type Replica struct {
	Session     string
	Process     string // the same for all sessions of a process
	Name        string
	Host        string
	PID         int
	Started     uint64 // when the process was, in clock ticks since the machine was
	Machine     string // on which PID and Started mean something; empty if they do not
	Version     string
	Kinds       []string
	Choices     map[string]map[string][]string // what payloads can choose, by kind and field; nil if it is not told
	Queues      []string                       // that it claims from; empty means all
	Concurrency int

	// LimitsBackend is where it keeps limits, such as consul; empty if it serves none, or is of
	// a version that does not tell.
	LimitsBackend string

	Running     int // attempts under way
	State       ReplicaState
	HeartbeatAt time.Time // by Postgres' clock
	Here        bool      // the server that has told this took the last heartbeat
	Server      time.Time // when that server was started
	Quiet       bool      // in an answer to a heartbeat: it has sent none since Known.Since

	// Progress is what a heartbeat says of how far its handlers are, by fence; nil if it has
	// not changed. It is only written.
	Progress map[int64]ProgressAt
}

// ProgressAt is a [Progress] of a handler, as JSON in onejob.replicas.
type ProgressAt struct {
	Percent *float64  `json:"percent,omitempty"` // nil if it is not known
	Text    string    `json:"text"`
	At      time.Time `json:"said_at"` // by Postgres' clock
}

// Equal reports whether both say the same, and said it at the same time.
func (p ProgressAt) Equal(q ProgressAt) bool {
	return p.Text == q.Text && p.At.Equal(q.At) && (p.Percent == nil) == (q.Percent == nil) && (p.Percent == nil || *p.Percent == *q.Percent)
}

// Known is what a replica knows of the list of replicas when it sends a heartbeat. The zero
// value is nothing.
type Known struct {
	Server time.Time // that answered last; see Replica.Server
	Digest string    // of the list, by the last answer

	// Since is the transaction of an earlier heartbeat, to that server. Replicas that have
	// sent one since need not be told.
	Since uint32
}

// Answer is what a heartbeat is answered with.
type Answer struct {
	Ended       bool      // others have called the session dead; the rest may be empty
	Server      time.Time // that answers; see Replica.Server
	Digest      string    // of the list, whatever the heartbeats are
	Transaction uint32    // of this heartbeat

	// Whole says that Replicas are the whole list, because it is another one than Known
	// says. Otherwise they are the quiet ones.
	Whole    bool
	Replicas []Replica
}

// ReplicaState is what a replica does, or how it ended.
type ReplicaState string

// The states of a replica. The last three are final.
const (
	ReplicaWorking  ReplicaState = "working"
	ReplicaStopping ReplicaState = "stopping" // it claims nothing more
	ReplicaStopped  ReplicaState = "stopped"  // in order
	ReplicaLost     ReplicaState = "lost"     // the session ended, and the process lived on
	ReplicaDead     ReplicaState = "dead"     // the process ended, or gave no sign of life
)

// Final reports whether a replica in this state has ended.
func (s ReplicaState) Final() bool {
	return s == ReplicaStopped || s == ReplicaLost || s == ReplicaDead
}

// An OtherClusterError says that a Consul is not the cluster's own, or that nobody can tell.
type OtherClusterError struct{ Why string }

func (e *OtherClusterError) Error() string { return e.Why }
