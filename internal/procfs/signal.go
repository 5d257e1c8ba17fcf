//go:build linux

package procfs

import (
	"errors"

	"golang.org/x/sys/unix"
)

// Signal sends a signal to the process that p was read as, and to none that has got its number
// since: a reader that is frozen for a while may come back to other processes. The error is ESRCH if
// that one is gone.
func (p Process) Signal(sig unix.Signal) error {
	return p.send(sig, 0, p.PID)
}

// SignalGroup sends a signal to the process group of the process that p was read as, if it is in that
// group still. The error is ESRCH if it is not, or is gone.
func (p Process) SignalGroup(sig unix.Signal) error {
	return p.send(sig, unix.PIDFD_SIGNAL_PROCESS_GROUP, -p.Group)
}

// send sends through a handle, which stays with its process. Where the kernel, or what filters its calls,
// knows no handles or flags, and to a group whose leader has ended, it sends to target, whose number
// cannot have changed hands more than a moment ago.
func (p Process) send(sig unix.Signal, flags int, target int) error {
	fd, err := unix.PidfdOpen(p.PID, 0) // Linux 5.3
	if err == nil {
		defer unix.Close(fd)
	}
	// What has the number now, and had it as p, had it in between.
	if now, err := Read(p.PID); err != nil || now.Start != p.Start || now.Group != p.Group && flags != 0 {
		if err != nil && !hidden(err) {
			return err
		}
		return unix.ESRCH
	}
	// To the kernel the group of a handle is the one that its process leads.
	if err == nil && (flags == 0 || p.PID == p.Group) {
		if err = unix.PidfdSendSignal(fd, sig, nil, flags); err == nil || errors.Is(err, unix.ESRCH) { // groups: Linux 6.9
			return err
		}
	}
	return unix.Kill(target, sig)
}
