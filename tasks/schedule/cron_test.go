package schedule_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"onejob/tasks/schedule"
)

// walk is what Cron must agree with, without asking it: it goes through the
// system's zoneinfo minute by minute and looks at the wall.
func walk(from, to time.Time, zone *time.Location, matches func(wall time.Time) bool) (due []time.Time) {
	read := func(t time.Time) time.Time { // a wall clock as a time of UTC
		l := t.In(zone)
		return time.Date(l.Year(), l.Month(), l.Day(), l.Hour(), l.Minute(), 0, 0, time.UTC)
	}
	last := read(from)
	latest := last // the latest that the wall has shown
	for t := from.Add(time.Minute); !t.After(to); t = t.Add(time.Minute) {
		wall := read(t)
		fires := wall.After(latest) && matches(wall)
		for skipped := last.Add(time.Minute); skipped.Before(wall); skipped = skipped.Add(time.Minute) {
			fires = fires || skipped.After(latest) && matches(skipped)
		}
		if fires {
			due = append(due, t)
		}
		last = wall
		if wall.After(latest) {
			latest = wall
		}
	}
	return due
}

func TestScheduleAgreesWithTheWall(t *testing.T) {
	t.Parallel()
	lines := []struct {
		line    string
		matches func(w time.Time) bool
	}{
		{"30 2 * * *", func(w time.Time) bool { return w.Hour() == 2 && w.Minute() == 30 }},
		{"0 2 * * *", func(w time.Time) bool { return w.Hour() == 2 && w.Minute() == 0 }},
		{"0 3 * * *", func(w time.Time) bool { return w.Hour() == 3 && w.Minute() == 0 }},
		{"15 0 * * *", func(w time.Time) bool { return w.Hour() == 0 && w.Minute() == 15 }},
		{"*/20 * * * *", func(w time.Time) bool { return w.Minute()%20 == 0 }},
		{"5 1-3 * * *", func(w time.Time) bool { return w.Minute() == 5 && w.Hour() >= 1 && w.Hour() <= 3 }},
		{"@hourly", func(w time.Time) bool { return w.Minute() == 0 }},
		{"@daily", func(w time.Time) bool { return w.Hour() == 0 && w.Minute() == 0 }},
		{"59 23 30 12 *", func(w time.Time) bool {
			return w.Hour() == 23 && w.Minute() == 59 && w.Day() == 30 && w.Month() == 12
		}},
		{"0 12 * * 5", func(w time.Time) bool { return w.Hour() == 12 && w.Minute() == 0 && w.Weekday() == time.Friday }},
		{"0 0 1,15 * 1", func(w time.Time) bool { // either day field is enough when both are given
			return w.Hour() == 0 && w.Minute() == 0 && (w.Day() == 1 || w.Day() == 15 || w.Weekday() == time.Monday)
		}},
	}
	changes := []struct{ zone, around string }{
		{"Europe/Berlin", "2026-03-29"},
		{"Europe/Berlin", "2026-10-25"},
		{"America/New_York", "2026-03-08"},
		{"America/New_York", "2026-11-01"},
		{"Australia/Lord_Howe", "2026-04-05"}, // half an hour
		{"Australia/Lord_Howe", "2026-10-04"},
		{"Pacific/Apia", "2011-12-30"},      // a day that never was
		{"America/Sao_Paulo", "2018-11-04"}, // the gap begins at midnight
		{"America/Havana", "2026-03-08"},
		{"Africa/Casablanca", "2026-02-15"},
		{"Asia/Kathmandu", "1986-01-01"}, // a quarter of an hour
		{"UTC", "2026-03-29"},
	}
	for _, change := range changes {
		zone, err := time.LoadLocation(change.zone)
		if err != nil {
			t.Fatal(err)
		}
		day, err := time.Parse(time.DateOnly, change.around)
		if err != nil {
			t.Fatal(err)
		}
		from, to := day.AddDate(0, 0, -4), day.AddDate(0, 0, 4)
		for _, l := range lines {
			s, err := schedule.Parse(l.line, change.zone)
			if err != nil {
				t.Fatal(err)
			}
			var got []time.Time
			for next := s.Next(from); !next.IsZero() && !next.After(to); next = s.Next(next) {
				got = append(got, next)
			}
			if want := walk(from, to, zone, l.matches); list(got, zone) != list(want, zone) {
				t.Errorf("%s in %s around %s:\n got %s\nwant %s", l.line, change.zone, change.around, list(got, zone), list(want, zone))
			}
			// From any moment the answer is the same, not only from due times.
			for at := from; at.Before(to); at = at.Add(7 * time.Minute) {
				next := s.Next(at)
				want := time.Time{}
				for _, d := range got {
					if d.After(at) {
						want = d
						break
					}
				}
				if !want.IsZero() && !next.Equal(want) {
					t.Fatalf("%s in %s after %v: got %v, want %v", l.line, change.zone, at.In(zone), next.In(zone), want.In(zone))
				}
			}
		}
	}
}

