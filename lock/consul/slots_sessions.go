package consul

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"onejob/boottime"
	"onejob/lock"
)

const (
	// poolIdle is how long a session that holds no slot is kept for the next.
	poolIdle = time.Minute

	// poolWidth is how many sessions are created, renewed or destroyed at once.
	poolWidth = 8
)

// slotSession is a session for slots: at most one of each semaphore, because a
// semaphore's holders are a set of sessions. A session has as many as it has ever
// held slots of one semaphore at once, less those that were idle for a while.
//
// It hangs on the same health check as the session's own session, and has the same
// TTL, so it ends with the replica; renewing it is no Raft write. A slot session
// that is lost alone takes nothing else with it.
type slotSession struct {
	ttlSession

	// Guarded by pool.mu.
	at   map[string]bool  // the semaphores of which it has a slot, or may have
	idle boottime.Instant // since when it has none
}

// pool is the slot sessions of a session.
type pool struct {
	*ttlSession        // of the replica
	service     string // whose health check the sessions hang on; empty if there is none

	mu       sync.Mutex
	sessions []*slotSession
}

// reserve returns n sessions, none of which has a slot of that semaphore, with those among
// them that were reserved before. It creates those that are missing. If there is an error,
// it returns those that it has.
func (p *pool) reserve(ctx context.Context, name string, n int, before []*slotSession) ([]*slotSession, error) {
	p.mu.Lock()
	// Those that ended since the last try are swept up when nothing is at them.
	list := slices.DeleteFunc(before, func(s *slotSession) bool {
		if s.Lost() != nil {
			delete(s.at, name)
		}
		return s.Lost() != nil
	})
	for _, s := range p.sessions { // the first first, so that the last fall idle
		if len(list) < n && s.Lost() == nil && !s.at[name] {
			s.at[name] = true
			list = append(list, s)
		}
	}
	missing := make([]struct{}, n-len(list))
	p.mu.Unlock()

	err := parallel(poolWidth, missing, func(struct{}) error {
		s, err := p.create(ctx, name)
		if err != nil {
			return err
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.sessions, list = append(p.sessions, s), append(list, s)
		return nil
	})
	return list, cmp.Or(p.Lost(), err)
}

// create creates a session that is at one semaphore from the start. One
// whose creation was answered too late is renewed by nobody and ends by itself.
func (p *pool) create(ctx context.Context, name string) (*slotSession, error) {
	s := &slotSession{ttlSession: ttlSession{Session: p.Below(), client: p.client, kind: "slot session"}, at: map[string]bool{name: true}}
	s.lost = func(why error) {
		p.mu.Lock()
		defer p.mu.Unlock()
		s.cfg.Log.Warn("slot_session_lost", zap.String("session", s.id), zap.Int("slots", len(s.at)), zap.Error(why))
	}
	if err := s.ttlSession.create(ctx, "onejob slot "+p.cfg.Replica.Name, p.service); err != nil {
		s.Lose(err)
		return nil, err
	}
	return s, nil
}

// living returns the sessions that are not lost.
func (p *pool) living() []*slotSession {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(p.sessions), func(s *slotSession) bool { return s.Lost() != nil })
}

// renew renews all slot sessions and reports whether it could.
func (p *pool) renew(ctx context.Context) bool {
	return nil == parallel(poolWidth, p.living(), func(s *slotSession) error {
		_, err := s.renew(ctx)
		if err != nil && s.Lost() == nil && ctx.Err() == nil {
			p.cfg.Log.Debug("slot_renewal_failed", zap.String("session", s.id), zap.Error(err))
		}
		return err
	})
}

// expire ends the slot sessions whose deadline has passed, and returns how
// long it is until the next one's.
func (p *pool) expire() time.Duration {
	next := p.cfg.SessionTTL
	for _, s := range p.living() {
		left, why := s.Left()
		if left <= 0 {
			s.lose(cmp.Or(why, errors.New("no renewal was acknowledged in time")))
			continue
		}
		next = min(next, left)
	}
	return next
}

// sweep ends the sessions that hold nothing and are lost, or have been idle
// for long. One that cannot be ended now is renewed by nobody, and ends by
// itself.
func (p *pool) sweep(ctx context.Context) {
	p.mu.Lock()
	var swept []*slotSession
	p.sessions = slices.DeleteFunc(p.sessions, func(s *slotSession) bool {
		sweep := len(s.at) == 0 && (s.Lost() != nil || boottime.Now().Sub(s.idle) > poolIdle)
		if sweep {
			swept = append(swept, s)
		}
		return sweep
	})
	p.mu.Unlock()
	_ = destroyAll(ctx, swept)
}

// end ends all slot sessions.
func (p *pool) end(ctx context.Context) error {
	p.mu.Lock()
	all := p.sessions
	p.sessions = nil
	p.mu.Unlock()
	return destroyAll(ctx, all)
}

func destroyAll(ctx context.Context, list []*slotSession) error {
	return parallel(poolWidth, list, func(s *slotSession) error {
		s.Lose(lock.ErrLost)
		ctx, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		return s.destroy(ctx)
	})
}

// parallel calls f with every element, some at a time, and returns when all
// calls have.
func parallel[T any](width int, list []T, f func(T) error) error {
	var wg sync.WaitGroup
	turns, errs := make(chan struct{}, width), make([]error, len(list))
	for i, x := range list {
		turns <- struct{}{}
		wg.Go(func() {
			defer func() { <-turns }()
			errs[i] = f(x)
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}
