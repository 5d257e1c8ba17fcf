package cli

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"onejob/store"
	"onejob/tasks"
)

func schedulesCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "schedules",
		Short: "List, show, preview, backfill, enable and disable schedules",
		Long: `Schedules make tasks by cron. They are rows of onejob.schedules: add, change and
delete them by plain SQL; a change takes effect within a second.

Times are shown in the schedule's own zone, with its offset at that moment.`,
	}
	c.AddCommand(schedulesList(), schedulesShow(), schedulesPreview(), schedulesBackfill(),
		schedulesEnable("enable", "Let schedules make tasks again, from now on", true),
		schedulesEnable("disable", "Keep schedules from making tasks", false))
	return c
}

func schedulesList() *cobra.Command {
	c := &cobra.Command{Use: "list", Short: "List schedules", Args: cobra.NoArgs}
	path, output := configFlag(c), outputFlag(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		asJSON, err := output()
		if err != nil {
			return err
		}
		db, err := openStore(*path)
		if err != nil {
			return err
		}
		defer db.Close()
		rows, err := db.Schedules(c.Context())
		if err != nil {
			return err
		}
		if asJSON {
			if rows == nil {
				rows = []store.ScheduleRow{}
			}
			return printJSON(c.OutOrStdout(), rows)
		}
		t := newTable(c.OutOrStdout())
		t.row("NAME", "CRON", "ZONE", "KIND", "ENABLED", "NEXT", "LAST", "ERROR")
		for _, r := range rows {
			t.row(firstLine(r.Name, 40), r.Cron, r.TimeZone, r.Kind, r.Enabled, next(r), inZoneStored(r.LastAt, r.TimeZone), firstLine(or(r.Error), 60))
		}
		return t.flush()
	}
	return c
}

// shownOccurrences is how many due times "show" looks back.
const shownOccurrences = 20

func schedulesShow() *cobra.Command {
	c := &cobra.Command{
		Use:   "show NAME",
		Short: "Show a schedule and what became of its last due times",
		Args:  cobra.ExactArgs(1),
	}
	path, output := configFlag(c), outputFlag(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		asJSON, err := output()
		if err != nil {
			return err
		}
		db, err := openStore(*path)
		if err != nil {
			return err
		}
		defer db.Close()
		_, row, err := db.Schedule(c.Context(), args[0])
		if err != nil {
			return err
		}
		occurrences, err := db.Occurrences(c.Context(), row.ID, shownOccurrences)
		if err != nil {
			return err
		}
		if asJSON {
			if occurrences == nil {
				occurrences = []store.OccurrenceRow{}
			}
			return printJSON(c.OutOrStdout(), struct {
				store.ScheduleRow
				Occurrences []store.OccurrenceRow `json:"occurrences"`
			}{row, occurrences})
		}
		return showSchedule(c.OutOrStdout(), row, occurrences)
	}
	return c
}

func showSchedule(w io.Writer, r store.ScheduleRow, occurrences []store.OccurrenceRow) error {
	t := newTable(w)
	t.line("schedule", r.Name)
	t.line("cron", r.Cron)
	t.line("time zone", r.TimeZone)
	t.line("enabled", r.Enabled)
	t.line("error", or(r.Error))
	t.line("next", next(r))
	t.line("last", inZoneStored(r.LastAt, r.TimeZone))
	onMissed := r.OnMissed
	if onMissed == tasks.MissedAll {
		onMissed += fmt.Sprintf(", at most %d", r.MissedCap)
	}
	t.line("on missed", onMissed)
	onOverlap := r.OnOverlap
	if onOverlap == tasks.OverlapQueue {
		onOverlap += fmt.Sprintf(", at most %d", r.QueueCap)
	}
	t.line("on overlap", onOverlap)
	t.line("kind", r.Kind)
	t.line("payload", firstLine(string(r.Payload), 200))
	t.line("queue", r.Queue)
	t.line("priority", r.Priority)
	t.line("lock key", or(r.LockKey))
	t.line("limit", or(r.LimitName))
	t.line("max attempts", r.MaxAttempts)
	t.line("timeout", or(r.Timeout))
	t.line("keep for", or(r.KeepFor))
	t.line("created", inZoneStored(&r.CreatedAt, r.TimeZone))
	if len(occurrences) > 0 {
		fmt.Fprintln(t.w)
		t.row("DUE", "TASK", "STATUS")
	}
	for _, o := range occurrences {
		due := inZoneStored(&o.DueAt, r.TimeZone)
		switch {
		case o.TaskID == nil:
			t.row(due, "", "skipped: "+or(o.Skipped))
		case o.Status == nil:
			t.row(due, *o.TaskID, "deleted since")
		default:
			t.row(due, *o.TaskID, *o.Status)
		}
	}
	return t.flush()
}

