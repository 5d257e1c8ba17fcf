package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/spf13/cobra"

	"onejob/internal/plaintext"
	"onejob/internal/snapshot"
	"onejob/lock/consul"
	"onejob/store"
	"onejob/tasks"
)

func tasksCommand() *cobra.Command {
	c := &cobra.Command{Use: "tasks", Short: "List, show, explain, wait for, cancel, retry and delete tasks"}
	c.AddCommand(tasksList(), tasksShow(), tasksExplain(), tasksLogs(), tasksWait(), taskCancel.command(), taskRetry.command(), taskDelete.command())
	return c
}

func tasksList() *cobra.Command {
	c := &cobra.Command{
		Use:   "list",
		Short: "List tasks, newest first",
		Long: `List tasks, newest first, one page at a time. If there are more, stderr says which
--before leads to the next page. With -o json it is next_before, which is null on
the last page.

  TARGET    the command, URL or statement; for other kinds the payload
  AGE       since the task was created
  DURATION  of the last attempt
  DETAIL    pending: when it is due, and why the last attempt failed or was given back
            running: on which replica
            otherwise: the error

On a terminal, long cells are cut to fit. In a pipe only long targets are, after some
4,000 characters. A payload of more than 256 KiB that is a target is shown by its size.
With -o json everything is whole.

An index serves --status failed and cancelled, and running and pending as long as
there are fewer than some thousands of them. Any other filter reads the newest
tasks, at most --scan of them, so that a list never keeps Postgres busy for long. If
that ends before the page is full, stderr says where to continue.`,
		Example: `  onejob tasks list --status failed --kind exec
  onejob tasks list --status failed -o json | jq '.tasks[].id'`,
		Args: cobra.NoArgs,
	}
	output := outputFlag(c)
	status := choiceFlag(c, "status", "", "", "only tasks in this `status`: "+strings.Join(statuses, ", "), statuses...)
	var f store.Filter
	c.Flags().StringVar(&f.Kind, "kind", "", "only tasks of this `kind`")
	c.Flags().StringVar(&f.Queue, "queue", "", "only tasks in this `queue`")
	c.Flags().IntVar(&f.Limit, "limit", 50, fmt.Sprintf("the `number` of tasks on a page, 1 to %d", mostListed))
	c.Flags().Int64Var(&f.Before, "before", 0, "only tasks older than the one with this `ID`")
	c.Flags().IntVar(&f.Scan, "scan", store.DefaultScan, "read at most this `number` of tasks")
	complete(c, "kind", completeValue(kindNames))
	complete(c, "queue", completeValue(queueNames))
	return withStore(c, func(c *cobra.Command, _ []string, db *store.Store) error {
		switch f.Status = *status; {
		case f.Limit < 1 || f.Limit > mostListed:
			return usage(fmt.Errorf("--limit: %d is not between 1 and %d; for more, use pages (--before)", f.Limit, mostListed))
		case f.Scan < 1:
			return usage(fmt.Errorf("--scan: %d is not above zero", f.Scan))
		case c.Flags().Changed("before") && f.Before < 1:
			return usage(fmt.Errorf("--before: invalid task ID %d", f.Before))
		}
		f.Brief = *output != formatJSON
		page, err := db.List(c.Context(), f)
		if errors.Is(err, store.ErrNoAnswer) {
			return fmt.Errorf("%w, or list fewer tasks with --limit", err)
		}
		if err != nil {
			return err
		}
		switch {
		case page.Cut:
			note(c, "read tasks down to ID %d; continue with --before %[1]d, or read more with --scan", page.Next)
		case page.Next != 0:
			note(c, "there are more; the next page is --before %d", page.Next)
		case len(page.Rows) == 0:
			noteUnknownNames(c, db, f.Kind, f.Queue)
		}
		if *output == formatJSON {
			return printJSON(c.OutOrStdout(), pageViewOf(page))
		}
		now := store.Time{At: page.Now}
		return printRows(c, *output, page.Rows,
			whole("ID", func(r store.Row) any { return r.ID }),
			short("KIND", func(r store.Row) any { return r.Kind }),
			short("TARGET", func(r store.Row) any { return snapshot.Target(r.Kind, r.Payload) }),
			whole("STATUS", func(r store.Row) any { return r.Status }),
			short("QUEUE", func(r store.Row) any { return r.Queue }),
			whole("ATTEMPT", func(r store.Row) any { return fmt.Sprintf("%d/%d", r.Attempt, r.MaxAttempts) }),
			whole("AGE", func(r store.Row) any { return between(r.CreatedAt, now) }),
			whole("DURATION", func(r store.Row) any { return duration(r, now) }),
			short("DETAIL", func(r store.Row) any { return detail(r, now) }))
	})
}

