package servers

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"onejob/internal/procfs"
)

// killChildren kills the children of parent, which is left stopped, to be killed
// next. It relies on that: a stopped parent neither makes new children nor buries
// dead ones, so a child's number cannot pass to a stranger meanwhile.
func killChildren(parent *os.Process) {
	parent.Signal(syscall.SIGSTOP)
	awaitState(parent.Pid, 'T')
	children := procfs.Children(parent.Pid)
	for _, pid := range children {
		syscall.Kill(pid, syscall.SIGKILL)
	}
	for _, pid := range children {
		awaitState(pid, 'Z')
	}
}

// killIn kills the processes whose working directory is dir, and waits until they are dead. All those
// of a PostgreSQL server work in its data folder, also when their parent has ended.
func killIn(dir string) {
	all, _ := procfs.Processes()
	all = slices.DeleteFunc(all, func(p procfs.Process) bool {
		in, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", p.PID))
		return err != nil || in != dir
	})
	for _, p := range all {
		syscall.Kill(p.PID, syscall.SIGKILL)
	}
	for _, p := range all {
		awaitState(p.PID, 'Z')
	}
}

// awaitState waits until a process is in the given state, dead or gone. One that waits
// for a disk neither stops nor dies until the disk answers. It does not wait for ever, as a
// process may be stuck in the kernel.
func awaitState(pid int, state byte) {
	for end := time.Now().Add(3 * time.Minute); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if now := stateOf(pid); now == state || now == 'Z' || now == 'X' || now == 0 {
			return
		}
	}
}

// stateOf returns a process's state as /proc spells it, and 0 when there is no
// such process.
func stateOf(pid int) byte {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	// The state follows the name in brackets, which may hold anything.
	_, state, found := strings.Cut(string(stat[max(0, strings.LastIndexByte(string(stat), ')')):]), " ")
	if !found || state == "" {
		return 0
	}
	return state[0]
}
