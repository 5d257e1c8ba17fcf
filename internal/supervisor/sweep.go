//go:build linux

package supervisor

import (
	"go.uber.org/zap"

	"onejob/internal/guard"
)

// Sweep kills what commands of dead replicas have left running on this machine, and
// logs it. A replica calls it before it claims anything.
func Sweep(log *zap.Logger) {
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
}
