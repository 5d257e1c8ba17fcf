package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/chaos/harness"
	"onejob/internal/retry"
	"onejob/internal/servers"
)

// Faults of disks and of memory.
var resourceFaults = []*kind{
	{name: "postgres-disk-full", what: "the disk of a Postgres is full", weight: 1, least: 3 * time.Second, most: 30 * time.Second, needs: disks, run: onPostgres(fillPostgres)},
	{name: "consul-disk-full", what: "the disk of the Consul leader is full", weight: 1, least: 3 * time.Second, most: 30 * time.Second, needs: disks, run: onLeader(fillConsul)},
	{name: "host-disk-full", what: "the disk of a host is full, with the data of its agent and the logs of its replicas", weight: 2, least: 3 * time.Second, most: 30 * time.Second, needs: disks, run: onHost(fillHost)},
	{name: "postgres-memory", what: "Postgres has a few MB more than it uses, and the kernel kills what needs more, but for the first process", weight: 1, least: time.Second, most: 15 * time.Second, needs: memory, run: onPostgres(squeezePostgres)},
	{name: "replica-memory", what: "the same of a replica with its guards and commands", weight: 2, least: 2 * time.Second, most: 20 * time.Second, needs: memory, run: squeezeReplica},
}

// Sizes of the disks that can be full.
const (
	postgresDisk = 8 << 30
	consulDisk   = 4 << 30 // of a server, or of a host
)

// diskBytes is the size of a server's own disk; zero, for none, if no fault fills it.
func diskBytes(kinds []*kind, bytes int64) int64 {
	if !slices.ContainsFunc(kinds, func(k *kind) bool { return k.needs == disks }) {
		return 0
	}
	return bytes
}

// disk is that of a server.
type disk interface {
	FillDisk() error
	FreeDisk() error
}

// fill keeps a disk full for as long as the fault goes on: what is deleted there makes room.
func (h *fault) fill(ctx context.Context, d disk) (err error) {
	for end := time.Now().Add(h.For); err == nil && ctx.Err() == nil && time.Now().Before(end); retry.Pause(ctx, min(200*time.Millisecond, time.Until(end))) {
		err = d.FillDisk()
	}
	return errors.Join(err, d.FreeDisk())
}

func fillPostgres(ctx context.Context, h *fault) error {
	return h.crashing(ctx, func(s *servers.Postgres) error { return h.fill(ctx, s) })
}

// crashing does harm to one of Postgres' servers by which its processes may end, and repairs it.
func (h *fault) crashing(ctx context.Context, harm func(*servers.Postgres) error) error {
	d := h.c.postgres
	s := d.servers[h.rand.IntN(len(d.servers))]
	target := "the server"
	if s != d.primary() {
		target = "the standby"
	}
	before, err := d.logged()
	if err != nil {
		return err
	}
	if err := h.begins(target); err != nil {
		return err
	}
	if err := harm(s); err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx)
	if err := harness.Eventually(ctx, 2*time.Minute, "Postgres is there again", func() error {
		return errors.Join(s.Start(ctx), s.Exec(ctx, "SELECT 1"))
	}); err != nil {
		return err
	}
	after, err := d.logged()
	d.meant.Add(int64(after - before))
	return err
}

func fillConsul(ctx context.Context, h *fault, s *servers.Consul) error {
	if err := h.fill(ctx, s); err != nil {
		return err
	}
	return revive(ctx, s)
}

func fillHost(ctx context.Context, h *fault, host *host) error {
	if err := h.begins(host.name); err != nil {
		return err
	}
	if err := h.fill(ctx, host.agent); err != nil {
		return err
	}
	return revive(ctx, host.agent)
}

// revive starts a server or an agent of Consul that may have ended, and returns when it answers.
// One that is just ending counts as running, so a Start that returns nil is not enough. A fault may
// have taken the servers away from an agent for a minute.
func revive(ctx context.Context, s *servers.Consul) error {
	ctx = context.WithoutCancel(ctx)
	return harness.Eventually(ctx, 5*time.Minute, "Consul is there again", func() error {
		if err := s.Start(ctx); err != nil {
			return err
		}
		asking, cancel := context.WithTimeout(ctx, consulMaxWait)
		defer cancel()
		_, _, err := s.Client().KV().Get(consulPrefix+"/leader", new(api.QueryOptions).WithContext(asking))
		return err
	})
}

