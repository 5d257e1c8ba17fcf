package exec_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"onejob/boottime"
	"onejob/tasks"
	execkind "onejob/tasks/kinds/exec"
)

// script returns a configuration with one command, "it", that runs a shell script.
func script(text string, change ...func(*execkind.Command)) execkind.Config {
	c := execkind.Command{Path: "/bin/sh", Args: []string{"-c", text, "it"}, Grace: 200 * time.Millisecond}
	for _, f := range change {
		f(&c)
	}
	return commands(c)
}

// commands returns a configuration with one command, "it".
func commands(it execkind.Command) execkind.Config {
	return execkind.Config{Commands: map[string]execkind.Command{"it": it}}
}

// run runs an attempt at a command of the configuration.
func run(ctx context.Context, c execkind.Config, a *tasks.Attempt) (tasks.Result, error) {
	k, err := execkind.New(c)
	if err != nil {
		return tasks.Result{}, err
	}
	handler, err := k.Prepare(a.Payload)
	if err != nil {
		return tasks.Result{}, err
	}
	return handler(ctx, a)
}

// gone runs an attempt at a command whose program was removed after the start, and
// returns its path.
func gone(t *testing.T, a *tasks.Attempt) (path string, err error) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "it")
	if err := os.WriteFile(path, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	k, err := execkind.New(commands(execkind.Command{Path: path}))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	handler, err := k.Prepare(a.Payload)
	if err != nil {
		t.Fatal(err)
	}
	_, err = handler(t.Context(), a)
	return path, err
}

// attempt returns an attempt at {"command": "it"} with a lease of a minute.
func attempt() *tasks.Attempt {
	lease := boottime.Now().Add(time.Minute)
	return &tasks.Attempt{
		Task: tasks.Task{
			ID: 17, Attempt: 2, Fence: 99, LockKey: "db/nightly", Replica: "r1",
			Payload: json.RawMessage(`{"command": "it"}`),
		},
		Deadline: func() boottime.Instant { return lease },
		Output:   tasks.NewOutput(0),
	}
}

func untilOutput(t *testing.T, a *tasks.Attempt, text string) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !strings.Contains(a.Output.String(), text); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Errorf("waited in vain for %q in the output, which is %q", text, a.Output.String())
			return
		}
	}
}

// stubborn starts a process that has left group, session and parent, that
// SIGTERM does not end, and that carries $MARK in its environment. It makes the file
// $READY, if that is set.
const stubborn = `setsid -f sh -c 'trap "" TERM HUP INT; echo ready; [ -z "$READY" ] || : >"$READY"; exec sleep 1000'`

func withMark(t *testing.T) (mark string, change func(*execkind.Command)) {
	value := t.Name() + strconv.FormatInt(time.Now().UnixNano(), 36)
	return "MARK=" + value, func(c *execkind.Command) { c.Env = map[string]string{"MARK": value} }
}

// wantNoneLeft fails the test if any process carries mark.
func wantNoneLeft(t *testing.T, mark string) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil || len(all) == 0 {
		t.Fatalf("cannot list processes: %v", err)
	}
	for _, file := range all {
		environ, _ := os.ReadFile(file) // a zombie's is empty
		if slices.ContainsFunc(bytes.Split(environ, []byte{0}), func(v []byte) bool { return string(v) == mark }) {
			t.Errorf("%s is left", filepath.Dir(file))
		}
	}
}

// Not parallel, so that all goroutines there are belong to it.
func TestLeavesNoGoroutines(t *testing.T) {
	before := goleak.IgnoreCurrent()
	for _, text := range []string{"exit 0", "exit 1", "sleep 1000", "sleep 1000 & exit 0"} {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		_, _ = run(ctx, script(text), attempt())
		cancel()
	}
	_, _ = gone(t, attempt())
	goleak.VerifyNone(t, before)
}

