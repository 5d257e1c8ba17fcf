package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"time"

	"go.uber.org/zap"

	"onejob/boottime"
	"onejob/internal/mutant"
	"onejob/lock"
	"onejob/tasks"
)

// attempt is the life of a claimed task: lock it, run it, write down how it
// ended, let go, in this order.
func (w *Worker) attempt(t *tasks.Task) {
	w.attemptUnder(t, nil)
}

// attemptUnder is attempt under a slot of a limit as well, if slot is not nil.
func (w *Worker) attemptUnder(t *tasks.Task, slot lock.Lease) {
	if n := t.Crashes + t.Stalls; n > 0 && n >= w.MaxCrashes-1 {
		if !w.suspects.enter(t.Fence, n >= w.MaxCrashes) {
			w.requeue(t, errSuspect)
			return
		}
		defer w.suspects.leave(t.Fence)
	}
	lease, err := w.acquire(t)
	if w.lockGate.seen(err) {
		w.Log.Info("lock_recovered")
		w.claimSoon()
	}
	if err != nil {
		w.requeue(t, err)
		return
	}
	if slot != nil {
		lease = newUnderSlot(lease, slot)
	}
	if t.Crashes+t.Stalls > 0 || w.MaxCrashes == 1 { // what the next crash counts for depends on it
		if err = w.Store.Begin(lease.Context(), t); err != nil {
			err = errNotNoted{err}
		}
	}
	if err == nil {
		w.run(lease, t)
	} else {
		w.requeue(t, err)
	}
	if err := lease.Release(context.Background()); err != nil && lease.Context().Err() == nil {
		w.Log.Warn("release_failed", fields(t, zap.Error(err))...)
	}
}

// acquire locks the task. A holder that is just finishing has completed its row
// and not yet deleted its key; it is given a moment.
func (w *Worker) acquire(t *tasks.Task) (lock.Lease, error) {
	request := lock.Request{Session: t.Session, Key: t.LockKey}
	if t.LockShared {
		value, err := json.Marshal(struct {
			Replica string    `json:"replica"`
			TaskID  int64     `json:"task_id"`
			Kind    string    `json:"kind"`
			Fence   int64     `json:"fence"`
			Started time.Time `json:"started"`
		}{w.Replica, t.ID, t.Kind, t.Fence, time.Now().UTC()})
		if err != nil {
			return nil, err
		}
		request.Value = value
	} else { // most locks: what they say is what Consul has to carry
		request.Task, request.Value = t.ID, fmt.Appendf(nil, `{"task_id":%d,"fence":%d}`, t.ID, t.Fence)
	}
	for wait := 5 * time.Millisecond; ; wait *= 2 {
		var err error
		if request.Database, err = w.database.cover(w.giveUp, t); err != nil {
			return nil, err
		}
		lease, err := w.Locks.Acquire(context.Background(), request)
		switch {
		case wait > 320*time.Millisecond:
			return lease, err
		case errors.Is(err, lock.ErrChanged):
			w.database.lookPast(w.giveUp, request.Database)
		case errors.Is(err, lock.ErrHeld):
			time.Sleep(wait)
		default:
			return lease, err
		}
	}
}

// errReplyLost is why a task is requeued whose claim was never answered.
var errReplyLost = errors.New("the answer to the claim was lost")

// errFenceBack is why a task is requeued whose fence is not above those before it.
var errFenceBack = errors.New("fences have gone back")

// errNotNoted is why a task is requeued whose beginning could not be noted.
type errNotNoted struct{ error }

func (e errNotNoted) Unwrap() error { return e.error }

// errSuspect is why a task is requeued that the next crash would quarantine, while
// another one like it runs here.
var errSuspect = errors.New("another task that may have ended replicas runs here")

// A task whose lock somebody else holds is tried again after a second, then after two
// and so on up to maxHeldDelay, and reported when it has come to toldHeldDelay.
const (
	toldHeldDelay = 4 * time.Second
	maxHeldDelay  = 8 * time.Second
)

