package boottime

import "golang.org/x/sys/unix"

// Now returns the present moment.
func Now() Instant {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic("boottime: the kernel has no CLOCK_BOOTTIME: " + err.Error())
	}
	return Instant(ts.Nano())
}
