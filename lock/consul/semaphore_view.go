package consul

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/boottime"
	"onejob/internal/batch"
	"onejob/lock"
)

// registry keeps what is known of the semaphores that somebody asks for just
// now, or whose holders it watches die.
type registry struct {
	mu   sync.Mutex
	list map[string]*semaphore
}

// semaphore is what this Locker knows of a semaphore: who of ours asks for it,
// and since when something is amiss. All else is in Consul.
type semaphore struct {
	l     *Locker
	name  string
	users int // guarded by the registry

	changes  batch.Group[*change]
	watching chan struct{} // who has put something in watches for all who wait

	mu    sync.Mutex
	freed chan struct{} // closed when a slot may have come free
	// missed tells since when a holder had no entry; under noLock, since when
	// there were entries and no .lock.
	missed map[string]boottime.Instant
}

// noLock is no session's ID.
const noLock = ""

// semaphore returns the state of a semaphore, for the caller to call done on.
func (l *Locker) semaphore(name string) *semaphore {
	r := &l.semaphores
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.list[name]
	if s == nil {
		s = &semaphore{l: l, name: name, watching: make(chan struct{}, 1), freed: make(chan struct{}), missed: map[string]boottime.Instant{}}
		s.changes = batch.Group[*change]{Commit: s.commit, Max: maxBatch}
		if r.list == nil {
			r.list = map[string]*semaphore{}
		}
		r.list[name] = s
	}
	s.users++
	return s
}

func (s *semaphore) done() {
	r := &s.l.semaphores
	r.mu.Lock()
	defer r.mu.Unlock()
	s.users--
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.users == 0 && len(s.missed) == 0 {
		delete(r.list, s.name)
	}
}

// view is a semaphore at one moment.
type view struct {
	name    string
	setting *api.KVPair // nil if there is none
	lock    *api.KVPair // nil if there is none
	content content     // of lock
	limit   int
	foreign error                  // lock.ErrForeign, if something there is not ours to touch
	entries map[string]*api.KVPair // of the contenders, by their sessions, which live

	// Of the holders without an entry, those that count no longer, and those
	// that do because they might still be working.
	gone, dying map[string]bool
	lockMissing bool          // there is no .lock, and who was in it may still be working
	next        time.Duration // when one that is dying may be gone, without a word of Consul's; zero if none is
}

func (v *view) exists() bool { return v.setting != nil || v.lock != nil }

// usable returns why nobody can enter, no matter who is inside.
func (v *view) usable() error {
	if v.foreign != nil {
		return v.foreign
	}
	if !v.exists() {
		return fmt.Errorf("%s: %w", v.name, lock.ErrNoSemaphore)
	}
	return nil
}

// held returns how many slots are held, as far as anybody knows.
func (v *view) held() int { return len(v.content.Holders.set) - len(v.gone) }

// full returns why n slots cannot be taken now when so many are held, or nil.
func (v *view) full(held, n int) error {
	switch {
	case held+n <= v.limit && !v.lockMissing:
		return nil
	case held+n <= v.limit+len(v.dying):
		return fmt.Errorf("limit %s: %w", v.name, lock.ErrDelayed)
	}
	return fmt.Errorf("limit %s: %w (%d of %d)", v.name, lock.ErrFull, held, v.limit)
}

// look reads a semaphore and judges its holders.
func (s *semaphore) look(ctx context.Context) (*view, error) {
	v, err := s.read(ctx)
	if err != nil {
		return nil, err
	}
	s.judge(ctx, v)
	return v, nil
}

// read reads a semaphore, all at one moment.
func (s *semaphore) read(ctx context.Context) (*view, error) {
	lockKey, settingKey, folder := s.l.limitLock(s.name), s.l.limitSetting(s.name), s.l.limitFolder(s.name)
	pairs, err := s.l.readAll(ctx, api.TxnOps{
		op(api.KVGetOrEmpty, api.KVTxnOp{Key: settingKey}),
		op(api.KVGetTree, api.KVTxnOp{Key: folder}),
	})
	if err != nil {
		return nil, err
	}
	v := &view{
		name:    s.name,
		setting: pairs[settingKey],
		lock:    pairs[lockKey],
		content: content{Holders: holders{set: map[string]bool{}}},
		entries: map[string]*api.KVPair{},
	}
	// As in HashiCorp's client, any locked key shows that its session lives.
	for key, pair := range pairs {
		if strings.HasPrefix(key, folder) && pair.Session != "" && key != lockKey {
			v.entries[pair.Session] = pair
		}
	}
	if v.lock != nil {
		v.content, v.foreign = decodeLock(v.lock)
		v.limit = v.content.Limit
	}
	if v.setting != nil {
		limit, err := decodeSetting(v.setting)
		v.limit, v.foreign = limit, errors.Join(v.foreign, err)
	}
	if v.foreign != nil {
		v.content = content{Holders: holders{set: map[string]bool{}}}
	}
	return v, nil
}

