package consul

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"onejob/boottime"
	"onejob/lock"
	"onejob/lock/internal/hold"
)

const (
	maxKey   = 512
	maxValue = 2048

	// lateness is how long after we gave up on a request Consul may still apply
	// it: an agent goes on trying for 7 s (rpc_hold_timeout) while there is no
	// leader.
	lateness = 10 * time.Second
)

// doubtful reports whether a request that we gave up on then may be applied still; zero
// means that there was none.
func doubtful(doubt boottime.Instant) bool {
	return doubt != 0 && boottime.Now().Sub(doubt) < lateness
}

// lease implements lock.Lease.
//
// From Acquire until it is settled, a lease is on its session's list, and reserves
// its key there: Consul would grant a key twice within one session.
type lease struct {
	hold.Lease
	in    *leases
	key   string // as people know it
	own   string // its own name in Consul
	path  string // the name under which it is locked
	value []byte

	// Of a task that shares its lock with nothing else, see names.go.
	task   int64
	reused string // the name that it uses if no other task does; empty for every other lease
	taken  bool   // another lease of this session has that name
	locked uint64 // the index of the key when the lease began; zero if not known
	burnt  bool   // a request about that name was not answered
	seen   uint64 // the index of that name when it was found to name another task; zero if there was no such key

	database uint64 // the version that the record of the database must have; zero if any will do

	// Written by the transactions that carry the lease, one at a time.
	err   error            // the last one's answer
	stuck boottime.Instant // since when it has leaked; zero if it has not; guarded by leases.mu
	index uint64           // the key's ModifyIndex when it was locked; zero if not known
	doubt boottime.Instant // when we gave up on one that may be applied still; zero if none
}

// Release implements lock.Lease. It takes no longer than a few seconds,
// whatever ctx says, and is not cut short by it: what one caller gives back
// travels with what others do.
func (ls *lease) Release(context.Context) error {
	switch stood, lost := ls.LetGo(); {
	case stood == hold.Revoked && ls.reused != "" && ls.path != ls.reused:
		// Somebody deleted its group's marker, perhaps, and the key under its own name is there.
		ls.in.release(ls)
		ls.settle(ls.err == nil || errors.Is(ls.err, lock.ErrRevoked))
		return fmt.Errorf("%s: %w", ls.key, lock.ErrRevoked)
	case stood == hold.Revoked:
		ls.settle(true)
		return fmt.Errorf("%s: %w", ls.key, lock.ErrRevoked)
	case stood != hold.Held:
		return nil
	case lost != nil:
		// Consul deletes the key with the session, which drain ends as soon as
		// nobody works under it any more.
		ls.settle(true)
		return lost
	}
	ls.in.release(ls)
	err := ls.err
	ls.settle(err == nil || errors.Is(err, lock.ErrRevoked))
	return err
}

// settle is called when nobody works under a lease any more. If its key is gone
// for sure the lease is taken off the list; if not, or if a request that we gave
// up on may be applied still, verify will see to the key. A lost session has no
// such worries: Consul deletes its keys with the session.
func (ls *lease) settle(gone bool) {
	in := ls.in
	defer in.removed()
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.Lost() == nil && (!gone || doubtful(ls.doubt)) {
		if ls.stuck == 0 {
			ls.stuck = boottime.Now()
		}
		ls.Leak()
		return
	}
	delete(in.own, ls.own)
	if in.names[ls.reused] == ls {
		delete(in.names, ls.reused)
	}
	if ls.burnt {
		in.burnt[ls.reused] = boottime.Now()
	}
}

// revoke ends a lease whose key was found to be gone. It stays on the list
// until the holder releases it, so that no other task of this replica begins before that.
func (ls *lease) revoke() {
	if ls.Revoke(fmt.Errorf("%w: key %s was released or deleted by somebody else", lock.ErrRevoked, ls.path)) {
		ls.in.cfg.Log.Warn("lock_revoked", zap.String("lock_key", ls.key), zap.String("session", ls.in.id))
	}
}

// leases is the list of a session's leases.
type leases struct {
	*ttlSession
	release func(*lease) // gives the key of a lease back, and stores the answer in it
	removed func()       // is called after a lease may have been taken off the list

	mu    sync.Mutex
	own   map[string]*lease           // by their own names; one that is here reserves its key
	names map[string]*lease           // by the reused names of those that have one, whether they are locked under it or not
	burnt map[string]boottime.Instant // reused names about which a request was not answered, and since when
}

func (in *leases) all() []*lease {
	in.mu.Lock()
	defer in.mu.Unlock()
	return slices.Collect(maps.Values(in.own))
}

func (in *leases) count() int {
	in.mu.Lock()
	defer in.mu.Unlock()
	return len(in.own)
}

// reserve puts a lease on the list, unless another has its key.
func (in *leases) reserve(ls *lease) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	if _, taken := in.own[ls.own]; taken {
		return false
	}
	in.own[ls.own] = ls
	if ls.reused != "" {
		ls.taken = in.names[ls.reused] != nil || in.isBurnt(ls.reused)
		if in.names[ls.reused] == nil {
			in.names[ls.reused] = ls
		}
	}
	return true
}

// isBurnt reports whether a request about a reused name was not answered so lately that
// the name must not be used. in.mu is held.
func (in *leases) isBurnt(name string) bool {
	at, ok := in.burnt[name]
	if ok && boottime.Now().Sub(at) > burntFor {
		delete(in.burnt, name)
		return false
	}
	return ok
}

// adopt puts a key on the list that the session holds and that nobody works under, unless
// it is there by now.
func (in *leases) adopt(ls *lease) {
	ls.in = in
	ls.InitLeaked(in.Session)
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.own[ls.own] != nil || in.names[ls.own] != nil {
		return
	}
	in.own[ls.own], ls.stuck = ls, boottime.Now()
	if ls.reused != "" {
		in.names[ls.reused] = ls
	}
	in.cfg.Log.Warn("leaked_lock", zap.String("lock_key", ls.key), zap.String("session", in.id))
}

// giveUpAfter is for how long, in Config.Verify, a key that nobody works under is tried to be given
// back: half a minute by default.
const giveUpAfter = 10

// giveUp ends a session under which nobody works any more, and of which a key could not be given
// back for so long, as without the right to write it. To others the key looks like one whose holder
// lives. Consul deletes it with the session.
func (in *leases) giveUp(after time.Duration) {
	in.mu.Lock()
	var why error
	for _, ls := range in.own {
		switch {
		case ls.own == in.leaderPath() && ls.State() != hold.Leaked: // others can lead
			continue
		case ls.State() != hold.Leaked:
			in.mu.Unlock()
			return
		}
		if boottime.Now().Sub(ls.stuck) >= after {
			why = fmt.Errorf("lock %s could not be given back for %v", ls.key, after)
		}
	}
	in.mu.Unlock()
	if why != nil {
		in.lose(why)
	}
}
