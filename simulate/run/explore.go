package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"sync"
	"time"
)

// chunk is how many schedules a process is given at a time: half a second's work.
const chunk = 8

// exploration goes through schedules in several processes. A process uses one processor.
type exploration struct {
	binary   string
	args     []string // for each process
	procs    int
	first    uint64 // seed
	n        int    // how many schedules; 0 means as many as fit into the duration
	duration time.Duration
	out      io.Writer

	mu    sync.Mutex
	began time.Time
	given int // schedules
	over  bool
	done  totals
	used  time.Duration // processor time, of processes that have ended
	cmds  []*exec.Cmd
}

// totals is what was done.
type totals struct {
	schedules, failed int
	simulated         time.Duration
	requests, begun   int
}

// run goes through the schedules. It returns an error if one has failed, or a process has.
func (e *exploration) run() error {
	e.began = time.Now()
	errs := make(chan error)
	for range e.procs {
		go func() { errs <- e.process() }()
	}
	tick := time.NewTicker(15 * time.Second)
	defer tick.Stop()
	var all []error
	for left := e.procs; left > 0; {
		select {
		case err := <-errs:
			left--
			if err != nil {
				all = append(all, err)
				e.stop()
			}
		case <-tick.C:
			e.tell()
		}
	}
	e.tell()
	e.mu.Lock()
	defer e.mu.Unlock()
	_, _ = fmt.Fprintf(e.out, "%v of processor time: %.0f simulated minutes a minute of it\n", e.used.Round(time.Second), e.done.simulated.Minutes()/e.used.Minutes())
	if e.done.failed > 0 {
		return fmt.Errorf("%d schedules have failed", e.done.failed)
	}
	if len(all) > 0 {
		return all[0] // the others were stopped
	}
	return nil
}

// next returns the seeds that a process is given next; none if it is to end.
func (e *exploration) next() (first uint64, n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	n = chunk
	if e.n > 0 {
		n = min(n, e.n-e.given)
	}
	if e.over || e.n == 0 && time.Since(e.began) > e.duration {
		n = 0
	}
	first = e.first + uint64(e.given)
	e.given += n
	return first, n
}

// process runs one process. It returns when that has ended.
func (e *exploration) process() error {
	cmd := exec.Command(e.binary, append([]string{"-test.run", "^TestFeed$", "-sim.feed"}, e.args...)...)
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	cmd.Stderr = cmd.Stdout
	e.mu.Lock()
	if e.over {
		e.mu.Unlock()
		return nil
	}
	if err := cmd.Start(); err != nil {
		e.mu.Unlock()
		return err
	}
	e.cmds = append(e.cmds, cmd)
	e.mu.Unlock()

	feed := func() {
		if first, n := e.next(); n > 0 {
			_, _ = fmt.Fprintln(in, first, n)
		} else {
			_ = in.Close()
		}
	}
	feed()
	lines := bufio.NewReader(out)
	for {
		line, err := lines.ReadString('\n')
		t := totals{}
		if n, _ := fmt.Sscanf(line, "done %d %d %d %d %d", &t.schedules, &t.failed, &t.simulated, &t.requests, &t.begun); n == 5 {
			e.add(t)
			feed()
		} else if line != "" && strings.TrimSpace(line) != "PASS" {
			e.mu.Lock()
			if !e.over {
				_, _ = io.WriteString(e.out, line)
			}
			e.mu.Unlock()
		}
		if err != nil {
			break
		}
	}
	err = cmd.Wait()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.used += cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && e.over {
		return nil // it was stopped
	}
	return err
}

func (e *exploration) add(t totals) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.done.schedules += t.schedules
	e.done.failed += t.failed
	e.done.simulated += t.simulated
	e.done.requests += t.requests
	e.done.begun += t.begun
}

// stop ends all processes, because one has failed.
func (e *exploration) stop() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.over = true
	for _, cmd := range e.cmds {
		_ = cmd.Process.Kill()
	}
}

// tell says how far it has got.
func (e *exploration) tell() {
	e.mu.Lock()
	defer e.mu.Unlock()
	took := time.Since(e.began)
	_, _ = fmt.Fprintf(e.out, "%d schedules (of seeds %d to %d), %.0f simulated minutes, %d requests, %d leases in %v in %d processes: %.0f schedules and %.0f simulated minutes a minute\n",
		e.done.schedules, e.first, e.first+uint64(max(e.given, 1))-1, e.done.simulated.Minutes(), e.done.requests, e.done.begun, took.Round(time.Second), e.procs,
		float64(e.done.schedules)/took.Minutes(), e.done.simulated.Minutes()/took.Minutes())
}
