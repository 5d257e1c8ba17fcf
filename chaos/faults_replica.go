package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"onejob/chaos/checker"
	"onejob/chaos/harness"
	"onejob/internal/procfs"
	"onejob/internal/retry"
	"onejob/internal/testenv/processes"
	"onejob/internal/testenv/proxy"
)

// killed is the fault whose takeover is measured.
var killed = &kind{name: "kill", what: "kill -9 of a replica", weight: 4, least: time.Second, most: 10 * time.Second, run: killReplica}

// Faults of replicas as processes.
var replicaFaults = []*kind{
	killed,
	{name: "freeze", what: "SIGSTOP of a replica, and SIGCONT", weight: 5, least: time.Second, most: 60 * time.Second, run: stopping((*replica).freeze)},
	{name: "suspend", what: "SIGSTOP of a replica with its guards and commands, and SIGCONT, as of a virtual machine", weight: 2, least: time.Second, most: 60 * time.Second, run: stopping((*replica).suspend)},
	{name: "term", what: "SIGTERM of a replica", weight: 2, least: time.Second, most: 5 * time.Second, run: stopReplica},
	{name: checker.GracefulRestart, what: "SIGTERM of a replica, which is started again at once", weight: 2, run: restartGracefully},
	{name: "upgrade", what: "SIGTERM of a replica, which is started again at once, as the other version", weight: 3, daemons: true, versions: true, run: changeVersion},
	{name: "rolling", what: "a rolling restart of all replicas", weight: 1, least: time.Second, most: 3 * time.Second, run: rollReplicas},
}

func killReplica(ctx context.Context, h *fault) error {
	r := h.replica()
	proc := r.process()
	if !proc.Running() {
		return errNothing
	}
	letGo := r.hold()
	if err := h.begins(r.name); err != nil {
		return err
	}
	proc.Kill()
	h.lasts(ctx)
	return letGo()
}

// stopping stops a replica in the given way, which reports whether it could, and continues it.
func stopping(stop func(*replica) bool) func(context.Context, *fault) error {
	return func(ctx context.Context, h *fault) error {
		r := h.replica()
		if !stop(r) {
			return errNothing
		}
		defer r.thaw()
		if err := h.begins(r.name); err != nil {
			return err
		}
		h.lasts(ctx)
		return nil
	}
}

func stopReplica(ctx context.Context, h *fault) error {
	r := h.replica()
	if !r.process().Running() {
		return errNothing
	}
	if err := h.begins(r.name); err != nil {
		return err
	}
	return r.restart(ctx, h.For)
}

// restartGracefully does what a service manager does on an upgrade. See history.spent
// in the checker for what it must not cost.
func restartGracefully(_ context.Context, h *fault) error {
	r := h.replica()
	proc := r.process()
	if !proc.Running() {
		return errNothing
	}
	letGo := r.hold()
	if err := h.begins(r.name); err != nil {
		return err
	}
	_, err := h.c.stop(r.name, proc, stopMaxWait)
	return errors.Join(err, letGo())
}

func rollReplicas(ctx context.Context, h *fault) error {
	if !h.c.rolling.TryLock() {
		return errNothing
	}
	defer h.c.rolling.Unlock()
	if err := h.begins("all"); err != nil {
		return err
	}
	for _, r := range h.c.replicas {
		if err := r.restart(ctx, h.For); err != nil {
			return err
		}
		if ctx.Err() != nil {
			break
		}
	}
	return nil
}

// restart stops a replica as a service manager would, with some patience, and
// starts it again after a while.
func (r *replica) restart(ctx context.Context, down time.Duration) error {
	letGo := r.hold()
	_, err := r.c.stop(r.name, r.process(), stopMaxWait)
	retry.Pause(ctx, down)
	return errors.Join(err, letGo())
}

