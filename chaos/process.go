package main

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"syscall"
	"time"

	"onejob/internal/procfs"
	"onejob/internal/supervisor"
)

// process is a program that the harness started. The kernel kills it when the
// harness dies.
type process struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed when it has been waited for
}

// start runs cmd with its output at the end of the file log. cmd.Stdout may be
// set; then only the errors go there.
func start(cmd *exec.Cmd, log string) (*process, error) {
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
	p := &process{cmd: cmd, exited: make(chan struct{})}
	started := make(chan error)
	go func() {
		// To the kernel a process's parent is the thread that started it.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(p.exited)
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

// running reports whether it has not ended. A nil process has.
func (p *process) running() bool {
	if p == nil {
		return false
	}
	select {
	case <-p.exited:
		return false
	default:
		return true
	}
}

// signal sends a signal. A supervisor passes it on; what cannot be passed on, its
// working process gets too.
func (p *process) signal(s syscall.Signal) {
	if !p.running() {
		return
	}
	if worker := p.worker(); worker != p.cmd.Process.Pid && (s == syscall.SIGSTOP || s == syscall.SIGCONT) {
		_ = syscall.Kill(worker, s)
	}
	_ = p.cmd.Process.Signal(s)
}

// kill ends it with SIGKILL and waits until it is gone. With a supervisor the kernel
// kills its working process.
func (p *process) kill() {
	if p.running() {
		worker := p.worker()
		_ = p.cmd.Process.Kill()
		<-p.exited
		for end := time.Now().Add(time.Second); syscall.Kill(worker, 0) == nil && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
	}
}

// below returns those of the given processes that live, and all that are below them.
func below(roots ...int) (living []procfs.Process) {
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

// worker returns the pid of the process that does the work: the child of a supervisor,
// or the process itself.
func (p *process) worker() int { return supervisor.Find(p.cmd.Process.Pid) }

// terminate sends SIGTERM, and reports whether it has ended within maxWait.
func (p *process) terminate(maxWait time.Duration) (ended bool) {
	if !p.running() {
		return true
	}
	p.signal(syscall.SIGTERM)
	select {
	case <-p.exited:
		return true
	case <-time.After(maxWait):
		return false
	}
}
