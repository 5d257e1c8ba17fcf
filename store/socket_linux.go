package store

import (
	"time"

	"golang.org/x/sys/unix"
)

// limitUnacknowledged makes the kernel end a connection whose data is not acknowledged
// for so long.
func limitUnacknowledged(fd int, limit time.Duration) error {
	return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(limit.Milliseconds()))
}