// Faults of a replica's ways to the servers.
var linkFaults = []*kind{
	{name: "cut-consul", what: "a replica black-holed from Consul", weight: 3, least: time.Second, most: 40 * time.Second, run: link(toConsul, cut(proxy.Both))},
	{name: "cut-postgres", what: "a replica black-holed from Postgres", weight: 3, least: time.Second, most: 40 * time.Second, run: link(toPostgres, cut(proxy.Both))},
	{name: "cut-both", what: "a replica black-holed from both", weight: 2, least: time.Second, most: 40 * time.Second, run: link(toBoth, cut(proxy.Both))},
	{name: "cut-up", what: "what a replica sends to one of them does not arrive", weight: 2, least: time.Second, most: 30 * time.Second, run: either(cut(proxy.Up))},
	{name: "cut-down", what: "what one of them answers a replica does not arrive", weight: 2, least: time.Second, most: 30 * time.Second, run: either(cut(proxy.Down))},
	{name: "slow", what: "a replica's links are slow", weight: 2, least: 2 * time.Second, most: 30 * time.Second, run: either(slow)},
	{name: "reset", what: "a replica's connections are reset, again and again", weight: 2, least: time.Second, most: 15 * time.Second, run: either(reset)},
}

// A way chooses some of a replica's ways.
type way func(h *fault, r *replica) (chosen []*proxy.Proxy, name string)

func toConsul(_ *fault, r *replica) ([]*proxy.Proxy, string) {
	return []*proxy.Proxy{r.consul}, "consul"
}
func toPostgres(_ *fault, r *replica) ([]*proxy.Proxy, string) {
	return r.toPostgres(), "postgres"
}
func toBoth(_ *fault, r *replica) ([]*proxy.Proxy, string) {
	return append([]*proxy.Proxy{r.consul}, r.toPostgres()...), "both"
}

// A harm to one of a replica's ways returns what ends it.
type harm func(ctx context.Context, h *fault, p *proxy.Proxy) (end func())

// link is a fault of some of a replica's ways.
func link(to way, do harm) func(context.Context, *fault) error {
	return func(ctx context.Context, h *fault) error {
		r := h.replica()
		ways, name := to(h, r)
		return h.harmWays(ctx, r.name, ways, name, do)
	}
}

// either is a fault of a replica's way to Consul, to Postgres or to both. Its target says which: what is
// a reason to charge an attempt is known of Postgres alone.
func either(do harm) func(context.Context, *fault) error {
	return func(ctx context.Context, h *fault) error {
		r := h.replica()
		ways, name := []way{toConsul, toPostgres, toBoth}[h.rand.IntN(3)](h, r)
		return h.harmWays(ctx, r.name+" "+name, ways, name, do)
	}
}

func (h *fault) harmWays(ctx context.Context, target string, ways []*proxy.Proxy, name string, do harm) error {
	h.about = ", its way to " + name
	if err := h.begins(target); err != nil {
		return err
	}
	for _, p := range ways {
		defer do(ctx, h, p)()
	}
	if h.Kind.name != "reset" {
		h.lasts(ctx)
	}
	return nil
}

func cut(d proxy.Direction) func(context.Context, *fault, *proxy.Proxy) func() {
	return func(_ context.Context, _ *fault, p *proxy.Proxy) func() { return p.Hold(d) }
}

// Of two that overlap on one way the first to end makes it quick again.
func slow(_ context.Context, h *fault, p *proxy.Proxy) func() {
	p.Delay(proxy.Up, time.Duration(h.rand.IntN(800))*time.Millisecond)
	p.Delay(proxy.Down, time.Duration(h.rand.IntN(800))*time.Millisecond)
	return func() { p.Delay(proxy.Both, 0) }
}

func reset(ctx context.Context, h *fault, p *proxy.Proxy) func() {
	for end := time.Now().Add(h.For); time.Now().Before(end) && ctx.Err() == nil; {
		p.Reset()
		retry.Pause(ctx, time.Duration(50+h.rand.IntN(1000))*time.Millisecond)
	}
	return func() {}
}

