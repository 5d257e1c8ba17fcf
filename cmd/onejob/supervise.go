package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"onejob/internal/guard"
	"onejob/internal/supervisor"
	"onejob/lock/consul"
	"onejob/store"
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
// they crash. It uses little memory: it is always there, and has little to do.
func supervise(ctx context.Context, path string, out io.Writer) error {
	if err := guard.Conceal(); err != nil {
		return err
	}
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(20)
	debug.FreeOSMemory()

	var worker greeting
	log := newLogger(defaults(), out)
	bury := func(processes []string) (args, env []string) {
		args = []string{os.Args[0], "bury", "--config", path}
		for _, p := range processes {
			args = append(args, "--process", p)
		}
		return args, append(os.Environ(), "ONEJOB_REPLICA="+worker.Replica)
	}
	code, err := supervisor.Run(supervisor.Config{
		Variable: supervisedVariable,
		Asked:    ctx,
		Bury:     bury,
		Hello: func(text string) {
			if json.Unmarshal([]byte(text), &worker) == nil {
				c := defaults()
				c.Replica, c.Log.Level, c.Log.Format = worker.Replica, worker.Level, worker.Format
				log = newLogger(c, out)
			}
		},
		Crashed: func(c supervisor.Crash) {
			log.Error("worker_crashed", zap.Int("pid", c.PID), zap.String("process", c.Process), zap.Int("exit_code", c.ExitCode), zap.String("signal", c.Signal),
				zap.Duration("lived", c.Lived), zap.Int("killed", c.Killed), zap.Bool("restarts", c.RestartIn >= 0), zap.Duration("restart_in", max(c.RestartIn, 0)), zap.Error(c.Err))
			if !c.Clean && c.Err == nil {
				log.Error("processes_left_behind", zap.String("process", c.Process), zap.Ints("pids", c.Left))
			}
		},
		Restarted: func(pid int) { log.Info("worker_restarted", zap.Int("pid", pid)) },
	})
	if err != nil || code != 0 {
		return &exitError{cmp.Or(code, exitFailure), err}
	}
	return nil
}

func buryCommand() *cobra.Command {
	c := &cobra.Command{
		Use:    "bury",
		Short:  "Make known that processes are dead, of which nothing is left: the supervisor runs this",
		Hidden: true,
		Args:   cobra.NoArgs,
	}
	path := configFlag(c)
	processes := c.Flags().StringArray("process", nil, "the `uuid` of a working process that is dead, with all that it started")
	c.RunE = func(c *cobra.Command, _ []string) error {
		self, err := supervisor.Adopt(supervisedVariable)
		if err != nil {
			return usage(err)
		}
		for _, p := range *processes {
			if _, err := uuid.Parse(p); err != nil {
				return usage(fmt.Errorf("--process: %q is not a uuid", p))
			}
		}
		cfg, err := loadConfig(*path, os.Environ())
		if err != nil {
			return err
		}
		return bury(c.Context(), cfg, *processes, c.OutOrStdout(), self.Ready)
	}
	return c
}

// bury makes known that processes are dead, of which nothing is left, and tries until
// Postgres and Consul both know. tried is called when it has tried once.
//
// Any order is safe: nothing is left that could work, and that is all that a takeover
// waits for. Postgres comes first because of speed: other replicas look there when a
// session's key vanishes from Consul. If Postgres is unavailable, Consul is written at once.
func bury(ctx context.Context, cfg Config, processes []string, out io.Writer, tried func()) error {
	log := newLogger(cfg, out)
	defer func() { _ = log.Sync() }()
	db, err := store.Open(cfg.storeConfig())
	if err != nil {
		return usage(err)
	}
	defer db.Close()
	locks, err := consul.New(cfg.consulConfig())
	if err != nil {
		return usage(err)
	}
	attempt := func(ctx context.Context, where string, declare func(context.Context, string) ([]string, error)) error {
		var sessions []string
		var errs []error
		for _, p := range processes {
			s, err := declare(ctx, p)
			sessions, errs = append(sessions, s...), append(errs, err)
		}
		err := errors.Join(errs...)
		if err == nil {
			log.Info("process_buried", zap.String("where", where), zap.Strings("processes", processes), zap.Strings("sessions", sessions))
		}
		return err
	}
	retry := func(where string, declare func(context.Context, string) ([]string, error), err error) {
		if err != nil {
			log.Warn("burial_failed", zap.String("where", where), zap.Strings("processes", processes), zap.String("error", strings.ReplaceAll(err.Error(), "\n", "; ")))
		}
		for pause := 250 * time.Millisecond; err != nil && ctx.Err() == nil; pause = min(2*pause, 10*time.Second) {
			select {
			case <-time.After(pause):
				err = attempt(ctx, where, declare)
			case <-ctx.Done():
			}
		}
	}
	quick, cancel := context.WithTimeout(ctx, 2*time.Second)
	unknown := attempt(quick, "postgres", db.DeclareProcessDead)
	cancel()
	var both sync.WaitGroup
	defer both.Wait()
	if unknown != nil {
		both.Go(func() { retry("postgres", db.DeclareProcessDead, unknown) })
	}
	err = attempt(ctx, "consul", locks.Bury)
	tried()
	retry("consul", locks.Bury, err)
	return nil
}
