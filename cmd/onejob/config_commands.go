package main

import (
	"fmt"
	"time"

	"go.uber.org/zap"

	"onejob/internal/guard"
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

// prepareCommands hides this process from the commands that it will run, makes
// their limits available, and kills what those of dead replicas have left running.
func prepareCommands(exec tasks.Exec, log *zap.Logger) error {
	if err := guard.Conceal(); err != nil {
		return err
	}
	if err := exec.Prepare(); err != nil {
		return usage(fmt.Errorf("kinds.exec.commands: %w", err))
	}
	if err := guard.CgroupError(); err != nil && len(exec.Commands) > 0 {
		log.Info("cgroups_unavailable", zap.Error(err))
	}
	killed, err := guard.Sweep()
	if len(killed) > 0 {
		var pids []int
		var names []string
		for _, s := range killed {
			pids, names = append(pids, s.PID), append(names, s.Name)
		}
		log.Warn("survivors_killed", zap.Int("processes", len(killed)), zap.Ints("pids", pids), zap.Strings("names", names))
	}
	if err != nil {
		log.Error("survivors_remain", zap.Error(err))
	}
	return nil
}
