//go:build linux

package supervisor

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A ReportDeath that SIGKILL does not end keeps the next worker waiting for some seconds, and not
// for longer. A process whose parent does not reap it stands for one that the kernel does not let go.
// No other test may run beside this one: it reaps all children.
func TestReporterThatDoesNotDie(t *testing.T) {
	parent := exec.Command("/bin/sh", "-c", `sleep 1000 & echo $!; exec sleep 1000`)
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	defer parent.Wait() //nolint:errcheck // it was killed
	defer parent.Process.Kill()
	text := make([]byte, 100)
	n, err := out.Read(text)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text[:n])))
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Kill(pid, syscall.SIGKILL)                                 //nolint:errcheck // it may be dead
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) { // a shell would reap it
		if name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", parent.Process.Pid)); err != nil || time.Now().After(end) {
			t.Fatalf("its parent is still %q (error %v)", name, err)
		} else if string(name) == "sleep\n" {
			break
		}
	}
	stuck := &process{pid: pid}
	s := &supervisor{
		signals: make(chan os.Signal), children: make(chan os.Signal), lines: make(chan line),
		running: map[int]*process{pid: stuck}, before: map[int]uint64{}, reporter: stuck,
	}
	returned := make(chan struct{})
	go func() {
		s.stopReporter()
		close(returned)
	}()
	select {
	case <-returned:
	case <-time.After(10 * killWait):
		t.Fatalf("it was waited for more than %v", 10*killWait)
	}
	if s.reporter != nil || s.before[pid] == 0 {
		t.Errorf("it is still at work (%t), or taken for the worker's (%t)", s.reporter != nil, s.before[pid] == 0)
	}
}
