package cli

import (
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/spf13/cobra"

	"onejob/store"
	"onejob/tasks/schedule"
)

// dueTime is a due time as "preview" shows it.
type dueTime struct {
	DueAt store.Time `json:"due_at"`
	Note  string     `json:"note,omitempty"` // what a clock change does to it
}

func schedulesPreview() *cobra.Command {
	c := &cobra.Command{
		Use:   "preview NAME | --cron LINE",
		Short: "Show the next due times of a schedule or of a cron expression",
		Long: `Show the next due times of a schedule or, without a database, of a cron expression, in
its time zone. A note marks due times that a clock change moves or repeats.

--from is a time such as 2026-10-25T02:30:00+01:00, or 2026-10-25T02:30 in the time
zone. @every counts from there.`,
		Example: `  onejob schedules preview nightly
  onejob schedules preview --cron '30 2 * * *' --time-zone Europe/Berlin --from 2026-03-28 -n 3`,
		Args: cobra.MaximumNArgs(1),

		ValidArgsFunction: completeNames(scheduleNames),
	}
	path, output := configFlag(c), outputFlag(c)
	n := c.Flags().IntP("number", "n", 10, "`number` of due times")
	line := c.Flags().String("cron", "", "preview this `expression` instead of a schedule")
	zone := c.Flags().String("time-zone", "UTC", "time `zone` of --cron")
	from := c.Flags().String("from", "", "start at this `time` instead of now")
	c.RunE = func(c *cobra.Command, args []string) error {
		isLine := c.Flags().Changed("cron")
		switch {
		case isLine == (len(args) == 1):
			return usage(errors.New("give either the name of a schedule or --cron"))
		case !isLine && c.Flags().Changed("time-zone"):
			return usage(errors.New("--time-zone needs --cron; a schedule has its own time zone"))
		case *n < 1 || *n > 10000:
			return usage(fmt.Errorf("-n: %d is not between 1 and 10000", *n))
		}
		start := time.Now()
		var known *time.Time // the next due time, where it is written down
		if !isLine {
			db, _, err := openConfigured(*path)
			if err != nil {
				return err
			}
			defer db.Close()
			now, row, err := findSchedule(c.Context(), db, args[0])
			if err != nil {
				return err
			}
			switch end := row.PausedUntil; {
			case !row.Enabled:
				note(c, "schedule %s is disabled; if enabled, it would be due at:", row.Name)
			case end == nil:
			case end.Infinite == pgtype.Infinity:
				note(c, "schedule %s is paused; if resumed, it would be due at:", row.Name)
			default:
				note(c, "schedule %s is paused until %s; then it is due at:", row.Name, inZoneStored(end, row.TimeZone))
				now = end.At
			}
			*line, *zone, start = row.Cron, row.TimeZone, now
			if row.NextAt != nil {
				known = &row.NextAt.At
			}
		}
		s, err := schedule.Parse(*line, *zone)
		if err != nil {
			return usage(err)
		}
		if *from != "" {
			known = nil
			if start, err = parseMoment(*from, *zone); err != nil {
				return usage(fmt.Errorf("--from: %w", err))
			}
		}
		dues := nextDueTimes(s, *line, *zone, start, known, *n)
		if *output == formatJSON {
			return printJSON(c.OutOrStdout(), dues)
		}
		if len(dues) == 0 {
			printf(c.OutOrStdout(), "%s is never due: no such time exists in the five years after %s\n", *line, inZone(&start, *zone))
			return nil
		}
		var t table
		for _, d := range dues {
			t.row(d.DueAt.At.Format("Mon 2006-01-02 15:04:05 -07:00"), d.Note)
		}
		return t.printLines(c.OutOrStdout())
	}
	return c
}

// nextDueTimes returns the next n due times of a line from start on. known is
// its next due time if that is written down: an @every line goes on from there.
func nextDueTimes(s schedule.Cron, line, zone string, start time.Time, known *time.Time, n int) []dueTime {
	loc := location(zone)
	var due time.Time
	switch {
	case isEvery(line) && known != nil:
		for due = *known; due.Before(start); {
			due = s.Next(due)
			// All intervals that end before start at once: there may be billions of them.
			every := s.Next(due).Sub(due)
			due = due.Add(max(0, start.Sub(due)/every) * every)
		}
	case isEvery(line):
		due = s.Next(start)
	default:
		due = s.Next(start.Add(-1))
	}
	dues := []dueTime{}
	note := clockNotes(line, loc)
	for ; len(dues) < n && !due.IsZero(); due = s.Next(due) {
		due := due.In(loc)
		dues = append(dues, dueTime{store.Time{At: due}, note(due)})
	}
	return dues
}

// clockNotes returns a function that says what a clock change does to a due time
// of a line. It compares the line with itself in UTC, where every time that it
// names comes once.
func clockNotes(line string, loc *time.Location) func(due time.Time) string {
	named, err := schedule.Parse(line, "UTC")
	if err != nil || isEvery(line) {
		return func(time.Time) string { return "" }
	}
	const minutes = "2006-01-02 15:04"
	return func(due time.Time) string {
		begin, end := due.ZoneBounds()
		if due.Equal(begin) {
			left, shown := onWall(begin.Add(-time.Second).In(loc)), onWall(due) // the last second before a gap, the first one after
			if missing, _ := dueFrom(named, left.Add(time.Second), shown.Add(-time.Second), 1); len(missing) > 0 {
				return missing[0].Format(minutes) + " does not exist: the clock is put forward"
			}
		}
		if !end.IsZero() && !onWall(due).Before(onWall(end.In(loc))) {
			return due.Format(minutes) + " exists twice: this is the first"
		}
		return ""
	}
}

// onWall returns what the clock on the wall shows at t, as if it were UTC.
func onWall(t time.Time) time.Time {
	return time.Date(t.Year(), t.Month(), t.Day(), t.Hour(), t.Minute(), t.Second(), 0, time.UTC)
}
