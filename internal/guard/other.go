//go:build !linux

package guard

import (
	"errors"
	"syscall"

	"onejob/boottime"
)

// errLinux is why nothing is run on other systems.
var errLinux = errors.New("commands run on Linux only")

// Process is a command that was started. There is none on this system.
type Process struct{}

// Start returns an error.
func Start(Spec) (*Process, error) { return nil, errLinux }

// EnableLimits returns an error if there is a limit.
func EnableLimits(l Limits) error {
	if l != (Limits{}) {
		return errLinux
	}
	return nil
}

// Try returns an error.
func Try() error { return errLinux }

// CheckProc returns an error.
func CheckProc() error { return errLinux }

// CgroupError returns an error.
func CgroupError() error { return errLinux }

// Extend, Signal, Stop and Kill do nothing.
func (*Process) Extend(boottime.Instant) {}
func (*Process) Signal(syscall.Signal)   {}
func (*Process) Stop()                   {}
func (*Process) Kill()                   {}

// Done returns nil.
func (*Process) Done() <-chan struct{} { return nil }

// Wait returns an error.
func (*Process) Wait() (Exit, error) { return Exit{}, errLinux }

// Ended returns zero.
func (*Process) Ended() boottime.Instant { return 0 }
