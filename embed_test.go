package onejob_test

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"onejob/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// TestEmbed builds testdata/embed as a module of its own, which has this one by way of
// replace, as another project would. It runs the module's tests while a replica of that
// program is running, against real servers.
func TestEmbed(t *testing.T) {
	tree, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS("testdata/embed")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"go.mod", "go.sum"} { // the versions of libraries are those that are tested here
		text, err := os.ReadFile(name)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	db, kv := testenv.Postgres(t), testenv.Consul(t)
	environ := append(os.Environ(), "GOFLAGS=-mod=mod", "GOWORK=off",
		"ONEJOB_POSTGRES_DSN="+db.DSN, "CONSUL_HTTP_ADDR="+kv.Addr, "ONEJOB_CONSUL_PREFIX="+kv.Prefix,
		"ONEJOB_CONSUL_ADDRESS="+kv.Addr, "ONEJOB_HTTP_LISTEN=127.0.0.1:0", "ONEJOB_LOG_FORMAT=json")
	command := func(name string, args ...string) *exec.Cmd {
		c := exec.CommandContext(t.Context(), name, args...)
		c.Dir, c.Env = dir, environ
		return c
	}
	run := func(name string, args ...string) string {
		t.Helper()
		out, err := command(name, args...).CombinedOutput()
		if err != nil {
			t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	test := bytes.Replace(block(t, "go", "package main\n\nimport (\n\t\"testing\"\n"), []byte("TestGreet("), []byte("TestGreetOfThePage("), 1)
	if err := os.WriteFile(filepath.Join(dir, "page_test.go"), test, 0o600); err != nil {
		t.Fatal(err)
	}
	run("go", "mod", "edit", "-module", "example.com/jobs", "-require", "onejob@v0.0.0", "-replace", "onejob="+tree)
	run("go", "build", "-o", "jobs", ".")
	if err := os.WriteFile(filepath.Join(dir, "jobs.yaml"), block(t, "yaml", "postgres:\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	jobs := filepath.Join(dir, "jobs")

	var log testenv.Output
	replica := command(jobs, "serve", "--config", "jobs.yaml")
	replica.Cancel = func() error { return replica.Process.Signal(syscall.SIGTERM) }
	replica.WaitDelay = time.Minute
	replica.Stdout, replica.Stderr = &log, &log
	if err := replica.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- replica.Wait() }()
	stopped := false
	defer func() {
		if !stopped {
			_ = replica.Process.Signal(syscall.SIGTERM)
			<-ended
		}
		if t.Failed() {
			t.Logf("the replica's log:\n%s", log.String())
		}
	}()
	testenv.Eventually(t, time.Minute, "the replica is ready", func() bool {
		address := field(&log, "replica_started", "http")
		if address == "" {
			return false
		}
		answer, err := http.Get("http://" + address + "/readyz")
		if err != nil {
			return false
		}
		_ = answer.Body.Close()
		return answer.StatusCode == http.StatusOK
	})

	out := run("go", "test", "-count=1", "-v", "./...")
	t.Log(out)
	if !strings.Contains(out, "--- PASS: TestGreetOfThePage") {
		t.Error("the test of the page has not run")
	}
	if kind := field(&log, "task_succeeded", "kind"); kind == "" {
		t.Error("the replica has logged no task_succeeded")
	}
	if out := run(jobs, "check", "--config", "jobs.yaml"); !strings.Contains(out, "ok    configuration") || !strings.Contains(out, "ok    consul") {
		t.Errorf("jobs check says:\n%s", out)
	}
	if out := run(jobs, "--help"); !strings.Contains(out, "jobs [command]") {
		t.Errorf("jobs --help says:\n%s", out)
	}

	if err := replica.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	stopped = true
	if err := <-ended; err != nil {
		t.Errorf("the replica has ended with %v", err)
	}
}

// The program on the page is the one that TestEmbed builds.
func TestEmbedPage(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("docs/how-to/embed-in-go.md")
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile("testdata/embed/main.go")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(page, append([]byte("```go\n"), program...)) {
		t.Error("docs/how-to/embed-in-go.md does not have testdata/embed/main.go as it is")
	}
}

// block returns the block of code of the page that is in that language and begins like that.
func block(t *testing.T, language, begins string) []byte {
	t.Helper()
	page, err := os.ReadFile("docs/how-to/embed-in-go.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, found := bytes.Cut(page, []byte("```"+language+"\n"+begins))
	text, _, closed := bytes.Cut(text, []byte("```\n"))
	if !found || !closed {
		t.Fatalf("docs/how-to/embed-in-go.md has no block that begins with %q", begins)
	}
	return append([]byte(begins), text...)
}

// field returns a field of the first line with that event, and "" if there is none.
func field(o *testenv.Output, event, name string) string {
	for line := range strings.Lines(o.String()) {
		var fields map[string]any
		if json.Unmarshal([]byte(line), &fields) == nil && fields["event"] == event {
			value, _ := fields[name].(string)
			return value
		}
	}
	return ""
}
