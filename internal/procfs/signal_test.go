//go:build linux

package procfs

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestSignal(t *testing.T) {
	for name, send := range map[string]func(Process) error{
		"one":   func(p Process) error { return p.Signal(unix.SIGKILL) },
		"group": func(p Process) error { return p.SignalGroup(unix.SIGKILL) },
		// Old kernels, and filters of containers, know no such handle.
		"without a handle": func(p Process) error { return p.send(unix.SIGKILL, -1, p.PID) },
	} {
		t.Run(name, func(t *testing.T) {
			cmd, p := sleeper(t)
			if err := send(p); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Wait(); cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Errorf("it ended with %v", err)
			}
			if err := send(p); !errors.Is(err, unix.ESRCH) {
				t.Errorf("after its end: %v", err)
			}
		})
	}
	t.Run("a group whose leader has ended", func(t *testing.T) {
		cmd := exec.Command("sh", "-c", "sleep 1000 & echo $!")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		cmd.Stdout = w
		if err := cmd.Run(); err != nil {
			t.Fatal(err)
		}
		_ = w.Close()
		var left int
		if _, err := fmt.Fscan(r, &left); err != nil {
			t.Fatal(err)
		}
		p, err := Read(left)
		if err != nil || p.Group != cmd.Process.Pid {
			t.Fatalf("%+v, %v: it is not in the group of the shell, %d", p, err, cmd.Process.Pid)
		}
		if err := p.SignalGroup(unix.SIGKILL); err != nil {
			t.Error(err)
			_ = p.Signal(unix.SIGKILL)
		}
		if _, err := io.ReadAll(r); err != nil { // until nobody has the other end
			t.Error(err)
		}
	})
	_, moved := sleeper(t)
	moved.Group++
	if err := moved.SignalGroup(unix.SIGKILL); !errors.Is(err, unix.ESRCH) {
		t.Errorf("the group of a process that has left it: %v", err)
	}
}

// TestNumbersOfOthers has a process die and another one get its number, as while this one is frozen.
// In a PID namespace of its own it can say which number comes next.
func TestNumbersOfOthers(t *testing.T) {
	const inside = "PROCFS_TEST_INSIDE"
	if os.Getenv(inside) == "" {
		if os.Getuid() != 0 {
			t.Skip("only root may make a PID namespace")
		}
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		c := exec.Command("unshare", "--pid", "--fork", "--mount-proc", self, "-test.run=^TestNumbersOfOthers$")
		c.Env = append(os.Environ(), inside+"=1")
		if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), "PASS") {
			t.Errorf("%v: %s", err, out)
		}
		return
	}
	gone, was := sleeper(t)
	_ = gone.Process.Kill()
	_ = gone.Wait()
	var stranger *exec.Cmd
	for end := time.Now().Add(time.Minute); stranger == nil; { // a thread may get the number first; nowhere else is it given again within a clock tick
		if time.Now().After(end) {
			t.Fatal("no process got the number within a minute")
		}
		if err := os.WriteFile("/proc/sys/kernel/ns_last_pid", fmt.Append(nil, was.PID-1), 0); err != nil {
			t.Fatal(err)
		}
		if cmd, p := sleeper(t); p.PID == was.PID && p.Start != was.Start {
			stranger = cmd
		} else {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	}
	for name, err := range map[string]error{
		"it":               was.Signal(unix.SIGKILL),
		"its group":        was.SignalGroup(unix.SIGKILL),
		"without a handle": was.send(unix.SIGKILL, -1, was.PID),
	} {
		if !errors.Is(err, unix.ESRCH) {
			t.Errorf("%s: got %v, want %v", name, err, unix.ESRCH)
		}
	}
	if err := stranger.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := stranger.Wait(); stranger.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGTERM {
		t.Errorf("the stranger was killed: %v", err)
	}
}

func TestBelow(t *testing.T) {
	cmd := exec.Command("sh", "-c", "sleep 1000 & echo; wait")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL); _ = cmd.Wait() }()
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	shell := func(p Process) bool { return p.PID == cmd.Process.Pid }
	all, err := Below(os.Getpid(), func(p Process) bool { return p.Parent == os.Getpid() && !shell(p) })
	if err != nil || len(all) != 2 || !shell(all[0]) || all[1].Parent != all[0].PID {
		t.Fatalf("got %+v, %v, want the shell and its child", all, err)
	}
	if none, err := Below(os.Getpid(), func(p Process) bool { return p.Parent == os.Getpid() }); err != nil || len(none) > 0 {
		t.Errorf("got %+v, %v, want nothing below those that are skipped", none, err)
	}
	late := slices.Clone(all)
	late[0].Start--
	if below, err := confirm(os.Getpid(), late); err != nil || len(below) > 0 {
		t.Errorf("the shell has the number of another one: got %+v, %v", below, err)
	}
	all[1].Start--
	if below, err := confirm(os.Getpid(), all); err != nil || len(below) != 1 || !shell(below[0]) {
		t.Errorf("the child has the number of another one: got %+v, %v", below, err)
	}
}

// sleeper starts a process in a group of its own.
func sleeper(t *testing.T) (*exec.Cmd, Process) {
	cmd := exec.Command("sleep", "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	p, err := Read(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	return cmd, p
}
