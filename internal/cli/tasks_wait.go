package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"onejob/internal/pgerror"
	"onejob/internal/plaintext"
	"onejob/internal/retry"
	"onejob/store"
	"onejob/tasks"
)

const (
	waitLook    = 500 * time.Millisecond // how often a task is looked at that is waited for
	lookTimeout = 10 * time.Second       // and how long a look may take
)

const waitCodes = `Exit codes: 0 it succeeded; 1 it failed, was cancelled or is not there, or the wait was
interrupted; 2 usage or configuration error; 75 --timeout is over.`

func tasksWait() *cobra.Command {
	c := &cobra.Command{
		Use:   "wait ID",
		Short: "Wait until a task has ended; exit 0 if it succeeded",
		Long: `Wait until a task has succeeded, failed or been cancelled. The error of one that failed
goes to stderr. It waits while a task is pending, however long that is, and through an
outage of Postgres, which it reports once on stderr; --timeout bounds it.

` + waitCodes,
		Example: `  onejob tasks wait 17 && echo done
  onejob tasks wait 17 --timeout 10m && onejob tasks logs 17`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeNames(taskIDs("")),
	}
	timeout := c.Flags().Duration("timeout", 0, "`duration` to wait at most (default: forever)")
	return withStore(c, func(c *cobra.Command, args []string, db *store.Store) error {
		id, err := taskID(args[0])
		if err != nil {
			return err
		}
		if c.Flags().Changed("timeout") && *timeout <= 0 {
			return usage(fmt.Errorf("--timeout: %v is not above zero", *timeout))
		}
		return waitForTask(c, db, id, false, *timeout)
	})
}

// waitForTask returns when a task has ended: nil if it succeeded. seen says that it is known to
// have been there. If not, an error ends the wait until a look has found the task, unless it is
// one of a Postgres that is unavailable. timeout is zero for none.
func waitForTask(c *cobra.Command, db *store.Store, id int64, seen bool, timeout time.Duration) error {
	ctx := c.Context()
	waiting, cancel := ctx, func() {}
	if timeout > 0 {
		waiting, cancel = context.WithTimeout(ctx, timeout)
	}
	defer cancel()
	var failure error // of the last look
	for said := false; ; {
		look, done := context.WithTimeout(waiting, lookTimeout)
		status, message, err := db.Status(look, id)
		done()
		failure = err
		switch {
		case errors.Is(err, store.ErrNoTask) && seen:
			return fmt.Errorf("task %d is not there any more: it was deleted, by somebody or by retention", id)
		case err != nil && waiting.Err() != nil && !errors.Is(err, store.ErrNoTask):
		case err != nil && !seen && !pgerror.Unavailable(err):
			return err
		case err != nil && !said:
			note(c, "%s; waiting until the task can be read", explain(err))
			said = true
		case err != nil:
		case status == tasks.StatusSucceeded:
			return nil
		case status == tasks.StatusCancelled:
			return fmt.Errorf("task %d was cancelled", id)
		case status == tasks.StatusFailed:
			return fmt.Errorf("task %d failed: %s", id, message)
		default:
			seen, said = true, false
		}
		retry.Pause(waiting, waitLook)
		if ctx.Err() != nil {
			return errors.New("interrupted while waiting for the task")
		}
		switch {
		case waiting.Err() == nil:
		case !seen:
			return &exitError{exitNotYet, fmt.Errorf("task %d could not be read within %v: %s", id, timeout, explain(failure))}
		default:
			return &exitError{exitNotYet, fmt.Errorf("task %d has not ended within %v; onejob tasks explain %[1]d says why", id, timeout)}
		}
	}
}

func tasksLogs() *cobra.Command {
	c := &cobra.Command{
		Use:   "logs ID",
		Short: "Print the output of a task's attempts",
		Long: `Print the output of a task's last attempt that has ended, or of all with --all. It is
kept when an attempt ends; what a running one says meanwhile is its progress (onejob tasks
show). If it has no output, stderr has its error. Control characters are replaced; tasks
show -o json has the output as it is.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeNames(taskIDs("")),
	}
	all := c.Flags().BoolP("all", "a", false, "of all attempts, each after a line that names it")
	return withStore(c, func(c *cobra.Command, args []string, db *store.Store) error {
		id, err := taskID(args[0])
		if err != nil {
			return err
		}
		if _, _, err := db.Status(c.Context(), id); err != nil {
			return err // also if there is no such task
		}
		most := 1 // outputs may be long
		if *all {
			most = store.MostAttempts
		}
		attempts, err := db.Attempts(c.Context(), id, most)
		if err != nil {
			return err
		}
		if len(attempts) == 0 {
			note(c, "no attempt of task %d has ended", id)
		}
		switch {
		case *all:
			sayCut(c, attempts)
		case len(attempts) == 1 && attempts[0].Error != nil && (attempts[0].Output == nil || *attempts[0].Output == ""):
			note(c, "attempt %d of task %d has no output; its error: %s", attempts[0].Attempt, id, plaintext.Printable(*attempts[0].Error))
		}
		var text bytes.Buffer
		for _, a := range attempts {
			if *all {
				printf(&text, "==> attempt %d: %s on %s, %s <==\n", a.Attempt, a.Outcome, a.Replica, whenStored(&a.StartedAt))
			}
			if a.Output != nil {
				text.WriteString(plaintext.Lines(*a.Output))
			}
		}
		_, err = text.WriteTo(c.OutOrStdout())
		return err
	})
}