func TestPrepare(t *testing.T) {
	t.Parallel()
	k, err := execkind.New(execkind.Config{Commands: map[string]execkind.Command{
		"backup": {Path: "/bin/true"},
		"mail":   {Path: "/bin/true", AllowArgs: true},
	}})
	if err != nil {
		t.Fatal(err)
	}
	for payload, want := range map[string]string{
		`{"command": "backup"}`:                                      "",
		`{"command": "backup", "args": []}`:                          "",
		`{"command": "backup", "args": null, "data": {"more": [1]}}`: "",
		`{"command": "mail", "args": ["", "-x", "$HOME ä"]}`:         "",

		``:                                   "not an object",
		`null`:                               "not an object",
		`[]`:                                 "not an object",
		`"backup"`:                           "not an object",
		`{}`:                                 "it names no command; configured are: backup, mail",
		`{"Command": "backup"}`:              `unknown field "Command"; allowed are command, args, data`,
		`{"command": "mail", "arg": ["x"]}`:  `unknown field "arg"; allowed are command, args, data`,
		`{"command": "mail", "ARGS": ["x"]}`: `unknown field "ARGS"; allowed are command, args, data`,
		`{"command": "rm", "arg": ["x"]}`:    `unknown field "arg"`, // wherever rm is known
		`{"command": "mail", "args": ["x"], "args": []}`: `the field "args" is given twice`,
		`{"command": ""}`:                               "command is empty",
		`{"command": null}`:                             "instead of a string",
		`{"command": 1}`:                                "command is 1 instead of a string",
		`{"command": "rm"}`:                             `there is no command "rm"; configured are: backup, mail`,
		`{"command": "backup", "args": ["x"]}`:          `command "backup" takes no args`,
		`{"command": "mail", "args": "x"}`:              "args is not an array of strings",
		`{"command": "mail", "args": [1]}`:              "args is not an array of strings",
		`{"command": "mail", "args": [["x"]]}`:          "args is not an array of strings",
		`{"command": "mail", "args": ["x", null]}`:      "args[1] is null",
		`{"command": "mail", "args": ["x", "a\u0000"]}`: "args[1] contains a NUL",
	} {
		_, err := k.Prepare(json.RawMessage(payload))
		if want == "" && err != nil {
			t.Errorf("%s: %v", payload, err)
		}
		if want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: error %v does not say %q", payload, err, want)
		}
		unknown := strings.Contains(want, "there is no command") // another replica may have it
		if errors.Is(err, tasks.ErrUnknown) != unknown {
			t.Errorf("%s: is %v an ErrUnknown? want %v", payload, err, unknown)
		}
	}
	if _, err := new(execkind.Kind).Prepare(json.RawMessage(`{"command": "x"}`)); err == nil || !strings.Contains(err.Error(), "none are configured") {
		t.Errorf("without commands: %v", err)
	}
}

func TestNew(t *testing.T) {
	t.Parallel()
	data := filepath.Join(t.TempDir(), "data")
	if err := os.WriteFile(data, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	good := execkind.Command{
		Path: "/bin/sh", Dir: "/", Env: map[string]string{"A_1": ""}, Timeout: time.Second,
		Grace: time.Second, NoRetryExitCodes: []int{1, 255}, OutputLimit: 1,
	}
	if _, err := execkind.New(commands(good)); err != nil {
		t.Errorf("a good command: %v", err)
	}
	_, err := execkind.New(execkind.Config{Commands: map[string]execkind.Command{
		"":         good,
		"a\x00b":   good,
		"none":     {},
		"relative": {Path: "bin/sh", Dir: "tmp"},
		"missing":  {Path: "/nowhere/sh", Dir: "/nowhere"},
		"folder":   {Path: "/bin", Dir: data},
		"data":     {Path: data},
		"env": {Path: "/bin/sh", Args: []string{"\x00"}, Env: map[string]string{
			"ONEJOB_FENCE": "1", "1X": "", "A=B": "", "": "", "OK": "\x00",
		}},
		"numbers": {Path: "/bin/sh", Timeout: -1, Grace: -1, OutputLimit: -1, NoRetryExitCodes: []int{0, 256}},
		"user":    {Path: "/bin/sh", User: "no-such-user"},
		"group":   {Path: "/bin/sh", Group: "no-such-group"},
		"number":  {Path: "/bin/sh", User: "3999999999"},
		"nobody":  {Path: "/bin/sh", User: "4294967295", Group: "0"},
		"largest": {Path: "/bin/sh", OutputLimit: 16 << 20},
		"large":   {Path: "/bin/sh", OutputLimit: 16<<20 + 1},
		"limits":  {Path: "/bin/sh", MemoryMax: 4096, PIDsMax: -1, CPUMax: -0.5},
		"many":    {Path: "/bin/sh", PIDsMax: 1<<22 + 1},
	}})
	if err == nil {
		t.Fatal("it was accepted")
	}
	for _, want := range []string{
		`a command has an empty name`,
		`command "a\x00b": a name may hold no control characters`,
		`command "none": path is missing`,
		`command "relative": path "bin/sh" is not absolute`,
		`command "relative": dir "tmp" is not absolute`,
		`command "missing": path: stat /nowhere/sh`,
		`command "missing": dir: stat /nowhere`,
		`command "folder": path "/bin" is not a file`,
		`command "folder": dir "` + data + `" is not a directory`,
		`command "data": path "` + data + `" is not executable`,
		`command "env": args:`,
		`command "env": env: ONEJOB_FENCE`,
		`command "env": env: "1X"`,
		`command "env": env: "A=B"`,
		`command "env": env: ""`,
		`command "env": env: the value of OK`,
		`command "numbers": timeout`,
		`command "numbers": grace`,
		`command "numbers": output_limit`,
		`command "large": output_limit 16777217 is above 16777216 (16 MiB)`,
		`command "numbers": no_retry_exit_codes: 0`,
		`command "numbers": no_retry_exit_codes: 256`,
		`command "user": user: there is no user "no-such-user"`,
		`command "group": group: there is no group "no-such-group"`,
		`command "number": user: there is no user with the number 3999999999, so group must be set as well`,
		`command "nobody": user: there is no user "4294967295"`,
		`command "limits": memory_max 4KiB is below 1MiB`,
		`command "limits": pids_max -1`,
		`command "many": pids_max 4194305 is above 4194304`,
		`command "limits": cpu_max -0.5`,
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("it does not say %q:\n%v", want, err)
		}
	}
	if n := len(strings.Split(err.Error(), "\n")); n != 30 {
		t.Errorf("%d problems instead of 30:\n%v", n, err)
	}
}