// readAll returns the keys that exist of those that the operations get, at one
// moment, without a Raft write. Consul leaves out what the token may not see, without
// a word; for a key that is got with KVGetOrEmpty that is found out.
func (l *Locker) readAll(ctx context.Context, ops api.TxnOps) (map[string]*api.KVPair, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	ok, resp, _, err := l.keys.Txn().Txn(ops, l.query(ctx))
	if err != nil {
		return nil, err
	}
	if !ok {
		var errs []error
		for _, e := range resp.Errors {
			errs = append(errs, api.StatusError{Code: 403, Body: e.What}) // a read has no other reason to fail
		}
		return nil, errors.Join(errs...)
	}
	pairs, seen := map[string]*api.KVPair{}, map[string]bool{}
	for _, r := range resp.Results {
		if r.KV == nil {
			continue
		}
		seen[r.KV.Key] = true
		if r.KV.ModifyIndex > 0 {
			pairs[r.KV.Key] = r.KV
		}
	}
	for _, op := range ops {
		if op.KV.Verb == api.KVGetOrEmpty && !seen[op.KV.Key] {
			return nil, incomplete(op.KV.Key)
		}
	}
	return pairs, nil
}

// judge says which holders without an entry count no longer. One whose session
// has ended is given the lock-delay from when Consul first told us; one whose
// session lives, or cannot be judged, has lost its entry to others, and is given
// the time to notice on top of that.
func (s *semaphore) judge(ctx context.Context, v *view) {
	v.gone, v.dying = map[string]bool{}, map[string]bool{}
	missing := map[string]bool{}
	for session := range v.content.Holders.set {
		if v.entries[session] == nil {
			missing[session] = true
		}
	}
	// Who deletes the whole folder takes the entries away as well. Only the record
	// says then that somebody may be inside.
	if v.lock == nil && (len(v.entries) > 0 || v.setting != nil) {
		missing[noLock] = true
	}

	now := boottime.Now()
	maxWait := max(s.l.cfg.Verify+s.l.cfg.LockDelay, s.l.membership.wait(end{}))
	s.mu.Lock()
	maps.DeleteFunc(s.missed, func(session string, _ boottime.Instant) bool { return !missing[session] })
	var dying []string
	for session := range missing {
		if _, known := s.missed[session]; !known {
			s.missed[session] = now
		}
		left := maxWait - now.Sub(s.missed[session])
		if left > 0 && (v.next == 0 || left < v.next) {
			v.next = left
		}
		switch {
		case session == noLock:
			v.lockMissing = left > 0
		case left > 0:
			dying = append(dying, session)
		default:
			v.gone[session] = true
		}
	}
	s.mu.Unlock()

	dead, _ := s.l.membership.dead(ctx, dying) // who cannot be judged now counts
	for _, session := range dying {
		if slices.Contains(dead, session) {
			v.gone[session] = true
		} else {
			v.dying[session] = true
		}
	}
}

// setLimit returns the operations that make the limit so many slots, if nothing
// has changed since. Where there was no .lock it makes one, for others to see
// the limit too, unless that would hide that slots are held.
func (v *view) setLimit(l *Locker, slots int) api.TxnOps {
	ops := api.TxnOps{op(api.KVCAS, api.KVTxnOp{Key: l.limitSetting(v.name), Index: index(v.setting), Value: encode(setting{&slots})})}
	if v.lock == nil && v.lockMissing {
		return append(ops, op(api.KVCheckNotExists, api.KVTxnOp{Key: l.limitLock(v.name)}))
	}
	return append(ops, v.writeLock(l, content{Limit: slots, Holders: v.content.Holders}))
}

// writeLock returns the operation that writes the .lock if nobody has since.
func (v *view) writeLock(l *Locker, c content) *api.TxnOp {
	flags := uint64(api.SemaphoreFlagValue)
	if v.lock != nil {
		flags = v.lock.Flags
	}
	return op(api.KVCAS, api.KVTxnOp{Key: l.limitLock(v.name), Index: index(v.lock), Flags: flags, Value: encode(c)})
}

// unchanged returns the operation that refuses the transaction if the record has
// changed since.
func (v *view) unchanged(l *Locker) *api.TxnOp {
	if v.setting == nil {
		return op(api.KVCheckNotExists, api.KVTxnOp{Key: l.limitSetting(v.name)})
	}
	return op(api.KVCheckIndex, api.KVTxnOp{Key: v.setting.Key, Index: v.setting.ModifyIndex})
}

// index returns the index for a Check-And-Set; zero means that the key must not
// exist.
func index(pair *api.KVPair) uint64 {
	if pair == nil {
		return 0
	}
	return pair.ModifyIndex
}

func op(verb api.KVOp, o api.KVTxnOp) *api.TxnOp {
	o.Verb = verb
	return &api.TxnOp{KV: &o}
}

func sorted(set map[string]bool) []string { return slices.Sorted(maps.Keys(set)) }
