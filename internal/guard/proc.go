//go:build linux

package guard

import (
	"errors"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"onejob/internal/procfs"
)

// sweep kills what a dead guard has left behind: all of its session, and every
// process with mark in its environment, also as an outer one. It returns when none is left.
//
// The guard must not have been reaped yet: its process id, which is the
// session's, must not go to somebody else.
func sweep(guard int, mark string) {
	// A process in the middle of an exec shows no environment, so one look
	// that finds nothing is not enough.
	pause := 10 * time.Millisecond
	for quiet := 0; quiet < 3; {
		if killMarked(guard, mark) {
			quiet = 0
			pause = min(2*pause, time.Second) // some cannot be killed, and each look reads all of /proc
		} else {
			quiet++
		}
		time.Sleep(pause)
	}
}

// killMarked reports whether there was something, or may have been: what cannot be read now,
// because this process has too many files open for example, may be what it looks for.
func killMarked(guard int, mark string) (found bool) {
	all, err := procfs.Processes()
	found = err != nil && !errors.Is(err, procfs.ErrOdd)
	for _, p := range all {
		if p.PID == guard || p.Dead {
			continue
		}
		its, outer, err := marksOf(p.PID)
		found = found || err != nil
		if p.Session == guard || its == mark || slices.Contains(outer, mark) {
			found = true
			_ = p.Signal(unix.SIGKILL)
		}
	}
	return found
}
