package main

import (
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"onejob/internal/testenv"
)

// watcher runs the command onejob, and "onejob status --watch" in a terminal.
type watcher struct {
	t      *testing.T
	bin    string
	env    []string
	term   *testenv.Terminal
	before unix.Termios // the terminal's settings
}

func newWatcher(t *testing.T, dsn string) *watcher {
	t.Helper()
	w := &watcher{t: t, bin: filepath.Join(t.TempDir(), "onejob"), term: testenv.NewTerminal(t, 100, 30)}
	install(t, w.bin)
	w.before = w.term.Settings()
	kv := testenv.Consul(t)
	w.env = append(os.Environ(), "ONEJOB_POSTGRES_DSN="+dsn, "CONSUL_HTTP_ADDR="+kv.Addr, "ONEJOB_CONSUL_PREFIX="+kv.Prefix,
		"ONEJOB_HTTP_LISTEN=127.0.0.1:0", "ONEJOB_REPLICA=one", "TERM=xterm-256color", "NO_COLOR=", "GORACE=atexit_sleep_ms=0 "+os.Getenv("GORACE"))
	return w
}

func (w *watcher) command(args ...string) *exec.Cmd {
	c := exec.Command(w.bin, args...)
	c.Env = w.env
	return c
}

func (w *watcher) must(args ...string) {
	w.t.Helper()
	if out, err := w.command(args...).CombinedOutput(); err != nil {
		w.t.Fatalf("%q: %v\n%s", args, err, out)
	}
}

// watch begins a session.
func (w *watcher) watch() *exec.Cmd {
	w.t.Helper()
	c := w.command("status", "--watch")
	w.term.Attach(c)
	if err := c.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = c.Process.Kill() })
	return c
}

// ended waits for the end of a session, and looks at what it left behind.
func (w *watcher) ended(c *exec.Cmd) {
	w.t.Helper()
	end := make(chan error, 1)
	go func() { end <- c.Wait() }()
	select {
	case err := <-end:
		if err != nil {
			w.t.Errorf("it ended with %v", err)
		}
	case <-time.After(3 * time.Minute):
		w.t.Fatalf("it does not end; the screen is\n%s", w.term.Screen())
	}
	if after := w.term.Settings(); after != w.before {
		w.t.Errorf("the terminal's settings were\n%+v and are\n%+v", w.before, after)
	}
	w.term.Await("the usual screen and the cursor are back", func(string) bool {
		alternate, hidden := w.term.Alternate()
		return !alternate && !hidden
	})
}

// A session of "onejob status --watch" in a real terminal, beside a real replica.
func TestWatch(t *testing.T) {
	t.Parallel()
	w := newWatcher(t, testenv.Postgres(t).DSN)
	term := w.term
	w.must("migrate", "up")
	config := filepath.Join(t.TempDir(), "onejob.yaml")
	if err := os.WriteFile(config, []byte("{worker: {shutdown_grace: 1s}, kinds: {exec: {commands: {hold: {path: /bin/sh, args: [-c, sleep 600], allow_args: true}}}}}"), 0o600); err != nil {
		t.Fatal(err)
	}
	serve := w.command("serve", "--config", config)
	if err := serve.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = serve.Process.Signal(syscall.SIGTERM)
		_ = serve.Wait()
	})

	session := w.watch()
	term.Await("the replica is in the verdict", func(screen string) bool { return strings.HasPrefix(screen, "OK: 1 replica, 0 running") })
	if term.Settings() == w.before {
		t.Error("the terminal's settings have not changed, so this test does not see whether they are restored")
	}
	w.must("enqueue", "exec", "--lock-key", "backup", "--payload", `{"command": "hold", "args": ["\u001b[2J\u001b]0;owned\u0007\u202eevil"]}`)
	running := regexp.MustCompile(`(?m)^> 1 +exec +hold \\x1b\[2J\\x1b\]0;owned\\x07\\u202eevil +backup +one `)
	term.AwaitText("RUNNING: 1\n")
	term.Type("\x1b[H") // Home: what runs is the first block, as nothing needs somebody or fails
	term.Await("the new task is the selected row", running.MatchString)
	term.Type("\r")
	screen := term.AwaitText("in Consul")
	for _, text := range []string{"TASK 1", "kind", `"hold"`, "in attempt 1 of"} {
		if !strings.Contains(screen, text) {
			t.Errorf("the story has no %q:\n%s", text, screen)
		}
	}
	term.Type("\x1b")
	term.AwaitText("REPLICAS")

	term.Type("/evil")
	term.Await("only the task is there", func(screen string) bool {
		return strings.Contains(screen, "exec  hold") && !strings.Contains(screen, "REPLICAS\n")
	})
	term.Type("\x1b")
	term.AwaitText("REPLICAS")

	term.Resize(40, 10)
	term.Await("it fits into the small screen", func(screen string) bool {
		lines := strings.Split(strings.TrimSuffix(screen, "\n"), "\n")
		return strings.HasPrefix(lines[0], "OK: 1 replica") && strings.Contains(lines[9], ":")
	})
	term.Type("q")
	w.ended(session)

	// The terminal is restored also by a signal.
	for _, end := range []func(*exec.Cmd){
		func(*exec.Cmd) { term.Type("\x03") },
		func(c *exec.Cmd) { _ = c.Process.Signal(syscall.SIGTERM) },
		func(c *exec.Cmd) { _ = c.Process.Signal(syscall.SIGINT) },
	} {
		session := w.watch()
		term.Await("the verdict is on the alternate screen", func(screen string) bool {
			alternate, _ := term.Alternate()
			return alternate && strings.Contains(screen, "1 replica")
		})
		end(session)
		w.ended(session)
	}
	if got := term.Received(); strings.Contains(got, "\x1b]0;owned") || strings.Contains(got, "\u202e") {
		t.Errorf("what a row holds has reached the terminal: %q", got)
	}
}

// When Postgres stops answering, the view stays and says so, and it can be left.
func TestWatchWithoutPostgres(t *testing.T) {
	t.Parallel()
	dsn, err := url.Parse(testenv.Postgres(t).DSN)
	if err != nil {
		t.Fatal(err)
	}
	way := testenv.NewProxy(t, dsn.Host)
	dsn.Host = way.Addr
	w := newWatcher(t, dsn.String())
	w.must("migrate", "up")
	session := w.watch()
	w.term.AwaitText("BAD: 0 replicas")
	way.Cut()
	w.term.AwaitText("BAD: Postgres does not answer")
	w.term.AwaitText("not current: replicas (shown as of ")
	w.term.AwaitText(" ago") // the next snapshot is being taken, and does not come
	w.term.Type("q")
	w.ended(session)
}
