package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"onejob/chaos/checker"
	"onejob/chaos/harness"
	"onejob/chaos/observer"
)

// A replica that had to be killed has a mark of that, which the checker reads.
func TestAStopThatTakesTooLongIsAKill(t *testing.T) {
	stdin, home := io.Pipe()
	told, stdout := io.Pipe()
	path := filepath.Join(t.TempDir(), "seen.json")
	served := make(chan error, 1)
	go func() { served <- observer.Serve(stdin, stdout, "127.0.0.1", path) }()
	var where observer.Where
	if err := json.NewDecoder(told).Decode(&where); err != nil {
		t.Fatal(err)
	}
	c := &cluster{observer: &harness.Observer{MarkClient: observer.MarkClient{URL: where.Target}}, say: t.Logf}

	// sleeping starts a process that sleeps, with a shell's help, and returns when it does.
	sleeping := func(script string) *harness.Process {
		t.Helper()
		proc, err := harness.Start(exec.Command("/bin/sh", "-c", script+" exec sleep 600"), filepath.Join(t.TempDir(), "log"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(proc.Kill)
		err = harness.Eventually(t.Context(), 20*time.Second, "it sleeps", func() error {
			if name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", proc.Cmd.Process.Pid)); !bytes.HasPrefix(name, []byte("sleep")) {
				return errNothing
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return proc
	}
	if killed, err := c.stop("obedient", sleeping(""), time.Minute); killed || err != nil {
		t.Errorf("one that ends by SIGTERM: killed %v, %v", killed, err)
	}
	if killed, err := c.stop("gone", nil, time.Minute); killed || err != nil {
		t.Errorf("one that does not run: killed %v, %v", killed, err)
	}
	deaf := sleeping(`trap "" TERM;`)
	if killed, err := c.stop("deaf", deaf, 100*time.Millisecond); !killed || err != nil || deaf.Running() {
		t.Errorf("one that ignores SIGTERM: killed %v, %v, running %v", killed, err, deaf.Running())
	}

	home.Close()
	if err := <-served; err != nil {
		t.Fatal(err)
	}
	seen, err := observer.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if len(seen.Marks) != 1 || seen.Marks[0].Kind != checker.Kill || seen.Marks[0].Target != "deaf" || seen.Marks[0].End == 0 {
		t.Errorf("the marks are %+v, want one of a kill of deaf, which has ended", seen.Marks)
	}
}
