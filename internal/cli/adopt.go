package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"onejob/worker"
)

func adoptCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "adopt-consul",
		Short: "Adopt a Consul that was wiped or rebuilt, and declare the replicas that it does not know dead",
		Long: `Replicas work only with the Consul that belongs to their database: both store the
same cluster ID. After Consul was wiped or rebuilt, live replicas stop their tasks,
requeue them and adopt the new Consul without help. A replica that died at the same
time cannot do so. The others then wait, because it might still be running and use
the old Consul.

Run this command when you know that those replicas are dead: their machines are off,
or their processes have ended. It declares dead all replicas that may be alive and
have no session in this Consul. Running replicas then adopt this Consul, and take
over the tasks of the dead ones. It needs Postgres and Consul.`,
		Args: cobra.NoArgs,
	}
	path := configFlag(c)
	yes := c.Flags().Bool("yes", false, "confirm that these replicas are dead")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if !*yes {
			return usage(errors.New("make sure first that the replicas without a session in this Consul are dead; then use --yes"))
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
		out := c.OutOrStdout()
		for _, name := range names {
			printf(out, "declared dead: %s\n", name)
		}
		if err != nil {
			return err
		}
		if len(names) == 0 {
			printf(out, "all replicas that may be alive have a session in this Consul; nothing was changed\n")
		}
		return nil
	}
	return c
}

func adoptPostgresCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "adopt-postgres",
		Short: "Declare the Postgres server of the configuration the cluster's database",
		Long: `Consul records which Postgres server is the database, and which fences were used. A
server that was restarted, promoted or recovered from an archive is accepted without
help. Two are not:

  - a server with an older timeline: an old primary in a split brain, or a backup from
    before a failover
  - a server that is not a copy of the recorded database

Replicas then claim no tasks and log postgres_stale or postgres_is_another.

Run this command when you know that this server is the database: after a restore from
such a backup, after pg_upgrade, or after a dump was loaded into another server. New
fences are higher than all that the record in Consul and the database know of. If both
were restored from backups, or the clock of Postgres was set back as well, nobody knows
of the last ones: give the highest fence that a receiver has seen to --fences-above.
It needs Postgres and Consul.`,
		Args: cobra.NoArgs,
	}
	path := configFlag(c)
	yes := c.Flags().Bool("yes", false, "confirm that this server is the database")
	above := c.Flags().Int64("fences-above", 0, "let new fences be higher than this `FENCE` as well")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if !*yes {
			return usage(errors.New("make sure first that postgres.dsn leads to the right server, and that no other primary is running; then use --yes"))
		}
		if *above < 0 || *above > worker.MaxFloor {
			return usage(fmt.Errorf("--fences-above must be from 0 to %d", int64(worker.MaxFloor)))
		}
		cfg, db, locks, err := both(*path)
		if err != nil {
			return err
		}
		defer db.Close()
		ctx, cancel := context.WithTimeout(c.Context(), 30*time.Second)
		defer cancel()
		server, err := worker.AdoptDatabase(ctx, db, locks, cfg.Replica, *above)
		if err != nil {
			return err
		}
		printf(c.OutOrStdout(), "the database is now %s (system %s)\n", server.String(), server.System)
		return nil
	}
	return c
}
