package cli

import (
	"fmt"
	"os"
	"reflect"

	"go.uber.org/zap"

	"onejob/lock/rabbitmq"
	"onejob/store"
	"onejob/tasks"
	execkind "onejob/tasks/kinds/exec"
	"onejob/worker"
)

// reloaded reads the configuration again and applies what may change while a replica
// runs: kinds, limits and the log level. It returns the configuration that is in force
// now: the old one, if the new one is invalid. The broker is nil unless limits are in RabbitMQ.
func reloaded(path string, old Config, handlers tasks.Kinds, db *store.Store, replica *worker.Worker, broker *rabbitmq.Semaphores, level zap.AtomicLevel, log *zap.Logger) Config {
	cfg, err := loadConfig(path, os.Environ())
	if err != nil {
		log.Error("reload_failed", zap.Error(err))
		return old
	}
	if len(cfg.Kinds.Exec.Commands) > 0 {
		// The new times are not in force before the replica is restarted.
		if err := execkind.CheckTimes(old.Consul.Margin, old.Consul.LockDelay); err != nil {
			log.Error("reload_failed", zap.Error(fmt.Errorf("the replica was started without commands and with times that are not safe for them; restart it: %w", err)))
			return old
		}
	}
	kinds, err := cfg.kinds(db, handlers)
	if err == nil {
		err = replica.Reload(kinds, cfg.Limits.Slots, cfg.Limits.Kinds)
	}
	if err != nil {
		log.Error("reload_failed", zap.Error(err))
		return old
	}
	if broker != nil {
		broker.SetNames(cfg.limitNames())
	}
	_ = level.UnmarshalText([]byte(cfg.Log.Level)) // was validated
	applied := old
	applied.Kinds, applied.Limits.Slots, applied.Limits.Kinds, applied.Log.Level = cfg.Kinds, cfg.Limits.Slots, cfg.Limits.Kinds, cfg.Log.Level
	log.Info("reloaded", zap.Strings("kinds", kinds.Names()), zap.Bool("restart_needed", !reflect.DeepEqual(applied, cfg)))
	return applied
}
