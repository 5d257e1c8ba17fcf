package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/spf13/cobra"

	"onejob/lock/consul"
	"onejob/store"
)

func tasksCommand() *cobra.Command {
	c := &cobra.Command{Use: "tasks", Short: "List, show, cancel and retry tasks"}
	c.AddCommand(tasksList(), tasksShow(),
		tasksChange("cancel", "Cancel waiting tasks now and running ones soon", "cancelled, or will be as soon as its replica has stopped it", "neither pending nor running", (*store.Store).Cancel),
		tasksChange("retry", "Make tasks that are not running due now, with all their attempts", "due", "not there, or running", (*store.Store).Retry))
	return c
}

func tasksList() *cobra.Command {
	c := &cobra.Command{
		Use:   "list",
		Short: "List tasks, the newest first",
		Long: `List tasks, the newest first, a page at a time. Where there are more, stderr says
which --before leads to the next page; -o json has it as next_before, which is
null on the last page.

--status failed and cancelled are found by an index, running and pending ones too
as long as there are not thousands of them. For every other filter the newest
tasks are looked at, --scan of them at most, so that a list never keeps Postgres
busy for long. If that ends before the page is full, stderr says where to go on.`,
		Example: `  onejob tasks list --status failed --kind exec
  onejob tasks list --status failed -o json | jq '.tasks[].id'`,
		Args: cobra.NoArgs,
	}
	path, output := configFlag(c), outputFlag(c)
	var f store.Filter
	c.Flags().StringVar(&f.Status, "status", "", "only pending, running, succeeded, failed or cancelled ones")
	c.Flags().StringVar(&f.Kind, "kind", "", "only this kind")
	c.Flags().StringVar(&f.Queue, "queue", "", "only this queue")
	c.Flags().IntVar(&f.Limit, "limit", 50, fmt.Sprintf("at most this many, 1 to %d", mostListed))
	c.Flags().Int64Var(&f.Before, "before", 0, "only tasks older than the one with this `ID`")
	c.Flags().IntVar(&f.Scan, "scan", store.DefaultScan, "how many tasks to look at, at most")
	c.RunE = func(c *cobra.Command, _ []string) error {
		asJSON, err := output()
		if err != nil {
			return err
		}
		if statuses := []string{"", "pending", "running", "succeeded", "failed", "cancelled"}; !slices.Contains(statuses, f.Status) {
			return usage(fmt.Errorf("--status: %q is none of%s", f.Status, strings.Join(statuses, " ")))
		}
		switch {
		case f.Limit < 1:
			return usage(fmt.Errorf("--limit: %d is not above zero", f.Limit))
		case f.Limit > mostListed:
			return usage(fmt.Errorf("--limit: %d is above %d; use pages, see --before", f.Limit, mostListed))
		case f.Scan < 1:
			return usage(fmt.Errorf("--scan: %d is not above zero", f.Scan))
		case c.Flags().Changed("before") && f.Before < 1:
			return usage(fmt.Errorf("--before: %d is not a task ID", f.Before))
		}
		db, err := openStore(*path)
		if err != nil {
			return err
		}
		defer db.Close()
		page, err := db.List(c.Context(), f)
		if err != nil {
			return err
		}
		switch {
		case page.Cut:
			fmt.Fprintf(c.ErrOrStderr(), "onejob: looked at tasks down to ID %d; continue with --before %[1]d, or look at more with --scan\n", page.Next)
		case page.Next != 0:
			fmt.Fprintf(c.ErrOrStderr(), "onejob: there are more; the next page is --before %d\n", page.Next)
		}
		if asJSON {
			return printJSON(c.OutOrStdout(), pageViewOf(page))
		}
		t := newTable(c.OutOrStdout())
		t.row("ID", "KIND", "STATUS", "QUEUE", "PRIORITY", "ATTEMPT", "RUN AT", "REPLICA", "ERROR")
		for _, r := range page.Rows {
			t.row(r.ID, r.Kind, r.Status, r.Queue, r.Priority, fmt.Sprintf("%d/%d", r.Attempt, r.MaxAttempts),
				runAt(r), or(r.Replica), firstLine(or(r.Error), 60))
		}
		return t.flush()
	}
	return c
}

