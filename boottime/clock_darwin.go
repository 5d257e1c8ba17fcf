//go:build !simulate

package boottime

import "golang.org/x/sys/unix"

// clock counts suspended time: on macOS, unlike on Linux, CLOCK_MONOTONIC does.
const clock = unix.CLOCK_MONOTONIC

// Now returns the present moment. It is never earlier than what an earlier call returned.
func Now() Instant { return Instant(read()) }
