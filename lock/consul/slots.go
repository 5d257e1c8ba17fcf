package consul

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/hashicorp/consul/api"
	"go.uber.org/zap"

	"onejob/boottime"
	"onejob/lock"
)

// slot is a lease on one slot of a semaphore. It implements lock.Lease.
//
// From Take until it is settled it is on its session's list, and its session holds
// no other slot of the same semaphore. It has the states of a lease, without
// stateAcquiring.
type slot struct {
	session *slotSession
	name    string // of the semaphore
	ctx     context.Context
	cancel  context.CancelCauseFunc
	state   atomic.Int32
	ended   atomic.Int64 // when it was revoked, as a boottime.Instant; zero if it was not

	// doubt is when we gave up on a request about it that may be applied still;
	// zero if none. It is written by who releases the slot, and then by verify.
	doubt boottime.Instant
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
	t := s.l.current()
	if t == nil {
		return nil, lock.ErrLost
	}
	c := &change{t: t, n: n, value: value}
	sem := s.l.semaphore(name)
	defer sem.done()
	sem.changes.Do(c)

	slots := make([]*slot, len(c.sessions))
	for i, session := range c.sessions {
		slots[i] = session.hold(name)
		if c.err != nil && c.doubt {
			slots[i].doubt = boottime.Now()
		}
	}
	if c.err != nil {
		for _, sl := range slots {
			sl.cancel(c.err)
			sl.settle(true)
		}
		return nil, c.err
	}
	if err := cmp.Or(context.Cause(t.ctx), ctx.Err()); err != nil {
		parallel(maxBatch, slots, func(sl *slot) { _ = sl.Release(ctx) })
		return nil, err
	}
	leases := make([]lock.Lease, n)
	for i, sl := range slots {
		leases[i] = sl
	}
	return leases, nil
}

// Context implements lock.Lease.
func (sl *slot) Context() context.Context { return sl.ctx }

// Deadline implements lock.Lease. It is the earlier of its own session's and the
// replica's.
func (sl *slot) Deadline() boottime.Instant {
	d := min(sl.session.t.deadline(), sl.session.until())
	if at := boottime.Instant(sl.ended.Load()); at != 0 {
		return min(d, at)
	}
	return d
}

// Release implements lock.Lease. Like that of a lock it is not cut short by ctx.
func (sl *slot) Release(context.Context) error {
	revoked := sl.state.CompareAndSwap(stateRevoked, stateReleasing)
	if !revoked && !sl.state.CompareAndSwap(stateHeld, stateReleasing) {
		return nil
	}
	lost := context.Cause(sl.session.ctx)
	sl.cancel(lock.ErrReleased)
	if lost != nil {
		// The session ends as soon as nobody works under it any more, and the
		// slot is free after the lock-delay.
		sl.settle(true)
		return lost
	}
	err := sl.leave() // a revoked one too: what is left of it still counts as held
	sl.settle(err == nil || errors.Is(err, lock.ErrRevoked))
	if revoked {
		return fmt.Errorf("limit %s: %w", sl.name, lock.ErrRevoked)
	}
	return err
}

// leave removes the slot from the semaphore.
func (sl *slot) leave() error {
	c := &change{t: sl.session.t, leave: sl}
	sem := c.t.l.semaphore(sl.name)
	defer sem.done()
	sem.changes.Do(c)
	if c.doubt {
		sl.doubt = boottime.Now()
	}
	return c.err
}

// leaveFor removes another replica's slot, which nobody works under any more. If it
// cannot, the slot comes free some time after the end of its session.
func (l *Locker) leaveFor(name, session string) {
	c := &change{leave: &slot{session: &slotSession{id: session}, name: name}}
	sem := l.semaphore(name)
	defer sem.done()
	sem.changes.Do(c)
	if c.err != nil && !errors.Is(c.err, lock.ErrRevoked) {
		l.log.Debug("slot_left_behind", zap.String("limit", name), zap.String("session", session), zap.Error(c.err))
	}
}

