// Package checker says from evidence what went wrong in a run, and how often.
//
// The evidence is what the observer has seen, what was enqueued, and what the
// database itself noted of every change of a row's status and of every effect of
// an sql task, and which statements of sql tasks an observer saw at work. What onejob says of itself, its attempts and its logs, is not
// asked, but for two things that its logs say: how often it refused a write, from which nothing
// is concluded, and which working processes have crashed, which counts against it.
//
// All moments are on one machine's clock, which is not that of Postgres: that may be
// set. Only due times of schedules are by the clock of Postgres. What the database notes
// is taken a little before it becomes visible to others.
package checker

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"onejob/chaos/observer"
	"onejob/internal/testenv/lifecycle"
)

// Evidence is all that there is to check.
type Evidence struct {
	observer.Seen

	Enqueued    []Enqueued       `json:"enqueued"`
	Steps       []lifecycle.Step `json:"steps,omitempty"` // of all rows, in the order in which they were made; none of others than onejob
	Transitions []Transition     `json:"transitions"`     // what of them changed a status
	Begun       []Begun          `json:"begun,omitempty"`
	Effects     []Effect         `json:"effects"`
	Statements  []Statement      `json:"statements,omitempty"`
	Final       map[int64]Final  `json:"final"` // every row of the table at the end, by id
	Schedules   []Schedule       `json:"schedules"`
	Occurrences []Occurrence     `json:"occurrences"`
	Edits       []Edit           `json:"edits,omitempty"` // of all schedules, in the order in which they were made
	Odd         []Odd            `json:"odd,omitempty"`
	Until       observer.Time    `json:"until,omitempty"`       // up to when edited schedules are checked
	Stopped     observer.Time    `json:"stopped,omitempty"`     // when the harness began to stop all replicas
	ClockSteps  []ClockStep      `json:"clock_steps,omitempty"` // in order; before the first the clock was right
	Limits      map[string]int   `json:"limits"`                // slots
	RabbitMQ    bool             `json:"rabbitmq,omitempty"`    // it has the limits; else Consul has
	Refused     int              `json:"refused"`

	Hostile []int64   `json:"hostile,omitempty"` // tasks that a fault inserted to do harm: nothing is asked of them
	Touched []Touched `json:"touched,omitempty"` // rows that a fault changed by hand, in the order of the changes

	// Lease is how long a lease may last after the last heartbeat that reached Consul's agent;
	// zero if there are no leases.
	Lease time.Duration `json:"lease,omitempty"`

	Crashes []Crash `json:"crashes,omitempty"` // of working processes, and of replicas

	Stops []Stop `json:"stops,omitempty"` // of replicas

	Missed []int `json:"missed,omitempty"` // IDs of marks of faults that began, and had nothing to hit

	Hosts      map[string][]string `json:"hosts,omitempty"`       // the replicas of each
	Queues     map[string][]string `json:"queues,omitempty"`      // by replica, of those that do not serve all
	Declined   []Declined          `json:"declined,omitempty"`    // INSERTs that made no task
	Resizes    []Resize            `json:"resizes,omitempty"`     // of limits, in order
	BadOutputs []int64             `json:"bad_outputs,omitempty"` // tasks with a successful attempt whose output lacks its head or its tail

	// Delays are the times by which the harness itself was late, by when they began: nothing
	// on the machine ran as it should then.
	Delays []Delay `json:"delays,omitempty"`

	// Old says that some replicas are of an older version, at some time.
	Old bool `json:"old,omitempty"`

	// Gentle says that no fault of the run ends an attempt at a task which it does
	// not touch. Then every task that can succeed must.
	Gentle bool `json:"gentle,omitempty"`

	// Forgetful says that Postgres may have forgotten what it had acknowledged, and the
	// notes that the database makes with it. Then tasks may be gone, or run again, and an
	// id may have been given to two; all that is checked is what the observer has seen, and
	// what the table holds in the end.
	Forgetful bool `json:"forgetful,omitempty"`
}

