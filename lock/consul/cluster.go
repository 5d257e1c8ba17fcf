package consul

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/boottime"
	"onejob/internal/mutant"
	"onejob/lock"
)

func (l *Locker) clusterKey() string { return l.cfg.Prefix + "/cluster" }

// belong makes sure that this Consul is the cluster's own, or makes it so where that
// is safe, and returns the cluster's id.
func (l *Locker) belong(ctx context.Context) (id string, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	for range 3 {
		id, err := l.cluster.ID(ctx)
		if err != nil {
			return "", listError{err}
		}
		pair, _, err := l.keys.KV().Get(l.clusterKey(), l.query(ctx))
		if err != nil {
			return "", fmt.Errorf("look at key %s: %w", l.clusterKey(), err)
		}
		var index uint64 // of what is replaced; zero creates
		if pair != nil {
			if index = pair.ModifyIndex; string(pair.Value) == id && id != "" {
				return id, nil
			}
		}
		sessions, err := l.present(ctx)
		if err != nil {
			return "", err
		}
		known := lock.Known{Sessions: sessions, Foreign: pair != nil}
		if mutant.Identity && id != "" {
			return id, nil
		}
		if err := l.cluster.Adopt(ctx, id, known, func(ctx context.Context, id string) error {
			return l.txn(ctx, l.keys, api.TxnOps{{KV: &api.KVTxnOp{Verb: api.KVCAS, Key: l.clusterKey(), Value: []byte(id), Index: index}}})
		}); err != nil {
			return "", listError{fmt.Errorf("key %s: %w", l.clusterKey(), err)}
		}
	}
	return "", errors.New("the cluster's id keeps changing")
}

// ClusterID returns the id that this Consul has; empty if it has none.
func (l *Locker) ClusterID(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	pair, _, err := l.keys.KV().Get(l.clusterKey(), l.query(ctx))
	if err != nil {
		return "", fmt.Errorf("look at key %s: %w", l.clusterKey(), l.cfg.explain(err))
	}
	if pair == nil {
		return "", nil
	}
	return string(pair.Value), nil
}

// Present returns the sessions of the replicas that live here.
func (l *Locker) Present(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	sessions, err := l.present(ctx)
	if err != nil {
		return nil, l.cfg.explain(err)
	}
	return sessions, nil
}

// Replicas returns what the replicas that live here say of themselves.
func (l *Locker) Replicas(ctx context.Context) ([]Replica, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	pairs, err := l.list(ctx, l.replicaKey(""))
	if err != nil {
		return nil, l.cfg.explain(err)
	}
	var list []Replica
	for _, p := range pairs {
		var r Replica
		if strings.TrimPrefix(p.Key, l.replicaKey("")) == p.Session && json.Unmarshal(p.Value, &r) == nil {
			list = append(list, r)
		}
	}
	return list, nil
}

// present returns the sessions whose replicas have a key. A key that its own session
// does not hold was put there by somebody else, and says nothing.
func (l *Locker) present(ctx context.Context) ([]string, error) {
	pairs, err := l.list(ctx, l.replicaKey(""))
	if err != nil {
		return nil, err
	}
	var sessions []string
	for _, p := range pairs {
		if s := strings.TrimPrefix(p.Key, l.replicaKey("")); s == p.Session {
			sessions = append(sessions, s)
		}
	}
	return sessions, nil
}

// ours makes sure, for a request whose answer will be acted upon, that it comes from
// the cluster's own Consul.
func (l *Locker) ours(ctx context.Context, id string) error {
	pair, _, err := l.keys.KV().Get(l.clusterKey(), l.query(ctx))
	switch {
	case err != nil:
		return fmt.Errorf("look at key %s: %w", l.clusterKey(), err)
	case mutant.Identity:
		return nil
	case pair == nil:
		return fmt.Errorf("%w: the key %s is gone", lock.ErrOtherCluster, l.clusterKey())
	case string(pair.Value) != id:
		return fmt.Errorf("%w: the key %s is %.64q, not %q", lock.ErrOtherCluster, l.clusterKey(), pair.Value, id)
	}
	return nil
}

