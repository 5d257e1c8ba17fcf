//go:build linux

package guard

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"onejob/boottime"
	"onejob/internal/procfs"
)

// The guard runs in an init function because it must be available in every
// binary that links this package, tests and users' own mains included, without
// a call that somebody could forget. It ends the process: no main ever runs in
// a guard. The runtime keeps init functions on the main thread, which lives as
// long as the process: the command's PDEATHSIG is tied to the thread that
// started it.
func init() {
	if len(os.Args) > 0 && os.Args[0] == argv0 {
		// First of all, before there is a command that could look.
		if err := Conceal(); err != nil {
			fmt.Fprintf(os.Stderr, "%s %v\n", argv0, err)
			os.Exit(2)
		}
		os.Exit(keep())
	}
}

// keep is the whole life of a guard.
func keep() int {
	runtime.LockOSThread()
	if name, err := unix.BytePtrFromString(comm); err == nil {
		_ = unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(name)), 0, 0, 0)
	}

	// These are caught and dropped, not ignored: the command would inherit it.
	signal.Notify(make(chan os.Signal, 1), unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGPIPE,
		unix.SIGALRM, unix.SIGTERM, unix.SIGUSR1, unix.SIGUSR2)
	children := make(chan os.Signal, 1)
	signal.Notify(children, unix.SIGCHLD)

	link := os.NewFile(linkFD, "link")
	read, tell := json.NewDecoder(link), json.NewEncoder(link)
	var p plan
	if err := read.Decode(&p); err != nil {
		fmt.Fprintf(os.Stderr, "%s %v: it is started by onejob, not by hand\n", argv0, err)
		return 2
	}
	k, err := start(p)
	if err != nil {
		_ = tell.Encode(report{Failed: err.Error(), Expired: errors.Is(err, ErrExpired), Exhausted: exhausted(err)})
		return 1
	}
	// From here on nobody but the daemon can be told of an error, and it may
	// be dead.
	_ = tell.Encode(report{})

	orders := make(chan order)
	go func() { // ends with the process
		defer close(orders)
		for {
			var o order
			if read.Decode(&o) != nil {
				return
			}
			orders <- o
		}
	}()
	exit := k.run(orders, children)
	_ = tell.Encode(report{Ended: &exit, At: boottime.Now()})
	return 0
}

// start starts the command of p, unless the deadline has passed.
func start(p plan) (*reaper, error) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("become a child subreaper: %w", err)
	}
	if err := keepFiles(); err != nil {
		return nil, fmt.Errorf("keep open files from the command: %w", err)
	}
	if p.Deadline.Passed() {
		return nil, ErrExpired
	}
	if p.NoNewPrivs {
		// It is this thread that forks, and what it forks inherits it.
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return nil, fmt.Errorf("set no_new_privs: %w", err)
		}
	}
	k := &reaper{captured: p.Captured, grace: p.Grace, deadline: p.Deadline}
	sys := &syscall.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
	if u := p.User; u != nil {
		sys.Credential = &syscall.Credential{Uid: u.UID, Gid: u.GID, Groups: u.Groups}
		if p.Captured { // so that it can open /dev/stdout and the like once more
			_ = unix.Fchown(0, int(u.UID), int(u.GID))
			_ = unix.Fchown(1, int(u.UID), int(u.GID))
		}
	}
	if len(p.Cgroup) > 0 {
		k.group = &cgroup{dir: string(p.Cgroup)}
	}
	argv, dir := unpack(p.Argv), string(p.Dir)
	pid, err := k.fork(p.MoveIn, argv, &syscall.ProcAttr{Dir: dir, Env: unpack(p.Env), Files: []uintptr{0, 1, 2}, Sys: sys})
	if err == syscall.EPERM && p.User != nil {
		return nil, fmt.Errorf("start %s as user %d: %w; the daemon needs root's rights to change users", argv[0], p.User.UID, err)
	} else if err != nil {
		return nil, explain(argv[0], dir, err)
	}
	k.command = pid
	// A pipe that the command closes should look closed to its other end.
	// Stderr stays: should the guard crash, it says so there.
	if null, err := unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0); err == nil {
		_ = unix.Dup3(null, 0, 0)
		_ = unix.Dup3(null, 1, 0)
	}
	return k, nil
}

