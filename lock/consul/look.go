package consul

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/hashicorp/consul/api"
)

// watchWait is how long a blocking query waits for a change. It is short
// because it is also how long we stay blind when a connection dies without a
// word, and a query every ten seconds costs next to nothing.
const watchWait = 10 * time.Second

// watching returns a context for one blocking query, and its options. Consul
// adds up to a sixteenth to the wait; a connection that went dead must not keep
// us longer than that.
func (l *Locker) watching(ctx context.Context, index uint64) (*api.QueryOptions, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, watchWait+watchWait/16+2*time.Second)
	q := l.query(ctx)
	q.WaitIndex, q.WaitTime = index, watchWait
	return q, cancel
}

// nextIndex returns from which index to go on watching. An index that went
// backwards means that Consul was rebuilt or restored: begin again.
func nextIndex(before uint64, meta *api.QueryMeta) uint64 {
	if meta.LastIndex < before {
		return 0
	}
	return max(meta.LastIndex, 1) // zero would not wait
}

// Holder tells who holds key: the session, empty if none, and the value.
// Both are empty if the key does not exist.
func (l *Locker) Holder(ctx context.Context, key string) (session string, value []byte, err error) {
	pair, err := l.get(ctx, l.taskKey(key))
	if err != nil {
		return "", nil, fmt.Errorf("look at key %s: %w", l.taskKey(key), l.cfg.explain(err))
	}
	if pair == nil {
		return "", nil, nil
	}
	return pair.Session, pair.Value, nil
}

// Node returns the Consul node that a session belongs to; empty if the session has ended.
func (l *Locker) Node(ctx context.Context, session string) (string, error) {
	entry, err := l.lookAt(ctx, l.keys, session)
	if err != nil {
		return "", fmt.Errorf("look at the session of a lock: %w", l.cfg.explain(err))
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

func (l *Locker) await(ctx context.Context, path string) error {
	var index uint64
	for {
		pair, next, err := l.watch(ctx, path, index)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case classify(err) == wrong:
			return fmt.Errorf("wait for key %s: %w", path, l.cfg.explain(err))
		case err != nil:
			index = 0
			pause(ctx, backoff(3))
		case pair == nil || pair.Session == "":
			// Free, or in its lock-delay. The jitter keeps those who wait from
			// asking all at once.
			d := 10 * time.Millisecond
			if index == 0 { // it has been free for a while, and still we were refused
				d = 200 * time.Millisecond
			}
			pause(ctx, d+rand.N(40*time.Millisecond))
			return ctx.Err()
		default:
			index = next
		}
	}
}

// list reads all keys in a folder. It is an error if the token may not see all of them.
func (l *Locker) list(ctx context.Context, folder string) (api.KVPairs, error) {
	pairs, meta, err := l.keys.KV().List(folder, l.query(ctx))
	if err == nil && meta.ResultsFilteredByACLs {
		err = incomplete("some keys below " + folder)
	}
	if err != nil {
		return nil, fmt.Errorf("list the keys below %s: %w", folder, err)
	}
	return pairs, nil
}

// get reads a key, whatever it consists of; nil if it does not exist.
func (l *Locker) get(ctx context.Context, path string) (*api.KVPair, error) {
	pairs, err := l.readAll(ctx, api.TxnOps{op(api.KVGetOrEmpty, api.KVTxnOp{Key: path})})
	return pairs[path], err
}

// pollWait is how often a key is looked at that cannot be watched.
const pollWait = 300 * time.Millisecond

// watch reads a key, and waits before for a change since index, unless that is zero. It
// also returns from which index to go on watching. A key whose name Consul does not take
// as it is in the path of a request is polled.
func (l *Locker) watch(ctx context.Context, path string, index uint64) (*api.KVPair, uint64, error) {
	if !plain(path) {
		if index != 0 {
			pause(ctx, pollWait+rand.N(pollWait/4))
		}
		pair, err := l.get(ctx, path)
		return pair, 1, err
	}
	q, cancel := l.watching(ctx, index)
	defer cancel()
	pair, meta, err := l.keys.KV().Get(path, q)
	if err != nil {
		return nil, 0, err
	}
	return pair, nextIndex(index, meta), nil
}
