package cli

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"onejob/internal/snapshot"
	"onejob/lock"
	"onejob/lock/consul"
	"onejob/store"
)

func statusCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "status",
		Short: "Show what goes on in the cluster, and what needs you",
		Long: `Show what goes on in the cluster: a verdict, what needs somebody, what fails, what
runs, what waits, limits, schedules and replicas. It is the snapshot that the web page
shows (http.listen).

It costs Postgres little, however many tasks there are: counts end at 10,000, a
statement ends after half a second, and the failures are those among the newest 10,000
failed tasks. A block that could not be read says so; the others are there.

Exit codes: 0 the snapshot was taken, also if something is wrong; 1 Postgres is
unavailable; 2 usage or configuration error.`,
		Example: `  onejob status
  onejob status -o json | jq -r '.needs[] | .level + " " + .text'`,
		Args: cobra.NoArgs,
	}
	path, output := configFlag(c), outputFlag(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		cfg, db, locks, err := both(*path)
		if err != nil {
			return err
		}
		defer db.Close()
		limits, _, err := cfg.limits(locks, zap.NewNop())
		if err != nil {
			return usage(err)
		}
		s, err := cfg.snapshots(db, func() *consul.Locker { return locks }, func() lock.Semaphores { return limits }).Get(c.Context())
		switch {
		case err != nil:
			return stopped(c.Context(), err)
		case s.Err != nil:
			return s.Err
		case *output == formatJSON:
			return printJSON(c.OutOrStdout(), s)
		}
		return showStatus(c, s)
	}
	return c
}

// snapshots returns a source of snapshots. Its parts may not be known yet: then they are nil.
func (c *Config) snapshots(db *store.Store, locks func() *consul.Locker, limits func() lock.Semaphores) *snapshot.Source {
	return snapshot.New(snapshot.Config{
		Store: db,
		Leader: func(ctx context.Context) (*snapshot.Leader, error) {
			l := locks()
			if l == nil {
				return nil, nil
			}
			leader, err := l.Leader(ctx)
			switch {
			case err != nil || leader == nil:
				return nil, err
			case foreign(leader):
				return &snapshot.Leader{Session: leader.Session}, nil
			}
			return &snapshot.Leader{Name: leader.Name, Host: leader.Host, Since: leader.Since, Session: leader.Session}, nil
		},
		Limits: limits,
		Slots:  c.Limits.Slots,
		Holder: whoHolds,
	})
}

