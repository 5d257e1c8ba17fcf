package cli

import (
	"errors"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"
)

// forEach does something to each of several things, such as a task. One to which it cannot be done
// does not keep the others from it: stderr says why, and the command fails in the end.
func forEach(c *cobra.Command, what string, names []string, do func(name string) error) error {
	failed := false
	for _, name := range names {
		err := do(name)
		switch {
		case err == nil:
			continue
		case c.Context().Err() != nil || errors.As(err, new(*pgconn.ConnectError)): // nor can it be done to the others
			return err
		case errors.As(err, new(*pgconn.PgError)): // which does not always say of what
			thing := what + " " + name + ": "
			note(c, "%s%s", thing, strings.TrimPrefix(explain(err), thing))
		default:
			note(c, "%v", explain(err))
		}
		failed = true
	}
	if failed {
		return &exitError{exitFailure, nil}
	}
	return nil
}

// eachNamed does something to each thing that is named, and says so; missing says why it could not.
func eachNamed(c *cobra.Command, what string, names []string, done string, do func(name string) (bool, error), missing func(name string) error) error {
	return forEach(c, what, names, func(name string) error {
		did, err := do(name)
		switch {
		case err != nil:
			return err
		case !did:
			return missing(name)
		}
		printf(c.OutOrStdout(), "%s %s is %s\n", what, name, done)
		return nil
	})
}
