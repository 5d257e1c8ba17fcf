//go:build linux

package supervisor_test

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"onejob/internal/procfs"
	"onejob/internal/supervisor"
	"onejob/internal/testenv/processes"
)

const (
	variable = "ONEJOB_SUPERVISED"
	maxWait  = 60 * time.Second
)

// TestMain lets the test binary be a supervisor, its worker, and what makes a death
// known, if the first argument says so. That one is taken away, as a program does with its own.
func TestMain(m *testing.M) {
	if len(os.Args) < 3 || os.Args[1] != "supervise" {
		os.Exit(m.Run())
	}
	os.Args = slices.Delete(os.Args, 1, 2)
	signals := make(chan os.Signal, 10)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	w, err := supervisor.Adopt()
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, err)
		os.Exit(99)
	case w == nil:
		code, err := supervisor.Run(supervisor.Config{
			ReportEnv: func() []string { return []string{"BURYING=yes"} },
			Hello:     func(text string) { say("hello", text) },
			Crashed:   func(c supervisor.Crash) { text, _ := json.Marshal(c); say("crashed", string(text)) },
			Restarted: func(int) { say("restarted") },
		})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(code)
	case w.Dead != nil:
		say("burial", "dumpable", dumpable())
		if once := os.Getenv("FIRST_REPORTER"); once != "" {
			failOnce(w, once)
		}
		say("buried", len(w.Dead), os.Getenv("BURYING"), os.Args)
		w.Ready()
		w.Ending()
	default:
		work(w, signals)
	}
	os.Exit(0)
}

// failOnce ends the first process that makes a death known as the words before a file's name say.
func failOnce(w *supervisor.Worker, words string) {
	how, file, _ := strings.Cut(words, " ")
	if _, err := os.Stat(file); err == nil {
		return
	}
	_ = os.WriteFile(file, nil, 0o600)
	switch how {
	case "panic":
		panic("as the test wants it")
	case "refuse":
		w.Ending()
		os.Exit(supervisor.ExitUsage)
	}
	os.Exit(0) // without a word
}

// say writes a line at once, whole.
func say(words ...any) { _, _ = os.Stdout.WriteString(fmt.Sprintln(words...)) }

// dumpable reports whether others of its user can look into this process.
func dumpable() bool {
	d, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
	return err != nil || d != 0
}

// work does what the words of the second argument say; those of the third, if there is
// one, from the second start on.
func work(w *supervisor.Worker, signals chan os.Signal) {
	say("started", os.Getpid())
	script := os.Args[1]
	if len(os.Args) > 3 {
		if _, err := os.Stat(os.Args[3]); err == nil {
			script = os.Args[2]
		}
		_ = os.WriteFile(os.Args[3], nil, 0o600)
	}
	for _, word := range strings.Fields(script) {
		what, text, _ := strings.Cut(word, "=")
		n, _ := strconv.Atoi(text)
		switch what {
		case "hello":
			w.Hello(text)
		case "ready":
			w.Ready()
		case "dumpable":
			say("dumpable", dumpable())
		case "ending":
			w.Ending()
		case "exit":
			os.Exit(n)
		case "panic":
			panic("as the test wants it")
		case "die":
			_ = syscall.Kill(os.Getpid(), syscall.Signal(n))
			select {}
		case "signals": // waits for so many
			for range n {
				say("signal", <-signals)
			}
		case "run":
			out, err := exec.Command("/bin/sh", "-c", os.Getenv("SCRIPT")).CombinedOutput()
			say("ran", strings.TrimSpace(string(out)), err)
		}
	}
}

// run is a supervisor at work.
type run struct {
	t      *testing.T
	cmd    *exec.Cmd
	lines  chan string
	all    []string
	stderr bytes.Buffer
}

