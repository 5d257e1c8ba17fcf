package cli

import (
	"context"
	"flag"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"onejob/internal/snapshot"
	"onejob/internal/testenv"
	"onejob/internal/watch"
	"onejob/store"
	"onejob/tasks"
)

var update = flag.Bool("update", false, "write docs/images/terminal.svg instead of comparing it")

// oneSnapshot is a source that has no other.
type oneSnapshot struct{ s *snapshot.Snapshot }

func (o oneSnapshot) After(ctx context.Context, seen *snapshot.Snapshot) (*snapshot.Snapshot, error) {
	if seen != o.s {
		return o.s, nil
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

func (o oneSnapshot) Renew(context.Context) (*snapshot.Snapshot, error) { return o.s, nil }

// busyMorning is a cluster with something in every block.
func busyMorning(at time.Time) *snapshot.Snapshot {
	ago := func(d time.Duration) store.Time { return store.Time{At: at.Add(-d)} }
	key := func(s string) *string { return &s }
	percent := 62.0
	next, read := store.Time{At: time.Date(2026, 3, 2, 1, 30, 0, 0, time.UTC)}, at.Add(-14*time.Second)
	return &snapshot.Snapshot{
		At: at, Now: at, Level: snapshot.Warning,
		Verdict: "2 replicas, 3 running, behind 0.0 s, 1 kind fails, leader web-2",
		Needs: []snapshot.Need{
			{Level: snapshot.Warning, Text: "12 due tasks wait in queue reports, which anna has paused: new template", Do: "onejob queues resume reports"},
		},
		Leader: &snapshot.Leader{Name: "web-2", Host: "web-2"},
		Failures: []snapshot.Failure{
			{Kind: "exec", Error: "command \"report\" exited with code N", Count: 12, First: ago(192 * time.Minute), Last: ago(48 * time.Second), Recent: true, Sample: 311},
			{Kind: "mail", Error: "dial tcp N:N: connect: connection refused", Count: 2, First: ago(5 * time.Hour), Last: ago(4 * time.Hour), Sample: 187},
		},
		Running: snapshot.Running{Count: snapshot.Count{N: 3}, Tasks: []snapshot.RunningTask{
			{ID: 298, Kind: "exec", Target: "backup --database shop", LockKey: key("db1"), Replica: "web-1", Attempt: 1, MaxAttempts: 5, Age: snapshot.Seconds(11 * time.Minute), Progress: &store.TaskProgress{Percent: &percent, Text: "31/50 tables", SaidAt: at.Add(-3 * time.Second)}},
			{ID: 312, Kind: "http", Target: "POST https://shop.example/hook", Replica: "web-2", Attempt: 2, MaxAttempts: 5, Age: snapshot.Seconds(4200 * time.Millisecond), Progress: &store.TaskProgress{Text: "sends", SaidAt: at.Add(-2 * time.Second)}},
			{ID: 313, Kind: "mail", Target: `{"to": "sales@example.com"}`, LockKey: key("smtp"), Replica: "web-1", Attempt: 1, MaxAttempts: 3, Age: snapshot.Seconds(300 * time.Millisecond)},
		}},
		Queues: []snapshot.Queue{
			{Name: "default", Due: snapshot.Count{N: 4}, OldestDue: snapshot.Seconds(800 * time.Millisecond), Later: snapshot.Count{N: 1204}, Kinds: []string{"exec", "http", "mail"}, Replicas: 2},
			{Name: "reports", Due: snapshot.Count{N: 12}, OldestDue: snapshot.Seconds(9 * time.Minute), Kinds: []string{"exec"}, Replicas: 2, Paused: &snapshot.Pause{By: "anna", Reason: "new template"}},
		},
		Limits: []snapshot.Limit{{Name: "smtp", Slots: 4, Held: 1, Waiting: 0, Due: snapshot.Count{N: 3}, Holders: []snapshot.Holder{{Who: "task 313 on replica web-1"}}}},
		Schedules: []snapshot.Schedule{
			{Name: "nightly", Cron: "30 1 * * *", TimeZone: "UTC", Kind: "exec", Enabled: true, NextAt: &next, Occurrences: []snapshot.Occurrence{{Task: 41, Became: "succeeded"}}},
		},
		Replicas: []snapshot.Replica{
			{Name: "web-1", State: tasks.ReplicaWorking, Host: "web-1", Version: "1.4.0", Running: 2, Concurrency: 32, Heartbeat: snapshot.Seconds(400 * time.Millisecond)},
			{Name: "web-2", State: tasks.ReplicaWorking, Leads: true, Host: "web-2", Version: "1.4.0", Running: 1, Concurrency: 32, Heartbeat: snapshot.Seconds(700 * time.Millisecond)},
		},
		Stale: []snapshot.Stale{{Block: snapshot.BlockLimits, Error: "context deadline exceeded", AsOf: &read}},
	}
}

// The picture in the documentation is what the terminal shows.
func TestWatchPicture(t *testing.T) {
	const path = "../../docs/images/terminal.svg"
	at := time.Date(2026, 3, 1, 9, 14, 7, 0, time.Local)
	s := busyMorning(at)
	s.Stale = nil // its time has the zone of this machine
	term := testenv.NewTerminal(t, 100, 38)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	defer func() { // also if it fails: nothing of it may go on beside other tests
		stop()
		for range ended {
		}
	}()
	t.Setenv("TERM", "xterm-256color")
	t.Setenv("COLORTERM", "")
	t.Setenv("NO_COLOR", "")
	go func() {
		defer close(ended)
		ended <- watch.Run(ctx, watch.Config{
			Source: oneSnapshot{s}, Screen: screenOf, In: term.File, Out: term.File, Colour: true, Now: func() time.Time { return at },
			Story: func(context.Context, int64) (string, error) { return "", nil },
		})
	}()
	term.AwaitText("? help")
	term.Type("\t\t")
	term.Await("the first running task is selected", func(screen string) bool { return strings.Contains(screen, "> 298") })
	if *update {
		time.Sleep(time.Second) // the rest of the screen comes after this row
		if err := os.WriteFile(path, []byte(term.SVG()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	term.Await(path+" is what the terminal shows, or else write it anew with: go test ./internal/cli -run TestWatchPicture -update", func(string) bool { return term.SVG() == string(have) })
	stop()
	if err := <-ended; err != nil {
		t.Errorf("it ended with %v", err)
	}
	if alternate, hidden := term.Alternate(); alternate || hidden {
		term.Await("the terminal is restored", func(string) bool { alternate, hidden := term.Alternate(); return !alternate && !hidden })
	}
}

// Whatever could not be read, one block says so.
func TestWatchShowsEachReadThatFailed(t *testing.T) {
	t.Parallel()
	source, err := os.ReadFile("../snapshot/snapshot.go")
	if err != nil {
		t.Fatal(err)
	}
	reads := regexp.MustCompile(`\n\tBlock\w+ += "(\w+)"`).FindAllStringSubmatch(string(source), -1)
	if len(reads) < 12 {
		t.Fatalf("snapshot.go has the blocks %q", reads)
	}
	for _, read := range reads {
		s := busyMorning(time.Now())
		s.Stale = []snapshot.Stale{{Block: read[1], Error: "too slow"}}
		var notes []string
		for _, b := range screenOf(s).Blocks {
			notes = append(notes, b.Notes...)
		}
		if want := "not current: " + read[1] + " (it was never read): too slow"; len(notes) != 1 || notes[0] != want {
			t.Errorf("without %s it says %q, want %q", read[1], notes, want)
		}
	}
}

// Of a limit that could not be read it is not known how many slots are held.
func TestStatusOfALimitThatCouldNotBeRead(t *testing.T) {
	t.Parallel()
	s := busyMorning(time.Now())
	s.Limits = []snapshot.Limit{{Name: "db", Slots: 5, Waiting: -1, Error: "no answer"}, {Name: "smtp", Slots: 4, Held: 1}}
	for _, b := range statusBlocks(s) {
		if b.Title == "LIMITS" {
			for i, want := range []string{"db|?|?|0|no answer", "smtp|1/4|0|0|"} {
				if got := strings.Join(b.Rows[i].Cells, "|"); got != want {
					t.Errorf("it shows %s, want %s", got, want)
				}
			}
		}
	}
}

// A need whose count or age has changed is the same row, so that it stays selected and open.
func TestWatchKnowsNeedsAgain(t *testing.T) {
	t.Parallel()
	keys := func(texts ...string) (list []string) {
		s := busyMorning(time.Now())
		s.Needs = nil
		for _, text := range texts {
			s.Needs = append(s.Needs, snapshot.Need{Level: snapshot.Warning, Text: text})
		}
		for _, r := range screenOf(s).Blocks[0].Rows {
			list = append(list, r.Key)
		}
		return list
	}
	before := keys("replica web-1 has sent no heartbeat for 4.2 s", "replica web-2 has sent no heartbeat for 4.2 s", "9,999 due tasks wait in queue a", "limit 1 is full", "limit 2 is full")
	after := keys("replica web-1 has sent no heartbeat for 3 min", "replica web-2 has sent no heartbeat for 250 ms", "10,000+ due tasks wait in queue a", "limit 1 is full", "limit 2 is full")
	if !slices.Equal(before, after) {
		t.Errorf("the keys were %q, and are %q", before, after)
	}
	slices.Sort(after)
	if n := len(slices.Compact(after)); n != 5 {
		t.Errorf("%d rows have keys of their own, not 5: %q", n, after)
	}
}

// Each block that is not current says so.
func TestWatchShowsWhatIsStale(t *testing.T) {
	t.Parallel()
	s := busyMorning(time.Now())
	s.Stale = append(s.Stale, snapshot.Stale{Block: snapshot.BlockLeader, Error: "no answer"}, snapshot.Stale{Block: snapshot.BlockVacuum, Error: "too slow"})
	notes := map[string]string{}
	for _, b := range screenOf(s).Blocks {
		name, _, _ := strings.Cut(b.Title, ":")
		notes[name] = strings.Join(b.Notes, "\n")
	}
	for block, want := range map[string]string{
		"LIMITS":         "not current: limits (shown as of 20",
		"REPLICAS":       "not current: leader (it was never read): no answer",
		"NEEDS SOMEBODY": "not current: vacuum (it was never read): too slow",
		"RUNNING":        "",
	} {
		if got, ok := notes[block]; !ok || !strings.HasPrefix(got, want) || want == "" && got != "" {
			t.Errorf("of %s it says %q, want %q", block, got, want)
		}
	}
}
