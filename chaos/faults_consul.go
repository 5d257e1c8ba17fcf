package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/chaos/checker"
	"onejob/chaos/harness"
	"onejob/internal/servers"
	"onejob/internal/testenv/proxy"
)

// Faults of Consul.
var consulFaults = []*kind{
	{name: "consul-kill", what: "kill -9 of the Consul leader", weight: 2, least: time.Second, most: 20 * time.Second, run: onLeader(killConsul)},
	{name: "consul-freeze", what: "the Consul leader is frozen", weight: 2, least: time.Second, most: 30 * time.Second, run: onLeader(freezeConsul)},
	{name: "consul-partition", what: "the Consul leader is cut off from the other servers, and from no client", weight: 2, least: time.Second, most: 30 * time.Second, needs: partitions, run: onLeader(isolateConsul)},
	{name: "consul-restart", what: "the Consul leader is restarted", weight: 1, least: 0, most: 5 * time.Second, run: onLeader(restartConsul)},
	{name: "consul-follower", what: "kill -9 of another Consul server", weight: 1, least: time.Second, most: 20 * time.Second, run: onFollower(killConsul)},
	{name: "consul-away", what: "all of Consul away", weight: 1, least: 5 * time.Second, most: 60 * time.Second, run: consulAway},
	{name: checker.ConsulRestore, what: "a Consul snapshot restored from before", weight: 1, least: 5 * time.Second, most: 30 * time.Second, run: restoreConsul},
	{name: checker.SessionDestroy, what: "an operator destroys a replica's session", weight: 2, run: destroySession},
	{name: checker.SessionUnheard, what: "the same, when the replica cannot hear of it", weight: 2, least: 5 * time.Second, most: 20 * time.Second, run: destroyUnheard},
	{name: "slot-destroy", what: "an operator destroys the sessions of slots", weight: 1, consulSlots: true, run: destroySlots},
	{name: consulWiped, what: "all servers and agents of Consul lose their data, with all replicas killed or not", weight: 1, least: 0, most: 10 * time.Second, run: forgetting(wipeConsul)},
	{name: checker.KeyDelete, what: "an operator deletes keys", weight: 2, run: deleteKeys},
}

// consulMaxWait is for what is asked of a Consul that may be gone.
const consulMaxWait = 5 * time.Second

// onLeader does harm to the server that leads, if nobody does harm to another
// just now.
func onLeader(harm func(context.Context, *fault, *servers.Consul) error) func(context.Context, *fault) error {
	return func(ctx context.Context, h *fault) error {
		if !h.c.consulBusy.TryLock() {
			return errNothing
		}
		defer h.c.consulBusy.Unlock()
		leader, err := h.c.consul.Leader(ctx)
		if err != nil {
			return errNothing
		}
		if err := h.begins(leader.Addr()); err != nil {
			return err
		}
		return harm(ctx, h, leader)
	}
}

func onFollower(harm func(context.Context, *fault, *servers.Consul) error) func(context.Context, *fault) error {
	return func(ctx context.Context, h *fault) error {
		if !h.c.consulBusy.TryLock() {
			return errNothing
		}
		defer h.c.consulBusy.Unlock()
		leader, err := h.c.consul.Leader(ctx)
		if err != nil {
			return errNothing
		}
		for _, i := range h.rand.Perm(len(h.c.consul.Servers)) {
			if s := h.c.consul.Servers[i]; s != leader {
				if err := h.begins(s.Addr()); err != nil {
					return err
				}
				return harm(ctx, h, s)
			}
		}
		return errNothing
	}
}

func killConsul(ctx context.Context, h *fault, s *servers.Consul) error {
	s.Kill()
	h.lasts(ctx)
	return s.Start(context.WithoutCancel(ctx))
}

func isolateConsul(ctx context.Context, h *fault, s *servers.Consul) error {
	rejoin, err := h.c.consul.Isolate(s)
	if err != nil {
		return err
	}
	h.lasts(ctx)
	return rejoin()
}

func freezeConsul(ctx context.Context, h *fault, s *servers.Consul) error {
	if err := s.Freeze(); err != nil {
		return err
	}
	h.lasts(ctx)
	return s.Thaw()
}

func restartConsul(ctx context.Context, h *fault, s *servers.Consul) error {
	if err := h.stopped(s.Stop()); err != nil {
		return err
	}
	h.lasts(ctx)
	return s.Start(context.WithoutCancel(ctx))
}

func consulAway(ctx context.Context, h *fault) error {
	if !h.c.consulBusy.TryLock() {
		return errNothing
	}
	defer h.c.consulBusy.Unlock()
	if err := h.begins("all"); err != nil {
		return err
	}
	for _, s := range h.c.consul.Servers {
		s.Kill()
	}
	over, err := h.c.also(checker.NoConsul, "all")
	if err != nil {
		return err
	}
	h.lasts(ctx)
	if err := over(); err != nil {
		return err
	}
	return h.c.consul.Start(context.WithoutCancel(ctx))
}

