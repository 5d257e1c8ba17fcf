//go:build simulate

package boottime

import "time"

// Simulated is the clock of builds that simulate. It follows time.Now, which a bubble of
// testing/synctest has of its own, and each simulated machine may have another one.
var Simulated struct {
	Now   func() Instant
	Ahead func() time.Duration
}

// Now returns the present moment.
func Now() Instant {
	if Simulated.Now == nil {
		return Instant(time.Now().UnixNano())
	}
	return Simulated.Now()
}

// Ahead returns by how much the wall clock is ahead of this clock.
func Ahead() (time.Duration, bool) {
	if Simulated.Ahead == nil {
		return 0, true
	}
	return Simulated.Ahead(), true
}
