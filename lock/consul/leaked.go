package consul

import (
	"context"
	"maps"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"
	"go.uber.org/zap"

	"onejob/lock"
)

// A leaked lock is a key, or a slot, that one of our sessions holds in Consul and that
// nobody here works under. A snapshot that is restored brings them: what was held
// when it was taken is held again, by a session that has lived on, though we have
// let go since. To others it looks like any lock whose holder lives, and would
// stay for as long as we do. So every replica looks for its own.
const (
	// leakScanInterval is how often, in Config.Verify: once a minute by default.
	leakScanInterval = 20

	// leakScanShare is how much of the time looking may take, as one in so many. All
	// keys of all replicas are read for it.
	leakScanShare = 500
)

// releaseLeaked looks for leaked locks from time to time, until ctx ends.
func (t *session) releaseLeaked(ctx context.Context) {
	var took time.Duration
	for {
		pause(ctx, max(leakScanInterval*t.l.cfg.Verify, leakScanShare*took))
		if ctx.Err() != nil {
			return
		}
		began := time.Now()
		t.findLeakedLocks(ctx)
		t.findLeakedSlots(ctx)
		took = time.Since(began)
	}
}

// findLeakedLocks puts leaked locks on the lists of the session, where verify and verifySlots
// find them and see to them. What is on a list before Consul is asked, or after,
// is no leaked.
func (t *session) findLeakedLocks(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	t.mu.Lock()
	leases, names := maps.Clone(t.leases), maps.Clone(t.names)
	t.mu.Unlock()

	markers := t.list(ctx, t.l.markersFolder())
	held, err := t.l.list(ctx, t.l.taskKey(""))
	if err != nil {
		t.l.log.Debug("leak_scan_failed", zap.Error(err))
		return
	}
	for _, pair := range held {
		if pair.Session == t.id && leases[pair.Key] == nil {
			t.adoptKey(pair)
		}
	}
	t.sweepMarkers(ctx, markers, held)
	if !t.l.reuses.Load() {
		return // saves reading thousands of names
	}
	for _, pair := range t.list(ctx, t.l.reusedFolder()) {
		if pair.Session != t.id || names[pair.Key] != nil {
			continue
		}
		// A task may have had it since the names were copied. It would have moved the index.
		again, err := t.l.get(ctx, pair.Key)
		if err == nil && again != nil && again.Session == t.id && again.ModifyIndex == pair.ModifyIndex {
			t.adoptName(pair)
		}
	}
}

// findLeakedSlots does the same for slots.
func (t *session) findLeakedSlots(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	t.mu.Lock()
	slots := map[string]bool{}
	pool := map[string]*slotSession{}
	for _, s := range t.pool {
		pool[s.id] = s
		for name := range s.at {
			slots[t.l.limitEntry(name, s.id)] = true
		}
	}
	t.mu.Unlock()
	if len(pool) == 0 {
		return
	}
	for _, pair := range t.list(ctx, t.l.limitsFolder()) {
		if s := pool[pair.Session]; s != nil && !slots[pair.Key] {
			t.adoptSlot(pair, s)
		}
	}
}

// list returns all keys in a folder, none if that cannot be had now.
func (t *session) list(ctx context.Context, folder string) api.KVPairs {
	pairs, err := t.l.list(ctx, folder)
	if err != nil {
		t.l.log.Debug("leak_scan_failed", zap.Error(err))
	}
	return pairs
}

// adoptKey puts a leaked lock key on the list, unless it is there by now.
func (t *session) adoptKey(pair *api.KVPair) {
	ls := &lease{t: t, key: strings.TrimPrefix(pair.Key, t.l.taskKey("")), own: pair.Key, path: pair.Key, index: pair.ModifyIndex}
	ls.ctx, ls.cancel = context.WithCancelCause(t.ctx)
	ls.cancel(lock.ErrReleased)
	ls.state.Store(stateLeaked)
	if t.reserve(ls) {
		t.l.log.Warn("leaked_lock", zap.String("lock_key", ls.key), zap.String("session", t.id))
	}
}

// adoptName puts a reused name on the list that nobody works under, unless a lease has it
// by now.
func (t *session) adoptName(pair *api.KVPair) {
	key, _, _ := strings.Cut(string(pair.Value), " ")
	ls := &lease{t: t, key: key, own: pair.Key, path: pair.Key, reused: pair.Key}
	ls.ctx, ls.cancel = context.WithCancelCause(t.ctx)
	ls.cancel(lock.ErrReleased)
	ls.state.Store(stateLeaked)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.names[pair.Key] != nil || t.leases[pair.Key] != nil {
		return
	}
	t.leases[pair.Key], t.names[pair.Key] = ls, ls
	t.l.log.Warn("leaked_lock", zap.String("lock_key", ls.key), zap.String("session", t.id))
}

// adoptSlot puts a leaked lock slot on the list, unless its session has one of that
// semaphore by now.
func (t *session) adoptSlot(pair *api.KVPair, s *slotSession) {
	name, _, _ := strings.Cut(strings.TrimPrefix(pair.Key, t.l.limitsFolder()), "/")
	sl := &slot{session: s, name: name}
	sl.ctx, sl.cancel = context.WithCancelCause(s.ctx)
	sl.cancel(lock.ErrReleased)
	sl.state.Store(stateLeaked)
	t.mu.Lock()
	defer t.mu.Unlock()
	if s.at[name] || s.ctx.Err() != nil {
		return
	}
	s.at[name] = true
	t.slots[sl] = true
	t.l.log.Warn("leaked_slot", zap.String("limit", name), zap.String("session", s.id))
}
