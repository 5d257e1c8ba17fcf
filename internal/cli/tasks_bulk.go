package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"onejob/internal/plaintext"
	"onejob/store"
)

// A change is something that people do to tasks.
type change struct {
	action store.Action
	done   string // what became of many: "retried"

	short, long string
	statuses    []string // of tasks to which it can be done

	// For tasks that are named by their IDs.
	one     func(*store.Store, context.Context, int64) (bool, error)
	became  string
	refused string
	offered []string // statuses of the IDs that a shell completes
}

var (
	taskCancel = change{
		action: store.ActionCancel, done: "cancelled", statuses: []string{"pending", "running"},
		short: "Cancel tasks: pending ones at once, running ones within seconds",
		long:  "Cancel tasks: pending ones at once, running ones within seconds, as soon as their replica has\nstopped them.",
		one:   (*store.Store).Cancel, became: "cancelled, or will be as soon as its replica has stopped it", refused: "neither pending nor running",
		offered: []string{"pending", "running"},
	}
	taskRetry = change{
		action: store.ActionRetry, done: "retried", statuses: []string{"failed", "cancelled", "succeeded", "pending"},
		short: "Make tasks that are not running due now, with all their attempts",
		long:  "Make tasks due now, with all their attempts: by a filter, those that failed unless --status\nsays otherwise.",
		one:   (*store.Store).Retry, became: "due", refused: "running, or does not exist",
		offered: []string{"failed", "cancelled"},
	}
	taskDelete = change{
		action: store.ActionDelete, done: "deleted", statuses: []string{"failed", "cancelled", "succeeded", "pending"},
		short: "Delete tasks that are not running, and their attempts",
		long:  "Delete tasks that are not running, and their attempts. By a filter, --status is needed.",
		one:   (*store.Store).Delete, became: "deleted", refused: "running, or locked by somebody, or does not exist, or Postgres refuses it",
		offered: []string{"failed", "cancelled", "succeeded", "pending"},
	}
)

// command makes the command of a change: "onejob tasks retry" and so on.
func (ch change) command() *cobra.Command {
	c := &cobra.Command{
		Use:   string(ch.action) + " [ID...]",
		Short: ch.short,
		Long: ch.long + `

Name tasks by their IDs, or choose them by a filter: the flags from --status to --until.
A filter needs one of them at least, and a task must match all of them. On a terminal
you are asked before anything happens; elsewhere --yes is needed. onejob.actions
records who did it, the filter, and to how many tasks.

Many tasks are ` + ch.done + ` 200 at a time, or fewer where that takes long, with pauses. Rows that
somebody has locked are left, and those that Postgres refuses to change, because of a foreign
key for instance, or that alone take longer than postgres.timeout.
Interrupt it whenever you like: what was done is done, and the same command goes on.

Exit codes: 0 done, or nothing matched; 1 not to all of them; 2 usage error.`,
		Example: fmt.Sprintf("  onejob tasks %[1]s 17 18\n  onejob tasks %[1]s --status %s --kind exec --command backup --since 2h --dry-run", ch.action, ch.statuses[0]),

		ValidArgsFunction: completeNames(taskIDs(ch.offered...)),
	}
	status := choiceFlag(c, "status", "", "", "only tasks in this `status`: "+strings.Join(ch.statuses, ", "), ch.statuses...)
	var b store.Bulk
	f := &b.Filter
	c.Flags().StringVar(&f.Kind, "kind", "", "only tasks of this `kind`")
	c.Flags().StringVar(&f.Queue, "queue", "", "only tasks in this `queue`")
	c.Flags().StringVar(&f.Command, "command", "", "only tasks with this `name` of a command (kind exec) or statement (kind sql)")
	c.Flags().StringVar(&f.Error, "error", "", "only tasks whose error contains this `text`, in any case; % is any text, _ any character")
	c.Flags().StringVar(&f.Schedule, "schedule", "", "only tasks of this `schedule`")
	c.Flags().StringVar(&f.Limit, "limit-name", "", "only tasks under this `limit`")
	c.Flags().StringVar(&f.LockKey, "lock-key", "", "only tasks with this lock `key`")
	c.Flags().String("since", "", "only tasks that finished or, if they have not, were created after this `time`: 2006-01-02T15:04:05Z, or 2h for two hours ago")
	c.Flags().String("until", "", "only tasks that finished or were created before this `time`")
	if ch.action == store.ActionRetry {
		c.Flags().DurationVar(&b.Spread, "spread", 0, "let the tasks become due at random times within this `duration`, so that new tasks need not wait behind them")
	}
	c.Flags().BoolVar(&b.Count, "dry-run", false, "count the tasks, and do nothing to them")
	yes := c.Flags().BoolP("yes", "y", false, "do not ask")
	complete(c, "kind", completeValue(kindNames))
	complete(c, "queue", completeValue(queueNames))
	complete(c, "schedule", completeValue(scheduleNames))
	return withStore(c, func(c *cobra.Command, args []string, db *store.Store) error {
		f.Status, b.Action = *status, ch.action
		ago := map[*time.Time]time.Duration{} // before Postgres' clock, which is not this machine's
		for flag, at := range map[string]**time.Time{"since": &f.Since, "until": &f.Until} {
			text := c.Flag(flag).Value.String()
			if text == "" {
				continue
			}
			*at = new(time.Time)
			if d, err := time.ParseDuration(text); err == nil && d >= 0 {
				ago[*at] = d
			} else if **at, err = time.Parse(time.RFC3339, text); err != nil {
				return usage(fmt.Errorf("--%s: invalid time %q; write it as 2006-01-02T15:04:05Z, or as 2h for two hours ago", flag, text))
			}
		}
		chosen := !reflect.ValueOf(*f).IsZero()
		switch {
		case b.Spread < 0:
			return usage(errors.New("--spread: the duration must not be below zero"))
		case len(args) > 0 && (chosen || b.Count || b.Spread != 0):
			return usage(errors.New("name tasks by their IDs, or choose them by flags, not both"))
		case len(args) > 0:
			return ch.each(c, args, db)
		case !chosen:
			return usage(fmt.Errorf("which tasks? Name their IDs, or choose them by flags such as --kind; see %s --help", c.CommandPath()))
		case ch.action == store.ActionDelete && f.Status == "":
			return usage(fmt.Errorf("--status is needed: %s", strings.Join(ch.statuses, ", ")))
		}
		if len(ago) > 0 || f.Until == nil {
			now, err := db.Now(c.Context())
			if err != nil {
				return err
			}
			for at, d := range ago {
				*at = now.Add(-d)
			}
			if f.Until == nil { // the question and what is done are about the same tasks
				f.Until = &now
			}
		}
		return ch.many(c, db, b, *yes)
	})
}

