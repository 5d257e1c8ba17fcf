package cli

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"onejob/internal/guard"
	"onejob/internal/supervisor"
	execkind "onejob/tasks/kinds/exec"
)

// checkTimes returns an error if a command could still be running when its lock is
// granted to another task. Times that are not above zero are reported elsewhere.
func checkTimes(margin, lockDelay time.Duration) error {
	const kill = "a command can live for 500ms after %s, and the kernel needs up to 100ms to kill it; the minimum is 500ms + 100ms = %v"
	var errs []error
	if margin > 0 && margin < guard.MinMargin {
		errs = append(errs, fmt.Errorf("consul.margin: %v is too short for commands: "+kill, margin, "its lease has ended", guard.MinMargin))
	}
	if lockDelay > 0 && lockDelay < guard.MinMargin {
		errs = append(errs, fmt.Errorf("consul.lock_delay: %v is too short for commands: "+kill, lockDelay, "its session was destroyed", guard.MinMargin))
	}
	return errors.Join(errs...)
}

// prepareCommands makes the limits of commands available, and kills what commands of
// dead replicas have left running.
func prepareCommands(exec execkind.Config, log *zap.Logger) error {
	if err := exec.EnableLimits(); err != nil {
		return usage(fmt.Errorf("kinds.exec.commands: %w", err))
	}
	if err := guard.CgroupError(); err != nil && len(exec.Commands) > 0 {
		log.Info("cgroups_unavailable", zap.Error(err))
	}
	supervisor.Sweep(log)
	return nil
}