// stay ends the session if this is the cluster's Consul no more, and puts the cluster's
// id back where somebody deleted it. That this Consul knows our session proves that it
// is ours.
func (t *session) stay(ctx context.Context) bool {
	err := t.l.ours(ctx, t.cluster)
	if !errors.Is(err, lock.ErrOtherCluster) {
		return err == nil
	}
	if alive, err := t.lives(ctx); !alive {
		return err == nil
	}
	err = t.l.txn(ctx, t.l.keys, api.TxnOps{
		{KV: &api.KVTxnOp{Verb: api.KVCheckSession, Key: t.l.replicaKey(t.id), Session: t.id}},
		{KV: &api.KVTxnOp{Verb: api.KVCAS, Key: t.l.clusterKey(), Value: []byte(t.cluster)}},
	})
	if err == nil {
		return true
	}
	if err := t.l.ours(ctx, t.cluster); errors.Is(err, lock.ErrOtherCluster) {
		t.lose(fmt.Errorf("%w: %w", lock.ErrLost, err))
	}
	return false
}

// Heard implements lock.Locker.
func (l *Locker) Heard(session string, sent boottime.Instant) {
	if t := l.current(); t != nil && t.id == session {
		t.heard(sent)
	}
}

func (t *session) heard(sent boottime.Instant) {
	t.extend(&t.leaseWindow.silence, t.l.cfg.silence(), sent)
}

// speak gives a sign of life to Consul, as a change of the replica's key, while the
// cluster's list does not answer.
func (t *session) speak(ctx context.Context) bool {
	timing := t.l.cfg.silence()
	t.mu.Lock()
	silent := boottime.Now().Sub(t.leaseWindow.silence.Add(-(timing.TTL - timing.Margin)))
	t.mu.Unlock()
	if silent < listMaxWait {
		return true
	}
	sent := boottime.Now()
	if err := t.appear(ctx); err != nil {
		t.failed("sign_of_life_failed", err)
		return false
	}
	t.heard(sent)
	return true
}

// listMaxWait is how long the cluster's list may take to acknowledge a heartbeat
// before Consul gets one.
const listMaxWait = 2500 * time.Millisecond

// Lose implements lock.Locker.
func (l *Locker) Lose(session string, why error) {
	if t := l.current(); t != nil && t.id == session {
		t.lose(fmt.Errorf("%w: %w", lock.ErrLost, why))
	}
}

// End implements lock.Locker.
func (l *Locker) End(ctx context.Context, session string, silence time.Duration) (lock.End, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	t := l.current()
	if t == nil || t.cluster == "" {
		return lock.Alive, lock.ErrLost
	}
	if err := l.ours(ctx, t.cluster); err != nil {
		return lock.Alive, err
	}
	pair, _, err := l.keys.KV().Get(l.replicaKey(session), l.query(ctx))
	if err != nil {
		return lock.Alive, fmt.Errorf("look at key %s: %w", l.replicaKey(session), err)
	}
	var index uint64
	if pair != nil && pair.Session == session {
		index = pair.ModifyIndex
	}
	if l.membership.quiet(session, index) < silence {
		return lock.Alive, nil
	}
	if err := l.end(ctx, session); err != nil {
		return lock.Alive, err
	}
	l.membership.buried(session)
	said, _, err := l.keys.KV().Get(l.stoppedKey(session), l.query(ctx))
	switch {
	case err != nil:
		return lock.Alive, fmt.Errorf("look at key %s: %w", l.stoppedKey(session), err)
	case said == nil:
		return lock.Dead, nil
	case silence == 0: // the list says how it ended by now
		_, _ = l.keys.KV().Delete(l.stoppedKey(session), l.write(ctx))
	}
	return lock.Stopped, nil
}