// mostListed is the longest page.
const mostListed = 10_000

// pageView is what -o json shows of a page.
type pageView struct {
	Tasks      []store.Row `json:"tasks"`
	NextBefore *int64      `json:"next_before"` // nil on the last page
}

func pageViewOf(p store.Page) pageView {
	v := pageView{Tasks: p.Rows}
	if v.Tasks == nil {
		v.Tasks = []store.Row{}
	}
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
	c := &cobra.Command{Use: "show ID", Short: "Show a task and its attempts", Args: cobra.ExactArgs(1)}
	path, output := configFlag(c), outputFlag(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		asJSON, err := output()
		if err != nil {
			return err
		}
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
		if asJSON {
			if attempts == nil {
				attempts = []store.AttemptRow{}
			}
			return printJSON(c.OutOrStdout(), struct {
				store.Row
				Attempts []store.AttemptRow `json:"attempts"`
			}{row, attempts})
		}
		return showTask(c.OutOrStdout(), row, attempts, cfg.Consul.Prefix)
	}
	return c
}

func showTask(w io.Writer, r store.Row, attempts []store.AttemptRow, prefix string) error {
	t := newTable(w)
	t.line("task", r.ID)
	t.line("kind", r.Kind)
	t.line("status", r.Status)
	if r.CancelRequested && r.Status == "running" {
		t.line("", "somebody asked to cancel it")
	}
	t.line("payload", firstLine(string(r.Payload), 200))
	t.line("queue", r.Queue)
	t.line("priority", r.Priority)
	t.line("lock key", or(r.LockKey))
	if r.Status == "running" {
		t.line("in Consul", strings.Join(consul.TaskKeys(prefix, r.ID, r.LockKey), ", or if another task has that: "))
	}
	t.line("limit", or(r.LimitName))
	t.line("unique key", or(r.UniqueKey))
	t.line("attempts", fmt.Sprintf("%d of %d", r.Attempt, r.MaxAttempts))
	if r.Crashes > 0 {
		t.line("crashes", r.Crashes)
	}
	if r.Stalls > 0 {
		t.line("stalls", r.Stalls)
	}
	t.line("timeout", or(r.Timeout))
	t.line("created", whenStored(&r.CreatedAt))
	t.line("run at", runAt(r))
	t.line("started", whenStored(r.StartedAt))
	t.line("finished", whenStored(r.FinishedAt))
	t.line("replica", or(r.Replica))
	t.line("result", firstLine(string(r.Result), 200))
	t.line("error", or(r.Error))
	if err := t.flush(); err != nil {
		return err
	}
	for _, a := range attempts {
		showAttempt(w, a)
	}
	return nil
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
		fmt.Fprintf(w, "  output:\n    %s\n", strings.ReplaceAll(printableLines(strings.TrimRight(*a.Output, "\n")), "\n", "\n    "))
	}
}

// tasksChange makes a command that does something to each of the tasks named.
func tasksChange(verb, short, done, refused string, do func(*store.Store, context.Context, int64) (bool, error)) *cobra.Command {
	c := &cobra.Command{Use: verb + " ID...", Short: short, Args: cobra.MinimumNArgs(1)}
	path := configFlag(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		ids := make([]int64, len(args))
		for i, arg := range args {
			var err error
			if ids[i], err = taskID(arg); err != nil {
				return err
			}
		}
		db, err := openStore(*path)
		if err != nil {
			return err
		}
		defer db.Close()
		failed := 0
		for _, id := range ids {
			ok, err := do(db, c.Context(), id)
			if err != nil {
				return err
			}
			if ok {
				fmt.Fprintf(c.OutOrStdout(), "task %d is %s\n", id, done)
			} else {
				failed++
				fmt.Fprintf(c.ErrOrStderr(), "onejob: task %d is %s\n", id, refused)
			}
		}
		if failed > 0 {
			return &exitError{exitFailure, nil}
		}
		return nil
	}
	return c
}

func taskID(s string) (int64, error) {
	id, err := strconv.ParseInt(s, 10, 64)
	if err != nil || id < 1 {
		return 0, usage(fmt.Errorf("%q is no task's id", s))
	}
	return id, nil
}

func or(s *string) string { return *cmp.Or(s, new(string)) }