// each does it to the tasks named.
func (ch change) each(c *cobra.Command, args []string, db *store.Store) error {
	ids := map[string]int64{}
	for _, arg := range args {
		id, err := taskID(arg)
		if err != nil {
			return err
		}
		ids[arg] = id
	}
	return forEach(c, "task", args, func(arg string) error {
		id := ids[arg]
		ok, err := ch.one(db, c.Context(), id)
		switch {
		case err != nil:
			return err
		case !ok:
			return fmt.Errorf("task %d is %s", id, ch.refused)
		}
		fmt.Fprintf(c.OutOrStdout(), "task %d is %s\n", id, ch.became)
		return nil
	})
}

// many does it to the tasks that a filter chooses.
func (ch change) many(c *cobra.Command, db *store.Store, b store.Bulk, yes bool) error {
	stderr := c.ErrOrStderr()
	only := b.Count
	b.Count = true
	bar := progressOn(stderr)
	n, err := db.Bulk(c.Context(), b, func(r store.BulkResult) { bar.show("%d tasks so far", r.Matched) })
	bar.clear()
	if err != nil {
		return stoppedAt(c.Context(), err, "nothing was done")
	}
	if n.Matched == 0 {
		note(c, "no task matches")
		noteUnknownNames(c, db, b.Filter.Kind, b.Filter.Queue)
		return nil
	}
	if only {
		fmt.Fprintf(c.OutOrStdout(), "%s would be %s\n", plaintext.Plural(n.Matched, "task"), ch.done)
		return nil
	}
	if !yes {
		if err := ask(c, fmt.Sprintf("%s %s?", strings.ToUpper(string(ch.action[:1]))+string(ch.action[1:]), plaintext.Plural(n.Matched, "task"))); err != nil {
			return err
		}
	}
	b.Count = false
	r, err := db.Bulk(c.Context(), b, func(r store.BulkResult) {
		bar.show("%s %d of %d tasks", ch.done, r.Affected, max(n.Matched, r.Matched))
	})
	bar.clear()
	if err != nil {
		return stoppedAt(c.Context(), err, fmt.Sprintf("%s were %s before; the same command goes on", plaintext.Plural(r.Affected, "task"), ch.done))
	}
	fmt.Fprintf(c.OutOrStdout(), "%s %s\n", ch.done, plaintext.Plural(r.Affected, "task"))
	if left := r.Left(); left > 0 {
		why := "somebody has locked them, or they have changed meanwhile"
		if ch.action == store.ActionRetry {
			why += ", or another task has their unique key"
		}
		why += ", or Postgres refuses it"
		if r.Slow > 0 {
			why += fmt.Sprintf("; %d of them took longer than postgres.timeout", r.Slow)
		}
		note(c, "%s left: %s", plaintext.Plural(left, "task"), why)
		return &exitError{exitFailure, nil}
	}
	return nil
}

// stoppedAt adds to an error, or to an interrupt, how far it went.
func stoppedAt(ctx context.Context, err error, how string) error {
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("interrupted; %s", how)
	case errors.Is(err, store.ErrFilter):
		return usage(err)
	}
	return fmt.Errorf("%w; %s", err, how)
}

// ask asks on a terminal whether to go on, and returns an error if not.
func ask(c *cobra.Command, question string) error {
	in, ok := c.InOrStdin().(*os.File)
	if !ok || !term.IsTerminal(int(in.Fd())) {
		return usage(fmt.Errorf("%s Nobody can be asked here: repeat it with --yes, or look first with --dry-run", question))
	}
	fmt.Fprintf(c.ErrOrStderr(), "%s [y/N] ", question)
	answered := make(chan string, 1)
	go func() {
		answer, _ := bufio.NewReader(in).ReadString('\n')
		answered <- strings.ToLower(strings.TrimSpace(answer))
	}()
	select {
	case answer := <-answered:
		if slices.Contains([]string{"y", "yes"}, answer) {
			return nil
		}
	case <-c.Context().Done():
		fmt.Fprintln(c.ErrOrStderr())
	}
	return errors.New("nothing was done")
}

// progress is a line on a terminal that says how far something is. Elsewhere it says nothing.
type progress struct{ out io.Writer }

func progressOn(w io.Writer) progress {
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		return progress{w}
	}
	return progress{}
}

func (p progress) show(format string, args ...any) {
	if p.out != nil {
		fmt.Fprintf(p.out, "\r\x1b[K"+format, args...)
	}
}

func (p progress) clear() { p.show("") }
