package supervisor

import (
	"slices"

	"onejob/internal/procfs"
)

// descendants returns the living children of root, their children, and so on. Those
// for which skip returns true are left out with all that is below them. It finds none if our
// numbers in /proc are those of others: it may be that of another namespace. With an error
// there may be more.
func descendants(root int, skip func(procfs.Process) bool) ([]procfs.Process, error) {
	if procfs.Place() == "" {
		return nil, nil
	}
	below, err := procfs.Below(root, skip)
	return slices.DeleteFunc(below, func(p procfs.Process) bool { return p.Dead }), err
}
