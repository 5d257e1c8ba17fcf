package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	memlimit "github.com/KimMachineGun/automemlimit/memlimit"
	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"onejob/internal/logging"
	"onejob/internal/metrics"
	"onejob/internal/pgerror"
	"onejob/internal/retry"
	"onejob/internal/supervisor"
	"onejob/internal/tracing"
	"onejob/lock/consul"
	"onejob/store"
	"onejob/tasks"
	"onejob/worker"
)

func serveCommand(handlers tasks.Kinds) *cobra.Command {
	c := &cobra.Command{
		Use:   "serve",
		Short: "Run a replica until SIGTERM or SIGINT",
		Long: `Run a replica: claim due tasks, lock each in Consul, run it and record its outcome.
Start as many replicas as you like.

SIGHUP reloads kinds, limits and log.level from the configuration. Running tasks
continue. If the new configuration is invalid, the old one stays in force.

SIGTERM or SIGINT: the replica claims no more tasks. Running tasks may continue for
worker.shutdown_grace; then they are cancelled and requeued, which does not use up an
attempt. A second signal ends the grace period immediately.

The process that you start is a supervisor; its child does the work. If the child
crashes, the supervisor kills what it left running, releases its locks and starts a
new one. Send signals to the supervisor, which passes them on.`,
		Args: cobra.NoArgs,
	}
	path := configFlag(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		reload := make(chan os.Signal, 1) // before Adopt, or SIGHUP would end the process
		signal.Notify(reload, syscall.SIGHUP)
		logging.SurviveReaders()
		self, err := supervisor.Adopt()
		switch {
		case err != nil:
			return usage(err)
		case self == nil:
			defer signal.Stop(reload) // what comes before the supervisor listens is for no worker: the first one is yet to read the file
			return supervise(c.Context(), stdoutOf(c))
		case self.Dead != nil:
			err = reportDeath(c.Context(), *path, stdoutOf(c), self)
		default:
			err = work(c.Context(), *path, handlers, stdoutOf(c), self, reload)
		}
		self.Ending() // a panic does not get here
		return err
	}
	return c
}

// work is the working process of a replica.
func work(ctx context.Context, path string, handlers tasks.Kinds, out io.Writer, self *supervisor.Worker, reload <-chan os.Signal) error {
	cfg, err := loadConfig(path, os.Environ())
	if err != nil {
		return err
	}
	self.Hello(greeting{cfg.Replica, cfg.Log.Level, cfg.Log.Format}.String())
	return serve(ctx, path, cfg, handlers, out, self, reload)
}

// gcPercent is how far a replica's heap may grow over what is in use before it is
// collected, unless the environment has a GOGC. What is in use is little, a few
// MB, and what each task leaves behind is most of it; with Go's 100 much of the
// replica's processor time goes into collecting it (docs/why/performance.md).
const gcPercent = 400

// limitMemory sets how the heap may grow: far over what is in use, as long as that is
// little, but not to where the kernel ends the process. The limit is nine tenths of
// what the cgroup allows, or the machine has; a GOMEMLIMIT takes its place.
func limitMemory(log *zap.Logger) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	limit, err := memlimit.SetGoMemLimitWithOpts(memlimit.WithRatio(0.9), memlimit.WithLogger(slog.New(slog.DiscardHandler)),
		memlimit.WithProvider(memlimit.ApplyFallback(memlimit.FromCgroup, memlimit.FromSystem)))
	if err != nil {
		log.Debug("memory_unlimited", zap.Error(err))
		return
	}
	log.Debug("memory_limited", zap.Int64("bytes", limit))
}

