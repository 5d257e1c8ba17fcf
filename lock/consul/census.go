package consul

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/internal/boottime"
	"onejob/internal/mutant"
)

// census knows which sessions live. A blocking query on the replicas' keys
// tells it quickly that one may have ended, for anybody may delete a key; only
// Consul's own word on the session convinces it. An ended session never comes
// back: IDs are not used twice, and nobody renews one that a restored snapshot
// brings back.
type census struct {
	l *Locker

	mu    sync.Mutex
	alive map[string]string // the health check of each, as the replicas' keys told last
	ended map[string]end
}

// end is how a session ended.
type end struct {
	at   boottime.Instant // when Consul first told us so
	mute bool             // because its replica had not been heard of for as long as its health check allows
}

func newCensus(l *Locker) *census {
	return &census{l: l, alive: map[string]string{}, ended: map[string]end{}}
}

// watch follows the replicas' keys until ctx ends.
func (c *census) watch(ctx context.Context) {
	prefix := c.l.replicaKey("")
	var index uint64
	for failures := 0; ctx.Err() == nil; {
		q, cancel := c.l.watching(ctx, index)
		pairs, meta, err := c.l.keys.KV().List(prefix, q)
		cancel()
		if err != nil {
			failures++
			index = 0
			pause(ctx, backoff(failures))
			continue
		}
		failures = 0
		index = nextIndex(index, meta)
		alive := make(map[string]string, len(pairs))
		for _, pair := range pairs {
			var card card
			_ = json.Unmarshal(pair.Value, &card) // an outside program may write what it likes
			alive[strings.TrimPrefix(pair.Key, prefix)] = card.Check
		}
		c.update(ctx, alive)
		// A restart of many replicas must not make each of them ask once for
		// every single one.
		pause(ctx, rand.N(20*time.Millisecond))
	}
}

// update takes in which sessions have a key now, and asks about those that had
// one before.
func (c *census) update(ctx context.Context, alive map[string]string) {
	c.mu.Lock()
	left := map[string]string{}
	for s, check := range c.alive {
		if _, stays := alive[s]; !stays {
			left[s] = check
		}
	}
	changed := len(left) > 0 || len(alive) != len(c.alive)
	c.alive = alive
	for s, e := range c.ended {
		if boottime.Now().Sub(e.at) > time.Hour {
			delete(c.ended, s)
		}
	}
	c.mu.Unlock()

	if t := c.l.current(); t != nil {
		if _, there := alive[t.id]; !there {
			t.reappear(ctx)
		}
	}
	for s, check := range left {
		_, _, _ = c.ask(ctx, s, check) // if it fails, Dead asks again
	}
	if changed {
		c.l.signal()
	}
}

// ask asks Consul whether a session has ended, and remembers when it first said
// so: what must pass from then on is counted from there, which is late and never
// early. check is the session's health check, empty if that is not known.
func (c *census) ask(ctx context.Context, session, check string) (e end, ended bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	entry, _, err := c.l.keys.Session().Info(session, c.l.query(ctx))
	if err != nil || entry != nil {
		return end{}, false, err
	}
	e = end{boottime.Now(), c.mute(ctx, check)}
	c.mu.Lock()
	defer c.mu.Unlock()
	if before, known := c.ended[session]; known {
		return before, true, nil
	}
	c.ended[session] = e
	time.AfterFunc(c.wait(e)+5*time.Millisecond, c.l.signal)
	return e, true, nil
}

// mute reports whether a health check has failed. A check that cannot be seen, for
// want of a right or because it is gone, has not.
func (c *census) mute(ctx context.Context, check string) bool {
	if check == "" {
		return false
	}
	checks, _, err := c.l.keys.Health().Checks(c.l.cfg.Service, c.l.query(ctx))
	if err != nil {
		return false
	}
	return slices.ContainsFunc(checks, func(h *api.HealthCheck) bool { return h.CheckID == check && h.Status == api.HealthCritical })
}

// wait returns how long after a session's end its work may go on. Who was mute
// for as long as its health check allows has given up by itself. Who was not,
// because somebody destroyed the session, and cannot hear of it, may believe in
// its lease for almost as long as it takes to become mute.
func (c *census) wait(e end) time.Duration {
	cfg := c.l.cfg
	switch {
	case e.mute:
		return cfg.LockDelay
	case cfg.Liveness == Check:
		return max(cfg.LockDelay, cfg.CheckTTL)
	}
	return max(cfg.LockDelay, cfg.SessionTTL)
}

func (c *census) dead(ctx context.Context, sessions []string) (dead []string, err error) {
	for _, s := range sessions {
		c.mu.Lock()
		e, ended := c.ended[s]
		check, alive := c.alive[s]
		c.mu.Unlock()
		if !ended && !alive {
			if e, ended, err = c.ask(ctx, s, check); err != nil {
				return dead, err
			}
		}
		if ended && (boottime.Now().Sub(e.at) >= c.wait(e) || mutant.LockDelay) {
			dead = append(dead, s)
		}
	}
	return dead, nil
}
