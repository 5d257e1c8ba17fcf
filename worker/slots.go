package worker

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"time"

	"go.uber.org/zap"

	"onejob/boottime"
	"onejob/internal/retry"
	"onejob/lock"
	"onejob/tasks"
)

// maxSlotHold is how long a slot is kept for task after task. Others may wait for it,
// some of whom are no replicas.
const maxSlotHold = time.Second

// slotPatience is for how long room is kept for a slot that was asked for. A server that does not
// answer must not keep tasks waiting that have no limit.
const slotPatience = 500 * time.Millisecond

// serveOne takes slots of a limit and starts tasks under them, until none is
// due, there is no room, or ctx ends. Room for the first is taken already.
func (l *limits) serveOne(ctx context.Context, name string) {
	for room := 1; room == 1; room = l.running.take(1, l.concurrency) {
		late := time.AfterFunc(slotPatience, func() {
			l.running.leave(1)
			l.wake()
		})
		slot, err := l.takeSlot(ctx, name)
		kept := late.Stop()
		if err == nil && !kept && l.running.take(1, l.concurrency) == 0 {
			l.release(name, slot)
			break
		}
		if err != nil {
			if kept {
				l.running.leave(1)
			}
			if errors.Is(err, lock.ErrFull) || errors.Is(err, lock.ErrDelayed) {
				if l.semaphores.Await(ctx, name) == nil {
					continue
				}
				l.failed(name)
			}
			l.rest(ctx, name)
			return // the next tick tries again
		}
		t := l.claimUnder(ctx, name)
		if t == nil {
			l.running.leave(1)
			l.release(name, slot)
			l.wake()
			l.pause(ctx, name)
			return
		}
		l.claimed(name)
		l.wg.Go(func() {
			defer l.wake()
			l.useSlot(ctx, name, slot, t)
		})
	}
	l.news.Store(true) // who leaves wakes us
}

// useSlot works on t and on what else is due under the slot, for a while. Then, or when it works
// no more and only waits for a row, it gives back the slot and the room for one attempt.
func (l *limits) useSlot(ctx context.Context, name string, slot lock.Lease, t *tasks.Task) {
	parked := false
	defer func() {
		switch {
		case parked:
		case ctx.Err() != nil: // a stop waits for what works, and not for a backend that does not answer
			l.running.leave(1)
			l.release(name, slot)
		default:
			l.release(name, slot)
			l.running.leave(1)
		}
	}()
	park := func() {
		parked = true
		l.release(name, slot)
		l.wake()
	}
	for until := time.Now().Add(maxSlotHold); t != nil; t = l.claimUnder(ctx, name) {
		l.running.underSlot(t.Fence, park)
		l.attemptNoted(t, slot)
		l.attempted(t.LockShared)
		if parked || ctx.Err() != nil || slot.Context().Err() != nil || time.Now().After(until) {
			return
		}
	}
}

// attemptNoted is attempt, of a task that claimUnder has noted as running. A handler may end the
// goroutine.
func (l *limits) attemptNoted(t *tasks.Task, slot lock.Lease) {
	defer l.running.end(t.Fence)
	l.attempt(t, slot)
}

// What is due may wait for a lock key that is held. A slot is then taken in vain, again after
// leastPause, and after longer and longer up to mostPause.
const (
	leastPause = 50 * time.Millisecond
	mostPause  = time.Second
)

// pause waits after a slot was taken in vain: leastPause at least, and not much longer once a lock
// key has come free. Tasks that come, which may be many and need no slot, end the second half of
// it, and let it grow: each slot that is taken in vain costs Consul two writes.
func (l *limits) pause(ctx context.Context, name string) {
	l.mu.Lock()
	d := max(leastPause, min(2*l.pauses[name], mostPause))
	l.pauses[name] = d
	stirred, news := l.stirred, l.came
	l.mu.Unlock()
	retry.Pause(ctx, leastPause)
	rest := time.After(d - leastPause)
	select {
	case <-stirred:
		return
	case <-time.After(d/2 - leastPause):
	case <-ctx.Done():
	}
	select {
	case <-stirred:
	case <-news:
	case <-rest:
	case <-ctx.Done():
	}
}

// A limit that cannot be served, as its backend fails, is tried again after leastRest, and after
// longer and longer up to mostRest: a try may cost the backend many requests.
const (
	leastRest = time.Second
	mostRest  = 30 * time.Second
)

// failed says that the backend cannot serve a limit.
func (l *limits) failed(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.rests) > maxTold { // somebody invents names
		maps.DeleteFunc(l.rests, func(name string, _ time.Duration) bool { return !l.known[name] })
	}
	l.rests[name] = max(leastRest, min(2*l.rests[name], mostRest))
}

// works says that the backend can serve it.
func (l *limits) works(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.rests, name)
}

