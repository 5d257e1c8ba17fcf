// Package memory is a lock service in the memory of one process: the smallest backend
// that package locktest accepts.
package memory

import (
	"context"
	"fmt"
	"sync"
	"time"
	"unicode/utf8"

	"onejob/boottime"
	"onejob/lock"
)

// lockDelay is how long the keys of a dead session stay locked.
const lockDelay = 300 * time.Millisecond

var timing = lock.Timing{TTL: 10 * time.Second, Heartbeat: 100 * time.Millisecond, Margin: time.Second}

// A Service is what several lockers share.
type Service struct {
	mu       sync.Mutex
	serial   int
	sessions map[string]*session
	keys     map[string]*lease
	delayed  map[string]time.Time // until when a key of a dead session stays locked
	changed  chan struct{}
	record   []byte
	version  uint64
}

type session struct {
	deadline boottime.Instant
	over     chan struct{} // closed when it has ended
	ended    time.Time     // zero while it lives
}

// New returns a service without sessions.
func New() *Service {
	return &Service{sessions: map[string]*session{}, keys: map[string]*lease{}, delayed: map[string]time.Time{}, changed: make(chan struct{})}
}

// change wakes those who wait for Changed.
func (s *Service) change() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// EndSession ends a session: its leases end, and their keys stay locked for the lock-delay.
func (s *Service) EndSession(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ended := s.sessions[id]
	if ended == nil || !ended.ended.IsZero() {
		return
	}
	ended.ended = time.Now()
	ended.deadline = min(ended.deadline, boottime.Now())
	close(ended.over)
	for key, l := range s.keys {
		if l.session == ended {
			delete(s.keys, key)
			s.delayed[key] = ended.ended.Add(lockDelay)
			l.end(lock.ErrLost)
		}
	}
	s.change()
	time.AfterFunc(lockDelay, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.change()
	})
}

// DeleteKey revokes the lease on a key.
func (s *Service) DeleteKey(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.keys["lock "+key]; l != nil {
		l.ended = boottime.Now()
		l.end(lock.ErrRevoked)
	}
}

// A Locker is one replica's end of a service.
type Locker struct {
	service *Service
	id      string // of the present session; the service's mutex guards it
}

var _ lock.Locker = (*Locker)(nil)

// Locker returns a locker that is not running yet.
func (s *Service) Locker() *Locker { return &Locker{service: s} }

// Run implements lock.Locker.
func (l *Locker) Run(ctx context.Context, c lock.Cluster) error {
	for ctx.Err() == nil {
		id, mine := l.begin()
		if c != nil {
			if err := l.join(ctx, c, id); err != nil {
				return err
			}
		}
		l.service.mu.Lock()
		l.id = id
		l.service.change()
		l.service.mu.Unlock()
		lost := l.keep(ctx, mine)
		l.service.mu.Lock()
		l.id = ""
		l.service.mu.Unlock()
		l.service.EndSession(id)
		if c != nil {
			_ = c.Leave(context.WithoutCancel(ctx), id, lost)
		}
	}
	return nil
}

func (l *Locker) begin() (string, *session) {
	s := l.service
	s.mu.Lock()
	defer s.mu.Unlock()
	s.serial++
	id := fmt.Sprintf("00000000-0000-0000-0000-%012d", s.serial)
	s.sessions[id] = &session{deadline: timing.Deadline(boottime.Now()), over: make(chan struct{})}
	return id, s.sessions[id]
}

func (l *Locker) join(ctx context.Context, c lock.Cluster, session string) error {
	id, err := c.ID(ctx)
	if err != nil {
		return err
	}
	return c.Join(ctx, id, session)
}

// keep extends a session until ctx ends, or until it is lost.
func (l *Locker) keep(ctx context.Context, mine *session) (lost bool) {
	beat := time.NewTicker(timing.Heartbeat)
	defer beat.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-mine.over:
			return true
		case <-beat.C:
		}
		l.service.mu.Lock()
		passed := mine.deadline.Passed() // it never moves again then
		if !passed {
			mine.deadline = timing.Deadline(boottime.Now())
		}
		l.service.mu.Unlock()
		if passed {
			return true
		}
	}
}

// Session implements lock.Locker.
func (l *Locker) Session() string {
	l.service.mu.Lock()
	defer l.service.mu.Unlock()
	return l.id
}

