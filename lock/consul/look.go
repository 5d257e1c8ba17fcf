package consul

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/hashicorp/consul/api"

	"onejob/lock"
)

// Holder tells who holds key: the session, empty if none, and the value.
// Both are empty if the key does not exist.
func (l *Locker) Holder(ctx context.Context, key string) (session string, value []byte, err error) {
	pair, err := l.get(ctx, l.taskKey(key))
	if err != nil {
		return "", nil, fmt.Errorf("look at key %s: %w", l.taskKey(key), l.explain(err))
	}
	if pair == nil {
		return "", nil, nil
	}
	return pair.Session, pair.Value, nil
}

// TaskHolder tells the same of the lock of a task without a lock_key, see [TaskKeys]. Who holds the
// task's own name alone, as onejob lock with its ID does, is not in the task's way while its reused name
// is free. The value is without the task's ID, with which that of a reused name begins.
func (l *Locker) TaskHolder(ctx context.Context, task int64) (session string, value []byte, err error) {
	id := strconv.FormatInt(task, 10)
	session, value, err = l.Holder(ctx, id)
	if err != nil {
		return "", nil, err
	}
	pair, err := l.get(ctx, l.reusedKey(task))
	switch {
	case err != nil:
		return "", nil, fmt.Errorf("look at key %s: %w", l.reusedKey(task), l.explain(err))
	case pair == nil || pair.Session == "":
		var own struct {
			TaskID int64 `json:"task_id"`
		}
		if json.Unmarshal(value, &own) != nil || own.TaskID != task {
			return "", nil, nil
		}
		return session, value, nil
	case namesAnother(pair.Value, id):
		return session, value, nil
	}
	return pair.Session, bytes.TrimPrefix(pair.Value, []byte(id+" ")), nil
}

// Node returns the Consul node that a session belongs to; empty if the session has ended.
func (l *Locker) Node(ctx context.Context, session string) (string, error) {
	entry, err := l.lookAt(ctx, l.keys, session)
	if err != nil {
		return "", fmt.Errorf("look at the session of a lock: %w", l.explain(err))
	}
	if entry == nil {
		return "", nil
	}
	return entry.Node, nil
}

// Await returns nil when nobody seems to hold key any more, a moment later if
// its holder died. Others may be waiting too: the caller must ask for the lock
// to know. It waits through Consul's absence; an error other than ctx's own
// means that waiting will not help.
func (l *Locker) Await(ctx context.Context, key string) error {
	return l.await(ctx, l.taskKey(key))
}

// ClusterID returns the id that this Consul has; empty if it has none.
func (l *Locker) ClusterID(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	pair, err := l.read(ctx, l.clusterKey())
	if err != nil || pair == nil {
		return "", l.explain(err)
	}
	return string(pair.Value), nil
}

// Present returns the sessions of the replicas that live here.
func (l *Locker) Present(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	sessions, err := l.client.present(ctx)
	return sessions, l.explain(err)
}

// Replicas returns what the replicas that live here say of themselves.
func (l *Locker) Replicas(ctx context.Context) ([]Replica, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	pairs, err := l.replicas(ctx)
	if err != nil {
		return nil, l.explain(err)
	}
	var list []Replica
	for _, p := range pairs {
		var r Replica
		if json.Unmarshal(p.Value, &r) == nil {
			list = append(list, r)
		}
	}
	return list, nil
}

// Database implements lock.Locker.
func (l *Locker) Database(ctx context.Context) (record []byte, version uint64, err error) {
	ops := api.TxnOps{op(api.KVGetOrEmpty, api.KVTxnOp{Key: l.databaseKey()})}
	session := l.Session()
	if session != "" {
		ops = append(ops, op(api.KVCheckSession, api.KVTxnOp{Key: l.replicaKey(session), Session: session}))
	}
	pairs, err := l.readAll(ctx, ops)
	switch pair := pairs[l.databaseKey()]; {
	case classify(err) == conflict:
		return nil, 0, fmt.Errorf("read key %s: %w", l.databaseKey(), errUnknownHere(session))
	case err != nil:
		return nil, 0, fmt.Errorf("read key %s: %w", l.databaseKey(), l.explain(err))
	case pair == nil:
		return nil, 0, nil
	default:
		return pair.Value, pair.ModifyIndex, nil
	}
}

// SetDatabase implements lock.Locker.
func (l *Locker) SetDatabase(ctx context.Context, record []byte, version uint64) (uint64, error) {
	body := appendOp([]byte{'['}, api.KVCAS, l.databaseKey(), "", record, version)
	session := l.Session()
	if session != "" {
		body = appendOp(append(body, ','), api.KVCheckSession, l.replicaKey(session), session, nil, 0)
	}
	written, err := l.txnJSON(ctx, append(body, ']'), true)
	switch {
	case classify(err) == conflict && slices.ContainsFunc(txnErrors(err), func(e *api.TxnError) bool { return notOurs(e.What) }):
		return 0, fmt.Errorf("write key %s: %w", l.databaseKey(), errUnknownHere(session))
	case classify(err) == conflict:
		return 0, lock.ErrChanged
	case err != nil:
		return 0, fmt.Errorf("write key %s: %w", l.databaseKey(), l.explain(err))
	}
	if index := written.next(l.databaseKey()); index != 0 {
		return index, nil
	}
	return 0, errors.New("write key " + l.databaseKey() + ": Consul does not say how it is now")
}

// errUnknownHere says that the key of our session is not that session's. Either somebody has deleted it,
// and it comes back within seconds, or this is another cluster's Consul, and the session's next renewal
// finds that out. Until then nothing is read and written here: replicas that work under the record would
// go by that of another cluster.
func errUnknownHere(session string) error {
	return fmt.Errorf("session %s is not known here", session)
}
