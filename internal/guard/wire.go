//go:build linux

package guard

import (
	"strings"
	"time"

	"onejob/boottime"
)

const (
	// argv0 is the name by which the binary knows that it is a guard. ps shows
	// it before the command's. It does not contain the daemon's name, so that
	// "pkill -f" with that does not hit daemon and guard at once.
	argv0    = "task-guard:"
	comm     = "task-guard"
	envKey   = "ONEJOB_GUARD"        // marks the command and what it starts
	envOuter = "ONEJOB_OUTER_GUARDS" // marks of guards that the daemon itself runs under, separated by commas

	// linkFD is a socket to the daemon, which nobody can open a second time
	// through /proc. The guard reads a plan, then orders; it writes that it
	// started, then how it ended. It is closed when the daemon dies.
	linkFD   = 3
	cgroupFD = 4 // the attempt's cgroup, if it has one; locked
)

// plan is what the guard gets first. JSON would change strings that are not
// UTF-8, so those that belong to the command travel as bytes.
type plan struct {
	Argv     []byte // separated by NUL, the program first
	Env      []byte // separated by NUL
	Dir      []byte
	Captured bool // stdout and stderr are a pipe that only the daemon reads
	Grace    time.Duration
	Deadline boottime.Instant

	Cgroup     []byte      // the attempt's cgroup; empty without one
	MoveIn     bool        // be moved into the cgroup to fork there, as on old kernels
	User       *Credential `json:",omitempty"`
	NoNewPrivs bool
}

// order is what the guard gets later; one field of it is set.
type order struct {
	Deadline *boottime.Instant `json:",omitempty"`
	Signal   int               `json:",omitempty"`
	Stop     bool              `json:",omitempty"`
	Kill     bool              `json:",omitempty"`
}

// report is what the guard says: first that the command was started or why
// not, then, if it was, how it ended.
type report struct {
	Expired bool   `json:",omitempty"`
	Failed  string `json:",omitempty"`

	Exhausted bool  `json:",omitempty"` // why it failed
	Ended     *Exit `json:",omitempty"`

	At boottime.Instant `json:",omitzero"` // when nothing was left of it
}

// pack joins strings as the kernel does in /proc/PID/environ. There must be at
// least one, and none may contain a NUL; exec could not carry it either.
func pack(s []string) []byte { return []byte(strings.Join(s, "\x00")) }

func unpack(b []byte) []string { return strings.Split(string(b), "\x00") }
