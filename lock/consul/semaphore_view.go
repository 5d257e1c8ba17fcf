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
	"onejob/lock"
)

// noLock is no session's ID.
const noLock = ""

// lookAgain is how often a semaphore is looked at whose .lock does not change.
const lookAgain = 10 * time.Second

// A viewer looks at a semaphore, and remembers since when something is amiss. All else
// is in Consul.
type viewer struct {
	*client
	members *membership
	name    string

	mu sync.Mutex
	// missed tells since when a holder had no entry; under noLock, since when
	// there were entries and no .lock.
	missed map[string]boottime.Instant
	looked boottime.Instant // the last time; what was amiss then and long after may not have been so all the time

	// Consul's index of the latest .lock, and when it was last seen to have gone back, as it
	// does when a snapshot is restored. All that is written later has a higher one (Consul
	// continues its index after a restore). A snapshot from before the limit was made takes
	// its record away as well, which the end of a "consul lock" does not.
	index    uint64
	holders  int  // in that .lock
	recorded bool // there was a record then
	back     boottime.Instant
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
	shut        bool          // who was in a .lock that was lost may still be working
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
	case held+n <= v.limit && !v.shut:
		return nil
	case held+n <= v.limit+len(v.dying):
		return fmt.Errorf("limit %s: %w", v.name, lock.ErrDelayed)
	}
	return fmt.Errorf("limit %s: %w (%d of %d)", v.name, lock.ErrFull, held, v.limit)
}

// look reads a semaphore and judges its holders.
func (s *viewer) look(ctx context.Context) (*view, error) {
	s.mu.Lock()
	before := s.index
	s.mu.Unlock()
	v, err := s.read(ctx)
	if err != nil {
		return nil, err
	}
	s.judge(ctx, v, before)
	return v, nil
}

// read reads a semaphore, all at one moment.
func (s *viewer) read(ctx context.Context) (*view, error) {
	lockKey, settingKey, folder := s.limitLock(s.name), s.limitSetting(s.name), s.limitFolder(s.name)
	pairs, err := s.readAll(ctx, api.TxnOps{
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

// judge says which holders without an entry count no longer. One whose session
// has ended is given the lock-delay from when Consul first told us; one whose
// session lives, or cannot be judged, has lost its entry to others, and is given
// the time to notice on top of that. before is the index that was known before v was read.
func (s *viewer) judge(ctx context.Context, v *view, before uint64) {
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
	maxWait := s.cfg.slotDelay()
	s.mu.Lock()
	switch {
	case v.lock == nil:
		if before != 0 && s.recorded && s.holders > 0 && v.setting == nil {
			s.back = now
		}
		if v.setting == nil {
			s.index, s.holders, s.recorded = 0, 0, false
		}
	case v.lock.ModifyIndex < before: // and not below what a read that overtook this one saw
		s.index, s.holders, s.recorded, s.back = v.lock.ModifyIndex, len(v.content.Holders.set), v.setting != nil, now
	case v.lock.ModifyIndex >= s.index:
		s.index, s.holders, s.recorded = v.lock.ModifyIndex, len(v.content.Holders.set), v.setting != nil
	}
	wait := func(since boottime.Instant) time.Duration {
		left := maxWait - now.Sub(since)
		if left > 0 && (v.next == 0 || left < v.next) {
			v.next = left
		}
		return left
	}
	if s.back != 0 && wait(s.back) <= 0 {
		s.back = 0
	}
	v.shut = s.back != 0
	if now.Sub(s.looked) > 2*lookAgain {
		clear(s.missed)
	}
	s.looked = now
	maps.DeleteFunc(s.missed, func(session string, _ boottime.Instant) bool { return !missing[session] })
	var dying []string
	for session := range missing {
		if _, known := s.missed[session]; !known {
			s.missed[session] = now
		}
		left := wait(s.missed[session])
		switch {
		case session == noLock:
			v.shut = v.shut || left > 0
		case left > 0:
			dying = append(dying, session)
		default:
			v.gone[session] = true
		}
	}
	s.mu.Unlock()

	dead, _ := s.members.dead(ctx, dying) // who cannot be judged now counts
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
// the limit too, unless that would hide that slots are held. For the same reason it
// leaves a .lock alone that a restored snapshot brought back.
func (v *view) setLimit(k keyNames, slots int) api.TxnOps {
	ops := api.TxnOps{op(api.KVCAS, api.KVTxnOp{Key: k.limitSetting(v.name), Index: index(v.setting), Value: encode(setting{&slots})})}
	switch {
	case v.shut && v.lock == nil:
		return append(ops, op(api.KVCheckNotExists, api.KVTxnOp{Key: k.limitLock(v.name)}))
	case v.shut:
		return append(ops, op(api.KVCheckIndex, api.KVTxnOp{Key: k.limitLock(v.name), Index: v.lock.ModifyIndex}))
	}
	return append(ops, v.writeLock(k, content{Limit: slots, Holders: v.content.Holders}))
}

// writeLock returns the operation that writes the .lock if nobody has since.
func (v *view) writeLock(k keyNames, c content) *api.TxnOp {
	flags := uint64(api.SemaphoreFlagValue)
	if v.lock != nil {
		flags = v.lock.Flags
	}
	return op(api.KVCAS, api.KVTxnOp{Key: k.limitLock(v.name), Index: index(v.lock), Flags: flags, Value: encode(c)})
}

// unchanged returns the operation that refuses the transaction if the record has
// changed since.
func (v *view) unchanged(k keyNames) *api.TxnOp {
	if v.setting == nil {
		return op(api.KVCheckNotExists, api.KVTxnOp{Key: k.limitSetting(v.name)})
	}
	return op(api.KVCheckIndex, api.KVTxnOp{Key: v.setting.Key, Index: v.setting.ModifyIndex})
}
