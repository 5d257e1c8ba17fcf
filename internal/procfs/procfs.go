// Package procfs reads what Linux tells of a process in /proc.
package procfs

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Children returns the children of all threads of a process, dead ones that
// nobody has waited for included. A process that is not there has none.
func Children(pid int) []int {
	var children []int
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, file := range files {
		text, _ := os.ReadFile(file) // the thread may be gone by now
		for _, field := range strings.Fields(string(text)) {
			if child, err := strconv.Atoi(field); err == nil {
				children = append(children, child)
			}
		}
	}
	return children
}

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
