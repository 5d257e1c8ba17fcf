//go:build !mutants

// Package mutant switches off, one at a time, what protects onejob, in builds
// that are made to be found guilty: a test under faults that cannot tell them
// from the real one is worth nothing. In every other build all of it is false,
// and the compiler leaves it out.
//
//	go build -tags mutants -ldflags "-X onejob/internal/mutant.name=fence" ./cmd/onejob
package mutant

// What is switched off.
const (
	Fence       = false // endings are accepted under any fence
	SelfFencing = false // a lease has no deadline of its own
	Guard       = false // nobody stops commands
	Witness     = false // an ended session is all it takes to take tasks over
	Index       = false // two rows of one lock key may be running
	Names       = false // a reused name that any task has is taken to be another one's
	List        = false // a key may be taken twice within one session
	Identity    = false // a replica works with any Consul
	Burial      = false // a death is made known before all that the process left is dead
	Statement   = false // statements of those who died go on
	Fences      = false // the fences of another server do not begin above those of its predecessor
	Record      = false // locks are had whatever the record of the database says
	Silence     = false // silence on one server is death, whatever another one hears
	Begun       = false // tasks are charged with the deaths of replicas where they had not begun
	Stalls      = false // tasks that stall replicas are not charged
	Claims      = false // a claim is given up when the replica is told to stop
	Others      = false // a task is charged with the deaths of several replicas at once
	Stopped     = false // a replica that stops tells nobody but Postgres
	FoundDead   = false // a session that was found dead stays so, whatever it does
	Early       = false // a working process that has just begun gets signals at once
	LockGate    = false // claims go on while locks cannot be had
	Pause       = false // nobody notices that the machine was paused
	Delay       = false // slots in RabbitMQ are free as soon as their holder has died
	SetBack     = false // what was written ahead of Postgres' clock stays so
	Successor   = false // replicas stay with an old primary that lives on
	Edits       = false // what was due before an edit of a schedule is dropped
	Cgroup      = false // what is in a command's cgroup is not killed
	Schedules   = false // due times make no tasks
	RunAt       = false // tasks are claimed before they are due
	Retries     = false // the first failure is the last
	Lost        = false // a task fails when its lease is lost
	Cancels     = false // nobody hears that a running task is to be cancelled
	Timeouts    = false // a task's timeout ends nothing
	Late        = false // takeovers begin 20 s late
	Returns     = false // tasks are requeued under any fence
	Doubling    = false // the delay of retries stays the same
	Lapse       = false // a command is killed 3 s after its lease, not 0.5 s
	LockKey     = false // onejob lock has keys of its own
)
