package consul

import (
	"testing"

	"onejob/boottime"
)

func TestLeaseWindow(t *testing.T) {
	t.Run("the earlier deadline counts", func(t *testing.T) {
		for _, test := range []struct {
			leaseWindow leaseWindow
			want        boottime.Instant
		}{
			{leaseWindow{check: 10, session: 20, silence: never}, 10},
			{leaseWindow{check: 20, session: 10, silence: never}, 10},
			{leaseWindow{check: never, session: 10, silence: never}, 10},
			{leaseWindow{check: 20, session: 30, silence: 10}, 10},
		} {
			if got := test.leaseWindow.until(); got != test.want {
				t.Errorf("%+v ends at %d, want %d", test.leaseWindow, got, test.want)
			}
		}
	})
	t.Run("it is extended while it lasts", func(t *testing.T) {
		tr := leaseWindow{check: 10, session: 20, silence: never}
		if !tr.extend(&tr.check, 9, 15) || tr.until() != 15 {
			t.Errorf("it ends at %d, want 15", tr.until())
		}
		if !tr.extend(&tr.check, 9, 25) || tr.until() != 20 {
			t.Errorf("it ends at %d, want 20, when the session does", tr.until())
		}
	})
	t.Run("it is never shortened by an answer out of order", func(t *testing.T) {
		tr := leaseWindow{check: 10, session: 20, silence: never}
		if !tr.extend(&tr.check, 5, 8) || tr.until() != 10 {
			t.Errorf("it ends at %d, want 10", tr.until())
		}
	})
	t.Run("a late answer never revives it", func(t *testing.T) {
		for _, now := range []boottime.Instant{10, 11, 30} {
			tr := leaseWindow{check: 10, session: 20, silence: never}
			if tr.extend(&tr.check, now, 100) {
				t.Errorf("the check's answer at %d extended it", now)
			}
			if tr.extend(&tr.session, now, 100) {
				t.Errorf("the session's answer at %d extended it, though the check's deadline had passed", now)
			}
			if tr.until() != 10 {
				t.Errorf("it ends at %d, want 10", tr.until())
			}
		}
	})
	t.Run("what ended it stays", func(t *testing.T) {
		tr := leaseWindow{check: 10, session: 20, silence: never}
		tr.end(5)
		tr.end(7)
		if tr.until() != 5 || tr.extend(&tr.check, 5, 100) || tr.until() != 5 {
			t.Errorf("it ends at %d, want 5", tr.until())
		}
	})
	t.Run("a pause makes all deadlines come sooner", func(t *testing.T) {
		tr := leaseWindow{check: 100, session: 200, silence: never}
		tr.age(50, 40)
		if tr.check != 60 || tr.session != 160 || tr.silence != never || tr.jumped != 50 {
			t.Errorf("got %+v", tr)
		}
		tr.age(55, 40)
		if tr.until() != 20 || tr.extend(&tr.check, 55, 1000) || tr.extend(&tr.session, 55, 1000) {
			t.Errorf("it was extended: %+v", tr)
		}
	})
	t.Run("without a check the session alone counts for ever", func(t *testing.T) {
		tr := leaseWindow{check: never, session: 10, silence: never}
		const year = boottime.Instant(365 * 24 * 3600 * 1e9)
		if !tr.extend(&tr.session, 9, year) || !tr.extend(&tr.session, year-1, 2*year) || tr.until() != 2*year {
			t.Errorf("it ends at %d, want %d", tr.until(), 2*year)
		}
	})
}