func squeezePostgres(ctx context.Context, h *fault) error {
	return h.crashing(ctx, func(s *servers.Postgres) error {
		// Without its first process the others may wait for each other for ever, and a person has to
		// kill them. So packages of Postgres protect that one.
		_ = os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", s.PID()), []byte("-1000"), 0) // it may have ended
		return h.squeeze(ctx, s.PID(), (4+h.rand.IntN(29))<<20)
	})
}

// squeezeReplica leaves a replica little memory. What the kernel kills of it its supervisor
// starts again; a replica without one stays down until there is room.
func squeezeReplica(ctx context.Context, h *fault) error {
	r := h.replica()
	proc := r.process()
	if !proc.Running() {
		return errNothing
	}
	letGo := r.hold()
	err := h.begins(r.name)
	if err == nil {
		err = h.squeeze(ctx, proc.Cmd.Process.Pid, (1+h.rand.IntN(8))<<20)
	}
	return errors.Join(err, letGo())
}

// squeeze gives a process, and all that are below it, so many bytes more than they use, for
// as long as the fault goes on.
func (h *fault) squeeze(ctx context.Context, pid, bytes int) error {
	g, err := makeMemoryGroup(fmt.Sprintf("onejob-chaos-%d-%d", os.Getpid(), h.mark.ID), bytes)
	if err != nil {
		return err
	}
	for range 3 { // what began meanwhile was not moved
		for _, p := range harness.Below(pid) {
			_ = g.move(p.PID) // it may be gone
		}
	}
	h.lasts(ctx)
	kills := g.kills()
	h.c.say("%s: %d MB were left to %s, and the kernel killed %d", h.Kind.name, bytes>>20, h.mark.Target, kills)
	return g.remove(context.WithoutCancel(ctx))
}

// memoryGroup is a control group with a limit of memory. What its processes used before they
// were moved there does not count.
type memoryGroup struct{ parent, path string }

// memoryGroups is where they are; version 2 has no such folder. There a replica could not be
// moved without the groups of its commands.
const memoryGroups = "/sys/fs/cgroup/memory"

// canSqueeze returns why the memory of processes cannot be limited here; nil if it can.
var canSqueeze = sync.OnceValue(func() error {
	if _, err := os.Stat(memoryGroups); err != nil {
		return fmt.Errorf("it needs the memory controller of cgroup version 1: %w", err)
	}
	g, err := makeMemoryGroup(fmt.Sprint("onejob-chaos-", os.Getpid()), 64<<20)
	if err != nil {
		return err
	}
	return g.remove(context.Background())
})

func makeMemoryGroup(name string, bytes int) (*memoryGroup, error) {
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	g := &memoryGroup{parent: memoryGroups}
	for line := range strings.Lines(string(own)) {
		if parts := strings.SplitN(strings.TrimSpace(line), ":", 3); len(parts) == 3 && parts[1] == "memory" {
			if inside := filepath.Join(memoryGroups, parts[2]); exists(inside) { // a container shows its own part alone
				g.parent = inside
			}
		}
	}
	g.path = filepath.Join(g.parent, name)
	if err := os.Mkdir(g.path, 0o755); err != nil {
		return nil, fmt.Errorf("make a control group: %w", err)
	}
	if err := os.WriteFile(filepath.Join(g.path, "memory.limit_in_bytes"), []byte(strconv.Itoa(bytes)), 0); err != nil {
		return nil, errors.Join(err, os.Remove(g.path))
	}
	return g, nil
}

func exists(path string) bool { _, err := os.Stat(path); return err == nil }

func (g *memoryGroup) move(pid int) error {
	return os.WriteFile(filepath.Join(g.path, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0)
}

// kills is how many processes of the group the kernel has killed for want of memory.
func (g *memoryGroup) kills() (n int) {
	text, _ := os.ReadFile(filepath.Join(g.path, "memory.oom_control"))
	for line := range strings.Lines(string(text)) {
		if rest, is := strings.CutPrefix(line, "oom_kill "); is {
			n, _ = strconv.Atoi(strings.TrimSpace(rest))
		}
	}
	return n
}

// remove takes the limit away. A process that the kernel has killed stays in the group until it is
// gone, which may take as long as its disk takes.
func (g *memoryGroup) remove(ctx context.Context) error {
	return harness.Eventually(ctx, 3*time.Minute, "a control group is removed", func() error {
		all, err := os.ReadFile(filepath.Join(g.path, "cgroup.procs"))
		if err != nil {
			return err
		}
		for pid := range strings.FieldsSeq(string(all)) {
			_ = os.WriteFile(filepath.Join(g.parent, "cgroup.procs"), []byte(pid), 0) // it may be gone
		}
		return os.Remove(g.path)
	})
}