func start(t *testing.T, environ []string, scripts ...string) *run {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	args := append([]string{"supervise"}, scripts...)
	if len(scripts) == 2 {
		args = append(args, filepath.Join(t.TempDir(), "again"))
	}
	r := &run{t: t, cmd: exec.Command(self, args...), lines: make(chan string, 1000)}
	r.cmd.Env = append(os.Environ(), environ...)
	out, err := r.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	r.cmd.Stderr = &r.stderr
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(r.lines)
		for said := bufio.NewScanner(out); said.Scan(); {
			r.lines <- said.Text()
		}
	}()
	t.Cleanup(func() {
		_ = r.cmd.Process.Kill()
		for line := range r.lines {
			r.all = append(r.all, line)
		}
		_ = r.cmd.Wait()
		if t.Failed() {
			t.Logf("%s\nstderr: %.2000s", strings.Join(r.all, "\n"), &r.stderr)
		}
	})
	return r
}

// await returns what stands behind the word in the next line that begins with it.
func (r *run) await(word string) string {
	r.t.Helper()
	timeout := time.After(maxWait)
	for {
		select {
		case line, open := <-r.lines:
			if !open {
				r.t.Fatalf("it ended without %q", word)
			}
			r.all = append(r.all, line)
			if first, rest, _ := strings.Cut(line, " "); first == word {
				return rest
			}
		case <-timeout:
			r.t.Fatalf("no line %q within %v", word, maxWait)
		}
	}
}

// crash returns how the next worker crashed.
func (r *run) crash() (c supervisor.Crash) {
	r.t.Helper()
	if err := json.Unmarshal([]byte(r.await("crashed")), &c); err != nil {
		r.t.Fatal(err)
	}
	return c
}

// code waits for the end and returns the exit code.
func (r *run) code() int {
	r.t.Helper()
	for line := range r.lines {
		r.all = append(r.all, line)
	}
	err := r.cmd.Wait()
	if exit, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		r.t.Fatal(err)
	} else if ok {
		return exit.ExitCode()
	}
	return 0
}

func (r *run) count(word string) (n int) {
	for _, line := range r.all {
		if first, _, _ := strings.Cut(line, " "); first == word {
			n++
		}
	}
	return n
}

func TestExits(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		first, second string
		code, crashes int
	}{
		"could not start":                 {"ending exit=1", "", 1, 0},
		"refused its configuration":       {"ending exit=2", "", 2, 0},
		"panicked before it was ready":    {"panic", "", 2, 0},
		"killed before it was ready":      {"die=9", "", 137, 0},
		"ended by itself":                 {"ready ending exit=0", "", 0, 0},
		"refused it after it was ready":   {"ready ending exit=2", "", 2, 0},
		"failed after it was ready":       {"ready ending exit=1", "ready ending exit=0", 0, 1},
		"panicked after it was ready":     {"ready panic", "ready ending exit=0", 0, 1},
		"exited without a word":           {"ready exit=0", "ready ending exit=0", 0, 1},
		"killed after it was ready":       {"ready die=9", "ready ending exit=0", 0, 1},
		"the next one refused":            {"ready die=9", "ending exit=2", 2, 1},
		"SIGABRT after it was ready":      {"ready die=6", "ready ending exit=0", 0, 1},
		"the next one refused, and hello": {"hello=a ready die=9", "hello=b ending exit=2", 2, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := start(t, nil, test.first, test.second)
			if code := r.code(); code != test.code {
				t.Errorf("exit code %d, want %d", code, test.code)
			}
			if n := r.count("crashed"); n != test.crashes || r.count("restarted") != n || r.count("buried") != n || r.count("started") != n+1 {
				t.Errorf("%d crashes, %d buried, %d restarted, %d started; want %d crashes", n, r.count("buried"), r.count("restarted"), r.count("started"), test.crashes)
			}
		})
	}
}

// What makes a death known is believed that it is done only if it announces its end: the runtime of Go
// ends a program with ExitUsage, too.
func TestReporterThatFailsIsStartedAgain(t *testing.T) {
	t.Parallel()
	for name, how := range map[string]string{"it panics": "panic", "it exits without a word": "exit"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := start(t, []string{"FIRST_REPORTER=" + how + " " + filepath.Join(t.TempDir(), "first")}, "ready die=9", "ready signals=1 ending exit=0")
			r.await("burial")
			if buried := r.await("buried"); !strings.HasPrefix(buried, "1 ") {
				t.Errorf("made known: %s", buried)
			}
		})
	}
}

