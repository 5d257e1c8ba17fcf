//go:build !simulate

package boottime

import "golang.org/x/sys/unix"

// clock counts suspended time.
const clock = unix.CLOCK_BOOTTIME
