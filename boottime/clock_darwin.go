//go:build !simulate

package boottime

import "golang.org/x/sys/unix"

// clock counts suspended time: on macOS, unlike on Linux, CLOCK_MONOTONIC does.
const clock = unix.CLOCK_MONOTONIC
