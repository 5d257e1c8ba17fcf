package consul

import (
	"math"
	"time"

	"onejob/boottime"
	"onejob/internal/mutant"
)

// A leaseWindow is how long we may believe that a session lives: until the earliest of
// three deadlines, each counted from the moment before the last acknowledged
// request that kept the session alive was sent, and each a margin earlier than
// what Consul, or the other replicas, wait for.
type leaseWindow struct {
	check   boottime.Instant // when the health check's patience ends
	session boottime.Instant // when the session's TTL ends
	silence boottime.Instant // when the other replicas would call us dead

	jumped boottime.Instant // when the wall clock was last seen to have jumped ahead; zero if never
	jump   time.Duration    // by how much
}

// never is the deadline of what has none.
const never = boottime.Instant(math.MaxInt64)

// until returns the moment at which trust ends.
func (t *leaseWindow) until() boottime.Instant {
	if mutant.SelfFencing {
		return never
	}
	return min(t.check, t.session, t.silence)
}

// extend moves one of the deadlines, never back, and reports whether it could.
// Trust that has ended does not return, whichever deadline ended it and
// whatever was acknowledged since: the keys may have changed hands.
func (t *leaseWindow) extend(which *boottime.Instant, now, deadline boottime.Instant) bool {
	if t.until() <= now {
		return false
	}
	*which = max(*which, deadline)
	return true
}

// age makes all deadlines come sooner by a jump of the wall clock that was noticed now:
// the machine may have been paused for as long, and Consul's clocks have gone on. What
// was sent before may have been sent before the pause, and extends nothing any more.
func (t *leaseWindow) age(now boottime.Instant, jump time.Duration) {
	for _, d := range []*boottime.Instant{&t.check, &t.session, &t.silence} {
		if *d != never {
			*d = d.Add(-jump)
		}
	}
	t.jumped, t.jump = now, jump
}

// end ends trust now, unless it has ended before.
func (t *leaseWindow) end(now boottime.Instant) {
	t.check = min(t.check, now)
}
