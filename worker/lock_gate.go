package worker

import (
	"errors"
	"sync"
	"time"

	"onejob/lock"
)

// A lockGate lets tasks in only while locks can be had. When one fails for a reason that is
// not the task's, because Consul is unavailable or refuses, all would, and each would be
// claimed and requeued again and again. So from then on one task is claimed a second,
// until Consul answers. Whether the reason is the task's, a lock that is no task's shows.
type lockGate struct {
	mu     sync.Mutex
	closed bool
	next   time.Time // when one may pass

	probing sync.Mutex
	had     bool // the last probe
	probed  time.Time
}

// probePatience is how long a probe may take.
const probePatience = 2 * time.Second

// probe returns what ask returns, which it calls once a second at most.
func (d *lockGate) probe(ask func() bool) bool {
	d.probing.Lock()
	defer d.probing.Unlock()
	if d.probed.IsZero() || time.Since(d.probed) >= probeEvery {
		d.had = ask()
		d.probed = time.Now()
	}
	return d.had
}

// probeEvery is how often a task is claimed to see whether locks can be had again.
const probeEvery = time.Second

// pass returns how many of n tasks may be claimed now.
func (d *lockGate) pass(n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch now := time.Now(); {
	case !d.closed:
		return n
	case n == 0 || now.Before(d.next):
		return 0
	default:
		d.next = now.Add(probeEvery)
		return 1
	}
}

// unused says that a claim which passed has found no task: another may pass at once, so that claims
// that find nothing, as those of a limit whose lock keys are all held, keep no others from asking.
func (d *lockGate) unused() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.next = time.Now()
}

// close reports whether it was open.
func (d *lockGate) close() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return false
	}
	d.closed, d.next = true, time.Now().Add(probeEvery)
	return true
}

// answered reports whether Consul has answered an attempt to lock. That somebody else holds a lock
// is an answer, too. What this replica knows by itself is none: it does not ask for a lock about which
// a request was not answered.
func answered(err error) bool {
	return err == nil || errors.Is(err, lock.ErrDelayed) || errors.Is(err, lock.ErrHeld) && !errors.Is(err, lock.ErrHeldHere)
}

// seen takes in Consul's answer to an attempt to lock, and reports whether that has
// opened the door again.
func (d *lockGate) seen(err error) bool {
	if !answered(err) {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	was := d.closed
	d.closed = false
	return was
}
