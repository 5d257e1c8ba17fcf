package worker

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"onejob/boottime"
	"onejob/lock"
	"onejob/tasks"
)

// maxSlotHold is how long a slot is kept for task after task. Others may wait for it,
// some of whom are no replicas.
const maxSlotHold = time.Second

// findEvery is how often limits that are not known yet are looked for, and
// missingFor how long one that was not there is left alone.
const (
	findEvery  = time.Second
	missingFor = 30 * time.Second
	maxTold    = 1000
	findFew    = 20 // how many are looked for at once
)

// limits is the state of serving rows with a limit. Each limit that has due rows
// is served by a goroutine of its own, which waits for a slot so that the others
// need not. Names that rows have and limits have not cost them nothing: only known
// ones are asked for.
type limits struct {
	wg   sync.WaitGroup
	news atomic.Bool // rows with a limit may have come due, or got room, since we looked
	due  bool        // some were when we looked last; only claim's own

	mu      sync.Mutex
	known   map[string]bool      // limits that are there, or that we make
	missing map[string]time.Time // names that were no limit, and when
	serving map[string]bool      // whether somebody asked for it again meanwhile
	told    map[string]string    // what was said last of a limit that cannot be served

	unknown reported // names that are no limit
}

func (l *limits) init(slots map[string]int) {
	l.known, l.missing, l.serving, l.told = map[string]bool{}, map[string]time.Time{}, map[string]bool{}, map[string]string{}
	l.know(slots)
}

// know notes limits that we make if they are not there.
func (l *limits) know(slots map[string]int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for name := range slots {
		l.known[name] = true
		delete(l.missing, name)
		delete(l.told, name)
		l.unknown.forget(name)
	}
}

// names returns the known limits.
func (l *limits) names() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Sorted(maps.Keys(l.known))
}

// note notes whether there is such a limit. It reports whether that is new.
func (l *limits) note(name string, there bool) (news bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	news = l.known[name] != there
	if there {
		l.known[name] = true
		delete(l.missing, name)
	} else {
		delete(l.known, name)
		l.missing[name] = time.Now()
	}
	return news
}

// passedOver returns the names that need not be looked for: known ones, and those
// that have lately been found missing.
func (l *limits) passedOver() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.missing, func(_ string, at time.Time) bool { return time.Since(at) > missingFor })
	return slices.AppendSeq(slices.Collect(maps.Keys(l.known)), maps.Keys(l.missing))
}

// findLimits looks for limits that waiting rows name and that are not known, a few at
// a time and all of them in turn, until ctx ends.
func (w *Worker) findLimits(ctx context.Context) {
	for ctx.Err() == nil {
		if some, err := w.Store.Limited(ctx); err == nil && some { // claim_failed reports a database that is unavailable
			w.findSome(ctx)
		}
		sleep(ctx, findEvery)
	}
}

func (w *Worker) findSome(ctx context.Context) {
	if w.Limits != nil {
		if list, err := w.Limits.List(ctx); err == nil { // all of them, where the backend can tell
			for _, name := range list {
				if w.limits.note(name, true) {
					w.claimSoon()
				}
			}
		}
	}
	names, err := w.Store.UnknownLimits(ctx, w.limits.passedOver(), findFew)
	if err != nil {
		return
	}
	for _, name := range names {
		if w.Limits == nil {
			w.limits.note(name, false)
			w.logLimitOnce(name, "limit_unsupported", errors.New("this replica serves no limits"))
			continue
		}
		switch _, err := w.Limits.Inspect(ctx, name); {
		case errors.Is(err, lock.ErrNoSemaphore):
			w.limits.note(name, false)
			w.logLimitOnce(name, "limit_unknown", err)
		case ctx.Err() == nil: // whatever is wrong with it, who takes a slot says so
			w.limits.note(name, true)
			w.claimSoon()
		}
	}
}

