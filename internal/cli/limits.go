package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"onejob/lock"
	"onejob/lock/consul"
)

func limitsCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "limits",
		Short: "List, set, show, drain and delete cluster-wide limits",
		Long: `A limit is how many tasks that name it (limit_name), or commands under
"onejob lock -n", run at once across all replicas. It takes effect at once for
all. It is kept in Consul, or in RabbitMQ if limits.backend says so.`,
	}
	c.AddCommand(limitsList(), limitsSet(), limitsShow(), limitsDrain(), limitsDelete())
	return c
}

// limitsOf returns the limits that the configuration leads to.
func limitsOf(configPath string) (lock.Semaphores, error) {
	cfg, err := loadConfig(configPath, os.Environ())
	if err != nil {
		return nil, err
	}
	locks, err := consul.New(cfg.consulConfig())
	if err != nil {
		return nil, usage(err)
	}
	limits, _, err := cfg.limits(locks, zap.NewNop())
	if err != nil {
		return nil, usage(err)
	}
	return limits, nil
}

// limitError adds what to do about err.
func limitError(name string, err error) error {
	switch {
	case errors.Is(err, lock.ErrNoSemaphore):
		return fmt.Errorf("%w; make limit %s with: onejob limits set %s SLOTS", err, name, name)
	case errors.Is(err, lock.ErrForeign):
		return fmt.Errorf("%w; another program keeps something of its own there, and nothing was changed", err)
	case errors.Is(err, lock.ErrInUse):
		return fmt.Errorf("%w; drain it first (onejob limits set %s 0; onejob limits drain %s), or use --force", err, name, name)
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
		asJSON, err := output()
		if err != nil {
			return err
		}
		limits, err := limitsOf(*path)
		if err != nil {
			return err
		}
		names, err := limits.List(c.Context())
		if err != nil {
			return err
		}
		views, failed := []limitView{}, error(nil)
		for _, name := range names {
			s, err := limits.Inspect(c.Context(), name)
			if err != nil {
				failed = errors.Join(failed, limitError(name, err))
				continue
			}
			views = append(views, limitViewOf(s))
		}
		if asJSON {
			return errors.Join(printJSON(c.OutOrStdout(), views), failed)
		}
		t := newTable(c.OutOrStdout())
		t.row("NAME", "SLOTS", "HELD", "WAITING")
		for _, v := range views {
			t.row(v.Name, v.Slots, v.Held, waiting(v.Waiting))
		}
		return errors.Join(t.flush(), failed)
	}
	return c
}

func waiting(n int) string {
	if n < 0 {
		return "?"
	}
	return strconv.Itoa(n)
}

func limitsShow() *cobra.Command {
	c := &cobra.Command{Use: "show NAME", Short: "Show a limit and who holds its slots", Args: cobra.ExactArgs(1)}
	path, output := configFlag(c), outputFlag(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		asJSON, err := output()
		if err != nil {
			return err
		}
		limits, err := limitsOf(*path)
		if err != nil {
			return err
		}
		s, err := limits.Inspect(c.Context(), args[0])
		if err != nil {
			return limitError(args[0], err)
		}
		if asJSON {
			return printJSON(c.OutOrStdout(), limitViewOf(s))
		}
		showLimit(c.OutOrStdout(), limitViewOf(s))
		return nil
	}
	return c
}

func showLimit(w io.Writer, v limitView) {
	printf(w, "limit    %s\nslots    %d\nheld     %d\nwaiting  %s\n", v.Name, v.Slots, v.Held, waiting(v.Waiting))
	for _, h := range v.Holders {
		printf(w, "\nsession %s", h.Session)
		if h.Since != nil {
			printf(w, ", since %s", when(h.Since))
		}
		if len(h.Value) > 0 {
			printf(w, "\n  %s", firstLine(string(h.Value), 200))
		}
		fmt.Fprintln(w)
	}
}

func limitsSet() *cobra.Command {
	c := &cobra.Command{
		Use:   "set NAME SLOTS",
		Short: "Make a limit, or change how many slots it has; 0 pauses it",
		Long: `Make a limit, or change how many slots it has. A raise is felt at once. After a
fall nobody enters until fewer are inside than the new number; nobody is thrown
out. 0 lets nobody in.`,
		Args: cobra.ExactArgs(2),
	}
	path := configFlag(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		name := args[0]
		slots, err := strconv.Atoi(args[1])
		if err != nil {
			return usage(fmt.Errorf("SLOTS: %q is no number", args[1]))
		}
		if err := lock.CheckSemaphore(name, slots); err != nil {
			return usage(err)
		}
		limits, err := limitsOf(*path)
		if err != nil {
			return err
		}
		err = limits.Resize(c.Context(), name, slots)
		if errors.Is(err, lock.ErrNoSemaphore) {
			err = limits.Create(c.Context(), name, slots)
		}
		if err != nil {
			return limitError(name, err)
		}
		fmt.Fprintf(c.OutOrStdout(), "limit %s has %d slots\n", name, slots)
		return nil
	}
	return c
}

func limitsDrain() *cobra.Command {
	c := &cobra.Command{Use: "drain NAME", Short: "Wait until no more slots are held than there are", Args: cobra.ExactArgs(1)}
	path := configFlag(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		limits, err := limitsOf(*path)
		if err != nil {
			return err
		}
		return limitError(args[0], limits.Drain(c.Context(), args[0]))
	}
	return c
}

func limitsDelete() *cobra.Command {
	c := &cobra.Command{
		Use:   "delete NAME",
		Short: "Delete a limit; rows that name it wait from then on",
		Args:  cobra.ExactArgs(1),
	}
	path := configFlag(c)
	force := c.Flags().Bool("force", false, "although slots are held: what runs under them is stopped")
	c.RunE = func(c *cobra.Command, args []string) error {
		limits, err := limitsOf(*path)
		if err != nil {
			return err
		}
		return limitError(args[0], limits.Destroy(c.Context(), args[0], *force))
	}
	return c
}
