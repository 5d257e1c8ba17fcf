package worker_test

import (
	"testing"

	"go.uber.org/zap"

	"onejob/lock/consul"
	"onejob/tasks"
	"onejob/worker"
)

// A worker that was given no logger must not be silent.
func TestDefaultLogger(t *testing.T) {
	t.Parallel()
	w := worker.Worker{Store: &fakeStore{}, Locks: &fakeLocker{}, Kinds: tasks.Kinds{"noop": tasks.Noop{}}}
	if err := w.Init(); err != nil {
		t.Fatal(err)
	}
	for name, log := range map[string]*zap.Logger{"worker": w.Log, "consul": consul.Config{}.WithDefaults().Log} {
		if core := log.Core(); !core.Enabled(zap.InfoLevel) || core.Enabled(zap.DebugLevel) {
			t.Errorf("%s: the default logger has the level %v", name, log.Level())
		}
	}
}
