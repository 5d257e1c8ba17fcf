package cli

import (
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
		Short: "Add a task and print its id",
		Long: `Add a task and print its id. The same as an INSERT into onejob.tasks.

The payload is JSON: given as it is, read from a file with @FILE, or from stdin
with -. If a pending or running task has the same unique key, nothing is added,
that is said on stderr, and the exit code is 0.`,
		Example: `  onejob enqueue noop
  onejob enqueue exec --payload '{"command": "backup"}' --lock-key db1 --in 10m`,
		Args: cobra.ExactArgs(1),
	}
	path := configFlag(c)
	var n store.NewTask
	var payload, runAt string
	var priority int16 // as wide as the columns
	var maxAttempts int32
	f := c.Flags()
	f.StringVarP(&payload, "payload", "p", "{}", "`JSON`, @FILE, or - for stdin")
	f.StringVarP(&n.Queue, "queue", "q", "", "`name` of the queue (default \"default\")")
	f.Int16Var(&priority, "priority", 0, "a `number`; higher runs first, -1000 to 1000")
	f.StringVar(&runAt, "run-at", "", "not before this `time`, as 2006-01-02T15:04:05Z; infinity parks it")
	f.DurationVar(&n.Delay, "in", 0, "not before this `duration` has passed")
	f.StringVar(&n.LockKey, "lock-key", "", "`key` of what must not overlap (default: the task itself)")
	f.StringVar(&n.LimitName, "limit", "", "run under a slot of this limit")
	f.StringVar(&n.UniqueKey, "unique-key", "", "`key` of which one pending or running task may exist")
	f.Int32Var(&maxAttempts, "max-attempts", 0, "`number` of attempts before the task fails for good (default 5)")
	f.DurationVar(&n.Timeout, "timeout", 0, "of one attempt (default: none)")
	c.RunE = func(c *cobra.Command, args []string) error {
		if err := exclude(c, "run-at", "in"); err != nil {
			return err
		}
		n.Kind, n.Priority, n.MaxAttempts = args[0], int(priority), int(maxAttempts)
		raw, err := readPayload(payload, c.InOrStdin())
		if err != nil {
			return usage(err)
		}
		n.Payload = raw
		if n.Parked = runAt == "infinity"; runAt != "" && !n.Parked {
			if n.RunAt, err = time.Parse(time.RFC3339, runAt); err != nil {
				return usage(fmt.Errorf("--run-at: %q is no time such as 2006-01-02T15:04:05Z", runAt))
			}
		}
		db, err := openStore(*path)
		if err != nil {
			return err
		}
		defer db.Close()
		id, err := db.Enqueue(c.Context(), n)
		if err != nil {
			return err
		}
		if id == 0 {
			fmt.Fprintf(c.ErrOrStderr(), "onejob: a pending or running task has the unique key %q; nothing was added\n", n.UniqueKey)
			return nil
		}
		fmt.Fprintln(c.OutOrStdout(), id)
		return nil
	}
	return c
}

func readPayload(arg string, stdin io.Reader) (json.RawMessage, error) {
	raw, err := []byte(arg), error(nil)
	switch {
	case arg == "-":
		raw, err = io.ReadAll(stdin)
	case strings.HasPrefix(arg, "@"):
		raw, err = os.ReadFile(arg[1:])
	}
	if err != nil {
		return nil, fmt.Errorf("--payload: %w", err)
	}
	if !json.Valid(raw) {
		return nil, errors.New("--payload is not JSON")
	}
	return raw, nil
}
