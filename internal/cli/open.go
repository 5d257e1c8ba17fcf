package cli

import (
	"context"
	"os"
	"os/user"
	"sync"

	"github.com/spf13/cobra"

	"onejob/lock/consul"
	"onejob/store"
)

// What leads from a command line to Postgres and Consul.

// configFlag adds --config to a command. If it is empty there is no file, whatever
// ONEJOB_CONFIG says; the supervisor passes it on so.
func configFlag(c *cobra.Command) *string {
	path := c.Flags().StringP("config", "c", os.Getenv("ONEJOB_CONFIG"), "YAML `file` with settings")
	allowEmpty(c, "config")
	return path
}

// withStore makes run what c does, with the store that the configuration names.
func withStore(c *cobra.Command, run func(c *cobra.Command, args []string, db *store.Store) error) *cobra.Command {
	path := configFlag(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		db, _, err := openConfigured(*path)
		if err != nil {
			return err
		}
		defer db.Close()
		return run(c, args, db)
	}
	return c
}

// openConfigured opens the store that the configuration names, for one command, and returns both.
func openConfigured(configPath string) (*store.Store, Config, error) {
	cfg, err := loadSettings(configPath, os.Environ())
	if err != nil {
		return nil, cfg, err
	}
	storeConfig := cfg.storeConfig()
	storeConfig.Actor = actor()
	db, err := store.Open(storeConfig)
	if err != nil {
		return nil, cfg, usage(err)
	}
	return db, cfg, nil
}

// actor is who runs this command, for onejob.actions: such as alice@web-1.
func actor() string {
	name := os.Getenv("SUDO_USER")
	if name == "" {
		if u, err := user.Current(); err == nil {
			name = u.Username
		}
	}
	return name + "@" + hostname()
}

// both reads the configuration, and prepares access to Postgres and to Consul.
func both(path string) (cfg Config, db *store.Store, locks *consul.Locker, err error) {
	if db, cfg, err = openConfigured(path); err != nil {
		return cfg, nil, nil, err
	}
	if locks, err = consul.New(cfg.consulConfig()); err != nil {
		db.Close()
		return cfg, nil, nil, usage(err)
	}
	return cfg, db, locks, nil
}

// stopped returns err, or nil if ctx has ended: then it was asked to stop.
func stopped(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// hostname returns this machine's name, or "" if it has none.
func hostname() string {
	h, _ := os.Hostname()
	return h
}

// background calls f, and returns what ends that and waits for it.
func background(ctx context.Context, f func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { _ = f(ctx) })
	return func() { cancel(); running.Wait() }
}