// restoreConsul takes a snapshot, and restores it after a while. What the fault
// is about is the moment of the restoring.
func restoreConsul(ctx context.Context, h *fault) error {
	client := h.c.consul.Servers[h.rand.IntN(3)].Client()
	saving, cancel := context.WithTimeout(ctx, consulMaxWait)
	defer cancel()
	reader, _, err := client.Snapshot().Save((&api.QueryOptions{}).WithContext(saving))
	if err != nil {
		return errNothing
	}
	snapshot, err := io.ReadAll(reader)
	_ = reader.Close()
	if err != nil {
		return errNothing
	}
	h.lasts(ctx)
	if harness.Eventually(ctx, 2*consulMaxWait, "Consul is left alone", func() error {
		if !h.c.consulBusy.TryLock() {
			return errNothing
		}
		return nil
	}) != nil {
		return errNothing
	}
	defer h.c.consulBusy.Unlock()
	return forgetting(func(ctx context.Context, h *fault) error { return restoreSnapshot(ctx, h, client, snapshot) })(ctx, h)
}

func restoreSnapshot(ctx context.Context, h *fault, client *api.Client, snapshot []byte) error {
	restoring, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*consulMaxWait)
	defer cancel()
	if err := h.begins("of before"); err != nil {
		return err
	}
	if client.Snapshot().Restore((&api.WriteOptions{}).WithContext(restoring), bytes.NewReader(snapshot)) != nil {
		return nil // it was applied or was not: harm enough
	}
	// A token that was deleted or narrowed then is so again, and no other fault sees
	// to that any more.
	return h.c.authorizeAll(context.WithoutCancel(ctx))
}

func destroySession(ctx context.Context, h *fault) error {
	r := h.replica()
	return h.destroy(ctx, r.name, func(s *api.SessionEntry) bool { return s.Name == "onejob "+r.name })
}

// destroyUnheard takes a replica's way to Consul away and destroys its session
// in the same moment. All that the replica has to go by is its own clock.
func destroyUnheard(ctx context.Context, h *fault) error {
	r := h.replica()
	// Also if there is nothing to destroy: the way is cut in any case.
	if err := h.begins(r.name); err != nil {
		return err
	}
	defer r.consul.Hold(proxy.Both)()
	err := h.destroy(ctx, r.name, func(s *api.SessionEntry) bool {
		return s.Name == "onejob "+r.name || s.Name == "onejob slot "+r.name
	})
	if err != nil {
		return err
	}
	h.lasts(ctx)
	return nil
}

func destroySlots(ctx context.Context, h *fault) error {
	return h.destroy(ctx, "slots", func(s *api.SessionEntry) bool {
		return strings.HasPrefix(s.Name, "onejob slot ") && h.rand.IntN(2) == 0
	})
}

// destroy destroys the sessions that are meant.
func (h *fault) destroy(ctx context.Context, target string, meant func(*api.SessionEntry) bool) error {
	ctx, cancel := context.WithTimeout(ctx, consulMaxWait)
	defer cancel()
	client := h.c.consul.Servers[h.rand.IntN(3)].Client()
	all, _, err := client.Session().List((&api.QueryOptions{}).WithContext(ctx))
	if err != nil {
		return errNothing
	}
	begun := h.mark.ID != 0
	destroyed := false
	for _, s := range all {
		if !meant(s) {
			continue
		}
		if !begun {
			if err := h.begins(target); err != nil {
				return err
			}
			begun = true
		}
		_, _ = client.Session().Destroy(s.ID, (&api.WriteOptions{}).WithContext(ctx))
		destroyed = true
	}
	if !destroyed {
		return errNothing
	}
	return nil
}

// deleteKeys deletes some of onejob's keys: locks most often, and now and then
// the leader's, a replica's or a limit's.
func deleteKeys(ctx context.Context, h *fault) error {
	ctx, cancel := context.WithTimeout(ctx, consulMaxWait)
	defer cancel()
	client := h.c.consul.Servers[h.rand.IntN(3)].Client()
	below := []string{"/tasks/", "/running/", "/running/", "/leader", "/replicas/", "/limits/", "/overflow/"}[h.rand.IntN(7)]
	pairs, _, err := client.KV().List(consulPrefix+below, (&api.QueryOptions{}).WithContext(ctx))
	var keys []string
	for _, p := range pairs {
		if p.Session != "" || below != "/running/" { // names that nobody uses stay there, and are of no interest
			keys = append(keys, p.Key)
		}
	}
	if err != nil || len(keys) == 0 {
		return errNothing
	}
	for _, i := range h.rand.Perm(len(keys))[:min(3, len(keys))] {
		h.keys = append(h.keys, keys[i])
	}
	if err := h.begins(consulPrefix + below); err != nil {
		return err
	}
	for _, key := range h.keys {
		_, err := client.KV().Delete(key, (&api.WriteOptions{}).WithContext(ctx))
		if errors.Is(err, context.DeadlineExceeded) {
			break
		}
	}
	return nil
}
