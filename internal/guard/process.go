//go:build linux

package guard

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"onejob/boottime"
	"onejob/internal/procfs"
)

// Process is a command under guard, as its daemon sees it. Its methods may be
// called by several goroutines at once, and do nothing when it has ended.
type Process struct {
	guard *os.Process
	grace time.Duration
	mark  string  // in the environment of all that the command starts
	group *cgroup // nil without cgroups

	mu       sync.Mutex
	link     *os.File         // to the guard: orders go there, reports come from there
	deadline boottime.Instant // as the guard was told
	stopBy   boottime.Instant // set by Stop and Kill

	reaped  chan struct{} // closed when the guard is gone
	started chan error    // what Start waits for
	done    chan struct{} // closed when exit and err are final
	exit    Exit
	ended   boottime.Instant
	err     error
}

// Start starts the command of s and returns when it runs, or an error that
// says why it does not. It returns ErrExpired if s.Deadline has passed, and an error
// that wraps ErrExhausted if no command could be started now.
// The process ends by itself, if need be at its deadline, whether or not Wait
// is called.
func Start(s Spec) (*Process, error) {
	p, err := launch(s)
	if exhausted(err) && !errors.Is(err, ErrExhausted) {
		err = fmt.Errorf("%w: %w", ErrExhausted, err)
	}
	return p, err
}

// exhausted reports whether an error says that the machine lacks something.
func exhausted(err error) bool {
	return slices.ContainsFunc([]error{unix.EAGAIN, unix.ENOMEM, unix.EMFILE, unix.ENFILE, unix.ENOSPC}, func(lack error) bool { return errors.Is(err, lack) })
}

