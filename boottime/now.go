//go:build !simulate

package boottime

import (
	"time"

	"golang.org/x/sys/unix"
)

// read asks the kernel, which takes a system call: 0.2 to 1.5 µs.
func read() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(clock, &ts); err != nil {
		panic("boottime: the kernel has no clock that counts suspended time: " + err.Error())
	}
	return ts.Nano()
}

// Ahead returns by how much the wall clock is ahead of this clock, to two milliseconds, and
// false if that could not be measured because the process was not scheduled in time.
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
