package main

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"onejob/internal/procfs"
)

// What /proc tells of processes: time on the processor, memory, children.

// tick is the unit of times in /proc/PID/stat; Linux tells programs 100 a second
// on every machine.
const tick = time.Second / 100

// procStat is the part of /proc/PID/stat that is used here.
type procStat struct {
	parent int
	own    time.Duration // user and system time of its threads
	dead   time.Duration // the same of its children that it has waited for, and theirs
}

func readStat(pid int) (procStat, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return procStat{}, err
	}
	return parseStat(text)
}

// parseStat reads a line of /proc/PID/stat. The process's name, in brackets, may
// hold anything, brackets too.
func parseStat(text []byte) (procStat, error) {
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	const parent, utime, last = 1, 11, 14 // counted from the state, which follows the name
	if len(fields) <= last {
		return procStat{}, fmt.Errorf("%q is no line of /proc/PID/stat", text)
	}
	number := func(i int) time.Duration {
		n, _ := strconv.ParseInt(fields[i], 10, 64)
		return time.Duration(n)
	}
	return procStat{
		parent: int(number(parent)),
		own:    (number(utime) + number(utime+1)) * tick,
		dead:   (number(utime+2) + number(utime+3)) * tick,
	}, nil
}

// cpuTime returns the time on the processor that a process and all below it have
// used, dead ones included, but not the living ones in except.
func cpuTime(pid int, except ...int) (time.Duration, error) {
	// Every parent is read before its children: one that dies in between, and is no longer
	// among them, is counted with the dead the next time, and nobody is counted twice.
	s, err := readStat(pid)
	if err != nil {
		return 0, err
	}
	used := s.own + s.dead
	for _, child := range procfs.Children(pid) {
		if !slices.Contains(except, child) {
			if more, err := cpuTime(child, except...); err == nil {
				used += more
			}
		}
	}
	return used, nil
}
