package servers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"
)

const pollInterval = 25 * time.Millisecond

// process is one run of a server.
type process struct {
	name   string
	cmd    *exec.Cmd
	log    serverLog
	exited chan struct{} // closed when the process has been waited for
	err    error         // how it ended; read it after exited
}

// startProcess runs cmd with its output at the end of the file logPath. The
// kernel sends it deathSignal when this program dies.
func startProcess(name string, cmd *exec.Cmd, logPath string, deathSignal syscall.Signal) (*process, error) {
	file, err := os.OpenFile(logPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	defer file.Close()
	log, err := logFromHere(file)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}

	// The output goes straight to a file, as a pipe would be held open by a
	// server's orphaned children and block them once we are gone.
	cmd.Stdout, cmd.Stderr = file, file
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = new(syscall.SysProcAttr)
	}
	cmd.SysProcAttr.Setpgid = true
	DieWithParent(cmd.SysProcAttr, deathSignal)

	p := &process{name: name, cmd: cmd, log: log, exited: make(chan struct{})}
	started := make(chan error)
	go p.run(started)
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return p, nil
}

// run starts the process and waits for its end. Both happen on one operating
// system thread, kept for the purpose: to the kernel a process's parent is the
// thread that started it, and the death signal is sent when that thread ends.
func (p *process) run(started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer close(p.exited)
	err := p.cmd.Start()
	started <- err
	if err == nil {
		p.err = p.cmd.Wait()
	}
}

// running reports whether the process has not ended. A nil process has.
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

// await calls ready until it returns nil. It gives up when ctx ends or the
// process does.
func (p *process) await(ctx context.Context, ready func(context.Context) error) error {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		err := ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-p.exited:
			return &exitError{name: p.name, err: p.err, log: p.log.tail()}
		case <-ctx.Done():
			return fmt.Errorf("start %s: %w; the last problem was: %v%s", p.name, context.Cause(ctx), err, p.log.tail())
		}
	}
}

// ErrKilled says that a server did not stop in time. It is gone now.
var ErrKilled = errors.New("was killed")

// stop asks the process to end with signal, and calls kill, which ends it, when it has
// not ended after a while. That is an error. A process that is gone is fine.
func (p *process) stop(signal syscall.Signal, kill func()) error {
	if !p.running() {
		return nil
	}
	p.cmd.Process.Signal(signal)
	p.cmd.Process.Signal(syscall.SIGCONT) // a frozen process would not notice
	select {
	case <-p.exited:
		return nil
	case <-time.After(stopTimeout):
		kill()
		return fmt.Errorf("%s had not stopped %v after a %v and %w%s", p.name, stopTimeout, signal, ErrKilled, p.log.tail())
	}
}

// kill ends the process with SIGKILL and waits until it is gone.
func (p *process) kill() {
	if p.running() {
		p.cmd.Process.Kill()
		<-p.exited
	}
}

// exitError says that a server ended while it should have been starting.
type exitError struct {
	name string
	err  error
	log  string
}

func (e *exitError) Error() string {
	how := "exit status 0"
	if e.err != nil {
		how = e.err.Error()
	}
	return fmt.Sprintf("%s ended while starting (%s)%s", e.name, how, e.log)
}

func (e *exitError) Unwrap() error { return e.err }

// portTaken reports whether the server ended because of a port in use.
func (e *exitError) portTaken() bool {
	log := strings.ToLower(e.log)
	return strings.Contains(log, "address already in use") || strings.Contains(log, "dist_port_already_used") // RabbitMQ's distribution port
}