// rest waits after a failure, for leastPause at least: what is due is looked for again after it.
func (l *limits) rest(ctx context.Context, name string) {
	l.mu.Lock()
	d := l.rests[name]
	l.mu.Unlock()
	retry.Pause(ctx, max(jitter(d), leastPause))
}

// claimed says that a task was claimed under a slot of a limit.
func (l *limits) claimed(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.pauses, name)
}

// attempted ends all pauses if a lock key has come free with an attempt.
func (l *limits) attempted(shared bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if shared && len(l.pauses) > 0 {
		clear(l.pauses)
		close(l.stirred)
		l.stirred = make(chan struct{})
	}
}

// stir shortens all pauses, because a task may have come that a slot is for.
func (l *limits) stir() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.pauses) > 0 {
		close(l.came)
		l.came = make(chan struct{})
	}
}

// takeSlot asks for one slot, and makes the limit if it is not there and the
// configuration says how many slots it has.
func (l *limits) takeSlot(ctx context.Context, name string) (lock.Lease, error) {
	if err := l.ours(); err != nil {
		l.held.Store(true)
		if !errors.Is(err, errUnlisted) {
			l.logOnce(name, "limit_failed", err)
		}
		return nil, err
	}
	value, err := json.Marshal(struct {
		Replica string    `json:"replica"`
		Started time.Time `json:"started"`
	}{l.replica, time.Now().UTC()})
	if err != nil {
		return nil, err
	}
	leases, err := l.semaphores.Take(ctx, name, 1, value)
	if errors.Is(err, lock.ErrNoSemaphore) {
		slots, configured := l.config().slots[name]
		if !configured {
			l.note(name, false)
			l.logOnce(name, "limit_unknown", err)
			return nil, err
		}
		switch err := l.semaphores.Create(ctx, name, slots); {
		case err == nil:
			l.log.Info("limit_created", zap.String("limit", name), zap.Int("slots", slots))
		case !errors.Is(err, lock.ErrExists): // which another replica was quicker with
			l.logOnce(name, "limit_failed", err)
			l.failed(name)
			return nil, err
		}
		leases, err = l.semaphores.Take(ctx, name, 1, value)
	}
	switch {
	case err == nil:
		l.logOnce(name, "", nil)
		l.works(name)
		return leases[0], nil
	case errors.Is(err, lock.ErrFull) || errors.Is(err, lock.ErrLost) || errors.Is(err, lock.ErrDelayed):
		l.works(name)
	case ctx.Err() == nil:
		l.logOnce(name, "limit_failed", err)
		l.failed(name)
	}
	return nil, err
}

func (l *limits) release(name string, slot lock.Lease) {
	held := slot.Context().Err() == nil
	if err := slot.Release(context.Background()); err != nil && held && !errors.Is(err, lock.ErrRevoked) && !errors.Is(err, lock.ErrLost) {
		l.log.Warn("slot_release_failed", zap.String("limit", name), zap.Error(err))
	}
}

// claimUnder claims one task under a slot of the limit; nil if there is none. It
// is noted as running; the caller says when it has ended. As in claimSome, a claim
// that has begun is finished.
//
// Rows that name the limit and those that have it by their kind come in turns: they are two claims, and
// in one order the first ones could keep the others waiting for ever.
func (l *limits) claimUnder(ctx context.Context, name string) *tasks.Task {
	s := l.config()
	all, _ := s.ready(s.kinds.Names(), 1)
	claims := []tasks.Claim{{Limit: name, Kinds: all}}
	if kinds, _ := s.ready(s.under[name], 1); len(kinds) > 0 {
		claims = append(claims, tasks.Claim{Kinds: kinds})
		if last, _ := l.named.Load(name); last == true {
			slices.Reverse(claims)
		}
	}
	for _, c := range claims {
		for more := true; more; {
			var t *tasks.Task
			if t, more = l.claim(ctx, name, c); t != nil {
				if len(claims) > 1 {
					l.named.Store(name, c.Limit != "")
				}
				return t
			}
		}
	}
	return nil
}

// underSlot is the lease on a task that holds only as long as a slot does, too.
type underSlot struct {
	lock.Lease // on the task
	slot       lock.Lease
	ctx        context.Context
	stop       func()
}

func newUnderSlot(lease, slot lock.Lease) *underSlot {
	ctx, cancel := context.WithCancelCause(lease.Context())
	unhook := context.AfterFunc(slot.Context(), func() { cancel(context.Cause(slot.Context())) })
	return &underSlot{lease, slot, ctx, func() { unhook(); cancel(lock.ErrReleased) }}
}

func (u *underSlot) Context() context.Context { return u.ctx }

func (u *underSlot) Deadline() boottime.Instant { return min(u.Lease.Deadline(), u.slot.Deadline()) }

// Release releases the task's lock. The slot is its owner's to release.
func (u *underSlot) Release(ctx context.Context) error {
	u.stop()
	return u.Lease.Release(ctx)
}
