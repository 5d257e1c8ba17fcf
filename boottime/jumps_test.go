package boottime

import (
	"testing"
	"time"
)

func TestJumps(t *testing.T) {
	const start = 50 * 365 * 24 * time.Hour
	ahead, ok := time.Duration(start), true
	j := Jumps{Source: func() (time.Duration, bool) { return ahead, ok }}
	for _, step := range []struct {
		name        string
		moved, want time.Duration
		blind       bool
	}{
		{"the first look", 0, 0, false},
		{"nothing", 0, 0, false},
		{"NTP slews", Noise, 0, false},
		{"NTP slews on", Noise, 0, false},
		{"a pause", 7 * time.Second, 7 * time.Second, false},
		{"it is noticed once", 0, 0, false},
		{"the wall clock is set back", -2 * time.Hour, 0, false},
		{"and right again", 2 * time.Hour, 2 * time.Hour, false},
		{"not measured", 3 * time.Second, 0, true},
		{"measured later", 0, 3 * time.Second, false},
		{"the wall clock is years behind", -start, 0, false},
		{"and set right", start, start, false},
	} {
		ahead += step.moved
		ok = !step.blind
		if got := j.Since(); got != step.want {
			t.Errorf("%s: a jump of %v, want %v", step.name, got, step.want)
		}
	}
}

func TestAheadIsMeasured(t *testing.T) {
	for range 1000 {
		if ahead, ok := Ahead(); ok {
			if wall := time.Unix(0, int64(Now())).Add(ahead); time.Since(wall).Abs() > time.Hour {
				t.Errorf("the wall clock would be %v", wall)
			}
			return
		}
	}
	t.Error("it was never measured")
}
