package consul

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"go.uber.org/zap"

	"onejob/boottime"
	"onejob/lock"
)

const (
	maxKey   = 512
	maxValue = 2048

	// lateness is how long after we gave up on a request Consul may still apply
	// it: an agent goes on trying for 7 s (rpc_hold_timeout) while there is no
	// leader.
	lateness = 10 * time.Second
)

// The states of a lease.
const (
	stateAcquiring int32 = iota
	stateHeld
	stateRevoked   // its key is gone; the holder has not let go yet
	stateReleasing // the holder has let go, and the key is being deleted
	stateLeaked    // nobody works under it, and its key is there, or may come yet
)

// lease implements lock.Lease.
//
// From Acquire until it is settled, a lease is on its session's list, and reserves
// its key there: Consul would grant a key twice within one session.
type lease struct {
	t     *session
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

	ctx    context.Context
	cancel context.CancelCauseFunc
	state  atomic.Int32
	ended  atomic.Int64 // when it was revoked, as a boottime.Instant; zero if it was not

	// Written by the transactions that carry the lease, one at a time.
	err   error            // the last one's answer
	index uint64           // the key's ModifyIndex when it was locked; zero if not known
	doubt boottime.Instant // when we gave up on one that may be applied still; zero if none
}

// Acquire implements lock.Locker.
func (l *Locker) Acquire(ctx context.Context, r lock.Request) (lock.Lease, error) {
	switch {
	case r.Key == "" || len(r.Key) > maxKey:
		return nil, fmt.Errorf("acquire a lock: the key is %d bytes long, not 1 to %d", len(r.Key), maxKey)
	case !utf8.ValidString(r.Key): // JSON would make several such keys one
		return nil, fmt.Errorf("acquire a lock: the key %q is not valid UTF-8", r.Key)
	case len(r.Value) > maxValue:
		return nil, fmt.Errorf("acquire lock %s: its value is %d bytes long, more than %d", r.Key, len(r.Value), maxValue)
	}
	if r.Task < 0 || r.Task > 0 && r.Key != strconv.FormatInt(r.Task, 10) {
		return nil, fmt.Errorf("acquire lock %s: it is not the ID of task %d", r.Key, r.Task)
	}
	ls, err := l.acquire(ctx, r, l.taskKey(r.Key))
	if err != nil {
		return nil, err // not a nil *lease in a lock.Lease
	}
	return ls, nil
}

func (l *Locker) acquire(ctx context.Context, r lock.Request, path string) (*lease, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	t := l.current()
	if t == nil || t.id != r.Session {
		return nil, lock.ErrLost
	}
	ls := &lease{t: t, key: r.Key, own: path, path: path, value: r.Value, database: r.Database, task: r.Task}
	if r.Task != 0 {
		ls.reused = l.reusedKey(r.Task)
		l.reuses.Store(true)
	}
	ls.ctx, ls.cancel = context.WithCancelCause(t.ctx)
	if !t.reserve(ls) {
		ls.cancel(lock.ErrHeld)
		return nil, fmt.Errorf("%s: %w by another task of this replica", r.Key, lock.ErrHeld)
	}
	l.acquires.Do(ls)
	if err := ls.err; err != nil {
		ls.cancel(err)
		t.settle(ls, true)
		return nil, err
	}
	ls.locked = ls.index
	ls.state.Store(stateHeld)
	if err := cmp.Or(context.Cause(ls.ctx), ctx.Err()); err != nil {
		_ = ls.Release(ctx)
		return nil, err
	}
	return ls, nil
}

// Context implements lock.Lease.
func (ls *lease) Context() context.Context { return ls.ctx }

// Deadline implements lock.Lease.
func (ls *lease) Deadline() boottime.Instant {
	d := ls.t.deadline()
	if at := boottime.Instant(ls.ended.Load()); at != 0 {
		return min(d, at)
	}
	return d
}

// Release implements lock.Lease. It takes no longer than a few seconds,
// whatever ctx says, and is not cut short by it: what one caller gives back
// travels with what others do.
func (ls *lease) Release(context.Context) error {
	if ls.state.CompareAndSwap(stateRevoked, stateReleasing) {
		ls.t.settle(ls, true)
		return fmt.Errorf("%s: %w", ls.key, lock.ErrRevoked)
	}
	if !ls.state.CompareAndSwap(stateHeld, stateReleasing) {
		return nil
	}
	lost := context.Cause(ls.ctx)
	ls.cancel(lock.ErrReleased)
	if lost != nil {
		// Consul deletes the key with the session, which retire ends as soon as
		// nobody works under it any more.
		ls.t.settle(ls, true)
		return lost
	}
	ls.t.l.releases.Do(ls)
	err := ls.err
	ls.t.settle(ls, err == nil || errors.Is(err, lock.ErrRevoked))
	return err
}

// revoke ends a lease whose key was found to be gone. It stays on the list
// until the holder lets go, lest another task of this replica begins before.
func (ls *lease) revoke() {
	if !ls.state.CompareAndSwap(stateHeld, stateRevoked) {
		return // it was being released just now
	}
	ls.ended.Store(int64(boottime.Now()))
	ls.t.l.log.Warn("lock_revoked", zap.String("lock_key", ls.key), zap.String("session", ls.t.id))
	ls.cancel(fmt.Errorf("%w: key %s was released or deleted by somebody else", lock.ErrRevoked, ls.path))
}

// doubtful reports whether a request about the key may be applied still.
func (ls *lease) doubtful() bool {
	return ls.doubt != 0 && boottime.Now().Sub(ls.doubt) < lateness
}