func list(times []time.Time, zone *time.Location) string {
	var b strings.Builder
	for _, t := range times {
		fmt.Fprintf(&b, "%s, ", t.In(zone).Format("Mon 2006-01-02 15:04 -0700"))
	}
	return b.String()
}

func TestScheduleByExample(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ line, zone, after, want string }{
		{"30 2 * * *", "Europe/Berlin", "2026-03-28T12:00:00+01:00", "2026-03-29T03:00:00+02:00"}, // left out: after the gap
		{"30 2 * * *", "Europe/Berlin", "2026-03-29T03:00:00+02:00", "2026-03-30T02:30:00+02:00"}, // and not again
		{"30 2 * * *", "Europe/Berlin", "2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"}, // shown twice: once
		{"30 2 * * *", "Europe/Berlin", "2026-10-25T02:00:00+01:00", "2026-10-26T02:30:00+01:00"}, // even when asked in between
		{"15 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00:00+10:30", "2026-10-04T02:30:00+11:00"},
		{"0 12 30 12 *", "Pacific/Apia", "2011-12-29T12:00:00-10:00", "2011-12-31T00:00:00+14:00"}, // a day that never was
		{"*/15 30 12 * * *", "UTC", "2026-01-01T12:30:15Z", "2026-01-01T12:30:30Z"},                // seconds first
		{"@every 90s", "Europe/Berlin", "2026-03-29T00:59:30Z", "2026-03-29T01:01:00Z"},
		{"0 12 * * 7", "UTC", "2026-01-01T00:00:00Z", "2026-01-04T12:00:00Z"}, // a Sunday
		{"0 0 29 2 *", "UTC", "2026-01-01T00:00:00Z", "2028-02-29T00:00:00Z"},
		{"0 4 1-7 * */7", "UTC", "2026-11-02T00:00:00Z", "2026-12-06T04:00:00Z"},    // the first Sunday: both must match
		{"0 4 */2 * 1", "UTC", "2026-11-01T00:00:00Z", "2026-11-09T04:00:00Z"},      // a Monday, and an odd day
		{"0 4 */2 * *", "UTC", "2026-11-01T05:00:00Z", "2026-11-03T04:00:00Z"},      // odd days
		{"0 0 4 * * */3", "UTC", "2026-11-01T05:00:00Z", "2026-11-04T04:00:00Z"},    // Sunday, Wednesday, Saturday
		{"0 4 1,2-31/2 * 1", "UTC", "2026-11-01T05:00:00Z", "2026-11-02T04:00:00Z"}, // either is enough
		{"0 0 1,* * 5", "UTC", "2026-11-02T00:00:00Z", "2026-11-03T00:00:00Z"},      // either, as neither begins with a star: every day
		{"0 0 13 * 1,*", "UTC", "2026-11-02T00:00:00Z", "2026-11-03T00:00:00Z"},     // the same
		{"0 0 13 * 1,?", "UTC", "2026-11-02T00:00:00Z", "2026-11-03T00:00:00Z"},     // the same
		{"0 0 *,1 * 5", "UTC", "2026-11-02T00:00:00Z", "2026-11-06T00:00:00Z"},      // a Friday: both must match
		{"0 0 ? * 5", "UTC", "2026-11-02T00:00:00Z", "2026-11-06T00:00:00Z"},        // the same
		{"0 0 ?/2 * 5", "UTC", "2026-11-02T00:00:00Z", "2026-11-13T00:00:00Z"},      // a Friday, and an odd day
	} {
		s, err := schedule.Parse(test.line, test.zone)
		if err != nil {
			t.Errorf("%s: %v", test.line, err)
			continue
		}
		after, _ := time.Parse(time.RFC3339, test.after)
		want, _ := time.Parse(time.RFC3339, test.want)
		if got := s.Next(after); !got.Equal(want) {
			t.Errorf("%s in %s after %s: got %v, want %s", test.line, test.zone, test.after, got, test.want)
		}
	}
}

