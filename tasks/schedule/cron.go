// Package schedule says when schedules come due, and what becomes of the due times
// that were missed or that overlap.
package schedule

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	_ "time/tzdata" // for images without /usr/share/zoneinfo; a table of the system is preferred

	"github.com/robfig/cron/v3"
)

// MinEvery is the shortest interval that @every may have.
const MinEvery = time.Second

// ErrUnknownZone says that this process has no such time zone. Another one may
// have it: its table of zones can be newer.
var ErrUnknownZone = errors.New("not known here")

// Cron tells when a cron line comes due in a time zone.
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
type Cron struct {
	spec cron.Schedule
	zone *time.Location
}

var cronParser = cron.NewParser(cron.SecondOptional | cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow | cron.Descriptor)

// Parse reads a cron line of five fields, or six with seconds first, or
// a descriptor such as @hourly or @every 90s, and the name of a time zone. The
// error wraps ErrUnknownZone if the zone is the only thing wrong.
func Parse(line, zone string) (Cron, error) {
	if strings.HasPrefix(line, "TZ=") || strings.HasPrefix(line, "CRON_TZ=") {
		return Cron{}, fmt.Errorf("cron %q: a time zone does not belong into the line; put it into time_zone", line)
	}
	if zone == "" || zone == "Local" {
		return Cron{}, errors.New("time_zone: name one, such as UTC or Europe/Berlin")
	}
	if every, ok := strings.CutPrefix(line, "@every "); ok {
		d, err := time.ParseDuration(strings.TrimSpace(every))
		if err != nil {
			return Cron{}, fmt.Errorf("cron %q: %w; write the interval as 90s or 1h30m", line, err)
		}
		if d < MinEvery || d%time.Second != 0 {
			return Cron{}, fmt.Errorf("cron %q: an interval is %v at the least, and has whole seconds", line, MinEvery)
		}
		line = "@every " + strings.TrimSpace(every) // the parser takes no second space
	}
	spec, err := cronParser.Parse(sundayIsZero(line))
	if err != nil {
		return Cron{}, fmt.Errorf("cron %q: %w; write it as minute hour day month weekday, or as @hourly, @daily, @every 90s", line, err)
	}
	loc, err := time.LoadLocation(zone)
	if err != nil {
		return Cron{}, fmt.Errorf("time_zone %q: %w (%w); name one such as UTC or Europe/Berlin, or install newer zone data", zone, ErrUnknownZone, err)
	}
	if s, ok := spec.(*cron.SpecSchedule); ok {
		for _, field := range []uint64{s.Second, s.Minute, s.Hour, s.Dom, s.Month, s.Dow} {
			if field&^anyValue == 0 { // of commas alone, which the parser takes
				return Cron{}, fmt.Errorf("cron %q: a field has no value", line)
			}
		}
		s.Location = time.UTC // wall clocks are handed over as if they were UTC
		if fields := strings.Fields(line); len(fields) >= 5 {
			s.Dom = s.Dom&^anyValue | star(fields[len(fields)-3])
			s.Dow = s.Dow&^anyValue | star(fields[len(fields)-1])
		}
	}
	return Cron{spec, loc}, nil
}

// star returns the parser's mark of a field that leaves the choice to the other one, of day and
// weekday: one that begins with a star, as in the crontabs of Vixie and cronie, or with a question
// mark, which is the same. The parser itself takes */2 for a choice, and 1,* for none.
func star(field string) uint64 {
	if strings.HasPrefix(field, "*") || strings.HasPrefix(field, "?") {
		return anyValue
	}
	return 0
}

const anyValue = 1 << 63

// sundayIsZero returns the line with every weekday 7 written as 0: crontabs have
// both, the parser has 0 only. What the parser must refuse is left for it to refuse.
func sundayIsZero(line string) string {
	trimmed := strings.TrimRight(line, " \t")
	fields := strings.Fields(trimmed)
	if len(fields) < 5 || !strings.Contains(fields[len(fields)-1], "7") {
		return line
	}
	weekdays := fields[len(fields)-1]
	parts := strings.Split(weekdays, ",")
	for i, part := range parts {
		parts[i] = weekdayRange(part)
	}
	return strings.TrimSuffix(trimmed, weekdays) + strings.Join(parts, ",")
}

