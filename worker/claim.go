package worker

import (
	"context"
	"errors"
	"math"
	"time"

	"go.uber.org/zap"

	"onejob/internal/retry"
	"onejob/tasks"
)

// claimStore is what claims need of the database.
type claimStore interface {
	Claim(context.Context, tasks.Claim) (tasks.Claimed, error)
	LookBehind(context.Context, tasks.Claim) (some bool, err error)
	UnknownKinds(ctx context.Context, known []string) ([]string, error)
	Listen(ctx context.Context, wake func(s tasks.Signal, word string)) error
	WakeAll(ctx context.Context) error
}

// maxClaim is how many tasks one claim takes. Larger claims make a task no cheaper.
const maxClaim = 512

// claim claims tasks for free slots until ctx ends.
func (w *Worker) claim(ctx context.Context) {
	failing := false
	behind := false // the last claim left tasks that are due
	turn := true    // tasks with a limit are first: those without were last time
	for {
		select {
		case <-ctx.Done():
			// Other replicas requeue what this audit misses once they see that we have stopped.
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
			w.auditAgain = time.Time{}
			w.audit(last)
			cancel()
			return
		case <-w.wake:
		}
		w.wakeups.idle.Store(0) // before free slots are counted: who leaves from here on wakes this loop
		limited := w.limits.due
		first := limited && turn // or they would get no room beside a backlog of others, nor the others beside theirs
		if first && w.limits.serve(ctx) {
			turn = false
		}
		served, heard := time.Now(), false // heard: it was triggered again since tasks with a limit were looked for
		nothing := false                   // is left that is due
		for more := true; more && ctx.Err() == nil; {
			w.audit(ctx) // here, as a backlog may keep this loop going for hours
			if behind {
				heard = w.gather(ctx) || heard
				if time.Since(served) >= serveEvery { // or they would wait until all others are done
					w.limits.serve(ctx)
					served, heard = time.Now(), false
				}
			}
			var asked bool
			var err error
			more, asked, err = w.claimSome(ctx)
			switch {
			case err != nil && !failing:
				w.cfg.Log.Warn("claim_failed", zap.Error(err))
			case err == nil && asked && failing:
				w.cfg.Log.Info("claim_recovered")
			}
			if asked {
				w.lookups.claimed(err)
				failing, behind, turn = err != nil, more, turn || !first
			}
			nothing = asked && err == nil && !more && !w.someWait()
			more = more && err == nil // after an error the next tick tries again
		}
		if !first || heard {
			w.limits.serve(ctx)
		}
		w.looked(nothing, limited, w.limits.due)
	}
}

// Where more tasks are due than run, a claim waits until an eighth of the slots is free, and
// for gatherFor at most. To Postgres a claim of a few tasks costs nearly as much as one of
// hundreds.
const (
	gatherPart = 8
	gatherFor  = 10 * time.Millisecond
)

// serveEvery is how often rows with a limit are looked for, if there is news, while there are
// more tasks without one than run.
const serveEvery = 100 * time.Millisecond

// gather waits for slots to come free together. It reports whether it has taken a trigger of a claim
// meanwhile, which may be of a task with a limit.
func (w *Worker) gather(ctx context.Context) (heard bool) {
	enough := min(maxClaim, w.cfg.Concurrency/gatherPart)
	if w.running.free(w.cfg.Concurrency) >= enough {
		return false
	}
	end := time.After(gatherFor)
	for w.running.free(w.cfg.Concurrency) < enough {
		select {
		case <-w.wake: // a slot is free, or there is news; the claim that follows is about both
			heard = true
		case <-end:
			return heard
		case <-ctx.Done():
			return heard
		}
	}
	return heard
}

