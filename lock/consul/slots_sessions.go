package consul

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"onejob/boottime"
	"onejob/internal/mutant"
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
	t      *session
	id     string
	ctx    context.Context // ends with trust in the session, or in the session's
	cancel context.CancelCauseFunc

	// Guarded by t.mu.
	deadline boottime.Instant // of its TTL; the check's is the session's
	sent     boottime.Instant // before it was created
	at       map[string]bool  // the semaphores of which it has a slot, or may have
	idle     boottime.Instant // since when it has none
}

// reserveSlots gives a change as many sessions as it needs, none of which has a
// slot of that semaphore. It creates those that are missing.
func (t *session) reserveSlots(ctx context.Context, name string, c *change) error {
	t.mu.Lock()
	// Those that ended since the last try are swept up when nothing is at them.
	c.sessions = slices.DeleteFunc(c.sessions, func(s *slotSession) bool {
		if s.ctx.Err() != nil {
			delete(s.at, name)
		}
		return s.ctx.Err() != nil
	})
	for _, s := range t.pool { // the first first, so that the last fall idle
		if len(c.sessions) < c.n && s.ctx.Err() == nil && !s.at[name] {
			s.at[name] = true
			c.sessions = append(c.sessions, s)
		}
	}
	missing := make([]struct{}, c.n-len(c.sessions))
	t.mu.Unlock()

	var errs []error
	parallel(poolWidth, missing, func(struct{}) {
		s, err := t.newSlotSession(ctx, name)
		t.mu.Lock()
		defer t.mu.Unlock()
		t.look()
		if err != nil {
			errs = append(errs, err)
			return
		}
		if s.sent <= t.leaseWindow.jumped {
			s.deadline = 0 // it may be older than it seems
		}
		t.pool = append(t.pool, s)
		c.sessions = append(c.sessions, s)
	})
	if err := context.Cause(t.ctx); err != nil {
		return err
	}
	if len(errs) > 0 {
		return errs[0]
	}
	return nil
}

// newSlotSession creates a session that is at one semaphore from the start. One
// whose creation was answered too late is renewed by nobody and ends by itself.
func (t *session) newSlotSession(ctx context.Context, name string) (*slotSession, error) {
	id, sent, err := t.l.createSession(ctx, t.sessionEntry("onejob slot "+t.l.cfg.Replica.Name))
	if err != nil {
		return nil, err
	}
	s := &slotSession{t: t, id: id, deadline: t.l.cfg.session().Deadline(sent), sent: sent, at: map[string]bool{name: true}}
	s.ctx, s.cancel = context.WithCancelCause(t.ctx)
	return s, nil
}

// hold puts a slot under the session on the session's list.
func (s *slotSession) hold(name string) *slot {
	sl := &slot{session: s, name: name}
	sl.ctx, sl.cancel = context.WithCancelCause(s.ctx)
	sl.state.Store(stateHeld)
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	s.t.slots[sl] = true
	return sl
}

// until returns when the session ends unless it is renewed, or when it ended.
func (s *slotSession) until() boottime.Instant {
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	if mutant.SelfFencing {
		return never
	}
	s.t.look()
	return s.deadline
}

// lose ends trust in the session, and every slot under it.
func (s *slotSession) lose(why error) {
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	if s.ctx.Err() != nil {
		return
	}
	s.deadline = min(s.deadline, boottime.Now())
	s.t.l.log.Warn("slot_session_lost", zap.String("session", s.id), zap.Int("slots", len(s.at)), zap.Error(why))
	s.cancel(fmt.Errorf("%w: slot session %s: %w", lock.ErrLost, s.id, why))
}

// lives asks whether the session still lives. If it has ended it is lost. An answer
// that Consul does not give is an error, as in session.lives.
func (s *slotSession) lives(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	entry, err := s.t.l.lookAt(ctx, s.t.l.heartbeats, s.id)
	if err == nil && entry == nil {
		s.lose(errors.New("it was ended from outside"))
	}
	return entry != nil, err
}

// renew renews the session and reports whether it could. As for the session's own,
// an answer that comes after the deadline is too late.
func (s *slotSession) renew(ctx context.Context) bool {
	timing := s.t.l.cfg.session()
	rctx, cancel := context.WithTimeout(ctx, max(time.Second, timing.Slack()/2))
	defer cancel()
	sent := boottime.Now()
	entry, _, err := s.t.l.heartbeats.Session().Renew(s.id, s.t.l.write(rctx))
	switch {
	case err == nil && entry == nil:
		s.lose(errors.New("it has ended, says Consul"))
	case err == nil:
		s.t.mu.Lock()
		defer s.t.mu.Unlock()
		s.t.look()
		if !s.deadline.Passed() && sent > s.t.leaseWindow.jumped {
			s.deadline = max(s.deadline, timing.Deadline(sent))
		}
		return true
	case ctx.Err() == nil:
		s.t.l.log.Debug("slot_renewal_failed", zap.String("session", s.id), zap.Error(err))
	}
	return false
}

// livingPool returns the sessions that are not lost.
func (t *session) livingPool() []*slotSession {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(t.pool), func(s *slotSession) bool { return s.ctx.Err() != nil })
}

// renewPool renews all slot sessions and reports whether it could.
func (t *session) renewPool(ctx context.Context) bool {
	var mu sync.Mutex
	all := true
	parallel(poolWidth, t.livingPool(), func(s *slotSession) {
		if !s.renew(ctx) {
			mu.Lock()
			defer mu.Unlock()
			all = false
		}
	})
	return all
}

// expirePool ends the slot sessions whose deadline has passed, and returns how
// long it is until the next one's.
func (t *session) expirePool() time.Duration {
	next := t.l.cfg.SessionTTL
	for _, s := range t.livingPool() {
		left := s.until().Until()
		if left <= 0 {
			s.lose(errors.New("no renewal was acknowledged in time"))
			continue
		}
		next = min(next, left)
	}
	return next
}

// sweepPool ends the sessions that hold nothing and are lost, or have been idle
// for long. One that cannot be ended now is renewed by nobody, and ends by
// itself.
func (t *session) sweepPool(ctx context.Context) {
	t.mu.Lock()
	var swept []*slotSession
	t.pool = slices.DeleteFunc(t.pool, func(s *slotSession) bool {
		sweep := len(s.at) == 0 && (s.ctx.Err() != nil || boottime.Now().Sub(s.idle) > poolIdle)
		if sweep {
			swept = append(swept, s)
		}
		return sweep
	})
	t.mu.Unlock()
	_ = t.destroy(ctx, swept)
}

// endPool ends all slot sessions.
func (t *session) endPool(ctx context.Context) error {
	t.mu.Lock()
	all := t.pool
	t.pool = nil
	t.mu.Unlock()
	return t.destroy(ctx, all)
}

func (t *session) destroy(ctx context.Context, list []*slotSession) error {
	var mu sync.Mutex
	var errs []error
	parallel(poolWidth, list, func(s *slotSession) {
		s.cancel(lock.ErrLost)
		rctx, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		_, err := t.l.heartbeats.Session().Destroy(s.id, t.l.write(rctx))
		mu.Lock()
		defer mu.Unlock()
		errs = append(errs, err)
	})
	return errors.Join(errs...)
}

// parallel calls f with every element, some at a time, and returns when all
// calls have.
func parallel[T any](width int, list []T, f func(T)) {
	var wg sync.WaitGroup
	turns := make(chan struct{}, width)
	for _, x := range list {
		turns <- struct{}{}
		wg.Go(func() {
			defer func() { <-turns }()
			f(x)
		})
	}
	wg.Wait()
}
