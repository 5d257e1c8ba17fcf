package cli

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/spf13/cobra"

	"onejob/lock/consul"
	"onejob/store"
	"onejob/worker"
)

// both reads the configuration and prepares what leads to Postgres and to Consul.
func both(path string) (cfg Config, db *store.Store, locks *consul.Locker, err error) {
	if cfg, err = loadConfig(path, os.Environ()); err != nil {
		return cfg, nil, nil, err
	}
	if db, err = store.Open(cfg.storeConfig()); err != nil {
		return cfg, nil, nil, usage(err)
	}
	if locks, err = consul.New(cfg.consulConfig()); err != nil {
		db.Close()
		return cfg, nil, nil, usage(err)
	}
	return cfg, db, locks, nil
}

func adoptCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "adopt-consul",
		Short: "Tell the cluster that its Consul was wiped or rebuilt, and that replicas it knew are gone",
		Long: `Replicas work only with the Consul that their database knows: both hold the same
id. When Consul was wiped or rebuilt, replicas that are alive stop their work, put
it back and adopt the new Consul by themselves. A replica that died at the same time
cannot do so, and the others wait: it might be at work, and reach the old Consul.

Run this when you know that those replicas are gone: their machines are off, or
their processes were ended. It calls dead all replicas that may be alive and have no
session in this Consul. Running replicas then adopt it, and take over the tasks of
the dead. It needs Postgres and Consul.`,
		Args: cobra.NoArgs,
	}
	path := configFlag(c)
	yes := c.Flags().Bool("yes", false, "they are gone: I have looked")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if !*yes {
			return usage(errors.New("look first whether the replicas that this Consul does not know are gone; then run this with --yes"))
		}
		_, db, locks, err := both(*path)
		if err != nil {
			return err
		}
		defer db.Close()
		ctx, cancel := context.WithTimeout(c.Context(), 30*time.Second)
		defer cancel()
		known, err := locks.Present(ctx)
		if err != nil {
			return err
		}
		names, err := db.ForgetReplicas(ctx, known)
		if err != nil {
			return err
		}
		out := c.OutOrStdout()
		for _, name := range names {
			printf(out, "called dead: %s\n", printable(name))
		}
		if len(names) == 0 {
			printf(out, "Every replica that may be alive has a session in this Consul; nothing was changed.\n")
		}
		return nil
	}
	return c
}

func adoptPostgresCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "adopt-postgres",
		Short: "Tell the cluster that the Postgres server that answers is its database from now on",
		Long: `Consul has on record which Postgres server is the database, and which fences were used.
A server that was restarted, or promoted, or recovered from an archive takes its place
by itself. Two do not: one with an older timeline, which is an old primary in a split
brain or a backup from before a failover, and one that is no copy of the database on
record. Replicas then claim nothing (postgres_stale, postgres_is_another).

Run this when you know that this server is the database: after a restore from such a
backup, after pg_upgrade, or when a dump was loaded elsewhere. Its fences are above all
that were used before. It needs Postgres and Consul.`,
		Args: cobra.NoArgs,
	}
	path := configFlag(c)
	yes := c.Flags().Bool("yes", false, "this is the database: I have looked")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if !*yes {
			return usage(errors.New("look first whether postgres.dsn leads to the right server and no other primary is at work; then run this with --yes"))
		}
		cfg, db, locks, err := both(*path)
		if err != nil {
			return err
		}
		defer db.Close()
		ctx, cancel := context.WithTimeout(c.Context(), 30*time.Second)
		defer cancel()
		server, err := worker.AdoptDatabase(ctx, db, locks, cfg.Replica)
		if err != nil {
			return err
		}
		printf(c.OutOrStdout(), "The database is now %s (system %s).\n", printable(server.String()), printable(server.System))
		return nil
	}
	return c
}
