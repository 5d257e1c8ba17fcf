//go:build linux

// Package supervisor runs a program as the working process of a small parent
// process, and starts it again when it crashes.
//
//	supervisor ──signals────────────────> worker ──> guards, commands, ...
//	           <──pipe: here, ready, ending──
//
// When the worker dies unexpectedly, its parent is the first to know, and the only
// one that can be sure that nothing of it is left: it is a child subreaper, so every
// orphan becomes its child, also one that changed its session, its group or its
// environment. It kills them all, and only then says that the worker is dead.
//
// What an exit of the worker means:
//
//	before a worker was ever ready      passed on: it could not start
//	after a signal told us to stop      passed on
//	announced, with 0 or ExitUsage      passed on
//	announced, with another code        a crash
//	by a signal that we passed on       passed on: it has no handler for it
//	not announced, or by another one    a crash: a panic, kill -9, out of memory
//
// An exit is announced by [Worker.Ending]. A Go program that panics, or whose runtime gives up, exits
// with 2 but announces nothing, which tells it from one that refused its configuration.
//
// If the supervisor is killed, the kernel kills the worker in the same moment
// (PR_SET_PDEATHSIG). Guards notice that and end their commands, as they do when the
// worker dies alone.
//
// Not promised: a process that the kernel does not let go, or that changed to a user
// whom the supervisor may not signal, is left behind after some seconds. The worker
// is started again then, but its death is not made known, see [Config].
//
// The kernel forgets PR_SET_PDEATHSIG if the program's file has capabilities or the setuid bit. Then
// a worker kills itself when the pipe breaks, which one that is frozen does only when it goes on.
//
// The supervisor waits for every child of its process (wait4(-1)), as process 1 of a
// container must. A program that calls Run cannot use os/exec at the same time.
package supervisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"onejob/internal/guard"
	"onejob/internal/procfs"
)

// ExitUsage is the exit code of a worker that refuses its configuration. To start it
// again would be of no use.
const ExitUsage = 2

const (
	readyAfter = time.Minute      // a worker that lived so long did not crash because it was started
	firstDelay = time.Second      // before the second restart in a row; it doubles from then on
	lastDelay  = 30 * time.Second // but never more than this

	shutdownTimeout = 300 * time.Millisecond // what is left behind has this long to end by itself
	killWait        = 5 * time.Second        // processes that SIGKILL does not end in this time are left behind
	reportWait      = 5 * time.Second        // the first attempt to make a death known may delay a restart by this
	reportPause     = time.Second            // before one that failed is made again; it doubles
	lastWords       = time.Second            // what a process has said may be heard this long after its end
	tick            = time.Second            // how long at most nothing is looked at
)

// Config says how to run this program as a worker.
//
// When a worker has died and nothing of it is left, this program is started once more, with the same
// arguments, to make that known: [Worker.Dead] says so there. It runs until it exits with 0 or ExitUsage
// and has announced that, and is started again otherwise. It calls Ready when it has tried everything
// once; the next worker is started then.
type Config struct {
	// Asked ends when SIGTERM or SIGINT asks this program to end, as by
	// signal.NotifyContext. If it is nil, Run listens for them itself; one that came
	// just before is lost then.
	Asked context.Context

	// ReportEnv returns what the environment of a process that makes deaths known has besides that of
	// this one. It may be nil.
	ReportEnv func() []string

	// These are called in the order of events, and may be nil. Run waits for them.
	Hello     func(text string) // what a worker says of itself, see Worker.Hello
	Crashed   func(Crash)       // before the next worker is started
	Restarted func(pid int)     // the next worker was started
}

// Crash is how a worker died.
type Crash struct {
	PID       int
	Process   string        // its identity, a uuid
	ExitCode  int           // -1 if a signal ended it
	Signal    string        // such as SIGKILL, if one ended it
	Lived     time.Duration // since it was started
	Killed    int           // processes that it left behind and that were killed
	Clean     bool          // nothing is left; if not, its death is not made known
	Left      []int         // what could not be killed, as far as we can see it
	RestartIn time.Duration // -1 if it is not started again, because we were told to stop
	Err       error         // it could not be started at all; there is no exit then
}

