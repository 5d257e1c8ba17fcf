package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"

	"onejob/internal/testenv/processes"
)

// farewell is how long a process may take to end when it is asked to.
const farewell = 20 * time.Second

// process is a subject at work.
type process struct {
	name   string
	cmd    *exec.Cmd
	log    string        // the file that it writes to
	exited chan struct{} // closed when it has been waited for
	err    error         // how it ended; read it after exited
}

// startProcess runs a program with its output in a new file. It has a process
// group of its own, so that Ctrl-C does not reach it, and the kernel kills it
// when we die. It finds nothing of our environment but PATH and HOME.
func startProcess(name, log, program string, args ...string) (*process, error) {
	file, err := os.Create(log)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	defer file.Close()
	cmd := exec.Command(program, args...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME")}
	cmd.Stdout, cmd.Stderr = file, file
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	p := &process{name: name, cmd: cmd, log: log, exited: make(chan struct{})}
	started := make(chan error)
	go func() {
		// To the kernel the parent is the thread that starts the process, so
		// that thread has to stay.
		runtime.LockOSThread()
		defer close(p.exited)
		err := cmd.Start()
		started <- err
		if err == nil {
			p.err = cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return p, nil
}

// pid returns the process's number.
func (p *process) pid() int { return p.cmd.Process.Pid }

// memory returns a size of /proc/PID/status, such as VmRSS, in MB. Of a supervisor and
// its working process it returns the sum.
func (p *process) memory(name string) (float64, error) {
	mb, err := processes.Status(p.pid(), name)
	if worker := processes.Find(p.pid()); err == nil && worker != p.pid() {
		var more float64
		more, err = processes.Status(worker, name)
		mb += more
	}
	return mb, err
}

// alive returns nil unless the process has ended, which it should not have.
func (p *process) alive() error {
	select {
	case <-p.exited:
		return fmt.Errorf("%s ended (%v)%s", p.name, p.err, p.tail())
	default:
		return nil
	}
}

// stop asks the process to end, and kills it if it takes too long.
func (p *process) stop() error {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.exited:
		if p.err != nil {
			return fmt.Errorf("%s ended with: %w%s", p.name, p.err, p.tail())
		}
		return nil
	case <-time.After(farewell):
		_ = p.cmd.Process.Kill()
		<-p.exited
		return fmt.Errorf("%s had not ended after %v and was killed%s", p.name, farewell, p.tail())
	}
}

// tail returns the end of what the process wrote, to be added to an error.
func (p *process) tail() string {
	text, err := os.ReadFile(p.log)
	if err != nil || len(text) == 0 {
		return "; it wrote nothing"
	}
	text = bytes.TrimSpace(text[max(0, len(text)-1500):])
	return "\nits log ends with:\n\t" + string(bytes.ReplaceAll(text, []byte("\n"), []byte("\n\t")))
}

// stopAll stops processes side by side.
func stopAll(processes []*process) error {
	errs := make(chan error)
	for _, p := range processes {
		go func() { errs <- p.stop() }()
	}
	var all error
	for range processes {
		all = errors.Join(all, <-errs)
	}
	return all
}
