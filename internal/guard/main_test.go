//go:build linux

package guard

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"onejob/boottime"
	"onejob/internal/procfs"
	"onejob/internal/testenv"
)

// TestMain lets the test binary be a daemon that tests can kill and freeze,
// and makes sure that the tests leave neither goroutines nor processes.
func TestMain(m *testing.M) {
	if path := os.Getenv("GUARD_TEST_HEADLESS"); path != "" {
		headless(path)
	}
	if os.Getenv("GUARD_TEST_DAEMON") != "" {
		daemon()
		return
	}
	code := m.Run()
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, "goroutines leaked:", err)
		code = 1
	}
	if left, err := procfs.Below(os.Getpid(), nil); err != nil || len(left) > 0 {
		fmt.Fprintln(os.Stderr, "processes leaked:", left, err)
		code = 1
	}
	os.Exit(code)
}

func init() {
	if os.Getenv("GUARD_TEST_HEADLESS") != "" {
		runtime.LockOSThread() // main is called by the main thread
	}
}

// headless ends the main thread alone, writes the process's number to a file, and
// lives on.
func headless(path string) {
	go func() {
		stat := fmt.Sprintf("/proc/%d/task/%[1]d/stat", os.Getpid())
		for line := ""; !strings.Contains(line, ") Z "); line = readLine(stat) {
			time.Sleep(time.Millisecond)
		}
		if err := os.WriteFile(path, []byte(itoa(os.Getpid())), 0o600); err != nil {
			panic(err)
		}
		time.Sleep(time.Hour)
	}()
	_, _, _ = syscall.Syscall(syscall.SYS_EXIT, 0, 0, 0)
}

// daemon runs a shell script under guard, extending its lease all the time. It
// prints "guard" and a process id, what the script prints, "exit" and the Exit.
func daemon() {
	if os.Getenv("GUARD_TEST_EXPOSED") == "" {
		if err := Conceal(); err != nil {
			panic(err)
		}
	}
	switch os.Getenv("GUARD_TEST_DAEMON") {
	case "sweep":
		sweepAndSay()
		return
	case "enable":
		enableAndSay()
		return
	}
	grace := 200 * time.Millisecond
	if text := os.Getenv("GUARD_TEST_GRACE"); text != "" {
		grace, _ = time.ParseDuration(text)
	}
	lease, err := time.ParseDuration(os.Getenv("GUARD_TEST_LEASE"))
	if err != nil {
		panic(err)
	}
	p, err := Start(Spec{
		Path:     "/bin/sh",
		Args:     []string{"-c", os.Getenv("GUARD_TEST_SCRIPT")},
		Env:      []string{os.Getenv("GUARD_TEST_DAEMON"), "PATH=" + os.Getenv("PATH")},
		Output:   os.Stdout,
		Grace:    grace,
		Deadline: boottime.Now().Add(lease),
		NoCgroup: os.Getenv("GUARD_TEST_NO_CGROUP") != "",
	})
	if err != nil {
		panic(err)
	}
	fmt.Println("guard", p.guard.Pid)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			p.Extend(boottime.Now().Add(lease))
			continue
		case <-p.Done():
		}
		exit, err := p.Wait()
		line, _ := json.Marshal(exit)
		fmt.Printf("exit %s %v\n", line, err)
		return
	}
}

// stubborn starts a process that has left its group, its session and its
// parent, and that SIGTERM does not end; then it says "ready" and waits.
const stubborn = `setsid -f sh -c 'trap "" TERM HUP INT; echo ready; exec sleep 1000'; sleep 1000`

// newMark returns a variable that all processes of one test carry.
func newMark(t *testing.T) string {
	return "GUARD_TEST_MARK=" + t.Name() + strconv.FormatInt(time.Now().UnixNano(), 36)
}

// script returns the Spec of a shell script with a lease of a minute.
func script(t *testing.T, text string, out io.Writer) (s Spec, mark string) {
	mark = newMark(t)
	return Spec{
		Path:     "/bin/sh",
		Args:     []string{"-c", text},
		Env:      []string{mark, "PATH=" + os.Getenv("PATH")},
		Output:   out,
		Grace:    200 * time.Millisecond,
		Deadline: boottime.Now().Add(time.Minute),
	}, mark
}

func mustStart(t *testing.T, s Spec) *Process {
	t.Helper()
	p, err := Start(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Kill()
		_, _ = p.Wait()
	})
	return p
}

func mustWait(t *testing.T, p *Process) Exit {
	t.Helper()
	exit, err := p.Wait()
	if err != nil {
		t.Fatal(err)
	}
	return exit
}

// until waits for something to become true.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain until %s", what)
		}
	}
}

func untilReady(t *testing.T, out *testenv.Output) {
	t.Helper()
	until(t, "the command is ready", func() bool {
		return bytes.Contains([]byte(out.String()), []byte("ready\n"))
	})
}

// hasVariable reports whether a process was given the variable "NAME=value".
func hasVariable(pid int, variable string) bool {
	environ, _ := procfs.Environ(pid)
	for entry := range bytes.SplitSeq(environ, []byte{0}) {
		if string(entry) == variable {
			return true
		}
	}
	return false
}

// marked returns the living processes that carry mark.
func marked(t *testing.T, mark string) (pids []int) {
	t.Helper()
	all, err := procfs.Processes()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		if !p.Dead && hasVariable(p.PID, mark) {
			pids = append(pids, p.PID)
		}
	}
	return pids
}

func wantNoneLeft(t *testing.T, mark string) {
	t.Helper()
	if left := marked(t, mark); len(left) > 0 {
		t.Errorf("processes %v are still there", left)
	}
}
