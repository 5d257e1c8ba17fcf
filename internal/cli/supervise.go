package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"io"

	"go.uber.org/zap"

	"onejob/internal/logging"
	"onejob/internal/procfs"
	"onejob/internal/supervisor"
)

// greeting is what a working process tells its supervisor, which reads no
// configuration: how to log.
type greeting struct{ Replica, Level, Format string }

func (g greeting) String() string {
	text, _ := json.Marshal(g) // our own type
	return string(text)
}

// supervise runs replicas as processes of their own, one after the other, as long as
// they crash.
func supervise(ctx context.Context, out io.Writer) error {
	if err := procfs.Mounted(); err != nil { // the working process is started by way of /proc/self/exe
		return usage(err)
	}
	var greeted greeting
	lines := &logging.Queue{Out: out}
	log, _ := newLogger(defaults(), lines)
	defer func() { _ = lines.Sync() }()
	code, err := supervisor.Run(supervisor.Config{
		Asked:     ctx,
		ReportEnv: func() []string { return []string{"ONEJOB_REPLICA=" + greeted.Replica} },
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

// reportDeath makes deaths known that the supervisor has seen.
func reportDeath(ctx context.Context, path string, out io.Writer, self *supervisor.Worker) error {
	cfg, db, locks, err := both(path)
	if err != nil {
		return err
	}
	defer db.Close()
	log, _ := newLogger(cfg, &logging.Queue{Out: out})
	defer func() { _ = log.Sync() }()
	supervisor.ReportDeath(ctx, log, self.Dead, db.DeclareProcessDead, locks.ReportDeath, self.Ready)
	return nil
}
