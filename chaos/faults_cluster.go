package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"syscall"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/chaos/checker"
	"onejob/chaos/harness"
	"onejob/internal/servers"
	"onejob/internal/testenv/proxy"
)

// Faults that tempt replicas to call others dead, or that only a supervisor sees.
var clusterFaults = []*kind{
	{name: checker.WorkerKill, what: "kill -9 of the working process of a replica, under its supervisor, often while a statement of its works", weight: 3, run: killWorker},
	{name: "both-unavailable", what: "all replicas black-holed from Consul and Postgres", weight: 1, least: 2 * time.Second, most: 30 * time.Second, run: cutAll},
	{name: "wrong-consul", what: "one more replica, with an empty Consul of its own", weight: 1, least: 5 * time.Second, most: 25 * time.Second, run: wrongConsul},
	{name: "database-key", what: "the record of the database in Consul is deleted, or overwritten for a while", weight: 1, least: 0, most: 15 * time.Second, run: spoilDatabaseKey},
	{name: "cluster-key", what: "the cluster's id in Consul is deleted", weight: 1, run: deleteClusterKey},
}

// killWorker kills, in half of the cases, a working process whose statement is at work
// in Postgres. Its backend does not notice that, and the next attempt may begin within
// a second.
func killWorker(ctx context.Context, h *fault) error {
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
	if !proc.Running() {
		return errNothing
	}
	worker := proc.Worker()
	if worker == proc.Cmd.Process.Pid { // it has no supervisor
		return errNothing
	}
	h.about += fmt.Sprintf(", pid %d", worker)
	if err := h.begins(r.name); err != nil {
		return err
	}
	_ = syscall.Kill(worker, syscall.SIGKILL)
	return nil
}

func cutAll(ctx context.Context, h *fault) error {
	return h.cutAll(ctx, func(r *replica) []*proxy.Proxy { return append([]*proxy.Proxy{r.consul}, r.toPostgres()...) })
}

// cutAll holds some ways of all replicas for a while.
func (h *fault) cutAll(ctx context.Context, ways func(*replica) []*proxy.Proxy) error {
	if err := h.begins("all"); err != nil {
		return err
	}
	all := &held{}
	defer all.release()
	for _, r := range h.c.replicas {
		all.hold(ways(r)...)
	}
	h.lasts(ctx)
	return nil
}

// held are ways that a fault holds. Another fault that ends earlier, also of the same ways, does not
// open them: the one replica that is not cut off would rightly call all others dead.
type held struct{ releases []func() }

func (h *held) hold(ways ...*proxy.Proxy) {
	for _, p := range ways {
		h.releases = append(h.releases, p.Hold(proxy.Both))
	}
}

func (h *held) release() {
	for _, release := range h.releases {
		release()
	}
}

// wrongConsul starts what a typo in consul.address starts. To that replica all others
// have no session, and it must leave them alone.
func wrongConsul(ctx context.Context, h *fault) error {
	r := h.daemon()
	if r == nil {
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
	stranger.listenDSN, stranger.tls = "", nil
	if err := h.begins(stranger.name); err != nil {
		return err
	}
	proc, err := harness.Start(r.subject.command(stranger), filepath.Join(h.c.logs(), stranger.name+".log"))
	if err != nil {
		return err
	}
	h.lasts(ctx)
	_, err = h.c.stop(stranger.name, proc, stopMaxWait)
	return err
}

func deleteClusterKey(ctx context.Context, h *fault) error {
	ctx, cancel := context.WithTimeout(ctx, consulMaxWait)
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

// spoilDatabaseKey takes the record of the database away. Deleted, it is made again, with
// fences above all others; overwritten, nobody works until it is put right. Without an
// answer, because another fault has taken Consul away, it may be so or not.
func spoilDatabaseKey(ctx context.Context, h *fault) error {
	const key = "service/onejob/database"
	kv := h.c.consul.Servers[h.rand.IntN(len(h.c.consul.Servers))].Client().KV()
	asking, cancel := context.WithTimeout(ctx, consulMaxWait)
	defer cancel()
	before, _, err := kv.Get(key, new(api.QueryOptions).WithContext(asking))
	if err != nil || before == nil {
		return errNothing
	}
	if err := h.begins(key); err != nil {
		return err
	}
	if h.rand.IntN(2) == 0 {
		_, _ = kv.Delete(key, new(api.WriteOptions).WithContext(asking))
		return nil
	}
	_, _ = kv.Put(&api.KVPair{Key: key, Value: []byte("{")}, new(api.WriteOptions).WithContext(asking))
	h.lasts(ctx)
	return harness.Eventually(context.WithoutCancel(ctx), 3*time.Minute, "the record of the database is put right", func() error {
		writing, cancel := context.WithTimeout(context.WithoutCancel(ctx), consulMaxWait)
		defer cancel()
		var errs []error
		for _, s := range h.c.consul.Servers {
			_, err := s.Client().KV().Put(&api.KVPair{Key: key, Value: before.Value}, new(api.WriteOptions).WithContext(writing))
			if err == nil {
				return nil
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
}
