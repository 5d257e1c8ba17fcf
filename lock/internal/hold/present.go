package hold

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"

	"onejob/boottime"
)

// A Signal wakes everybody who waits for it.
type Signal struct {
	mu   sync.Mutex
	next chan struct{}
}

// Next returns a channel that is closed by the next Send.
func (s *Signal) Next() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next == nil {
		s.next = make(chan struct{})
	}
	return s.next
}

// Send wakes those who wait.
func (s *Signal) Send() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next != nil {
		close(s.next)
		s.next = nil
	}
}

// Present is the present session of a replica, for all who use it or wait for it. S is a
// pointer.
type Present[S interface {
	comparable
	Deadline() boottime.Instant
}] struct {
	Changed Signal // is sent when the session changes

	mu      sync.Mutex
	session S
	err     error // why there is none
}

// Current returns the session that we may believe in now, or nil.
func (p *Present[S]) Current() (session S) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.session == session || p.session.Deadline().Passed() {
		return session
	}
	return p.session
}

// Set replaces the session; nil is none.
func (p *Present[S]) Set(session S) {
	p.mu.Lock()
	p.session, p.err = session, nil
	p.mu.Unlock()
	p.Changed.Send()
}

// Fail says why there is no session.
func (p *Present[S]) Fail(why error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = why
}

// Wait returns nil as soon as there is a session. If ctx ends before, it returns what keeps
// the session of that backend from coming.
func (p *Present[S]) Wait(ctx context.Context, backend string) error {
	var none S
	for {
		changed := p.Changed.Next()
		if p.Current() != none {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			p.mu.Lock()
			defer p.mu.Unlock()
			return fmt.Errorf("%s: %w", backend, cmp.Or(p.err, errors.New("no session yet")))
		}
	}
}