// weekdayRange returns a weekday or a range of them without 7: the numbers that a
// range names up to 7, with 0 in its place.
func weekdayRange(part string) string {
	days, step, stepped := strings.Cut(part, "/")
	first, last, ranged := strings.Cut(days, "-")
	by := 1
	if stepped {
		var err error
		if by, err = strconv.Atoi(step); err != nil || by < 1 {
			return part
		}
	}
	if !ranged {
		last = first // 7/2 is 7 alone, as nothing follows it
	}
	from, known := weekday(first)
	if to, ok := weekday(last); !known || !ok || to != 7 || from > 7 {
		return part
	}
	var list []string
	for day := from; day <= 7; day += min(by, 8) {
		list = append(list, strconv.Itoa(day%7))
	}
	return strings.Join(list, ",")
}

func weekday(text string) (day int, ok bool) {
	if i := slices.Index([]string{"sun", "mon", "tue", "wed", "thu", "fri", "sat"}, strings.ToLower(text)); i >= 0 {
		return i, true
	}
	day, err := strconv.Atoi(text)
	return day, err == nil && day >= 0
}

// Next returns the first due time after t, and the zero time if there is none
// within the next five years.
func (c Cron) Next(t time.Time) time.Time {
	if every, ok := c.spec.(cron.ConstantDelaySchedule); ok {
		return every.Next(t)
	}
	// Only what the wall shows later than now can come due later than now: a
	// time in a gap comes due at its end, one that is shown twice the first time.
	for wall := wallClock(t.In(c.zone)); ; {
		wall = c.spec.Next(wall)
		if wall.IsZero() {
			return time.Time{}
		}
		if due := moment(wall, c.zone); due.After(t) {
			return due
		}
	}
}

// maxShift is by how much new rules of a zone move a due time at the most: by a day, if the
// zone changes to the other side of the date line.
const maxShift = 24 * time.Hour

// believed returns a due time that was worked out earlier, or the one that has taken its place
// if the rules of the zone have changed since (an update of tzdata, a leader with another
// table): the nearest one, since it is the same time on the wall. Of two it is the earlier one,
// so that none is lost, but not one that was made before: none up to begin.
func (c Cron) believed(stored time.Time, begin *time.Time) time.Time {
	if _, every := c.spec.(cron.ConstantDelaySchedule); every {
		return stored // an interval is counted from any time
	}
	next := c.Next(stored.Add(-1))
	if next.IsZero() || next.Equal(stored) || begin == nil {
		return next
	}
	from := stored.Add(-min(next.Sub(stored), maxShift) - 1) // what is as near as next is after this
	if from.Before(*begin) {
		from = *begin
	}
	for due := c.Next(from); !due.IsZero() && due.Before(stored); due = c.Next(due) {
		next = due
	}
	return next
}

// tooMany reports whether more due times than fit into a plan lie between next and until.
func (c Cron) tooMany(next, until time.Time) bool {
	passed := until.Sub(next)
	if every, ok := c.spec.(cron.ConstantDelaySchedule); ok {
		return passed/every.Delay >= maxPlanned
	}
	if passed < maxPlanned*time.Second { // as on nearly every call
		return false
	}
	n := 0
	for due := c.Next(next.Add(-1)); !due.IsZero() && !due.After(until) && n <= maxPlanned; due = c.Next(due) {
		n++
	}
	return n > maxPlanned
}

// last returns the last due time up to until. next is one of them.
func (c Cron) last(next, until time.Time) time.Time {
	if every, ok := c.spec.(cron.ConstantDelaySchedule); ok {
		return next.Add(until.Sub(next) / every.Delay * every.Delay)
	}
	for none := until; ; { // there is none after that
		middle := next.Add(none.Sub(next) / 2)
		switch due := c.Next(middle); {
		case !due.IsZero() && !due.After(until):
			next = due
		case none.Sub(next) < time.Second:
			return next
		default:
			none = middle
		}
	}
}

// after returns the first due time after begin or, if a pause lasts beyond that, from its end on.
// An interval is counted from that end, also if it would have come to its own end after it.
func (c Cron) after(begin time.Time, pauseEnd *time.Time) time.Time {
	if _, every := c.spec.(cron.ConstantDelaySchedule); every && pauseEnd != nil && begin.Before(*pauseEnd) {
		return c.Next(*pauseEnd)
	}
	return c.notBefore(c.Next(begin), pauseEnd)
}

// notBefore returns the first due time from the end of a pause on, if a due time lies within
// the pause.
func (c Cron) notBefore(due time.Time, pauseEnd *time.Time) time.Time {
	if pauseEnd == nil || due.IsZero() || !due.Before(*pauseEnd) {
		return due
	}
	return c.Next(pauseEnd.Add(-1))
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