// Run runs a worker, and the next one when it crashes. It returns the exit code to end
// with: that of the last worker, or 128 and the signal that ended it. The error says
// why no worker could be started.
//
// Signals that ask a program to end, and SIGUSR1 and SIGUSR2, are passed on to the
// worker. The thread that calls Run stays with it: the kernel kills the workers when
// it ends. The process is hidden from others of its user, and uses little memory from
// now on: it is always there, and has little to do.
func Run(c Config) (code int, err error) {
	if err := guard.Conceal(); err != nil {
		return 1, err
	}
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(20)
	debug.FreeOSMemory()
	// The parent that PR_SET_PDEATHSIG knows is a thread.
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return 1, fmt.Errorf("become a child subreaper: %w", err)
	}
	s := &supervisor{
		Config:   c,
		signals:  make(chan os.Signal, 16),
		children: make(chan os.Signal, 1),
		lines:    make(chan line),
		running:  map[int]*process{},
		before:   map[int]uint64{},
	}
	older, _ := s.descendants()
	for _, p := range older {
		s.before[p.PID] = p.Start
	}
	for sig := range forwarded {
		if !signal.Ignored(sig) && !(c.Asked != nil && (sig == unix.SIGTERM || sig == unix.SIGINT)) { // nohup
			signal.Notify(s.signals, sig)
		}
	}
	if c.Asked != nil {
		s.asked = c.Asked.Done()
	}
	defer signal.Stop(s.signals)
	signal.Notify(s.children, unix.SIGCHLD)
	defer signal.Stop(s.children)
	return s.run()
}

// forwarded are the signals that are passed on, and whether they ask for an end.
var forwarded = map[syscall.Signal]bool{
	unix.SIGTERM: true, unix.SIGINT: true, unix.SIGQUIT: true,
	unix.SIGHUP: false, unix.SIGUSR1: false, unix.SIGUSR2: false,
}

// supervisor is Run at work. One goroutine owns it.
type supervisor struct {
	Config
	signals, children chan os.Signal
	asked             <-chan struct{}
	lines             chan line

	worker    *process
	reporter  *process         // what makes deaths known, if it is at work
	running   map[int]*process // both, by pid, until they are reaped
	childless bool             // the last reap found that we have no children at all
	before    map[int]uint64   // children that are not the worker's, as those from before us, by pid: when they began
	memory    string           // the oom_score_adj that we had; empty if it has not changed

	stopping  bool // somebody told us to
	everReady bool // a worker of ours was
	crashes   int  // in a row

	dead      []string // identities of processes that are still to be reported
	killing   bool     // no reporter begins
	reportAt  time.Time
	reportLag time.Duration
}

// process is a child that we have started.
type process struct {
	pid     int
	id      string
	started time.Time

	here    bool          // it has installed its signal handlers
	waiting []unix.Signal // signals until then
	passed  []unix.Signal // that it got from us
	ready   bool
	ending  bool // its exit was announced
	silent  bool // its end of the pipe is closed

	gone   bool // it was reaped, with status
	status syscall.WaitStatus
	ended  time.Time
}

// allHeard reports whether all is known that a process has said that is gone. Another process may keep
// its end of the pipe open.
func (p *process) allHeard() bool { return p.silent || time.Since(p.ended) >= lastWords }

// line is what a child has said; empty when it has closed its end of the pipe.
type line struct {
	from *process
	text string
}

func (s *supervisor) run() (code int, err error) {
	for {
		w, err := s.start(nil)
		if err != nil && !s.everReady {
			return 1, err
		}
		began := time.Now()
		crash := Crash{Err: err, ExitCode: -1}
		if err == nil {
			s.worker = w
			if s.crashes > 0 && s.Restarted != nil {
				s.Restarted(w.pid)
			}
			for !w.gone {
				s.step(tick)
			}
			for !w.allHeard() {
				s.step(10 * time.Millisecond)
			}
			s.worker = nil
			if w.status.Signaled() && slices.Contains(w.passed, w.status.Signal()) {
				s.stopping = true // it has no handler for what it was sent, such as SIGHUP when a terminal is closed
			}
			if code, over := s.over(w); over {
				if s.everReady { // what handlers have started goes with them
					s.stopReporter()
					s.killAll()
				}
				return code, nil
			}
			crash.PID, crash.Process, crash.Lived = w.pid, w.id, time.Since(began)
			if w.status.Signaled() {
				crash.Signal = unix.SignalName(w.status.Signal())
			} else {
				crash.ExitCode = w.status.ExitStatus()
			}
			s.stopReporter()
			crash.Killed, crash.Left, crash.Clean = s.killAll()
		}
		if crash.Lived >= readyAfter {
			s.crashes = 0
		}
		crash.RestartIn = delay(s.crashes)
		s.crashes++
		if s.stopping {
			crash.RestartIn = -1
		}
		if s.Crashed != nil {
			s.Crashed(crash)
		}
		next := time.Now().Add(crash.RestartIn)
		if crash.Clean {
			s.reportDeath(w.id)
		}
		for !s.stopping && time.Now().Before(next) {
			s.step(time.Until(next))
		}
		if s.stopping {
			if w == nil {
				return 0, nil
			}
			return exitCode(w.status), nil
		}
	}
}

