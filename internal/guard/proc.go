package guard

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// proc is a line of /proc/PID/stat.
type proc struct {
	pid, parent, group, session int
	dead                        bool   // a zombie, or on the way to be one
	stopped                     bool   // by SIGSTOP or the like
	start                       uint64 // in clock ticks since the machine was started
}

// processes returns the machine's processes, as far as this user may see them.
// It is no snapshot: what is forked while it reads may be missing.
func processes() ([]proc, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	var all []proc
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		stat, err := os.ReadFile("/proc/" + name + "/stat")
		if err != nil {
			continue // it is gone
		}
		p, err := parseStat(pid, stat)
		if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	return all, nil
}

// parseStat reads "pid (name) state parent group session ..."; the name may
// contain anything, parentheses too. The start is the 22nd field.
func parseStat(pid int, stat []byte) (proc, error) {
	p := proc{pid: pid}
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 20 {
		return p, fmt.Errorf("/proc/%d/stat: cannot make sense of %q", pid, stat)
	}
	p.dead = bytes.ContainsAny(fields[0], "ZXx")
	p.stopped = bytes.ContainsAny(fields[0], "T")
	for i, n := range []*int{&p.parent, &p.group, &p.session} {
		var err error
		if *n, err = strconv.Atoi(string(fields[i+1])); err != nil {
			return p, fmt.Errorf("/proc/%d/stat: %w", pid, err)
		}
	}
	var err error
	if p.start, err = strconv.ParseUint(string(fields[19]), 10, 64); err != nil {
		return p, fmt.Errorf("/proc/%d/stat: %w", pid, err)
	}
	return p, nil
}

// descendants returns the children of root, their children, and so on.
func descendants(root int) ([]proc, error) {
	all, err := processes()
	if err != nil {
		return nil, err
	}
	children := make(map[int][]proc)
	for _, p := range all {
		children[p.parent] = append(children[p.parent], p)
	}
	found := children[root]
	for i := 0; i < len(found); i++ {
		found = append(found, children[found[i].pid]...)
	}
	return found, nil
}

// sweep kills what a dead guard has left behind: all of its session, and every
// process with mark in its environment. It returns when none is left.
//
// The guard must not have been reaped yet: its process id, which is the
// session's, must not go to somebody else.
func sweep(guard int, mark string) {
	// A process in the middle of an exec shows no environment, so one look
	// that finds nothing is not enough.
	for quiet := 0; quiet < 3; {
		if killMarked(guard, mark) {
			quiet = 0
		} else {
			quiet++
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func killMarked(guard int, mark string) (found bool) {
	all, err := processes()
	if err != nil {
		return false
	}
	for _, p := range all {
		if p.pid == guard || p.dead {
			continue
		}
		if p.session == guard || markOf(p.pid) == mark {
			found = true
			_ = unix.Kill(p.pid, syscall.SIGKILL)
		}
	}
	return found
}