// stoppedKey is where a replica says that it has stopped in order, if the cluster's list
// could not be told. No session holds it.
func (l *Locker) stoppedKey(session string) string { return l.cfg.Prefix + "/stopped/" + session }

// end ends a session that nobody works under any more, and the sessions of its slots.
// Locks and slots are given back first: those of a session that is destroyed stay
// locked for the lock-delay.
func (l *Locker) end(ctx context.Context, session string) error {
	entry, err := l.membership.session(ctx, session)
	if err != nil || entry == nil {
		return err
	}
	slots, err := l.slotSessionsOf(ctx, entry)
	if err != nil {
		return err
	}
	if err := l.requeueOf(ctx, session, slots); err != nil {
		return err
	}
	// The session itself is last: while it is there, the next process that ends it finds
	// the others.
	for _, id := range append(slots, session) {
		if _, err := l.keys.Session().Destroy(id, l.write(ctx)); err != nil {
			return fmt.Errorf("end session %s: %w", id, l.cfg.explain(err))
		}
	}
	return nil
}

// slotSessionsOf returns the sessions that hang on the same health check as a
// replica's own. Without a check nobody can tell whose a slot's session is; it ends by
// its TTL.
func (l *Locker) slotSessionsOf(ctx context.Context, replica *api.SessionEntry) (slots []string, err error) {
	if len(replica.ServiceChecks) != 1 {
		return nil, nil
	}
	all, _, err := l.keys.Session().Node(replica.Node, l.query(ctx))
	if err != nil {
		return nil, fmt.Errorf("list the sessions of node %s: %w", replica.Node, err)
	}
	for _, s := range all {
		if s.ID != replica.ID && len(s.ServiceChecks) == 1 && s.ServiceChecks[0].ID == replica.ServiceChecks[0].ID {
			slots = append(slots, s.ID)
		}
	}
	return slots, nil
}

// ReportDeath ends all sessions of a process whose end the caller has seen, and returns them.
// Nothing that the process has started may be left.
func (l *Locker) ReportDeath(ctx context.Context, process string) (sessions []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	pairs, err := l.list(ctx, l.replicaKey(""))
	if err != nil {
		return nil, l.cfg.explain(err)
	}
	for _, p := range pairs {
		var r Replica
		if json.Unmarshal(p.Value, &r) != nil || r.Process != process || p.Session == "" {
			continue
		}
		if err := l.end(ctx, p.Session); err != nil {
			return sessions, err
		}
		sessions = append(sessions, p.Session)
	}
	return sessions, nil
}

// requeueOf deletes the keys that a session holds, but for its replica's own: that
// goes with the session and tells the others. It also leaves the semaphores that the
// sessions of its slots are in.
func (l *Locker) requeueOf(ctx context.Context, session string, slots []string) error {
	pairs, err := l.list(ctx, l.cfg.Prefix+"/")
	if err != nil {
		return fmt.Errorf("give back the locks of session %s: %w", session, err)
	}
	for _, p := range pairs {
		if name, ok := strings.CutPrefix(p.Key, l.limitsFolder()); ok && p.Session != "" && slices.Contains(slots, p.Session) {
			l.leaveFor(strings.TrimSuffix(name, "/"+p.Session), p.Session)
		}
	}
	pairs = slices.DeleteFunc(pairs, func(p *api.KVPair) bool {
		return p.Session != session || p.Key == l.replicaKey(session)
	})
	for chunk := range slices.Chunk(pairs, maxBatch) {
		ops := make(api.TxnOps, len(chunk))
		for i, p := range chunk {
			ops[i] = &api.TxnOp{KV: &api.KVTxnOp{Verb: api.KVDeleteCAS, Key: p.Key, Index: p.ModifyIndex}}
		}
		if err := l.txn(ctx, l.keys, ops); err != nil {
			return fmt.Errorf("give back the locks of session %s: %w", session, l.cfg.explain(err))
		}
	}
	return nil
}
