// Package lock says what it means to hold a lock, and what the rest of onejob
// may believe about it.
//
// # What a lease promises
//
// A [Lease] is the right to work on one key. It is granted under a session,
// which the replica keeps alive by heartbeats; when the session ends, for
// whatever reason, all leases under it end with it. While the context of a
// lease lives, nobody else was granted its key, under one assumption: that the
// backend does not end a session before its TTL has passed since the last
// heartbeat it received. The holder needs no message to learn that its lease is
// over. It counts the TTL from the moment before it sent the last acknowledged
// heartbeat, on its own machine's clock, and stops a margin earlier.
//
// A deadline that has passed stays passed: a heartbeat that is acknowledged
// late never revives a lease, because the key may have changed hands meanwhile.
//
// # What it does not promise
//
// A process that is frozen, or a machine that is suspended, cannot look at its
// clock. When it wakes, a statement or a request may slip out before it notices.
// The lock-delay of the backend makes that rare; it is a cushion, not a
// guarantee. What makes it harmless is the fence: a number that rises with every
// claim, checked by Postgres in every status write, and handed to the work
// itself for others to check.
//
// # Two witnesses
//
// A replica is called dead only by two that agree: the backend, and the cluster's list
// of replicas in another place. See [Cluster].
//
// # Who is believed
//
// The backend is believed about who holds a key and which sessions live. The
// machine's own clock (package boottime) is believed about how much time has
// passed, and its wall clock if that jumps ahead, as after the pause of a virtual
// machine. No clock is compared with another machine's.
package lock

import (
	"context"
	"errors"
	"fmt"
	"time"

	"onejob/boottime"
)

// Errors that callers branch on. What a backend returns wraps one of them.
var (
	// ErrHeld says that somebody else holds the key. It is an ordinary answer.
	ErrHeld = errors.New("the lock is held")

	// ErrHeldHere is an ErrHeld that the backend was not asked for: another task of this
	// replica holds the key, or may hold it, as a request about it was not answered.
	ErrHeldHere = fmt.Errorf("%w by another task of this replica", ErrHeld)

	// ErrDelayed says that nobody holds the key, but that its last holder died
	// so recently that it might still be working. It is an ordinary answer.
	ErrDelayed = errors.New("the last holder of the lock died a moment ago")

	// ErrLost says that the session has ended, or may have: every lease under
	// it is over.
	ErrLost = errors.New("the session is lost")

	// ErrRevoked says that one lease was ended from outside, by an operator who
	// released or deleted its key, while the session lives on.
	ErrRevoked = errors.New("the lock was taken away")

	// ErrChanged says that the record of the database is not the one that the caller has
	// read, see Locker.Database.
	ErrChanged = errors.New("the record of the database has changed")

	// ErrReleased is the cause with which a lease's context ends after the
	// holder itself let go.
	ErrReleased = errors.New("the lock was released")
)

// A Request asks for one lock.
type Request struct {
	// Session is the session under which the caller began, as Locker.Session
	// told it. A request under another session than the present one is refused
	// with ErrLost: the caller's world has ended meanwhile.
	Session string

	// Key is what must not overlap. It may be any text of 1 to 512 bytes.
	Key string

	// Task is the ID of the task whose lock this is, if nothing else ever asks for the same
	// key; Key is that ID as text then. The backend may keep such a lock under a name that
	// other tasks use later. Zero means that others may share the key.
	Task int64

	// Value tells a person who looks at the key who holds it. It does not
	// change while the lock is held, and should differ between acquisitions.
	Value []byte

	// Database is the version of the record of the database under which the caller
	// began. The lock is granted only while the record has this version; zero means that
	// no record matters.
	Database uint64
}

// Silence is after how long without any sign of life a replica is dead. It gives
// signs to the cluster's list, and to the backend while the list does not answer.
// It stops working a margin earlier, by its own clock.
const Silence = 7 * time.Second

// Unwatched is the beginning of a silence, for which End does not require calls of Dead: replicas are
// watched only from then on. A replica speaks to the backend only after it has waited for the list as long.
const Unwatched = 3 * time.Second

// DefaultLockDelay is for how long a key stays locked after its holder died, unless a
// backend is configured otherwise.
const DefaultLockDelay = 3 * time.Second

