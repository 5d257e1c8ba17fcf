package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"onejob/internal/plaintext"
	"onejob/internal/snapshot"
	"onejob/store"
	"onejob/tasks/schedule"
)

func schedulesCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "schedules",
		Short: "List, show, preview, run, backfill, pause, resume, enable and disable schedules",
		Long: `A schedule enqueues tasks at the times of a cron expression. Schedules are rows of
onejob.schedules: insert, update and delete them with SQL. A change takes effect
within a second.

Times are in the schedule's own time zone, with its offset at that time.`,
	}
	c.AddCommand(schedulesList(), schedulesShow(), schedulesPreview(), schedulesRun(), schedulesBackfill(), schedulesPause(), schedulesResume(),
		schedulesEnable("enable", "Let schedules enqueue tasks again, from now on", true),
		schedulesEnable("disable", "Stop schedules from enqueueing tasks", false))
	return c
}

func schedulesList() *cobra.Command {
	c := &cobra.Command{Use: "list", Short: "List schedules", Args: cobra.NoArgs}
	output := outputFlag(c)
	return withStore(c, func(c *cobra.Command, _ []string, db *store.Store) error {
		rows, err := db.Schedules(c.Context())
		if err != nil {
			return err
		}
		return printRows(c, *output, rows,
			short("NAME", func(r store.ScheduleRow) any { return r.Name }),
			short("CRON", func(r store.ScheduleRow) any { return r.Cron }),
			short("ZONE", func(r store.ScheduleRow) any { return r.TimeZone }),
			short("KIND", func(r store.ScheduleRow) any { return r.Kind }),
			short("TARGET", func(r store.ScheduleRow) any { return snapshot.Target(r.Kind, r.Payload) }),
			whole("STATE", func(r store.ScheduleRow) any { return stateOfSchedule(r) }),
			whole("NEXT", func(r store.ScheduleRow) any { return next(r) }),
			whole("LAST", func(r store.ScheduleRow) any { return inZoneStored(r.LastAt, r.TimeZone) }),
			short("ERROR", func(r store.ScheduleRow) any { return or(r.Error) }))
	})
}

// findSchedule returns a schedule, and what Postgres' clock says. If there is none with
// that name the error says which one may be meant.
func findSchedule(ctx context.Context, db *store.Store, name string) (now time.Time, row store.ScheduleRow, err error) {
	now, row, err = db.Schedule(ctx, name)
	if errors.Is(err, store.ErrNoSchedule) {
		err = noSchedule(ctx, db, name)
	}
	return now, row, err
}

func noSchedule(ctx context.Context, db *store.Store, name string) error {
	known, err := namesOfSchedules(ctx, db)
	if err != nil {
		return err
	}
	return fmt.Errorf("schedule %s does not exist%s", name, didYouMean(name, known))
}

// shownOccurrences is the number of due times that "show" shows.
const shownOccurrences = 20

func schedulesShow() *cobra.Command {
	c := &cobra.Command{
		Use:               "show NAME",
		Short:             "Show a schedule and its last due times, each with its task or why it has none",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeNames(scheduleNames),
	}
	output := outputFlag(c)
	return withStore(c, func(c *cobra.Command, args []string, db *store.Store) error {
		_, row, err := findSchedule(c.Context(), db, args[0])
		if err != nil {
			return err
		}
		occurrences, err := db.Occurrences(c.Context(), row.ID, shownOccurrences)
		if err != nil {
			return err
		}
		if *output == formatJSON {
			return printJSON(c.OutOrStdout(), struct {
				store.ScheduleRow
				Occurrences []store.OccurrenceRow `json:"occurrences"`
			}{row, notNil(occurrences)})
		}
		return showSchedule(c.OutOrStdout(), row, occurrences)
	})
}

func showSchedule(w io.Writer, r store.ScheduleRow, occurrences []store.OccurrenceRow) error {
	var t table
	t.line("schedule", r.Name)
	t.line("cron", r.Cron)
	t.line("time zone", r.TimeZone)
	t.line("state", stateOfSchedule(r))
	if r.PausedUntil != nil {
		t.line("paused", fmt.Sprintf("since %s by %s, until %s", inZoneStored(r.PausedAt, r.TimeZone), or(r.PausedBy), pausedUntil(*r.PausedUntil, func(end *store.Time) string { return inZoneStored(end, r.TimeZone) })))
		t.line("reason", or(r.PauseReason))
	}
	t.line("error", or(r.Error))
	t.line("next", next(r))
	t.line("last", inZoneStored(r.LastAt, r.TimeZone))
	onMissed := r.OnMissed
	if onMissed == schedule.MissedAll {
		onMissed += fmt.Sprintf(", at most %d", r.MissedCap)
	}
	t.line("on missed", onMissed)
	onOverlap := r.OnOverlap
	if onOverlap == schedule.OverlapQueue {
		onOverlap += fmt.Sprintf(", at most %d", r.QueueCap)
	}
	t.line("on overlap", onOverlap)
	t.line("kind", r.Kind)
	t.line("payload", plaintext.FirstLine(string(r.Payload), 200))
	t.line("queue", r.Queue)
	t.line("priority", r.Priority)
	t.line("lock key", or(r.LockKey))
	t.line("limit", or(r.LimitName))
	t.line("max attempts", r.MaxAttempts)
	t.line("timeout", or(r.Timeout))
	t.line("keep for", or(r.KeepFor))
	t.line("created", inZoneStored(&r.CreatedAt, r.TimeZone))
	if err := t.printLines(w); err != nil || len(occurrences) == 0 {
		return err
	}
	fmt.Fprintln(w)
	t = table{}
	t.row("DUE", "TASK", "STATUS")
	for _, o := range occurrences {
		due := inZoneStored(&o.DueAt, r.TimeZone)
		switch {
		case o.TaskID == nil:
			t.row(due, "", "skipped: "+or(o.Skipped))
		case o.Status == nil:
			t.row(due, *o.TaskID, "deleted")
		default:
			t.row(due, *o.TaskID, *o.Status)
		}
	}
	return t.printLines(w)
}