// settle is called when nobody works under the slot any more. If it is out of
// the semaphore for sure it is taken off the list; if not, or if a request that
// we gave up on may be applied still, verifySlots will see to it. A session that
// has ended has no such worries.
func (sl *slot) settle(gone bool) {
	t := sl.session.t
	t.mu.Lock()
	defer t.mu.Unlock()
	doubtful := sl.doubt != 0 && boottime.Now().Sub(sl.doubt) < lateness
	if sl.session.ctx.Err() == nil && (!gone || doubtful) {
		sl.state.Store(stateLeaked)
		return
	}
	t.forgetSlot(sl)
}

// revoke ends a slot that was found to be taken away. It stays on the list until
// the holder lets go.
func (sl *slot) revoke() {
	if !sl.state.CompareAndSwap(stateHeld, stateRevoked) {
		return // it was being released just now
	}
	sl.ended.Store(int64(boottime.Now()))
	sl.session.t.l.log.Warn("slot_revoked", zap.String("limit", sl.name), zap.String("session", sl.session.id))
	sl.cancel(fmt.Errorf("%w: session %s was removed from limit %s by somebody else", lock.ErrRevoked, sl.session.id, sl.name))
}

// forgetSlot takes a slot off the list. t.mu is held.
func (t *session) forgetSlot(sl *slot) {
	delete(t.slots, sl)
	delete(sl.session.at, sl.name)
	sl.session.idle = boottime.Now()
	t.closeIfEmpty()
}

// slotsIn returns the session's slots that are in this state.
func (t *session) slotsIn(state int32) (list []*slot) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for sl := range t.slots {
		if sl.state.Load() == state {
			list = append(list, sl)
		}
	}
	return list
}

// verifySlots looks whether the slots are still held, without a Raft write, and
// removes those that nobody works under. What cannot be looked at now is looked
// at next time.
func (t *session) verifySlots(ctx context.Context) {
	held := t.slotsIn(stateHeld)
	slices.SortFunc(held, func(a, b *slot) int { return strings.Compare(a.name, b.name) })
	for chunk := range slices.Chunk(held, maxOps/2) {
		t.verifySome(ctx, chunk)
	}
	parallel(maxBatch, t.slotsIn(stateLeaked), func(sl *slot) {
		if sl.session.ctx.Err() != nil {
			sl.settle(true)
			return
		}
		err := sl.leave()
		sl.settle(err == nil || errors.Is(err, lock.ErrRevoked))
	})
	t.sweepPool(ctx)
}

// verifySome looks at so few slots that one request can ask for the .lock and
// the entry of each.
func (t *session) verifySome(ctx context.Context, list []*slot) {
	var ops api.TxnOps
	asked := map[string]bool{}
	for _, sl := range list {
		for _, key := range []string{t.l.limitLock(sl.name), t.l.limitEntry(sl.name, sl.session.id)} {
			if !asked[key] {
				asked[key] = true
				ops = append(ops, op(api.KVGetOrEmpty, api.KVTxnOp{Key: key}))
			}
		}
	}
	pairs, err := t.l.readAll(ctx, ops)
	if err != nil {
		return
	}
	holding := map[string]map[string]bool{} // sessions, by semaphore
	for _, sl := range list {
		if _, done := holding[sl.name]; done {
			continue
		}
		holding[sl.name] = nil
		if pair := pairs[t.l.limitLock(sl.name)]; pair != nil {
			if c, err := decodeLock(pair); err == nil {
				holding[sl.name] = c.Holders.set
			}
		}
	}
	for _, sl := range list {
		id := sl.session.id
		entry := pairs[t.l.limitEntry(sl.name, id)]
		if entry != nil && entry.Session == id && holding[sl.name][id] {
			continue
		}
		// An entry goes when its session does. That is another story.
		if alive, err := sl.session.lives(ctx); alive && err == nil {
			sl.revoke()
		}
	}
}
