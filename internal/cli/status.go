package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"onejob/internal/plaintext"
	"onejob/internal/snapshot"
	"onejob/internal/watch"
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
unavailable, or the database has no onejob schema; 2 usage or configuration error.

With --watch the snapshot stays on the terminal and is renewed every 2 s. The keys move
through the rows, open the story of a task, and filter; ? lists them, q quits. It only
reads. NO_COLOR in the environment turns colours off.`,
		Example: `  onejob status
  onejob status --watch
  onejob status -o json | jq -r '.needs[] | .level + " " + .text'`,
		Args: cobra.NoArgs,
	}
	path, output := configFlag(c), outputFlag(c)
	live := c.Flags().BoolP("watch", "w", false, "stay on the terminal, and renew every 2 s")
	c.RunE = func(c *cobra.Command, _ []string) error {
		var terminal *os.File
		if *live {
			var err error
			if terminal, err = watchable(c, *output); err != nil {
				return usage(err)
			}
		}
		cfg, db, locks, err := both(*path)
		if err != nil {
			return err
		}
		defer db.Close()
		limits, _, err := cfg.limits(locks, zap.NewNop())
		if err != nil {
			return usage(err)
		}
		ctx, cancel := context.WithCancel(c.Context())
		defer cancel()
		source := cfg.snapshots(overviewUntil{ctx, db}, func() *consul.Locker { return locks }, func() lock.Semaphores { return limits }, func() map[string]int { return cfg.Limits.Slots })
		if *live {
			return watchStatus(ctx, terminal, source, db, cfg.Consul.Prefix)
		}
		s, err := source.Get(ctx)
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

// overview is the store, as a source of snapshots needs it.
type overview interface {
	Overview(ctx context.Context) (store.Overview, error)
}

// overviewUntil ends reads with ctx. A source would let them go on for other readers, but
// there are none, and a Postgres that does not answer must not keep the command from ending.
type overviewUntil struct {
	ctx context.Context
	overview
}

func (o overviewUntil) Overview(ctx context.Context) (store.Overview, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(o.ctx, cancel)()
	return o.overview.Overview(ctx)
}

// snapshots returns a source of snapshots. Its parts may not be known yet: then they are nil.
func (c *Config) snapshots(db overview, locks func() *consul.Locker, limits func() lock.Semaphores, slots func() map[string]int) *snapshot.Source {
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
		Slots:  slots,
		Holder: whoHolds,
	})
}

// showStatus writes a snapshot as text that fits into a terminal.
func showStatus(c *cobra.Command, s *snapshot.Snapshot) error {
	out := c.OutOrStdout()
	printf(out, "%s: %s\n", map[snapshot.Level]string{snapshot.Good: "OK", snapshot.Warning: "LOOK", snapshot.Bad: "BAD"}[s.Level], s.Verdict)
	for _, block := range s.Stale {
		printf(out, "not current: %s (%s): %s\n", block.Block, asOf(block), block.Error)
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
	for _, b := range statusBlocks(s) {
		if len(b.Rows) == 0 {
			continue
		}
		heading(out, b.Title)
		if err := printBlock(c, b); err != nil {
			return err
		}
	}
	return nil
}

func asOf(block snapshot.Stale) string {
	if block.AsOf == nil {
		return "it was never read"
	}
	return "shown as of " + when(block.AsOf)
}

// statusBlocks returns the tables of a snapshot, in the order of the web page, but what needs
// somebody.
func statusBlocks(s *snapshot.Snapshot) []watch.Block {
	ago := func(t store.Time) string {
		if age := between(t, store.Time{At: s.Now}); age != "" {
			return age + " ago"
		}
		return t.String()
	}
	failed := blockOf("FAILED WITHIN A DAY", s.Failures,
		func(f snapshot.Failure) watch.Row {
			return watch.Row{Key: f.Kind + " " + f.Error, Task: f.Sample, Level: levelIf(f.Recent, snapshot.Warning)}
		},
		short("KIND", func(f snapshot.Failure) any { return f.Kind }),
		whole("TASKS", func(f snapshot.Failure) any { return f.Count }),
		whole("FIRST", func(f snapshot.Failure) any { return ago(f.First) }),
		whole("LAST", func(f snapshot.Failure) any { return ago(f.Last) }),
		whole("NEWEST", func(f snapshot.Failure) any { return f.Sample }),
		short("ERROR", func(f snapshot.Failure) any { return plaintext.FirstLine(f.Error, 200) }))
	running := blockOf("RUNNING: "+s.Running.Count.String(), s.Running.Tasks,
		func(t snapshot.RunningTask) watch.Row { return watch.Row{Key: fmt.Sprint(t.ID), Task: t.ID} },
		whole("ID", func(t snapshot.RunningTask) any { return t.ID }),
		short("KIND", func(t snapshot.RunningTask) any { return t.Kind }),
		short("TARGET", func(t snapshot.RunningTask) any { return plaintext.FirstLine(t.Target, 200) }),
		short("LOCK KEY", func(t snapshot.RunningTask) any { return or(t.LockKey) }),
		short("REPLICA", func(t snapshot.RunningTask) any { return t.Replica }),
		whole("ATTEMPT", func(t snapshot.RunningTask) any { return fmt.Sprintf("%d/%d", t.Attempt, t.MaxAttempts) }),
		whole("FOR", func(t snapshot.RunningTask) any { return t.Age }),
		short("PROGRESS", func(t snapshot.RunningTask) any { return progressOf(t, s.Now) }))
	running.Tasks = true
	queues := blockOf("QUEUES", s.Queues,
		func(q snapshot.Queue) watch.Row {
			return watch.Row{Key: q.Name, Level: levelIf(q.Paused != nil, snapshot.Warning)}
		},
		short("NAME", func(q snapshot.Queue) any { return q.Name }),
		whole("DUE", func(q snapshot.Queue) any { return q.Due }),
		whole("OLDEST", func(q snapshot.Queue) any { return oldest(q) }),
		whole("LATER", func(q snapshot.Queue) any { return q.Later }),
		whole("IN/MIN", func(q snapshot.Queue) any { return q.Enqueued }),
		whole("OUT/MIN", func(q snapshot.Queue) any { return q.Ended }),
		whole("REPLICAS", func(q snapshot.Queue) any { return q.Replicas }),
		short("KINDS", func(q snapshot.Queue) any { return strings.Join(q.Kinds, ",") }),
		short("PAUSED", func(q snapshot.Queue) any { return pausedBy(q) }))
	limits := blockOf("LIMITS", s.Limits,
		func(l snapshot.Limit) watch.Row {
			return watch.Row{Key: l.Name, Level: levelIf(l.Error != "", snapshot.Warning)}
		},
		short("NAME", func(l snapshot.Limit) any { return l.Name }),
		whole("HELD", func(l snapshot.Limit) any { return heldOf(l) }),
		whole("WAITING", func(l snapshot.Limit) any { return waiting(l.Waiting) }),
		whole("DUE", func(l snapshot.Limit) any { return l.Due }),
		short("HOLDERS", func(l snapshot.Limit) any { return holders(l) }))
	schedules := blockOf("SCHEDULES", s.Schedules,
		func(r snapshot.Schedule) watch.Row {
			return watch.Row{Key: r.Name, Task: lastTask(r), Level: levelIf(r.Error != "", snapshot.Bad)}
		},
		short("NAME", func(r snapshot.Schedule) any { return r.Name }),
		short("CRON", func(r snapshot.Schedule) any { return r.Cron }),
		whole("NEXT", func(r snapshot.Schedule) any { return nextOf(r) }),
		whole("LAST", func(r snapshot.Schedule) any { return lastOf(r) }),
		short("ERROR", func(r snapshot.Schedule) any { return r.Error }))
	listed := "REPLICAS"
	if s.ReplicasLeftOut > 0 {
		listed = fmt.Sprintf("REPLICAS: %d of %d", len(s.Replicas), len(s.Replicas)+s.ReplicasLeftOut)
	}
	replicas := blockOf(listed, s.Replicas,
		func(r snapshot.Replica) watch.Row {
			return watch.Row{Key: r.Name + " " + r.Session, Level: levelIf(r.Silent(), snapshot.Warning)}
		},
		short("NAME", func(r snapshot.Replica) any { return r.Name }),
		whole("STATE", func(r snapshot.Replica) any { return stateOf(r) }),
		whole("RUNNING", func(r snapshot.Replica) any { return fmt.Sprintf("%d/%d", r.Running, r.Concurrency) }),
		whole("HEARTBEAT", func(r snapshot.Replica) any { return heartbeat(r) }),
		whole("CLOCK", func(r snapshot.Replica) any { return r.Clock() }),
		short("HOST", func(r snapshot.Replica) any { return r.Host }),
		short("VERSION", func(r snapshot.Replica) any { return r.Version }),
		short("QUEUES", func(r snapshot.Replica) any { return cmp.Or(strings.Join(r.Queues, ","), "all") }))
	return []watch.Block{failed, running, queues, limits, schedules, replicas}
}

// progressOf returns how far a task is, and when it said so if that was long ago.
func progressOf(t snapshot.RunningTask, now time.Time) string {
	switch {
	case t.Progress == nil:
		return ""
	case now.Sub(t.Progress.SaidAt) < time.Minute:
		return t.Progress.String()
	}
	return fmt.Sprintf("%v (%v ago)", *t.Progress, snapshot.Seconds(now.Sub(t.Progress.SaidAt)))
}

func levelIf(condition bool, l snapshot.Level) snapshot.Level {
	if condition {
		return l
	}
	return snapshot.Good
}

func heading(w io.Writer, text string) { printf(w, "\n%s\n", text) }

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

// heldOf returns how many slots of a limit are held, of how many. Neither is known of one that
// could not be read.
func heldOf(l snapshot.Limit) string {
	if l.Error != "" {
		return "?"
	}
	return fmt.Sprintf("%d/%d", l.Held, l.Slots)
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
	case s.Paused != nil && s.NextAt == nil:
		return "paused"
	case s.Paused != nil:
		return inZoneStored(s.NextAt, s.TimeZone) + ", paused"
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

// lastTask returns the task of the last due time that has one, or 0.
func lastTask(s snapshot.Schedule) int64 {
	for _, o := range slices.Backward(s.Occurrences) {
		if o.Task != 0 {
			return o.Task
		}
	}
	return 0
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