func TestSucceeds(t *testing.T) {
	t.Parallel()
	a := attempt()
	result, err := run(t.Context(), script(`printf 'a\000b\377'; printf c >&2`), a)
	if err != nil || string(result.Value) != `{"exit_code":0}` || result.Committed {
		t.Errorf("%+v, %v", result, err)
	}
	if want := `a\x00b\xffc`; a.Output.String() != want {
		t.Errorf("output %q, want %q", a.Output.String(), want)
	}
}

func TestOutputLimit(t *testing.T) {
	t.Parallel()
	a := attempt()
	e := script(`echo begin; head -c 1000000 /dev/zero; echo end`, func(c *execkind.Command) { c.OutputLimit = 12 })
	if _, err := run(t.Context(), e, a); err != nil {
		t.Fatal(err)
	}
	if want := "begin\n\n... 999998 bytes left out ...\n" + `\x00\x00end` + "\n"; a.Output.String() != want {
		t.Errorf("output %q, want %q", a.Output.String(), want)
	}
}

func TestArgsAndStdin(t *testing.T) {
	t.Parallel()
	a := attempt()
	a.Payload = json.RawMessage(`{"command":  "it", "args": ["a b", "", "$HOME"], "data": "` + strings.Repeat("x", 1<<20) + `"}`)
	a.Output = tasks.NewOutput(4 << 20)
	e := script(`printf '<%s>' "$@"; cat`, func(c *execkind.Command) {
		c.AllowArgs = true
		c.Args = append(c.Args, "first")
	})
	if _, err := run(t.Context(), e, a); err != nil {
		t.Fatal(err)
	}
	if want := "<first><a b><><$HOME>" + string(a.Payload); a.Output.String() != want {
		t.Errorf("%d bytes of output, want %d", len(a.Output.String()), len(want))
	}
}

