// Package hold is the holder's own side of leases: for how long it may believe in a session,
// and how a lease under that session ends. It is the same for every backend, and asks none.
//
// It relies on the boot-time clock of this machine, and on the wall clock for noticing that
// the machine was paused.
package hold

import (
	"context"
	"sync/atomic"

	"onejob/boottime"
	"onejob/lock"
)

// A State is where a lease stands.
type State int32

// The states of a lease.
const (
	Acquiring State = iota // it is being asked for
	Held                   // the holder works under it
	Revoked                // it was taken away; the holder has not let go yet
	Releasing              // nobody works under it, and it is being given back
	Leaked                 // nobody works under it, and the backend has it still, or may have it yet
)

// A Lease is what leases of all backends have in common: their states, each of which one
// caller alone can bring about, and their end.
//
//	Acquiring --Grant--> Held --LetGo--> Releasing --Leak--> Leaked
//
// A lease that is not granted goes from Acquiring to Releasing (Refuse, Abandon). One that
// is taken away goes from Held to Revoked (Revoke), and from there to Releasing (LetGo).
type Lease struct {
	session *Session
	ctx     context.Context // ends with the session's
	cancel  context.CancelCauseFunc
	state   atomic.Int32
	revoked atomic.Int64 // when, as a boottime.Instant; zero if it was not
}

// Init puts the lease under a session. It must be called once, before all other methods.
func (l *Lease) Init(s *Session) {
	l.session = s
	l.ctx, l.cancel = context.WithCancelCause(s.ctx)
}

// InitLeaked is Init for a lease that nobody works under.
func (l *Lease) InitLeaked(s *Session) {
	l.Init(s)
	l.cancel(lock.ErrReleased)
	l.Leak()
}

// State returns where the lease stands.
func (l *Lease) State() State { return State(l.state.Load()) }

// Context implements lock.Lease.
func (l *Lease) Context() context.Context { return l.ctx }

// Deadline implements lock.Lease.
func (l *Lease) Deadline() boottime.Instant {
	d := l.session.Deadline()
	if at := boottime.Instant(l.revoked.Load()); at != 0 {
		return min(d, at)
	}
	return d
}

func (l *Lease) move(from, to State) bool { return l.state.CompareAndSwap(int32(from), int32(to)) }

// Grant reports whether the lease, which was being asked for, is held now.
func (l *Lease) Grant() bool { return l.move(Acquiring, Held) }

// Refuse reports whether the lease was being asked for. If so, it cannot be granted any more.
func (l *Lease) Refuse() bool { return l.move(Acquiring, Releasing) }

// Abandon ends a lease that the caller has asked for and does not give to anybody.
func (l *Lease) Abandon(why error) {
	l.state.Store(int32(Releasing))
	l.cancel(why)
}

// Revoke reports whether the lease was held until now. If so, its context ends. The why
// wraps lock.ErrRevoked.
func (l *Lease) Revoke(why error) bool {
	if !l.move(Held, Revoked) {
		return false
	}
	l.revoked.Store(int64(boottime.Now()))
	l.cancel(why)
	return true
}

// LetGo is called when the holder works under the lease no more. It returns how the lease
// stood, Held or Revoked, for the caller to give it back; after any other state there is
// nothing to do. If its session is over, it also returns why.
func (l *Lease) LetGo() (stood State, lost error) {
	// Between these two it may be revoked, but it is never held again.
	for _, stood = range [...]State{Held, Revoked} {
		if l.move(stood, Releasing) {
			lost = l.session.Lost()
			l.cancel(lock.ErrReleased)
			return stood, lost
		}
	}
	return Releasing, nil
}

// Leak says that the lease could not be given back, or not for sure.
func (l *Lease) Leak() { l.state.Store(int32(Leaked)) }

// Retry reports whether the lease had leaked. If so, the caller gives it back.
func (l *Lease) Retry() bool { return l.move(Leaked, Releasing) }
