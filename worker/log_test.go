package worker_test

import (
	"testing"

	"go.uber.org/zap"

	"onejob/lock/consul"
	"onejob/worker"
)

// A worker that was given no logger must not be silent.
func TestDefaultLogger(t *testing.T) {
	t.Parallel()
	for name, log := range map[string]*zap.Logger{"worker": worker.Config{}.WithDefaults().Log, "consul": consul.Config{}.WithDefaults().Log} {
		if core := log.Core(); !core.Enabled(zap.InfoLevel) || core.Enabled(zap.DebugLevel) {
			t.Errorf("%s: the default logger has the level %v", name, log.Level())
		}
	}
}
