package consul

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"
	"go.uber.org/zap"

	"onejob/boottime"
	"onejob/internal/batch"
	"onejob/internal/retry"
	"onejob/lock"
	"onejob/lock/internal/hold"
)

// maxTries is how often a change of a .lock is tried that others change too.
const maxTries = 40

// registry keeps what is known of the semaphores that somebody asks for just
// now, or whose holders it watches die.
type registry struct {
	*client
	members *membership
	changed *hold.Signal    // is sent when the set of living sessions changes
	life    context.Context // of all transactions

	mu         sync.Mutex
	semaphores map[string]*semaphore
}

// semaphore is what this replica knows of a semaphore: which callers in this process
// ask for it, and what the viewer knows.
type semaphore struct {
	viewer
	in    *registry
	users int // guarded by the registry

	changes  batch.Group[*change]
	watching chan struct{} // who has put something in watches for all who wait
	freed    hold.Signal   // a slot may have come free
}

// open returns the state of a semaphore, for the caller to call done on.
func (r *registry) open(name string) *semaphore {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.semaphores[name]
	if s == nil {
		s = &semaphore{in: r, watching: make(chan struct{}, 1),
			viewer: viewer{client: r.client, members: r.members, name: name, missed: map[string]boottime.Instant{}}}
		s.changes = batch.Group[*change]{Commit: s.commit, Max: maxBatch}
		r.semaphores[name] = s
	}
	s.users++
	return s
}

func (s *semaphore) done() {
	s.in.mu.Lock()
	defer s.in.mu.Unlock()
	s.users--
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.users == 0 && len(s.missed) == 0 && s.index == 0 && s.back == 0 { // what was there may come back older
		delete(s.in.semaphores, s.name)
	}
}

// change is what one caller wants of a semaphore: to take n slots, or to leave
// one. All who want something at the same moment are served by one transaction.
type change struct {
	pool     *pool          // of those who take
	n        int            // how many to take
	value    []byte         // of the entries
	sessions []*slotSession // reserved for them
	leave    string         // the session that leaves; empty if none does

	doubt    bool // an earlier try may have been applied, or may be still
	answered bool
	err      error
}

func (c *change) answer(err error) { c.answered, c.err = true, err }

// change makes a change, together with those that others want.
func (r *registry) change(name string, c *change) {
	s := r.open(name)
	defer s.done()
	s.changes.Do(c)
}

// leaveFor removes another replica's slot, which nobody works under any more. If it
// cannot, the slot comes free some time after the end of its session.
func (r *registry) leaveFor(name, session string) {
	c := &change{leave: session}
	r.change(name, c)
	if c.err != nil && !errors.Is(c.err, lock.ErrRevoked) {
		r.cfg.Log.Debug("slot_left_behind", zap.String("limit", name), zap.String("session", session), zap.Error(c.err))
	}
}

// commit makes changes, by optimistic updates of the .lock, within
// requestTimeout. It does not rest on what was known before: every try reads the
// semaphore, and a try whose answer was lost is found to have been applied, or
// is made again.
func (s *semaphore) commit(list []*change) {
	ctx, cancel := context.WithTimeout(s.in.life, requestTimeout)
	defer cancel()
	err := s.try(ctx, func(v *view) (done bool, err error) {
		err = s.apply(ctx, s.plan(ctx, v, list))
		list = slices.DeleteFunc(list, func(c *change) bool { return c.answered })
		return len(list) == 0, err // without those that did not fit
	})
	for _, c := range list {
		c.answer(fmt.Errorf("limit %s: %w", s.name, err))
	}
}

// try calls f with the semaphore as it stands, until f is done or has an error that will
// not go away. Others may have changed the .lock in between.
func (s *semaphore) try(ctx context.Context, f func(v *view) (done bool, err error)) error {
	for try := 1; ; try++ {
		v, err := s.look(ctx)
		done := false
		if err == nil {
			done, err = f(v)
		}
		switch {
		case done:
			return nil
		case err == nil:
		case classify(err) == wrong || try >= maxTries || ctx.Err() != nil:
			return s.explain(err)
		default:
			retry.Pause(ctx, jitter(try))
		}
	}
}

// jitter keeps those apart who change the same .lock.
func jitter(try int) time.Duration {
	return rand.N(2 * time.Millisecond << min(try-1, 4))
}

// plan is one try.
type plan struct {
	v       *view
	holders map[string]bool // as they shall be
	rewrite bool            // whether they differ
	room    int             // for more operations
	steps   []step
}

// step is what the try does for one change.
type step struct {
	c      *change
	ops    api.TxnOps
	answer error // once it is applied
}

