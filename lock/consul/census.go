package consul

import (
	"context"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"onejob/internal/boottime"
)

// census knows which sessions live. A blocking query on the replicas' keys
// tells it quickly that one may have ended, for anybody may delete a key; only
// Consul's own word on the session convinces it. An ended session never comes
// back: IDs are not used twice, and nobody renews one that a restored snapshot
// brings back.
type census struct {
	l *Locker

	mu    sync.Mutex
	alive map[string]bool             // as the replicas' keys told last
	ended map[string]boottime.Instant // when Consul first told us so
}

func newCensus(l *Locker) *census {
	return &census{l: l, alive: map[string]bool{}, ended: map[string]boottime.Instant{}}
}

// watch follows the replicas' keys until ctx ends.
func (c *census) watch(ctx context.Context) {
	prefix := c.l.replicaKey("")
	var index uint64
	for failures := 0; ctx.Err() == nil; {
		q, cancel := c.l.watching(ctx, index)
		keys, meta, err := c.l.keys.KV().Keys(prefix, "", q)
		cancel()
		if err != nil {
			failures++
			index = 0
			pause(ctx, backoff(failures))
			continue
		}
		failures = 0
		index = nextIndex(index, meta)
		alive := make(map[string]bool, len(keys))
		for _, k := range keys {
			alive[strings.TrimPrefix(k, prefix)] = true
		}
		c.update(ctx, alive)
		// A restart of many replicas must not make each of them ask once for
		// every single one.
		pause(ctx, rand.N(20*time.Millisecond))
	}
}

// update takes in which sessions have a key now, and asks about those that had
// one before.
func (c *census) update(ctx context.Context, alive map[string]bool) {
	c.mu.Lock()
	var left []string
	for s := range c.alive {
		if !alive[s] {
			left = append(left, s)
		}
	}
	changed := len(left) > 0 || len(alive) != len(c.alive)
	c.alive = alive
	for s, at := range c.ended {
		if boottime.Now().Sub(at) > time.Hour {
			delete(c.ended, s)
		}
	}
	c.mu.Unlock()

	if t := c.l.current(); t != nil && !alive[t.id] {
		t.reappear(ctx)
	}
	for _, s := range left {
		_, _, _ = c.ask(ctx, s) // if it fails, Dead asks again
	}
	if changed {
		c.l.signal()
	}
}

// ask asks Consul whether a session has ended, and remembers when it first said
// so: the lock-delay is counted from there, which is late and never early.
func (c *census) ask(ctx context.Context, session string) (at boottime.Instant, ended bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	entry, _, err := c.l.keys.Session().Info(session, c.l.query(ctx))
	if err != nil || entry != nil {
		return 0, false, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	at, known := c.ended[session]
	if !known {
		at = boottime.Now()
		c.ended[session] = at
		time.AfterFunc(c.l.cfg.LockDelay+5*time.Millisecond, c.l.signal)
	}
	return at, true, nil
}

func (c *census) dead(ctx context.Context, sessions []string) (dead []string, err error) {
	for _, s := range sessions {
		c.mu.Lock()
		at, ended := c.ended[s]
		alive := c.alive[s]
		c.mu.Unlock()
		if !ended && !alive {
			if at, ended, err = c.ask(ctx, s); err != nil {
				return dead, err
			}
		}
		if ended && boottime.Now().Sub(at) >= c.l.cfg.LockDelay {
			dead = append(dead, s)
		}
	}
	return dead, nil
}
