// Package processes looks at processes of this machine, for tests, chaos and benchmarks.
package processes

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"onejob/internal/procfs"
)

// Status returns a number of /proc/PID/status by its name there, such as Threads.
// Sizes are in MB: VmRSS is what is resident now, VmHWM the most that ever was.
// It fails if there is no such process, or no such number.
func Status(pid int, name string) (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		value, ok := strings.CutPrefix(line, name+":")
		if !ok {
			continue
		}
		value, isSize := strings.CutSuffix(strings.TrimSpace(value), " kB")
		n, err := strconv.ParseFloat(value, 64)
		if isSize {
			n /= 1024
		}
		return n, err
	}
	return 0, fmt.Errorf("process %d has no %s", pid, name)
}

// Frozen reports whether each thread of a process stands still, by SIGSTOP or the like,
// or is dead. Until one thread has noticed the signal, the others run on.
func Frozen(pid int) bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, thread := range threads {
		stat, err := os.ReadFile(thread)
		state := bytes.TrimSpace(stat[bytes.LastIndexByte(stat, ')')+1:]) // the name before it may contain anything
		if err == nil && (len(state) == 0 || !bytes.ContainsAny(state[:1], "TZXx")) {
			return false
		}
	}
	return true
}

// Find returns the working process of a supervisor: its child with the same arguments
// and another environment, unlike a child that is about to execute something else. For a
// process that has none it returns the process itself.
func Find(pid int) int {
	read := func(pid int, name string) []byte {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
		return text
	}
	args, env := read(pid, "cmdline"), read(pid, "environ")
	for _, child := range procfs.Children(pid) {
		if len(args) > 0 && bytes.Equal(read(child, "cmdline"), args) && !bytes.Equal(read(child, "environ"), env) {
			return child
		}
	}
	return pid
}