// Changed implements lock.Locker.
func (l *Locker) Changed() <-chan struct{} {
	l.service.mu.Lock()
	defer l.service.mu.Unlock()
	return l.service.changed
}

// Heard implements lock.Locker. The service is never silent, so it needs no other sign.
func (l *Locker) Heard(string, boottime.Instant) {}

// Lose implements lock.Locker.
func (l *Locker) Lose(session string, _ error) { l.service.EndSession(session) }

// Dead implements lock.Locker.
func (l *Locker) Dead(_ context.Context, sessions []string) (dead []string, err error) {
	s := l.service
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range sessions {
		if found := s.sessions[id]; found != nil && !found.ended.IsZero() && time.Since(found.ended) >= lockDelay {
			dead = append(dead, id)
		}
	}
	return dead, nil
}

// End implements lock.Locker. A session of this process lives until Run or an operator
// ends it.
func (l *Locker) End(_ context.Context, session string, _ time.Duration) (lock.End, error) {
	s := l.service
	s.mu.Lock()
	defer s.mu.Unlock()
	if found := s.sessions[session]; found != nil && found.ended.IsZero() {
		return lock.Alive, nil
	}
	return lock.Dead, nil
}

// Acquire implements lock.Locker.
func (l *Locker) Acquire(_ context.Context, r lock.Request) (lock.Lease, error) {
	if r.Key == "" || len(r.Key) > 512 || !utf8.ValidString(r.Key) {
		return nil, fmt.Errorf("acquire %.20q: a key is 1 to 512 bytes of UTF-8", r.Key)
	}
	return l.acquire("lock "+r.Key, r.Session, r.Database)
}

func (l *Locker) acquire(key, id string, database uint64) (lock.Lease, error) {
	s := l.service
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case id == "" || id != l.id || s.sessions[id].deadline.Passed():
		return nil, lock.ErrLost
	case database != 0 && database != s.version:
		return nil, lock.ErrChanged
	case s.keys[key] != nil:
		return nil, lock.ErrHeld
	case time.Now().Before(s.delayed[key]):
		return nil, lock.ErrDelayed
	}
	delete(s.delayed, key)
	ctx, end := context.WithCancelCause(context.Background())
	s.keys[key] = &lease{service: s, key: key, session: s.sessions[id], ctx: ctx, end: end}
	return s.keys[key], nil
}

// Campaign implements lock.Elector.
func (l *Locker) Campaign(ctx context.Context) (lock.Lease, error) {
	for {
		if lease, err := l.acquire("leader", l.Session(), 0); err == nil {
			return lease, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// Database implements lock.Locker.
func (l *Locker) Database(context.Context) ([]byte, uint64, error) {
	l.service.mu.Lock()
	defer l.service.mu.Unlock()
	return l.service.record, l.service.version, nil
}

// SetDatabase implements lock.Locker.
func (l *Locker) SetDatabase(_ context.Context, record []byte, version uint64) (uint64, error) {
	s := l.service
	s.mu.Lock()
	defer s.mu.Unlock()
	if version != s.version {
		return 0, lock.ErrChanged
	}
	s.record, s.version = record, s.version+1
	return s.version, nil
}

type lease struct {
	service  *Service
	key      string
	session  *session
	ctx      context.Context
	end      context.CancelCauseFunc
	ended    boottime.Instant // when it was revoked; zero if it was not
	released bool
}

// Context implements lock.Lease.
func (l *lease) Context() context.Context { return l.ctx }

// Deadline implements lock.Lease.
func (l *lease) Deadline() boottime.Instant {
	l.service.mu.Lock()
	defer l.service.mu.Unlock()
	if l.ended != 0 {
		return min(l.ended, l.session.deadline)
	}
	return l.session.deadline
}

// Release implements lock.Lease. A key whose lease was revoked is free when its work has
// ended, which is now.
func (l *lease) Release(context.Context) error {
	s := l.service
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.released {
		return nil
	}
	l.released = true
	if s.keys[l.key] != l {
		return lock.ErrLost
	}
	delete(s.keys, l.key)
	if l.ended != 0 {
		return lock.ErrRevoked
	}
	l.end(lock.ErrReleased)
	return nil
}