// over reports whether the end of a worker is ours, and with which exit code.
func (s *supervisor) over(w *process) (code int, over bool) {
	code = exitCode(w.status)
	unmeant := w.status.Signaled() || !w.ending
	switch {
	case !s.everReady:
		return code, true
	case s.stopping:
		return code, !unmeant // what a crash leaves behind is killed in any case
	case unmeant:
		return code, false
	}
	return code, code == 0 || code == ExitUsage
}

func exitCode(status syscall.WaitStatus) int {
	if status.Signaled() {
		return 128 + int(status.Signal())
	}
	return status.ExitStatus()
}

// delay is how long to wait after so many crashes in a row before this one.
func delay(crashes int) time.Duration {
	if crashes == 0 {
		return 0
	}
	return min(firstDelay<<min(crashes-1, 10), lastDelay)
}

// start starts this program as a worker or, if there are dead, as what makes their death known.
func (s *supervisor) start(dead []string) (*process, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make a pipe for the working process: %w", err)
	}
	defer w.Close()
	p := &process{id: uuid.NewString(), started: time.Now()}
	args := slices.Clone(arguments)
	env := slices.DeleteFunc(os.Environ(), func(e string) bool {
		return strings.HasPrefix(e, processVariable+"=") || strings.HasPrefix(e, deadVariable+"=")
	})
	env = append(env, processVariable+"="+p.id)
	if len(dead) > 0 {
		args, env = append(args, reporterArgument), append(env, deadVariable+"="+strings.Join(dead, ","))
		if s.ReportEnv != nil {
			env = append(env, s.ReportEnv()...)
		}
	}
	s.yieldMemory(false) // it inherits what we have
	defer s.yieldMemory(true)
	// The link leads to this very binary, even if its file was replaced since.
	p.pid, err = syscall.ForkExec("/proc/self/exe", args, &syscall.ProcAttr{
		Env:   env,
		Files: []uintptr{0, 1, 2, w.Fd()},
		// A group of its own: Ctrl-C reaches it through us, and once.
		Sys: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL},
	})
	if err != nil {
		_ = r.Close()
		return nil, fmt.Errorf("start the working process: %w", err)
	}
	s.running[p.pid] = p
	go listen(p, r, s.lines)
	return p, nil
}

// step waits until something happens, at most so long, and deals with it.
func (s *supervisor) step(atMost time.Duration) {
	if s.reporter == nil && len(s.dead) > 0 {
		atMost = min(atMost, max(time.Until(s.reportAt), 0))
	}
	select {
	case <-s.asked:
		s.asked = nil
		signal.Notify(s.signals, unix.SIGTERM, unix.SIGINT) // the next one tells the worker to hurry
		s.forward(unix.SIGTERM)
	case sig := <-s.signals:
		s.forward(sig.(unix.Signal))
	case l := <-s.lines:
		s.heard(l)
	case <-s.children:
	case <-time.After(min(atMost, tick)):
	}
	s.reap()
	s.checkReporter()
}

// forward passes a signal on. A worker that has just begun could die of it; it gets it
// as soon as it can deal with it.
func (s *supervisor) forward(sig unix.Signal) {
	s.stopping = s.stopping || forwarded[sig]
	if w := s.worker; w != nil && !w.gone {
		if w.here {
			w.pass(sig)
		} else {
			w.waiting = append(w.waiting, sig)
		}
	}
}

func (p *process) pass(sig unix.Signal) {
	if !p.gone {
		if !slices.Contains(p.passed, sig) {
			p.passed = append(p.passed, sig)
		}
		_ = unix.Kill(p.pid, sig)
	}
}

func (s *supervisor) heard(l line) {
	word, text, _ := strings.Cut(l.text, " ")
	switch p := l.from; word {
	case "":
		p.silent = true
	case wordHere:
		p.here = true
		for _, sig := range p.waiting {
			p.pass(sig)
		}
		p.waiting = nil
	case wordHello:
		if s.Hello != nil && p == s.worker {
			s.Hello(text)
		}
	case wordReady:
		p.ready = true
		if p == s.worker {
			s.everReady = true
		}
	case wordEnding:
		p.ending = true
	}
}

// reap collects the dead, orphans among them.
func (s *supervisor) reap() {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		switch {
		case err == syscall.EINTR:
			continue
		case err != nil: // ECHILD
			s.childless = true
			return
		case pid == 0:
			s.childless = false
			return
		}
		if p := s.running[pid]; p != nil {
			p.gone, p.status, p.ended = true, status, time.Now()
			delete(s.running, pid)
		}
	}
}

// reportDeath makes a death known, and returns when that was tried, or after a while.
func (s *supervisor) reportDeath(id string) {
	const most = 100 // after that many crashes it is a trickle; the others find out by themselves
	s.dead = append(s.dead, id)
	s.dead = s.dead[max(0, len(s.dead)-most):]
	s.reportAt, s.reportLag = time.Now(), reportPause
	s.checkReporter()
	for last := time.Now().Add(reportWait); s.reporter != nil && (!s.reporter.ready || s.stopping) && time.Now().Before(last); {
		s.step(time.Until(last))
	}
}