// requeue returns a task whose attempt does not begin. It uses up no attempt and
// leaves no row in the history.
func (w *Worker) requeue(t *tasks.Task, why error) {
	delay := time.Second
	switch {
	case errors.Is(why, lock.ErrHeld):
		// Somebody outside has it, perhaps for hours: onejob lock, for instance.
		delay = min(w.requeues.next(t.ID), maxHeldDelay)
		w.Log.Debug("lock_held", fields(t, zap.Error(why))...)
		if delay == toldHeldDelay {
			w.Log.Info("lock_held_for_long", fields(t, zap.Error(why))...)
		}
	case errors.Is(why, lock.ErrDelayed):
		w.Log.Debug("lock_delayed", fields(t, zap.Error(why))...)
		delay = w.LockDelay
	case errors.Is(why, tasks.ErrOtherServer), errors.Is(why, lock.ErrChanged), errors.Is(why, errFenceBack):
		w.Log.Debug("database_changed", fields(t, zap.Error(why))...)
	case errors.Is(why, errReplyLost), errors.Is(why, tasks.ErrShutdown), errors.Is(why, tasks.ErrRefused):
		delay = 0
	case errors.Is(why, errSuspect):
		w.Log.Debug("suspect_waits", fields(t)...)
		delay = min(w.requeues.next(t.ID), maxHeldDelay)
	case errors.Is(why, tasks.ErrUnknown):
		w.reportUnknownName(t, why)
		delay = w.requeues.next(t.ID)
	case errors.As(why, new(errNotNoted)):
		w.Log.Warn("begin_failed", fields(t, zap.Error(why))...)
	case errors.Is(why, lock.ErrLost):
		w.Log.Debug("lock_without_session", fields(t, zap.Error(why))...)
		delay = 0
	default:
		if w.lockGate.close() {
			w.Log.Warn("lock_failed", fields(t, zap.Error(why))...)
		} else {
			w.Log.Debug("lock_failed_again", fields(t, zap.Error(why))...)
		}
	}
	for tries := 1; ; tries++ {
		err := w.Store.Requeue(w.writing, t, jitter(delay))
		if err == nil {
			return
		}
		if tries == 1 {
			w.Log.Warn("requeue_delayed", fields(t, zap.Error(err))...)
		}
		// It must not be forgotten: while the session lives nobody else may take the
		// row, and who takes it later would have to call it a crash.
		if w.giveUp.Err() != nil {
			return
		}
		sleep(w.giveUp, retryPause(tries))
	}
}

// run runs the handler under the lease and makes durable how that ended.
func (w *Worker) run(lease lock.Lease, t *tasks.Task) {
	ctx, cancel := context.WithCancelCause(lease.Context())
	defer cancel(nil)
	defer w.running.enter(t.ID, t.Fence, cancel)()
	timeout := t.Timeout
	if timeout == 0 {
		timeout = w.Timeout
	}
	if timeout > 0 && !mutant.Timeouts {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeoutCause(ctx, timeout, tasks.ErrTimeout)
		defer stop()
	}

	a := &tasks.Attempt{Task: *t, Deadline: lease.Deadline, Output: tasks.NewOutput(0)}
	a.Timeout = timeout
	began := boottime.Now()
	result, err := w.handle(ctx, lease, a)
	if a.Stopped == 0 {
		a.Stopped = boottime.Now()
	}
	took := a.Stopped.Sub(began)

	var notBegun errNotBegun
	if errors.As(err, &notBegun) {
		w.requeue(t, notBegun)
		return
	}
	completion := w.judge(t, result, err, context.Cause(ctx))
	completion.Output = a.Output.String()
	if completion.Begun = began; !t.StartedAt.IsZero() {
		completion.StoppedAt = t.StartedAt.Add(a.Stopped.Sub(t.HeardAt))
	}
	switch {
	case errors.Is(err, tasks.ErrRefused):
		w.Log.Warn("completion_refused", fields(t, zap.String("outcome", string(tasks.Succeeded)))...)
	case result.Committed:
		w.logOutcome(t, completion, took)
	default:
		w.complete(t, completion, took)
	}
}

