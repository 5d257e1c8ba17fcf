package tasks

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/robfig/cron/v3"
)

// MinEvery is the shortest interval that @every may have.
const MinEvery = time.Second

// Schedule tells when a cron line comes due in a time zone.
//
// A cron line speaks of the clock on the wall. Where that clock is put forward,
// times that it leaves out come due once, together, at the first moment after
// the gap; where it is put back, times that it shows twice come due once, the
// first time. The parser's own Next skips the former, and knows nothing of the
// latter (robfig/cron#541), so it is asked only about wall clocks that run
// through, and the zone is laid over its answers here.
//
// @every is not about the clock on the wall, and is counted from the due time
// before.
type Schedule struct {
	spec cron.Schedule
	zone *time.Location
}

var cronParser = cron.NewParser(cron.SecondOptional | cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow | cron.Descriptor)

// ParseSchedule reads a cron line of five fields, or six with seconds first, or
// a descriptor such as @hourly or @every 90s, and the name of a time zone.
func ParseSchedule(line, zone string) (Schedule, error) {
	if strings.HasPrefix(line, "TZ=") || strings.HasPrefix(line, "CRON_TZ=") {
		return Schedule{}, fmt.Errorf("cron %q: a time zone does not belong into the line; put it into time_zone", line)
	}
	if zone == "" || zone == "Local" {
		return Schedule{}, errors.New("time_zone: name one, such as UTC or Europe/Berlin")
	}
	loc, err := time.LoadLocation(zone)
	if err != nil {
		return Schedule{}, fmt.Errorf("time_zone %q: %w; name one such as UTC or Europe/Berlin", zone, err)
	}
	if every, ok := strings.CutPrefix(line, "@every "); ok {
		d, err := time.ParseDuration(strings.TrimSpace(every))
		if err != nil {
			return Schedule{}, fmt.Errorf("cron %q: %w; write the interval as 90s or 1h30m", line, err)
		}
		if d < MinEvery || d%time.Second != 0 {
			return Schedule{}, fmt.Errorf("cron %q: an interval is %v at the least, and has whole seconds", line, MinEvery)
		}
	}
	spec, err := cronParser.Parse(line)
	if err != nil {
		return Schedule{}, fmt.Errorf("cron %q: %w; write it as minute hour day month weekday, or as @hourly, @daily, @every 90s", line, err)
	}
	if s, ok := spec.(*cron.SpecSchedule); ok {
		s.Location = time.UTC // wall clocks are handed over as if they were UTC
	}
	return Schedule{spec, loc}, nil
}

// Next returns the first due time after t, and the zero time if there is none
// within the next five years.
func (s Schedule) Next(t time.Time) time.Time {
	if every, ok := s.spec.(cron.ConstantDelaySchedule); ok {
		return every.Next(t)
	}
	// Only what the wall shows later than now can come due later than now: a
	// time in a gap comes due at its end, one that is shown twice the first time.
	for wall := wallClock(t.In(s.zone)); ; {
		wall = s.spec.Next(wall)
		if wall.IsZero() {
			return time.Time{}
		}
		if due := moment(wall, s.zone); due.After(t) {
			return due
		}
	}
}

// wallClock returns what the clock on the wall shows at t, as if it were UTC.
func wallClock(t time.Time) time.Time {
	_, offset := t.Zone()
	return t.UTC().Add(time.Duration(offset) * time.Second)
}

// moment returns when the clock on the wall of a zone shows wall for the first
// time or, if it never does, the end of the gap that leaves wall out.
func moment(wall time.Time, zone *time.Location) time.Time {
	t := time.Date(wall.Year(), wall.Month(), wall.Day(), wall.Hour(), wall.Minute(), wall.Second(), wall.Nanosecond(), zone)
	begin, end := t.ZoneBounds()
	if !wallClock(t).Equal(wall) {
		// A gap: t lies on one side of it or on the other.
		for _, change := range []time.Time{begin, end} {
			if !change.IsZero() && wall.Before(wallClock(change)) && wall.After(wallClock(change.Add(-1))) {
				return change
			}
		}
		return t
	}
	if !begin.IsZero() {
		_, offset := begin.Add(-1).Zone()
		if earlier := wall.Add(-time.Duration(offset) * time.Second).In(zone); earlier.Before(begin) {
			return earlier
		}
	}
	return t
}