// serveLimits sees to it that every limit with due rows is served. It asks only
// when there is news, for who has no limits is to pay nothing for them: that an
// attempt has ended is none, unless rows with a limit are waiting for its room.
func (w *Worker) serveLimits(ctx context.Context) {
	if !w.limits.news.Swap(false) {
		return
	}
	s := w.serving.Load()
	var due []string
	var err error
	if known := w.limits.names(); len(known) > 0 {
		due, err = w.Store.DueLimits(ctx, tasks.Claim{Kinds: s.kinds.Names(), Queues: w.Queues}, known)
	}
	if err == nil && len(s.under) > 0 {
		limited := slices.DeleteFunc(s.kinds.Names(), func(kind string) bool { return s.limitOf[kind] == "" })
		var kinds []string
		kinds, err = w.Store.DueKinds(ctx, tasks.Claim{Kinds: limited, Queues: w.Queues})
		for _, k := range kinds {
			due = append(due, s.limitOf[k])
		}
	}
	if err != nil {
		return // claim_failed reports a database that is unavailable, and the next tick asks again
	}
	w.limits.due = len(due) > 0
	for _, name := range due {
		if w.Limits == nil {
			w.logLimitOnce(name, "limit_unsupported", errors.New("this replica serves no limits"))
			continue
		}
		w.limits.mu.Lock()
		_, serving := w.limits.serving[name]
		begin := !serving && w.running.take(1, w.Concurrency) == 1
		if begin || serving {
			w.limits.serving[name] = serving
		}
		w.limits.mu.Unlock()
		if !begin && !serving {
			w.limits.news.Store(true) // who leaves wakes us
		}
		if !begin {
			continue
		}
		w.limits.wg.Go(func() {
			w.serveLimit(ctx, name)
			w.limits.mu.Lock()
			defer w.limits.mu.Unlock()
			if w.limits.serving[name] {
				w.claimSoon()
			}
			delete(w.limits.serving, name)
		})
	}
}

// serveLimit takes slots of a limit and starts tasks under them, until none is
// due, there is no room, or ctx ends. Room for the first is taken already.
func (w *Worker) serveLimit(ctx context.Context, name string) {
	for room := 1; room == 1; room = w.running.take(1, w.Concurrency) {
		slot, err := w.takeSlot(ctx, name)
		if err != nil {
			w.running.leave(1)
			if !errors.Is(err, lock.ErrFull) && !errors.Is(err, lock.ErrDelayed) || w.Limits.Await(ctx, name) != nil {
				return // the next tick tries again
			}
			continue
		}
		t := w.claimUnder(ctx, name)
		if t == nil {
			w.running.leave(1)
			w.giveSlotBack(name, slot)
			w.claimSoon()
			// What is due may wait for a lock key. Let that not be asked about at
			// every turn.
			sleep(ctx, 50*time.Millisecond)
			return
		}
		w.limits.wg.Go(func() {
			defer w.claimSoon()
			defer w.running.leave(1)
			w.useSlot(ctx, name, slot, t)
		})
	}
	w.limits.news.Store(true) // who leaves wakes us
}

// useSlot works on t and on what else is due under the slot, for a while.
func (w *Worker) useSlot(ctx context.Context, name string, slot lock.Lease, t *tasks.Task) {
	defer w.giveSlotBack(name, slot)
	for until := time.Now().Add(maxSlotHold); t != nil; t = w.claimUnder(ctx, name) {
		w.attemptUnder(t, slot)
		w.running.end(t.Fence)
		if ctx.Err() != nil || slot.Context().Err() != nil || time.Now().After(until) {
			return
		}
	}
}

// takeSlot asks for one slot, and makes the limit if it is not there and the
// configuration says how many slots it has.
func (w *Worker) takeSlot(ctx context.Context, name string) (lock.Lease, error) {
	value, err := json.Marshal(struct {
		Replica string    `json:"replica"`
		Started time.Time `json:"started"`
	}{w.Replica, time.Now().UTC()})
	if err != nil {
		return nil, err
	}
	leases, err := w.Limits.Take(ctx, name, 1, value)
	if errors.Is(err, lock.ErrNoSemaphore) {
		slots, configured := w.serving.Load().slots[name]
		if !configured {
			w.limits.note(name, false)
			w.logLimitOnce(name, "limit_unknown", err)
			return nil, err
		}
		if err := w.Limits.Create(ctx, name, slots); err != nil && !errors.Is(err, lock.ErrExists) {
			w.logLimitOnce(name, "limit_failed", err)
			return nil, err
		}
		w.Log.Info("limit_created", zap.String("limit", name), zap.Int("slots", slots))
		leases, err = w.Limits.Take(ctx, name, 1, value)
	}
	switch {
	case err == nil:
		w.logLimitOnce(name, "", nil)
		return leases[0], nil
	case !errors.Is(err, lock.ErrFull) && !errors.Is(err, lock.ErrLost) && !errors.Is(err, lock.ErrDelayed) && ctx.Err() == nil:
		w.logLimitOnce(name, "limit_failed", err)
	}
	return nil, err
}

