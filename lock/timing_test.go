package lock_test

import (
	"testing"
	"time"

	"onejob/boottime"
	"onejob/lock"
)

func TestTimingCheck(t *testing.T) {
	const s = time.Second
	for _, test := range []struct {
		name   string
		timing lock.Timing
		want   string
	}{
		{"the defaults of the check", lock.Timing{TTL: 5 * s, Heartbeat: s, Margin: s}, ""},
		{"the defaults of the session", lock.Timing{TTL: 15 * s, Heartbeat: 5 * s, Margin: s}, ""},
		{"just room for a lost heartbeat", lock.Timing{TTL: 3 * s, Heartbeat: s, Margin: s}, ""},
		{"no room for a lost heartbeat", lock.Timing{TTL: 3*s - 1, Heartbeat: s, Margin: s},
			"x: a lease lasts TTL 2.999999999s - margin 1s = 1.999999999s after a heartbeat, which leaves no room for a lost one every 1s: it must be at least twice the heartbeat, 2s"},
		{"a margin above the TTL", lock.Timing{TTL: s, Heartbeat: s, Margin: 2 * s},
			"x: a lease lasts TTL 1s - margin 2s = -1s after a heartbeat, which leaves no room for a lost one every 1s: it must be at least twice the heartbeat, 2s"},
		{"no margin", lock.Timing{TTL: 5 * s, Heartbeat: s},
			"x: TTL 5s, heartbeat 1s and margin 0s must all be above zero"},
		{"no heartbeat", lock.Timing{TTL: 5 * s, Margin: s},
			"x: TTL 5s, heartbeat 0s and margin 1s must all be above zero"},
		{"a TTL below zero", lock.Timing{TTL: -s, Heartbeat: s, Margin: s},
			"x: TTL -1s, heartbeat 1s and margin 1s must all be above zero"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := ""
			if err := test.timing.Check("x"); err != nil {
				got = err.Error()
			}
			if got != test.want {
				t.Errorf("got error  %q\nwant error %q", got, test.want)
			}
		})
	}
}

func TestTimingDeadline(t *testing.T) {
	timing := lock.Timing{TTL: 5 * time.Second, Heartbeat: time.Second, Margin: time.Second}
	if got, want := timing.Deadline(100), boottime.Instant(100+4*time.Second); got != want {
		t.Errorf("a lease whose heartbeat was sent at 100 ns ends at %d, want %d", got, want)
	}
	if got, want := timing.Slack(), 3*time.Second; got != want {
		t.Errorf("the slack is %v, want %v", got, want)
	}
}
