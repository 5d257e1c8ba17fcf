package schedule_test

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"onejob/tasks/schedule"
)

// FuzzSchedule checks that a cron line is refused or has due times that rise.
func FuzzSchedule(f *testing.F) {
	for _, seed := range []string{"30 2 * * *", "*/7 * * * * *", "0 0 30 2 *", "@hourly", "@every 90s", "0 0 29 2 1", "TZ=UTC 0 0 * * *", "@every 1ms", "60 * * * *"} {
		f.Add(seed, "Europe/Berlin", int64(1774746000))
		f.Add(seed, "Australia/Lord_Howe", int64(1775311200))
	}
	f.Fuzz(func(t *testing.T, line, zone string, at int64) {
		const year2200 = 7258118400
		if at %= year2200; at < 0 {
			at = -at
		}
		s, err := schedule.Parse(line, zone)
		if err != nil {
			if utf8.ValidString(line) && err.Error() == "" {
				t.Errorf("%q in %q is refused without a word", line, zone)
			}
			return
		}
		last := time.Unix(at, 0)
		for range 5 {
			next := s.Next(last)
			if next.IsZero() {
				return
			}
			if !next.After(last) {
				t.Fatalf("%q in %s: after %v comes %v", line, zone, last, next)
			}
			// Asked a second before, or just before, it gives the same answer.
			for _, d := range []time.Duration{time.Second, time.Nanosecond} {
				if before := s.Next(next.Add(-d)); !strings.HasPrefix(line, "@every") && !before.Equal(next) {
					t.Fatalf("%q in %s: after %v comes %v, not %v", line, zone, next.Add(-d), before, next)
				}
			}
			last = next
		}
	})
}
