//go:build linux

package guard

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
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

// Survivor is a process that outlived both its guard and its daemon.
type Survivor struct {
	PID  int
	Name string // as in ps -o comm
}

// sweepTime is how long Sweep waits for what it has killed.
const sweepTime = 10 * time.Second

// Sweep kills what was started under guards that are dead, for daemons that are
// dead: with cgroups everything, without them what still carries the variable
// ONEJOB_GUARD or has not left the guard's session. It returns when all of it
// is gone, or with an error if something is still there after 10 s.
//
// What a living daemon or guard owns is left alone, and so is, without cgroups,
// what another user or a daemon in another PID or time namespace has started. A guard that is stopped
// (SIGSTOP) and whose daemon is dead counts as dead.
func Sweep() ([]Survivor, error) {
	killed := map[int]string{}
	until := time.Now().Add(sweepTime)
	err := sweepMarked(killed, until)
	if h, unavailable := ourHierarchy(); unavailable == nil {
		err = errors.Join(err, h.sweep(killed, until))
	}
	var all []Survivor
	for _, pid := range slices.Sorted(maps.Keys(killed)) {
		all = append(all, Survivor{pid, killed[pid]})
	}
	return all, err
}

// sweep kills and removes cgroups that nobody has locked.
func (h hierarchy) sweep(killed map[int]string, until time.Time) error {
	entries, err := os.ReadDir(h.attempts())
	if err != nil {
		return fmt.Errorf("look for survivors: %w", err)
	}
	var errs []error
	var groups []*cgroup
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		dir := filepath.Join(h.attempts(), e.Name())
		lock, err := lockDir(dir)
		if err != nil {
			errs = append(errs, err)
		}
		if lock == nil {
			continue
		}
		g := &cgroup{dir, lock}
		for _, pid := range g.processes() {
			if killed[pid] == "" {
				killed[pid] = nameOf(pid)
			}
		}
		// All are killed before one is waited for, which may never end.
		g.kill()
		groups = append(groups, g)
	}
	if least := time.Now().Add(time.Second); until.Before(least) { // what had a mark may have taken all the time
		until = least
	}
	for _, g := range groups {
		if g.killAll(until) {
			g.remove()
		} else {
			errs = append(errs, fmt.Errorf("processes %v of cgroup %s do not end", g.processes(), g.dir))
		}
		_ = g.lock.Close()
	}
	return errors.Join(errs...)
}

// sweepMarked kills by the mark.
func sweepMarked(killed map[int]string, until time.Time) error {
	// A process in the middle of an exec shows no environment, so one look
	// that finds nothing is not enough once something was there.
	for quiet := 0; ; {
		left, err := killOwnerless(killed)
		switch {
		case err != nil:
			return fmt.Errorf("look for survivors: %w", err)
		case len(left) > 0 && time.Now().After(until):
			return fmt.Errorf("processes %v do not end", left)
		case len(left) > 0:
			quiet = 0
		case len(killed) == 0 || quiet == 2:
			return nil
		default:
			quiet++
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func killOwnerless(killed map[int]string) (left []int, err error) {
	all, err := procfs.Processes()
	if err != nil {
		return nil, err
	}
	byPID := make(map[int]procfs.Process, len(all))
	for _, p := range all {
		byPID[p.PID] = p
	}
	alive := func(o identity) bool {
		p, ok := byPID[o.pid]
		return ok && !p.Dead && p.Start == o.start
	}
	self := os.Getpid()
	own, err := markOf(self)
	if err != nil {
		return nil, err
	}
	ownerless := map[int]bool{}
	sessions := map[int]bool{} // of dead guards
	for _, p := range all {
		text, err := markOf(p.PID)
		if err != nil {
			return left, err
		}
		m, ok := parseMark(text)
		if p.Dead || !ok || text == own || m.place != here() || alive(m.daemon) {
			continue
		}
		// A mark says what its process was given, or has made up. Root could kill anybody for it,
		// so it is believed of others only where the process is in their session, which nobody
		// can enter.
		vouched := os.Geteuid() != 0 || p.Session == m.guard.pid
		if alive(m.guard) {
			if g := byPID[m.guard.pid]; g.Stopped && vouched {
				_ = g.Signal(unix.SIGKILL) // the next look finds the rest
				left = append(left, g.PID)
			}
			continue
		}
		ownerless[p.PID] = true
		if vouched {
			sessions[m.guard.pid] = true
		}
	}
	for _, p := range all {
		// The number of a session is not given to another process while the
		// session has members.
		if p.Dead || p.PID == self || !ownerless[p.PID] && !sessions[p.Session] {
			continue
		}
		if leader, ok := byPID[p.Session]; !ownerless[p.PID] && ok && !leader.Dead {
			continue // that is a new session after all
		}
		killed[p.PID] = nameOf(p.PID)
		left = append(left, p.PID)
		_ = p.Signal(unix.SIGKILL)
	}
	return left, nil
}

func nameOf(pid int) string {
	return readLine(fmt.Sprintf("/proc/%d/comm", pid))
}

// identity is a process that is never confused with a later one of its number.
type identity struct {
	pid   int
	start uint64 // in clock ticks since the machine was started
}

// mark is the value of ONEJOB_GUARD: who started a process, and where.
type mark struct {
	place         string // see here
	daemon, guard identity
}

// guardMark returns the variable for the commands of a guard.
func guardMark(guard int, random string) string {
	return fmt.Sprintf("%s=%s/%d.%d/%d.%d/%s", envKey, here(), os.Getpid(), ourStart(), guard, startOf(guard), random)
}

var ourStart = sync.OnceValue(func() uint64 { return startOf(os.Getpid()) })

func parseMark(text string) (mark, bool) {
	parts := strings.Split(strings.TrimPrefix(text, envKey+"="), "/")
	if len(parts) != 4 {
		return mark{}, false
	}
	m := mark{place: parts[0]}
	for i, id := range []*identity{&m.daemon, &m.guard} {
		pid, start, _ := strings.Cut(parts[1+i], ".")
		var errs [2]error
		id.pid, errs[0] = strconv.Atoi(pid)
		id.start, errs[1] = strconv.ParseUint(start, 10, 64)
		if errors.Join(errs[:]...) != nil || id.pid < 1 || id.start == 0 {
			return mark{}, false
		}
	}
	return m, true
}

// here is the same for daemons that have the same user, and that see the same
// process ids and start times.
var here = sync.OnceValue(func() string { return strconv.Itoa(os.Geteuid()) + "." + procfs.Place() })

// startOf returns when a process was started, or zero if it is not there.
func startOf(pid int) uint64 {
	p, _ := procfs.Read(pid)
	return p.Start
}

// markOf returns the mark that a process was given, "NAME=value", or "". It fails if this
// process cannot read files now.
func markOf(pid int) (string, error) {
	own, _, err := marksOf(pid)
	if own != "" {
		err = nil
	}
	return own, err
}

// marksOf returns the outer marks as well. After an error there may be more of them.
func marksOf(pid int) (own string, outer []string, err error) {
	environ, err := procfs.Environ(pid)
	for entry := range bytes.SplitSeq(environ, []byte{0}) {
		name, value, _ := strings.Cut(string(entry), "=")
		switch {
		case name == envKey && own == "":
			own = string(entry)
		case name == envOuter:
			for mark := range strings.SplitSeq(value, ",") {
				outer = append(outer, envKey+"="+mark)
			}
		}
	}
	return own, outer, err
}
