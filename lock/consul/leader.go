package consul

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/internal/retry"
	"onejob/lock"
)

// The leader's key follows Consul's own procedure for client-side elections: a
// lock on a key that everybody knows, whose value says who holds it. Any program
// can take part in it with plain HTTP calls, and any program can discover the
// leader with a GET. A key without a session means that nobody leads.
// https://developer.hashicorp.com/consul/docs/automate/application-leader-election

// Leader is who leads.
type Leader struct {
	Replica                 // empty if an outside program leads whose value we do not understand
	Since   time.Time       `json:"since"`
	Session string          `json:"session"`
	Value   json.RawMessage `json:"-"` // as it stands in the key
}

// Campaign implements lock.Locker. A replica that waits follows the key with a blocking
// query, and tries to lock it a few random milliseconds after a release, and after the
// lock-delay when the leader died.
func (l *Locker) Campaign(ctx context.Context) (lock.Lease, error) {
	for ctx.Err() == nil {
		changed := l.Changed()
		session := l.Session()
		if session == "" {
			select {
			case <-changed:
			case <-ctx.Done():
			}
			continue
		}
		value := encode(Leader{Replica: l.cfg.Replica, Since: time.Now().UTC(), Session: session})
		ls, err := l.acquire(ctx, lock.Request{Session: session, Key: "leader", Value: value}, l.leaderPath())
		switch {
		case err == nil:
			l.draining.Go(func() { ls.follow() })
			return ls, nil
		case errors.Is(err, lock.ErrDelayed):
			retry.Pause(ctx, l.cfg.LockDelay+rand.N(50*time.Millisecond))
		case errors.Is(err, lock.ErrHeld):
			if err := l.await(ctx, l.leaderPath()); err != nil {
				retry.Pause(ctx, time.Second) // a right is missing; it may be given
			}
		default:
			retry.Pause(ctx, retry.Backoff(5))
		}
	}
	return nil, ctx.Err()
}

// follow watches the key of a lease and revokes it as soon as the key is not
// ours any more. It ends with the lease.
func (ls *lease) follow() {
	ctx := ls.Context()
	for ctx.Err() == nil {
		err := ls.in.follow(ctx, ls.path, func(pair *api.KVPair, _ bool) bool {
			return pair == nil || pair.Session != ls.in.id
		})
		if err == nil {
			if alive, _ := ls.in.lives(ctx); alive {
				ls.revoke()
			}
			return
		}
		retry.Pause(ctx, retry.Backoff(3)) // a right is missing; it may be given
	}
}

// Leader returns who leads now, and nil if nobody does.
func (l *Locker) Leader(ctx context.Context) (*Leader, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	pair, _, err := l.watch(ctx, l.leaderPath(), 0)
	if err != nil {
		return nil, fmt.Errorf("look at key %s: %w", l.leaderPath(), l.explain(err))
	}
	return leader(pair), nil
}

// WatchLeader calls notice with the leader, nil if there is none, at once and at
// every change, until ctx ends.
func (l *Locker) WatchLeader(ctx context.Context, notice func(*Leader)) error {
	last := "?"
	err := l.client.follow(ctx, l.leaderPath(), func(pair *api.KVPair, _ bool) bool {
		leader, now := leader(pair), ""
		if leader != nil {
			now = leader.Session
		}
		if now != last {
			last = now
			notice(leader)
		}
		return false
	})
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("look at key %s: %w", l.leaderPath(), err)
}

// leader returns whom the leader's key names, nil if nobody.
func leader(pair *api.KVPair) *Leader {
	if pair == nil || pair.Session == "" {
		return nil
	}
	var leader Leader
	_ = json.Unmarshal(pair.Value, &leader) // an outside program may write what it likes
	leader.Session, leader.Value = pair.Session, pair.Value
	return &leader
}
