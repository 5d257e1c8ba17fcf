// Package guard runs a command so that it cannot outlive a lease, whatever
// happens to the daemon that started it.
//
// Between the daemon and the command stands a guard: the daemon's own binary,
// executed once more as a process of its own session.
//
//	daemon ──orders: extend, signal, stop, kill──> guard ──signals──> command
//	       <──reports: started, ended─────────────                    and all it starts
//
// Deadlines travel as moments on the machine's boot-time clock, so an order
// that is read late cannot lengthen a lease, and time spent suspended counts.
// A deadline that has passed is never revived.
//
// What happens, and what becomes of the command and of everything it started:
//
//	the command exits        what it left behind is killed, then the exit is reported
//	Stop                     SIGTERM; SIGKILL after the grace, or at the deadline
//	the deadline passes      SIGTERM; SIGKILL after the grace, but at most 500 ms
//	the daemon dies          as Stop: the guard sees its socket close
//	the daemon is frozen     no extension comes, the deadline passes
//	the guard was frozen     on waking, more than 500 ms late: SIGKILL at once
//	the machine was paused   when the wall clock is set right: as if the guard was frozen
//	the guard dies           the daemon kills what is left, and Wait says so
//	the guard is stuck       the daemon kills it about 1.5 s after it should be done
//	the guard is stopped     the daemon kills it after about 1 s
//	both die at once         the command dies; Sweep kills the rest when it is called
//
// "Everything it started" means every descendant: the guard is a child
// subreaper, so changing group or session or losing one's parent is no escape.
// Where cgroup v2 can be written, the command has a cgroup of its own as well,
// and all that is in it is killed at once by the kernel; see cgroup.go. Work
// that a command hands to somebody else's process (a container engine, a
// service manager, at, cron) is no descendant, and neither this package nor
// any other can see it.
//
// If both die at once, the command dies by PR_SET_PDEATHSIG, which the kernel forgets if the
// program's file has capabilities or the setuid bit and Spec.NoNewPrivs is not set. Such a
// command lives on until Sweep.
//
// Without cgroups, a process that has cleared its environment is not found when
// guard and daemon were killed in the same moment; one that has left its session
// as well is not found by a daemon whose guard was killed either. A descendant that
// changed to a user whom the daemon may not signal then ends when it likes; the guard
// waits for it. The same is true of one that hangs in the kernel, with or without cgroups.
//
// Guards, and daemons that call Conceal, are hidden from commands of the same
// user: their environment, memory and files cannot be read, and they cannot be
// traced. This does not hide them from root. A guard takes orders from a socket
// that only it and its daemon have. A command of the same user can kill both.
//
// What a dead guard leaves behind is adopted by the supervisor of onejob serve, which
// reaps it. A daemon without one that is process 1 of a container does not; let an
// init such as docker run --init be first.
//
// Under systemd use KillMode=mixed: the default sends the SIGTERM that is
// meant for the daemon to the commands as well.
package guard

import (
	"errors"
	"io"
	"os"
	"syscall"
	"time"

	"onejob/boottime"
)

const (
	// lapse is how long after its deadline a command may still be there.
	lapse = 500 * time.Millisecond

	// MinMargin is how much later than its deadline a lease may be granted to
	// somebody else at the earliest: the 500 ms that a command may be late, and
	// 100 ms for the kernel to end it.
	MinMargin = lapse + 100*time.Millisecond
)

var (
	// ErrExpired is returned by Start when the deadline had passed before the
	// command was started. Nothing was run.
	ErrExpired = errors.New("the lease ran out before the command could be started")

	// ErrExhausted is in the error of Start when the machine, or the cgroup of the daemon, has
	// too few processes, files, or memory left to start anything, or does not let the daemon
	// make a cgroup. Nothing was run.
	ErrExhausted = errors.New("the machine lacks what it takes to start a command")

	// ErrGuardDied is in the error of Wait when the guard itself was lost.
	// The command is dead, and so is what it started, with the exception in the
	// package's comment; how it ended is not known.
	ErrGuardDied = errors.New("the guard process died, and its command was killed")
)

// Spec says what to run, and until when.
type Spec struct {
	Path string   // the program; not looked for in PATH, never given to a shell
	Args []string // without the program's name
	Env  []string // all of the environment, besides ONEJOB_GUARD
	Dir  string   // where it runs; the daemon's own directory if empty

	Stdin  []byte    // what the command can read; it need not
	Output io.Writer // gets stdout and stderr, in order; nil drops them

	// Files, if not nil, are stdin, stdout and stderr as they are; Stdin and
	// Output are not used then. The command does not get the terminal's
	// foreground: it can read from the terminal, but Ctrl-C reaches the
	// daemon, which passes it on with Signal.
	Files []*os.File

	Grace    time.Duration    // between SIGTERM and SIGKILL
	Deadline boottime.Instant // when the lease runs out, until Extend moves it

	Limits     Limits      // see EnableLimits
	User       *Credential // who runs it; the daemon's own user if nil
	NoNewPrivs bool        // setuid programs and file capabilities give it no rights

	NoCgroup bool // do as if there were no cgroups; for tests

	moveIn bool // for tests: see plan
}

// Limits bound what a command and all that it started use together. Zero means
// no limit. They need the controllers memory, pids and cpu of cgroup v2.
type Limits struct {
	Memory int64   // bytes, without swap; when it is exceeded, all are killed
	PIDs   int     // processes and threads
	CPU    float64 // cores; at least 0.01
}

// Credential is a user and its groups.
type Credential struct {
	UID, GID uint32
	Groups   []uint32 // supplementary ones
}

// Exit is how a command ended.
type Exit struct {
	Code   int            // its exit code, or 128 plus the number of Signal
	Signal syscall.Signal // what killed it; zero if it exited
	Reason Reason

	// OutOfMemory is set if the kernel killed one of its processes for want of
	// memory. It is known only where Limits.Memory can be set.
	OutOfMemory bool `json:",omitempty"`
}

// Reason says who ended a command.
type Reason int

const (
	Exited     Reason = iota // it did so itself, or a signal from elsewhere did
	Stopped                  // Stop or Kill
	LeaseEnded               // the deadline passed
)