var statuses = []string{"pending", "running", "succeeded", "failed", "cancelled"}

// noteUnknownNames says which names that a command was given nothing has. It says nothing if that
// cannot be known: what the command was for is done.
func noteUnknownNames(c *cobra.Command, db *store.Store, kind string, queues ...string) {
	if kind+strings.Join(queues, "") == "" {
		return
	}
	names, err := db.Names(c.Context())
	if err != nil {
		return
	}
	noteUnknown(c, "kind", kind, names.Kinds)
	for _, queue := range queues {
		noteUnknown(c, "queue", queue, names.Queues)
	}
}

// noteUnknown says that nothing has a name, if that is so.
func noteUnknown(c *cobra.Command, what, name string, known []string) {
	if name != "" && !slices.Contains(known, name) {
		note(c, "no replica, schedule or recent task has %s %s%s", what, strconv.Quote(name), didYouMean(name, known))
	}
}

// duration returns how long the last attempt took, or has been running.
func duration(r store.Row, now store.Time) string {
	switch {
	case r.StartedAt == nil:
		return ""
	case r.Status == "running":
		return between(*r.StartedAt, now)
	case r.FinishedAt != nil:
		return between(*r.StartedAt, *r.FinishedAt)
	}
	return ""
}

// detail says of a task what is worth knowing first.
func detail(r store.Row, now store.Time) string {
	switch r.Status {
	case "running":
		if r.CancelRequested {
			return "on " + or(r.Replica) + ", cancel requested"
		}
		return "on " + or(r.Replica)
	case "pending":
		due := runAt(r)
		if ahead, ok := r.RunAt.Sub(now); ok && ahead > 0 {
			due = "due in " + between(now, r.RunAt)
		} else if ok {
			due = "due for " + between(r.RunAt, now)
		}
		if r.Error != nil && r.StartedAt != nil { // or somebody has retried it since
			due += ": " + *r.Error
		}
		return due
	}
	return or(r.Error)
}

// mostListed is the longest page.
const mostListed = 10_000

// pageView is what -o json shows of a page.
type pageView struct {
	Tasks      []store.Row `json:"tasks"`
	NextBefore *int64      `json:"next_before"` // nil on the last page
}

func pageViewOf(p store.Page) pageView {
	v := pageView{Tasks: notNil(p.Rows)}
	if p.Next != 0 {
		v.NextBefore = &p.Next
	}
	return v
}

// runAt says when a task is due. One that waits until infinity is parked.
func runAt(r store.Row) string {
	if r.RunAt.Infinite == pgtype.Infinity && r.Status == "pending" {
		return "parked"
	}
	return whenStored(&r.RunAt)
}

func tasksShow() *cobra.Command {
	c := &cobra.Command{
		Use:               "show ID",
		Short:             "Show a task and its attempts",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeNames(taskIDs("")),
	}
	path, output := configFlag(c), outputFlag(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		id, err := taskID(args[0])
		if err != nil {
			return err
		}
		db, cfg, err := openConfigured(*path)
		if err != nil {
			return err
		}
		defer db.Close()
		row, attempts, err := db.Show(c.Context(), id)
		if err != nil {
			return err
		}
		why, err := db.Why(c.Context(), id)
		if err != nil {
			return err
		}
		sayCut(c, attempts)
		if *output == formatJSON {
			return printJSON(c.OutOrStdout(), struct {
				store.Row
				Why      string             `json:"why"`
				Attempts []store.AttemptRow `json:"attempts"`
			}{row, why, notNil(attempts)})
		}
		return showTask(c.OutOrStdout(), row, why, attempts, cfg.Consul.Prefix)
	}
	return c
}