func schedulesRun() *cobra.Command {
	c := &cobra.Command{
		Use:   "run NAME...",
		Short: "Enqueue a task of a schedule now",
		Long: `Enqueue a task of a schedule now, also if the schedule is disabled or one of its tasks
runs. The schedule's due times stay as they are. A schedule that lets tasks wait for each
other (on_overlap = queue) has them run one after the other here too.`,
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: completeNames(scheduleNames),
	}
	return withStore(c, func(c *cobra.Command, names []string, db *store.Store) error {
		return forEach(c, "schedule", names, func(name string) error {
			id, err := db.RunSchedule(c.Context(), name)
			switch {
			case err != nil:
				return err
			case id == 0:
				return noSchedule(c.Context(), db, name)
			}
			printf(c.OutOrStdout(), "schedule %s: task %d\n", name, id)
			return nil
		})
	})
}

func schedulesPause() *cobra.Command {
	c := &cobra.Command{
		Use:   "pause NAME...",
		Short: "Stop schedules from enqueueing tasks, until they are resumed or a time has come",
		Long: `Stop schedules from enqueueing tasks, until they are resumed or the pause ends by itself
(--for, --until). Due times during a pause are left out, whatever on_missed says; those of
before are still created. Tasks that exist go on. A schedule that is paused already gets
the new end and reason.`,
		Example: `  onejob schedules pause 'nightly backup' --for 48h --reason 'the storage is moved'
  onejob schedules resume 'nightly backup'`,
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: completeNames(scheduleNames),
	}
	p := pauseFlags(c, "shown with the schedule")
	return withStore(c, func(c *cobra.Command, names []string, db *store.Store) error {
		end, err := p.end(c)
		if err != nil {
			return err
		}
		return eachNamed(c, "schedule", names, "paused", func(name string) (bool, error) {
			return db.PauseSchedule(c.Context(), name, p.reason, end, p.length)
		}, func(name string) error { return noSchedule(c.Context(), db, name) })
	})
}

func schedulesResume() *cobra.Command {
	c := &cobra.Command{Use: "resume NAME...", Short: "Let paused schedules enqueue tasks again, from now on", Args: cobra.MinimumNArgs(1), ValidArgsFunction: completeNames(scheduleNames)}
	return withStore(c, func(c *cobra.Command, names []string, db *store.Store) error {
		return eachNamed(c, "schedule", names, "resumed", func(name string) (bool, error) {
			return db.ResumeSchedule(c.Context(), name)
		}, func(name string) error {
			if _, _, err := findSchedule(c.Context(), db, name); err != nil {
				return err
			}
			return fmt.Errorf("schedule %s is not paused", name)
		})
	})
}

// stateOfSchedule says whether a schedule creates tasks.
func stateOfSchedule(r store.ScheduleRow) string {
	switch {
	case !r.Enabled:
		return "disabled"
	case r.PausedUntil != nil:
		return "paused"
	}
	return "enabled"
}

// schedulesEnable makes a command that enables or disables the schedules named.
func schedulesEnable(verb, short string, enabled bool) *cobra.Command {
	c := &cobra.Command{Use: verb + " NAME...", Short: short, Args: cobra.MinimumNArgs(1), ValidArgsFunction: completeNames(scheduleNames)}
	return withStore(c, func(c *cobra.Command, names []string, db *store.Store) error {
		return eachNamed(c, "schedule", names, verb+"d", func(name string) (bool, error) {
			return db.EnableSchedule(c.Context(), name, enabled)
		}, func(name string) error { return noSchedule(c.Context(), db, name) })
	})
}

// next returns when a schedule is due next, or "" until the leader has computed it.
func next(r store.ScheduleRow) string {
	if r.NeverDue {
		return "never"
	}
	return inZoneStored(r.NextAt, r.TimeZone)
}

// parseMoment parses a time: with its offset or, without one, a local time of a zone.
// A local time that does not exist, or exists twice, is the one at which a schedule
// would be due.
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
		s, err := schedule.Parse(line, zone)
		if err != nil {
			return time.Time{}, err
		}
		return s.Next(wall.AddDate(0, 0, -2)), nil // before it in every zone
	}
	return time.Time{}, fmt.Errorf("invalid time %q; write it as 2026-10-25T02:30:00+01:00, or as 2026-10-25T02:30 in the schedule's time zone", text)
}

// isEvery reports whether a cron expression counts each due time from the one before.
func isEvery(cron string) bool { return strings.HasPrefix(cron, "@every ") }

// dueFrom returns the due times from one time to another, both included, of a cron
// expression other than @every, and whether there are more than limit.
func dueFrom(s schedule.Cron, from, to time.Time, limit int) (dues []time.Time, more bool) {
	for due := s.Next(from.Add(-1)); !due.IsZero() && !due.After(to); due = s.Next(due) {
		if len(dues) == limit {
			return dues, true
		}
		dues = append(dues, due)
	}
	return dues, false
}
