package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"onejob/chaos/checker"
	"onejob/chaos/observer"
)

func TestCrashesAreReadFromLogs(t *testing.T) {
	const log = `{"level":"info","time":"2026-11-27T17:23:22.07Z","event":"replica_started","replica":"daemon-2"}
onejob: what a process says of which the supervisor did not start the next one
{"level":"info","time":"2026-11-27T17:26:00Z","event":"replica_started","replica":"daemon-2"}
{"level":"error","time":"2026-11-27T17:26:47.030742895Z","event":"worker_crashed","replica":"daemon-2","pid":9922,"exit_code":-1,"signal":"SIGKILL","restarts":true}
{"level":"info","time":"2026-11-27T17:26:48Z","event":"replica_started","replica":"daemon-2"}
panic: runtime error: index out of range [recovered]
	panic: runtime error: index out of range

goroutine 1 [running]:
{"level":"error","time":"2026-11-27T17:27:00.5Z","event":"worker_crashed","replica":"daemon-2","pid":1,"exit_code":2,"signal":"","restarts":true}
onejob: no Postgres within start_timeout (1m0s)
{"level":"error","time":"2026-11-27T17:28:00.5Z","event":"worker_crashed","replica":"daemon-2","pid":1,"exit_code":1,"signal":"","restarts":true}
{"level":"error","ts":1,"time":"2026-11-27T17:29:00.125Z","event":"worker_crashed","replica":"daemon-2","pi
`
	got, err := crashesIn([]byte(log), "daemon-2")
	at := func(h, m, s, ms int) observer.Time {
		return observer.At(time.Date(2026, 11, 27, h, m, s, ms*1_000_000, time.UTC))
	}
	want := []checker.Crash{
		{Replica: "daemon-2", At: at(17, 26, 47, 30) + 742895, How: "SIGKILL"},
		{Replica: "daemon-2", At: at(17, 27, 0, 500), How: "exit code 2", Said: "panic: runtime error: index out of range [recovered]"},
		{Replica: "daemon-2", At: at(17, 28, 0, 500), How: "exit code 1", Said: "onejob: no Postgres within start_timeout (1m0s)"},
		{Replica: "daemon-2", At: at(17, 29, 0, 125), How: "unknown"},
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("crashes %+v, %v; want %+v", got, err, want)
	}
	if _, err := crashesIn([]byte(`{"event":"worker_crashed"}`), "daemon-2"); err == nil {
		t.Error("a crash of which nobody knows when it was is passed over")
	}
}

func TestLastWords(t *testing.T) {
	path := filepath.Join(t.TempDir(), "replica.log")
	if got := lastWords(path); got != "" {
		t.Errorf("of no log: %q", got)
	}
	text := strings.Repeat("onejob: of long ago\n", 2000) + "panic: what is not the last\n{\"event\":\"stopped\"}\nonejob: no session within start_timeout (1m0s)\n{\"event\":\"left\"}\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := lastWords(path); got != "onejob: no session within start_timeout (1m0s)" {
		t.Errorf("last words %q", got)
	}
}
