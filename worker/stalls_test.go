package worker

import (
	"errors"
	"testing"
	"time"

	"onejob/boottime"
	"onejob/lock"
	"onejob/tasks"
)

func TestStalls(t *testing.T) {
	t.Parallel()
	var s stalls
	if s.lately() {
		t.Error("a process that has just begun has stalled")
	}
	s.look()
	if s.lately() {
		t.Error("a process that runs has stalled")
	}
	s.tick = time.Now().Add(-stallTime - time.Second) // as if it had not run since
	for range 2 {
		if !s.lately() {
			t.Error("a stall went unnoticed")
		}
	}
	s.at = s.at.Add(-stallMemory)
	if s.lately() {
		t.Error("a stall is not forgotten")
	}
}

// A lease that is lost because the replica did not run is held against the task; one
// that is lost because nobody answered is not.
func TestStallsAreHeldAgainstTheTask(t *testing.T) {
	t.Parallel()
	lost := errors.Join(lock.ErrLost)
	for _, test := range []struct {
		stalled         bool
		crashes, stalls int
		beside          bool // another task that the next stall would quarantine
		most            int  // crashes and stalls
		next            tasks.Status
	}{
		{false, 2, 2, false, 3, tasks.StatusPending},
		{true, 0, 1, false, 3, tasks.StatusPending},
		{true, 0, 2, false, 3, tasks.StatusFailed},
		{true, 1, 1, false, 3, tasks.StatusFailed},
		{true, 0, 2, true, 3, tasks.StatusPending}, // either may be why
		{true, 0, 0, true, 1, tasks.StatusFailed},  // nobody may stall once
	} {
		w := Worker{cfg: Config{MaxCrashes: test.most, Replica: "r"}}
		if test.stalled {
			w.stalls.tick = time.Now().Add(-time.Minute)
		}
		if test.beside { // it has lost its lease a moment ago
			w.suspects.lost = map[int64]boottime.Instant{1: boottime.Now()}
		}
		w.suspects.enter(0, 0, false)
		e := w.judge(&tasks.Task{Attempt: 1, MaxAttempts: 5, Crashes: test.crashes, Stalls: test.stalls}, tasks.Result{}, lost, lost)
		if e.Next != test.next || e.Stalled != test.stalled || e.Outcome != tasks.LeaseLost {
			t.Errorf("%+v: %+v", test, e)
		}
	}
}