func (w *Worker) giveSlotBack(name string, slot lock.Lease) {
	if err := slot.Release(context.Background()); err != nil && slot.Context().Err() == nil {
		w.Log.Warn("slot_release_failed", zap.String("limit", name), zap.Error(err))
	}
}

// claimUnder claims one task under a slot of the limit; nil if there is none. It
// is noted as running; the caller says when it has ended. As in claimSome, a claim
// that has begun is finished.
func (w *Worker) claimUnder(ctx context.Context, name string) *tasks.Task {
	s := w.serving.Load()
	claims := []tasks.Claim{{Limit: name, Kinds: s.kinds.Names()}}
	if kinds := s.under[name]; len(kinds) > 0 {
		claims = append(claims, tasks.Claim{Kinds: kinds})
	}
	for _, c := range claims {
		for more := true; more; {
			var t *tasks.Task
			if t, more = w.claimOne(ctx, name, c); t != nil {
				return t
			}
		}
	}
	return nil
}

func (w *Worker) claimOne(ctx context.Context, name string, c tasks.Claim) (t *tasks.Task, more bool) {
	session := w.Locks.Session()
	bytes := w.running.reserve(MaxPayload, MaxPayload, w.PayloadMemory)
	defer w.running.unreserve(bytes)
	before, known := w.database.put(&c, session)
	if session == "" || !known || bytes == 0 || ctx.Err() != nil {
		return nil, false
	}
	w.claiming.RLock()
	defer w.claiming.RUnlock()
	c.Session, c.Replica, c.Queues, c.Max = session, w.Replica, w.Queues, 1
	claimed, err := w.Store.Claim(context.WithoutCancel(ctx), c)
	if !w.usable(&claimed, before, err) {
		return nil, false
	}
	w.reportRefused(claimed.Refused)
	if err != nil {
		w.replyLost.Store(true)
		w.Log.Debug("claim_under_limit_failed", zap.String("limit", name), zap.Error(err))
	}
	if len(claimed.Tasks) == 0 {
		return nil, claimed.More && err == nil
	}
	t = claimed.Tasks[0]
	w.running.begin(t.Fence, len(t.Payload))
	if ctx.Err() != nil {
		w.requeue(t, tasks.ErrShutdown)
		w.running.end(t.Fence)
		return nil, false
	}
	return t, false
}

// logLimitOnce logs what keeps a limit from being served, once until it changes, and of
// names that are no limit only so many an hour.
func (w *Worker) logLimitOnce(name, event string, err error) {
	w.limits.mu.Lock()
	news := w.limits.told[name] != event
	if len(w.limits.told) > maxTold {
		clear(w.limits.told) // somebody invents names
	}
	w.limits.told[name] = event
	w.limits.mu.Unlock()
	if !news {
		return
	}
	logOutcome, more := true, false
	switch event {
	case "":
		w.limits.unknown.forget(name)
	case "limit_unknown", "limit_unsupported":
		logOutcome, more = w.limits.unknown.first(name)
	}
	switch {
	case more:
		w.Log.Warn("limits_unknown", zap.Int("reported", maxReported))
	case !logOutcome:
	case event == "limit_unknown":
		w.Log.Warn("limit_unknown", zap.String("limit", name), zap.Error(err))
	case event == "limit_unsupported":
		w.Log.Warn("limit_unsupported", zap.String("limit", name), zap.Error(err))
	case event == "limit_failed":
		w.Log.Warn("limit_failed", zap.String("limit", name), zap.Error(err))
	}
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
