package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"onejob/store"
)

func migrateCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "migrate [up|status|roles]",
		Short: "Migrate the schema in Postgres (up, the default), show its version, or print roles",
		Args:  cobra.NoArgs,
	}
	up := &cobra.Command{
		Use:   "up",
		Short: "Apply the missing migrations; safe while replicas run",
		Args:  cobra.NoArgs,
	}
	withMigrations(c)
	withMigrations(up)

	status := &cobra.Command{
		Use:   "status",
		Short: "Show the version of the schema; exit 1 if this binary needs another one",
		Args:  cobra.NoArgs,
	}
	withStore(status, func(c *cobra.Command, _ []string, db *store.Store) error {
		if err := printVersion(c, db); err != nil {
			return err
		}
		return db.CheckSchema(c.Context())
	})
	c.AddCommand(up, status, rolesCommand())
	return c
}

// withMigrations makes a command apply the missing migrations.
func withMigrations(c *cobra.Command) {
	path := configFlag(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		db, cfg, err := openConfigured(*path)
		if err != nil {
			return err
		}
		defer db.Close()
		if err := oneLogin(c.Context(), cfg, db); err != nil {
			return usage(err)
		}
		return migrateUp(c, db)
	}
}

// oneLogin returns an error if the environment has a DSN for one command, and the file's
// listen_dsn leads to another user, database or server, or nobody can tell. Migrations use the latter.
func oneLogin(ctx context.Context, cfg Config, db *store.Store) error {
	const variable, listenVariable = "ONEJOB_POSTGRES_DSN", "ONEJOB_POSTGRES_LISTEN_DSN"
	_, listens := os.LookupEnv(listenVariable)
	if os.Getenv(variable) == "" || listens || cfg.Postgres.ListenDSN == "" {
		return nil
	}
	given, err := pgconn.ParseConfig(cfg.Postgres.DSN)
	if err != nil {
		return nil // it was reported
	}
	used, err := pgconn.ParseConfig(cfg.Postgres.ListenDSN)
	if err != nil {
		return nil // it was reported
	}
	advice := fmt.Sprintf("set %s as well (empty: to migrate with %s)", listenVariable, variable)
	if given.User != used.User || given.Database != used.Database {
		return fmt.Errorf("%s names user %q and database %q, and postgres.listen_dsn of the file, which migrations use, user %q and database %q; %s",
			variable, given.User, given.Database, used.User, used.Database, advice)
	}
	past, err := store.Open(store.Config{DSN: cfg.Postgres.ListenDSN})
	if err != nil {
		return err
	}
	defer past.Close()
	this, err := db.Which(ctx)
	if err != nil {
		return fmt.Errorf("%s, and postgres.listen_dsn of the file, which migrations use, may lead to different servers: %w; %s", variable, err, advice)
	}
	that, err := past.Which(ctx)
	if err != nil {
		return fmt.Errorf("postgres.listen_dsn of the file, which migrations use: %w; %s", err, advice)
	}
	if !this.Started.Equal(that.Started) { // no two servers were started in the same microsecond
		return fmt.Errorf("%s leads to the server at %s, and postgres.listen_dsn of the file, which migrations use, to another one, at %s; %s", variable, this.Address, that.Address, advice)
	}
	return nil
}

func rolesCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "roles",
		Short: "Print the SQL that creates Postgres roles with the rights they need",
		Long: `Print the SQL that creates four roles in Postgres: enqueuer, observer, operator and
worker. docs/operate/security.md lists what each may do. Run it as the owner of the
schema onejob, and again after each upgrade:

  onejob migrate roles | psql -v ON_ERROR_STOP=1 "$DSN"

The roles cannot log in. Grant them to users that can:

  GRANT onejob_enqueuer TO shop;`,
		Args: cobra.NoArgs,
	}
	prefix := c.Flags().String("prefix", "onejob_", "`prefix` of the names of the roles")
	allowEmpty(c, "prefix")
	var names [4]*string
	for i, role := range []string{"enqueuer", "observer", "operator", "worker"} {
		names[i] = c.Flags().String(role, "", "`name` of this role (default: the prefix and "+role+")")
	}
	c.RunE = func(c *cobra.Command, _ []string) error {
		r := store.Roles{
			Enqueuer: cmp.Or(*names[0], *prefix+"enqueuer"),
			Observer: cmp.Or(*names[1], *prefix+"observer"),
			Operator: cmp.Or(*names[2], *prefix+"operator"),
			Worker:   cmp.Or(*names[3], *prefix+"worker"),
		}
		all := []string{r.Enqueuer, r.Observer, r.Operator, r.Worker}
		slices.Sort(all)
		if len(slices.Compact(all)) < 4 {
			return errors.New("two of the roles have the same name: the second one's rights would replace those of the first")
		}
		_, err := fmt.Fprint(c.OutOrStdout(), store.RolesSQL(r))
		return err
	}
	return c
}

func migrateUp(c *cobra.Command, db *store.Store) error {
	if err := db.Migrate(c.Context(), &store.Progress{
		Applying: func(number int, name string) { printf(c.OutOrStdout(), "applying %s\n", name) },
		Waiting: func(pid int, name string, _ bool) {
			printf(c.ErrOrStderr(), "waiting for another migration: server process %d (application %q) holds the lock\n", pid, name)
		},
		Blocked: func(name string, waited time.Duration, by []store.Blocker) {
			printf(c.ErrOrStderr(), "%s has tried for %v to lock the tables of schema onejob; it is tried again every few seconds\n", name, waited.Round(time.Second))
			for _, b := range by {
				printf(c.ErrOrStderr(), "  in use by %s; to end it: %s\n", b, b.Ending())
			}
		},
		Changed: func(what string) { printf(c.ErrOrStderr(), "  %s\n", what) },
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
