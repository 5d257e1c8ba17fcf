//go:build !simulate

package boottime

import (
	"time"

	"golang.org/x/sys/unix"
)

// Now returns the present moment.
func Now() Instant {
	var ts unix.Timespec
	if err := unix.ClockGettime(clock, &ts); err != nil {
		panic("boottime: the kernel has no clock that counts suspended time: " + err.Error())
	}
	return Instant(ts.Nano())
}

// Ahead returns by how much the wall clock is ahead of this clock, to a millisecond, and
// false if that could not be measured because this process was not let run.
func Ahead() (time.Duration, bool) {
	for range 10 {
		before := Now()
		wall := time.Now().UnixNano()
		after := Now()
		if after.Sub(before) <= time.Millisecond {
			return time.Duration(wall - int64(after)), true
		}
	}
	return 0, false
}