// fork starts the command inside its cgroup. Kernels before 5.7, and some
// filters of system calls, do not let a process be born there: then the guard
// goes there itself for that moment, and is subject to its limits.
func (k *reaper) fork(moveIn bool, argv []string, attr *syscall.ProcAttr) (pid int, err error) {
	if k.group == nil {
		return syscall.ForkExec(argv[0], argv, attr)
	}
	if !moveIn {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, cgroupFD
		pid, err = syscall.ForkExec(argv[0], argv, attr)
		if err != syscall.ENOSYS && err != syscall.EINVAL && err != syscall.E2BIG {
			return pid, err
		}
		// A kernel that has cgroup.kill, from 5.14 on, says the last two of the command: its
		// arguments may be too long.
		if _, missing := os.Stat(filepath.Join(k.group.dir, "cgroup.kill")); missing == nil && err != syscall.ENOSYS {
			return 0, err
		}
		attr.Sys.UseCgroupFD = false
	}
	mounts, groups := readAll("/proc/self/mountinfo"), readAll("/proc/self/cgroup")
	home, locateErr := locate(mounts, groups)
	if locateErr != nil {
		return 0, locateErr
	}
	if err := write(filepath.Join(k.group.dir, "cgroup.procs"), "0"); err != nil {
		return 0, fmt.Errorf("enter cgroup %s: %w", k.group.dir, err)
	}
	pid, err = syscall.ForkExec(argv[0], argv, attr)
	if backErr := write(filepath.Join(home, "cgroup.procs"), "0"); backErr != nil {
		// Its own cgroup would be killed with the guard in it.
		if err == nil {
			k.group.kill()
		}
		return 0, fmt.Errorf("return to cgroup %s: %w", home, backErr)
	}
	return pid, err
}

// keepFiles keeps every open file but 0, 1 and 2 from the command: the guard's
// own and those that the daemon had inherited.
func keepFiles() error {
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, fd := range fds {
		var n int
		if _, err := fmt.Sscan(fd.Name(), &n); err == nil && n > 2 {
			unix.CloseOnExec(n)
		}
	}
	return nil
}

// explain says why a command could not be started. The kernel gives the same
// few numbers for many reasons.
func explain(path, dir string, err error) error {
	if dir != "" {
		if info, statErr := os.Stat(dir); statErr != nil {
			return fmt.Errorf("start %s: working directory: %w", path, statErr)
		} else if !info.IsDir() {
			return fmt.Errorf("start %s: working directory: %s is not a directory", path, dir)
		}
	}
	info, statErr := os.Stat(path)
	switch {
	case err == unix.ENOEXEC:
		return fmt.Errorf("start %s: %w; if it is a script, its first line must be #! and an interpreter", path, err)
	case err == unix.ENOENT && statErr == nil:
		return fmt.Errorf("start %s: the file is there, but the interpreter that it names is not", path)
	case err == unix.EACCES && statErr == nil && info.IsDir():
		return fmt.Errorf("start %s: it is a directory", path)
	case err == unix.EACCES:
		return fmt.Errorf("start %s: %w; is it executable, and may this user enter its directory?", path, err)
	}
	return fmt.Errorf("start %s: %w", path, err)
}

// reaper is a guard at work. One goroutine owns it, so that what it knows of
// its children does not change between a look and a signal.
type reaper struct {
	command  int  // its process, which leads its group
	captured bool // the daemon reads its output from a pipe
	group    *cgroup
	grace    time.Duration
	deadline boottime.Instant
	clocks   boottime.Jumps

	gone   bool // the command was reaped, with status
	status syscall.WaitStatus

	phase  phase
	reason Reason
	killAt boottime.Instant // while stopping
	pause  time.Duration    // while killing; grows
}

type phase int

const (
	running  phase = iota
	stopping       // SIGTERM was sent
	killing        // SIGKILL is sent until nothing is left
)

// run returns when neither the command nor anything it started is left.
func (k *reaper) run(orders <-chan order, children <-chan os.Signal) Exit {
	for k.reap() || k.group.populated() {
		k.act()
		select {
		case o, open := <-orders:
			if !open {
				orders = nil
				k.daemonDied()
				break
			}
			k.obey(o)
		case <-children:
		case <-time.After(k.maxWait()):
		}
	}
	exit := Exit{Code: k.status.ExitStatus(), Reason: k.reason}
	if k.status.Signaled() {
		exit.Signal = k.status.Signal()
		exit.Code = 128 + int(exit.Signal)
	}
	exit.OutOfMemory = k.group.outOfMemory()
	k.group.remove()
	return exit
}

// reap collects the dead and reports whether anybody is alive. As the guard is
// a subreaper, having no children means having no descendants.
func (k *reaper) reap() (alive bool) {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil: // ECHILD
			return false
		case pid == 0:
			return true
		case pid == k.command && !k.gone: // its number may be another one's since
			k.gone, k.status = true, status
		}
	}
}

