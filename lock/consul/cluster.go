package consul

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/hashicorp/consul/api"

	"onejob/lock"
)

// listError is an error of the cluster's list, not of Consul.
type listError struct{ error }

func (e listError) Unwrap() error { return e.error }

// belong makes sure that this Consul is the cluster's own, or makes it so where that
// is safe, and returns the cluster's id.
func (c *client) belong(ctx context.Context, cluster lock.Cluster) (id string, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	for range 3 {
		id, err := cluster.ID(ctx)
		if err != nil {
			return "", listError{err}
		}
		pair, err := c.read(ctx, c.clusterKey())
		if err != nil {
			return "", err
		}
		var index uint64 // of what is replaced; zero creates
		if pair != nil {
			if index = pair.ModifyIndex; string(pair.Value) == id && id != "" {
				return id, nil
			}
		}
		sessions, err := c.present(ctx)
		if err != nil {
			return "", err
		}
		known := lock.Known{Sessions: sessions, Foreign: pair != nil}
		if err := cluster.Adopt(ctx, id, known, func(ctx context.Context, id string) error {
			return c.txn(ctx, c.keys, api.TxnOps{{KV: &api.KVTxnOp{Verb: api.KVCAS, Key: c.clusterKey(), Value: []byte(id), Index: index}}})
		}); err != nil {
			return "", listError{fmt.Errorf("key %s: %w", c.clusterKey(), err)}
		}
	}
	return "", errors.New("the cluster's id keeps changing")
}

// replicas returns the keys of the replicas that live. A key that its own session does not
// hold was put there by somebody else, and says nothing.
func (c *client) replicas(ctx context.Context) (api.KVPairs, error) {
	pairs, err := c.list(ctx, c.replicaKey(""))
	return slices.DeleteFunc(pairs, func(p *api.KVPair) bool { return p.Key != c.replicaKey(p.Session) }), err
}

// present returns the sessions of the replicas that live. Commands such as "onejob lock" have a session
// and belong to no cluster: they are none, and none of another cluster either.
func (c *client) present(ctx context.Context) (sessions []string, err error) {
	pairs, err := c.replicas(ctx)
	for _, p := range pairs {
		var r Replica
		if json.Unmarshal(p.Value, &r) != nil || r.Process != "" { // what cannot be read may be a replica
			sessions = append(sessions, p.Session)
		}
	}
	return sessions, err
}

// ours makes sure, for a request whose answer will be acted upon, that it comes from
// the cluster's own Consul.
func (c *client) ours(ctx context.Context, id string) error {
	pair, err := c.read(ctx, c.clusterKey())
	switch {
	case err != nil:
		return err
	case pair == nil:
		return fmt.Errorf("%w: the key %s is gone", lock.ErrOtherCluster, c.clusterKey())
	case string(pair.Value) != id:
		return fmt.Errorf("%w: the key %s is %.64q, not %q", lock.ErrOtherCluster, c.clusterKey(), pair.Value, id)
	}
	return nil
}
