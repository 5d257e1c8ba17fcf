package consul

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

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
	// zero if none. It is written by who releases the slot, and then by verify.
	doubt boottime.Instant
}

// slots is the list of a session's slots, and the sessions that they are held under.
type slots struct {
	pool
	limits  *registry
	removed func() // is called after a slot may have been taken off the list

	list map[*slot]bool // guarded by pool.mu
}

func newSlots(s *ttlSession, limits *registry, removed func()) *slots {
	return &slots{pool: pool{ttlSession: s}, limits: limits, removed: removed, list: map[*slot]bool{}}
}

// Take implements lock.Semaphores. It takes no longer than a few seconds,
// whatever ctx says: what one caller takes travels with what others do.
func (s semaphores) Take(ctx context.Context, name string, n int, value []byte) ([]lock.Lease, error) {
	if err := lock.CheckSemaphore(name, 0); err != nil {
		return nil, err
	}
	switch {
	case n < 1 || n > lock.MaxTake:
		return nil, fmt.Errorf("limit %s: %d slots at once are not between 1 and %d", name, n, lock.MaxTake)
	case len(value) > maxValue:
		return nil, fmt.Errorf("limit %s: the value is %d bytes long, more than %d", name, len(value), maxValue)
	case ctx.Err() != nil:
		return nil, ctx.Err()
	}
	in := s.current()
	if in == nil {
		return nil, lock.ErrLost
	}
	c := &change{pool: &in.pool, n: n, value: value}
	s.change(name, c)

	slots := make([]*slot, len(c.sessions))
	for i, session := range c.sessions {
		slots[i] = in.add(session, name)
		if c.err != nil && c.doubt {
			slots[i].doubt = boottime.Now()
		}
	}
	if c.err != nil {
		for _, sl := range slots {
			sl.Abandon(c.err)
			sl.settle(true)
		}
		return nil, c.err
	}
	for _, sl := range slots {
		sl.Grant()
	}
	if err := cmp.Or(in.Lost(), ctx.Err()); err != nil {
		parallel(maxBatch, slots, func(sl *slot) { _ = sl.Release(ctx) })
		return nil, err
	}
	leases := make([]lock.Lease, n)
	for i, sl := range slots {
		leases[i] = sl
	}
	return leases, nil
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
	in.list[sl] = true
	in.cfg.Log.Warn("leaked_slot", zap.String("limit", name), zap.String("session", s.id))
}

// all returns the slots on the list.
func (in *slots) all() []*slot {
	in.mu.Lock()
	defer in.mu.Unlock()
	return slices.Collect(maps.Keys(in.list))
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
	parallel(maxBatch, leaked, func(sl *slot) {
		if sl.session.Lost() != nil {
			sl.settle(true)
			return
		}
		_ = sl.leave()
	})
	in.sweep(ctx)
}

// verifySome looks at so few slots that one request can ask for the .lock and
// the entry of each.
func (in *slots) verifySome(ctx context.Context, list []*slot) {
	var ops api.TxnOps
	asked := map[string]bool{}
	for _, sl := range list {
		for _, key := range []string{in.limitLock(sl.name), in.limitEntry(sl.name, sl.session.id)} {
			if !asked[key] {
				asked[key] = true
				ops = append(ops, op(api.KVGetOrEmpty, api.KVTxnOp{Key: key}))
			}
		}
	}
	pairs, err := in.readAll(ctx, ops)
	if err != nil {
		return
	}
	holding := map[string]map[string]bool{} // sessions, by semaphore
	for _, sl := range list {
		if _, done := holding[sl.name]; done {
			continue
		}
		holding[sl.name] = nil
		if pair := pairs[in.limitLock(sl.name)]; pair != nil {
			if c, err := decodeLock(pair); err == nil {
				holding[sl.name] = c.Holders.set
			}
		}
	}
	for _, sl := range list {
		id := sl.session.id
		entry := pairs[in.limitEntry(sl.name, id)]
		if entry != nil && entry.Session == id && holding[sl.name][id] {
			continue
		}
		// An entry goes when its session does. That is another story.
		if alive, err := sl.session.lives(ctx); alive && err == nil {
			sl.revoke()
		}
	}
}
