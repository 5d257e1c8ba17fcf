package guard

import (
	"strings"
	"time"

	"onejob/internal/boottime"
)

const (
	argv0  = "onejob-guard" // by this name the binary knows that it is a guard
	envKey = "ONEJOB_GUARD" // marks the command and what it starts

	controlFD = 3 // the guard reads a plan, then orders; closed when the daemon dies
	reportFD  = 4 // the guard writes that it started, then how it ended

	// lapse is how long after its deadline a command may still be there.
	lapse = 500 * time.Millisecond
)

// plan is what the guard is told first. JSON would mend strings that are not
// UTF-8, so those that belong to the command travel as bytes.
type plan struct {
	Argv     []byte // separated by NUL, the program first
	Env      []byte // separated by NUL
	Dir      []byte
	Captured bool // stdout and stderr are a pipe that only the daemon reads
	Grace    time.Duration
	Deadline boottime.Instant
}

// order is what the guard is told later; one field of it is set.
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
	Ended   *Exit  `json:",omitempty"`
}

// pack joins strings as the kernel does in /proc/PID/environ. There must be at
// least one, and none may contain a NUL; exec could not carry it either.
func pack(s []string) []byte { return []byte(strings.Join(s, "\x00")) }

func unpack(b []byte) []string { return strings.Split(string(b), "\x00") }
