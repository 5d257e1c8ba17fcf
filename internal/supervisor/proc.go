package supervisor

import (
	"bytes"
	"fmt"
	"os"
	"strconv"

	"onejob/internal/procfs"
)

// proc is a line of /proc/PID/stat.
type proc struct {
	pid, parent int
	started     uint64 // in clock ticks since the machine was booted
	dead        bool   // a zombie, or on the way to be one
}

// descendants returns the living children of root, their children, and so on. Those
// for which skip returns true are left out with all that is below them.
func descendants(root int, skip func(proc) bool) (living []proc) {
	children := map[int][]proc{}
	for _, p := range processes() {
		children[p.parent] = append(children[p.parent], p)
	}
	for below := children[root]; len(below) > 0; {
		p := below[0]
		below = below[1:]
		if skip(p) {
			continue
		}
		if !p.dead {
			living = append(living, p)
		}
		below = append(below, children[p.pid]...)
	}
	return living
}

// processes returns the machine's processes, as far as this user may see them. It is
// no snapshot: what is forked while it reads may be missing.
func processes() (all []proc) {
	// It may be that of another namespace, where our numbers are those of others.
	if self, err := os.Readlink("/proc/self"); err != nil || self != strconv.Itoa(os.Getpid()) {
		return nil
	}
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		stat, err := os.ReadFile("/proc/" + name + "/stat")
		if err != nil {
			continue // it is gone
		}
		if p, ok := parseStat(pid, stat); ok {
			all = append(all, p)
		}
	}
	return all
}

// parseStat reads "pid (name) state parent ..."; the name may contain anything,
// parentheses too.
func parseStat(pid int, stat []byte) (p proc, ok bool) {
	const parent, started = 1, 19 // counted from the state
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) <= started {
		return p, false
	}
	p = proc{pid: pid, dead: bytes.ContainsAny(fields[0], "ZXx")}
	var err1, err2 error
	p.parent, err1 = strconv.Atoi(string(fields[parent]))
	p.started, err2 = strconv.ParseUint(string(fields[started]), 10, 64)
	return p, err1 == nil && err2 == nil
}

// Find returns the working process of a supervisor: its child with the same arguments
// and another environment, unlike a child that is about to execute something else. For a
// process that has none it returns the process itself.
func Find(pid int) int {
	read := func(pid int, name string) []byte {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
		return text
	}
	args, env := read(pid, "cmdline"), read(pid, "environ")
	for _, child := range procfs.Children(pid) {
		if len(args) > 0 && bytes.Equal(read(child, "cmdline"), args) && !bytes.Equal(read(child, "environ"), env) {
			return child
		}
	}
	return pid
}
