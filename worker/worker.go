// Package worker is the plot of onejob: claim a task, lock it, run it, write
// down how it ended, let go. See attempt.go for one task's whole life.
//
// It promises that a handler runs only under a valid lease, that its context
// ends when the lease does, and that an outcome is durable before the lock is
// released. It believes the store about what is due and whose fence counts, and
// the locker about who lives and what is locked. It cannot stop a Go handler
// that ignores its context; such a handler keeps its slot, and after the lease
// has run out only the fence protects from it.
package worker

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"time"

	"github.com/robfig/cron/v3"
	"go.uber.org/zap"

	"onejob/lock"
	"onejob/tasks"
)

// Store is what a worker asks of the database.
type Store interface {
	Claim(context.Context, tasks.Claim) ([]*tasks.Task, error)
	Unclaim(ctx context.Context, t *tasks.Task, delay time.Duration) error
	Complete(context.Context, tasks.Ending) error
	Sessions(ctx context.Context, mine string) ([]string, error)
	TakeOver(ctx context.Context, dead []string, maxCrashes int) ([]tasks.Orphan, error)
	UnknownKinds(ctx context.Context, known []string) ([]string, error)
	CancelRequests(ctx context.Context, session string) ([]int64, error)
	Held(ctx context.Context, session string) ([]*tasks.Task, error)
	DueLimits(context.Context, tasks.Claim) ([]string, error)
	DueKinds(context.Context, tasks.Claim) ([]string, error)
	Listen(ctx context.Context, wake func(tasks.Signal)) error
	LeaderStore
}

// Worker is one replica. Fill in the fields and call Run, once. The first three
// are required; the zero value of the others means their default.
type Worker struct {
	Store Store
	Locks lock.Locker
	Kinds tasks.Kinds

	Replica       string        // our name in rows and logs
	Concurrency   int           // how many tasks run at once; default 32
	Queues        []string      // which queues to serve; default all
	Poll          string        // a cron spec for looking at the table; default @every 1s
	PollOnly      bool          // do not LISTEN
	Timeout       time.Duration // of attempts whose row has none; default none
	MaxCrashes    int           // replicas that a task may take down; default 3
	RetryBase     time.Duration // wait before the second attempt; it doubles from then on; default 1 s
	RetryMax      time.Duration // but never more than this; default 1 h
	LockDelay     time.Duration // how long to leave a key alone whose holder died; default 3 s
	ShutdownGrace time.Duration // how long running work may go on after ctx ended; default 30 s
	Log           *zap.Logger   // default: none

	// Limits serves rows with a limit; if it is nil they wait. A limit that is
	// not there is made with its LimitSlots; if it has none, its rows wait. Rows
	// that name no limit have that of their kind in KindLimits, if there is one.
	Limits     lock.Semaphores
	LimitSlots map[string]int
	KindLimits map[string]string

	// What the leader deletes: tasks that finished so long ago. Default 7 days
	// for succeeded ones, 30 for failed and cancelled ones. A row's keep_for
	// goes before.
	KeepSucceeded  time.Duration
	KeepFailed     time.Duration
	RetentionEvery time.Duration // how often it looks; default 1 min

	schedule cron.Schedule
	wake     chan struct{} // somebody should look for due tasks
	look     chan struct{} // somebody should look for cancel requests
	hurry    chan struct{} // closed by Hurry
	hurried  sync.Once
	giveUp   context.Context // ends when a shutdown will not wait any longer
	running  running
	limits   limits
}

// ParsePoll returns when to look at the table, by a cron spec whose seconds may
// be left out, or a descriptor such as @every 5s.
func ParsePoll(spec string) (cron.Schedule, error) {
	return cron.NewParser(cron.SecondOptional | cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow | cron.Descriptor).Parse(spec)
}

// Init fills in the defaults and returns what is wrong with the fields. Run
// calls it; call it before if Hurry may be called before Run.
func (w *Worker) Init() error {
	if w.wake != nil {
		return nil
	}
	if w.Store == nil || w.Locks == nil || len(w.Kinds) == 0 {
		return errors.New("worker: Store, Locks and at least one of Kinds are required")
	}
	setDefault(&w.Concurrency, 32)
	setDefault(&w.Poll, "@every 1s")
	setDefault(&w.MaxCrashes, 3)
	setDefault(&w.RetryBase, time.Second)
	setDefault(&w.RetryMax, time.Hour)
	setDefault(&w.LockDelay, 3*time.Second)
	setDefault(&w.ShutdownGrace, 30*time.Second)
	setDefault(&w.KeepSucceeded, 7*24*time.Hour)
	setDefault(&w.KeepFailed, 30*24*time.Hour)
	setDefault(&w.RetentionEvery, time.Minute)
	setDefault(&w.Log, zap.NewNop())
	var err error
	if w.schedule, err = ParsePoll(w.Poll); err != nil {
		return fmt.Errorf("worker: poll %q: %w", w.Poll, err)
	}
	if w.Concurrency < 0 || w.MaxCrashes < 0 || w.Timeout < 0 || w.RetryBase < 0 || w.ShutdownGrace < 0 {
		return errors.New("worker: a number or duration is below zero")
	}
	w.wake, w.look, w.hurry = make(chan struct{}, 1), make(chan struct{}, 1), make(chan struct{})
	w.running.fences = map[int64]bool{}
	w.limits.serving, w.limits.told = map[string]bool{}, map[string]string{}
	w.running.tasks = map[int64]context.CancelCauseFunc{}
	return nil
}

