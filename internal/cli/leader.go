package cli

import (
	"encoding/json"
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
		Short: "Tell which replica leads; needs Consul alone",
		Long: `Tell which replica leads: it makes the tasks of schedules, and deletes old ones.
It is who holds the key <consul.prefix>/leader, which any program may read, or
hold, by Consul's own procedure for leader elections. What another program has
written there is shown as it is.

With --watch every change is told, a line each, until Ctrl-C.

Exit codes: 0 somebody leads, or --watch was ended; 1 nobody leads, or Consul
cannot be asked; 2 the command line or the configuration is wrong.`,
		Args: cobra.NoArgs,
	}
	path, output := configFlag(c), outputFlag(c)
	watch := c.Flags().BoolP("watch", "w", false, "go on and tell every change")
	c.RunE = func(c *cobra.Command, _ []string) error {
		asJSON, err := output()
		if err != nil {
			return err
		}
		cfg, err := loadConfig(*path, os.Environ())
		if err != nil {
			return err
		}
		locks, err := consul.New(cfg.consulConfig())
		if err != nil {
			return usage(err)
		}
		out := c.OutOrStdout()
		leader, err := locks.Leader(c.Context()) // when Consul is away a watch would wait, and say nothing
		switch {
		case err != nil:
			return stopped(c.Context(), err)
		case *watch && asJSON:
			lines := json.NewEncoder(out)
			return locks.WatchLeader(c.Context(), func(l *consul.Leader) { _ = lines.Encode(viewOf(l)) })
		case *watch:
			return locks.WatchLeader(c.Context(), func(l *consul.Leader) {
				printf(out, "%s  %s\n", time.Now().Format(time.TimeOnly), leads(l))
			})
		case asJSON:
			err = printJSON(out, viewOf(leader))
		case leader != nil:
			showLeader(out, leader)
		}
		if err == nil && leader == nil {
			err = errors.New("nobody leads")
		}
		return err
	}
	return c
}

// foreign reports whether an outside program leads whose value is not as a
// replica would write it.
func foreign(l *consul.Leader) bool { return l.Name == "" || l.Since.IsZero() }

// viewOf returns what is shown of the leader as JSON; nil if nobody leads.
func viewOf(l *consul.Leader) any {
	if l == nil || !foreign(l) {
		return l
	}
	return struct {
		Session string `json:"session"`
		Value   string `json:"value"`
	}{l.Session, string(l.Value)}
}

func showLeader(w io.Writer, l *consul.Leader) {
	if foreign(l) {
		printf(w, "%s\n", leads(l))
		return
	}
	printf(w, "%s leads\n  host     %s\n  pid      %d\n  http     %s\n  version  %s\n  since    %s\n  session  %s\n",
		l.Name, l.Host, l.PID, l.HTTP, l.Version, when(&l.Since), l.Session)
}

// leads says in a line who leads.
func leads(l *consul.Leader) string {
	switch {
	case l == nil:
		return "nobody leads"
	case foreign(l):
		return fmt.Sprintf("another program leads: %#q (session %s)", l.Value, l.Session)
	}
	return fmt.Sprintf("%s leads (process %d on %s, http %s, since %s, session %s)", l.Name, l.PID, l.Host, l.HTTP, when(&l.Since), l.Session)
}