// stopReporter ends what makes deaths known and does not know of the latest one. Another one begins
// when what is left of that was killed. One that does not die is left behind: it keeps neither
// the next worker from being started nor this death from being made known.
func (s *supervisor) stopReporter() {
	s.killing = true
	for end := time.Now().Add(killWait); s.reporter != nil; s.step(tick) { // which notes its end
		if s.reporter.gone {
			continue
		}
		pid := s.reporter.pid
		if time.Now().After(end) {
			if p, err := procfs.Read(pid); err == nil && procfs.Place() != "" { // or else /proc is that of another PID namespace
				s.before[pid] = p.Start // it is nothing that the worker has left behind
			}
			s.reporter = nil
			return
		}
		_ = unix.Kill(pid, unix.SIGKILL)
	}
}

// checkReporter starts what makes deaths known when it is due, and sees what became of it.
func (s *supervisor) checkReporter() {
	if u := s.reporter; u != nil && u.gone && u.allHeard() {
		s.reporter = nil
		if code := exitCode(u.status); u.ending && (code == 0 || code == ExitUsage) { // see over
			s.dead = nil
		}
		s.reportAt, s.reportLag = time.Now().Add(s.reportLag), min(2*s.reportLag, lastDelay)
	}
	if s.reporter == nil && !s.killing && len(s.dead) > 0 && !time.Now().Before(s.reportAt) {
		var err error
		if s.reporter, err = s.start(s.dead); err != nil {
			s.reporter = nil
			s.reportAt, s.reportLag = time.Now().Add(s.reportLag), min(2*s.reportLag, lastDelay)
		}
	}
}

// killAll kills everything that a worker left behind, and returns how many processes it
// killed, those that do not die, and whether nothing is left.
func (s *supervisor) killAll() (killed int, left []int, clean bool) {
	defer func() { s.killing = false }()
	for end := time.Now().Add(shutdownTimeout); time.Now().Before(end) && !s.alone(); {
		s.step(5 * time.Millisecond)
	}
	found := map[int]bool{}
	pause := time.Millisecond
	for end := time.Now().Add(killWait); !s.alone(); {
		all := s.stopAll()
		if time.Now().After(end) {
			for _, p := range all {
				left = append(left, p.PID)
			}
			return max(len(found)-len(left), 0), left, false
		}
		for _, p := range all {
			found[p.PID] = true
			_ = p.Signal(unix.SIGKILL)
		}
		s.step(pause)
		pause = min(2*pause, 50*time.Millisecond)
	}
	return len(found), nil, true
}

// alone reports whether nothing is left of the worker. Having no children means having
// no descendants. If there were children before us /proc is read; it is no snapshot, so
// one look is not enough.
func (s *supervisor) alone() bool {
	for range 3 {
		s.reap()
		if s.childless {
			return true
		}
		if len(s.before) == 0 {
			return false
		}
		if left, err := s.descendants(); len(left) > 0 || err != nil && !errors.Is(err, procfs.ErrOdd) {
			return false
		}
		time.Sleep(2 * time.Millisecond)
	}
	return true
}

// stopAll stops all that is left of the worker, so that nothing forks while it is being
// killed, and returns it.
func (s *supervisor) stopAll() (all []procfs.Process) {
	stopped := map[int]bool{}
	for range 20 {
		all, _ = s.descendants()
		news := false
		for _, p := range all {
			if !stopped[p.PID] {
				stopped[p.PID], news = true, true
				_ = p.Signal(unix.SIGSTOP)
			}
		}
		if !news {
			break
		}
	}
	return all
}

// descendants returns the living processes below us, but for ReportDeath and what was there
// before us.
func (s *supervisor) descendants() ([]procfs.Process, error) {
	return descendants(os.Getpid(), func(p procfs.Process) bool {
		started, older := s.before[p.PID]
		return older && started == p.Start || s.reporter != nil && s.reporter.pid == p.PID
	})
}

// yieldMemory makes the kernel choose others when memory runs out, or undoes that. It
// takes root; without it nothing changes.
func (s *supervisor) yieldMemory(yield bool) {
	const file = "/proc/self/oom_score_adj"
	switch {
	case !yield && s.memory != "":
		_ = os.WriteFile(file, []byte(s.memory), 0)
	case yield:
		if s.memory == "" {
			before, _ := os.ReadFile(file)
			s.memory = strings.TrimSpace(string(before))
		}
		if s.memory != "" {
			_ = os.WriteFile(file, []byte("-1000"), 0)
		}
	}
}
