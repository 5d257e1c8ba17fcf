package main

import (
	"context"
	"fmt"
	"path/filepath"
	"syscall"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/internal/proxy"
	"onejob/internal/servers"
)

// Faults that tempt replicas to call others dead, or that only a supervisor sees.
var clusterFaults = []*kind{
	{name: "worker-kill", what: "kill -9 of the working process of a replica, under its supervisor, often while a statement of its works", weight: 3, run: killWorker},
	{name: "both-unavailable", what: "all replicas black-holed from Consul and Postgres", weight: 1, least: 2 * time.Second, most: 30 * time.Second, run: cutAll},
	{name: "wrong-consul", what: "one more replica, with an empty Consul of its own", weight: 1, least: 5 * time.Second, most: 25 * time.Second, run: wrongConsul},
	{name: "cluster-key", what: "the cluster's id in Consul is deleted", weight: 1, run: deleteClusterKey},
}

// killWorker kills, in half of the cases, a working process whose statement is at work
// in Postgres. Its backend does not notice that, and the next attempt may begin within
// a second.
func killWorker(ctx context.Context, h *hit) error {
	r := h.replica()
	if h.rand.IntN(2) == 0 {
		names := h.c.working(ctx)
		for _, i := range h.rand.Perm(len(h.c.replicas)) {
			if other := h.c.replicas[i]; names[other.name] {
				r, h.about = other, ", whose statement works"
				break
			}
		}
	}
	proc := r.process()
	if !proc.running() {
		return errNothing
	}
	worker := proc.worker()
	if worker == proc.cmd.Process.Pid { // it has no supervisor
		return errNothing
	}
	h.about += fmt.Sprintf(", pid %d", worker)
	if err := h.begins(r.name); err != nil {
		return err
	}
	_ = syscall.Kill(worker, syscall.SIGKILL)
	return nil
}

func cutAll(ctx context.Context, h *hit) error {
	if err := h.begins("all"); err != nil {
		return err
	}
	for _, r := range h.c.replicas {
		r.consul.Cut(proxy.Both)
		r.postgres.Cut(proxy.Both)
	}
	h.lasts(ctx)
	for _, r := range h.c.replicas {
		r.consul.Heal(proxy.Both)
		r.postgres.Heal(proxy.Both)
	}
	return nil
}

// wrongConsul starts what a typo in consul.address starts. To that replica all others
// have no session, and it must leave them alone.
func wrongConsul(ctx context.Context, h *hit) error {
	r := h.replica()
	if _, ok := r.subject.(*daemon); !ok {
		return errNothing
	}
	consul, err := servers.StartConsul(ctx, servers.ConsulConfig{Dir: h.c.dir})
	if err != nil {
		if ctx.Err() != nil {
			return errNothing
		}
		return fmt.Errorf("start a Consul: %w", err)
	}
	defer consul.Close()
	stranger := r.place
	stranger.name, stranger.consul, stranger.dsn = "stranger", consul.Addr(), h.c.dsn("stranger")
	if err := h.begins(stranger.name); err != nil {
		return err
	}
	proc, err := start(r.subject.command(stranger), filepath.Join(filepath.Dir(r.log()), stranger.name+".log"))
	if err != nil {
		return err
	}
	h.lasts(ctx)
	proc.stop(30 * time.Second)
	return nil
}

func deleteClusterKey(ctx context.Context, h *hit) error {
	ctx, cancel := context.WithTimeout(ctx, consulPatience)
	defer cancel()
	const key = "service/onejob/cluster"
	if err := h.begins(key); err != nil {
		return err
	}
	for _, s := range h.c.consul.Servers {
		if _, err := s.Client().KV().Delete(key, new(api.WriteOptions).WithContext(ctx)); err == nil {
			return nil
		}
	}
	return errNothing // all of them are unavailable
}
