package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"onejob/internal/plaintext"
	"onejob/internal/snapshot"
	"onejob/internal/watch"
	"onejob/store"
)

// watchable returns the terminal for --watch, or why there is none.
func watchable(c *cobra.Command, output string) (*os.File, error) {
	if output == formatJSON {
		return nil, errors.New("--watch cannot be used with -o json; leave out --watch for one snapshot as JSON")
	}
	f, ok := stdoutOf(c).(*os.File)
	switch {
	case !ok || !term.IsTerminal(int(f.Fd())):
		return nil, errors.New("--watch needs a terminal, and stdout is not one; leave out --watch for one snapshot")
	case os.Getenv("TERM") == "dumb":
		return nil, errors.New("--watch needs a terminal that can move the cursor, and TERM is dumb; leave out --watch for one snapshot")
	}
	return f, nil
}

// watchStatus shows the snapshots of source on a terminal until somebody quits or ctx ends.
func watchStatus(ctx context.Context, terminal *os.File, source *snapshot.Source, db *store.Store, prefix string) error {
	return watch.Run(ctx, watch.Config{
		Source: source,
		Screen: screenOf,
		Story: func(ctx context.Context, task int64) (string, error) {
			return storyText(ctx, db, task, prefix)
		},
		Out:    terminal,
		Colour: os.Getenv("NO_COLOR") == "",
	})
}

// screenOf returns what --watch shows of a snapshot.
func screenOf(s *snapshot.Snapshot) watch.Screen {
	needs := blockOf("NEEDS SOMEBODY", s.Needs, needRows(s.Needs),
		whole("LEVEL", func(n snapshot.Need) any { return n.Level }),
		short("WHAT", func(n snapshot.Need) any { return n.Text }),
		short("DO", func(n snapshot.Need) any { return n.Do }))
	blocks := append([]watch.Block{needs}, statusBlocks(s)...)
	// Each block says which of the reads behind it failed.
	for i, reads := range [][]string{
		{snapshot.BlockOverlaps, snapshot.BlockVacuum, snapshot.BlockNames},
		{snapshot.BlockFailures},
		{snapshot.BlockRunning},
		{snapshot.BlockQueues, snapshot.BlockPaused, snapshot.BlockRates},
		{snapshot.BlockLimits},
		{snapshot.BlockSchedules},
		{snapshot.BlockReplicas, snapshot.BlockLeader},
	} {
		for _, read := range reads {
			if stale := s.StaleBlock(read); stale != nil {
				blocks[i].Notes = append(blocks[i].Notes, fmt.Sprintf("not current: %s (%s): %s", stale.Block, asOf(*stale), plaintext.FirstLine(stale.Error, 200)))
			}
		}
	}
	return watch.Screen{Level: s.Level, Verdict: s.Verdict, Blocks: blocks}
}

// numbers are counts and durations in the text of a need, which change while it is the same need.
var numbers = regexp.MustCompile(`(^| )\d[^ ]*( (ms|s|min|h|d)\b)?`)

// needRows returns what makes a row of a need. Its key leaves numbers out, unless that is all in
// which two needs differ.
func needRows(needs []snapshot.Need) func(snapshot.Need) watch.Row {
	key := func(n snapshot.Need) string { return fmt.Sprint(n.Task, numbers.ReplaceAllString(n.Text, "${1}N")) }
	count := map[string]int{}
	for _, n := range needs {
		count[key(n)]++
	}
	return func(n snapshot.Need) watch.Row {
		r := watch.Row{Key: key(n), Task: n.Task, Level: n.Level}
		if count[r.Key] > 1 {
			r.Key = n.Text
		}
		return r
	}
}

// storyText returns what "onejob tasks show" prints of a task. Long payloads, results and
// outputs are cut, as on the web page.
func storyText(ctx context.Context, db *store.Store, task int64, prefix string) (string, error) {
	story, err := db.Story(ctx, task)
	if err != nil {
		return "", err
	}
	row := story.Row
	row.Payload, row.Result = shownJSON(story.Payload), shownJSON(story.Result)
	var attempts []store.AttemptRow
	for _, a := range slices.Backward(story.Attempts) {
		shown := store.AttemptRow{Fence: a.Fence, Attempt: a.Attempt, Replica: a.Replica, StartedAt: a.StartedAt, FinishedAt: a.FinishedAt, Outcome: a.Outcome, ExitCode: a.ExitCode}
		if a.Error != "" {
			shown.Error = &a.Error
		}
		if a.OutputLength > 0 {
			if a.OutputCut {
				a.Output += fmt.Sprintf("\n[cut: it has %d bytes]", a.OutputLength)
			}
			shown.Output = &a.Output
		}
		attempts = append(attempts, shown)
	}
	var b bytes.Buffer
	if err := showTask(&b, row, story.Why, attempts, prefix); err != nil {
		return "", err
	}
	if story.MoreAttempts {
		fmt.Fprintf(&b, "\nThere are older attempts: onejob tasks show %d\n", task)
	}
	return b.String(), nil
}

// shownJSON returns a text, or how long it is if it is too long to be read.
func shownJSON(t store.Text) json.RawMessage {
	if t.Text == "" && t.Cut {
		return json.RawMessage(fmt.Sprintf("too long to be shown: %d bytes as they are stored", t.Length))
	}
	return json.RawMessage(plaintext.Lines(strings.TrimSpace(t.Text)))
}
