package worker

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"onejob/boottime"
	"onejob/tasks"
)

// Rows that name a limit, and those that have it by their kind, come in turns under each limit, also if
// claims under several limits come in turns.
func TestTurnsUnderEachLimit(t *testing.T) {
	s := newServing(tasks.Kinds{"a": nil, "b": nil}, nil, map[string]string{"a": "one", "b": "two"})
	got := map[string][]bool{}
	l := &limits{
		config: func() *serving { return s },
		claim: func(_ context.Context, limit string, c tasks.Claim) (*tasks.Task, bool) {
			got[limit] = append(got[limit], c.Limit != "")
			return &tasks.Task{}, false
		},
	}
	for range 4 {
		for limit := range s.under {
			l.claimUnder(t.Context(), limit)
		}
	}
	for limit, named := range got {
		if !slices.Equal(named, []bool{true, false, true, false}) {
			t.Errorf("of %s, claims for rows that name it: %v", limit, named)
		}
	}
	if len(got) != 2 {
		t.Errorf("claims were under %v", got)
	}
}

// Pauses grow. News ends the second half of one, and a lock key that comes free all that is left of
// it, but never before leastPause.
func TestPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &limits{pauses: map[string]time.Duration{}, stirred: make(chan struct{}), came: make(chan struct{})}
		pause := func(after time.Duration, what func()) time.Duration {
			began := time.Now()
			if what != nil {
				time.AfterFunc(after, what)
			}
			l.pause(t.Context(), "limit")
			synctest.Wait()
			return time.Since(began).Round(time.Millisecond)
		}
		key, other := func() { l.attempted(true) }, func() { l.attempted(false) }
		for _, c := range []struct {
			after, want time.Duration
			what        func()
		}{
			{0, 50, nil}, {0, 100, nil}, {0, 200, nil}, {0, 400, nil}, {0, 800, nil}, {0, 1000, nil}, {0, 1000, nil},
			{700, 700, l.stir}, {10, 500, l.stir}, {500, 1000, other}, // and they stay long
			{300, 300, key}, {0, 50, nil}, {0, 100, nil}, {10, 50, key}, {0, 50, nil},
		} {
			if got := pause(c.after*time.Millisecond, c.what); got != c.want*time.Millisecond {
				t.Fatalf("a pause with news after %d ms took %v, want %d ms", c.after, got, c.want)
			}
		}
		l.claimed("limit")
		if got := pause(0, nil); got != leastPause {
			t.Errorf("the pause after a claim took %v, want %v", got, leastPause)
		}
	})
}

// endsAt is a lease that nothing extends.
type endsAt struct {
	freeLease
	at boottime.Instant
}

func (l endsAt) Deadline() boottime.Instant { return l.at }

// A slot may be lost while the lock is kept. What a command's guard gets is the end of
// whichever comes first.
func TestDeadlineUnderASlot(t *testing.T) {
	for _, c := range []struct{ lock, slot, want boottime.Instant }{{1, 2, 1}, {2, 1, 1}, {3, 3, 3}} {
		if got := newUnderSlot(endsAt{at: c.lock}, endsAt{at: c.slot}).Deadline(); got != c.want {
			t.Errorf("the lock until %d and the slot until %d: the deadline is %d, want %d", c.lock, c.slot, got, c.want)
		}
	}
}
