package consul

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"
	"go.uber.org/zap"

	"onejob/boottime"
	"onejob/lock"
	"onejob/lock/internal/hold"
)

// slot is a lease on one slot of a semaphore. It implements lock.Lease.
//
// From Take until it is settled it is on its session's list, and its session holds
// no other slot of the same semaphore.
type slot struct {
	hold.Lease
	in      *slots
	session *slotSession
	name    string // of the semaphore

	// doubt is when we gave up on a request about it that may be applied still;
	// zero if none. The goroutine that releases the slot writes it, and verify after that.
	doubt boottime.Instant

	stuck boottime.Instant // since when it has leaked; zero if it has not; guarded by pool.mu
}

// slots is the list of a session's slots, and the sessions that they are held under.
type slots struct {
	pool
	limits  *registry
	removed func() // is called after a slot may have been taken off the list

	list map[*slot]bool // guarded by pool.mu
}

// Release implements lock.Lease. Like that of a lock it is not cut short by ctx.
func (sl *slot) Release(context.Context) error {
	stood, lost := sl.LetGo()
	switch {
	case stood != hold.Held && stood != hold.Revoked:
		return nil
	case lost != nil:
		// The session ends as soon as nobody works under it any more, and the
		// slot is free after the lock-delay.
		sl.settle(true)
		return lost
	}
	err := sl.leave() // a revoked one too: what is left of it still counts as held
	if stood == hold.Revoked {
		return fmt.Errorf("limit %s: %w", sl.name, lock.ErrRevoked)
	}
	return err
}

// leave removes the slot from the semaphore, and settles it.
func (sl *slot) leave() error {
	c := &change{leave: sl.session.id}
	sl.in.limits.change(sl.name, c)
	if c.doubt {
		sl.doubt = boottime.Now()
	}
	sl.settle(c.err == nil || errors.Is(c.err, lock.ErrRevoked))
	return c.err
}

// settle is called when nobody works under the slot any more. If it is out of
// the semaphore for sure it is taken off the list; if not, or if a request that
// we gave up on may be applied still, verify will see to it. A session that
// has ended has no such worries.
func (sl *slot) settle(gone bool) {
	in := sl.in
	defer in.removed()
	in.mu.Lock()
	defer in.mu.Unlock()
	if sl.session.Lost() == nil && (!gone || doubtful(sl.doubt)) {
		if sl.stuck == 0 {
			sl.stuck = boottime.Now()
		}
		sl.Leak()
		return
	}
	delete(in.list, sl)
	delete(sl.session.at, sl.name)
	sl.session.idle = boottime.Now()
}

// revoke ends a slot that was found to be taken away. It stays on the list until
// the holder lets go.
func (sl *slot) revoke() {
	if sl.Revoke(fmt.Errorf("%w: session %s was removed from limit %s by somebody else", lock.ErrRevoked, sl.session.id, sl.name)) {
		sl.in.cfg.Log.Warn("slot_revoked", zap.String("limit", sl.name), zap.String("session", sl.session.id))
	}
}

// add puts a slot on the list, of a session that is reserved for it.
func (in *slots) add(s *slotSession, name string) *slot {
	sl := &slot{in: in, session: s, name: name}
	sl.Init(s.Session)
	in.mu.Lock()
	defer in.mu.Unlock()
	in.list[sl] = true
	return sl
}

// adopt puts a slot on the list that nobody works under, unless the session has one of that
// semaphore by now.
func (in *slots) adopt(s *slotSession, name string) {
	sl := &slot{in: in, session: s, name: name}
	sl.InitLeaked(s.Session)
	in.mu.Lock()
	defer in.mu.Unlock()
	if s.at[name] || s.Lost() != nil {
		return
	}
	s.at[name] = true
	in.list[sl], sl.stuck = true, boottime.Now()
	in.cfg.Log.Warn("leaked_slot", zap.String("limit", name), zap.String("session", s.id))
}

func (in *slots) all() []*slot {
	in.mu.Lock()
	defer in.mu.Unlock()
	return slices.Collect(maps.Keys(in.list))
}

func (in *slots) count() int {
	in.mu.Lock()
	defer in.mu.Unlock()
	return len(in.list)
}

// verify looks whether the slots are still held, without a Raft write, and
// removes those that nobody works under. What cannot be looked at now is looked
// at next time.
func (in *slots) verify(ctx context.Context) {
	var held, leaked []*slot
	for _, sl := range in.all() {
		switch sl.State() {
		case hold.Held:
			held = append(held, sl)
		case hold.Leaked:
			leaked = append(leaked, sl)
		}
	}
	slices.SortFunc(held, func(a, b *slot) int { return strings.Compare(a.name, b.name) })
	for chunk := range slices.Chunk(held, maxBatch/2) {
		in.verifySome(ctx, chunk)
	}
	_ = parallel(maxBatch, leaked, func(sl *slot) error {
		if sl.session.Lost() != nil {
			sl.settle(true)
			return nil
		}
		return sl.leave()
	})
	in.giveUp(giveUpAfter * in.cfg.Verify)
	in.sweep(ctx)
}

// giveUp does what leases.giveUp does, for each of the sessions.
func (in *slots) giveUp(after time.Duration) {
	in.mu.Lock()
	stuck, used := map[*slotSession]string{}, map[*slotSession]bool{}
	for sl := range in.list {
		if sl.State() != hold.Leaked {
			used[sl.session] = true
		} else if boottime.Now().Sub(sl.stuck) >= after {
			stuck[sl.session] = sl.name
		}
	}
	in.mu.Unlock()
	for s, name := range stuck {
		if !used[s] {
			s.lose(fmt.Errorf("a slot of limit %s could not be given back for %v", name, after))
		}
	}
}

// verifySome looks at so few slots, sorted by name, that one request can ask for the .lock
// and the entry of each.
func (in *slots) verifySome(ctx context.Context, list []*slot) {
	first := func(i int) bool { return i == 0 || list[i].name != list[i-1].name } // of its semaphore
	var ops api.TxnOps
	for i, sl := range list {
		if first(i) {
			ops = append(ops, op(api.KVGetOrEmpty, api.KVTxnOp{Key: in.limitLock(sl.name)}))
		}
		ops = append(ops, op(api.KVGetOrEmpty, api.KVTxnOp{Key: in.limitEntry(sl.name, sl.session.id)}))
	}
	pairs, err := in.readAll(ctx, ops)
	if err != nil {
		return
	}
	var holders map[string]bool
	for i, sl := range list {
		if first(i) {
			holders = nil
			if pair := pairs[in.limitLock(sl.name)]; pair != nil {
				c, _ := decodeLock(pair) // nobody holds what cannot be understood
				holders = c.Holders.set
			}
		}
		id := sl.session.id
		entry := pairs[in.limitEntry(sl.name, id)]
		if entry != nil && entry.Session == id && holders[id] {
			continue
		}
		// An entry goes when its session does. Then the lease ends with the session, not here.
		if alive, err := sl.session.lives(ctx); alive && err == nil {
			sl.revoke()
		}
	}
}
