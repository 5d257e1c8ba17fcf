package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// process is a program that was started here. scripts/ha-test.sh ends those that are
// left, by their namespaces.
type process struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed when it has been waited for
}

// start runs cmd with its output at the end of the file log. cmd.Stdout may be set;
// then only the errors go there.
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
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for scripts/ha-test.sh
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &process{cmd: cmd, exited: make(chan struct{})}
	go func() {
		defer close(p.exited)
		_ = cmd.Wait() // how it ended is in its log
	}()
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

func (p *process) signal(s syscall.Signal) {
	if p.running() {
		_ = p.cmd.Process.Signal(s)
	}
}

// kill ends it with SIGKILL and waits until it is gone.
func (p *process) kill() {
	if p.running() {
		_ = p.cmd.Process.Kill()
		<-p.exited
	}
}

// eventually calls f until it returns nil, or ctx ends, or the timeout is over.
func eventually(ctx context.Context, timeout time.Duration, what string, f func() error) error {
	for deadline := time.Now().Add(timeout); ; {
		err := f()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("not within %v: %s: %w", timeout, what, err)
		}
		wait(ctx, 200*time.Millisecond)
	}
}

// wait waits for d, or until ctx ends.
func wait(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}
