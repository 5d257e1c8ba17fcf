package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"onejob/store"
)

func migrateCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "migrate [up|status]",
		Short: "Bring the schema in Postgres up to date (up, the default), or look at it",
		Args:  cobra.NoArgs,
	}
	up := &cobra.Command{
		Use:   "up",
		Short: "Apply the migrations that are missing; safe while replicas run",
		Args:  cobra.NoArgs,
	}
	for _, c := range []*cobra.Command{c, up} {
		path := configFlag(c)
		c.RunE = func(c *cobra.Command, _ []string) error { return migrateUp(c, *path) }
	}

	status := &cobra.Command{
		Use:   "status",
		Short: "Show the schema's version; exit 1 if it is not the one that this binary wants",
		Args:  cobra.NoArgs,
	}
	statusConfig := configFlag(status)
	status.RunE = func(c *cobra.Command, _ []string) error {
		db, err := openStore(*statusConfig)
		if err != nil {
			return err
		}
		defer db.Close()
		if err := printVersion(c, db); err != nil {
			return err
		}
		return db.CheckSchema(c.Context())
	}
	c.AddCommand(up, status)
	return c
}

func migrateUp(c *cobra.Command, configPath string) error {
	db, err := openStore(configPath)
	if err != nil {
		return err
	}
	defer db.Close()
	if err := db.Migrate(c.Context(), &store.Progress{
		Applying: func(number int, name string) { fmt.Fprintf(c.OutOrStdout(), "applying %s\n", name) },
		Waiting: func(pid int, name string) {
			fmt.Fprintf(c.ErrOrStderr(), "waiting for another migration: process %d of the server (application %q) holds the lock\n", pid, name)
		},
	}); err != nil {
		return err
	}
	return printVersion(c, db)
}

func printVersion(c *cobra.Command, db *store.Store) error {
	v, err := db.SchemaVersion(c.Context())
	if err != nil {
		return err
	}
	fmt.Fprintf(c.OutOrStdout(), "schema onejob is at version %d of %d\n", v.Have, v.Want)
	return nil
}

// openStore opens the store that the configuration names, for one command.
func openStore(configPath string) (*store.Store, error) {
	cfg, err := loadConfig(configPath, os.Environ())
	if err != nil {
		return nil, err
	}
	db, err := store.Open(cfg.storeConfig())
	if err != nil {
		return nil, usage(err)
	}
	return db, nil
}
