package servers

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"
)

// clusterHosts are where the servers of a cluster listen. Linux answers on all
// of 127.0.0.0/8 without being told to.
var clusterHosts = []string{"127.0.0.2", "127.0.0.3", "127.0.0.4"}

// ConsulCluster is three private Consul servers that elect a leader among them,
// on 127.0.0.2 to 127.0.0.4 and the same ports. It can lose one of them.
type ConsulCluster struct {
	Servers []*Consul

	held heldPorts
}

// StartConsulCluster makes a new cluster and returns when all three servers
// have a leader and sessions can be made. Only the start obeys ctx: the servers
// live until Close.
func StartConsulCluster(ctx context.Context, config ConsulConfig) (*ConsulCluster, error) {
	path, err := findConsul(ctx)
	if err != nil {
		return nil, err
	}
	k := &ConsulCluster{}
	for _, host := range clusterHosts {
		folder, err := makeFolder(config.Dir, "consul", config.DiskBytes)
		if err != nil {
			return nil, errors.Join(err, k.Close())
		}
		k.Servers = append(k.Servers, &Consul{config: config, path: path, folder: folder, host: host, members: clusterHosts})
	}
	err = startOnFreePorts(ctx, &k.held, 3, func(ports []int) error {
		for _, c := range k.Servers {
			if err := c.prepare(ports); err != nil {
				return err
			}
		}
		err := k.Start(ctx)
		if err != nil { // the others may run
			for _, c := range k.Servers {
				c.Kill()
			}
		}
		return err
	}, clusterHosts...)
	if err != nil {
		return nil, errors.Join(err, k.Close())
	}
	return k, nil
}

// Start starts those servers that do not run, all at once, as none becomes ready
// without another.
func (k *ConsulCluster) Start(ctx context.Context) error {
	errs := make([]error, len(k.Servers))
	var all sync.WaitGroup
	for i, c := range k.Servers {
		all.Go(func() { errs[i] = c.Start(ctx) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// Leader returns the server that leads, as the first says that can be asked.
func (k *ConsulCluster) Leader(ctx context.Context) (*Consul, error) {
	var errs []error
	for _, c := range k.Servers {
		leader, err := c.leader(ctx)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		for _, other := range k.Servers {
			if leader == address(other.host, other.ports.server) {
				return other, nil
			}
		}
	}
	return nil, fmt.Errorf("the Consul cluster has no leader: %w", errors.Join(errs...))
}

// StartAgent makes a client agent of the cluster, see [StartConsulAgent]. change, if not nil,
// may change the configuration that it has from the first server.
func (k *ConsulCluster) StartAgent(ctx context.Context, change func(*ConsulConfig)) (*Consul, error) {
	return startConsulAgent(ctx, change, k.Servers...)
}

// Close stops all servers and removes all they have written.
func (k *ConsulCluster) Close() error {
	var errs []error
	for _, c := range k.Servers {
		errs = append(errs, c.Close())
	}
	k.held.release()
	return errors.Join(errs...)
}

// leader returns the address of the server that this one takes for the leader.
// One that is frozen does not answer.
func (c *Consul) leader(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	return c.client.Status().LeaderWithQueryOptions(new(api.QueryOptions).WithContext(ctx))
}

// peers are the addresses at which the members of the server's cluster gossip.
func (c *Consul) peers() []string {
	var all []string
	for _, host := range c.members {
		all = append(all, address(host, c.ports.serf))
	}
	return all
}
