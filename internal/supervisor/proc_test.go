//go:build linux

package supervisor

import (
	"os"
	"testing"
	"time"

	"onejob/internal/procfs"
)

func TestDescendants(t *testing.T) {
	nobody := func(procfs.Process) bool { return false }
	self := false
	for _, p := range descendants(os.Getppid(), nobody) {
		self = self || p.PID == os.Getpid()
	}
	if !self {
		t.Error("this process is not among the descendants of its parent")
	}
	if skipped := descendants(os.Getppid(), func(p procfs.Process) bool { return p.PID == os.Getpid() }); len(skipped) > 0 {
		for _, p := range skipped {
			if p.PID == os.Getpid() {
				t.Error("what is to be skipped is there")
			}
		}
	}
}

func TestDelay(t *testing.T) {
	want := []time.Duration{0, 1, 2, 4, 8, 16, 30, 30}
	for crashes, seconds := range want {
		if got := delay(crashes); got != seconds*time.Second {
			t.Errorf("after %d crashes %v, want %v", crashes, got, seconds*time.Second)
		}
	}
	if got := delay(1 << 40); got != lastDelay {
		t.Errorf("after very many crashes %v", got)
	}
}