// serve wires a replica together and runs it until ctx ends.
func serve(ctx context.Context, path string, cfg Config, handlers tasks.Kinds, out io.Writer, self *supervisor.Worker, reload <-chan os.Signal) error {
	lines := &logging.Queue{Out: out}
	log, level := newLogger(cfg, lines)
	defer func() { _ = log.Sync() }()
	limitMemory(log)
	if err := prepareCommands(cfg.Kinds.Exec, log); err != nil {
		return err
	}

	shown := metrics.New(version())
	storeConfig := cfg.storeConfig()
	storeConfig.Measure = shown.Store
	db, err := store.Open(storeConfig)
	if err != nil {
		return usage(err)
	}
	defer db.Close()

	health := &health{store: db, metrics: shown.Handler()}
	address, stopHealth, err := health.listen(cfg, log)
	if err != nil {
		return err
	}
	defer stopHealth()

	lockConfig := cfg.consulConfig()
	lockConfig.Log, lockConfig.Measure = log, shown.Consul
	lockConfig.Replica.HTTP = address
	locks, err := consul.New(lockConfig)
	if err != nil {
		return usage(err)
	}
	health.locks.Store(locks)
	kinds, err := cfg.kinds(db, handlers)
	if err != nil {
		return usage(err)
	}
	limits, broker, err := cfg.limits(locks, log)
	if err != nil {
		return usage(err)
	}
	health.limits.Store(&limits)
	if broker != nil { // for longer than the replica, which gives its slots back
		defer background(context.WithoutCancel(ctx), broker.Run)()
	}
	tracer, stopTracing, err := tracing.New(ctx, cfg.Replica, version(), log)
	if err != nil {
		return usage(err)
	}
	defer stopTracing()
	workerConfig := cfg.workerConfig()
	workerConfig.Store, workerConfig.Locks, workerConfig.Kinds, workerConfig.Limits = db, locks, kinds, limits
	workerConfig.Process = self.Process
	workerConfig.Measure, workerConfig.Tracer, workerConfig.Log = shown.Worker, tracer, log
	replica, err := worker.New(workerConfig)
	if err != nil {
		return usage(err)
	}
	leading := func() bool { return replica.Status().Leading }
	shown.Watch(
		metrics.Process{Status: replica.Status, LeaseLeft: locks.LeaseLeft, Pool: db.Pool().Stat, LinesDropped: lines.Lost},
		&metrics.Backlog{Leading: leading, Store: db})
	if limits != nil {
		shown.Watch(&metrics.Limits{Leading: leading, Limits: limits})
	}

	if err := prepare(ctx, cfg, db, log); err != nil {
		return stopped(ctx, err)
	}
	health.replica.Store(replica)
	log.Info("replica_started", zap.String("version", version()), zap.Int("pid", os.Getpid()), zap.String("http", address),
		zap.String("consul", lockConfig.Client.Address), zap.String("prefix", cfg.Consul.Prefix), zap.Int("concurrency", cfg.Worker.Concurrency))

	defer supervisor.Hurry(ctx, func() {
		log.Warn("shutdown_forced")
		replica.ForceStop()
	})()

	run, stop := context.WithCancelCause(ctx)
	var starting sync.WaitGroup
	defer starting.Wait()
	defer stop(nil)
	starting.Go(func() {
		if err := getSession(run, locks, cfg.StartTimeout); err == nil {
			self.Ready()
		} else if run.Err() == nil {
			stop(err)
		}
	})
	done := make(chan error, 1)
	go func() { done <- replica.Run(run) }()
	for {
		select {
		case <-reload:
			cfg = reloaded(path, cfg, handlers, db, replica, broker, level, log)
			health.setSlots(cfg.Limits.Slots)
		case err := <-done:
			if ctx.Err() == nil { // nobody told us to stop
				err = errors.Join(context.Cause(run), err)
			}
			log.Info("replica_stopped")
			return err
		}
	}
}

// getSession waits for a session in Consul.
func getSession(ctx context.Context, locks *consul.Locker, within time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	if err := locks.Ready(ctx); err != nil {
		return fmt.Errorf("no session within start_timeout (%v): %w", within, err)
	}
	return nil
}

// prepare waits for Postgres and sees to the schema.
func prepare(ctx context.Context, cfg Config, db *store.Store, log *zap.Logger) error {
	deadline := time.Now().Add(cfg.StartTimeout)
	var why error // of the last try that was not cut short
	for tries := 0; ; tries++ {
		try, cancel := context.WithDeadline(ctx, deadline)
		err := db.Ping(try)
		if err != nil && (try.Err() == nil || why == nil) {
			why = err
		}
		cancel()
		switch {
		case err == nil && tries > 0:
			log.Info("postgres_recovered")
			fallthrough
		case err == nil:
			if db.Pooled() {
				log.Info("pooler_detected")
			}
			if err = migrate(ctx, deadline, cfg, db, log); !pgerror.Unavailable(err) {
				return err
			}
			why = err // it is gone again
		}
		switch {
		case ctx.Err() != nil:
			return ctx.Err() // told to stop before it began
		case !time.Now().Before(deadline):
			return fmt.Errorf("no Postgres within start_timeout (%v): %w", cfg.StartTimeout, why)
		case tries%10 == 0:
			log.Warn("postgres_unavailable", zap.Error(err))
		}
		retry.Pause(ctx, min(time.Second, time.Until(deadline)))
	}
}

// migrate sees to the schema. It waits for another migration, and for transactions that
// keep it from locking the tables, until the deadline.
func migrate(ctx context.Context, deadline time.Time, cfg Config, db *store.Store, log *zap.Logger) error {
	if !cfg.Postgres.Migrate {
		return db.CheckSchema(ctx)
	}
	return db.Migrate(ctx, &store.Progress{
		WaitAtMost: max(time.Until(deadline), time.Second),
		Applied: func(number int, name string) {
			log.Info("migration_applied", zap.Int("number", number), zap.String("name", name))
		},
		Changed: func(what string) { log.Warn("migration_changed_rows", zap.String("what", what)) },
		Waiting: func(pid int, name string, long bool) {
			holder := []zap.Field{zap.Int("holder_pid", pid), zap.String("holder_application", name)}
			if long {
				log.Warn("migration_waiting", holder...)
			} else {
				log.Info("migration_waiting", holder...)
			}
		},
		Blocked: func(name string, waited time.Duration, by []store.Blocker) {
			var pids []int
			var blockers []string
			for _, b := range by {
				if b.PID != 0 {
					pids = append(pids, b.PID)
				}
				blockers = append(blockers, b.String())
			}
			log.Warn("migration_blocked", zap.String("name", name), zap.Duration("waited", waited), zap.Ints("pids", pids), zap.Strings("blockers", blockers))
		},
	})
}
