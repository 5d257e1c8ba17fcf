package testenv

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"onejob/internal/testenv/processes"
)

// Freeze stops a process with SIGSTOP, and returns when it stands still: on a busy
// machine its threads run on for a while after kill(2) has returned.
func Freeze(t testing.TB, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatalf("stop process %d: %v", pid, err)
	}
	Eventually(t, time.Minute, fmt.Sprintf("process %d is stopped", pid), func() bool { return processes.Frozen(pid) })
}
