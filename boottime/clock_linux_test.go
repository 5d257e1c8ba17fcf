//go:build !simulate

package boottime

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// A machine whose clocks a test moves.
type machine struct {
	mono, suspended, wallSet time.Duration
	slow                     time.Duration // how long a reading of CLOCK_BOOTTIME takes
	reads                    int
}

func (m *machine) clock() *derived {
	return &derived{
		clocks: func() (mono, wall int64) {
			return int64(m.mono), int64(50*365*24*time.Hour + m.mono + m.suspended + m.wallSet)
		},
		read: func() int64 {
			m.reads++
			m.mono += m.slow / 2
			at := m.mono + m.suspended
			m.mono += m.slow - m.slow/2
			return int64(at)
		},
	}
}

func TestDerivedClock(t *testing.T) {
	for _, test := range []struct {
		name  string
		step  func(*machine)
		late  time.Duration // by how much the clock may be behind at once
		reads int           // of CLOCK_BOOTTIME for it
	}{
		{"time passes", func(m *machine) { m.mono += 10 * time.Millisecond }, 0, 0},
		{"much time passes", func(m *machine) { m.mono += time.Second }, 0, 1},
		{"a suspension", func(m *machine) { m.suspended += 10 * time.Second }, 0, 1},
		{"a short suspension", func(m *machine) { m.suspended += 2 * time.Millisecond }, 0, 1},
		{"the wall clock is set ahead", func(m *machine) { m.wallSet += time.Hour }, 0, 1},
		{"the wall clock is set back", func(m *machine) { m.wallSet -= time.Hour }, 0, 1},
		{"a suspension, and the wall clock is set back by half", func(m *machine) { m.suspended += 10 * time.Second; m.wallSet -= 5 * time.Second }, 0, 1},
		{"a suspension that a wall clock hides", func(m *machine) { m.suspended += 10 * time.Second; m.wallSet -= 10 * time.Second }, 10 * time.Second, 0},
		{"it hides it no longer than this", func(m *machine) {
			m.suspended += 10 * time.Second
			m.wallSet -= 10 * time.Second
			m.mono += time.Duration(maxAge)
		}, 0, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := &machine{mono: time.Second}
			c := m.clock()
			c.now()
			m.reads = 0
			before := c.now()
			test.step(m)
			now, want := c.now(), Instant(m.mono+m.suspended)
			if late := want.Sub(now); late != test.late {
				t.Errorf("the clock is %v late, want %v", late, test.late)
			}
			if now < before {
				t.Errorf("it went back by %v", before.Sub(now))
			}
			if m.reads != test.reads {
				t.Errorf("CLOCK_BOOTTIME was read %d times, want %d", m.reads, test.reads)
			}
		})
	}
}

// A reading during which the process was not scheduled says nothing about the distance of
// the clocks, and is not kept.
func TestDerivedClockKeepsNoSlowReading(t *testing.T) {
	m := &machine{mono: time.Second, slow: time.Millisecond}
	c := m.clock()
	for range 3 {
		if now, is := c.now(), Instant(m.mono+m.suspended); now > is || is.Sub(now) > m.slow {
			t.Errorf("the clock is %v, want %v or a little less", now, is)
		}
	}
	if c.known.Load() != nil {
		t.Error("a slow reading was kept")
	}
}

// Readings take time, and so measurements of the same distance differ.
func TestDerivedClockNeverGoesBack(t *testing.T) {
	m := &machine{mono: time.Second}
	c := m.clock()
	var last Instant
	for i := range 10_000 {
		m.slow = time.Duration(i%7) * 10 * time.Microsecond // the longest are not kept
		m.mono += time.Duration(i%5) * 40 * time.Millisecond
		if i%100 == 0 {
			m.suspended += time.Duration(i%3) * time.Second
		}
		now := c.now()
		if now < last {
			t.Fatalf("step %d: the clock went back by %v", i, last.Sub(now))
		}
		if off := now.Sub(Instant(m.mono + m.suspended)); off.Abs() > 2*time.Duration(maxRead) {
			t.Fatalf("step %d: the clock is off by %v", i, off)
		}
		last = now
	}
}

// The clock of this machine, read by many at once, is CLOCK_BOOTTIME.
func TestNow(t *testing.T) {
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			var last Instant
			for until := time.Now().Add(500 * time.Millisecond); time.Now().Before(until); {
				before := Instant(read())
				now := Now()
				after := Instant(read())
				if now.Sub(before) < -2*time.Millisecond || now.Sub(after) > 2*time.Millisecond {
					t.Errorf("the clock is %v, CLOCK_BOOTTIME was %v before and %v after", now, before, after)
					return
				}
				if now < last {
					t.Errorf("it went back by %v", last.Sub(now))
					return
				}
				last = now
			}
		})
	}
	group.Wait()
}

// Time for which the machine was suspended counts. A time namespace stands for it: in it
// CLOCK_BOOTTIME is ahead, as after a suspension, and CLOCK_MONOTONIC is not.
func TestNowCountsSuspendedTime(t *testing.T) {
	const asks = "BOOTTIME_TEST_NOW"
	if os.Getenv(asks) != "" {
		t.Logf("now=%d", Now())
		return
	}
	if out, err := exec.Command("unshare", "--time", "true").CombinedOutput(); err != nil {
		t.Skipf("this needs the right to make a time namespace: %s", out)
	}
	const suspended = 1000 * time.Second
	cmd := exec.Command("unshare", "--time", "--boottime", strconv.Itoa(int(suspended.Seconds())), "--fork", "--",
		os.Args[0], "-test.run=^TestNowCountsSuspendedTime$", "-test.v")
	cmd.Env = append(os.Environ(), asks+"=1")
	before := Now()
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	after := Now()
	_, text, _ := strings.Cut(string(out), "now=")
	number, _, _ := strings.Cut(text, "\n")
	ns, err := strconv.ParseInt(number, 10, 64)
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	now := Instant(ns)
	if now.Before(before.Add(suspended-time.Second)) || after.Add(suspended+time.Second).Before(now) {
		t.Errorf("the clock is %v ahead after %v of suspension", now.Sub(before), suspended)
	}
}

func BenchmarkNow(b *testing.B) {
	b.Run("now", func(b *testing.B) {
		for b.Loop() {
			Now()
		}
	})
	b.Run("kernel", func(b *testing.B) {
		for b.Loop() {
			read()
		}
	})
}
