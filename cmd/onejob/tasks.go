package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"onejob/store"
)

func tasksCommand() *cobra.Command {
	c := &cobra.Command{Use: "tasks", Short: "List, show, cancel and retry tasks"}
	c.AddCommand(tasksList(), tasksShow(),
		tasksChange("cancel", "Cancel waiting tasks now and running ones soon", "cancelled, or will be as soon as its replica has stopped it", "neither pending nor running", (*store.Store).Cancel),
		tasksChange("retry", "Make tasks that are not running due now, with all their attempts", "due", "not there, or running", (*store.Store).Retry))
	return c
}

// outputFlag adds -o to a command that lists something.
func outputFlag(c *cobra.Command) func() (asJSON bool, err error) {
	o := c.Flags().StringP("output", "o", "text", "text or json")
	return func() (bool, error) {
		switch *o {
		case "text", "json":
			return *o == "json", nil
		}
		return false, usage(fmt.Errorf("--output: %q is neither text nor json", *o))
	}
}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func tasksList() *cobra.Command {
	c := &cobra.Command{Use: "list", Short: "List tasks, the newest first", Args: cobra.NoArgs}
	path, output := configFlag(c), outputFlag(c)
	var f store.Filter
	c.Flags().StringVar(&f.Status, "status", "", "only pending, running, succeeded, failed or cancelled ones")
	c.Flags().StringVar(&f.Kind, "kind", "", "only this kind")
	c.Flags().StringVar(&f.Queue, "queue", "", "only this queue")
	c.Flags().IntVar(&f.Limit, "limit", 50, "at most this many")
	c.RunE = func(c *cobra.Command, _ []string) error {
		asJSON, err := output()
		if err != nil {
			return err
		}
		if statuses := []string{"", "pending", "running", "succeeded", "failed", "cancelled"}; !slices.Contains(statuses, f.Status) {
			return usage(fmt.Errorf("--status: %q is none of%s", f.Status, strings.Join(statuses, " ")))
		}
		if f.Limit < 1 {
			return usage(fmt.Errorf("--limit: %d is not above zero", f.Limit))
		}
		db, err := openStore(*path)
		if err != nil {
			return err
		}
		defer db.Close()
		rows, err := db.List(c.Context(), f)
		if err != nil {
			return err
		}
		if asJSON {
			if rows == nil {
				rows = []store.Row{}
			}
			return printJSON(c.OutOrStdout(), rows)
		}
		t := tabwriter.NewWriter(c.OutOrStdout(), 0, 0, 2, ' ', 0)
		fmt.Fprintln(t, "ID\tKIND\tSTATUS\tQUEUE\tPRIORITY\tATTEMPT\tRUN AT\tREPLICA\tERROR")
		for _, r := range rows {
			fmt.Fprintf(t, "%d\t%s\t%s\t%s\t%d\t%d/%d\t%s\t%s\t%s\n", r.ID, r.Kind, r.Status, r.Queue, r.Priority, r.Attempt, r.MaxAttempts,
				when(&r.RunAt), or(r.Replica), firstLine(or(r.Error), 60))
		}
		return t.Flush()
	}
	return c
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
		db, err := openStore(*path)
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
		showTask(c.OutOrStdout(), row, attempts)
		return nil
	}
	return c
}

func showTask(w io.Writer, r store.Row, attempts []store.AttemptRow) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	line := func(name string, value any) {
		if s := fmt.Sprint(value); s != "" {
			fmt.Fprintf(t, "%s\t%s\n", name, s)
		}
	}
	line("task", r.ID)
	line("kind", r.Kind)
	line("status", r.Status)
	if r.CancelRequested && r.Status == "running" {
		line("", "somebody asked to cancel it")
	}
	line("payload", firstLine(string(r.Payload), 200))
	line("queue", r.Queue)
	line("priority", r.Priority)
	line("lock key", or(r.LockKey))
	line("limit", or(r.LimitName))
	line("unique key", or(r.UniqueKey))
	line("attempts", fmt.Sprintf("%d of %d", r.Attempt, r.MaxAttempts))
	if r.Crashes > 0 {
		line("crashes", r.Crashes)
	}
	line("timeout", or(r.Timeout))
	line("created", when(&r.CreatedAt))
	line("run at", when(&r.RunAt))
	line("started", when(r.StartedAt))
	line("finished", when(r.FinishedAt))
	line("replica", or(r.Replica))
	line("result", firstLine(string(r.Result), 200))
	line("error", or(r.Error))
	_ = t.Flush()
	for _, a := range attempts {
		fmt.Fprintf(w, "\nattempt %d: %s on %s, %s, took %v, fence %d\n", a.Attempt, a.Outcome, a.Replica, when(&a.StartedAt),
			a.FinishedAt.Sub(a.StartedAt).Round(time.Millisecond), a.Fence)
		if a.ExitCode != nil {
			fmt.Fprintf(w, "  exit code: %d\n", *a.ExitCode)
		}
		if a.Error != nil {
			fmt.Fprintf(w, "  error: %s\n", *a.Error)
		}
		if a.Output != nil {
			fmt.Fprintf(w, "  output:\n    %s\n", strings.ReplaceAll(strings.TrimRight(*a.Output, "\n"), "\n", "\n    "))
		}
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

func when(t *time.Time) string {
	if t == nil {
		return ""
	}
	return t.Local().Format("2006-01-02 15:04:05.000")
}

func or(s *string) string { return *cmp.Or(s, new(string)) }

// firstLine returns the beginning of s, for a table.
func firstLine(s string, n int) string {
	s, _, more := strings.Cut(s, "\n")
	if r := []rune(s); len(r) > n {
		s, more = string(r[:n]), true
	}
	if more {
		s += " ..."
	}
	return s
}
