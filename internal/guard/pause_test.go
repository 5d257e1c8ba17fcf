//go:build linux

package guard

import (
	"testing"
	"time"

	"onejob/boottime"
)

// TestPause pauses the machine, as far as a guard can see it: the wall clock jumps ahead
// of the time since the boot.
func TestPause(t *testing.T) {
	t.Parallel()
	var ahead time.Duration
	k := &reaper{deadline: boottime.Now().Add(20 * time.Minute), killAt: boottime.Now().Add(20 * time.Minute)}
	k.clocks.Source = func() (time.Duration, bool) { return ahead, true }
	k.look()
	ahead += 10 * time.Minute
	if k.look(); k.deadline.Passed() || k.deadline.Until() > 10*time.Minute || k.killAt.Until() > 10*time.Minute {
		t.Errorf("after a pause of 10m the deadline is %v away, and the kill %v", k.deadline.Until(), k.killAt.Until())
	}
	later := boottime.Now().Add(20 * time.Minute)
	k.obey(order{Deadline: &later})
	ahead -= time.Hour
	if k.look(); k.deadline != later {
		t.Errorf("after the wall clock was set back, the deadline is %v away", k.deadline.Until())
	}
	ahead += 30 * time.Minute
	if k.look(); !k.deadline.Passed() {
		t.Errorf("after a pause of 30m the deadline is %v away", k.deadline.Until())
	}
	k.obey(order{Deadline: &later})
	if !k.deadline.Passed() {
		t.Error("it was revived")
	}
}