func setDefault[T comparable](p *T, v T) {
	if *p == *new(T) {
		*p = v
	}
}

// Run works on tasks until ctx ends. It then takes no more, lets what runs go
// on for the grace, cancels the rest, gives back what was cancelled, and lets
// go of the locks. It returns nil if all of that went well.
func (w *Worker) Run(ctx context.Context) error {
	if err := w.Init(); err != nil {
		return err
	}
	// Three lives, each of which outlasts the one before: taking tasks in,
	// working on them, holding locks.
	intake, stopIntake := context.WithCancelCause(ctx)
	work, stopWork := context.WithCancel(context.WithoutCancel(ctx))
	locks, stopLocks := context.WithCancel(context.WithoutCancel(ctx))
	giveUp, setGiveUp := context.WithCancel(context.WithoutCancel(ctx))
	w.giveUp = giveUp
	defer setGiveUp()

	var lockErr error
	var holding, helping sync.WaitGroup
	holding.Go(func() {
		if lockErr = w.Locks.Run(locks); lockErr != nil {
			stopIntake(lockErr)
		}
	})
	helping.Go(func() { w.tick(intake) })
	helping.Go(func() { w.heed(intake) })
	helping.Go(func() { w.lead(intake) })
	helping.Go(func() { w.watchCancels(work) })
	if !w.PollOnly {
		helping.Go(func() { w.listen(work) })
	}

	w.claim(intake)

	err := w.drain(setGiveUp)
	w.limits.wg.Wait()
	stopWork()
	stopIntake(nil)
	helping.Wait()
	stopLocks()
	holding.Wait()
	return errors.Join(lockErr, err)
}

// Hurry ends the grace of a shutdown: what still runs is cancelled now.
func (w *Worker) Hurry() { w.hurried.Do(func() { close(w.hurry) }) }

// maxClaim is how many tasks are claimed at once. More make a task no cheaper.
const maxClaim = 512

// claim takes tasks in, as many as there are free slots, until ctx ends.
func (w *Worker) claim(ctx context.Context) {
	failing := false
	roomier := func() { notify(w.wake) } // there is room for another
	unlimited := w.unlimited()
	var audited time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.wake:
		}
		if time.Since(audited) > 5*time.Second {
			w.audit(ctx)
			audited = time.Now()
		}
		limited := w.limits.due
		if limited { // first: they take little room, and would never get any after the others
			w.serveLimits(ctx)
		}
		for more := true; more && ctx.Err() == nil; {
			runtime.Gosched() // those who leave together make room for one claim
			session := w.Locks.Session()
			room := w.running.take(maxClaim, w.Concurrency)
			if room == 0 || session == "" {
				w.running.leave(room)
				break // room that is given back, or a session, wakes us
			}
			claimed, err := w.Store.Claim(ctx, tasks.Claim{Session: session, Replica: w.Replica, Kinds: unlimited, Queues: w.Queues, Max: room})
			w.running.leave(room - len(claimed))
			if err != nil {
				if ctx.Err() == nil && !failing {
					w.Log.Warn("claim_failed", zap.Error(err))
				}
				failing = true
				break // the next tick tries again
			}
			if failing {
				w.Log.Info("claim_recovered")
				failing = false
			}
			more = len(claimed) == room
			for _, t := range claimed {
				more = more || sharesLockKey(t) // others of its lock key may hide what else is due
				w.running.start(t.Fence, func() { w.attempt(t) }, roomier)
			}
		}
		if !limited {
			w.serveLimits(ctx)
		}
	}
}

// audit gives back tasks that Postgres says are ours and that we know nothing
// of: the answer to a claim was lost on the way. Without it they would wait for
// the end of our session. It runs between claims, never beside one.
func (w *Worker) audit(ctx context.Context) {
	session := w.Locks.Session()
	if session == "" {
		return
	}
	held, err := w.Store.Held(ctx, session)
	if err != nil {
		return // claim_failed tells of a database that is away
	}
	for _, t := range held {
		if !w.running.has(t.Fence) {
			w.Log.Warn("claim_unheard", fields(t)...)
			w.running.take(1, math.MaxInt)
			w.running.start(t.Fence, func() { w.giveBack(t, errUnheard) }, w.poke)
		}
	}
}

// tick looks for due tasks at every poll.
func (w *Worker) tick(ctx context.Context) {
	unknown := map[string]bool{}
	for n := 0; ctx.Err() == nil; n++ {
		w.poke()
		if n%5 == 0 {
			w.reportUnknown(ctx, unknown)
		}
		now := time.Now()
		next := w.schedule.Next(now)
		if next.IsZero() {
			next = now.Add(time.Minute) // a spec that never comes true
		}
		sleep(ctx, next.Sub(now))
	}
}

