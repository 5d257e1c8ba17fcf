package cli

import (
	"fmt"
	"os"
	"slices"
	"testing"

	"go.uber.org/zap"

	"onejob/internal/testenv"
	"onejob/lock/consul"
	"onejob/store"
	"onejob/worker"
)

// A reload tells RabbitMQ's limits which there are: it cannot be asked for all of them.
func TestReloadNamesLimits(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	file := func(limits string) []byte {
		return fmt.Appendf(nil, "limits: {backend: rabbitmq, rabbitmq_url: %q, %s}\n", v.URL, limits)
	}
	path := fileWith(t, string(file("slots: {old: 1, stays: 1}")))
	cfg, err := loadConfig(path, nil)
	if err != nil {
		t.Fatal(err)
	}
	log, events := testenv.Logger(t)
	db, err := store.Open(cfg.storeConfig())
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	locks, err := consul.New(cfg.consulConfig())
	if err != nil {
		t.Fatal(err)
	}
	kinds, err := cfg.kinds(db, nil)
	if err != nil {
		t.Fatal(err)
	}
	limits, broker, err := cfg.limits(locks, log)
	if err != nil {
		t.Fatal(err)
	}
	workerConfig := cfg.workerConfig()
	workerConfig.Store, workerConfig.Locks, workerConfig.Kinds, workerConfig.Limits, workerConfig.Log = db, locks, kinds, limits, log
	replica, err := worker.New(workerConfig)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"old", "stays", "new", "of-a-kind"} {
		if err := limits.Create(t.Context(), name, 1); err != nil {
			t.Fatal(err)
		}
	}
	reload := func(limits, event string) {
		t.Helper()
		if err := os.WriteFile(path, file(limits), 0o600); err != nil {
			t.Fatal(err)
		}
		cfg = reloaded(path, cfg, nil, db, replica, broker, zap.NewAtomicLevel(), log)
		if all := events.TakeAll(); len(all) != 1 || all[0].Message != event {
			t.Fatalf("logged %+v, want %s", all, event)
		}
	}
	listed := func(want ...string) {
		t.Helper()
		if list, err := limits.List(t.Context()); err != nil || !slices.Equal(list, want) {
			t.Errorf("listed are %q, %v; want %q", list, err, want)
		}
	}
	listed("old", "stays")
	reload("slots: {new: 1, stays: 1}, kinds: {noop: of-a-kind}", "reloaded")
	listed("new", "of-a-kind", "stays")
	reload("slots: {new: -1}", "reload_failed")
	listed("new", "of-a-kind", "stays")
}
