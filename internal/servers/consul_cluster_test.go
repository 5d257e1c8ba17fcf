package servers

import (
	"context"
	"fmt"
	"sync"
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
	checkHeld(t, k.held.numbers...)
	if err := k.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	pair, _, err := k.Servers[1].Client().KV().Get("kept", &api.QueryOptions{RequireConsistent: true})
	if err != nil || pair == nil {
		t.Errorf("after all were killed the cluster has %v (%v)", pair, err)
	}
}

// A session ends with its node. So an agent must come back as the same node,
// whether it was stopped or killed, and whichever server it finds.
func TestSessionsOutliveTheirAgent(t *testing.T) {
	t.Parallel()
	k, err := StartConsulCluster(t.Context(), ConsulConfig{ManagementToken: "0f5f2b54-5a0a-4d0c-8d5e-0a6b9f0f8a27"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Close() })
	agent, err := k.StartAgent(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { agent.Close() })
	// Without checks it does not end while the agent is unavailable.
	session, _, err := agent.Client().Session().CreateNoChecks(&api.SessionEntry{Name: "kept", TTL: "86400s"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	name, id := identity(t, agent)
	for _, c := range []struct {
		how  string
		down func() error
	}{
		{"stopped", agent.Stop},
		{"killed", func() error { agent.Kill(); return nil }},
		{"killed together with a server", func() error { agent.Kill(); k.Servers[0].Kill(); return nil }},
	} {
		if err := c.down(); err != nil {
			t.Fatal(err)
		}
		if err := agent.Start(t.Context()); err != nil {
			t.Fatalf("%s, it does not come back: %v", c.how, err)
		}
		if nowName, nowID := identity(t, agent); nowName != name || nowID != id {
			t.Errorf("%s, node %s %s came back as %s %s", c.how, name, id, nowName, nowID)
		}
		entry, _, err := agent.Client().Session().Info(session, &api.QueryOptions{RequireConsistent: true})
		if err != nil || entry == nil || entry.Node != name {
			t.Errorf("%s, the agent finds %+v (%v) in place of its session", c.how, entry, err)
		}
	}
}

// identity returns an agent's node name and node id.
func identity(t *testing.T, agent *Consul) (name, id string) {
	t.Helper()
	self, err := agent.Client().Agent().Self()
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(self["Config"]["NodeName"]), fmt.Sprint(self["Config"]["NodeID"])
}

// A cluster that was wiped is another one, at the same addresses. Its agents, wiped
// too, find it.
func TestWipedClusterHasNothing(t *testing.T) {
	t.Parallel()
	k, err := StartConsulCluster(t.Context(), ConsulConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Close() })
	agent, err := k.StartAgent(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { agent.Close() })
	put(t, agent, "kept")
	for _, c := range append([]*Consul{agent}, k.Servers...) {
		if err := c.Wipe(); err != nil {
			t.Fatal(err)
		}
	}
	if err := k.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := agent.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if keys, _, err := agent.Client().KV().Keys("", "", &api.QueryOptions{RequireConsistent: true}); err != nil || len(keys) > 0 {
		t.Errorf("after the wipe there are keys %v (%v)", keys, err)
	}
}

// A leader that is cut off from the other servers answers its clients, and leads nobody; when
// it is back there is one leader.
func TestIsolatedLeaderLeadsNobody(t *testing.T) {
	t.Parallel()
	if err := CanPartition(); err != nil {
		t.Skip(err)
	}
	k, err := StartConsulCluster(t.Context(), ConsulConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Close() })
	old, err := k.Leader(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	rejoin, err := k.Isolate(old)
	if err != nil {
		t.Fatal(err)
	}
	restore := sync.OnceValue(rejoin)
	t.Cleanup(func() {
		if err := restore(); err != nil {
			t.Error(err)
		}
	})
	eventually := func(what string, f func() bool) {
		t.Helper()
		for end := time.Now().Add(time.Minute); !f(); time.Sleep(100 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("not within a minute: %s", what)
			}
		}
	}
	for _, c := range k.Servers {
		if c == old {
			continue
		}
		eventually("the others have another leader", func() bool {
			addr, err := c.leader(t.Context())
			return err == nil && addr != "" && addr != address(old.host, old.ports.server)
		})
	}
	eventually("the old one answers that it has no leader", func() bool {
		addr, err := old.leader(t.Context())
		return err == nil && addr == ""
	})
	if err := restore(); err != nil {
		t.Fatal(err)
	}
	eventually("all have one leader", func() bool {
		seen := map[string]bool{}
		for _, c := range k.Servers {
			addr, err := c.leader(t.Context())
			seen[addr] = err == nil
		}
		for addr, ok := range seen {
			return len(seen) == 1 && ok && addr != ""
		}
		return false
	})
}
