package boottime

import (
	"time"
)

// Jumps notices when the wall clock jumps ahead of this clock.
//
// This clock counts the time for which the machine was suspended. It does not count
// the time for which a virtual machine was paused, saved or moved by its host: no clock
// of the machine does. But the wall clock is set right afterwards, by the host or by NTP,
// and then it has run ahead of this clock by as long as the pause was. So a jump ahead is
// time that may have passed. It may also be a wrong wall clock that was set right, which
// nobody can tell from a pause.
//
// A jump is noticed when the wall clock is set, and no sooner.
//
// The zero value is ready. It is not safe for several goroutines at once.
type Jumps struct {
	// Source returns by how much the wall clock is ahead of this clock, and whether
	// that could be measured; nil means Ahead. Tests have one of their own.
	Source func() (time.Duration, bool)

	last  time.Duration
	known bool
}

// Noise is by how much the wall clock may run ahead between two looks at it without
// that being a jump. NTP moves it by less, unless it sets it.
const Noise = 100 * time.Millisecond

// Since returns by how much the wall clock has jumped ahead since the last call, and zero
// if it has not. The first call returns zero.
func (j *Jumps) Since() time.Duration {
	source := j.Source
	if source == nil {
		source = Ahead
	}
	ahead, ok := source()
	if !ok {
		return 0
	}
	jump := ahead - j.last
	first := !j.known
	j.last, j.known = ahead, true
	if first || jump <= Noise {
		return 0
	}
	return jump
}
