//go:build linux

package worker

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"go.uber.org/zap"

	"onejob/internal/logging"
	"onejob/internal/procfs"
	"onejob/internal/supervisor"
	"onejob/lock"
)

// Supervise is the main of a program of your own: what it returns is the exit code. The
// process that was started becomes a supervisor. It starts this program once more as the
// working process, which calls work; work makes a [Config] and hands it to
// [Process.Run]. When the working process crashes, the supervisor kills everything that
// it left behind, makes its death known, so that its tasks are taken over at once, and
// starts the next one. It passes signals on; SIGINT and SIGTERM end the context of work, and
// SIGHUP, as when a terminal is closed, ends a program without a handler for it. A second SIGINT or
// SIGTERM ends the grace period of [Process.Run].
// log gets the supervisor's own lines; nil means JSON on stderr. A reader of stdout or stderr
// that has ended does not end them. All these processes are hidden
// from others of the same user, who cannot read their environment or memory, nor trace
// them; they leave no core dumps.
//
// The supervisor makes a death known by starting this program in the same way: work is
// called there too, and [Process.Run] returns when the death is known. [Process.Reporting]
// is true in that process. Of the [Config] it needs Store, Locks and Log alone. Locks must
// implement [lock.Reporter].
//
// Call it before anything else: what main has done before is done in each process.
func Supervise(log *zap.Logger, work func(ctx context.Context, p *Process) error) (exitCode int) {
	defer logging.SyncStderr()
	logging.SurviveReaders()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	self, err := supervisor.Adopt()
	switch {
	case err != nil:
		logging.Last(os.Stderr, err.Error())
		return supervisor.ExitUsage
	case self == nil:
		return superviseBy(ctx, log)
	}
	err = work(ctx, &Process{self})
	self.Ending() // a panic does not get here
	if err != nil {
		logging.Last(os.Stderr, err.Error())
		return 1
	}
	return 0
}

func superviseBy(ctx context.Context, log *zap.Logger) (exitCode int) {
	if err := procfs.Mounted(); err != nil { // the working process is started by way of /proc/self/exe
		logging.Last(os.Stderr, err.Error())
		return supervisor.ExitUsage
	}
	log = cmp.Or(log, logging.Stderr())
	code, err := supervisor.Run(supervisor.Config{
		Asked:     ctx,
		Crashed:   func(c supervisor.Crash) { c.Log(log) },
		Restarted: func(pid int) { log.Info("worker_restarted", zap.Int("pid", pid)) },
	})
	if err != nil {
		logging.Last(os.Stderr, err.Error())
	}
	return code
}

// Process is the working process of a supervisor, or one that makes the death of others
// known.
type Process struct{ self *supervisor.Worker }

// Reporting reports whether this process only makes the death of others known, instead of
// working on tasks. It may run beside a working process of the same supervisor, so it must
// not listen on the same ports.
func (p *Process) Reporting() bool { return p.self.Dead != nil }

// Run makes a Worker of cfg, whose Process it sets, and runs it as Worker.Run does. Before that it kills what commands of
// dead replicas have left running on this machine. In a process that the supervisor has
// started to make deaths known it uses nothing of cfg but its Store, its Locks and its Log,
// and returns when both know.
func (p *Process) Run(ctx context.Context, cfg Config) error {
	locks, ok := cfg.Locks.(lock.Reporter)
	if !ok {
		return fmt.Errorf("worker: Supervise needs Locks that implement lock.Reporter, and %T does not", cfg.Locks)
	}
	if p.self.Dead != nil {
		log := cmp.Or(cfg.Log, logging.Stderr())
		supervisor.ReportDeath(ctx, log, p.self.Dead, cfg.Store.DeclareProcessDead, locks.ReportDeath, p.self.Ready)
		return nil
	}
	cfg.Process = p.self.Process
	w, err := New(cfg)
	if err != nil {
		return err
	}
	supervisor.Sweep(w.cfg.Log)
	defer supervisor.Hurry(ctx, func() {
		w.cfg.Log.Warn("shutdown_forced")
		w.ForceStop()
	})()
	watching, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		for watching.Err() == nil {
			changed := cfg.Locks.Changed()
			if cfg.Locks.Session() != "" {
				p.self.Ready()
				return
			}
			select {
			case <-changed:
			case <-watching.Done():
			}
		}
	}()
	return w.Run(ctx)
}