// heed looks for orphans when sessions come and go: that is when there may be
// any. After a look that failed, or found some, it soon looks again, and
// otherwise now and then, because each look reads all that is running.
func (w *Worker) heed(ctx context.Context) {
	for {
		changed := w.Locks.Changed()
		w.poke()
		again := time.Second
		if w.takeOver(ctx) {
			again = 10 * time.Second
		}
		select {
		case <-changed:
		case <-time.After(again):
		case <-ctx.Done():
			return
		}
	}
}

// takeOver takes tasks from replicas that died. It reports whether it could look
// at all, and found none.
func (w *Worker) takeOver(ctx context.Context) (none bool) {
	mine := w.Locks.Session()
	if mine == "" {
		return false
	}
	sessions, err := w.Store.Sessions(ctx, mine)
	if err != nil {
		return false // claim_failed tells of a database that is away
	}
	dead, err := w.Locks.Dead(ctx, sessions)
	if err != nil && ctx.Err() == nil {
		w.Log.Debug("sessions_unclear", zap.Error(err))
	}
	if len(dead) == 0 {
		return err == nil
	}
	orphans, err := w.Store.TakeOver(ctx, dead, w.MaxCrashes)
	if err != nil {
		if ctx.Err() == nil {
			w.Log.Warn("take_over_failed", zap.Error(err))
		}
		return false
	}
	for _, o := range orphans {
		fields := []zap.Field{zap.Int64("task_id", o.ID), zap.String("kind", o.Kind), zap.Int("attempt", o.Attempt), zap.String("lock_key", o.LockKey),
			zap.Int64("fence", o.Fence), zap.String("from", o.Replica), zap.Int("crashes", o.Crashes), zap.Duration("since_start", o.Since)}
		switch {
		case o.Next == tasks.StatusFailed && o.Crashes >= w.MaxCrashes:
			w.Log.Error("task_quarantined", fields...)
		case o.Next == tasks.StatusFailed:
			w.Log.Error("task_crashed_for_good", fields...)
		default:
			w.Log.Warn("task_taken_over", fields...)
		}
	}
	w.poke()
	return false
}

// reportUnknown tells, once for each, of kinds that wait for a replica that
// knows them.
func (w *Worker) reportUnknown(ctx context.Context, told map[string]bool) {
	kinds, err := w.Store.UnknownKinds(ctx, w.Kinds.Names())
	if err != nil {
		return // claim_failed tells of a database that is away
	}
	for _, k := range kinds {
		if !told[k] {
			told[k] = true
			w.Log.Warn("kind_unknown", zap.String("kind", k), zap.Strings("known", w.Kinds.Names()))
		}
	}
}

// listen keeps a listener going until ctx ends.
func (w *Worker) listen(ctx context.Context) {
	for failures := 0; ctx.Err() == nil; {
		err := w.Store.Listen(ctx, func(s tasks.Signal) {
			if s == tasks.SignalListening && failures > 0 {
				w.Log.Info("listen_recovered")
				failures = 0
			}
			if s != tasks.SignalDue {
				notify(w.look)
			}
			if s != tasks.SignalCancel {
				w.poke()
			}
		})
		if ctx.Err() != nil {
			return
		}
		if failures++; failures == 1 {
			w.Log.Warn("listen_failed", zap.Error(err))
		}
		sleep(ctx, time.Second)
	}
}

// watchCancels cancels running tasks on request, until ctx ends.
func (w *Worker) watchCancels(ctx context.Context) {
	for ctx.Err() == nil {
		select {
		case <-w.look:
		case <-time.After(time.Second):
		case <-ctx.Done():
			return
		}
		session := w.Locks.Session()
		if session == "" || w.running.count() == 0 {
			continue
		}
		ids, err := w.Store.CancelRequests(ctx, session)
		if err != nil {
			continue // claim_failed tells of a database that is away
		}
		for _, id := range ids {
			w.running.cancel(id, tasks.ErrCancelled)
		}
	}
}

// drain waits for running work: for the grace as it is, then cancelled, then
// no longer.
func (w *Worker) drain(giveUp context.CancelFunc) error {
	const patience = 10 * time.Second
	done := w.running.done()
	if n := w.running.count(); n > 0 {
		w.Log.Info("draining", zap.Int("running", n), zap.Duration("grace", w.ShutdownGrace))
	}
	grace := time.NewTimer(w.ShutdownGrace)
	defer grace.Stop()
	select {
	case <-done:
		return nil
	case <-grace.C:
	case <-w.hurry:
	}
	w.running.cancelAll(tasks.ErrShutdown)
	last := time.NewTimer(patience)
	defer last.Stop()
	select {
	case <-done:
		return nil
	case <-last.C:
	}
	giveUp()
	select {
	case <-done:
	case <-time.After(time.Second):
	}
	if n := w.running.count(); n > 0 {
		w.Log.Error("drain_incomplete", zap.Int("running", n))
		return fmt.Errorf("%d tasks were still running %v after they were cancelled; others take them over", n, patience)
	}
	return nil
}

// poke makes claim look for due tasks, those with a limit too.
func (w *Worker) poke() {
	w.limits.news.Store(true)
	notify(w.wake)
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
