//go:build linux

package supervisor

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"onejob/internal/retry"
)

// Log logs how a working process died.
func (c Crash) Log(log *zap.Logger) {
	log.Error("worker_crashed", zap.Int("pid", c.PID), zap.String("process", c.Process), zap.Int("exit_code", c.ExitCode), zap.String("signal", c.Signal),
		zap.Duration("lived", c.Lived), zap.Int("killed", c.Killed), zap.Bool("restarts", c.RestartIn >= 0), zap.Duration("restart_in", max(c.RestartIn, 0)), zap.Error(c.Err))
	if !c.Clean && c.Err == nil {
		log.Error("processes_left_behind", zap.String("process", c.Process), zap.Ints("pids", c.Left))
	}
}

// ReportDeath makes known that processes are dead, of which nothing is left, and tries until
// Postgres and Consul both know, or ctx ends. tried is called when it has tried once.
//
// For tasks any order is safe: nothing of the processes is left, and a takeover ends what is at work
// in Postgres. Postgres comes first for those that share a lock key without a row: the statements of
// the processes are ended there before Consul frees the keys. It is quicker as well: other replicas
// look there when a session's key vanishes from Consul. If Postgres is unavailable, Consul is written
// at once.
func ReportDeath(ctx context.Context, log *zap.Logger, processes []string, inPostgres, inConsul func(context.Context, string) ([]string, error), tried func()) {
	attempt := func(ctx context.Context, where string, declare func(context.Context, string) ([]string, error)) error {
		var sessions []string
		var errs []error
		for _, p := range processes {
			s, err := declare(ctx, p)
			sessions, errs = append(sessions, s...), append(errs, err)
		}
		err := errors.Join(errs...)
		if err == nil {
			log.Info("process_death_reported", zap.String("where", where), zap.Strings("processes", processes), zap.Strings("sessions", sessions))
		}
		return err
	}
	again := func(where string, declare func(context.Context, string) ([]string, error), err error) {
		if err != nil {
			log.Warn("death_report_failed", zap.String("where", where), zap.Strings("processes", processes), zap.String("error", strings.ReplaceAll(err.Error(), "\n", "; ")))
		}
		for pause := 250 * time.Millisecond; err != nil && ctx.Err() == nil; pause = min(2*pause, 10*time.Second) {
			if retry.Pause(ctx, pause); ctx.Err() == nil {
				err = attempt(ctx, where, declare)
			}
		}
	}
	quick, cancel := context.WithTimeout(ctx, 2*time.Second)
	unknown := attempt(quick, "postgres", inPostgres)
	cancel()
	var both sync.WaitGroup
	defer both.Wait()
	if unknown != nil {
		both.Go(func() { again("postgres", inPostgres, unknown) })
	}
	err := attempt(ctx, "consul", inConsul)
	tried()
	again("consul", inConsul, err)
}
