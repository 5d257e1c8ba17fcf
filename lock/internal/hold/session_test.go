package hold

import (
	"errors"
	"testing"
	"time"

	"onejob/boottime"
	"onejob/lock"
)

func TestDeadlines(t *testing.T) {
	session := func(check, ttl, silence boottime.Instant) *Session {
		s := NewSession(nil, nil)
		s.deadlines[Check], s.deadlines[TTL], s.deadlines[Silence] = check, ttl, silence
		return s
	}
	t.Run("the earlier deadline counts", func(t *testing.T) {
		for _, test := range []struct {
			s    *Session
			want boottime.Instant
		}{
			{session(10, 20, never), 10},
			{session(20, 10, never), 10},
			{session(never, 10, never), 10},
			{session(20, 30, 10), 10},
		} {
			if got := test.s.until(); got != test.want {
				t.Errorf("%v ends at %d, want %d", test.s.deadlines, got, test.want)
			}
		}
	})
	t.Run("it is extended while it lasts", func(t *testing.T) {
		s := session(10, 20, never)
		if !s.extend(Check, 9, 15) || s.until() != 15 {
			t.Errorf("it ends at %d, want 15", s.until())
		}
		if !s.extend(Check, 9, 25) || s.until() != 20 {
			t.Errorf("it ends at %d, want 20, when the session does", s.until())
		}
	})
	t.Run("it is never shortened by an answer out of order", func(t *testing.T) {
		s := session(10, 20, never)
		if !s.extend(Check, 5, 8) || s.until() != 10 {
			t.Errorf("it ends at %d, want 10", s.until())
		}
	})
	t.Run("a late answer never revives it", func(t *testing.T) {
		for _, now := range []boottime.Instant{10, 11, 30} {
			s := session(10, 20, never)
			if s.extend(Check, now, 100) {
				t.Errorf("the check's answer at %d extended it", now)
			}
			if s.extend(TTL, now, 100) {
				t.Errorf("the session's answer at %d extended it, though the check's deadline had passed", now)
			}
			if s.until() != 10 {
				t.Errorf("it ends at %d, want 10", s.until())
			}
		}
	})
	t.Run("what ended it stays", func(t *testing.T) {
		s := session(never, never, never)
		if first, second := s.Lose(lock.ErrLost), s.Lose(errors.New("again")); !first || second {
			t.Errorf("it was lost for the first time: %t, and then %t", first, second)
		}
		at := s.Deadline()
		if !at.Passed() || s.Extend(Check, lock.Timing{TTL: time.Hour}, boottime.Now()) || s.Deadline() != at {
			t.Errorf("it ends at %d, want %d", s.Deadline(), at)
		}
		if !errors.Is(s.Lost(), lock.ErrLost) {
			t.Errorf("it was lost by %v", s.Lost())
		}
	})
	t.Run("a pause makes all deadlines come sooner", func(t *testing.T) {
		s := session(100, 200, never)
		s.clock.total = 40
		s.age()
		if want := [signs]boottime.Instant{Check: 60, TTL: 160, Silence: never}; s.deadlines != want {
			t.Errorf("the deadlines are %v, want %v", s.deadlines, want)
		}
		s.clock.total = 80
		if s.until() != 20 || s.extend(Check, 55, 1000) || s.extend(TTL, 55, 1000) {
			t.Errorf("it was extended: %v", s.deadlines)
		}
	})
	t.Run("without a check the session alone counts for ever", func(t *testing.T) {
		s := session(never, 10, never)
		const year = boottime.Instant(365 * 24 * 3600 * 1e9)
		if !s.extend(TTL, 9, year) || !s.extend(TTL, year-1, 2*year) || s.until() != 2*year {
			t.Errorf("it ends at %d, want %d", s.until(), 2*year)
		}
	})
}

func TestJump(t *testing.T) {
	timing := lock.Timing{TTL: time.Hour, Margin: time.Minute}
	ahead, noticed := time.Duration(0), time.Duration(0)
	s := NewSession(func() (time.Duration, bool) { return ahead, true }, func(jump time.Duration) { noticed += jump })
	below := s.Below()
	sent := boottime.Now()
	s.Begin(TTL, timing, sent)
	below.Begin(TTL, timing, sent)
	ahead = 2 * time.Second
	s.clock.looked = 0 // it is some time later
	if got, want := s.Deadline(), sent.Add(59*time.Minute-ahead); got != want || noticed != ahead {
		t.Errorf("after a jump of %v, of which %v was noticed, it ends at %d, want %d", ahead, noticed, got, want)
	}
	if got := below.Deadline(); got != s.Deadline() {
		t.Errorf("the one below ends at %d, want %d", got, s.Deadline())
	}
	far := lock.Timing{TTL: 2 * time.Hour}
	if before := s.Deadline(); !s.Extend(TTL, far, sent) || s.Deadline() != before {
		t.Error("what was sent before it has extended the session")
	}
	if !s.Extend(TTL, far, boottime.Now()) || s.Deadline().Until() < time.Hour {
		t.Error("what was sent after it has not extended the session")
	}
	late := s.Below()
	if late.Begin(TTL, far, sent); !late.Deadline().Passed() {
		t.Error("a session that was created before it is believed in")
	}
}

func TestBelow(t *testing.T) {
	s := NewSession(nil, nil)
	one, two := s.Below(), s.Below()
	if one.Lose(lock.ErrLost); s.Lost() != nil || two.Lost() != nil || !one.Deadline().Passed() {
		t.Errorf("one was lost, and with it: %v, %v", s.Lost(), two.Lost())
	}
	if s.Lose(lock.ErrLost); two.Lost() == nil || !two.Deadline().Passed() {
		t.Error("two outlives the one above")
	}
}