// handle calls the kind. The lease is looked at last: a goroutine may have
// waited for its turn.
func (w *Worker) handle(ctx context.Context, lease lock.Lease, a *tasks.Attempt) (result tasks.Result, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
			fmt.Fprintf(a.Output, "panic: %v\n%s", p, debug.Stack())
		}
	}()
	kind := w.serving.Load().kinds[a.Kind]
	if kind == nil { // it was reloaded away
		return tasks.Result{}, errNotBegun{fmt.Errorf("%w: kind %q", tasks.ErrUnknown, a.Kind)}
	}
	if err := kind.Check(a.Payload); errors.Is(err, tasks.ErrUnknown) {
		return tasks.Result{}, errNotBegun{err}
	} else if err != nil {
		return tasks.Result{}, tasks.Permanent(err)
	}
	if lease.Deadline().Passed() {
		return tasks.Result{}, lock.ErrLost
	}
	if ctx.Err() != nil {
		return tasks.Result{}, context.Cause(ctx)
	}
	if w.Log.Level() <= zap.DebugLevel {
		w.Log.Debug("task_started", fields(&a.Task)...)
	}
	return kind.Run(ctx, a)
}

// judge turns what the handler returned, and what ended its context, into an
// completion. A handler that succeeded has succeeded, whatever came meanwhile.
func (w *Worker) judge(t *tasks.Task, result tasks.Result, err, cause error) tasks.Completion {
	e := tasks.Completion{ID: t.ID, Fence: t.Fence, Session: t.Session, Outcome: tasks.Succeeded, Next: tasks.StatusSucceeded, Result: result.Value}
	if err == nil {
		return e
	}
	e.Result, e.Error = nil, err.Error()
	var exit *tasks.ExitError
	if errors.As(err, &exit) {
		e.ExitCode = &exit.Code
	}
	delay, requeue := tasks.RequeueDelay(err)
	again := func(o tasks.Outcome) {
		e.Outcome, e.Next = o, tasks.StatusFailed
		if t.Attempt < t.MaxAttempts && !tasks.IsPermanent(err) && !mutant.Retries {
			e.Next, e.Delay = tasks.StatusPending, w.retryDelay(t.Attempt)
			if d, ok := tasks.RetryDelay(err); ok {
				e.Delay = max(e.Delay, d)
			}
		}
	}
	is := func(target error) bool { return errors.Is(cause, target) || errors.Is(err, target) }
	switch {
	case is(lock.ErrLost), is(lock.ErrRevoked), is(tasks.ErrLeaseEnded):
		e.Outcome, e.Next, e.Requeue, e.Delay = tasks.LeaseLost, tasks.StatusPending, true, w.LockDelay
		if e.Stalled = w.stalls.lately() && !mutant.Stalls; e.Stalled && t.Crashes+t.Stalls+1 >= w.MaxCrashes && (w.MaxCrashes == 1 || w.suspects.only(t.Fence)) {
			e.Next, e.Requeue = tasks.StatusFailed, false
			e.Error = fmt.Sprintf("quarantined: %d replicas died or stalled while they worked on it, the last was %s; see what it does to them, then onejob tasks retry %d", t.Crashes+t.Stalls+1, w.Replica, t.ID)
		}
		if mutant.Lost {
			e.Next, e.Requeue = tasks.StatusFailed, false
		}
	case is(tasks.ErrCancelled):
		e.Outcome, e.Next = tasks.Cancelled, tasks.StatusCancelled
	case is(tasks.ErrShutdown):
		e.Outcome, e.Next, e.Requeue = tasks.Shutdown, tasks.StatusPending, true
	case is(tasks.ErrTimeout):
		again(tasks.TimedOut)
	case requeue && !tasks.IsPermanent(err):
		e.Outcome, e.Next, e.Requeue, e.Delay = tasks.Failed, tasks.StatusPending, true, delay
		if delay <= 0 {
			e.Delay = jitter(w.requeues.next(t.ID))
		}
	default:
		again(tasks.Failed)
	}
	return e
}

