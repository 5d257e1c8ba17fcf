package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/google/uuid"
	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"onejob/internal/logging"
	"onejob/internal/supervisor"
)

// supervisedVariable carries the identity of a working process.
const supervisedVariable = "ONEJOB_SUPERVISED"

// greeting is what a working process tells its supervisor, which reads no
// configuration: how to log.
type greeting struct{ Replica, Level, Format string }

func (g greeting) String() string {
	text, err := json.Marshal(g)
	if err != nil {
		panic(err) // our own type
	}
	return string(text)
}

// supervise runs replicas as processes of their own, one after the other, as long as
// they crash.
func supervise(ctx context.Context, path string, out io.Writer) error {
	var greeted greeting
	lines := &logging.Queue{Out: out}
	log, _ := newLogger(defaults(), lines)
	defer func() { _ = lines.Sync() }()
	reportDeath := func(processes []string) (args, env []string) {
		args = []string{os.Args[0], "bury", "--config", path}
		for _, p := range processes {
			args = append(args, "--process", p)
		}
		return args, append(os.Environ(), "ONEJOB_REPLICA="+greeted.Replica)
	}
	code, err := supervisor.Run(supervisor.Config{
		Variable:    supervisedVariable,
		Asked:       ctx,
		ReportDeath: reportDeath,
		Hello: func(text string) {
			if json.Unmarshal([]byte(text), &greeted) == nil {
				c := defaults()
				c.Replica, c.Log.Level, c.Log.Format = greeted.Replica, greeted.Level, greeted.Format
				log, _ = newLogger(c, lines)
			}
		},
		Crashed:   func(c supervisor.Crash) { c.Log(log) },
		Restarted: func(pid int) { log.Info("worker_restarted", zap.Int("pid", pid)) },
	})
	if err != nil || code != 0 {
		return &exitError{cmp.Or(code, exitFailure), err}
	}
	return nil
}

func reportDeathCommand() *cobra.Command {
	c := &cobra.Command{
		Use:    "bury",
		Short:  "Declare processes dead: the supervisor runs this",
		Hidden: true,
		Args:   cobra.NoArgs,
	}
	path := configFlag(c)
	processes := c.Flags().StringArray("process", nil, "`uuid` of a dead working process")
	c.RunE = func(c *cobra.Command, _ []string) error {
		logging.SurviveReaders()
		self, err := supervisor.Adopt(supervisedVariable)
		if err != nil {
			return usage(err)
		}
		for _, p := range *processes {
			if _, err := uuid.Parse(p); err != nil {
				return usage(fmt.Errorf("--process: %q is not a uuid", p))
			}
		}
		cfg, db, locks, err := both(*path)
		if err != nil {
			return err
		}
		defer db.Close()
		log, _ := newLogger(cfg, &logging.Queue{Out: c.OutOrStdout()})
		defer func() { _ = log.Sync() }()
		supervisor.ReportDeath(c.Context(), log, *processes, db.DeclareProcessDead, locks.ReportDeath, self.Ready)
		return nil
	}
	return c
}