// One that refuses its configuration is not started again, and what it was to make known is given up.
func TestReporterThatRefuses(t *testing.T) {
	t.Parallel()
	r := start(t, []string{"FIRST_REPORTER=refuse " + filepath.Join(t.TempDir(), "first")}, "ready die=9", "ready hello=1 signals=1 ending exit=0")
	r.await("burial")
	r.await("hello")
	var pid int
	for _, line := range r.all {
		_, _ = fmt.Sscanf(line, "started %d", &pid) // the last one counts
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if buried := r.await("buried"); !strings.HasPrefix(buried, "1 ") {
		t.Errorf("made known: %s, want the second death alone", buried)
	}
}

func TestCrashSaysHow(t *testing.T) {
	t.Parallel()
	r := start(t, nil, "ready die=9", "ready panic")
	c := r.crash()
	if c.Signal != "SIGKILL" || c.ExitCode != -1 || c.RestartIn != 0 || c.Process == "" || c.PID == 0 {
		t.Errorf("killed: %+v", c)
	}
	c = r.crash()
	if c.Signal != "" || c.ExitCode != 2 || c.RestartIn != time.Second {
		t.Errorf("panicked: %+v", c)
	}
}

func TestSignalsArePassedOnOnce(t *testing.T) {
	t.Parallel()
	r := start(t, nil, "ready hello=1 signals=1 hello=2 signals=1 ending exit=7")
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		r.await("hello")
		if err := r.cmd.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		if got := r.await("signal"); got != sig.String() {
			t.Errorf("the worker got %s, not %v", got, sig)
		}
	}
	if code := r.code(); code != 7 || r.count("signal") != 2 || r.count("crashed") != 0 {
		t.Errorf("exit code %d, %d signals", code, r.count("signal"))
	}
}

// A signal that the worker has no handler for ends both, as it ends any program: else closing a
// terminal would leave the supervisor there, with a new worker.
func TestSignalWithoutAHandler(t *testing.T) {
	t.Parallel()
	r := start(t, nil, "ready hello=1 signals=1", "ready ending exit=0")
	r.await("hello")
	if err := r.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	if c := r.crash(); c.Signal != "SIGHUP" || c.RestartIn >= 0 {
		t.Errorf("%+v", c)
	}
	if code := r.code(); code != 128+int(syscall.SIGHUP) || r.count("started") != 1 || r.count("buried") != 1 {
		t.Errorf("exit code %d, %d started, %d buried", code, r.count("started"), r.count("buried"))
	}
}

// A signal that comes while the worker is being started does not kill it.
func TestSignalAtTheStart(t *testing.T) {
	t.Parallel()
	for range 20 { // in half of them it would come too early
		r := start(t, nil, "signals=1 ending exit=5")
		testEventually(t, "the supervisor has a child", func() bool { return len(procfs.Children(r.cmd.Process.Pid)) > 0 })
		if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if code := r.code(); code != 5 {
			t.Fatalf("exit code %d", code)
		}
	}
}

func TestKilledDuringAStop(t *testing.T) {
	t.Parallel()
	r := start(t, nil, "ready hello=1 signals=1 die=9")
	r.await("hello")
	if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if c := r.crash(); c.RestartIn >= 0 {
		t.Errorf("it is to be started again: %+v", c)
	}
	if code := r.code(); code != 137 || r.count("started") != 1 || r.count("buried") != 1 {
		t.Errorf("exit code %d, started %d times", code, r.count("started"))
	}
}

func TestSignalWhileWaitingToRestart(t *testing.T) {
	t.Parallel()
	r := start(t, nil, "ready die=9", "ready die=9")
	r.crash()
	r.crash()
	if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := r.code(); code != 137 {
		t.Errorf("exit code %d", code)
	}
}

