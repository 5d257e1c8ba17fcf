// Package cli is the command onejob. It is the main of cmd/onejob, and of programs that
// add kinds of their own with onejob.Main.
package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"onejob/internal/logging"
	"onejob/internal/plaintext"
	"onejob/tasks"
)

// Exit codes. They are part of the command line's contract.
const (
	exitFailure = 1 // failure; the error says what to do
	exitUsage   = 2 // usage or configuration error; nothing was started

	exitNotYet = 75 // of "onejob tasks wait": the task has not ended

	// Of "onejob lock" only; its other codes are the command's own.
	exitNotLocked = 75  // the lock was not available
	exitLockLost  = 124 // the lock was lost, and the command was killed
	exitLockError = 125 // something else went wrong
)

// exitError is an error that chooses the exit code. An empty message is not
// printed.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string { return e.err.Error() }
func (e *exitError) Unwrap() error { return e.err }

func usage(err error) error { return &exitError{exitUsage, err} }

// A Program is the command onejob, or another program with the same commands.
type Program struct {
	Name    string      // in help texts, and before errors; default onejob
	Kinds   tasks.Kinds // what its replicas run besides the kinds of the configuration
	Example string      // config.example.yaml
}

// Main runs the command line of this process, and ends the process.
func Main(p Program) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	code := run(ctx, p, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run is Main without the process around it.
func run(ctx context.Context, p Program, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := NewRoot(p)
	root.SetArgs(args)
	root.SetIn(stdin)
	out := &output{Writer: stdout}
	root.SetOut(out)
	root.SetErr(stderr)
	addDefaults(root)
	err := root.ExecuteContext(ctx)
	if err == nil {
		err = out.err
	}
	if err == nil {
		return 0
	}
	if chosen, ok := errors.AsType[*exitError](err); ok {
		if chosen.err != nil {
			logging.Last(stderr, root.Name()+": "+plaintext.Lines(chosen.err.Error()))
		}
		return chosen.code
	}
	logging.Last(stderr, root.Name()+": "+plaintext.Lines(explain(err)))
	return exitFailure
}

// explain shortens errors of Postgres, and adds what to do.
func explain(err error) string {
	var pg *pgconn.PgError
	switch {
	case errors.As(err, new(*pgconn.ConnectError)):
		return err.Error() + "; check postgres.dsn (ONEJOB_POSTGRES_DSN), and that the server is running"
	case !errors.As(err, &pg):
		return err.Error()
	case pg.Code == checkViolation && pg.SchemaName == "onejob":
		return "refused: " + strings.ReplaceAll(pg.ConstraintName, "_", " ") // they are sentences
	case pg.Code == undefinedTable, pg.Code == undefinedFunction, pg.Code == undefinedSchema:
		return pg.Message + "; check that this is the right database, then run onejob migrate up"
	case pg.Detail != "":
		return pg.Message + ": " + pg.Detail
	}
	return err.Error()
}

// SQLSTATEs.
const (
	checkViolation    = "23514"
	undefinedTable    = "42P01"
	undefinedFunction = "42883"
	undefinedSchema   = "3F000"
)

// NewRoot returns the command line.
func NewRoot(p Program) *cobra.Command {
	root := &cobra.Command{
		Use:   cmp.Or(p.Name, "onejob"),
		Short: "Run the tasks of a Postgres table, each on exactly one replica at a time",
		Long: `onejob runs the tasks of a Postgres table. Several replicas run side by side. Each
task is locked in Consul while it runs, so exactly one replica works on it.

Settings come from a YAML file (--config or ONEJOB_CONFIG) and from environment
variables, which override the file: ONEJOB_POSTGRES_DSN is postgres.dsn. "onejob config"
prints them all. Consul's CONSUL_... variables and libpq's PG... variables are honoured.

Exit codes: 0 success, 1 failure, 2 usage or configuration error. "onejob lock" and
"onejob tasks wait" have more; see their help.`,
		Version:       version(),
		SilenceErrors: true,
		SilenceUsage:  true,

		// No other command may have one: cobra runs only the nearest.
		PersistentPreRunE: func(c *cobra.Command, _ []string) error { return refuseEmpty(c) },
	}
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usage(fmt.Errorf("%w; see %s --help", err, c.CommandPath()))
	})
	group := func(title string, commands ...*cobra.Command) {
		root.AddGroup(&cobra.Group{ID: title, Title: title})
		for _, c := range commands {
			c.GroupID = title
			root.AddCommand(c)
		}
	}
	group("Tasks:", enqueueCommand(), tasksCommand(), queuesCommand(), schedulesCommand(), limitsCommand(), lockCommand())
	group("Replicas:", serveCommand(p.Kinds), devCommand(), statusCommand(), replicasCommand(), leaderCommand(), healthCommand())
	group("Installation:", configCommand(p.Example), checkCommand(), migrateCommand(), adoptCommand(), adoptPostgresCommand())
	group("Other:", versionCommand())
	root.SetHelpCommandGroupID("Other:")
	root.SetCompletionCommandGroupID("Other:")
	root.AddCommand(manCommand()) // hidden
	for _, c := range descendants(root) {
		if c.ValidArgsFunction == nil { // nothing takes files but flags
			c.ValidArgsFunction = cobra.NoFileCompletions
		}
		c.Example = exampleCommand.ReplaceAllString(c.Example, "${1}"+strings.ReplaceAll(root.Name(), "$", "$$")+" ")
	}
	wrapArgs(root)
	return root
}

