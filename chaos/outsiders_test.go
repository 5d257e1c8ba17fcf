package main

import (
	"context"
	"encoding/json"
	"io"
	"path/filepath"
	"testing"
	"time"

	"onejob/boottime"
	"onejob/chaos/harness"
	"onejob/chaos/observer"
	"onejob/tasks"
)

func TestOutsidersAreNoReplicas(t *testing.T) {
	for text, want := range map[string]bool{
		`{"name": "onejob lock shared-1", "host": "h"}`: true,
		`{"name": "daemon-1", "host": "h"}`:             false,
		`{}`:                                            false,
		`nonsense`:                                      false,
	} {
		if isOutsider([]byte(text)) != want {
			t.Errorf("isOutsider(%s) is %v", text, !want)
		}
	}
}

// asking is a kind that asks once when its lease ends, and then waits.
type asking func(*tasks.Attempt)

func (ask asking) Prepare(json.RawMessage) (tasks.Handler, error) {
	return func(_ context.Context, a *tasks.Attempt) (tasks.Result, error) {
		ask(a)
		return tasks.Result{}, nil
	}, nil
}

// A handler, or the guard of a command, learns of no deadline that the observer is not told,
// and the observer learns of those that no handler asks for.
func TestKindsTellTheirLeases(t *testing.T) {
	stdin, home := io.Pipe()
	answers, stdout := io.Pipe()
	path := filepath.Join(t.TempDir(), "seen.json")
	done := make(chan error, 1)
	go func() { done <- observer.Serve(stdin, stdout, "127.0.0.1", path) }()
	var where observer.Where
	if err := json.NewDecoder(answers).Decode(&where); err != nil {
		t.Fatal(err)
	}
	isTold := func(fence int64, long time.Duration) {
		t.Helper()
		client := observer.MarkClient{URL: where.Target}
		err := harness.Eventually(t.Context(), 30*time.Second, "the lease is reported", func() error {
			leases, err := client.Leases()
			if d := leases[fence].Deadline.Sub(leases[fence].Told); err == nil && (d < long-time.Minute || d > long) {
				err = io.ErrUnexpectedEOF
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
	at := boottime.Now().Add(time.Hour)
	attempt := &tasks.Attempt{Task: tasks.Task{Fence: 7}, Deadline: func() boottime.Instant { return at }, Output: tasks.NewOutput(0)}
	run := func(ask asking) {
		t.Helper()
		handler, err := (&told{where.Tasks, ask}).Prepare(nil)
		if err == nil {
			_, err = handler(t.Context(), attempt)
		}
		if err != nil {
			t.Error(err)
		}
	}
	run(func(a *tasks.Attempt) {
		if a.Deadline() != at {
			t.Error("another deadline is passed on")
		}
		isTold(7, time.Hour)
	})
	attempt = &tasks.Attempt{Task: tasks.Task{Fence: 8}, Deadline: func() boottime.Instant { return at }, Output: tasks.NewOutput(0)}
	run(func(*tasks.Attempt) { isTold(8, time.Hour) })
	_ = home.Close()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