// plan answers the changes for which nothing can or need be done, and plans for
// the others, those who leave first.
func (s *semaphore) plan(ctx context.Context, v *view, list []*change) *plan {
	p := &plan{v: v, holders: maps.Clone(v.content.Holders.set), room: maxBatch - 2}
	for session := range v.gone {
		delete(p.holders, session)
	}
	for _, c := range list {
		if c.leave != "" {
			s.planLeave(p, c)
		}
	}
	for _, c := range list {
		if c.leave == "" {
			s.planTake(ctx, p, c)
		}
	}
	return p
}

// add takes a step in if there is room for its operations.
func (p *plan) add(st step) bool {
	if len(st.ops) > p.room {
		return false
	}
	p.room -= len(st.ops)
	p.steps = append(p.steps, st)
	return true
}

// planLeave takes a session out of the holders, and its entry away: whichever of
// them is still there. While nobody may enter, it takes away the entry alone: others
// that have read a later .lock are to see that this is an earlier one.
func (s *semaphore) planLeave(p *plan, c *change) {
	id := c.leave
	holds := p.v.content.Holders.set[id]
	key := s.limitEntry(s.name, id)
	entry := p.v.entries[id] != nil && p.v.entries[id].Key == key
	st := step{c: c}
	if !(holds && entry) && !c.doubt {
		st.answer = fmt.Errorf("limit %s: %w", s.name, lock.ErrRevoked)
	}
	if !entry && (!holds || p.v.shut) {
		c.answer(st.answer)
		return
	}
	if entry {
		st.ops = api.TxnOps{
			op(api.KVCheckSession, api.KVTxnOp{Key: key, Session: id}),
			op(api.KVDelete, api.KVTxnOp{Key: key}),
		}
	}
	if p.add(st) && holds && !p.v.shut {
		delete(p.holders, id)
		p.rewrite = true
	}
}

// planTake adds sessions to the holders, and an entry for each.
func (s *semaphore) planTake(ctx context.Context, p *plan, c *change) {
	if err := p.v.usable(); err != nil {
		c.answer(err)
		return
	}
	in, need := 0, c.n
	for _, session := range c.sessions {
		if p.holders[session.id] {
			need--
			if p.v.entries[session.id] != nil {
				in++
			}
		}
	}
	if in == c.n { // an earlier try was applied, though its answer was lost
		c.answer(nil)
		return
	}
	if err := p.v.full(len(p.holders), need); err != nil {
		if len(p.steps) == 0 {
			c.answer(err)
		} else { // it may be full by those before it, who may not get in after all
			p.add(step{c: c, answer: err})
		}
		return
	}
	if c.n > p.room {
		return // next time
	}
	var err error
	if c.sessions, err = c.pool.reserve(ctx, s.name, c.n, c.sessions); err != nil {
		c.answer(fmt.Errorf("limit %s: a session for a slot: %w", s.name, s.explain(err)))
		return
	}
	st := step{c: c}
	for _, session := range c.sessions {
		st.ops = append(st.ops, op(api.KVLock, api.KVTxnOp{
			Key: s.limitEntry(s.name, session.id), Value: c.value, Flags: api.SemaphoreFlagValue, Session: session.id,
		}))
		p.holders[session.id] = true
	}
	p.rewrite = true
	p.add(st)
}

// apply sends a plan, and answers its changes if it was applied.
func (s *semaphore) apply(ctx context.Context, p *plan) error {
	if len(p.steps) == 0 {
		return nil
	}
	var ops api.TxnOps
	for _, st := range p.steps {
		ops = append(ops, st.ops...)
	}
	if p.rewrite {
		c := content{Limit: p.v.limit, Holders: holders{set: p.holders, list: p.v.content.Holders.list}}
		ops = append(ops, p.v.unchanged(s.keyNames), p.v.writeLock(s.keyNames, c))
	}
	err := s.txn(ctx, s.keys, ops)
	switch classify(err) {
	case applied:
		for _, st := range p.steps {
			st.c.answer(st.answer)
		}
	case unknown:
		for _, st := range p.steps {
			st.c.doubt = true
		}
	case conflict:
		p.blame(err)
	}
	return err
}

// blame finds the sessions that have ended, for others to take their place. All
// else that can be in conflict will look different next time.
func (p *plan) blame(err error) {
	for _, e := range txnErrors(err) {
		if !strings.Contains(e.What, "invalid session") {
			continue
		}
		i := e.OpIndex
		for _, st := range p.steps {
			if i < len(st.ops) && st.c.leave == "" {
				st.c.sessions[i].lose(errors.New(e.What))
			}
			if i -= len(st.ops); i < 0 {
				break
			}
		}
	}
}
