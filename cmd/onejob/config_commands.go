package main

import (
	"fmt"
	"time"

	"go.uber.org/zap"

	"onejob/internal/guard"
	"onejob/internal/supervisor"
	"onejob/tasks"
)

// checkMargin returns an error if a command could still be there when its lock is
// granted to somebody else. A margin that is not above zero is reported elsewhere.
func checkMargin(margin time.Duration) error {
	if margin <= 0 || margin >= guard.MinMargin {
		return nil
	}
	return fmt.Errorf("consul.margin: %v is too short for commands: a command may be there for 500ms after its lease has ended, "+
		"and the kernel needs up to 100ms to end it: it must be at least 500ms + 100ms = %v", margin, guard.MinMargin)
}

// prepareCommands makes the limits of commands available, and kills what commands of
// dead replicas have left running.
func prepareCommands(exec tasks.Exec, log *zap.Logger) error {
	if err := exec.Prepare(); err != nil {
		return usage(fmt.Errorf("kinds.exec.commands: %w", err))
	}
	if err := guard.CgroupError(); err != nil && len(exec.Commands) > 0 {
		log.Info("cgroups_unavailable", zap.Error(err))
	}
	supervisor.Sweep(log)
	return nil
}