// sayCut says so if there may be more attempts than these.
func sayCut(c *cobra.Command, attempts []store.AttemptRow) {
	if len(attempts) == store.MostAttempts {
		note(c, "these are the last %d attempts; onejob.attempts has all", len(attempts))
	}
}

func showTask(w io.Writer, r store.Row, why string, attempts []store.AttemptRow, prefix string) error {
	var t table
	t.line("task", r.ID)
	t.line("kind", r.Kind)
	t.line("status", r.Status)
	if r.CancelRequested && r.Status == "running" {
		t.line("", "cancel requested")
	}
	t.line("why", why)
	if r.Progress != nil {
		t.line("progress", fmt.Sprintf("%v (said at %s)", *r.Progress, when(&r.Progress.SaidAt)))
	}
	t.line("payload", plaintext.FirstLine(string(r.Payload), 200))
	t.line("queue", r.Queue)
	t.line("priority", r.Priority)
	t.line("lock key", or(r.LockKey))
	if r.Status == "running" {
		t.line("in Consul", strings.Join(consul.TaskKeys(prefix, r.ID, r.LockKey), ", or if another task has that: "))
		t.line("session", or(r.Session))
	}
	t.line("limit", or(r.LimitName))
	t.line("unique key", or(r.UniqueKey))
	t.line("schedule", or(r.Schedule))
	t.line("attempts", fmt.Sprintf("%d of %d", r.Attempt, r.MaxAttempts))
	if r.Crashes > 0 {
		t.line("crashes", r.Crashes)
	}
	if r.Stalls > 0 {
		t.line("stalls", r.Stalls)
	}
	t.line("timeout", or(r.Timeout))
	t.line("keep for", or(r.KeepFor))
	t.line("trace", or(r.Traceparent))
	t.line("created", whenStored(&r.CreatedAt))
	t.line("run at", runAt(r))
	t.line("started", whenStored(r.StartedAt))
	t.line("finished", whenStored(r.FinishedAt))
	t.line("replica", or(r.Replica))
	t.line("result", plaintext.FirstLine(string(r.Result), 200))
	t.line("error", or(r.Error))
	if err := t.printLines(w); err != nil {
		return err
	}
	var text bytes.Buffer
	for i, a := range attempts {
		if i > 0 && countsAnew(attempts[i-1], a) {
			text.WriteString("\nsomebody retried the task: its attempts count from 1 again\n")
		}
		showAttempt(&text, a)
	}
	_, err := text.WriteTo(w)
	return err
}

// countsAnew reports whether the task was retried between two attempts: its number falls, or stays
// after an outcome that was final or used the attempt up.
func countsAnew(before, a store.AttemptRow) bool {
	switch tasks.Outcome(before.Outcome) {
	case tasks.Succeeded, tasks.TimedOut, tasks.Cancelled:
		return a.Attempt <= before.Attempt
	}
	return a.Attempt < before.Attempt
}

func showAttempt(w io.Writer, a store.AttemptRow) {
	replica, took := a.Replica, "an unknown time"
	if replica == "" {
		replica = "an unknown replica"
	}
	if d, ok := a.FinishedAt.Sub(a.StartedAt); ok {
		took = d.Round(time.Millisecond).String()
	}
	printf(w, "\nattempt %d: %s on %s, %s, took %s, fence %d\n", a.Attempt, a.Outcome, replica, whenStored(&a.StartedAt), took, a.Fence)
	if a.ExitCode != nil {
		printf(w, "  exit code: %d\n", *a.ExitCode)
	}
	if a.Error != nil {
		printf(w, "  error: %s\n", *a.Error)
	}
	if a.Output != nil {
		fmt.Fprintf(w, "  output:\n    %s\n", strings.ReplaceAll(plaintext.Lines(strings.TrimRight(*a.Output, "\n")), "\n", "\n    "))
	}
}

func taskID(s string) (int64, error) {
	id, err := strconv.ParseInt(s, 10, 64)
	if err != nil || id < 1 {
		return 0, usage(fmt.Errorf("invalid task ID %q", s))
	}
	return id, nil
}
