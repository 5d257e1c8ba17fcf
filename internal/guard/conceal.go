//go:build linux

package guard

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Conceal hides this process from others of the same user: they cannot read its
// environment, its memory or its open files, nor trace it. It does not hide it
// from root, and must be called again after an exec. A process that is hidden
// leaves no core dump.
func Conceal() error {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("hide the process from others: %w", err)
	}
	return nil
}
