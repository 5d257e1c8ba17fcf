package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"onejob/chaos/checker"
	"onejob/chaos/harness"
	"onejob/internal/procfs"
	"onejob/internal/testenv/processes"
)

// Faults of hosts and their Consul agents.
var hostFaults = []*kind{
	{name: "agent-restart", what: "the Consul agent of a host is stopped and started again", weight: 2, least: 0, most: 3 * time.Second, run: onHost(restartAgent)},
	{name: "agent-loss", what: "kill -9 of the Consul agent of a host", weight: 2, least: 5 * time.Second, most: 40 * time.Second, run: onHost(loseAgent)},
	{name: checker.PoolerKill, what: "kill -9 of the pooler of a host", weight: 2, least: 0, most: 15 * time.Second, run: killPooler},
	{name: checker.HostLoss, what: "a host: replicas with all their processes, their connections, and the Consul agent", weight: 2, least: 4 * time.Second, most: 30 * time.Second, run: onHost(loseHost)},
}

// onHost does harm to a host, if no other fault has taken it away just now.
func onHost(harm func(context.Context, *fault, *host) error) func(context.Context, *fault) error {
	return func(ctx context.Context, h *fault) error {
		var each [][]*replica
		for _, host := range h.c.hosts {
			each = append(each, h.c.on(host))
		}
		host := h.c.hosts[h.choose(each)]
		if !host.busy.TryLock() {
			return errNothing
		}
		defer host.busy.Unlock()
		return harm(ctx, h, host)
	}
}

// restartAgent stops the agent as an upgrade does: it does not leave the cluster.
func restartAgent(ctx context.Context, h *fault, host *host) error {
	if err := h.begins(host.name); err != nil {
		return err
	}
	if err := h.stopped(host.agent.Stop()); err != nil {
		return err
	}
	h.lasts(ctx)
	return host.agent.Start(context.WithoutCancel(ctx))
}

func loseAgent(ctx context.Context, h *fault, host *host) error {
	if err := h.begins(host.name); err != nil {
		return err
	}
	host.agent.Kill()
	h.lasts(ctx)
	return host.agent.Start(context.WithoutCancel(ctx))
}

// killPooler ends what the replicas of its host reach Postgres through, but for LISTEN.
func killPooler(ctx context.Context, h *fault) error {
	host := h.c.hosts[hostWithPooler]
	if host.pooler == nil || !host.busy.TryLock() {
		return errNothing
	}
	defer host.busy.Unlock()
	h.awaits(ctx, h.c.on(host))
	if err := h.begins(host.name); err != nil {
		return err
	}
	host.pooler.Kill()
	h.lasts(ctx)
	return host.pooler.Start(context.WithoutCancel(ctx))
}

// loseHost ends everything of a host in one moment. A host that dies leaves no
// process and closes no connection: its processes are stopped before they are killed,
// so that none sees another one die, and nothing of theirs comes through to Postgres
// any more, not even the end of a connection. What it does not have in common with the
// loss of a machine is its name: replicas that compare host names take all hosts for
// one.
func loseHost(ctx context.Context, h *fault, host *host) error {
	replicas := h.c.on(host)
	var procs []*harness.Process
	var names []string
	for _, r := range replicas {
		if proc := r.process(); proc.Running() {
			procs, names = append(procs, proc), append(names, r.name)
		}
	}
	if len(procs) == 0 {
		return errNothing
	}
	var letGo []func() error
	for _, r := range replicas {
		letGo = append(letGo, r.hold())
	}
	h.about = " of " + host.name + " with its agent"
	if err := h.begins(strings.Join(names, ",")); err != nil {
		return err
	}
	ways := &held{}
	defer ways.release()
	for _, r := range replicas {
		ways.hold(r.toPostgres()...)
		if r.rabbitmq != nil {
			ways.hold(r.rabbitmq)
		}
	}
	_ = host.agent.Freeze() // it may not run
	left := stopAll(procs)
	// Children first: the kernel continues a stopped group that its parent leaves behind.
	for _, pid := range slices.Backward(left) {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	host.agent.Kill()
	for _, proc := range procs {
		<-proc.Exited
	}
	if err := awaitGone(ctx, left); err != nil {
		return err
	}
	h.lasts(ctx)
	ctx = context.WithoutCancel(ctx)
	for _, r := range replicas {
		for _, p := range r.ways() {
			p.Reset() // what the dead had sent never arrives, and a machine that is back knows no old connection
		}
	}
	ways.release()
	if err := host.agent.Start(ctx); err != nil {
		return err
	}
	for _, up := range letGo {
		if err := up(); err != nil {
			return err
		}
	}
	return nil
}

// stopAll stops processes and all that is below them, and returns the pids, parents
// before their children. A process that is stopped makes no children, so nobody is
// missing when all are.
func stopAll(procs []*harness.Process) (pids []int) {
	var roots []int
	for _, p := range procs {
		roots = append(roots, p.Cmd.Process.Pid)
	}
	for end := time.Now().Add(5 * time.Second); ; {
		pids = nil
		awake := false
		for _, p := range harness.Below(roots...) {
			pids = append(pids, p.PID)
			if !processes.Frozen(p.PID) {
				awake = true
				_ = syscall.Kill(p.PID, syscall.SIGSTOP)
			}
		}
		if !awake || time.Now().After(end) {
			return pids
		}
	}
}

// awaitGone waits until none of these processes lives. Those of a supervisor that is
// gone are reaped by another process. One that waits for the disk of its host dies when the
// disk answers.
func awaitGone(ctx context.Context, pids []int) error {
	return harness.Eventually(context.WithoutCancel(ctx), 3*time.Minute, "the processes of a host are gone", func() error {
		for _, pid := range pids {
			if p, err := procfs.Read(pid); err == nil && !p.Dead {
				return fmt.Errorf("%d lives", pid)
			}
		}
		return nil
	})
}
