package worker

import (
	"testing"

	"onejob/tasks"
)

// Suspects begin in batches that double while nothing happens; those past the limit one
// by one.
func TestSuspects(t *testing.T) {
	t.Parallel()
	var s suspects
	next := int64(0)
	enter := func(prime bool) bool { next++; return s.enter(next, next, prime) }
	later := func() {
		s.since = s.since.Add(-tasks.SuspectTime)
		for fence, at := range s.began {
			s.began[fence] = at.Add(-tasks.SuspectTime)
		}
	}
	for _, want := range []int{1, 2, 4, 8} {
		n := 0
		for enter(false) {
			n++
		}
		if n != want {
			t.Errorf("%d began in a window, want %d", n, want)
		}
		later()
	}
	if !enter(true) || enter(true) || enter(false) {
		t.Error("one past the limit does not have a window of its own")
	}
	later()
	if !enter(false) || enter(true) {
		t.Error("one past the limit began beside another")
	}

	for range 4 { // nobody has come for a minute
		later()
	}
	if !enter(false) || enter(false) {
		t.Error("after a long time suspects do not begin one by one")
	}

	var lone suspects
	if lone.only(1) || !lone.enter(1, 1, false) || !lone.only(1) || lone.only(2) {
		t.Error("the only suspect is not known as such")
	}
	lone.batch, lone.left = 2, 1
	if !lone.enter(2, 2, false) || lone.only(1) || lone.only(2) {
		t.Error("one of two is called the only one")
	}
	lone.leave(2, 2, false)
	if !lone.only(1) {
		t.Error("one that has left still counts")
	}
}

// Suspects lose their leases together, and end one after the other: the last one is not the only one.
func TestSuspectsThatLoseTheirLeasesTogether(t *testing.T) {
	t.Parallel()
	var s suspects
	if !s.enter(101, 1, false) {
		t.Fatal("the first one does not begin")
	}
	s.batch, s.left = 2, 1
	if !s.enter(102, 2, false) {
		t.Fatal("the second one does not begin")
	}
	s.leave(101, 1, true)
	if s.only(2) {
		t.Error("the one that ends last is called the only one")
	}
	s.lost[101] = s.lost[101].Add(-2 * tasks.SuspectTime)
	if !s.only(2) {
		t.Error("one that lost its lease long ago counts")
	}
	s.enter(103, 3, false)
	if len(s.lost) > 0 {
		t.Errorf("those of long ago are kept: %v", s.lost)
	}

	// A task does not speak for itself by an attempt of before.
	s = suspects{}
	s.enter(104, 4, false)
	s.leave(104, 4, true)
	s.since = s.since.Add(-tasks.SuspectTime)
	if !s.enter(104, 5, false) || !s.only(5) {
		t.Error("a suspect that comes again is not the only one")
	}
}
