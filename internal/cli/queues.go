package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/spf13/cobra"

	"onejob/store"
)

func queuesCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "queues",
		Short: "List, pause and resume queues",
		Long: `A queue is the text in the column queue of tasks; it needs no declaration. While a queue
is paused, no replica claims tasks from it. Tasks that run go on, and tasks can be
enqueued. A pause takes effect with the next claim of every replica.`,
	}
	c.AddCommand(queuesList(), queuesPause(), queuesResume())
	return c
}

// queueView is what is shown of a queue.
type queueView struct {
	Name   string          `json:"name"`
	Paused *store.QueueRow `json:"paused"` // nil: it is not
}

func queuesList() *cobra.Command {
	c := &cobra.Command{
		Use:   "list",
		Short: "List queues, and which of them are paused",
		Long: `List the queues of the newest 1,000 tasks, of schedules and of live replicas, and those
that are paused. "onejob status" shows how many tasks wait in each.`,
		Args: cobra.NoArgs,
	}
	output := outputFlag(c)
	return withStore(c, func(c *cobra.Command, _ []string, db *store.Store) error {
		paused, err := db.PausedQueues(c.Context())
		if err != nil {
			return err
		}
		names, err := db.Names(c.Context())
		if err != nil {
			return err
		}
		for _, q := range paused {
			names.Queues = append(names.Queues, q.Name)
		}
		slices.Sort(names.Queues)
		views := []queueView{}
		for _, name := range slices.Compact(names.Queues) {
			v := queueView{Name: name}
			if i := slices.IndexFunc(paused, func(q store.QueueRow) bool { return q.Name == name }); i >= 0 {
				v.Paused = &paused[i]
			}
			views = append(views, v)
		}
		cell := func(of func(q store.QueueRow) any) func(queueView) any {
			return func(v queueView) any {
				if v.Paused == nil {
					return ""
				}
				return of(*v.Paused)
			}
		}
		return printRows(c, *output, views,
			short("NAME", func(v queueView) any { return v.Name }),
			whole("PAUSED SINCE", cell(func(q store.QueueRow) any { return whenStored(&q.PausedAt) })),
			whole("UNTIL", cell(func(q store.QueueRow) any { return pausedUntil(q.PausedUntil, whenStored) })),
			short("BY", cell(func(q store.QueueRow) any { return q.PausedBy })),
			short("REASON", cell(func(q store.QueueRow) any { return or(q.Reason) })))
	})
}

// pausedUntil says when a pause ends.
func pausedUntil(end store.Time, when func(*store.Time) string) string {
	if end.Infinite == pgtype.Infinity {
		return "resumed"
	}
	return when(&end)
}

func queuesPause() *cobra.Command {
	c := &cobra.Command{
		Use:   "pause NAME...",
		Short: "Stop claims from queues, until they are resumed or a time has come",
		Long: `Stop claims from queues. Tasks that run go on; tasks that wait, and new ones, wait until
the queue is resumed, or the pause ends by itself (--for, --until). A queue that is paused
already gets the new end and reason.`,
		Example: `  onejob queues pause mail --for 30m --reason 'the provider is down'
  onejob queues resume mail`,
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: completeNames(queueNames),
	}
	p := pauseFlags(c, "shown to those who ask why a task waits")
	return withStore(c, func(c *cobra.Command, names []string, db *store.Store) error {
		end, err := p.end(c)
		if err != nil {
			return err
		}
		var paused []string
		err = forEach(c, "queue", names, func(name string) error {
			if err := db.PauseQueue(c.Context(), name, p.reason, end, p.length); err != nil {
				return err
			}
			printf(c.OutOrStdout(), "queue %s is paused\n", name)
			paused = append(paused, name)
			return nil
		})
		noteUnknownNames(c, db, "", paused...)
		return err
	})
}

// pause is what the flags say of one: it ends at a time, after a duration, or neither.
type pause struct {
	reason, until string
	length        time.Duration
}

func pauseFlags(c *cobra.Command, shown string) *pause {
	p := &pause{}
	c.Flags().StringVar(&p.reason, "reason", "", "`text` that says why, "+shown)
	c.Flags().StringVar(&p.until, "until", "", "end of the pause, a `time` such as 2006-01-02T15:04:05Z")
	c.Flags().DurationVar(&p.length, "for", 0, "`duration` of the pause")
	return p
}

// end returns the time at which the pause ends, or zero, and checks the flags.
func (p *pause) end(c *cobra.Command) (end time.Time, err error) {
	if err := exclude(c, "for", "until"); err != nil {
		return end, err
	}
	if p.until != "" {
		if end, err = time.Parse(time.RFC3339, p.until); err != nil {
			return end, usage(fmt.Errorf("--until: invalid time %q; write it as 2006-01-02T15:04:05Z", p.until))
		}
		if !end.After(time.Now()) {
			return end, usage(fmt.Errorf("--until: %s is not in the future", p.until))
		}
	}
	if c.Flags().Changed("for") && p.length < time.Second { // what Postgres cannot count has no end
		return end, usage(errors.New("--for: the duration must be a second or more"))
	}
	return end, nil
}

func queuesResume() *cobra.Command {
	c := &cobra.Command{
		Use:   "resume NAME...",
		Short: "Let replicas claim from paused queues again, at once",
		Args:  cobra.MinimumNArgs(1),
		ValidArgsFunction: completeNames(fromStore(func(ctx context.Context, db *store.Store) (names []string, err error) {
			paused, err := db.PausedQueues(ctx)
			for _, q := range paused {
				names = append(names, q.Name)
			}
			return names, err
		})),
	}
	return withStore(c, func(c *cobra.Command, names []string, db *store.Store) error {
		return eachNamed(c, "queue", names, "resumed", func(name string) (bool, error) {
			return db.ResumeQueue(c.Context(), name)
		}, func(name string) error { return fmt.Errorf("queue %s is not paused", name) })
	})
}
