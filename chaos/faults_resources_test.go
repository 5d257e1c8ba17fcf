package main

import (
	"bytes"
	"fmt"
	"os"
	"syscall"
	"testing"

	"onejob/chaos/harness"
	"onejob/internal/servers"
)

// A Consul whose process is ending in that moment is started again, as well as one that has ended.
func TestConsulIsRevived(t *testing.T) {
	c, err := servers.StartConsul(t.Context(), servers.ConsulConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 3 {
		killed := 0
		for _, p := range harness.Below(os.Getpid()) {
			if line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.PID)); bytes.Contains(line, []byte(c.Dir())) {
				_ = syscall.Kill(p.PID, syscall.SIGKILL)
				killed++
			}
		}
		if killed != 1 {
			t.Fatalf("%d processes were killed", killed)
		}
		if err := revive(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Client().Status().Leader(); err != nil {
			t.Errorf("it does not answer: %v", err)
		}
	}
}