// claimSome claims tasks for the free slots and starts them. It reports whether to
// claim again at once, and whether it sent a claim at all.
//
// A claim that was sent is completed even if ctx ends: without its reply there would
// be tasks that belong to this replica and that nobody runs.
func (w *Worker) claimSome(ctx context.Context) (more, asked bool, err error) {
	session := w.cfg.Locks.Session()
	room := w.running.take(maxClaim, w.cfg.Concurrency)
	most := w.cfg.PayloadMemory
	if most >= 4*MaxPayload {
		most -= most / 4 // for claims under limits, meanwhile
	}
	bytes := w.running.reserve(most, MaxPayload, most)
	defer w.running.unreserve(bytes)
	c := tasks.Claim{}
	before, known := w.database.put(&c, session)
	serving := w.serving.Load()
	kinds, begin := serving.ready(serving.none, room)
	if room == 0 || bytes == 0 || session == "" || !known || len(kinds) == 0 && len(serving.none) > 0 {
		w.running.leave(room)
		return false, false, nil // a free slot, a session or a database wakes this loop
	}
	if pass := w.lockGate.pass(room); pass < room {
		w.running.leave(room - pass)
		if room = pass; room == 0 {
			return false, false, nil // the next tick tries again
		}
	}
	w.claiming.RLock()
	defer w.claiming.RUnlock()
	c = tasks.Claim{Server: c.Server, FencesFrom: c.FencesFrom, Session: session, Replica: w.cfg.Replica, Kinds: kinds, Queues: w.cfg.Queues, Max: w.payloads.fit(min(begin, room), bytes), MaxBytes: bytes}
	whole := context.WithoutCancel(ctx)
	var ahead ahead
	c.Taken = func(rows []tasks.Taken) { ahead.lock(w, c, rows) }
	began := time.Now()
	claimed, err := w.cfg.Store.Claim(whole, c)
	ahead.end()
	defer ahead.release()
	w.measure(Measurement{What: MeasureClaim, Count: len(claimed.Tasks), Took: time.Since(began)})
	if !w.usable(&claimed, before, err) {
		w.running.leave(room)
		return false, false, nil
	}
	if len(claimed.Tasks) == 0 {
		w.lockGate.unused()
	}
	w.running.leave(room - len(claimed.Tasks))
	logRefusedRows(w.cfg.Log, claimed.Refused)
	if w.cfg.Tracer != nil && len(claimed.Tasks) > 0 {
		w.cfg.Tracer.Claimed(claimed.Tasks, time.Since(began))
	}
	w.payloads.saw(claimed.Tasks)
	for _, t := range claimed.Tasks {
		var run func() (awaited bool)
		if ctx.Err() == nil {
			early := ahead.take(t)
			run = func() bool { return w.attempt(t, early) }
		} else {
			run = func() bool { w.requeue(t, tasks.ErrShutdown); return true }
		}
		w.running.start(t.Fence, len(t.Payload), run, w.left)
	}
	if err != nil {
		w.replyLost.Store(true)
	}
	if err == nil && claimed.More && w.running.free(w.cfg.Concurrency) <= 0 {
		notify(w.full)
	}
	return claimed.More, true, err
}

// someWait reports whether tasks of some kind are not claimed here although there are slots.
func (w *Worker) someWait() bool {
	s := w.serving.Load()
	kinds, _ := s.ready(s.kinds.Names(), 0)
	return len(kinds) < len(s.kinds)
}

// claimOne claims one task under a limit, and notes it as running; nil if there is none.
// The caller says when it has ended. It reports whether to claim again at once. As in
// claimSome, a claim that was sent is completed.
func (w *Worker) claimOne(ctx context.Context, limit string, c tasks.Claim) (t *tasks.Task, more bool) {
	session := w.cfg.Locks.Session()
	bytes := w.running.reserve(MaxPayload, MaxPayload, w.cfg.PayloadMemory)
	defer w.running.unreserve(bytes)
	before, known := w.database.put(&c, session)
	if session == "" || !known || bytes == 0 || ctx.Err() != nil || w.lockGate.pass(1) == 0 {
		return nil, false
	}
	w.claiming.RLock()
	defer w.claiming.RUnlock()
	c.Session, c.Replica, c.Queues, c.Max = session, w.cfg.Replica, w.cfg.Queues, 1
	began := time.Now()
	claimed, err := w.cfg.Store.Claim(context.WithoutCancel(ctx), c)
	if !w.usable(&claimed, before, err) {
		return nil, false
	}
	logRefusedRows(w.cfg.Log, claimed.Refused)
	if err != nil {
		w.replyLost.Store(true)
		w.cfg.Log.Debug("claim_under_limit_failed", zap.String("limit", limit), zap.Error(err))
	}
	if len(claimed.Tasks) == 0 {
		w.lockGate.unused()
		return nil, claimed.More && err == nil
	}
	if t = claimed.Tasks[0]; w.cfg.Tracer != nil {
		w.cfg.Tracer.Claimed(claimed.Tasks, time.Since(began))
	}
	if ctx.Err() != nil {
		w.giveBack(t, tasks.ErrShutdown)
		return nil, false
	}
	w.running.begin(t.Fence, len(t.Payload))
	return t, false
}

