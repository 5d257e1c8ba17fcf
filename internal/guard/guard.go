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
//	the daemon dies          as Stop: the guard sees its pipe close
//	the daemon is frozen     no extension comes, the deadline passes
//	the guard was frozen     on waking, more than 500 ms late: SIGKILL at once
//	the guard dies           the daemon kills what is left, and Wait says so
//	the guard is stuck       the daemon kills it about 1.5 s after it should be done
//
// "Everything it started" means every descendant: the guard is a child
// subreaper, so changing group or session or losing one's parent is no escape.
// Work that a command hands to somebody else's process (a container engine, a
// service manager, at, cron) is no descendant, and neither this package nor
// any other can see it.
//
// Not promised: if daemon and guard are killed in the same moment, only the
// command itself is certain to die (PR_SET_PDEATHSIG), not what it started. A
// descendant that changed to a user whom the daemon may not signal ends when
// it likes; the guard waits for it. The same goes for one that hangs in the
// kernel.
//
// A daemon that is process 1 of a container adopts what a dead guard leaves
// behind, and does not reap it; let an init such as docker run --init be first.
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

	"onejob/internal/boottime"
)

var (
	// ErrExpired is returned by Start when the deadline had passed before the
	// command was started. Nothing was run.
	ErrExpired = errors.New("the lease ran out before the command could be started")

	// ErrGuardDied is in the error of Wait when the guard itself was lost.
	// The command and what it started are dead; how it ended is not known.
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
}

// Exit is how a command ended.
type Exit struct {
	Code   int            // its exit code, or 128 plus the number of Signal
	Signal syscall.Signal // what killed it; zero if it exited
	Reason Reason
}

// Reason says who ended a command.
type Reason int

const (
	Exited     Reason = iota // it did so itself, or a signal from elsewhere did
	Stopped                  // Stop or Kill
	LeaseEnded               // the deadline passed
)