func launch(s Spec) (*Process, error) {
	if err := cmp.Or(s.check(), CheckProc()); err != nil {
		return nil, err
	}
	if s.Deadline.Passed() {
		return nil, ErrExpired
	}
	p := &Process{
		grace:    s.Grace,
		deadline: s.Deadline,
		reaped:   make(chan struct{}),
		started:  make(chan error, 1),
		done:     make(chan struct{}),
	}
	var ours, theirs []*os.File // to close if there is an error; ends that are the guard's alone
	defer func() { closeAll(theirs); closeAll(ours) }()

	h, err := ourHierarchy()
	switch {
	case err == nil && !s.NoCgroup:
		if p.group, err = h.newCgroup(s.Limits); err != nil {
			return nil, err
		}
		defer func() {
			if p.guard == nil {
				p.group.destroy()
			}
		}()
	case s.Limits != Limits{}:
		return nil, fmt.Errorf("limit the command: it has no cgroup: %w", cmp.Or(err, errors.New("NoCgroup is set")))
	}
	files, output := s.Files, (*os.File)(nil)
	if files == nil {
		stdin, err := stdinFile(s.Stdin)
		if err != nil {
			return nil, fmt.Errorf("put the command's stdin into memory: %w", err)
		}
		theirs = append(theirs, stdin)
		r, w, err := os.Pipe()
		if err != nil {
			return nil, fmt.Errorf("make a pipe for the command's output: %w", err)
		}
		ours, theirs = append(ours, r), append(theirs, w)
		files, output = []*os.File{stdin, w, w}, r
	}
	link, guardEnd, err := socketPair()
	if err != nil {
		return nil, fmt.Errorf("make a socket to the guard: %w", err)
	}
	ours, theirs = append(ours, link), append(theirs, guardEnd)
	files = append(files[:3:3], guardEnd)
	if p.group != nil {
		files = append(files, p.group.lock)
	}

	// The link leads to this very binary, even if its file was replaced since.
	p.guard, err = os.StartProcess("/proc/self/exe", []string{argv0, shown(s.Path)}, &os.ProcAttr{
		Env:   []string{}, // nil would be the daemon's own
		Files: files,
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return nil, fmt.Errorf("start the guard process: %w", err)
	}
	closeAll(theirs)
	ours, theirs = nil, nil
	p.link = link
	p.mark = guardMark(p.guard.Pid, rand.Text())

	var parts sync.WaitGroup
	if output != nil {
		parts.Go(func() { p.copyOutput(s.Output, output) })
	}
	parts.Go(p.watchClock)
	go func() { // ends when the guard has, which done announces
		defer close(p.done)
		p.follow()
		if output != nil {
			// All that could write is dead, unless somebody was handed the
			// pipe; then no more than what is in it is waited for.
			_ = output.SetReadDeadline(time.Now().Add(time.Second))
		}
		parts.Wait()
	}()
	orders := plan{
		Argv:       pack(append([]string{s.Path}, s.Args...)),
		Env:        pack(append(unmarked(s.Env), marks(p.mark)...)),
		Dir:        []byte(s.Dir),
		Captured:   s.Files == nil,
		Grace:      s.Grace,
		Deadline:   s.Deadline,
		MoveIn:     s.moveIn,
		User:       s.User,
		NoNewPrivs: s.NoNewPrivs,
	}
	if p.group != nil {
		orders.Cgroup = []byte(p.group.dir)
	}
	p.send(orders)
	if err := <-p.started; err != nil {
		<-p.done
		return nil, err
	}
	return p, nil
}

func (s *Spec) check() error {
	for _, texts := range [][]string{{s.Path, s.Dir}, s.Args, s.Env} {
		for _, text := range texts {
			if strings.Contains(text, "\x00") {
				return fmt.Errorf("start %q: %q contains a NUL byte, which no process can be given", s.Path, text)
			}
		}
	}
	if s.Path == "" {
		return errors.New("start a command: it has no path")
	}
	if s.Files != nil && len(s.Files) != 3 {
		return fmt.Errorf("start %q: %d files instead of stdin, stdout and stderr", s.Path, len(s.Files))
	}
	return nil
}

// Try starts a guard without a command, and returns an error if it does not get as far as its orders.
//
// A guard is this program, without main and with an empty environment. Packages that the linker has put
// in front of this one are initialised in it, too, and one that ends the process for want of a variable
// would end every command.
func Try() error {
	var output bytes.Buffer
	_, err := Start(Spec{Path: "/dev/null/onejob", Output: &output, Deadline: boottime.Now().Add(time.Minute)}) // there is no such program
	if errors.Is(err, ErrGuardDied) || errors.Is(err, ErrExhausted) && output.Len() > 0 {
		return fmt.Errorf("no command can be started, as the guard of each is this program without main and with an empty environment, and ended early: %w; it said %q: let no init function or package variable end it", err, output.String())
	}
	return nil
}

// CheckProc returns an error if /proc is not mounted, or shows the processes of another PID namespace.
// Guards find there what they have to kill: they would find nothing, or strangers.
func CheckProc() error {
	if err := procfs.Mounted(); err != nil {
		return err
	}
	if procfs.Place() == "" {
		return errors.New("/proc is that of another PID namespace, so no process of a command could be found there: mount it anew (unshare --mount-proc)")
	}
	return nil
}

// Extend moves the deadline. It comes too late, and is not obeyed, when the
// guard has seen the old one pass.
func (p *Process) Extend(deadline boottime.Instant) {
	p.mu.Lock()
	p.deadline = deadline
	p.mu.Unlock()
	p.send(order{Deadline: &deadline})
}

// Signal sends sig to the command's process group.
func (p *Process) Signal(sig syscall.Signal) {
	p.send(order{Signal: int(sig)})
}

// Stop asks everything to end with SIGTERM, and kills what is left after the
// grace, or at the deadline if that is sooner. It does not wait.
func (p *Process) Stop() { p.end(order{Stop: true}, p.grace) }

// Kill kills everything. It does not wait.
func (p *Process) Kill() { p.end(order{Kill: true}, 0) }

func (p *Process) end(o order, within time.Duration) {
	p.mu.Lock()
	if by := boottime.Now().Add(within); p.stopBy == 0 || by.Before(p.stopBy) {
		p.stopBy = by
	}
	p.mu.Unlock()
	p.send(o)
}

// Done is closed when Wait would return at once.
func (p *Process) Done() <-chan struct{} { return p.done }

// Wait returns when neither the command nor anything it started is left, and
// all output has been written. Every call returns the same.
func (p *Process) Wait() (Exit, error) {
	<-p.done
	return p.exit, p.err
}

// Ended returns when neither the command nor anything it had started was left. It waits
// as Wait does.
func (p *Process) Ended() boottime.Instant {
	<-p.done
	return p.ended
}

// send gives the guard a line of JSON. What cannot be sent is lost: the guard
// is dead, or has not read for so long that watchClock will see to it.
func (p *Process) send(v any) {
	line, _ := json.Marshal(v) // our own types
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, isPlan := v.(plan); isPlan {
		// It may be larger than the socket's buffer; the guard is about to read it.
		_ = p.link.SetWriteDeadline(time.Now().Add(10 * time.Second))
	} else {
		_ = p.link.SetWriteDeadline(time.Now().Add(time.Second))
	}
	_, _ = p.link.Write(append(line, '\n'))
}

// crashed is the exit code of a Go program whose runtime gives up: as when it cannot have
// another thread, or memory, before main.
const crashed = 2

// follow reads what the guard reports, waits for it to exit and sets exit and err.
func (p *Process) follow() {
	read := json.NewDecoder(p.link)
	var first, last report
	running := false
	err := read.Decode(&first)
	switch {
	case err != nil:
	case first.Expired:
		p.err = ErrExpired
	case first.Exhausted:
		p.err = fmt.Errorf("%w: %s", ErrExhausted, first.Failed)
	case first.Failed != "":
		p.err = errors.New(first.Failed)
	default:
		running = true
		p.started <- nil
		if err = read.Decode(&last); err == nil && last.Ended != nil {
			p.exit, p.ended = *last.Ended, last.At
		}
	}
	_ = p.guard.Kill() // it has no more to do
	p.group.destroy()  // if the guard could not
	if err != nil {
		sweep(p.guard.Pid, p.mark)
	}
	state, waitErr := p.guard.Wait()
	if err != nil {
		p.err = fmt.Errorf("%w (guard: %v)", ErrGuardDied, state)
		if first == (report{}) && !running && state.ExitCode() == crashed {
			p.err = fmt.Errorf("%w: the guard could not be started (%v)", ErrExhausted, state)
		}
	} else if waitErr != nil {
		p.err = fmt.Errorf("wait for the guard process: %w", waitErr)
	}
	if p.ended == 0 {
		p.ended = boottime.Now()
	}
	close(p.reaped)
	p.mu.Lock()
	_ = p.link.Close()
	p.mu.Unlock()
	select {
	case p.started <- p.err:
	default:
	}
}

// watchClock kills a guard that does not do its duty: it is late, or somebody has stopped
// it (SIGSTOP), so that it would neither end the command nor report that it has ended.
// Ticks are counted rather than time: after a suspend, guard and daemon wake together and
// the guard gets its chance.
func (p *Process) watchClock() {
	tick := time.NewTicker(lapse / 2)
	defer tick.Stop()
	late := 0
	for {
		select {
		case <-p.reaped:
			return
		case <-tick.C:
		}
		if p.mustEnd().Add(lapse).Passed() || stopped(p.guard.Pid) {
			late++
		} else {
			late = 0
		}
		if late == 4 {
			_ = p.guard.Kill()
		}
	}
}

// stopped reports whether a process was stopped by SIGSTOP or the like.
func stopped(pid int) bool {
	p, err := procfs.Read(pid)
	return err == nil && p.Stopped
}

func (p *Process) mustEnd() boottime.Instant {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopBy != 0 {
		return min(p.deadline, p.stopBy)
	}
	return p.deadline
}

// copyOutput takes output from the pipe until it is closed, even if w fails:
// a command must not hang because nobody reads.
func (p *Process) copyOutput(w io.Writer, pipe *os.File) {
	defer pipe.Close()
	if w != nil {
		if _, err := io.Copy(w, pipe); err == nil {
			return
		}
	}
	_, _ = io.Copy(io.Discard, pipe)
}

// stdinFile returns a file in memory with the command's stdin in it: nobody
// has to write while the command reads, or does not.
func stdinFile(content []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate("onejob-stdin", unix.MFD_CLOEXEC|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3
		fd, err = unix.MemfdCreate("onejob-stdin", unix.MFD_CLOEXEC)
	}
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "stdin")
	if _, err := f.Write(content); err != nil {
		_ = f.Close()
		return nil, err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// unmarked returns a copy of env without the marks of other guards, which the
// daemon may run under itself.
func unmarked(env []string) []string {
	return slices.DeleteFunc(slices.Clone(env), func(entry string) bool {
		return strings.HasPrefix(entry, envKey+"=") || strings.HasPrefix(entry, envOuter+"=")
	})
}

// marks returns the variables by which what a guard's command starts is found: the guard's mark, and those
// that this process has, as "onejob lock" in a command does. If the guard of that command dies alone, its
// daemon finds with them what is in other sessions, under another guard.
func marks(own string) []string {
	outer := strings.Trim(os.Getenv(envKey)+","+os.Getenv(envOuter), ",")
	if outer == "" {
		return []string{own}
	}
	return []string{own, envOuter + "=" + outer}
}

// socketPair returns the daemon's end, which has deadlines, and the guard's.
func socketPair() (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	if err := unix.SetNonblock(fds[0], true); err != nil {
		_, _ = unix.Close(fds[0]), unix.Close(fds[1])
		return nil, nil, err
	}
	return os.NewFile(uintptr(fds[0]), "guard"), os.NewFile(uintptr(fds[1]), "daemon"), nil
}

// shown is how ps names the command of a guard: without its directory, which
// may contain the daemon's name.
func shown(path string) string {
	return daemonName.ReplaceAllString(filepath.Base(path), "one-job")
}

var daemonName = regexp.MustCompile("(?i)onejob")

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close() // does nothing to nil
	}
}