// What works and what makes deaths known have the same secrets in their environment.
func TestWorkerAndReporterAreHidden(t *testing.T) {
	t.Parallel()
	r := start(t, nil, "dumpable ready die=9", "ready signals=1 ending exit=0")
	if got := r.await("dumpable"); got != "false" {
		t.Errorf("the worker is dumpable: %s", got)
	}
	if got := r.await("burial"); got != "dumpable false" {
		t.Errorf("the reporter is %s", got)
	}
	if !dumpable() {
		t.Error("the test itself is hidden, and shows nothing")
	}
}

// leaveBehind starts processes that try to get away.
const leaveBehind = `
keep='trap "" TERM HUP INT; while :; do sleep 1; done'
sh -c "$keep" &
setsid env -i /bin/sh -c '/bin/sh -c "trap \"\" TERM; echo \$\$ > $0; while :; do sleep 1; done" &' "$FILE"
while [ ! -s "$FILE" ]; do sleep 0.02; done
`

func TestNothingIsLeftBehind(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "pid")
	r := start(t, []string{"SCRIPT=exec >/dev/null 2>&1; " + leaveBehind, "FILE=" + file}, "ready run die=9", "ready hello=again signals=1 ending exit=0")
	c := r.crash()
	if c.Killed < 2 || len(c.Left) > 0 || !c.Clean {
		t.Errorf("killed %d, left %v", c.Killed, c.Left)
	}
	killed(t, file)
	r.await("hello")
	testEventually(t, "only the worker is left", func() bool { return len(procfs.Children(r.cmd.Process.Pid)) == 1 })
}

// killed fails unless the process whose number is in the file has ended.
func killed(t *testing.T, file string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, 0); err != syscall.ESRCH {
		t.Errorf("the orphan %d is still there: %v", pid, err)
	}
}

// A worker that stops in order may leave something behind as well: what a handler in Go has started, and
// did not wait for.
func TestStopsLeaveNothingBehind(t *testing.T) {
	t.Parallel()
	for name, last := range map[string]string{
		"told to stop":                         "signals=1 ending exit=0",
		"told to stop, a handler does not end": "signals=1 ending exit=1",
		"by itself":                            "ending exit=0",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "pid")
			r := start(t, []string{"SCRIPT=exec >/dev/null 2>&1; " + leaveBehind, "FILE=" + file}, "ready run hello=1 "+last)
			r.await("hello")
			if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
				t.Fatal(err)
			}
			if code := r.code(); code != 0 && code != 1 || r.count("crashed") != 0 || r.count("buried") != 0 {
				t.Errorf("exit code %d, %d crashes, %d buried", code, r.count("crashed"), r.count("buried"))
			}
			killed(t, file)
		})
	}
}

// A process that execs a supervisor may have children of its own.
func TestChildrenFromBeforeAreSpared(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	again := filepath.Join(t.TempDir(), "again")
	cmd := exec.Command("/bin/sh", "-c", `sleep 1000 >/dev/null 2>&1 & echo $!; exec "$0" supervise "ready die=9" "ready ending exit=0" "$1"`, self, again)
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	first, rest, _ := strings.Cut(string(out), "\n")
	pid, err := strconv.Atoi(first)
	if err != nil || !strings.Contains(rest, "crashed") {
		t.Fatalf("%v: %s", err, out)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Errorf("the child from before is gone: %v", err)
	}
}

