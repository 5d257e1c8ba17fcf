package cli

import (
	"errors"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"onejob/store"
	"onejob/tasks"
)

// A backfill of more due times than manyTasks wants --yes; one of more than
// mostTasks is to be done in parts, each of which is one statement.
const (
	manyTasks = 10_000
	mostTasks = 100_000
)

func schedulesBackfill() *cobra.Command {
	c := &cobra.Command{
		Use:   "backfill NAME --from TIME --to TIME",
		Short: "Make the tasks of due times that are past and have none",
		Long: `Make the tasks of a schedule's due times from one time to another, both included,
that are past and have no task: all of them or, if something goes wrong, none.
Due times that were skipped, for whatever reason, become tasks; those that have a
task keep it. The schedule goes on as before. It is safe while replicas run, and
to repeat: a due time has at most one task.

A time is written as 2026-10-25T02:30:00+01:00, or as 2026-10-25T02:30 by the
clock on the wall of the schedule's zone. Due times are worked out by the line as
it is now. An @every line has no due times but those that it was counted through:
of these the skipped ones are made.`,
		Example: `  onejob schedules backfill nightly --from 2026-10-01 --to 2026-10-07 --dry-run`,
		Args:    cobra.ExactArgs(1),
	}
	path, output := configFlag(c), outputFlag(c)
	from := c.Flags().String("from", "", "the first `time`")
	to := c.Flags().String("to", "", "the last `time`")
	dryRun := c.Flags().Bool("dry-run", false, "tell what would be made, and make nothing")
	yes := c.Flags().Bool("yes", false, fmt.Sprintf("also for more than %d due times", manyTasks))
	c.RunE = func(c *cobra.Command, args []string) error {
		asJSON, err := output()
		if err != nil {
			return err
		}
		if *from == "" || *to == "" {
			return usage(errors.New("both --from and --to are needed"))
		}
		db, err := openStore(*path)
		if err != nil {
			return err
		}
		defer db.Close()
		now, row, err := db.Schedule(c.Context(), args[0])
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
			return usage(fmt.Errorf("these are more than %d due times; do it in parts", mostTasks))
		case more:
			return usage(fmt.Errorf("these are more than %d due times; say --yes if that is what you want", manyTasks))
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
		if asJSON {
			return printJSON(c.OutOrStdout(), made)
		}
		t := tabwriter.NewWriter(c.OutOrStdout(), 0, 0, 2, ' ', 0)
		verb := "made"
		if *dryRun {
			verb = "would make"
		}
		fmt.Fprintf(t, "%s %s of %s; %d had a task\n", verb, plural(len(made), "task"), plural(len(dues), "due time"), len(dues)-len(made))
		for _, m := range made {
			if *dryRun {
				fmt.Fprintf(t, "%s\n", inZone(&m.DueAt, row.TimeZone))
			} else {
				fmt.Fprintf(t, "%s\ttask %d\n", inZone(&m.DueAt, row.TimeZone), m.TaskID)
			}
		}
		return t.Flush()
	}
	return c
}

// dueBetween returns the due times of a schedule from first to last, and whether
// there are more than limit.
func dueBetween(c *cobra.Command, db *store.Store, row store.ScheduleRow, first, last time.Time, limit int) (dues []time.Time, more bool, err error) {
	if isEvery(row.Cron) {
		dues, err = db.SkippedDueTimes(c.Context(), row.ID, first, last, limit+1)
		return dues, len(dues) > limit, err
	}
	s, err := tasks.ParseSchedule(row.Cron, row.TimeZone)
	if err != nil {
		return nil, false, err
	}
	dues, more = dueFrom(s, first, last, limit)
	return dues, more, nil
}
