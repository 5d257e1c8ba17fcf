package hold

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"

	"onejob/boottime"
	"onejob/lock"
)

// A Sign is what a session's life hangs on. Each has a deadline of its own, counted from the
// moment before the last acknowledged request that gave this sign of life was sent, and a
// margin earlier than what the backend, or the other replicas, wait for.
type Sign int

// The signs of life.
const (
	TTL     Sign = iota // renewals of the session
	Check               // heartbeats for a health check
	Silence             // what other replicas hear
	signs
)

// never is the deadline of what a session does not hang on.
const never = boottime.Instant(math.MaxInt64)

// A Session is for how long the holder may believe in a session of the backend: until the
// earliest of its deadlines, or until it is lost. Its methods may be called by many
// goroutines at once.
type Session struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	above  *Session // ends this one as well; nil if there is none
	clock  *clock

	// Guarded by clock.mu.
	deadlines [signs]boottime.Instant
	aged      time.Duration // by how much the deadlines came sooner
}

// A clock notices jumps of the wall clock, for a session and those below it.
type clock struct {
	notice func(jump time.Duration)
	ctx    context.Context // of the topmost session

	mu     sync.Mutex
	jumps  boottime.Jumps
	looked boottime.Instant // at jumps
	jumped boottime.Instant // when a jump was last noticed; zero if never
	jump   time.Duration    // the last one
	total  time.Duration    // all of them
}

// NewSession returns a Session that hangs on nothing yet. It calls notice with jumps of the
// wall clock; notice must not ask the Session. The source is that of boottime.Jumps.
func NewSession(source func() (time.Duration, bool), notice func(jump time.Duration)) *Session {
	c := &clock{notice: notice, jumps: boottime.Jumps{Source: source}}
	c.jumps.Since() // what came before it is not about this session
	s := begin(context.Background(), c)
	c.ctx = s.ctx
	return s
}

// Below returns a Session that ends with this one, at the latest.
func (s *Session) Below() *Session {
	b := begin(s.ctx, s.clock)
	b.above = s
	return b
}

func begin(ctx context.Context, c *clock) *Session {
	s := &Session{clock: c, deadlines: [signs]boottime.Instant{never, never, never}}
	s.ctx, s.cancel = context.WithCancelCause(ctx)
	return s
}

// Context ends when the session does.
func (s *Session) Context() context.Context { return s.ctx }

// Lost returns why the session is over, or nil.
func (s *Session) Lost() error { return context.Cause(s.ctx) }

// Deadline returns when the session, or the one above, ends unless it is kept alive, or when
// it ended.
func (s *Session) Deadline() boottime.Instant {
	s.clock.mu.Lock()
	defer s.clock.mu.Unlock()
	s.clock.look()
	d := s.until()
	if s.above != nil {
		d = min(d, s.above.until())
	}
	return d
}

// Left returns how much time the session has by its own deadlines. A session that has none
// left is to be lost, with why.
func (s *Session) Left() (left time.Duration, why error) {
	s.clock.mu.Lock()
	defer s.clock.mu.Unlock()
	s.clock.look()
	if at := s.clock.jumped; at != 0 && boottime.Now().Sub(at) < 2*time.Second {
		why = fmt.Errorf("the wall clock has jumped ahead by %v: this machine was paused, or its clock was set", s.clock.jump.Round(time.Millisecond))
	}
	return s.until().Until(), why
}

// until returns the earliest deadline of the session's own. clock.mu is held.
func (s *Session) until() boottime.Instant {
	s.age()
	return min(s.deadlines[Check], s.deadlines[TTL], s.deadlines[Silence])
}

// age makes all deadlines come sooner by jumps of the wall clock: the machine may have been
// paused for as long, and the backend's clocks have gone on. clock.mu is held.
func (s *Session) age() {
	jump := s.clock.total - s.aged
	if jump == 0 {
		return
	}
	s.aged = s.clock.total
	for i, d := range s.deadlines {
		if d != never {
			s.deadlines[i] = d.Add(-jump)
		}
	}
}

// Begin gives the session its first deadline of a kind, counted from a request that was sent
// then. If the wall clock has jumped ahead since, that has passed.
func (s *Session) Begin(sign Sign, timing lock.Timing, sent boottime.Instant) {
	s.clock.mu.Lock()
	defer s.clock.mu.Unlock()
	s.age()
	s.deadlines[sign] = timing.Deadline(sent)
	if sent <= s.clock.jumped {
		s.deadlines[sign] = 0 // it may be older than it seems
	}
}

// Extend moves one of the deadlines, never back, after a request that was sent then was
// acknowledged. It reports whether the session lives. A deadline that has passed does not
// return, whichever it was: what was held may have changed hands. What was sent before a jump
// of the wall clock may have been sent before a pause, and extends nothing.
func (s *Session) Extend(sign Sign, timing lock.Timing, sent boottime.Instant) bool {
	s.clock.mu.Lock()
	defer s.clock.mu.Unlock()
	s.clock.look()
	stale := sent <= s.clock.jumped
	return stale || s.extend(sign, boottime.Now(), timing.Deadline(sent))
}

func (s *Session) extend(sign Sign, now, deadline boottime.Instant) bool {
	if s.until() <= now {
		return false
	}
	s.deadlines[sign] = max(s.deadlines[sign], deadline)
	return true
}

// Lose ends the session, and the leases under it, now. It reports whether it had not ended
// before.
func (s *Session) Lose(why error) bool {
	s.clock.mu.Lock()
	defer s.clock.mu.Unlock()
	s.age()
	s.deadlines[TTL] = min(s.deadlines[TTL], boottime.Now())
	first := s.ctx.Err() == nil
	s.cancel(why)
	return first
}

// Silent returns for how long a deadline has not been extended, if it is counted by timing.
func (s *Session) Silent(sign Sign, timing lock.Timing) time.Duration {
	s.clock.mu.Lock()
	defer s.clock.mu.Unlock()
	s.age()
	return boottime.Now().Sub(s.deadlines[sign].Add(-(timing.TTL - timing.Margin)))
}

// lookEvery is how long it may take until a jump of the wall clock is noticed, by those
// who ask for a deadline.
const lookEvery = 50 * time.Millisecond

// look notices jumps of the wall clock. c.mu is held.
func (c *clock) look() {
	now := boottime.Now()
	if now.Sub(c.looked) < lookEvery || c.ctx.Err() != nil {
		return
	}
	c.looked = now
	if jump := c.jumps.Since(); jump != 0 {
		c.jumped, c.jump = now, jump
		c.total += jump
		c.notice(jump)
	}
}
