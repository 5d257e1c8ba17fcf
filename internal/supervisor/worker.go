//go:build linux

package supervisor

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"onejob/internal/guard"
	"onejob/internal/procfs"
)

// What a worker says, a line each.
const (
	wordHere   = "here"
	wordHello  = "hello" // and a text
	wordReady  = "ready"
	wordEnding = "ending"

	pipeFD = 3 // where it says so
)

// Variables that tell a child of a supervisor what it is.
const (
	processVariable = "ONEJOB_SUPERVISED" // its identity
	deadVariable    = "ONEJOB_BURY"       // whose death it makes known, separated by commas
)

// reporterArgument is the last argument of a process that makes deaths known, for people who
// look at a list of processes.
const reporterArgument = "(bury)"

// arguments are those that this program was started with, whatever main makes of them.
var arguments = func() []string {
	if last := len(os.Args) - 1; last > 0 && os.Args[last] == reporterArgument && os.Getenv(deadVariable) != "" {
		os.Args = os.Args[:last]
	}
	return slices.Clone(os.Args)
}()

// Worker is the working process, as it knows itself, or one that makes the death of others known. A
// nil Worker says nothing.
type Worker struct {
	Process string   // a uuid, which no other process ever had
	Dead    []string // processes whose death this one is to make known, by [ReportDeath], and nothing else; nil: it works

	mu   sync.Mutex
	pipe *os.File
}

// Adopt returns the Worker that this process is, or nil if it has no supervisor. It
// removes the variables that say so from the environment, and hides the process from others of its
// user, as Run does. Handlers of signals must be installed before. It fails if /proc
// does not show this user processes that are hidden in this way. CAP_SYS_PTRACE shows them; it should be
// an ambient capability and none of the program's file, for which the kernel would forget
// PR_SET_PDEATHSIG (prctl(2)).
func Adopt() (*Worker, error) {
	id, there := os.LookupEnv(processVariable)
	dead := os.Getenv(deadVariable)
	_ = os.Unsetenv(processVariable)
	_ = os.Unsetenv(deadVariable)
	if !there {
		return nil, nil
	}
	var stat unix.Stat_t
	err := unix.Fstat(pipeFD, &stat)
	if _, parseErr := uuid.Parse(id); err != nil || parseErr != nil || stat.Mode&unix.S_IFMT != unix.S_IFIFO {
		return nil, fmt.Errorf("the variable %s is set for the working process alone; remove it from the environment", processVariable)
	}
	unix.CloseOnExec(pipeFD)
	// Started by way of /proc/self/exe, it is called exe in lists of processes.
	// That must come before the process is hidden: then the file is root's.
	_ = os.WriteFile("/proc/self/comm", []byte(filepath.Base(os.Args[0])), 0)
	if err := guard.Conceal(); err != nil {
		return nil, err
	}
	// What cannot be seen would be taken for dead, and what works under it killed.
	if _, err := procfs.Read(os.Getppid()); err != nil && !errors.Is(err, procfs.ErrOdd) {
		return nil, errors.New("/proc does not show this user the processes of onejob, which are hidden from others: mount it without hidepid, leave ProtectProc out of the unit, or give onejob the ambient capability CAP_SYS_PTRACE")
	}
	w := &Worker{Process: id, pipe: os.NewFile(pipeFD, "supervisor")}
	if dead != "" {
		w.Dead = strings.Split(dead, ",")
	}
	w.say(wordHere)
	go endWithSupervisor()
	return w, nil
}

// endWithSupervisor kills this process when its supervisor, who alone reads the pipe, has died. Most
// often the kernel is earlier, see the package's comment.
func endWithSupervisor() {
	pipe := []unix.PollFd{{Fd: pipeFD}} // POLLERR comes unasked
	for {
		if _, err := unix.Poll(pipe, -1); err == nil && pipe[0].Revents&unix.POLLERR != 0 {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		} else if err != unix.EINTR {
			return
		}
	}
}

// Hurry calls hurry when SIGINT or SIGTERM comes after ctx has ended, by the first of them, until stop
// is called.
func Hurry(ctx context.Context, hurry func()) (stop func()) {
	again, stopped := make(chan os.Signal, 1), make(chan struct{})
	listening := context.AfterFunc(ctx, func() {
		signal.Notify(again, unix.SIGINT, unix.SIGTERM)
		defer signal.Stop(again)
		select {
		case <-again:
			hurry()
		case <-stopped:
		}
	})
	return func() {
		listening()
		close(stopped)
	}
}

// Hello tells the supervisor something of this process, for Config.Hello.
func (w *Worker) Hello(text string) { w.say(wordHello + " " + strings.ReplaceAll(text, "\n", " ")) }

// Ready tells the supervisor that this process has begun to work.
func (w *Worker) Ready() { w.say(wordReady) }

// Ending tells the supervisor that this process is about to exit and means to.
func (w *Worker) Ending() { w.say(wordEnding) }

func (w *Worker) say(line string) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	_, _ = w.pipe.WriteString(line + "\n") // a supervisor that cannot hear is dead, and so are we
}

// listen passes on what a process says, until it has closed its end of the pipe.
func listen(p *process, pipe *os.File, lines chan<- line) {
	defer pipe.Close()
	said := bufio.NewScanner(pipe)
	for said.Scan() {
		if said.Text() != "" {
			lines <- line{p, said.Text()}
		}
	}
	lines <- line{p, ""}
}