// showStatus writes a snapshot as text that fits into a terminal.
func showStatus(c *cobra.Command, s *snapshot.Snapshot) error {
	out := c.OutOrStdout()
	printf(out, "%s: %s\n", map[snapshot.Level]string{snapshot.Good: "OK", snapshot.Warning: "LOOK", snapshot.Bad: "BAD"}[s.Level], s.Verdict)
	for _, block := range s.Stale {
		of := "it was never read"
		if block.AsOf != nil {
			of = "shown as of " + when(block.AsOf)
		}
		printf(out, "not current: %s (%s): %s\n", block.Block, of, block.Error)
	}
	if len(s.Needs) > 0 {
		heading(out, "NEEDS SOMEBODY")
		for _, n := range s.Needs {
			printf(out, "%-7s  %s\n", string(n.Level), n.Text)
			if n.Do != "" {
				printf(out, "         %s\n", n.Do)
			}
		}
	}
	ago := func(t store.Time) string {
		if age := between(t, store.Time{At: s.Now}); age != "" {
			return age + " ago"
		}
		return t.String()
	}
	return show(
		func() error {
			return section(c, "FAILED WITHIN A DAY", s.Failures,
				short("KIND", func(f snapshot.Failure) any { return f.Kind }),
				whole("TASKS", func(f snapshot.Failure) any { return f.Count }),
				whole("FIRST", func(f snapshot.Failure) any { return ago(f.First) }),
				whole("LAST", func(f snapshot.Failure) any { return ago(f.Last) }),
				whole("NEWEST", func(f snapshot.Failure) any { return f.Sample }),
				short("ERROR", func(f snapshot.Failure) any { return firstLine(f.Error, 200) }))
		},
		func() error {
			return section(c, "RUNNING: "+s.Running.Count.String(), s.Running.Tasks,
				whole("ID", func(t snapshot.RunningTask) any { return t.ID }),
				short("KIND", func(t snapshot.RunningTask) any { return t.Kind }),
				short("TARGET", func(t snapshot.RunningTask) any { return firstLine(t.Target, 200) }),
				short("LOCK KEY", func(t snapshot.RunningTask) any { return or(t.LockKey) }),
				short("REPLICA", func(t snapshot.RunningTask) any { return t.Replica }),
				whole("ATTEMPT", func(t snapshot.RunningTask) any { return fmt.Sprintf("%d/%d", t.Attempt, t.MaxAttempts) }),
				whole("FOR", func(t snapshot.RunningTask) any { return t.Age }))
		},
		func() error {
			return section(c, "QUEUES", s.Queues,
				short("NAME", func(q snapshot.Queue) any { return q.Name }),
				whole("DUE", func(q snapshot.Queue) any { return q.Due }),
				whole("OLDEST", func(q snapshot.Queue) any { return oldest(q) }),
				whole("LATER", func(q snapshot.Queue) any { return q.Later }),
				whole("REPLICAS", func(q snapshot.Queue) any { return q.Replicas }),
				short("KINDS", func(q snapshot.Queue) any { return strings.Join(q.Kinds, ",") }),
				short("PAUSED", func(q snapshot.Queue) any { return pausedBy(q) }))
		},
		func() error {
			return section(c, "LIMITS", s.Limits,
				short("NAME", func(l snapshot.Limit) any { return l.Name }),
				whole("HELD", func(l snapshot.Limit) any { return fmt.Sprintf("%d/%d", l.Held, l.Slots) }),
				whole("WAITING", func(l snapshot.Limit) any { return waiting(l.Waiting) }),
				whole("DUE", func(l snapshot.Limit) any { return l.Due }),
				short("HOLDERS", func(l snapshot.Limit) any { return holders(l) }))
		},
		func() error {
			return section(c, "SCHEDULES", s.Schedules,
				short("NAME", func(r snapshot.Schedule) any { return r.Name }),
				short("CRON", func(r snapshot.Schedule) any { return r.Cron }),
				whole("NEXT", func(r snapshot.Schedule) any { return nextOf(r) }),
				whole("LAST", func(r snapshot.Schedule) any { return lastOf(r) }),
				short("ERROR", func(r snapshot.Schedule) any { return r.Error }))
		},
		func() error {
			return section(c, "REPLICAS", s.Replicas,
				short("NAME", func(r snapshot.Replica) any { return r.Name }),
				whole("STATE", func(r snapshot.Replica) any { return stateOf(r) }),
				whole("RUNNING", func(r snapshot.Replica) any { return fmt.Sprintf("%d/%d", r.Running, r.Concurrency) }),
				whole("HEARTBEAT", func(r snapshot.Replica) any { return heartbeat(r) }),
				short("HOST", func(r snapshot.Replica) any { return r.Host }),
				short("VERSION", func(r snapshot.Replica) any { return r.Version }),
				short("QUEUES", func(r snapshot.Replica) any { return allOr(r.Queues) }))
		},
	)
}

// show writes parts until one fails.
func show(parts ...func() error) error {
	for _, part := range parts {
		if err := part(); err != nil {
			return err
		}
	}
	return nil
}

func heading(w io.Writer, text string) { printf(w, "\n%s\n", text) }

// section writes a list under a heading, if there is anything in it.
func section[T any](c *cobra.Command, name string, rows []T, columns ...column[T]) error {
	if len(rows) == 0 {
		return nil
	}
	heading(c.OutOrStdout(), name)
	return printRows(c, "text", rows, columns...)
}

func pausedBy(q snapshot.Queue) string {
	switch {
	case q.Paused == nil:
		return ""
	case q.Paused.Reason == "":
		return "by " + q.Paused.By
	}
	return "by " + q.Paused.By + ": " + q.Paused.Reason
}

func oldest(q snapshot.Queue) string {
	if q.Due.N == 0 {
		return ""
	}
	return q.OldestDue.String()
}

func holders(l snapshot.Limit) string {
	if l.Error != "" {
		return l.Error
	}
	var names []string
	for _, h := range l.Holders {
		names = append(names, h.Who)
	}
	if l.Held > len(names) && len(names) > 0 {
		names = append(names, "and more")
	}
	return strings.Join(names, "; ")
}

func nextOf(s snapshot.Schedule) string {
	switch {
	case !s.Enabled:
		return "disabled"
	case s.Behind:
		return inZoneStored(s.NextAt, s.TimeZone) + ", late"
	}
	return inZoneStored(s.NextAt, s.TimeZone)
}

// lastOf says what became of the last due time.
func lastOf(s snapshot.Schedule) string {
	if len(s.Occurrences) == 0 {
		return ""
	}
	return s.Occurrences[len(s.Occurrences)-1].Became
}

func stateOf(r snapshot.Replica) string {
	switch {
	case r.Silent():
		return string(r.State) + ", silent"
	case r.Leads:
		return string(r.State) + ", leads"
	}
	return string(r.State)
}

func heartbeat(r snapshot.Replica) string {
	if !r.Live() {
		return ""
	}
	return time.Duration(r.Heartbeat).Round(100*time.Millisecond).String() + " ago"
}

func allOr(queues []string) string {
	if len(queues) == 0 {
		return "all"
	}
	return strings.Join(queues, ",")
}
