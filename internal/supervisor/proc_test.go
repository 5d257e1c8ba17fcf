//go:build linux

package supervisor

import (
	"os"
	"slices"
	"testing"
	"time"

	"onejob/internal/procfs"
)

func TestDescendants(t *testing.T) {
	nobody := func(procfs.Process) bool { return false }
	self := func(p procfs.Process) bool { return p.PID == os.Getpid() }
	if all, err := descendants(os.Getppid(), nobody); err != nil || !slices.ContainsFunc(all, self) {
		t.Errorf("this process is not among the descendants of its parent (%v)", err)
	}
	if all, err := descendants(os.Getppid(), self); err != nil || slices.ContainsFunc(all, self) {
		t.Errorf("what is to be skipped is there (%v)", err)
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
