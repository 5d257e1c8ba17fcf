//go:build linux

package guard

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"onejob/internal/procfs"
)

// Every command has a cgroup of its own, where cgroup v2 can be written:
//
//	<base>                     the daemon's own cgroup when it started
//	<base>/onejob-daemon       the daemon and its guards, if controllers are enabled for attempts (EnableLimits)
//	<base>/onejob-attempts/X   one attempt
//
// A process is born inside and its descendants stay inside, whatever they do
// with sessions, groups, parents and their environment. Only a user who may write to
// another cgroup's cgroup.procs can leave: root, and the user to whom the
// hierarchy was delegated.
//
// Daemon and guard hold a lock (flock) on the directory, through one open file
// that they share. So a directory that can be locked belongs to nobody alive,
// which needs no process ids and holds across PID namespaces.
const (
	attemptsDir = "onejob-attempts"
	daemonLeaf  = "onejob-daemon"
)

func (l Limits) controllers() []string {
	var all []string
	if l.Memory > 0 {
		all = append(all, "memory")
	}
	if l.PIDs > 0 {
		all = append(all, "pids")
	}
	if l.CPU > 0 {
		all = append(all, "cpu")
	}
	return all
}

// delegation is what to do about a missing cgroup.
const delegation = "under systemd set Delegate=yes and DelegateSubgroup=" + daemonLeaf +
	"; in a container make /sys/fs/cgroup writable"

// hierarchy is the part of cgroup v2 in which this daemon may make cgroups.
type hierarchy struct {
	base string
	root bool // base is the root of all, where processes do not prevent controllers
	ours bool // base is the root of a cgroup namespace: a container, in which all is ours
}

// ourHierarchy looks once: what the daemon does later (EnableLimits) moves it to
// a leaf.
var ourHierarchy = sync.OnceValues(func() (hierarchy, error) {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return hierarchy{}, err
	}
	groups, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return hierarchy{}, err
	}
	own, err := locate(string(mounts), string(groups))
	if err != nil {
		return hierarchy{}, err
	}
	if !slices.Contains(strings.Fields(readAll(filepath.Join(own, "cgroup.procs"))), strconv.Itoa(os.Getpid())) {
		return hierarchy{}, fmt.Errorf("cgroup %s does not list this process", own)
	}
	h, err := openHierarchy(own)
	h.ours = !h.root && strings.Contains("\n"+string(groups), "\n0::/\n")
	return h, err
})

// CgroupError returns why commands do not get a cgroup of their own, or nil if
// they do.
func CgroupError() error {
	_, err := ourHierarchy()
	return err
}

// locate returns the directory of a process's own cgroup, from what
// /proc/PID/mountinfo and /proc/PID/cgroup say.
func locate(mountinfo, cgroup string) (string, error) {
	own := ""
	for line := range strings.Lines(cgroup) {
		if path, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); ok {
			own = path
		}
	}
	if own == "" {
		return "", errors.New("this process is in no cgroup of version 2")
	}
	found := false
	for line := range strings.Lines(mountinfo) {
		mount, kind, _ := strings.Cut(line, " - ")
		fields := strings.Fields(mount)
		if !strings.HasPrefix(kind, "cgroup2 ") || len(fields) < 5 {
			continue
		}
		found = true
		root, point := unescape(fields[3]), unescape(fields[4])
		if strings.HasPrefix(root, "/..") || strings.HasPrefix(own, "/..") {
			continue // outside of this cgroup namespace
		}
		if below, err := filepath.Rel(root, own); err == nil && filepath.IsLocal(below) {
			return filepath.Join(point, below), nil
		}
	}
	if found {
		return "", fmt.Errorf("this process is in cgroup %s, which is outside of what is mounted", own)
	}
	return "", errors.New("no cgroup hierarchy of version 2 is mounted")
}

// unescape undoes \040 and the like in mountinfo.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// openHierarchy makes the directory for attempts, or says why it cannot.
func openHierarchy(own string) (hierarchy, error) {
	h := hierarchy{base: own}
	if filepath.Base(own) == daemonLeaf {
		h.base = filepath.Dir(own)
	}
	_, err := os.Stat(filepath.Join(h.base, "cgroup.type"))
	h.root = errors.Is(err, fs.ErrNotExist)
	if err := os.Mkdir(h.attempts(), 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return h, fmt.Errorf("make a cgroup: %w", err)
	}
	// To move a process one must be able to write to both ends and what is above them.
	for _, file := range []string{filepath.Join(h.base, "cgroup.procs"), filepath.Join(h.attempts(), "cgroup.procs"), h.attempts()} {
		if err := unix.Faccessat(unix.AT_FDCWD, file, unix.W_OK, unix.AT_EACCESS); err != nil {
			return h, fmt.Errorf("write to cgroup %s: %w", file, err)
		}
	}
	if kind := readLine(filepath.Join(h.attempts(), "cgroup.type")); kind != "domain" {
		return h, fmt.Errorf("cgroup %s is of type %q, which holds no processes", h.attempts(), kind)
	}
	return h, nil
}

