package cli

import (
	"cmp"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"onejob/store"
)

func migrateCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "migrate [up|status|roles]",
		Short: "Bring the schema in Postgres up to date (up, the default), look at it, or print roles",
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
	c.AddCommand(up, status, rolesCommand())
	return c
}

func rolesCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "roles",
		Short: "Print the SQL that makes Postgres roles with just the rights they need",
		Long: `Print the SQL that makes four roles in Postgres: enqueuer, observer, operator and
worker. docs/operate/security.md says what each may do. Run it as the owner of the schema
onejob, and again after each upgrade:

  onejob migrate roles | psql -v ON_ERROR_STOP=1 "$DSN"

The roles cannot log in. Grant them to users that can:

  GRANT onejob_enqueuer TO shop;`,
		Args: cobra.NoArgs,
	}
	prefix := c.Flags().String("prefix", "onejob_", "what the roles' `names` begin with")
	var names [4]*string
	for i, role := range []string{"enqueuer", "observer", "operator", "worker"} {
		names[i] = c.Flags().String(role, "", "the `name` of this role (default: the prefix and "+role+")")
	}
	c.RunE = func(c *cobra.Command, _ []string) error {
		fmt.Fprint(c.OutOrStdout(), store.RolesSQL(store.Roles{
			Enqueuer: cmp.Or(*names[0], *prefix+"enqueuer"),
			Observer: cmp.Or(*names[1], *prefix+"observer"),
			Operator: cmp.Or(*names[2], *prefix+"operator"),
			Worker:   cmp.Or(*names[3], *prefix+"worker"),
		}))
		return nil
	}
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
		Changed: func(what string) { fmt.Fprintf(c.ErrOrStderr(), "  %s\n", what) },
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
	db, _, err := openConfigured(configPath)
	return db, err
}

// openConfigured also returns the configuration.
func openConfigured(configPath string) (*store.Store, Config, error) {
	cfg, err := loadConfig(configPath, os.Environ())
	if err != nil {
		return nil, cfg, err
	}
	db, err := store.Open(cfg.storeConfig())
	if err != nil {
		return nil, cfg, usage(err)
	}
	return db, cfg, nil
}