// Faults of single processes below a replica.
var processFaults = []*kind{
	{name: "child-kill", what: "kill -9 of a command alone", weight: 2, daemons: true, run: killChild},
	{name: "oom", what: "SIGKILL of the process of a replica that the kernel's OOM killer would choose; there is no real memory limit", weight: 2, run: killLargest},
	{name: "guard-kill", what: "kill -9 of a guard alone", weight: 2, daemons: true, run: killGuard},
}

func killChild(_ context.Context, h *fault) error {
	return h.killBelow(func(r *replica, pid, _ int) int { return pid })
}

// killLargest kills what the kernel would if the memory of a replica and its commands
// had a limit: the process with the highest oom_score. It sets no limit, as that needs
// the right to make cgroups.
func killLargest(_ context.Context, h *fault) error {
	r := h.replica()
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.proc.Running() {
		return errNothing
	}
	candidates := harness.Below(r.proc.Cmd.Process.Pid)
	if _, supervised := r.subject.(*daemon); supervised { // a supervisor that is alone does not exceed a limit
		candidates = slices.DeleteFunc(candidates, func(p procfs.Process) bool { return p.PID == r.proc.Cmd.Process.Pid })
	}
	pid, score := largest(candidates)
	if pid == 0 {
		return errNothing
	}
	what := "a command, or its guard"
	if pid == r.proc.Worker() {
		what = "the working process"
	}
	rss, _ := processes.Status(pid, "VmRSS")
	h.about = fmt.Sprintf(", pid %d, %s: oom_score %d, %.0f MB", pid, what, score, rss)
	if err := h.begins(r.name); err != nil {
		return err
	}
	_ = syscall.Kill(pid, syscall.SIGKILL)
	return nil
}

// largest returns the process with the highest oom_score, and of several the one with
// the most memory; zero if there is none.
func largest(candidates []procfs.Process) (pid, score int) {
	most := 0.0
	for _, p := range candidates {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score", p.PID))
		if err != nil {
			continue // it is gone
		}
		n, err := strconv.Atoi(strings.TrimSpace(string(text)))
		rss, rssErr := processes.Status(p.PID, "VmRSS")
		if err != nil || rssErr != nil {
			continue
		}
		if pid == 0 || n > score || n == score && rss > most {
			pid, score, most = p.PID, n, rss
		}
	}
	return pid, score
}

func killGuard(_ context.Context, h *fault) error {
	return h.killBelow(func(r *replica, _, parent int) int {
		if parent == r.proc.Worker() {
			return 0 // it has no guards
		}
		return parent
	})
}

// killBelow kills a process that belongs to a command that runs. The replica is
// kept alive and awake meanwhile: what a guard leaves behind is the daemon's to
// kill, and nobody's if both die at once, which nobody promises.
func (h *fault) killBelow(choose func(r *replica, pid, parent int) int) error {
	stays, err := h.c.observer.Inside()
	if err != nil {
		return err
	}
	for _, i := range h.rand.Perm(len(stays)) {
		s := stays[i]
		if s.PID == 0 || s.Part != "" {
			continue
		}
		for _, r := range h.c.replicas {
			if r.name != s.Replica {
				continue
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.frozen != 0 || !r.proc.Running() {
				return errNothing
			}
			pid := choose(r, s.PID, s.Parent)
			// Numbers are used again: it must be a process of ours.
			if e := exe(pid); e == "" || e != h.c.self && e != exe(r.proc.Cmd.Process.Pid) {
				return errNothing
			}
			if err := h.begins(fmt.Sprintf("%s, task %d, pid %d", r.name, s.Task, pid)); err != nil {
				return err
			}
			err := syscall.Kill(pid, syscall.SIGKILL)
			time.Sleep(500 * time.Millisecond)
			if err != nil && err != syscall.ESRCH {
				return err
			}
			return nil
		}
	}
	return errNothing
}

// exe is the program that a process runs; empty if there is no such process.
func exe(pid int) string {
	path, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return ""
	}
	return path
}
