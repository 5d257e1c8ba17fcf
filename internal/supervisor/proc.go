package supervisor

import (
	"bytes"
	"fmt"
	"os"
	"slices"

	"onejob/internal/procfs"
)

// descendants returns the living children of root, their children, and so on. Those
// for which skip returns true are left out with all that is below them.
func descendants(root int, skip func(procfs.Process) bool) []procfs.Process {
	return slices.DeleteFunc(procfs.Descendants(processes(), root, skip), func(p procfs.Process) bool { return p.Dead })
}

// processes returns the machine's processes, none if our numbers in /proc are those of
// others: it may be that of another namespace.
func processes() []procfs.Process {
	if procfs.Place() == "" {
		return nil
	}
	all, _ := procfs.Processes()
	return all
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
