package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"onejob/store"
)

func enqueueCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "enqueue KIND",
		Short: "Enqueue a task and print its ID",
		Long: `Enqueue a task and print its ID. It does the same as an INSERT into onejob.tasks.

The payload is JSON: the argument itself, the content of a file with @FILE, or stdin
with -. If a pending or running task has the same unique key, nothing is enqueued, a
note goes to stderr, and the exit code is 0.

With --wait the command ends when the task has, however long that takes, and exits as
onejob tasks wait does. If nothing is enqueued, it waits for the task that has the unique
key. --timeout is about an attempt; to bound the wait, use onejob tasks wait ID --timeout.`,
		Example: `  onejob enqueue noop
  onejob enqueue exec --payload '{"command": "backup"}' --lock-key db1 --in 10m`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeNames(kindNames),
	}
	var n store.NewTask
	var payload, runAt string
	var priority int16 // as wide as the columns
	var maxAttempts int32
	f := c.Flags()
	f.StringVarP(&payload, "payload", "p", "{}", "`JSON`, @FILE, or - for stdin")
	f.StringVarP(&n.Queue, "queue", "q", "", "`name` of the queue (default: default)")
	f.Int16Var(&priority, "priority", 0, "`number` from -1000 to 1000; higher runs first")
	f.StringVar(&runAt, "run-at", "", "earliest start, a `time` such as 2006-01-02T15:04:05Z, or infinity to park the task")
	f.DurationVar(&n.Delay, "in", 0, "earliest start, a `duration` from now")
	f.StringVar(&n.LockKey, "lock-key", "", "tasks with the same `key` never overlap (default: the task itself)")
	f.StringVar(&n.LimitName, "limit", "", "run under a slot of the limit with this `name`")
	f.StringVar(&n.UniqueKey, "unique-key", "", "at most one pending or running task has this `key`")
	f.Int32Var(&maxAttempts, "max-attempts", 0, "`number` of attempts before the task fails (default: 5)")
	f.DurationVar(&n.Timeout, "timeout", 0, "`duration` after which an attempt is stopped (default: none)")
	f.DurationVar(&n.KeepFor, "keep-for", 0, "`duration` for which the finished task is kept (default: as retention says)")
	f.StringVar(&n.Traceparent, "traceparent", "", "the `span` that enqueues it, as the HTTP header traceparent has it")
	wait := f.Bool("wait", false, "wait until the task, or the one with the unique key, has ended; exit 0 if it succeeded")
	allowEmpty(c, "traceparent") // a command that is not traced has no TRACEPARENT
	complete(c, "queue", completeValue(queueNames))
	complete(c, "limit", completeValue(limitNames))
	return withStore(c, func(c *cobra.Command, args []string, db *store.Store) error {
		if err := exclude(c, "run-at", "in"); err != nil {
			return err
		}
		if n.Delay < 0 {
			return usage(fmt.Errorf("--in: %v is below zero", n.Delay))
		}
		n.Kind, n.Priority, n.MaxAttempts = args[0], int(priority), int(maxAttempts)
		zeroes(c, &n)
		raw, err := readPayload(c.Context(), payload, c.InOrStdin())
		if c.Context().Err() != nil {
			return errors.New("interrupted; nothing was enqueued")
		}
		if err != nil {
			return usage(err)
		}
		n.Payload = raw
		if n.Parked = runAt == "infinity"; runAt != "" && !n.Parked {
			if n.RunAt, err = time.Parse(time.RFC3339, runAt); err != nil {
				return usage(fmt.Errorf("--run-at: invalid time %q; write it as 2006-01-02T15:04:05Z", runAt))
			}
		}
		id, err := db.Enqueue(c.Context(), n)
		if err != nil {
			return err
		}
		if id == 0 {
			note(c, "a pending or running task has the unique key %q; nothing was enqueued", n.UniqueKey)
			if !*wait {
				return nil
			}
			if id, err = db.Unended(c.Context(), n.UniqueKey); err != nil {
				return err
			}
			if id == 0 {
				return fmt.Errorf("the task with the unique key %q has just ended, so nothing was waited for; run the command again", n.UniqueKey)
			}
			return waitForTask(c, db, id, true, 0)
		}
		fmt.Fprintln(c.OutOrStdout(), id)
		if *wait {
			return waitForTask(c, db, id, true, 0)
		}
		return nil
	})
}

// zeroes keeps apart flags that were given as zero, and those that were not given: to a NewTask
// both are the same.
func zeroes(c *cobra.Command, n *store.NewTask) {
	for flag, d := range map[string]*time.Duration{"timeout": &n.Timeout, "keep-for": &n.KeepFor} {
		if c.Flags().Changed(flag) && *d == 0 {
			*d = time.Nanosecond // is zero to Postgres, which counts microseconds
		}
	}
	if c.Flags().Changed("max-attempts") && n.MaxAttempts == 0 {
		n.MaxAttempts = -1 // is refused as 0 is, by the same constraint
	}
}

// readPayload reads the payload of a flag. stdin, and a FILE that is a pipe, may never end, so
// it returns when ctx ends; its goroutine lasts until the process does.
func readPayload(ctx context.Context, arg string, stdin io.Reader) (json.RawMessage, error) {
	raw, err := []byte(arg), error(nil)
	read := make(chan struct{})
	go func() {
		defer close(read)
		switch {
		case arg == "-":
			raw, err = io.ReadAll(stdin)
		case strings.HasPrefix(arg, "@"):
			raw, err = os.ReadFile(arg[1:])
		}
	}()
	select {
	case <-read:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if err != nil {
		return nil, fmt.Errorf("--payload: %w", err)
	}
	if !json.Valid(raw) {
		return nil, errors.New("--payload: invalid JSON")
	}
	return raw, nil
}