func TestEnvironment(t *testing.T) {
	t.Parallel()
	environment := func(t *testing.T, a *tasks.Attempt, c execkind.Command) map[string]string {
		c.Path = "/usr/bin/env"
		if _, err := run(t.Context(), commands(c), a); err != nil {
			t.Fatal(err)
		}
		got := make(map[string]string)
		for line := range strings.Lines(a.Output.String()) {
			name, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
			got[name] = value
		}
		if got["ONEJOB_GUARD"] == "" {
			t.Error("ONEJOB_GUARD is missing")
		}
		delete(got, "ONEJOB_GUARD")
		return got
	}
	want := func(t *testing.T, got, want map[string]string) {
		t.Helper()
		for name := range got {
			if _, ok := want[name]; !ok {
				t.Errorf("%s=%s was not promised", name, got[name])
			}
		}
		for name := range want {
			if value, ok := got[name]; !ok || value != want[name] {
				t.Errorf("%s=%q, want %q", name, value, want[name])
			}
		}
	}
	t.Run("nothing configured", func(t *testing.T) {
		t.Parallel()
		want(t, environment(t, attempt(), execkind.Command{}), map[string]string{
			"PATH":            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
			"ONEJOB_TASK_ID":  "17",
			"ONEJOB_ATTEMPT":  "2",
			"ONEJOB_FENCE":    "99",
			"ONEJOB_LOCK_KEY": "db/nightly",
			"ONEJOB_REPLICA":  "r1",
			"ONEJOB_DEADLINE": "",
		})
	})
	t.Run("configured, with a timeout", func(t *testing.T) {
		t.Parallel()
		a := attempt()
		a.Timeout = time.Hour
		before := time.Now()
		got := environment(t, a, execkind.Command{Env: map[string]string{"PATH": "/bin", "HOME": "/"}, Timeout: time.Minute})
		end, err := time.Parse(time.RFC3339Nano, got["ONEJOB_DEADLINE"])
		if err != nil || end.Before(before.Add(time.Minute)) || end.After(time.Now().Add(time.Minute)) || end.Location() != time.UTC {
			t.Errorf("ONEJOB_DEADLINE=%q, %v", got["ONEJOB_DEADLINE"], err)
		}
		want(t, got, map[string]string{
			"PATH":            "/bin",
			"HOME":            "/",
			"ONEJOB_TASK_ID":  "17",
			"ONEJOB_ATTEMPT":  "2",
			"ONEJOB_FENCE":    "99",
			"ONEJOB_LOCK_KEY": "db/nightly",
			"ONEJOB_REPLICA":  "r1",
			"ONEJOB_DEADLINE": got["ONEJOB_DEADLINE"],
		})
	})
	t.Run("the task's timeout is shorter", func(t *testing.T) {
		t.Parallel()
		a := attempt()
		a.Timeout = 30 * time.Second
		got := environment(t, a, execkind.Command{Timeout: time.Minute})
		end, err := time.Parse(time.RFC3339Nano, got["ONEJOB_DEADLINE"])
		if err != nil || end.After(time.Now().Add(30*time.Second)) {
			t.Errorf("ONEJOB_DEADLINE=%q, %v", got["ONEJOB_DEADLINE"], err)
		}
	})
}

func TestFails(t *testing.T) {
	t.Parallel()
	for text, test := range map[string]struct {
		code      int
		permanent bool
		want      string
	}{
		"exit 1":        {1, false, `command "it" exited with code 1`},
		"exit 65":       {65, true, `command "it" exited with code 65`},
		"kill -KILL $$": {137, false, `command "it" was ended by signal 9 (SIGKILL)`},
		"kill -40 $$":   {168, false, `command "it" was ended by signal 40`},
		"echo begin; echo ' no space left ' >&2; echo; exit 2": {2, false, `command "it" exited with code 2: no space left`},
	} {
		t.Run(text, func(t *testing.T) {
			t.Parallel()
			e := script(text, func(c *execkind.Command) { c.NoRetryExitCodes = []int{64, 65} })
			_, err := run(t.Context(), e, attempt())
			var exit *tasks.ExitError
			if !errors.As(err, &exit) || exit.Code != test.code || err.Error() != test.want {
				t.Errorf("error %#v", err)
			}
			if tasks.IsPermanent(err) != test.permanent {
				t.Errorf("permanent is %t", !test.permanent)
			}
		})
	}
}