// Enqueued is a task whose INSERT was acknowledged, or was found to have been
// made after its answer was lost.
type Enqueued struct {
	Task      int64  `json:"task"`
	Kind      string `json:"kind"`
	Cancelled bool   `json:"cancelled"` // somebody asked for that
	Doomed    bool   `json:"doomed"`    // it was made to fail: each attempt takes longer than it may
	Once      bool   `json:"once"`      // it has one attempt, and does not fail by itself

	MaxAttempts int           `json:"max_attempts,omitempty"` // zero if nothing is known of how it must end
	Failures    int           `json:"failures,omitempty"`     // so many attempts fail: those with the lowest numbers
	Timeout     time.Duration `json:"timeout,omitempty"`      // of an attempt; zero for none
	KeepFor     time.Duration `json:"keep_for,omitempty"`     // after its end; zero for as long as the configuration says

	// Due is when the task became due, if nothing but a claim was missing from then
	// on: it shares its lock key with no other task, has no limit, and is in the queue that all
	// serve. Zero otherwise.
	Due      observer.Time `json:"due"`
	Priority int           `json:"priority,omitempty"`
}

// Declined is an INSERT that made no task, as a pending or running one was to have its
// unique_key. The INSERT was made between the two moments.
type Declined struct {
	UniqueKey string        `json:"unique_key"`
	From      observer.Time `json:"from"`
	To        observer.Time `json:"to"`
}

// Resize is a change of a limit's slots, which was made between the two moments. If it is not
// done, nobody knows whether it was made, then or later.
type Resize struct {
	Limit string        `json:"limit"`
	Slots int           `json:"slots"`
	From  observer.Time `json:"from"`
	To    observer.Time `json:"to"`
	Done  bool          `json:"done"`
}

// Delay is a time by which the harness was late.
type Delay struct {
	Begin observer.Time `json:"begin"`
	For   time.Duration `json:"for"`
}

// Touched is a row that a fault changed by hand, noted in the transaction of the
// change.
type Touched struct {
	Task int64  `json:"task"`
	What string `json:"what"`
}

// What is done to rows by hand.
const (
	Edited          = "edited"    // columns that say when and where the task runs
	CancelRequested = "cancelled" // it was asked for; the task may have ended otherwise
	Deleted         = "deleted"   // also a status that a transition leads to
	Retried         = "retried"   // by onejob.retry
	Locked          = "locked"    // by a transaction that stayed open
)

// Transition is one change of a row's status, or a success of a row that had
// succeeded already, noted by the database in the same transaction.
type Transition struct {
	Task    int64         `json:"task"`
	Kind    string        `json:"kind"`
	Key     string        `json:"key"`
	From    string        `json:"from"`
	To      string        `json:"to"`
	Fence   int64         `json:"fence"`   // of the row, after the change
	Replica string        `json:"replica"` // that holds the row, or held it
	Attempt int           `json:"attempt"` // of the row, after the change: how many are used up
	At      observer.Time `json:"at"`
	By      string        `json:"by"` // Operator, or anybody else
}

// TransitionsOf returns the changes of a status among steps, with successes of rows that had
// succeeded already; and the attempts at rows whose status stayed as it was.
func TransitionsOf(steps []lifecycle.Step) (all []Transition, begun []Begun) {
	at := func(t lifecycle.Time) observer.Time { return observer.Time(int64(t) * 1000) }
	for _, s := range steps {
		t := Transition{Task: s.Task, Kind: s.Is.Kind, Key: cmp.Or(s.Is.LockKey, fmt.Sprint(s.Task)), From: s.Was.Status, To: s.Is.Status,
			Fence: s.Is.Fence, Replica: cmp.Or(s.Is.Replica, s.Was.Replica), Attempt: s.Is.Attempt, At: at(s.At), By: s.By}
		switch {
		case s.Was.Status == "": // an INSERT
		case s.Is.Status == "":
			t.Kind, t.Key, t.To, t.Fence, t.Attempt = s.Was.Kind, cmp.Or(s.Was.LockKey, fmt.Sprint(s.Task)), Deleted, s.Was.Fence, s.Was.Attempt
			all = append(all, t)
		case s.Was.Status != s.Is.Status, s.Is.Status == succeeded && s.Was.FinishedAt != s.Is.FinishedAt:
			all = append(all, t)
		case s.Was.Fence != s.Is.Fence && s.Is.Replica != "":
			begun = append(begun, Begun{s.Is.Fence, s.Is.Replica})
		}
	}
	return all, begun
}