// schedulesEnable makes a command that enables or disables the schedules named.
func schedulesEnable(verb, short string, enabled bool) *cobra.Command {
	c := &cobra.Command{Use: verb + " NAME...", Short: short, Args: cobra.MinimumNArgs(1)}
	path := configFlag(c)
	c.RunE = func(c *cobra.Command, names []string) error {
		db, err := openStore(*path)
		if err != nil {
			return err
		}
		defer db.Close()
		failed := false
		for _, name := range names {
			found, err := db.EnableSchedule(c.Context(), name, enabled)
			if err != nil {
				return err
			}
			if found {
				printf(c.OutOrStdout(), "schedule %s is %sd\n", name, verb)
			} else {
				failed = true
				printf(c.ErrOrStderr(), "onejob: schedule %s: %v\n", name, store.ErrNoSchedule)
			}
		}
		if failed {
			return &exitError{exitFailure, nil}
		}
		return nil
	}
	return c
}

// next tells when a schedule comes due; nothing while the leader has yet to work
// that out.
func next(r store.ScheduleRow) string {
	if r.NeverDue {
		return "never"
	}
	return inZone(r.NextAt, r.TimeZone)
}

func location(zone string) *time.Location {
	loc, err := time.LoadLocation(zone)
	if err != nil {
		return time.UTC
	}
	return loc
}

// parseMoment reads a time that a person gave: with its offset or, without one,
// by the clock on the wall of a zone. A time that this clock leaves out, or shows
// twice, is the one at which a schedule would come due.
func parseMoment(text, zone string) (time.Time, error) {
	if t, err := time.Parse(time.RFC3339, text); err == nil {
		return t.In(location(zone)), nil
	}
	for _, layout := range []string{"2006-01-02T15:04", "2006-01-02T15:04:05", time.DateOnly} {
		wall, err := time.Parse(layout, text)
		if err != nil {
			continue
		}
		line := fmt.Sprintf("%d %d %d %d %d *", wall.Second(), wall.Minute(), wall.Hour(), wall.Day(), wall.Month())
		s, err := tasks.ParseSchedule(line, zone)
		if err != nil {
			return time.Time{}, err
		}
		return s.Next(wall.AddDate(0, 0, -2)), nil // before it in every zone
	}
	return time.Time{}, fmt.Errorf("%q is no time such as 2026-10-25T02:30:00+01:00, or 2026-10-25T02:30 for the schedule's zone", text)
}

// isEvery reports whether a line counts its due times from one to the next.
func isEvery(cron string) bool { return strings.HasPrefix(cron, "@every ") }

// dueFrom returns the due times from one time to another, both included, of a
// line that reads them off the wall, and whether there are more than limit.
func dueFrom(s tasks.Schedule, from, to time.Time, limit int) (dues []time.Time, more bool) {
	for due := s.Next(from.Add(-1)); !due.IsZero() && !due.After(to); due = s.Next(due) {
		if len(dues) == limit {
			return dues, true
		}
		dues = append(dues, due)
	}
	return dues, false
}