func (h hierarchy) attempts() string { return filepath.Join(h.base, attemptsDir) }

// EnableLimits makes the limits l available to commands that are started from now on, or
// says what to do. It may move this process, and guards, into a leaf of its cgroup: a cgroup whose
// children have controllers must not have processes itself.
func EnableLimits(l Limits) error {
	want := l.controllers()
	if len(want) == 0 {
		return nil
	}
	h, err := ourHierarchy()
	if err != nil {
		return fmt.Errorf("limits on commands need a writable cgroup of version 2: %w; %s, or remove the limits", err, delegation)
	}
	return h.enable(want)
}

func (h hierarchy) enable(controllers []string) error {
	has := strings.Fields(readLine(filepath.Join(h.base, "cgroup.controllers")))
	for _, c := range controllers {
		if !slices.Contains(has, c) {
			return fmt.Errorf("limits on commands need the controller %s, and cgroup %s has only %q (one that is mounted as version 1 does not count); %s, or remove the limits",
				c, h.base, has, delegation)
		}
	}
	if !enabled(h.base, controllers) {
		if err := h.leave(); err != nil {
			return err
		}
	}
	for _, dir := range []string{h.base, h.attempts()} {
		if enabled(dir, controllers) {
			continue
		}
		err := write(filepath.Join(dir, "cgroup.subtree_control"), "+"+strings.Join(controllers, " +"))
		if errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("limits on commands need a cgroup without other processes, and %s holds %q; %s, or remove the limits",
				dir, strings.Fields(readAll(filepath.Join(dir, "cgroup.procs"))), delegation)
		} else if err != nil {
			return fmt.Errorf("enable controllers of cgroup %s: %w; %s, or remove the limits", dir, err, delegation)
		}
	}
	return nil
}

// leave moves this process from the base into a leaf, if it is there, and with
// it a parent that is the same program and all that this process has started, such as the guards
// of commands that run while the configuration is reloaded. In a container all others are moved
// as well, such as its init process.
func (h hierarchy) leave() error {
	if h.root {
		return nil
	}
	leaf := filepath.Join(h.base, daemonLeaf)
	if err := os.Mkdir(leaf, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make a cgroup for the daemon: %w; %s, or remove the limits", err, delegation)
	}
	ours := map[int]bool{os.Getpid(): true}
	if parent := os.Getppid(); nameOf(parent) == nameOf(os.Getpid()) {
		ours[parent] = true
	}
	if err := h.move(leaf, ours); err != nil {
		return err
	}
	// What is started from here on is born in the leaf.
	started, _ := procfs.Below(os.Getpid(), nil) // without it, the kernel refuses the controllers
	for _, p := range started {
		ours[p.PID] = true
	}
	return h.move(leaf, ours)
}

// move moves to a leaf what is in the base of some processes, or in a container of all.
func (h hierarchy) move(leaf string, ours map[int]bool) error {
	for _, field := range strings.Fields(readAll(filepath.Join(h.base, "cgroup.procs"))) {
		pid, err := strconv.Atoi(field)
		if err != nil || !h.ours && !ours[pid] {
			continue
		}
		if err := write(filepath.Join(leaf, "cgroup.procs"), field); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("move process %d into cgroup %s: %w; %s, or remove the limits", pid, leaf, err, delegation)
		}
	}
	return nil
}

func enabled(dir string, controllers []string) bool {
	has := strings.Fields(readLine(filepath.Join(dir, "cgroup.subtree_control")))
	return !slices.ContainsFunc(controllers, func(c string) bool { return !slices.Contains(has, c) })
}

// cgroup is that of one attempt.
type cgroup struct {
	dir  string
	lock *os.File // nil in the guard, which holds it by its number
}

// newCgroup makes a cgroup with these limits, and locks it.
func (h hierarchy) newCgroup(l Limits) (*cgroup, error) {
	for range 10 {
		dir := filepath.Join(h.attempts(), rand.Text())
		// The command may read its limits by their names, and not lock the directory.
		err := os.Mkdir(dir, 0o711)
		if errors.Is(err, fs.ErrNotExist) { // somebody tidied up
			if os.Mkdir(h.attempts(), 0o755) == nil {
				_ = h.enable(l.controllers()) // which it had; if it has not now, the limit says so
			}
			continue
		} else if err != nil {
			return nil, fmt.Errorf("%w: make a cgroup for it: %w", ErrExhausted, err)
		}
		lock, err := lockDir(dir)
		if err != nil {
			_ = os.Remove(dir)
			return nil, fmt.Errorf("%w: make a cgroup for it: %w", ErrExhausted, err)
		}
		if lock == nil {
			continue // a Sweep was quicker, and takes it for a leftover
		}
		g := &cgroup{dir, lock}
		if err := g.limit(l); err != nil {
			g.destroy()
			return nil, fmt.Errorf("%w: %w", ErrExhausted, err)
		}
		return g, nil
	}
	return nil, fmt.Errorf("%w: make a cgroup for it: those in %s are removed by somebody else", ErrExhausted, h.attempts())
}