// giveBack requeues a task of this replica that nothing has begun of, in the background: it is
// tried until Postgres answers, and a shutdown bounds only what it does not wait for itself.
func (w *Worker) giveBack(t *tasks.Task, why error) {
	key := t.Fence
	if errors.Is(why, errFenceBack) { // an attempt of this replica may be under way under the same one
		key = -key
	}
	w.running.take(1, math.MaxInt)
	w.running.start(key, len(t.Payload), func() bool { w.requeue(t, why); return true }, w.left)
}

// usable reports whether the claimed tasks may run. They may not if the claim reached
// another server than the database on record, or if fences have gone back; then they
// are requeued.
func (w *Worker) usable(claimed *tasks.Claimed, before int64, err error) bool {
	if errors.Is(err, tasks.ErrOtherServer) {
		w.database.doubt()
		return false
	}
	if w.database.rising(claimed.Tasks, before) {
		return true
	}
	for _, t := range claimed.Tasks {
		w.giveBack(t, errFenceBack)
	}
	return false
}

// logRefusedRows logs rows that Postgres refuses to change. Each is reported each time that it was
// tried: the row has failed, or is left alone for some minutes. Of many that were tried together only the first are.
func logRefusedRows(log *zap.Logger, rows []tasks.RowError) {
	for _, r := range rows[:min(len(rows), mostNamed)] {
		log.Error("row_refused", zap.Int64("task_id", r.ID), zap.Bool("failed", r.Failed), zap.Error(r.Err))
	}
	if more := len(rows) - mostNamed; more > 0 {
		log.Error("rows_refused", zap.Int("rows", more))
	}
}

// payloads tracks the mean size of recent payloads, so that no more tasks are claimed
// than can be read.
type payloads struct{ mean float64 }

// fit returns how many of room tasks are likely to fit into bytes, at least one.
func (p *payloads) fit(room, bytes int) int {
	if float64(room)*p.mean <= float64(bytes) {
		return room
	}
	return max(1, int(float64(bytes)/p.mean))
}

func (p *payloads) saw(list []*tasks.Task) {
	if len(list) == 0 {
		return
	}
	sum := 0
	for _, t := range list {
		sum += len(t.Payload)
	}
	p.mean += (float64(sum)/float64(len(list)) - p.mean) / 2
}

// lookBehind searches for due tasks that claims have passed over, until ctx ends.
func (w *Worker) lookBehind(ctx context.Context) {
	for ctx.Err() == nil {
		retry.Pause(ctx, time.Second)
		s := w.serving.Load()
		sorts := [][]string{s.none}
		if some, _ := s.ready(s.none, 0); len(some) > 0 && len(some) < len(s.none) {
			sorts = append(sorts, some)
		}
		for _, kinds := range sorts {
			some, err := w.cfg.Store.LookBehind(ctx, tasks.Claim{Kinds: kinds, Queues: w.cfg.Queues})
			w.lookups.saw("tasks_passed_over", err)
			if err == nil && some {
				w.claimSoon()
			}
		}
	}
}

// tick triggers a claim at every poll.
func (w *Worker) tick(ctx context.Context) {
	var unknown time.Time // when to search for kinds that this replica does not know
	var pace pace
	for next := time.Now(); ctx.Err() == nil; {
		w.poll(next)
		now := time.Now()
		if now.After(unknown) {
			w.reportUnknown(ctx)
			took := time.Since(now)
			now = now.Add(took)
			unknown = now.Add(pace.rest(5*time.Second, took))
		}
		if next = w.schedule.Next(now); next.IsZero() {
			next = now.Add(time.Minute) // a spec that never matches
		}
		retry.Pause(ctx, next.Sub(now))
	}
}

// listen keeps a LISTEN connection open until ctx ends.
func (w *Worker) listen(ctx context.Context) {
	for failures := 0; ctx.Err() == nil; {
		err := w.cfg.Store.Listen(ctx, func(s tasks.Signal, word string) {
			w.wakeups.hears.Store(s != tasks.SignalDeaf)
			if s == tasks.SignalListening && failures > 0 {
				w.cfg.Log.Info("listen_recovered")
				failures = 0
			}
			if s != tasks.SignalDue {
				notify(w.look)
			}
			switch s {
			case tasks.SignalListening:
				w.claimSoon()
			case tasks.SignalDue:
				w.heard(word)
			}
		})
		w.wakeups.hears.Store(false)
		if ctx.Err() != nil {
			return
		}
		if failures++; failures == 1 {
			w.cfg.Log.Warn("listen_failed", zap.Error(err))
		}
		retry.Pause(ctx, time.Second)
	}
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
