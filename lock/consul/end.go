package consul

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/boottime"
	"onejob/lock"
)

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
	asked := boottime.Now()
	pair, err := l.read(ctx, l.replicaKey(session))
	if err != nil {
		return lock.Alive, err
	}
	var index uint64
	if pair != nil && pair.Session == session {
		index = pair.ModifyIndex
	}
	if l.membership.quiet(session, index, asked) < silence {
		return lock.Alive, nil
	}
	if index != 0 && l.membership.watched(session) < silence-lock.Unwatched {
		return lock.Alive, nil
	}
	// The list is asked last, so that no heartbeat has come between its silence and this one.
	if silence > 0 {
		if silent, err := t.list.Silent(ctx, session); !silent || err != nil {
			return lock.Alive, err
		}
	}
	if err := l.end(ctx, session); err != nil {
		return lock.Alive, err
	}
	l.membership.buried(session)
	said, err := l.read(ctx, l.stoppedKey(session))
	switch {
	case err != nil:
		return lock.Alive, err
	case said == nil:
		return lock.Dead, nil
	case silence == 0: // the list says how it ended by now
		_, _ = l.keys.KV().Delete(l.stoppedKey(session), l.write(ctx))
	}
	return lock.Stopped, nil
}

// end ends a session that nobody works under any more, and the sessions of its slots.
// Locks and slots are given back first: those of a session that is destroyed stay
// locked for the lock-delay.
func (l *Locker) end(ctx context.Context, session string) error {
	entry, err := l.lookAt(ctx, l.keys, session)
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
			return fmt.Errorf("end session %s: %w", id, l.explain(err))
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

// ReportDeath implements lock.Reporter.
func (l *Locker) ReportDeath(ctx context.Context, process string) (sessions []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	pairs, err := l.list(ctx, l.replicaKey(""))
	if err != nil {
		return nil, l.explain(err)
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

// requeueOf deletes the keys that a session holds, except for its replica's own: that
// goes with the session and tells the others. It also leaves the semaphores that the
// sessions of its slots are in.
func (l *Locker) requeueOf(ctx context.Context, session string, slots []string) error {
	pairs, err := l.list(ctx, l.cfg.Prefix+"/")
	if err != nil {
		return fmt.Errorf("give back the locks of session %s: %w", session, err)
	}
	for _, p := range pairs {
		if name, ok := strings.CutPrefix(p.Key, l.limitsFolder()); ok && p.Session != "" && slices.Contains(slots, p.Session) {
			if ctx.Err() != nil { // each of them may take as long
				return fmt.Errorf("give back the slots of session %s: %w", session, context.Cause(ctx))
			}
			l.limits.leaveFor(strings.TrimSuffix(name, "/"+p.Session), p.Session)
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
			return fmt.Errorf("give back the locks of session %s: %w", session, l.explain(err))
		}
	}
	return nil
}