// act does what the moment asks for.
func (k *reaper) act() {
	k.look()
	if k.phase == running && k.gone {
		k.phase = killing
	}
	if k.phase == running && k.deadline.Passed() {
		k.stop(LeaseEnded, k.lapsed())
	}
	if k.phase == stopping && k.killAt.Passed() {
		k.phase = killing
	}
	if k.phase == stopping && k.reason != LeaseEnded && k.deadline.Passed() {
		k.phase = killing
	}
	if k.phase == killing {
		// The walk through /proc finds what has left the cgroup.
		k.group.kill()
		k.signalAll(unix.SIGKILL)
		k.killChildren()
	}
}

// killChildren kills the guard's own children until there are no new ones. A process that
// forks, ends, and goes on in its child in a session of its own lives for less time than a
// walk through all of /proc takes. Its children come to the guard, whose list of children is
// short.
func (k *reaper) killChildren() {
	seen, self := map[int]bool{}, os.Getpid()
	for range 1000 {
		news := false
		for _, pid := range procfs.Children(self) {
			news = news || !seen[pid]
			seen[pid] = true
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		if !news || !k.reap() {
			return
		}
	}
}

// lapsed is when the command must be dead whose lease ends at the deadline, however long its grace is.
func (k *reaper) lapsed() boottime.Instant { return k.deadline.Add(min(k.grace, lapse)) }

// look makes the deadline come sooner if the wall clock shows that the machine may have
// been paused.
func (k *reaper) look() {
	jump := k.clocks.Since()
	k.deadline, k.killAt = k.deadline.Add(-jump), k.killAt.Add(-jump)
}

func (k *reaper) obey(o order) {
	switch {
	case o.Deadline != nil:
		if !k.deadline.Passed() {
			k.deadline = *o.Deadline
		}
	case o.Kill:
		k.stop(Stopped, 0)
		k.killAt = 0 // if it was stopping already
	case o.Stop:
		k.stop(Stopped, boottime.Now().Add(k.grace))
	case o.Signal != 0:
		if !k.gone {
			_ = unix.Kill(-k.command, syscall.Signal(o.Signal))
		}
	}
}

// daemonDied is called when the daemon has died. Nobody reads the command's
// output then, and it should not die of SIGPIPE while it cleans up.
func (k *reaper) daemonDied() {
	if k.captured {
		pipe, err := os.OpenFile("/proc/self/fd/2", os.O_RDONLY|unix.O_NONBLOCK, 0)
		if err == nil {
			go io.Copy(io.Discard, pipe) // ends with the process
		}
	}
	k.stop(Stopped, boottime.Now().Add(k.grace))
}

// stop asks everything to end by killAt, once. An exit that came before it
// counts as the command's own.
func (k *reaper) stop(reason Reason, killAt boottime.Instant) {
	k.reap()
	if k.phase != running || k.gone {
		return
	}
	k.phase, k.reason, k.killAt = stopping, reason, killAt
	if killAt.Passed() {
		return
	}
	k.signalAll(unix.SIGTERM)
	k.signalAll(unix.SIGCONT) // what is stopped could not obey
}

// mostPause is between two looks at what cannot be killed, as a process of another user.
const mostPause = 50 * time.Millisecond

// maxWait is how long the guard may wait for something to happen. The timer
// behind it stands still while the machine is suspended, hence the 200 ms.
func (k *reaper) maxWait() time.Duration {
	wait := 200 * time.Millisecond
	switch k.phase {
	case running:
		wait = min(wait, k.deadline.Until())
	case stopping:
		wait = min(wait, k.killAt.Until())
		if k.reason != LeaseEnded {
			wait = min(wait, k.deadline.Until())
		}
	case killing:
		wait = k.pause
		k.pause = min(2*k.pause+time.Millisecond, mostPause)
	}
	return max(wait, 0)
}

// signalAll signals every descendant. Groups are signalled as a whole, which
// no fork can escape; a group belongs to one session, and all who are in the
// sessions of descendants are descendants. Only the guard's own group is not
// the command's. What is forked into a new group meanwhile is found next time.
func (k *reaper) signalAll(sig syscall.Signal) {
	self := os.Getpid()
	groups := make(map[int]bool)
	if !k.gone { // so its number is nobody else's; this works without /proc, too
		groups[k.command] = unix.Kill(-k.command, sig) == nil
	}
	found, _ := procfs.Below(self, nil)
	for _, p := range found {
		if p.Group <= 1 || p.Group == self {
			_ = p.Signal(sig)
		} else if !groups[p.Group] {
			groups[p.Group] = p.SignalGroup(sig) == nil // or another one of it does
		}
	}
}
