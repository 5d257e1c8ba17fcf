package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"onejob/internal/plaintext"
	"onejob/lock"
	"onejob/lock/consul"
	"onejob/store"
)

func limitsCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "limits",
		Short: "List, show, set, drain and delete cluster-wide limits",
		Long: `A limit is the number of tasks that name it (limit_name), and of commands under
"onejob lock -n", that may run at the same time across all replicas. A change takes
effect immediately. Limits are kept in Consul, or in RabbitMQ with
limits.backend: rabbitmq. What set and delete change is recorded in onejob.actions, if
Postgres is available.`,
	}
	c.AddCommand(limitsList(), limitsSet(), limitsShow(), limitsDrain(), limitsDelete())
	return c
}

// limitsOf returns the limits that the configuration leads to, and the configuration.
func limitsOf(configPath string) (lock.Semaphores, Config, error) {
	cfg, err := loadSettings(configPath, os.Environ())
	if err != nil {
		return nil, cfg, err
	}
	locks, err := consul.New(cfg.consulConfig())
	if err != nil {
		return nil, cfg, usage(err)
	}
	limits, _, err := cfg.limits(locks, zap.NewNop())
	if err != nil {
		return nil, cfg, usage(err)
	}
	return limits, cfg, nil
}

// recordTimeout is how long a command waits for Postgres to record what it did.
const recordTimeout = 5 * time.Second

// recordLimit records in onejob.actions what was done to a limit. That stands whether it is
// recorded or not: limits do not need Postgres.
func recordLimit(c *cobra.Command, cfg Config, action, target string) {
	storeConfig := cfg.storeConfig()
	storeConfig.Actor = actor()
	db, err := store.Open(storeConfig)
	if err == nil {
		defer db.Close()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(c.Context()), recordTimeout)
		defer cancel()
		err = db.Record(ctx, action, target)
	}
	if err != nil {
		note(c, "not recorded in onejob.actions: %v", err)
	}
}

// limitError adds what to do about err, if it is not nil.
func limitError(ctx context.Context, limits lock.Semaphores, name string, err error) error {
	switch {
	case errors.Is(err, lock.ErrNoSemaphore):
		known, _ := limits.List(ctx) // without them there is no suggestion
		return fmt.Errorf("limit %s does not exist%s; create it with: onejob limits set %s SLOTS", name, didYouMean(name, known), plaintext.Argument(name))
	case errors.Is(err, lock.ErrForeign):
		return fmt.Errorf("%w; it belongs to another program, and nothing was changed", err)
	case errors.Is(err, lock.ErrInUse):
		return fmt.Errorf("%w; drain it first (onejob limits set %s 0; onejob limits drain %[2]s), or use --force", err, plaintext.Argument(name))
	}
	return err
}

// limitView is what is shown of a limit.
type limitView struct {
	Name    string       `json:"name"`
	Slots   int          `json:"slots"`
	Held    int          `json:"held"`
	Waiting int          `json:"waiting"`
	Holders []holderView `json:"holders"`
}

type holderView struct {
	Session string          `json:"session"`
	Since   *time.Time      `json:"since,omitempty"`
	Value   json.RawMessage `json:"value,omitempty"`
}

func limitViewOf(s lock.Semaphore) limitView {
	v := limitView{Name: s.Name, Slots: s.Slots, Held: len(s.Holders), Waiting: s.Waiting, Holders: []holderView{}}
	for _, h := range s.Holders {
		hv := holderView{Session: h.Session}
		if !h.Since.IsZero() {
			hv.Since = &h.Since
		}
		switch {
		case json.Valid(h.Value):
			hv.Value = h.Value
		case len(h.Value) > 0: // an outside program may write what it likes
			hv.Value, _ = json.Marshal(string(h.Value))
		}
		v.Holders = append(v.Holders, hv)
	}
	return v
}

func limitsList() *cobra.Command {
	c := &cobra.Command{Use: "list", Short: "List all limits", Args: cobra.NoArgs}
	path, output := configFlag(c), outputFlag(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		limits, _, err := limitsOf(*path)
		if err != nil {
			return err
		}
		names, err := limits.List(c.Context())
		if err != nil {
			return err
		}
		views, failed := []limitView{}, error(nil)
		sems, errs := lock.InspectAll(c.Context(), limits, names)
		for i, s := range sems {
			switch {
			case errs[i] == nil:
				views = append(views, limitViewOf(s))
			case !errors.Is(errs[i], lock.ErrNoSemaphore): // it was deleted meanwhile
				failed = errors.Join(failed, limitError(c.Context(), limits, names[i], errs[i]))
			}
		}
		return errors.Join(failed, printRows(c, *output, views,
			short("NAME", func(v limitView) any { return v.Name }),
			whole("SLOTS", func(v limitView) any { return v.Slots }),
			whole("HELD", func(v limitView) any { return v.Held }),
			whole("WAITING", func(v limitView) any { return waiting(v.Waiting) })))
	}
	return c
}