// exampleCommand finds the command onejob in examples, which has another name in another program.
var exampleCommand = regexp.MustCompile(`(?m)(^ *|[|] |&& )onejob `)

// wrapArgs makes wrong arguments a usage error, in c and below.
func wrapArgs(c *cobra.Command) {
	if check := c.Args; check != nil {
		c.Args = func(c *cobra.Command, args []string) error {
			if err := check(c, args); err != nil {
				return usage(fmt.Errorf("%w; see %s --help", err, c.CommandPath()))
			}
			return nil
		}
	}
	if c.HasSubCommands() && c.RunE == nil {
		c.Args = cobra.ArbitraryArgs
		c.RunE = func(c *cobra.Command, args []string) error {
			if len(args) > 0 {
				var names []string
				for _, sub := range c.Commands() {
					if sub.IsAvailableCommand() {
						names = append(names, sub.Name())
					}
				}
				return usage(fmt.Errorf("unknown command %q for %q%s; see %[2]s --help", args[0], c.CommandPath(), didYouMean(args[0], names)))
			}
			return c.Help()
		}
	}
	for _, sub := range c.Commands() {
		wrapArgs(sub)
	}
}

// addDefaults adds the commands help and completion to root, which cobra would add later, and
// makes wrong arguments of them a usage error, too. Completion writes to what root's output is now.
func addDefaults(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		switch c.Name() {
		case "completion":
			wrapArgs(c)
		case "help":
			c.Args = func(_ *cobra.Command, args []string) error {
				if _, rest, err := root.Find(args); err != nil || len(rest) > 0 {
					return usage(fmt.Errorf("there is no command %q; see %s --help", strings.Join(args, " "), root.Name()))
				}
				return nil
			}
		}
	}
}

// refuseEmpty returns a usage error if a text flag was given as "". Most likely a variable of a
// script is unset; taken for a flag that was not given, it would widen a filter to all tasks,
// or drop a lock key.
func refuseEmpty(c *cobra.Command) (err error) {
	c.Flags().Visit(func(f *pflag.Flag) {
		if _, fine := f.Annotations[emptyAllowed]; err == nil && !fine && f.Value.Type() == "string" && f.Value.String() == "" {
			err = usage(fmt.Errorf("--%s: the value is empty; give one, or leave the flag out; see %s --help", f.Name, c.CommandPath()))
		}
	})
	return err
}

// emptyAllowed marks text flags that may be given as "".
const emptyAllowed = "empty allowed"

// allowEmpty lets a flag of c be given as "".
func allowEmpty(c *cobra.Command, flag string) {
	if err := c.Flags().SetAnnotation(flag, emptyAllowed, []string{}); err != nil {
		panic(err) // there is no such flag
	}
}

// exclude returns a usage error if both flags are given.
func exclude(c *cobra.Command, a, b string) error {
	if c.Flags().Changed(a) && c.Flags().Changed(b) {
		return usage(fmt.Errorf("--%s and --%s cannot be used together; see %s --help", a, b, c.CommandPath()))
	}
	return nil
}
