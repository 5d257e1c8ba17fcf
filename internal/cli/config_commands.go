package cli

import (
	"fmt"

	"go.uber.org/zap"

	"onejob/internal/guard"
	"onejob/internal/supervisor"
	execkind "onejob/tasks/kinds/exec"
)

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