func TestCannotStart(t *testing.T) {
	t.Parallel()
	path, err := gone(t, attempt())
	if want := fmt.Sprintf(`command "it": start %s: no such file or directory`, path); err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
	a := attempt()
	a.Deadline = func() boottime.Instant { return 0 }
	if _, err := run(t.Context(), script("echo it runs"), a); !errors.Is(err, tasks.ErrLeaseEnded) || a.Output.String() != "" {
		t.Errorf("error %v, output %q", err, a.Output.String())
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(tasks.ErrShutdown)
	a = attempt()
	if _, err := run(ctx, script("echo it runs"), a); !errors.Is(err, tasks.ErrShutdown) || a.Output.String() != "" {
		t.Errorf("error %v, output %q", err, a.Output.String())
	}
}

func TestTimeout(t *testing.T) {
	t.Parallel()
	for timeout := 300 * time.Millisecond; ; timeout *= 2 {
		mark, marked := withMark(t)
		e := script(stubborn+`; exec sleep 1000`, marked, func(c *execkind.Command) { c.Timeout = timeout })
		a := attempt()
		_, err := run(t.Context(), e, a)
		wantNoneLeft(t, mark)
		var exit *tasks.ExitError
		ready := strings.Contains(a.Output.String(), "ready")
		if !errors.Is(err, tasks.ErrTimeout) || ready && (!errors.As(err, &exit) || exit.Code != 143) {
			t.Errorf("error %v", err)
		}
		if ready {
			return
		}
		if timeout > time.Minute {
			t.Fatalf("the command was not ready within %v", timeout)
		}
	}
}

func TestCancelled(t *testing.T) {
	t.Parallel()
	mark, marked := withMark(t)
	a := attempt()
	ctx, cancel := context.WithCancelCause(t.Context())
	var operator sync.WaitGroup
	defer operator.Wait()
	operator.Go(func() {
		defer cancel(tasks.ErrCancelled)
		untilOutput(t, a, "ready")
	})
	// That it then says it was a success does not make it one.
	e := script(`trap 'exit 0' TERM; `+stubborn+`; while :; do sleep 0.01; done`, marked,
		func(c *execkind.Command) { c.NoRetryExitCodes = []int{143} })
	_, err := run(ctx, e, a)
	if !errors.Is(err, tasks.ErrCancelled) || tasks.IsPermanent(err) {
		t.Errorf("error %v", err)
	}
	wantNoneLeft(t, mark)
}

func TestKillsWhatTheCommandLeavesBehind(t *testing.T) {
	t.Parallel()
	mark, marked := withMark(t)
	file := filepath.Join(t.TempDir(), "ready")
	e := script(stubborn+`; until [ -e "$READY" ]; do sleep 0.01; done; sleep 1000 & exit 0`, marked, func(c *execkind.Command) { c.Env["READY"] = file })
	if _, err := run(t.Context(), e, attempt()); err != nil {
		t.Error(err)
	}
	wantNoneLeft(t, mark)
}

func TestLeaseIsExtendedUntilItRunsOut(t *testing.T) {
	t.Parallel()
	mark, marked := withMark(t)
	a := attempt()
	var lease atomic.Int64
	lease.Store(int64(boottime.Now().Add(2 * time.Second)))
	first := boottime.Instant(lease.Load())
	a.Deadline = func() boottime.Instant { return boottime.Instant(lease.Load()) }
	var replica sync.WaitGroup
	defer replica.Wait()
	replica.Go(func() {
		untilOutput(t, a, "ready")
		lease.Store(int64(first.Add(time.Minute)))
		untilOutput(t, a, "later") // after the first lease's end
		lease.Store(int64(boottime.Now().Add(200 * time.Millisecond)))
	})
	_, err := run(t.Context(), script(stubborn+`; sleep 2.5; echo later; exec sleep 1000`, marked), a)
	if !errors.Is(err, tasks.ErrLeaseEnded) {
		t.Errorf("error %v", err)
	}
	untilOutput(t, a, "later")
	wantNoneLeft(t, mark)
}

// A machine on which nothing can be started uses up no attempt. Not parallel: the limit is that
// of the whole process.
func TestMachineIsExhausted(t *testing.T) {
	for _, user := range []execkind.Name{"", "daemon"} {
		t.Run("user "+string(user), func(t *testing.T) {
			if user != "" && os.Geteuid() != 0 {
				t.Skip("this needs root, to become another user")
			}
			var limit syscall.Rlimit
			if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
				t.Fatal(err)
			}
			k, err := execkind.New(script("true", func(c *execkind.Command) { c.User = user }))
			if err != nil {
				t.Fatal(err)
			}
			a := attempt()
			handler, err := k.Prepare(a.Payload)
			if err != nil {
				t.Fatal(err)
			}
			if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 3, Max: limit.Max}); err != nil {
				t.Fatal(err)
			}
			_, err = handler(t.Context(), a)
			if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
				t.Fatal(err)
			}
			if _, requeue := tasks.RequeueDelay(err); !requeue {
				t.Errorf("the error is %v, and no requeue", err)
			}
		})
	}
}