// lockDir returns a directory, locked, or nil if somebody else has locked or
// removed it.
func lockDir(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	ours, statErr := f.Stat()
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	there, goneErr := os.Stat(dir)
	if err != nil || statErr != nil || goneErr != nil || !os.SameFile(ours, there) {
		_ = f.Close()
		if err == nil || errors.Is(err, unix.EWOULDBLOCK) {
			return nil, nil
		}
		return nil, fmt.Errorf("lock cgroup %s: %w", dir, err)
	}
	return f, nil
}

func (g *cgroup) limit(l Limits) error {
	const period = 100000 // microseconds
	set := func(what, file, value string) error {
		if err := write(filepath.Join(g.dir, file), value); err != nil {
			return fmt.Errorf("limit the %s of the command to %s: %w", what, value, err)
		}
		return nil
	}
	var errs []error
	if l.Memory > 0 {
		errs = append(errs, set("memory", "memory.max", strconv.FormatInt(l.Memory, 10)))
		// Half a command is of no use. Before Linux 4.19 there is no such file.
		_ = write(filepath.Join(g.dir, "memory.oom.group"), "1")
	}
	if l.PIDs > 0 {
		errs = append(errs, set("processes", "pids.max", strconv.Itoa(l.PIDs)))
	}
	if l.CPU > 0 {
		errs = append(errs, set("processor time", "cpu.max", fmt.Sprintf("%d %d", max(int(l.CPU*period), 1000), period)))
	}
	return errors.Join(errs...)
}

// populated reports whether any process is left, or may be: what cannot be looked at for want of files
// or memory is not gone.
func (g *cgroup) populated() bool {
	if g == nil {
		return false
	}
	events, err := os.ReadFile(filepath.Join(g.dir, "cgroup.events"))
	return exhausted(err) || strings.Contains(string(events), "populated 1")
}

// outOfMemory reports whether a process was killed for want of memory.
func (g *cgroup) outOfMemory() bool {
	if g == nil {
		return false
	}
	for line := range strings.Lines(readAll(filepath.Join(g.dir, "memory.events"))) {
		if count, ok := strings.CutPrefix(line, "oom_kill "); ok {
			return strings.TrimSpace(count) != "0"
		}
	}
	return false
}

// kill kills every process, those that are being forked included.
func (g *cgroup) kill() {
	if g == nil {
		return
	}
	if err := write(filepath.Join(g.dir, "cgroup.kill"), "1"); err != nil {
		g.killEach()
	}
}

// killEach does it without cgroup.kill, which came with Linux 5.14. Frozen
// processes do not fork, and still die of SIGKILL.
func (g *cgroup) killEach() {
	_ = write(filepath.Join(g.dir, "cgroup.freeze"), "1")
	var those []procfs.Process
	for _, pid := range g.processes() {
		if p, err := procfs.Read(pid); err == nil {
			those = append(those, p)
		}
	}
	still := g.processes() // or a number was another one's when it was looked up
	for _, p := range those {
		if slices.Contains(still, p.PID) {
			_ = p.Signal(unix.SIGKILL)
		}
	}
}

// processes returns those of the cgroup and of all below it.
func (g *cgroup) processes() (pids []int) {
	g.walk(func(dir string) {
		for _, field := range strings.Fields(readAll(filepath.Join(dir, "cgroup.procs"))) {
			if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
				pids = append(pids, pid)
			}
		}
	})
	return pids
}

// walk calls f for every cgroup of the tree, children first.
func (g *cgroup) walk(f func(dir string)) {
	entries, _ := os.ReadDir(g.dir)
	for _, e := range entries {
		if e.IsDir() {
			(&cgroup{dir: filepath.Join(g.dir, e.Name())}).walk(f)
		}
	}
	f(g.dir)
}

// remove removes the cgroup and all below it. It has no processes any more.
func (g *cgroup) remove() {
	if g != nil && unix.Rmdir(g.dir) != nil {
		g.walk(func(dir string) { _ = unix.Rmdir(dir) })
	}
}

// killAll kills until nothing is left, or until a moment has passed unless that
// is zero. It reports whether nothing is left.
func (g *cgroup) killAll(until time.Time) bool {
	for pause := time.Millisecond; g.populated(); pause = min(2*pause, 50*time.Millisecond) {
		if !until.IsZero() && time.Now().After(until) {
			return false
		}
		g.kill()
		time.Sleep(pause)
	}
	return true
}

// destroy kills what is left, removes the cgroup and unlocks it.
func (g *cgroup) destroy() {
	if g == nil {
		return
	}
	// Only an empty one can be removed, and for that no file needs to be opened: who cannot open any
	// does not wait here for those that this process has opened itself.
	if err := unix.Rmdir(g.dir); err != nil && err != unix.ENOENT {
		g.killAll(time.Time{})
		g.remove()
	}
	_ = g.lock.Close()
}

// write writes to a file of the kernel's.
func write(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0) // never create one
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

func readAll(path string) string {
	text, _ := os.ReadFile(path)
	return string(text)
}

func readLine(path string) string { return strings.TrimSpace(readAll(path)) }
