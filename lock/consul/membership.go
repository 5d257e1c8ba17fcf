package consul

import (
	"context"
	"encoding/json"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"onejob/boottime"
	"onejob/internal/retry"
)

// membership knows which sessions live. A blocking query on the replicas' keys
// tells it quickly that one may have ended, for anybody may delete a key; only
// Consul's own word on the session convinces it, and only if it is complete and comes
// from the cluster's own Consul. A session that holds its key is alive, whatever was
// heard before.
type membership struct {
	*client
	changed func()      // is called when the set of living sessions has changed
	reusing atomic.Bool // all living replicas share locks under reused names

	// own returns the replica's own session, its cluster, and what to call when the session
	// has no key; empty if there is none.
	own func() (session, cluster string, reappear func(context.Context))

	mu    sync.Mutex
	older boottime.Instant  // when a replica was last seen that does not reuse names; zero if never
	alive map[string]uint64 // the index of its key, as the replicas' keys told last
	ended map[string]end
	signs map[string]sign
	asked map[string]looks
}

// end is how a session ended.
type end struct {
	at     boottime.Instant // when Consul first told us so
	buried bool             // nothing is left of it, see Locker.End
}

// sign is the last sign of life of a session: its key was written with this index,
// or had gone if that is zero, when we looked then.
type sign struct {
	index uint64
	at    boottime.Instant
}

// looks are those at the key of a session that somebody doubts.
type looks struct {
	since, last boottime.Instant // the first one, and the last; none is more than looksApart from the one before
}

// looksApart is how long after a look the next one must come. A snapshot that is restored takes back
// the signs of life that were given since it was made; the replica gives another one a second later.
const looksApart = 2500 * time.Millisecond

func newMembership(c *client, changed func()) *membership {
	return &membership{client: c, changed: changed, alive: map[string]uint64{}, ended: map[string]end{}, signs: map[string]sign{}, asked: map[string]looks{}}
}

// watch follows the replicas' keys until ctx ends.
func (c *membership) watch(ctx context.Context) {
	prefix := c.replicaKey("")
	var index uint64
	for failures := 0; ctx.Err() == nil; {
		q, cancel := c.watching(ctx, index)
		pairs, meta, err := c.keys.KV().List(prefix, q)
		cancel()
		if err != nil {
			c.blind()
			failures++
			index = 0
			retry.Pause(ctx, retry.Backoff(failures))
			continue
		}
		failures = 0
		index = nextIndex(index, meta)
		alive, reusing := make(map[string]uint64, len(pairs)), true
		for _, pair := range pairs {
			// A key that its own session does not hold was put there by somebody
			// else, and says nothing of that session.
			if session := strings.TrimPrefix(pair.Key, prefix); session == pair.Session {
				alive[session] = pair.ModifyIndex
				var r Replica
				reusing = reusing && json.Unmarshal(pair.Value, &r) == nil && r.Names == names
			}
		}
		c.reuse(reusing && !meta.ResultsFilteredByACLs)
		c.update(ctx, alive)
		retry.Pause(ctx, rand.N(20*time.Millisecond)+min(time.Duration(len(pairs))*pausePerReplica, pauseMost))
	}
}

// What a look at the replicas' keys waits for after the last one, besides some milliseconds. Each
// look lists all of them, and each change of one ends everybody's. While Postgres is unavailable
// each replica changes its key once a second: by calculation 80 replicas would make Consul list some 300,000
// keys a second without this (50 looks of each), and 16,000 with it.
const (
	pausePerReplica = 5 * time.Millisecond
	pauseMost       = 500 * time.Millisecond
)

// reuse takes in whether all living replicas reuse names. One that does not may have lost
// just its session, and keys of its own may be in their lock-delay.
func (c *membership) reuse(all bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := boottime.Now()
	if !all {
		c.older = now
	}
	reusing := all && (c.older == 0 || now.Sub(c.older) > c.cfg.LockDelay+2*c.cfg.SessionTTL)
	if c.reusing.Swap(reusing) != reusing && c.older != 0 {
		c.cfg.Log.Info("older_replicas", zap.Bool("present", !reusing))
	}
}

// update takes in which sessions have a key now, and asks about those that had
// one before.
func (c *membership) update(ctx context.Context, alive map[string]uint64) {
	c.mu.Lock()
	now := boottime.Now()
	var left []string
	for s := range c.alive {
		if _, stays := alive[s]; !stays {
			left = append(left, s)
		}
	}
	for s, index := range alive {
		delete(c.ended, s) // it is held by its session: whatever told us that this ended was wrong
		if known, ok := c.signs[s]; !ok || known.index != index {
			c.signs[s] = sign{index, now}
		}
	}
	changed := len(left) > 0 || len(alive) != len(c.alive)
	c.alive = alive
	maps.DeleteFunc(c.ended, func(_ string, e end) bool { return now.Sub(e.at) > time.Hour })
	maps.DeleteFunc(c.signs, func(_ string, s sign) bool { return s.index == 0 && now.Sub(s.at) > time.Hour })
	c.mu.Unlock()

	if own, _, reappear := c.own(); own != "" && alive[own] == 0 {
		reappear(ctx)
	}
	for _, s := range left {
		_, ended, _ := c.ask(ctx, s) // if it fails, Dead asks again
		c.vanished(s, ended)
	}
	if changed {
		c.changed()
	}
}