// complete makes the completion durable. While Postgres is unavailable it tries again, as
// long as the process lives. When the lease has ended others may take the task; the
// fence then refuses what comes too late.
func (w *Worker) complete(t *tasks.Task, e tasks.Completion, took time.Duration) {
	for tries := 1; ; tries++ {
		last := w.giveUp.Err() != nil
		err := w.Store.Complete(w.writing, e)
		var unstorable *tasks.ResultError
		switch {
		case err == nil:
			w.logOutcome(t, e, took)
			return
		case errors.As(err, &unstorable):
			w.logOutcome(t, unstorable.Written, took)
			return
		case errors.Is(err, tasks.ErrRefused):
			w.Log.Warn("completion_refused", fields(t, zap.String("outcome", string(e.Outcome)))...)
			return
		case last, errors.Is(err, tasks.ErrUnwritable):
			w.Log.Error("completion_abandoned", fields(t, zap.String("outcome", string(e.Outcome)), zap.Error(err))...)
			return
		case tries == 1:
			w.Log.Warn("completion_delayed", fields(t, zap.String("outcome", string(e.Outcome)), zap.Error(err))...)
		}
		sleep(w.giveUp, retryPause(tries))
	}
}

// errGivenUp is what a stopping replica makes of a store that does not answer in time.
var errGivenUp = errors.New("the replica stops, and Postgres has not answered")

// lastTry is for how long a store may still answer when the drain has given up.
const lastTry = 1500 * time.Millisecond

// logOutcome logs how an attempt ended.
func (w *Worker) logOutcome(t *tasks.Task, e tasks.Completion, took time.Duration) {
	f := fields(t, zap.String("outcome", string(e.Outcome)), zap.Duration("took", took))
	if e.Outcome == tasks.Succeeded {
		w.Log.Info("task_succeeded", f...)
		return
	}
	f = append(f, zap.String("error", e.Error))
	switch {
	case e.Outcome == tasks.LeaseLost && e.Next == tasks.StatusFailed:
		w.Log.Error("task_failed_after_stalls", append(f, zap.Int("crashes", t.Crashes), zap.Int("stalls", t.Stalls+1))...)
	case e.Outcome == tasks.LeaseLost:
		w.Log.Warn("task_lease_lost", f...)
	case e.Outcome == tasks.Shutdown:
		w.Log.Info("task_requeued_at_shutdown", f...)
	case e.Outcome == tasks.Cancelled:
		w.Log.Info("task_cancelled", f...)
	case e.Next == tasks.StatusPending && e.Requeue:
		w.Log.Warn("task_requeued", append(f, zap.Duration("in", e.Delay))...)
	case e.Next == tasks.StatusPending:
		w.Log.Warn("task_retry_scheduled", append(f, zap.Duration("in", e.Delay))...)
	default:
		w.Log.Error("task_failed", f...)
	}
}

// retryDelay doubles with every attempt, up to the maximum, and is shortened by
// up to a fifth, so that tasks that failed together do not return together.
func (w *Worker) retryDelay(attempt int) time.Duration {
	d := w.RetryMax
	if mutant.Doubling {
		attempt = 1
	}
	if shift := attempt - 1; shift < 40 && w.RetryBase<<shift > 0 {
		d = min(d, w.RetryBase<<shift)
	}
	return jitter(d)
}

// jitter shortens d by up to a fifth.
func jitter(d time.Duration) time.Duration {
	if d <= 0 {
		return 0
	}
	return d - rand.N(d/5+1)
}

// retryPause is how long to wait before asking a store again that was away.
func retryPause(tries int) time.Duration {
	return jitter(min(2*time.Second, 100*time.Millisecond<<min(tries-1, 5)))
}

// fields are what every line about a task carries, and more.
func fields(t *tasks.Task, more ...zap.Field) []zap.Field {
	f := make([]zap.Field, 0, 8)
	f = append(f, zap.Int64("task_id", t.ID), zap.Int("attempt", t.Attempt), zap.String("kind", t.Kind),
		zap.String("lock_key", t.LockKey), zap.Int64("fence", t.Fence))
	return append(f, more...)
}
