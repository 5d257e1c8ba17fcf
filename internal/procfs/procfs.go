// Package procfs reads what Linux tells of a process in /proc.
package procfs

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Children returns the children of all threads of a process, dead ones that
// nobody has waited for included. A process that is not there has none.
func Children(pid int) []int {
	var children []int
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, file := range files {
		text, _ := os.ReadFile(file) // the thread may be gone by now
		for _, field := range strings.Fields(string(text)) {
			if child, err := strconv.Atoi(field); err == nil {
				children = append(children, child)
			}
		}
	}
	return children
}

// Below returns the children of root, their children, and so on. Those for which skip returns true
// are left out with all that is below them; nil is for none. What forks, or loses its parent, meanwhile
// may be missing, but none is among them that was not below root. With an error, which is as that of
// Processes, there may be more than those.
func Below(root int, skip func(Process) bool) (below []Process, err error) {
	all, err := Processes()
	children := map[int][]Process{}
	for _, p := range all {
		if skip == nil || !skip(p) {
			children[p.Parent] = append(children[p.Parent], p)
		}
	}
	found := children[root]
	for i := 0; i < len(found); i++ {
		found = append(found, children[found[i].PID]...)
	}
	below, unread := confirm(root, found)
	return below, cmp.Or(unread, err)
}

// confirm returns those that are still what they were found as, and below root. To read all of /proc
// takes a while: the number of a parent that was read early may be that of another process by the time
// its children are read. Parents come before their children here, so one that was confirmed has had
// its number since before its children were found.
func confirm(root int, found []Process) (below []Process, unread error) {
	sure := map[int]bool{root: true}
	for _, p := range found {
		now, err := Read(p.PID)
		switch {
		case err != nil && !hidden(err) && !errors.Is(err, ErrOdd):
			unread = err
		case err == nil && now.Start == p.Start && sure[now.Parent]:
			sure[p.PID] = true
			below = append(below, now)
		}
	}
	return below, unread
}

// A Process is a line of /proc/PID/stat.
type Process struct {
	PID, Parent, Group, Session int
	Dead                        bool   // a zombie, or on the way to be one, with all its threads
	Stopped                     bool   // by SIGSTOP or the like
	Start                       uint64 // in clock ticks since the machine was started

	threads int
}

// Processes returns the machine's processes, as far as this user may see them. It is
// no snapshot: what is forked while it reads may be missing. With an error it returns those that
// it could read: it wraps ErrOdd if a line cannot be understood, and else this process cannot
// read files now, as when it has too many open.
func Processes() ([]Process, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	var all []Process
	var odd, unread error
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		p, err := Read(pid)
		switch {
		case err == nil:
			all = append(all, p)
		case errors.Is(err, ErrOdd):
			odd = err
		case !hidden(err):
			unread = err
		}
	}
	return all, cmp.Or(unread, odd)
}

// hidden reports whether an error says that a process is gone, or not ours to see.
func hidden(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) || errors.Is(err, fs.ErrPermission)
}

// ErrOdd says that a line of /proc cannot be understood.
var ErrOdd = errors.New("a line of /proc cannot be understood")

// Read returns one process. The error wraps ErrOdd, or says that there is none, or is that of
// reading a file.
func Read(pid int) (Process, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return Process{}, err
	}
	p, err := parse(pid, stat)
	p.Dead = p.Dead && p.threads <= 1 // the main thread may end before the others
	return p, err
}

// Environ returns the environment that a process was started with, as in
// /proc/PID/environ; nothing if this user may not read it. Once the main thread has
// ended, it is there for the other threads alone. It fails if this process cannot read files
// now.
func Environ(pid int) ([]byte, error) {
	environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if len(environ) > 0 || errors.Is(err, fs.ErrPermission) {
		return environ, nil
	}
	if err != nil && !hidden(err) {
		return nil, err
	}
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	for _, thread := range threads {
		if environ, err = os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/environ", pid, thread.Name())); len(environ) > 0 {
			return environ, nil
		}
		if err != nil && !hidden(err) {
			return nil, err
		}
	}
	if err != nil && !hidden(err) {
		return nil, err
	}
	return nil, nil
}

// parse reads "pid (name) state parent group session ..." of a thread; the name may
// contain anything, parentheses too. The number of threads is the 20th field, the start
// the 22nd.
func parse(pid int, stat []byte) (Process, error) {
	p := Process{PID: pid}
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 20 {
		return p, fmt.Errorf("%w: /proc/%d/stat: %q", ErrOdd, pid, stat)
	}
	p.Dead = bytes.ContainsAny(fields[0], "ZXx")
	p.Stopped = bytes.ContainsAny(fields[0], "T")
	for i, n := range map[int]*int{1: &p.Parent, 2: &p.Group, 3: &p.Session, 17: &p.threads} {
		var err error
		if *n, err = strconv.Atoi(string(fields[i])); err != nil {
			return p, fmt.Errorf("%w: /proc/%d/stat: %w", ErrOdd, pid, err)
		}
	}
	var err error
	if p.Start, err = strconv.ParseUint(string(fields[19]), 10, 64); err != nil {
		return p, fmt.Errorf("%w: /proc/%d/stat: %w", ErrOdd, pid, err)
	}
	return p, nil
}

// Mounted returns an error that says what to do if /proc is not mounted, as after chroot.
func Mounted() error {
	if _, err := os.Lstat("/proc/self"); errors.Is(err, fs.ErrNotExist) {
		return errors.New("/proc is not mounted, so neither onejob's own program nor any process could be found there: mount it (mount -t proc proc /proc)")
	}
	return nil
}

// Place names the world in which numbers and start times of processes mean the same:
// PID and time namespaces change those. It is empty if /proc is that of another one.
func Place() string {
	if self, err := os.Readlink("/proc/self"); err != nil || self != strconv.Itoa(os.Getpid()) {
		return ""
	}
	var names []string
	for _, kind := range []string{"pid", "time"} { // time is from Linux 5.6 on
		namespace, _ := os.Readlink("/proc/self/ns/" + kind)
		names = append(names, strings.Trim(strings.TrimPrefix(namespace, kind+":"), "[]"))
	}
	return strings.Join(names, ".")
}

// Machine is Place for processes of other machines, and of times before the machine was
// started, to compare. A virtual machine that is cloned while it runs has the same.
func Machine() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if place := Place(); err == nil && place != "" {
		return strings.TrimSpace(string(boot)) + "." + place
	}
	return ""
}

// Started returns when this process was, as in Process; zero if that is unknown.
func Started() uint64 {
	p, _ := Read(os.Getpid())
	return p.Start
}

// Gone reports whether the process that had this number, and was started then, has
// ended for certain. It must have been of our Place. One that its parent has not waited
// for, as process 1 of some containers does not, has ended.
func Gone(pid int, start uint64) bool {
	if pid < 1 || start == 0 {
		return false
	}
	if unix.Kill(pid, 0) == unix.ESRCH {
		return true
	}
	now, err := Read(pid) // the number may have been given to another one
	return err == nil && (now.Dead || now.Start != start)
}
