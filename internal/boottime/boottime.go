// Package boottime is the clock that leases are measured with: the time since
// this machine was started, suspended time included.
//
// A lease must run out while the machine sleeps, and Go's monotonic clock
// (CLOCK_MONOTONIC) stands still then, so it is not good enough. The clock is
// also the same for every process of a machine, which lets a daemon hand a
// deadline to a child as a plain number. It says nothing about other machines.
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
