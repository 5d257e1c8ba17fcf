// Package harness has what runs with faults have in common: the programs that they start, the observer
// among them, and how they wait for something.
package harness

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"syscall"
	"time"

	"onejob/internal/procfs"
	"onejob/internal/testenv/processes"
)

// Process is a program that the harness started. The kernel kills it when the
// harness dies.
type Process struct {
	Cmd    *exec.Cmd
	Exited chan struct{} // closed when it has been waited for
}

// Start runs cmd with its output at the end of the file log. cmd.Stdout may be
// set; then only the errors go there.
func Start(cmd *exec.Cmd, log string) (*Process, error) {
	f, err := os.OpenFile(log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	cmd.Stderr = f
	if cmd.Stdout == nil {
		cmd.Stdout = f
	}
	// A group of its own: Ctrl-C is for the harness.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	p := &Process{Cmd: cmd, Exited: make(chan struct{})}
	started := make(chan error)
	go func() {
		// To the kernel a process's parent is the thread that started it.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(p.Exited)
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // how it ended is in cmd.ProcessState
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	return p, nil
}

// Running reports whether it has not ended. A nil process has.
func (p *Process) Running() bool {
	if p == nil {
		return false
	}
	select {
	case <-p.Exited:
		return false
	default:
		return true
	}
}

// Signal sends a signal. A supervisor passes it on; what cannot be passed on, its
// working process gets too.
func (p *Process) Signal(s syscall.Signal) {
	if !p.Running() {
		return
	}
	if worker := p.Worker(); worker != p.Cmd.Process.Pid && (s == syscall.SIGSTOP || s == syscall.SIGCONT) {
		_ = syscall.Kill(worker, s)
	}
	_ = p.Cmd.Process.Signal(s)
}

// Kill ends it with SIGKILL and waits until it is gone. With a supervisor the kernel
// kills its working process.
func (p *Process) Kill() {
	if p.Running() {
		worker := p.Worker()
		_ = p.Cmd.Process.Kill()
		<-p.Exited
		for end := time.Now().Add(time.Second); syscall.Kill(worker, 0) == nil && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
	}
}

// Below returns those of the given processes that live, and all that are below them.
func Below(roots ...int) (living []procfs.Process) {
	all, _ := procfs.Processes()
	children := map[int][]procfs.Process{}
	var next []procfs.Process
	for _, p := range all {
		children[p.Parent] = append(children[p.Parent], p)
		if slices.Contains(roots, p.PID) {
			next = append(next, p)
		}
	}
	for ; len(next) > 0; next = next[1:] {
		if !next[0].Dead {
			living = append(living, next[0])
		}
		next = append(next, children[next[0].PID]...)
	}
	return living
}

// Worker returns the pid of the process that does the work: the child of a supervisor,
// or the process itself.
func (p *Process) Worker() int { return processes.Find(p.Cmd.Process.Pid) }

// Terminate sends SIGTERM, and reports whether it has ended within maxWait.
func (p *Process) Terminate(maxWait time.Duration) (ended bool) {
	if !p.Running() {
		return true
	}
	p.Signal(syscall.SIGTERM)
	select {
	case <-p.Exited:
		return true
	case <-time.After(maxWait):
		return false
	}
}
