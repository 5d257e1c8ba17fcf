package cli

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"onejob/internal/plaintext"
	"onejob/store"
	"onejob/tasks/schedule"
)

// A backfill of more due times than manyTasks needs --yes. One of more than mostTasks
// must be split: each backfill is one statement.
const (
	manyTasks = 10_000
	mostTasks = 100_000
)

func schedulesBackfill() *cobra.Command {
	c := &cobra.Command{
		Use:   "backfill NAME --from TIME --to TIME",
		Short: "Enqueue tasks for past due times that have none",
		Long: `Enqueue tasks for a schedule's past due times that have none: those that were skipped,
and those from before the schedule existed. --from and --to are included. Either all
tasks are enqueued or, after an error, none. It is safe beside replicas that run. A due
time gets no second task while its occurrence is kept (retention): until then it is safe
to repeat the command. The schedule is not changed.

A time is written as 2026-10-25T02:30:00+01:00, or as 2026-10-25T02:30 in the
schedule's time zone. A date alone is 00:00 of that day: --to 2026-10-08 includes the
7th. Due times follow from the schedule's current cron expression. For @every, only due
times that were skipped get tasks.`,
		Example: `  onejob schedules backfill nightly --from 2026-10-01 --to 2026-10-08 --dry-run`,
		Args:    cobra.ExactArgs(1),

		ValidArgsFunction: completeNames(scheduleNames),
	}
	output := outputFlag(c)
	from := c.Flags().String("from", "", "first `time`")
	to := c.Flags().String("to", "", "last `time`")
	dryRun := c.Flags().Bool("dry-run", false, "show what would be enqueued, and enqueue nothing")
	yes := c.Flags().Bool("yes", false, fmt.Sprintf("allow more than %d due times", manyTasks))
	return withStore(c, func(c *cobra.Command, args []string, db *store.Store) error {
		if *from == "" || *to == "" {
			return usage(errors.New("--from and --to are required"))
		}
		now, row, err := findSchedule(c.Context(), db, args[0])
		if err != nil {
			return err
		}
		first, err := parseMoment(*from, row.TimeZone)
		if err != nil {
			return usage(fmt.Errorf("--from: %w", err))
		}
		last, err := parseMoment(*to, row.TimeZone)
		if err != nil {
			return usage(fmt.Errorf("--to: %w", err))
		}
		switch {
		case first.After(last):
			return usage(fmt.Errorf("--from, %s, is after --to, %s", inZone(&first, row.TimeZone), inZone(&last, row.TimeZone)))
		case last.After(now):
			return usage(fmt.Errorf("--to, %s, is in the future; it is %s", inZone(&last, row.TimeZone), inZone(&now, row.TimeZone)))
		}
		limit := manyTasks
		if *yes {
			limit = mostTasks
		}
		dues, more, err := dueBetween(c, db, row, first, last, limit)
		switch {
		case err != nil:
			return err
		case more && *yes:
			return usage(fmt.Errorf("there are more than %d due times; use a shorter range", mostTasks))
		case more:
			return usage(fmt.Errorf("there are more than %d due times; use --yes to enqueue them all", manyTasks))
		}
		missing, err := db.WithoutTask(c.Context(), row.ID, dues)
		if err != nil {
			return err
		}
		made := []store.MadeTask{}
		if *dryRun {
			for _, due := range missing {
				made = append(made, store.MadeTask{DueAt: due})
			}
		} else if len(missing) > 0 {
			if made, err = db.Backfill(c.Context(), row, missing); err != nil {
				return err
			}
		}
		if *output == formatJSON {
			return printJSON(c.OutOrStdout(), made)
		}
		verb := "enqueued"
		if *dryRun {
			verb = "would enqueue"
		}
		fmt.Fprintf(c.OutOrStdout(), "%s %s for %s; %d had a task\n", verb, plaintext.Plural(len(made), "task"), plaintext.Plural(len(dues), "due time"), len(dues)-len(made))
		for _, m := range made {
			fmt.Fprint(c.OutOrStdout(), inZone(&m.DueAt, row.TimeZone))
			if !*dryRun {
				fmt.Fprintf(c.OutOrStdout(), "  task %d", m.TaskID)
			}
			fmt.Fprintln(c.OutOrStdout())
		}
		return nil
	})
}

// dueBetween returns the due times of a schedule from first to last, and whether
// there are more than limit.
func dueBetween(c *cobra.Command, db *store.Store, row store.ScheduleRow, first, last time.Time, limit int) (dues []time.Time, more bool, err error) {
	if isEvery(row.Cron) {
		dues, err = db.SkippedDueTimes(c.Context(), row.ID, first, last, limit+1)
		return dues, len(dues) > limit, err
	}
	s, err := schedule.Parse(row.Cron, row.TimeZone)
	if err != nil {
		return nil, false, err
	}
	dues, more = dueFrom(s, first, last, limit)
	return dues, more, nil
}