func TestScheduleNever(t *testing.T) {
	t.Parallel()
	s, err := schedule.Parse("0 0 30 2 *", "UTC")
	if err != nil {
		t.Fatal(err)
	}
	if next := s.Next(time.Now()); !next.IsZero() {
		t.Errorf("30 February comes due on %v", next)
	}
}

func TestParseRefuses(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ line, zone, says string }{
		{"@every 1ms", "UTC", "1s at the least"},
		{"@every 1500ms", "UTC", "whole seconds"},
		{"@every soon", "UTC", "90s"},
		{"@every -5s", "UTC", "1s at the least"},
		{"every day", "UTC", "minute hour day"},
		{", * * * *", "UTC", "no value"},
		{",, 0 * * * *", "UTC", "no value"},
		{"0 0 , * *", "UTC", "no value"},
		{"0 0 * * ,", "UTC", "no value"},
		{"60 * * * *", "UTC", "60"},
		{"* * * * 8", "UTC", "8"},
		{"* * * * 6-8", "UTC", "8"},
		{"* * * * 7-1", "UTC", "7-1"},
		{"* * * * 7/0", "UTC", "7/0"},
		{"* * * * 5-7/x", "UTC", "x"},
		{"* * * 7 7-8", "UTC", "8"},
		{" TZ=UTC * * * * 7", "UTC", "TZ=UTC"},
		{"", "UTC", "minute hour day"},
		{"CRON_TZ=UTC * * * * *", "UTC", "time_zone"},
		{"* * * * *", "Berlin", "Europe/Berlin"},
		{"* * * * *", "", "name one"},
		{"* * * * *", "Local", "name one"},
	} {
		_, err := schedule.Parse(test.line, test.zone)
		if err == nil || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%q in %q: error %v does not say %q", test.line, test.zone, err, test.says)
		}
	}
}

// The table takes several spaces behind @every.
func TestEveryWithSpaces(t *testing.T) {
	t.Parallel()
	s, err := schedule.Parse("@every   90s", "UTC")
	if err != nil {
		t.Fatal(err)
	}
	at := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	if next := s.Next(at); !next.Equal(at.Add(90 * time.Second)) {
		t.Errorf("after %v comes %v", at, next)
	}
}

// A process without the zone is not a fault of the line.
func TestUnknownZone(t *testing.T) {
	t.Parallel()
	_, err := schedule.Parse("* * * * *", "Mars/Olympus_Mons")
	if !errors.Is(err, schedule.ErrUnknownZone) || !strings.Contains(err.Error(), `"Mars/Olympus_Mons"`) {
		t.Errorf("a zone that is not there: %v", err)
	}
	for _, test := range []struct{ line, zone string }{{"99 * * * *", "UTC"}, {"99 * * * *", "Mars/Olympus_Mons"}, {"* * * * *", ""}} {
		if _, err := schedule.Parse(test.line, test.zone); err == nil || errors.Is(err, schedule.ErrUnknownZone) {
			t.Errorf("%q in %q: %v", test.line, test.zone, err)
		}
	}
}

// Weekday 7 is Sunday, as 0 is, wherever a weekday may stand.
func TestSeventhWeekday(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ seven, want string }{
		{"7", "0"}, {"07", "0"}, {"5-7", "5,6,0"}, {"7,1", "0,1"}, {"1,7", "0,1"}, {"6-7/1", "6,0"}, {"0-7", "0-6"}, {"1-7", "0-6"}, {"7-7", "0"}, {"1-7/2", "1,3,5,0"},
		{"2-7/2", "2,4,6"}, {"1-7/9223372036854775807", "1"}, {"7/2", "0"}, {"mon-7", "0-6"}, {"SAT-7,2", "6,0,2"}, {"3/2", "3,5"}, {"1-5/7", "1"},
	} {
		for _, line := range []string{"30 6 * * %s", "15 30 6 * * %s", "0 0 1,15 * %s", "0 0 7 7 %s", "0 0 * 2 %s  "} {
			got, err := schedule.Parse(fmt.Sprintf(line, test.seven), "Europe/Berlin")
			if err != nil {
				t.Fatal(err)
			}
			want, err := schedule.Parse(fmt.Sprintf(line, test.want), "Europe/Berlin")
			if err != nil {
				t.Fatal(err)
			}
			at := time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)
			for range 40 {
				next := want.Next(at)
				if due := got.Next(at); !due.Equal(next) {
					t.Fatalf("%q after %v: %v, and with %q %v", fmt.Sprintf(line, test.seven), at, due, test.want, next)
				}
				at = next
			}
		}
	}
}
