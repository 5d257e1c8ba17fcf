//go:build !linux

package store

import "time"

// limitUnacknowledged does nothing: only Linux has TCP_USER_TIMEOUT.
func limitUnacknowledged(int, time.Duration) error { return nil }
