package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/agnivade/levenshtein"
	"github.com/spf13/cobra"

	"onejob/internal/plaintext"
	"onejob/internal/snapshot"
	"onejob/store"
)

// completionTimeout ends what a completion asks Postgres or Consul.
const completionTimeout = 2 * time.Second

// complete sets how a shell completes a flag's value.
func complete(c *cobra.Command, flag string, with cobra.CompletionFunc) {
	if err := c.RegisterFlagCompletionFunc(flag, with); err != nil {
		panic(err) // the flag is not there, or has one
	}
}

// completeNames returns completions from a list of names, without those that are
// among the arguments already. A tab and a description may follow a name. c has
// --config. If the list cannot be had, a shell completes nothing.
func completeNames(list func(ctx context.Context, configPath string) ([]string, error)) cobra.CompletionFunc {
	return func(c *cobra.Command, args []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) > 0 && strings.Count(c.Use, "...") == 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return completeValue(list)(c, args, begun)
	}
}

// shellActive is what makes a shell do something. The scripts of completion put the beginning that several
// names share on the line as it is, and evaluate the line when they complete again; and any program
// that may insert a row chooses such names.
const shellActive = "`$()<>;&|!\\\"'*?[]{}~#="

// completeValue is completeNames for the value of a flag.
func completeValue(list func(ctx context.Context, configPath string) ([]string, error)) cobra.CompletionFunc {
	return func(c *cobra.Command, args []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
		ctx, cancel := context.WithTimeout(context.Background(), completionTimeout)
		defer cancel()
		names, err := list(ctx, c.Flag("config").Value.String())
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveError
		}
		var offered []cobra.Completion
		for _, name := range names {
			name, description, _ := strings.Cut(name, "\t")
			if strings.HasPrefix(name, begun) && name == plaintext.Printable(name) && !strings.ContainsAny(name, shellActive) && !slices.Contains(args, name) {
				if description != "" {
					name = cobra.CompletionWithDesc(name, plaintext.Printable(description))
				}
				offered = append(offered, name)
			}
		}
		return offered, cobra.ShellCompDirectiveNoFileComp
	}
}

// fromStore makes a list for completions from what the store knows.
func fromStore(list func(context.Context, *store.Store) ([]string, error)) func(context.Context, string) ([]string, error) {
	return func(ctx context.Context, configPath string) ([]string, error) {
		db, _, err := openConfigured(configPath)
		if err != nil {
			return nil, err
		}
		defer db.Close()
		return list(ctx, db)
	}
}

var (
	queueNames = fromStore(func(ctx context.Context, db *store.Store) ([]string, error) {
		names, err := db.Names(ctx)
		return names.Queues, err
	})
	kindNames = fromStore(func(ctx context.Context, db *store.Store) ([]string, error) {
		names, err := db.Names(ctx)
		return names.Kinds, err
	})
	scheduleNames = fromStore(namesOfSchedules)
)

// taskIDs lists the newest tasks that have one of the statuses, with descriptions.
func taskIDs(statuses ...string) func(context.Context, string) ([]string, error) {
	return fromStore(func(ctx context.Context, db *store.Store) (ids []string, err error) {
		for _, status := range statuses {
			page, err := db.List(ctx, store.Filter{Status: status, Limit: 50, Scan: 2000, Brief: true})
			if err != nil {
				return nil, err
			}
			for _, r := range page.Rows {
				ids = append(ids, fmt.Sprintf("%d\t%s %s %s", r.ID, r.Status, r.Kind, snapshot.Target(r.Kind, r.Payload)))
			}
		}
		return ids, nil
	})
}

func namesOfSchedules(ctx context.Context, db *store.Store) ([]string, error) {
	rows, err := db.Schedules(ctx)
	names := make([]string, len(rows))
	for i, r := range rows {
		names[i] = r.Name
	}
	return names, err
}

func limitNames(ctx context.Context, configPath string) ([]string, error) {
	limits, _, err := limitsOf(configPath)
	if err != nil {
		return nil, err
	}
	return limits.List(ctx)
}

// didYouMean returns a question to put behind an error about a name that does not
// exist, or "" if none of those that do is like it.
func didYouMean(name string, known []string) string {
	best, distance := "", min(3, (len(name)+2)/2) // as far as a few slips lead
	for _, k := range known {
		d := levenshtein.ComputeDistance(strings.ToLower(name), strings.ToLower(k))
		if len(name) > 2 && strings.HasPrefix(k, name) {
			d = min(d, 1)
		}
		if d < distance {
			best, distance = k, d
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf("; did you mean %q?", best)
}
