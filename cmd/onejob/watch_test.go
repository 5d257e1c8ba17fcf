package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"onejob/internal/testenv"
)

// A session of "onejob status --watch" in a real terminal, beside a real replica.
func TestWatch(t *testing.T) {
	t.Parallel()
	bin := filepath.Join(t.TempDir(), "onejob")
	install(t, bin)
	db, kv := testenv.Postgres(t), testenv.Consul(t)
	env := append(os.Environ(), "ONEJOB_POSTGRES_DSN="+db.DSN, "CONSUL_HTTP_ADDR="+kv.Addr, "ONEJOB_CONSUL_PREFIX="+kv.Prefix,
		"ONEJOB_HTTP_LISTEN=127.0.0.1:0", "ONEJOB_REPLICA=one", "TERM=xterm-256color", "NO_COLOR=", "GORACE=atexit_sleep_ms=0 "+os.Getenv("GORACE"))
	command := func(args ...string) *exec.Cmd {
		c := exec.Command(bin, args...)
		c.Env = env
		return c
	}
	must := func(args ...string) {
		t.Helper()
		if out, err := command(args...).CombinedOutput(); err != nil {
			t.Fatalf("%q: %v\n%s", args, err, out)
		}
	}
	must("migrate", "up")
	config := filepath.Join(t.TempDir(), "onejob.yaml")
	if err := os.WriteFile(config, []byte("{worker: {shutdown_grace: 1s}, kinds: {exec: {commands: {hold: {path: /bin/sh, args: [-c, sleep 600], allow_args: true}}}}}"), 0o600); err != nil {
		t.Fatal(err)
	}
	serve := command("serve", "--config", config)
	if err := serve.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = serve.Process.Signal(syscall.SIGTERM)
		_ = serve.Wait()
	})

	term := testenv.NewTerminal(t, 100, 30)
	before := term.Settings()
	watch := func() *exec.Cmd {
		t.Helper()
		c := command("status", "--watch")
		term.Attach(c)
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Process.Kill() })
		return c
	}
	// ended waits for the end of a session, and looks at what it left behind.
	ended := func(c *exec.Cmd) {
		t.Helper()
		end := make(chan error, 1)
		go func() { end <- c.Wait() }()
		select {
		case err := <-end:
			if err != nil {
				t.Errorf("it ended with %v", err)
			}
		case <-time.After(3 * time.Minute):
			t.Fatalf("it does not end; the screen is\n%s", term.Screen())
		}
		if after := term.Settings(); after != before {
			t.Errorf("the terminal's settings were\n%+v and are\n%+v", before, after)
		}
		term.Await("the usual screen and the cursor are back", func(string) bool {
			alternate, hidden := term.Alternate()
			return !alternate && !hidden
		})
	}

	session := watch()
	term.Await("the replica is in the verdict", func(screen string) bool { return strings.HasPrefix(screen, "OK: 1 replica, 0 running") })
	if term.Settings() == before {
		t.Error("the terminal's settings have not changed, so this test does not see whether they are restored")
	}
	must("enqueue", "exec", "--lock-key", "backup", "--payload", `{"command": "hold", "args": ["\u001b[2J\u001b]0;owned\u0007\u202eevil"]}`)
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
	ended(session)

	// The terminal is restored also by a signal.
	for _, end := range []func(*exec.Cmd){
		func(*exec.Cmd) { term.Type("\x03") },
		func(c *exec.Cmd) { _ = c.Process.Signal(syscall.SIGTERM) },
		func(c *exec.Cmd) { _ = c.Process.Signal(syscall.SIGINT) },
	} {
		session := watch()
		term.Await("the verdict is on the alternate screen", func(screen string) bool {
			alternate, _ := term.Alternate()
			return alternate && strings.Contains(screen, "1 replica")
		})
		end(session)
		ended(session)
	}
	if got := term.Received(); strings.Contains(got, "\x1b]0;owned") || strings.Contains(got, "\u202e") {
		t.Errorf("what a row holds has reached the terminal: %q", got)
	}
}