func waiting(n int) string {
	if n < 0 {
		return "?"
	}
	return strconv.Itoa(n)
}

// withLimit makes run what c does with the limit that its first argument names.
func withLimit(c *cobra.Command, run func(c *cobra.Command, args []string, limits lock.Semaphores, cfg Config) error) *cobra.Command {
	path := configFlag(c)
	c.ValidArgsFunction = completeNames(limitNames)
	c.RunE = func(c *cobra.Command, args []string) error {
		limits, cfg, err := limitsOf(*path)
		if err != nil {
			return err
		}
		return limitError(c.Context(), limits, args[0], run(c, args, limits, cfg))
	}
	return c
}

func limitsShow() *cobra.Command {
	c := &cobra.Command{Use: "show NAME", Short: "Show a limit and what holds its slots", Args: cobra.ExactArgs(1)}
	output := outputFlag(c)
	return withLimit(c, func(c *cobra.Command, args []string, limits lock.Semaphores, _ Config) error {
		s, err := limits.Inspect(c.Context(), args[0])
		if err != nil {
			return err
		}
		if *output == formatJSON {
			return printJSON(c.OutOrStdout(), limitViewOf(s))
		}
		return showLimit(c.OutOrStdout(), limitViewOf(s))
	})
}

func showLimit(w io.Writer, v limitView) error {
	var t table
	t.line("limit", v.Name)
	t.line("slots", v.Slots)
	t.line("held", v.Held)
	t.line("waiting", waiting(v.Waiting))
	if err := t.printLines(w); err != nil {
		return err
	}
	for _, h := range v.Holders {
		printf(w, "\n%s\n  session %s", holderOf(h.Value), h.Session)
		if h.Since != nil {
			printf(w, ", since %s", when(h.Since))
		}
		fmt.Fprintln(w)
	}
	return nil
}

func limitsSet() *cobra.Command {
	c := &cobra.Command{
		Use:   "set NAME SLOTS",
		Short: "Create a limit, or change its number of slots; 0 pauses it",
		Long: `Create a limit, or change its number of slots. Raising it takes effect immediately.
Lowering it never stops running tasks: no task starts until fewer slots are held than
the new number. 0 pauses the limit.`,
		Args: cobra.ExactArgs(2),
	}
	return withLimit(c, func(c *cobra.Command, args []string, limits lock.Semaphores, cfg Config) error {
		name := args[0]
		slots, err := strconv.Atoi(args[1])
		if err != nil {
			return usage(fmt.Errorf("SLOTS: %q is not a number", args[1]))
		}
		if err := lock.CheckSemaphore(name, slots); err != nil {
			return usage(err)
		}
		action, note := "resize limit", ""
		err = limits.Resize(c.Context(), name, slots)
		if errors.Is(err, lock.ErrNoSemaphore) {
			action, note = "create limit", " (it is new)"
			err = limits.Create(c.Context(), name, slots)
		}
		if errors.Is(err, lock.ErrExists) { // somebody else has made it meanwhile
			action, note = "resize limit", ""
			err = limits.Resize(c.Context(), name, slots)
		}
		if err != nil {
			return err
		}
		printf(c.OutOrStdout(), "limit %s has %s%s\n", name, plaintext.Plural(slots, "slot"), note)
		recordLimit(c, cfg, action, fmt.Sprintf("limit %s to %d slots", name, slots))
		return nil
	})
}

func limitsDrain() *cobra.Command {
	c := &cobra.Command{Use: "drain NAME", Short: "Wait until a lowered limit holds: no more slots are held than it has", Args: cobra.ExactArgs(1)}
	return withLimit(c, func(c *cobra.Command, args []string, limits lock.Semaphores, _ Config) error {
		return limits.Drain(c.Context(), args[0])
	})
}

func limitsDelete() *cobra.Command {
	c := &cobra.Command{
		Use:   "delete NAME",
		Short: "Delete a limit; tasks that name it wait until it is created again",
		Args:  cobra.ExactArgs(1),
	}
	force := c.Flags().Bool("force", false, "delete it although slots are held, and stop what runs under them")
	return withLimit(c, func(c *cobra.Command, args []string, limits lock.Semaphores, cfg Config) error {
		if err := limits.Destroy(c.Context(), args[0], *force); err != nil {
			return err
		}
		recordLimit(c, cfg, "delete limit", "limit "+args[0])
		return nil
	})
}
