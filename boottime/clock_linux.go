//go:build !simulate

package boottime

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// clock counts suspended time.
const clock = unix.CLOCK_BOOTTIME

// Now returns the present moment. It is never earlier than what an earlier call returned,
// and differs from CLOCK_BOOTTIME by less than two milliseconds.
func Now() Instant { return system.now() }

var (
	began  = time.Now()
	system = derived{
		clocks: func() (mono, wall int64) {
			t := time.Now()
			return int64(t.Sub(began)), t.UnixNano()
		},
		read: read,
	}
)

// A derived clock reads CLOCK_BOOTTIME from two clocks that take no system call: Go's
// monotonic clock and the wall clock, which the kernel maps into the process.
//
// CLOCK_BOOTTIME is the monotonic clock plus the time for which the machine was suspended.
// When a suspension ends, the kernel adds its length to that sum and to the wall clock in
// one step (timekeeping_inject_sleeptime in kernel/time/timekeeping.c), and the monotonic
// clock goes on from where it stood. So while the wall clock keeps its distance from the
// monotonic one, there was no suspension, and the sum is what it was. If the distance has
// changed, somebody set the wall clock or the machine was suspended: CLOCK_BOOTTIME is read.
//
// One case hides a suspension: somebody sets the wall clock back by just as much before
// the next call. For that the sum is measured every maxAge.
type derived struct {
	clocks func() (mono, wall int64)
	read   func() int64
	known  atomic.Pointer[offsets]
}

// offsets are distances from the monotonic clock, in nanoseconds.
type offsets struct {
	boot, wall int64
	from, to   int64 // by the monotonic clock: when they were measured, and until when they are used
}

const (
	maxAge  = int64(100 * time.Millisecond)
	maxStep = int64(time.Millisecond)      // of the wall clock: two readings are not of the same moment
	maxRead = int64(50 * time.Microsecond) // for a measurement; in longer ones the process was not scheduled
)

func (d *derived) now() Instant {
	mono, wall := d.clocks()
	if o := d.known.Load(); o != nil && mono >= o.from && mono < o.to {
		if step := wall - mono - o.wall; -maxStep < step && step < maxStep {
			return Instant(mono + o.boot)
		}
	}
	return d.measure()
}

func (d *derived) measure() Instant {
	old := d.known.Load()
	for range 3 {
		mono, wall := d.clocks()
		boot := d.read()
		if after, _ := d.clocks(); after-mono > maxRead {
			continue
		}
		now := &offsets{boot: boot - mono, wall: wall - mono, from: mono, to: mono + maxAge}
		if old != nil && old.boot-maxRead <= now.boot && now.boot < old.boot {
			now.boot = old.boot // the time between the two readings, not a clock that goes back
		}
		if !d.known.CompareAndSwap(old, now) {
			return d.now()
		}
		return Instant(mono + now.boot)
	}
	boot := d.read()
	if old == nil {
		return Instant(boot)
	}
	mono, _ := d.clocks()
	return Instant(max(boot, min(boot+maxRead, mono+old.boot))) // not before what others returned
}