// Begun is an attempt at a row whose status it did not change, as those of others
// than onejob may be.
type Begun struct {
	Fence   int64  `json:"fence"`
	Replica string `json:"replica"`
}

// Who changes rows by hand.
const (
	Operator = "chaos-operator"
	Locker   = "chaos-open-transaction" // the operator, in a transaction that stays open
)

// Effect is what an sql task did.
type Effect struct {
	Task  int64         `json:"task"`
	Fence int64         `json:"fence"`
	Key   string        `json:"key"`
	Began observer.Time `json:"began"`
	Ended observer.Time `json:"ended"` // a little before it was committed
}

// Statement is one of an sql task that was seen at work in Postgres, from the first
// time somebody looked until the last: it was at work all the time between.
type Statement struct {
	Fence   int64         `json:"fence"` // its lowest bits, see shortFence
	PID     int           `json:"pid"`   // of the backend
	Key     int64         `json:"key"`   // hash of its lock key
	Replica string        `json:"replica"`
	First   observer.Time `json:"first"`
	Last    observer.Time `json:"last"`
}

// shortFence is as much of a fence as the name of an advisory lock has room for. No two
// fences of a run of some hours have the same: they rise by less than 2^31 meanwhile,
// though they begin anew after each restart of Postgres.
func shortFence(fence int64) int64 { return fence & (1<<31 - 1) }

// Final is how a row was found at the end.
type Final struct {
	Status   string `json:"status"`
	Schedule string `json:"schedule,omitempty"` // that made it
	Error    string `json:"error,omitempty"`
}

// The statuses of a row.
const (
	pending   = "pending"
	running   = "running"
	succeeded = "succeeded"
	failed    = "failed"
	cancelled = "cancelled"
)

// The kinds of marks and of tasks that the checker knows. A replica that is frozen
// does nothing until it thaws, and nothing can make a request that it has sent
// or a goroutine that it has vanish meanwhile.
const (
	Frozen = "frozen" // of marks; the target is a replica
	Kill   = "kill"   // of marks; the target is a replica

	// Helpless is of marks: no replica had a session, from then on until a person had to help. It is
	// no fault, and excuses that nothing was claimed.
	Helpless = "helpless"

	Suspended = "suspended" // of marks, beside one of Frozen: its guards and commands do nothing either

	PoolerKill = "pooler-kill" // of marks; the target is a host, whose replicas are cut off from Postgres

	WorkerKill = "worker-kill" // of marks; the target is a replica, whose supervisor lives

	HostLoss = "host-loss" // of marks; the target is several replicas, separated by commas

	SessionDestroy = "session-destroy" // of marks: an operator ends a replica's session
	SessionUnheard = "session-unheard" // the same, when the replica cannot hear of it

	// of marks; the target is a replica, which is stopped with SIGTERM and started
	// again when it has ended. The mark ends then.
	GracefulRestart = "graceful-restart"

	// of marks; the target is a replica, which is asked for the stacks of its goroutines and dies of it.
	Stacks = "stacks"

	Stranger = "wrong-consul" // of marks; a replica that has a Consul of its own
	NoConsul = "no-consul"    // of marks; no server runs

	KeyDelete     = "key-delete"     // of marks, which have them: an operator deletes keys
	ConsulRestore = "consul-restore" // of marks: Consul has the state of before
	ConsulWiped   = "consul-wiped"   // of marks: Consul has no state any more

	// of marks; the target is who starts commands of outsiders, one after the other. It is
	// killed, and the command's guard lives, or frozen, or black-holed from Consul.
	OutsiderKill   = "outsider-kill"
	OutsiderFreeze = "outsider-freeze"
	OutsiderCut    = "outsider-cut"

	// OutcomeRefused is of marks: a trigger refuses the outcomes of some tasks. The statement of an sql
	// task and its outcome are one transaction, so its attempt fails.
	OutcomeRefused = "outcome-refused"

	// Marks of faults that leave all servers, and all replicas but one, in order.
	HostileRows     = "hostile-rows"
	ClaimFreeze     = "claim-freeze"
	OpenTransaction = "open-transaction"
	RowTouched      = "row-touched"

	kindHTTP = "http"
	kindExec = "exec"
	kindSQL  = "sql"
	kindNoop = "noop"
)