// A Locker grants leases under one session at a time, which it keeps alive.
// Its methods may be called by many goroutines at once; calls that come
// together are answered together.
type Locker interface {
	Elector

	// Run keeps a session alive, and begins another when one is lost, until
	// ctx ends. It then ends the session and returns nil. Keys that somebody still
	// holds stay locked for the lock-delay. It returns an error only for what waiting cannot repair.
	//
	// Sessions begin only where the backend is the cluster's own, and each is on the
	// cluster's list before Session tells it. If c is nil, any backend will do, and
	// Heard is not waited for.
	Run(ctx context.Context, c Cluster) error

	// Session returns the present session's ID, and "" while there is none.
	Session() string

	// Changed returns a channel that is closed when the set of live sessions
	// changes, this replica's own included, or when a session has been dead
	// for the lock-delay.
	Changed() <-chan struct{}

	// Heard says that the cluster's list has acknowledged a heartbeat of the session
	// that was sent at the given moment. A lease ends when neither the list nor the
	// backend has heard of its replica for [Silence], less the margin.
	Heard(session string, sent boottime.Instant)

	// Lose ends what is left of the belief in a session: its leases end now.
	Lose(session string, why error)

	// Dead returns those of sessions that have ended so long ago that nobody can
	// believe in a lease under them any more. A session that cannot be judged now is
	// left out. Each call is a look at those that live.
	Dead(ctx context.Context, sessions []string) ([]string, error)

	// End ends the session of a replica that is dead, as the cluster's list says, and
	// gives its locks back at once; nothing is left of it then. It returns Alive, and
	// does nothing, if the backend has heard of that replica within the last silence,
	// or cannot tell: all but [Unwatched] of the silence must have been watched by calls of
	// Dead, one every second or two. Unless silence is 0, it asks Cluster.Silent after that.
	End(ctx context.Context, session string, silence time.Duration) (End, error)

	// Acquire asks once for one lock. Its errors are ErrHeld, ErrDelayed, ErrChanged and
	// ErrLost, or else the backend's own, in which case nothing is held.
	Acquire(ctx context.Context, r Request) (Lease, error)

	// Database returns what is on record about the database that the cluster works on,
	// and the version of that record; zero if there is none. What it means is the
	// caller's business. A backend that does not know the session of this replica is
	// another cluster's: it is an error to read or set its record.
	Database(ctx context.Context) (record []byte, version uint64, err error)

	// SetDatabase replaces the record if it still has the version given, and returns the
	// new version. It returns ErrChanged if it has another one. After any other error
	// nobody knows; Database tells.
	SetDatabase(ctx context.Context, record []byte, version uint64) (uint64, error)
}

// End is how a session ended, as the backend knows it.
type End int

// The ends of a session.
const (
	Alive   End = iota // it has not, as far as anybody knows
	Dead               // its replica fell silent
	Stopped            // its replica stopped in order, and could not put that on the list
)

// A Reporter is a Locker to which the death of a process can be reported. Programs of
// worker.Supervise need one.
type Reporter interface {
	// ReportDeath ends all sessions of a process (see [Cluster]) and gives their locks back at
	// once, and returns those sessions. The caller has seen that process end; nothing that it
	// started is left.
	ReportDeath(ctx context.Context, process string) (sessions []string, err error)
}

// A Timed is a Locker that says how much earlier than the backend it ends its leases, and how
// long a key stays locked after its holder died. A command may live half a second longer than
// its lease: the kind exec refuses times that are too short for that. It cannot check those of
// a Locker that is not Timed.
type Timed interface {
	Times() (margin, lockDelay time.Duration)
}

// A Lease is the right to work on what a key stands for.
type Lease interface {
	// Context ends when the lease does, with ErrLost, ErrRevoked or ErrReleased
	// as its cause. That is before the backend can grant the key to another.
	Context() context.Context

	// Deadline returns the moment at which the lease ends unless the session
	// is kept alive, or the one at which it ended. Once it has passed it never
	// moves to a later one.
	Deadline() boottime.Instant

	// Release gives the key back. The work must have ended before. It returns
	// ErrLost if the lease had ended before, and ErrRevoked if the key was taken
	// away and that was noticed. It may be called twice; the second call does
	// nothing.
	Release(ctx context.Context) error
}

// Timing is the arithmetic of a lease, and what must hold for it to be safe.
// The holder counts from the moment before it sent a heartbeat; the backend
// counts from when it received it, which is later. So the holder stops first,
// by at least the margin.
type Timing struct {
	TTL       time.Duration // how long the backend waits for a heartbeat
	Heartbeat time.Duration // how often one is sent
	Margin    time.Duration // how much earlier than the TTL the holder stops
}

// Deadline returns when a lease ends whose last acknowledged heartbeat was sent
// at the given moment.
func (t Timing) Deadline(sent boottime.Instant) boottime.Instant {
	return sent.Add(t.TTL - t.Margin)
}

// Slack returns how late a heartbeat may be acknowledged before the lease ends.
func (t Timing) Slack() time.Duration { return t.TTL - t.Margin - t.Heartbeat }

// Check returns an error with the arithmetic in it if a lease with this timing
// could not be kept, or not be given up in time.
func (t Timing) Check(name string) error {
	switch {
	case t.TTL <= 0 || t.Heartbeat <= 0 || t.Margin <= 0:
		return fmt.Errorf("%s: TTL %v, heartbeat %v and margin %v must all be above zero", name, t.TTL, t.Heartbeat, t.Margin)
	case t.Slack() < t.Heartbeat:
		return fmt.Errorf("%s: a lease lasts TTL %v - margin %v = %v after a heartbeat, which leaves no room for a lost one every %v: it must be at least twice the heartbeat, %v",
			name, t.TTL, t.Margin, t.TTL-t.Margin, t.Heartbeat, 2*t.Heartbeat)
	}
	return nil
}
