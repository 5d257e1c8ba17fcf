// Package boottime is the clock that leases are measured with: the time since
// this machine was started, suspended time included.
//
// A lease must end while the machine sleeps. Go's monotonic clock stands still then, on
// Linux (CLOCK_MONOTONIC) as on macOS, so a [time.Time] cannot be a lease's deadline.
// This clock is CLOCK_BOOTTIME on Linux, and CLOCK_MONOTONIC on macOS, which counts
// suspended time there. Other systems are not supported.
//
// The clock is the same for every process of a machine, so a daemon can pass a deadline
// to a child as a plain number. It means nothing on another machine.
//
// It stands still while a virtual machine is paused by its host; see [Jumps].
package boottime

import "time"

// Instant is a moment on this machine's clock, in nanoseconds since it was
// started. The zero Instant lies before every moment that Now returns, so a
// zero deadline has always passed.
type Instant int64

// Add returns the moment d after i.
func (i Instant) Add(d time.Duration) Instant { return i + Instant(d) }

// Sub returns how long before i the moment j lies.
func (i Instant) Sub(j Instant) time.Duration { return time.Duration(i - j) }

// Before reports whether i lies before j.
func (i Instant) Before(j Instant) bool { return i < j }

// Until returns how far away i is; it is negative when i has passed.
func (i Instant) Until() time.Duration { return i.Sub(Now()) }

// Passed reports whether i lies in the past, or is this very moment.
func (i Instant) Passed() bool { return Now() >= i }