// blind is called when the replicas' keys cannot be had: the silence of those that had one is
// counted from now on again. A snapshot that is restored may take back a sign that was given meanwhile.
func (c *membership) blind() {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := boottime.Now()
	for session, s := range c.signs {
		if s.index != 0 {
			c.signs[session] = sign{s.index, now}
		}
	}
	clear(c.asked)
}

// vanished notes that a session's key has gone. If it went with the session, that was
// no sign of life.
func (c *membership) vanished(session string, ended bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s, known := c.signs[session]
	if !known || !ended {
		s.at = boottime.Now()
	}
	s.index = 0
	c.signs[session] = s
}

// quiet returns for how long a session had given no sign of life when its key was asked for, given
// the index that the answer has, zero if the key is gone. What came after the question the answer
// may lack.
func (c *membership) quiet(session string, index uint64, asked boottime.Instant) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s, ok := c.signs[session]; ok && s.index == index {
		return asked.Sub(s.at)
	}
	if e, ended := c.ended[session]; ended && index == 0 {
		return asked.Sub(e.at) // it can give no sign any more
	}
	c.signs[session] = sign{index, boottime.Now()}
	return 0
}

// buried notes that nothing is left of a session.
func (c *membership) buried(session string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended[session] = end{boottime.Now(), true}
}

// ask asks Consul whether a session has ended, and remembers when it first said
// so: what must pass from then on is counted from there, which is late and never
// early.
func (c *membership) ask(ctx context.Context, session string) (e end, ended bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if _, cluster, _ := c.own(); cluster != "" {
		if err := c.ours(ctx, cluster); err != nil {
			return end{}, false, err
		}
	}
	if entry, err := c.lookAt(ctx, c.keys, session); err != nil || entry != nil {
		return end{}, false, err
	}
	e = end{at: boottime.Now()}
	c.mu.Lock()
	defer c.mu.Unlock()
	if before, known := c.ended[session]; known {
		return before, true, nil
	}
	c.ended[session] = e
	time.AfterFunc(c.wait(e)+5*time.Millisecond, c.changed)
	return e, true, nil
}

// wait returns how long after a session's end its work may go on: somebody may have
// destroyed the session of a replica that cannot hear of it. It may believe in its
// leases until it has missed its heartbeats for too long.
func (c *membership) wait(e end) time.Duration {
	cfg := c.cfg
	switch {
	case e.buried:
		return 0
	case cfg.Liveness == Check:
		return max(cfg.LockDelay, cfg.CheckTTL)
	}
	return max(cfg.LockDelay, cfg.SessionTTL)
}

// look takes a fresh look at the keys of those of the sessions that have one: the blocking query
// may hang on a connection that is dead, and what it misses a restored snapshot can take back.
func (c *membership) look(ctx context.Context, sessions []string) {
	c.mu.Lock()
	sessions = slices.DeleteFunc(slices.Clone(sessions), func(s string) bool { return c.alive[s] == 0 })
	c.mu.Unlock()
	if len(sessions) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	sent := boottime.Now()
	pairs, err := c.list(ctx, c.replicaKey(""))
	if err != nil {
		c.blind()
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := boottime.Now()
	maps.DeleteFunc(c.asked, func(_ string, l looks) bool { return sent.Sub(l.last) > looksApart })
	for _, pair := range pairs {
		s := strings.TrimPrefix(pair.Key, c.replicaKey(""))
		if pair.Session != s || !slices.Contains(sessions, s) {
			continue
		}
		if known, ok := c.signs[s]; !ok || known.index != pair.ModifyIndex {
			c.signs[s] = sign{pair.ModifyIndex, now}
		}
		l, before := c.asked[s]
		if !before {
			l.since = sent
		}
		l.last = max(l.last, sent)
		c.asked[s] = l
	}
}

// watched returns for how long looks at a session's key have followed each other closely, up to
// now; zero if they do not.
func (c *membership) watched(session string) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	l, ok := c.asked[session]
	now := boottime.Now()
	if !ok || now.Sub(l.last) > looksApart {
		return 0
	}
	return now.Sub(l.since)
}

func (c *membership) dead(ctx context.Context, sessions []string) (dead []string, err error) {
	c.look(ctx, sessions)
	for _, s := range sessions {
		c.mu.Lock()
		e, ended := c.ended[s]
		_, alive := c.alive[s]
		c.mu.Unlock()
		if !ended && !alive {
			if e, ended, err = c.ask(ctx, s); err != nil {
				return dead, err
			}
		}
		if ended && boottime.Now().Sub(e.at) >= c.wait(e) {
			dead = append(dead, s)
		}
	}
	return dead, nil
}
