package servers

import (
	"context"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"
)

func TestConsulClusterOutlivesItsLeader(t *testing.T) {
	t.Parallel()
	k, err := StartConsulCluster(t.Context(), ConsulConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Close() })
	first, err := k.Leader(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := first.Client().KV().Put(&api.KVPair{Key: "kept", Value: []byte("yes")}, nil); err != nil {
		t.Fatal(err)
	}
	first.Kill()

	// The two that are left elect another, which has the key.
	var second *Consul
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for second == nil || second == first {
		if ctx.Err() != nil {
			t.Fatal("no other server leads")
		}
		time.Sleep(pollInterval)
		second, _ = k.Leader(ctx)
	}
	pair, _, err := second.Client().KV().Get("kept", &api.QueryOptions{RequireConsistent: true})
	if err != nil || pair == nil || string(pair.Value) != "yes" {
		t.Fatalf("the new leader has %v (%v)", pair, err)
	}

	if err := k.Start(t.Context()); err != nil {
		t.Fatalf("the old leader does not come back: %v", err)
	}
	if pair, _, err = first.Client().KV().Get("kept", nil); err != nil || pair == nil {
		t.Errorf("the server that came back has %v (%v)", pair, err)
	}
}

func TestConsulClusterComesBackWhole(t *testing.T) {
	t.Parallel()
	k, err := StartConsulCluster(t.Context(), ConsulConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Close() })
	if _, err := k.Servers[0].Client().KV().Put(&api.KVPair{Key: "kept", Value: []byte("yes")}, nil); err != nil {
		t.Fatal(err)
	}
	for _, c := range k.Servers {
		c.Kill()
	}
	if err := k.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	pair, _, err := k.Servers[1].Client().KV().Get("kept", &api.QueryOptions{RequireConsistent: true})
	if err != nil || pair == nil {
		t.Errorf("after all were killed the cluster has %v (%v)", pair, err)
	}
}