func TestOrphansAreReaped(t *testing.T) {
	t.Parallel()
	r := start(t, []string{"SCRIPT=for i in 1 2 3 4 5 6 7 8 9; do (sh -c 'sleep 0.3' >/dev/null 2>&1 &); done"}, "ready run hello=1 signals=1 ending exit=0")
	r.await("hello")
	testEventually(t, "only the worker is left", func() bool { return len(procfs.Children(r.cmd.Process.Pid)) == 1 })
	if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := r.code(); code != 0 || r.count("crashed") != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestWorkerDoesNotOutliveItsSupervisor(t *testing.T) {
	t.Parallel()
	r := start(t, nil, "ready hello=1 signals=1")
	pid, err := strconv.Atoi(r.await("started"))
	if err != nil {
		t.Fatal(err)
	}
	if found := processes.Find(r.cmd.Process.Pid); found != pid {
		t.Errorf("Find returns %d, not %d", found, pid)
	}
	if found := processes.Find(pid); found != pid {
		t.Errorf("Find returns %d for the worker itself", found)
	}
	r.await("hello")
	score := func(pid int) string {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid))
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(text))
	}
	if mine, theirs := score(os.Getpid()), score(pid); mine != theirs {
		t.Errorf("the worker's oom_score_adj is %s, not %s", theirs, mine)
	}
	want := score(os.Getpid())
	if exec.Command("/bin/sh", "-c", "echo -1000 >/proc/self/oom_score_adj").Run() == nil {
		want = "-1000"
	}
	if theirs := score(r.cmd.Process.Pid); theirs != want {
		t.Errorf("the supervisor's oom_score_adj is %s, not %s", theirs, want)
	}
	_ = r.cmd.Process.Kill()
	testEventually(t, "the worker is gone", func() bool { return syscall.Kill(pid, 0) == syscall.ESRCH })
}

// The kernel forgets who is to end with its parent if the program's file has capabilities.
func TestWorkerWithCapabilitiesDoesNotOutliveItsSupervisor(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	program := installForAll(t)
	// As struct vfs_cap_data in linux/capability.h: version 2, effective; CAP_NET_BIND_SERVICE.
	data := make([]byte, 20)
	binary.LittleEndian.PutUint32(data, 0x02000001)
	binary.LittleEndian.PutUint32(data[4:], 1<<unix.CAP_NET_BIND_SERVICE)
	if err := unix.Setxattr(program, "security.capability", data, 0); err != nil {
		t.Skipf("files cannot have capabilities here: %v", err)
	}
	cmd := exec.Command("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", program, "supervise", "ready hello=1 signals=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait() //nolint:errcheck // it was killed
	defer cmd.Process.Kill()
	pid := 0
	for said := bufio.NewScanner(out); said.Scan() && said.Text() != "hello 1"; {
		_, _ = fmt.Sscanf(said.Text(), "started %d", &pid)
	}
	if pid == 0 {
		t.Fatal("no worker has started")
	}
	defer syscall.Kill(pid, syscall.SIGKILL) //nolint:errcheck // it should be gone
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil || !strings.Contains(string(status), "CapPrm:\t0000000000000400") {
		t.Skipf("the file's capabilities have no effect here: %v", err)
	}
	_ = cmd.Process.Kill()
	testEventually(t, "the worker is gone", func() bool { return syscall.Kill(pid, 0) == syscall.ESRCH })
}

// installForAll copies this program to where every user may run it.
func installForAll(t *testing.T) (program string) {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "supervise") // which everybody may look into
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program = filepath.Join(dir, "supervise")
	if out, err := exec.Command("/bin/sh", "-c", `chmod 755 "$0" && install -m 755 "$1" "$2"`, dir, self, program).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return program
}

// With a /proc that hides hidden processes from their own user, nothing begins: a working process
// would take the guards of others for dead.
func TestProcThatHidesProcesses(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	program := installForAll(t)
	for _, option := range []string{"hidepid=0", "hidepid=1", "hidepid=2"} {
		script := `mount -t proc -o ` + option + ` proc /proc && cd / && exec setpriv --reuid 65534 --regid 65534 --clear-groups "$0" supervise "ready ending exit=0"`
		out, err := exec.Command("unshare", "-m", "/bin/sh", "-c", script, program).CombinedOutput()
		if refused := strings.Contains(string(out), "mount it without hidepid"); refused != (option != "hidepid=0") || (err == nil) == refused {
			t.Errorf("with %s: %v: %s", option, err, out)
		}
	}
}

func TestVariableByHand(t *testing.T) {
	t.Parallel()
	r := start(t, []string{variable + "=nonsense"}, "ready")
	if code := r.code(); code != 99 || !strings.Contains(r.stderr.String(), "remove it from the environment") {
		t.Errorf("exit code %d, stderr %s", code, &r.stderr)
	}
}

func testEventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(maxWait); !condition(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", maxWait, what)
		}
	}
}
