package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"

	"onejob/internal/servers"
)

// A host is what the replicas of one machine share: a client agent of Consul, the
// only way to Consul that they have. All hosts are in fact this machine.
type host struct {
	name   string
	agent  *servers.Consul
	busy   sync.Mutex      // one fault at a time takes it away
	tls    *servers.TLS    // what its replicas show Consul's agent and Postgres; nil where these take all
	pooler *servers.Pooler // leads its replicas to Postgres, but for LISTEN; nil if they need none
	clocks bool            // its replicas have boot-time clocks of their own
}

// hostCount is how many hosts there are. Six replicas make two on each.
const hostCount = 3

// logs is the folder of its replicas' logs, on its disk.
func (h *host) logs() string { return filepath.Join(h.agent.Dir(), "logs") }

// startHosts starts the agent of each host.
func (c *cluster) startHosts(ctx context.Context) error {
	errs := make([]error, hostCount)
	hosts := make([]*host, hostCount)
	var all sync.WaitGroup
	for i := range hosts {
		all.Go(func() {
			hosts[i] = &host{name: fmt.Sprintf("host-%d", i+1)}
			hosts[i].agent, errs[i] = c.consul.StartAgent(ctx, c.differ(hosts[i], i))
		})
	}
	all.Wait()
	for _, h := range hosts {
		if h.agent != nil {
			c.hosts = append(c.hosts, h)
		}
	}
	return errors.Join(errs...)
}

// startAgents starts those agents that do not run.
func (c *cluster) startAgents(ctx context.Context) error {
	errs := make([]error, len(c.hosts))
	var all sync.WaitGroup
	for i, h := range c.hosts {
		all.Go(func() { errs[i] = h.agent.Start(ctx) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// on returns the replicas of a host.
func (c *cluster) on(h *host) (some []*replica) {
	for _, r := range c.replicas {
		if r.host == h {
			some = append(some, r)
		}
	}
	return some
}