var (
	completions = []string{SessionDestroy, SessionUnheard}
	mild        = []string{HostileRows, ClaimFreeze, OpenTransaction, RowTouched}
)

const (
	// thawing is how long after a thaw a replica may take to notice: its timers
	// have to fire, on a machine that is busy.
	thawing = 2 * time.Second

	// skew is how far the database's clock and the observer's may be apart: both
	// are this machine's, but the observer's does not follow its steps.
	skew = 100 * time.Millisecond

	// cutOff is how much later a moment may be than the database notes it (chaos.clock).
	cutOff = 10 * time.Millisecond

	// queueing is how long a queue may stand still while tasks wait in it: the longest tasks
	// take so long, and may have all slots of those that serve a kind. queued is how long tasks
	// may wait in it, or as long as its head has.
	queueing = 10 * time.Second
	queued   = time.Minute

	// committing is for how long after the last Consul server ended an attempt may begin that was
	// claimed before: its lease may last 6 s from a heartbeat that Postgres has acknowledged.
	committing = 9 * time.Second

	// leaving is how long after a row was given up its work may still be seen: a
	// target notices a closed connection late when the machine is busy.
	leaving = time.Second

	// starving is how long a task may be due, while nothing but mild faults go on,
	// before somebody must have claimed it. A claim waits up to 3 s for another one
	// that is stuck, and a replica looks at the table every second.
	starving = 8 * time.Second

	// longestDelay is how long after its INSERT a task comes due at the latest, and a second for the INSERT.
	longestDelay = 6 * time.Second

	// recovering is how long after any other fault tasks may wait for longer.
	recovering = 10 * time.Second

	// succeeding is how long after a graceful restart others may take over what the
	// replica left behind.
	succeeding = 20 * time.Second

	// arriving is how long after a lock was granted its work may begin: a process has
	// to be started, on a machine that is busy.
	arriving = 3 * time.Second

	// mostFrozen is how many replicas may be frozen in their claims at once if the
	// others are to claim in time.
	mostFrozen = 2
)

// withoutHostile returns the evidence about all other tasks.
func (e Evidence) withoutHostile() Evidence {
	hostile := make(map[int64]bool, len(e.Hostile))
	for _, id := range e.Hostile {
		hostile[id] = true
	}
	e.Stays = without(e.Stays, func(s observer.Stay) bool { return hostile[s.Task] })
	e.Stale = without(e.Stale, func(s observer.Stale) bool { return hostile[s.Task] })
	hostileFence := map[int64]bool{}
	for _, t := range e.Transitions {
		f := shortFence(t.Fence)
		hostileFence[f] = hostileFence[f] || hostile[t.Task] && t.To == running
	}
	e.Statements = without(e.Statements, func(s Statement) bool { return hostileFence[s.Fence] })
	e.Transitions = without(e.Transitions, func(t Transition) bool { return hostile[t.Task] })
	e.Effects = without(e.Effects, func(f Effect) bool { return hostile[f.Task] })
	e.Odd = without(e.Odd, func(o Odd) bool { return hostile[o.Task] })
	e.Final = maps.Clone(e.Final)
	maps.DeleteFunc(e.Final, func(id int64, _ Final) bool { return hostile[id] })
	return e
}

// without returns those of a list that are not meant, and leaves the list as it is.
func without[T any](list []T, meant func(T) bool) []T {
	if !slices.ContainsFunc(list, meant) {
		return list
	}
	return slices.DeleteFunc(slices.Clone(list), meant)
}

// Load reads evidence that was kept as JSON.
func Load(path string) (e Evidence, err error) {
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, &e)
	}
	if err != nil {
		return e, fmt.Errorf("read evidence: %w", err)
	}
	return e, nil
}
