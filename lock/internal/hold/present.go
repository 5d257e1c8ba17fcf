package hold

import (
	"context"
	"fmt"
	"sync"

	"onejob/boottime"
)

// Present is the present session of a replica, for all who use it or wait for it. S is a
// pointer.
type Present[S interface {
	comparable
	Deadline() boottime.Instant
}] struct {
	mu      sync.Mutex
	session S
	err     error // why there is none
	changed chan struct{}
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
	p.Signal()
}

// Fail says why there is no session.
func (p *Present[S]) Fail(why error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = why
}

// Changed returns a channel that is closed by Set and Signal.
func (p *Present[S]) Changed() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.changed == nil {
		p.changed = make(chan struct{})
	}
	return p.changed
}

// Signal wakes everybody who waits on Changed.
func (p *Present[S]) Signal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.changed != nil {
		close(p.changed)
		p.changed = nil
	}
}

// Wait returns nil as soon as there is a session. If ctx ends before, it returns what keeps
// the session of that backend from coming.
func (p *Present[S]) Wait(ctx context.Context, backend string) error {
	for {
		changed := p.Changed()
		var none S
		if p.Current() != none {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			p.mu.Lock()
			defer p.mu.Unlock()
			if p.err != nil {
				return fmt.Errorf("%s: %w", backend, p.err)
			}
			return fmt.Errorf("%s: no session yet", backend)
		}
	}
}
