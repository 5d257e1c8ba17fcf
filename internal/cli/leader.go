package cli

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"onejob/lock/consul"
)

func leaderCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "leader",
		Short: "Show which replica is the leader; needs only Consul",
		Long: `Show which replica is the leader. The leader runs schedules and retention. It holds
the key <consul.prefix>/leader, by Consul's documented procedure for leader elections,
so other programs can read it or take part. If another program holds the key, its
value is shown as it is.

With --watch, print a line for every change until Ctrl-C.

Exit codes: 0 there is a leader, or --watch was stopped; 1 there is no leader, or
Consul is unavailable; 2 usage or configuration error.`,
		Args: cobra.NoArgs,
	}
	path, output := configFlag(c), outputFlag(c)
	watch := c.Flags().BoolP("watch", "w", false, "print every change until Ctrl-C")
	c.RunE = func(c *cobra.Command, _ []string) error {
		asJSON := *output == formatJSON
		cfg, err := loadSettings(*path, os.Environ())
		if err != nil {
			return err
		}
		locks, err := consul.New(cfg.consulConfig())
		if err != nil {
			return usage(err)
		}
		out := c.OutOrStdout()
		leader, err := locks.Leader(c.Context()) // if Consul is unavailable a watch would wait in silence
		switch {
		case err != nil && *watch:
			return stopped(c.Context(), err)
		case err != nil:
			return err
		case *watch && asJSON:
			return locks.WatchLeader(c.Context(), func(l *consul.Leader) { _ = lineJSON(out, viewOf(l)) })
		case *watch:
			return locks.WatchLeader(c.Context(), func(l *consul.Leader) {
				now := time.Now()
				printf(out, "%s  %s\n", when(&now), leads(l))
			})
		case asJSON:
			err = printJSON(out, viewOf(leader))
		case leader != nil:
			err = showLeader(out, leader)
		}
		if err == nil && leader == nil {
			err = errors.New("there is no leader")
		}
		return err
	}
	return c
}

// foreign reports whether the leader is another program, whose value is not what a
// replica writes.
func foreign(l *consul.Leader) bool { return l.Name == "" || l.Since.IsZero() }

// viewOf returns what is shown of the leader as JSON, or nil if there is none.
func viewOf(l *consul.Leader) any {
	if l == nil || !foreign(l) {
		return l
	}
	return struct {
		Session string `json:"session"`
		Value   string `json:"value"`
	}{l.Session, string(l.Value)}
}

func showLeader(w io.Writer, l *consul.Leader) error {
	if foreign(l) {
		printf(w, "%s\n", leads(l))
		return nil
	}
	var t table
	t.line("leader", l.Name)
	t.line("host", l.Host)
	t.line("pid", l.PID)
	t.line("http", l.HTTP)
	t.line("version", l.Version)
	t.line("since", when(&l.Since))
	t.line("session", l.Session)
	return t.printLines(w)
}

// leads returns a line that says who the leader is.
func leads(l *consul.Leader) string {
	switch {
	case l == nil:
		return "there is no leader"
	case foreign(l):
		return fmt.Sprintf("the leader is another program: %#q (session %s)", l.Value, l.Session)
	}
	return fmt.Sprintf("the leader is %s (process %d on %s, http %s, since %s, session %s)", l.Name, l.PID, l.Host, l.HTTP, when(&l.Since), l.Session)
}
