package supervisor

import (
	"slices"

	"onejob/internal/procfs"
)

// descendants returns the living children of root, their children, and so on. Those
// for which skip returns true are left out with all that is below them. It finds none if our
// numbers in /proc are those of others: it may be that of another namespace.
func descendants(root int, skip func(procfs.Process) bool) []procfs.Process {
	if procfs.Place() == "" {
		return nil
	}
	all, _ := procfs.Processes()
	return slices.DeleteFunc(procfs.Descendants(all, root, skip), func(p procfs.Process) bool { return p.Dead })
}
