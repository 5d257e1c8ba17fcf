package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime/debug"
	"strings"
	"time"

	"go.uber.org/zap"

	"onejob/boottime"
	"onejob/internal/retry"
	"onejob/lock"
	"onejob/tasks"
)

// attemptStore is what attempts need of the database.
type attemptStore interface {
	Begin(context.Context, *tasks.Task) error
	Requeue(ctx context.Context, t *tasks.Task, delay time.Duration) error
	Complete(context.Context, tasks.Completion) error
}

// attempt is the life of a claimed task: lock it, run it, record the outcome,
// release the lock, in this order.
//
// early is where the answer comes if its lock was asked for while it was claimed; it is
// nil if not. Such a task is no suspect.
//
// It reports whether something may wait for the attempt's end: another task for its lock key,
// or this one for another attempt.
func (w *Worker) attempt(t *tasks.Task, early <-chan locked) (awaited bool) {
	growStack(0)
	return !w.attemptUnder(t, nil, early) || t.LockShared
}

// growStack makes the stack of a new goroutine as large as an attempt will need. That costs
// little while nothing is on the stack. In the middle of each attempt, where the runtime would
// do it, it took a tenth of a busy replica's processor time: all frames are moved.
//
//go:noinline
func growStack(i int) byte {
	var room [4 << 10]byte
	return room[i]
}

// attemptUnder is attempt, under a slot of a limit as well if slot is not nil. It reports
// whether the task is done.
func (w *Worker) attemptUnder(t *tasks.Task, slot lock.Lease, early <-chan locked) (done bool) {
	trace := w.trace(t)
	var ended tasks.Completion
	defer func() { trace.Ended(ended.Outcome, ended.Error) }()
	if n := t.Crashes + t.Stalls; n > 0 && n >= w.cfg.MaxCrashes-1 {
		if !w.suspects.enter(t.ID, t.Fence, n >= w.cfg.MaxCrashes) {
			w.requeue(t, errSuspect)
			return false
		}
		defer func() { w.suspects.leave(t.ID, t.Fence, ended.Outcome == tasks.LeaseLost) }()
	}
	lease, err := w.acquire(t, early)
	w.sawLock(err)
	trace.Locked(err)
	if err != nil {
		w.requeue(t, err)
		return false
	}
	w.running.under(t.Fence, lease)
	if slot != nil {
		lease = newUnderSlot(lease, slot)
	}
	if t.Crashes+t.Stalls > 0 || w.cfg.MaxCrashes == 1 { // the next crash is charged only to tasks that had begun
		if err = w.cfg.Store.Begin(lease.Context(), t); err != nil {
			err = errNotNoted{err}
		}
	}
	defer func() {
		if ended.Next != "" && ended.Next != tasks.StatusPending && !t.LockShared && slot == nil {
			w.releases.wait()
		}
		held := lease.Context().Err() == nil
		if err := lease.Release(context.Background()); err != nil && held && !errors.Is(err, lock.ErrRevoked) && !errors.Is(err, lock.ErrLost) {
			w.cfg.Log.Warn("release_failed", fields(t, zap.Error(err))...)
		}
	}()
	if err != nil {
		w.requeue(t, err)
		return false
	}
	w.run(lease, t, trace, &ended)
	return ended.Next != "" && ended.Next != tasks.StatusPending
}

// acquire locks the task. A previous holder may have completed its row and not yet
// released its lock, so a held lock is requested again a few times. The first answer may
// be on its way already.
func (w *Worker) acquire(t *tasks.Task, early <-chan locked) (lock.Lease, error) {
	request := ownLock(t)
	if t.LockShared {
		value, err := json.Marshal(struct {
			Replica string    `json:"replica"`
			TaskID  int64     `json:"task_id"`
			Kind    string    `json:"kind"`
			Fence   int64     `json:"fence"`
			Started time.Time `json:"started"`
		}{w.cfg.Replica, t.ID, t.Kind, t.Fence, time.Now().UTC()})
		if err != nil {
			return nil, err
		}
		request.Task, request.Value = 0, value
	}
	for wait := 5 * time.Millisecond; ; wait *= 2 {
		var l locked
		if early != nil {
			l, early = w.sinceClaimed(t, <-early), nil
		} else {
			l = w.askLock(t, request)
		}
		switch {
		case wait > 320*time.Millisecond:
			return l.lease, l.err
		case errors.Is(l.err, lock.ErrChanged):
			w.database.lookPast(w.shutdown.giveUp, l.request.Database)
		case errors.Is(l.err, lock.ErrHeld):
			w.measure(Measurement{What: MeasureConflict, Kind: t.Kind})
			time.Sleep(wait)
		default:
			return l.lease, l.err
		}
	}
}

// errReplyLost requeues a task whose claim was never answered.
var errReplyLost = errors.New("the answer to the claim was lost")

// errFenceBack requeues a task whose fence is not above earlier ones.
var errFenceBack = errors.New("fences have gone back")

// errNotNoted requeues a task whose begin could not be recorded.
type errNotNoted struct{ error }

func (e errNotNoted) Unwrap() error { return e.error }

// errSuspect requeues a task that the next crash would quarantine while another such
// task runs here.
var errSuspect = errors.New("another task that may have ended replicas runs here")

// A task whose lock is held elsewhere is retried after one second, then two, and so on
// up to maxHeldDelay. It is logged when the delay reaches toldHeldDelay.
const (
	toldHeldDelay = 4 * time.Second
	maxHeldDelay  = 8 * time.Second
)

// sawLock takes in Consul's answer to an attempt to lock.
func (w *Worker) sawLock(err error) {
	if w.lockGate.seen(err) {
		w.cfg.Log.Info("lock_recovered")
		w.claimSoon()
	}
}

// othersHadLocks reports whether a lock that is no task's can be had, for then what keeps a task from
// its own is about that one: a token may lack the right to a single key, for example. That it can be
// had opens the gate.
func (w *Worker) othersHadLocks() bool {
	return w.lockGate.probe(func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), probePatience)
		defer cancel()
		session := w.cfg.Locks.Session()
		lease, err := w.cfg.Locks.Acquire(ctx, lock.Request{Session: session, Key: "probe of " + session, Value: []byte(`{"probe":true}`)})
		if err == nil {
			_ = lease.Release(ctx)
		}
		w.sawLock(err)
		return answered(err)
	})
}

// requeue makes a task whose attempt does not begin pending again. It uses up no attempt
// and leaves no row in onejob.attempts.
func (w *Worker) requeue(t *tasks.Task, why error) {
	delay, cause := time.Second, "lock_failed"
	switch {
	case errors.Is(why, lock.ErrHeld):
		cause = "lock_held"
		// A program such as onejob lock may hold it for hours.
		delay = min(w.requeues.next(t.ID), maxHeldDelay)
		w.cfg.Log.Debug("lock_held", fields(t, zap.Error(why))...)
		if delay == toldHeldDelay {
			w.cfg.Log.Info("lock_held_for_long", fields(t, zap.Error(why))...)
		}
	case errors.Is(why, lock.ErrDelayed):
		cause = "lock_delayed"
		w.cfg.Log.Debug("lock_delayed", fields(t, zap.Error(why))...)
		delay = w.cfg.LockDelay
	case errors.Is(why, tasks.ErrOtherServer), errors.Is(why, lock.ErrChanged), errors.Is(why, errFenceBack):
		cause = "database_changed"
		w.cfg.Log.Debug("database_changed", fields(t, zap.Error(why))...)
	case errors.Is(why, errReplyLost):
		delay, cause = 0, "claim_reply_lost"
	case errors.Is(why, tasks.ErrShutdown):
		delay, cause = 0, "shutdown"
	case errors.Is(why, tasks.ErrRefused):
		delay, cause = 0, "refused"
	case errors.Is(why, errSuspect):
		cause = "suspect"
		w.cfg.Log.Debug("suspect_waits", fields(t)...)
		delay = min(w.requeues.next(t.ID), maxHeldDelay)
	case errors.Is(why, tasks.ErrUnknown):
		cause = "name_unknown"
		w.reportUnknownName(t, why)
		delay = w.requeues.next(t.ID)
	case errors.As(why, new(errNotNoted)):
		cause = "begin_failed"
		w.cfg.Log.Warn("begin_failed", fields(t, zap.Error(why))...)
	case errors.Is(why, lock.ErrLost):
		w.cfg.Log.Debug("lock_without_session", fields(t, zap.Error(why))...)
		delay, cause = 0, "session_lost"
	case errors.As(why, new(notBegun)):
		delay, cause = 0, "kind_full" // it has waited here, and is not claimed again before there is room
		// Or there was room, and Postgres was too slow for its timeout.
		if errors.Is(why, tasks.ErrTimeout) {
			delay = w.requeues.next(t.ID)
		}
		w.cfg.Log.Debug("kind_full", fields(t, zap.Error(why))...)
	default:
		first := false
		if w.othersHadLocks() {
			delay = w.requeues.next(t.ID)
			first = delay == requeueMin
		} else {
			first = w.lockGate.close()
		}
		if first {
			w.cfg.Log.Warn("lock_failed", fields(t, zap.Error(why))...)
		} else {
			w.cfg.Log.Debug("lock_failed_again", fields(t, zap.Error(why))...)
		}
	}
	w.measure(Measurement{What: MeasureRequeue, Kind: t.Kind, Cause: cause})
	for tries := 1; ; tries++ {
		err := w.cfg.Store.Requeue(w.shutdown.writing, t, jitter(delay))
		if err == nil {
			return
		}
		if tries == 1 {
			w.cfg.Log.Warn("requeue_delayed", fields(t, zap.Error(err))...)
		}
		// Keep trying: while the session lives no other replica may take the row, and a
		// later takeover would count a crash.
		if w.shutdown.giveUp.Err() != nil {
			return
		}
		if !errors.Is(why, errFenceBack) { // see giveBack
			w.parkAfter(tries, t)
		}
		retry.Pause(w.shutdown.giveUp, retryPause(tries))
	}
}

// errGoexit is the error of a handler that did not return.
var errGoexit = errors.New("the handler ended its goroutine (runtime.Goexit, as FailNow of the package testing does) and returned nothing")

// run runs the handler under the lease, makes the outcome durable and notes it in ended. It has
// none if the handler did not begin. A handler may end the goroutine: what comes after it is in
// deferred functions, here and in the callers.
func (w *Worker) run(lease lock.Lease, t *tasks.Task, trace Trace, ended *tasks.Completion) {
	ctx, cancel := context.WithCancelCause(lease.Context())
	defer cancel(nil)
	deadline := func() boottime.Instant { return w.shutdown.deadline(lease.Deadline()) }
	a := &tasks.Attempt{Task: *t, Deadline: deadline, Output: tasks.NewOutput(0)}
	defer w.running.enter(t, a, cancel)()
	timeout := t.Timeout
	if timeout <= 0 { // an interval of years and days may be above zero for Postgres alone
		timeout = w.cfg.Timeout
	}
	if timeout > 0 {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeoutCause(ctx, timeout, tasks.ErrTimeout)
		defer stop()
	}

	a.Timeout = timeout
	began := boottime.Now()
	var result tasks.Result
	err := errGoexit
	defer func() {
		of := a
		a = nil // an attempt that is parked holds no payload
		*ended = w.returned(ctx, t, of, result, err, began, trace)
	}()
	result, err = w.handle(ctx, lease, t, a, trace)
}

// returned makes durable what became of an attempt whose handler has returned.
func (w *Worker) returned(ctx context.Context, t *tasks.Task, a *tasks.Attempt, result tasks.Result, err error, began boottime.Instant, trace Trace) (completion tasks.Completion) {
	trace.Ran(err)
	if a.Stopped == 0 {
		a.Stopped = boottime.Now()
	}
	took := a.Stopped.Sub(began)
	if !t.LockShared && w.running.returned(t.Fence) { // or else the task that waits for the key would be claimed before it is free
		w.left(false)
	}

	if errors.As(err, new(notBegun)) {
		w.requeue(t, err)
		return completion
	}
	completion = w.judge(t, result, err, context.Cause(ctx))
	completion.Output = a.Output.String()
	if completion.Begun = began; !t.StartedAt.IsZero() {
		completion.StoppedAt = t.StartedAt.Add(a.Stopped.Sub(t.HeardAt))
	}
	if result.Committed {
		w.logOutcome(t, completion, took)
	} else {
		w.complete(t, completion, took) // whatever a handler says of the fence, the row decides
	}
	return completion
}

// sayRunning is after how long a line of the log says that a handler runs. Most handlers
// have ended by then, and the line that says so is enough.
const sayRunning = time.Second

// handle calls the kind. It checks the lease last, because the goroutine may have
// waited for a processor.
func (w *Worker) handle(ctx context.Context, lease lock.Lease, t *tasks.Task, a *tasks.Attempt, trace Trace) (result tasks.Result, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
			fmt.Fprintf(a.Output, "panic: %v\n%s", p, debug.Stack())
		}
	}()
	kind := w.serving.Load().kinds[a.Kind]
	if kind == nil { // a reload removed it
		return tasks.Result{}, errNotBegun{fmt.Errorf("%w: kind %q", tasks.ErrUnknown, a.Kind)}
	}
	handler, err := kind.Prepare(a.Payload)
	probe(err)
	if errors.Is(err, tasks.ErrUnknown) {
		return tasks.Result{}, errNotBegun{err}
	} else if err != nil {
		return tasks.Result{}, tasks.Permanent(err)
	}
	if lease.Deadline().Passed() {
		return tasks.Result{}, tasks.ErrLeaseEnded
	}
	if ctx.Err() != nil {
		return tasks.Result{}, context.Cause(ctx)
	}
	if w.cfg.Measure != nil {
		w.cfg.Measure(Measurement{What: MeasureStart, Kind: a.Kind, Took: waited(&a.Task) + boottime.Now().Sub(a.HeardAt)})
	}
	ctx = trace.Running(ctx, a)
	if w.cfg.Log.Level() <= zap.DebugLevel {
		w.cfg.Log.Debug("task_started", fields(t)...)
	} else {
		long := time.AfterFunc(sayRunning, func() { w.cfg.Log.Info("task_running", fields(t)...) })
		defer long.Stop()
	}
	result, err = handler(ctx, a)
	probe(err)
	return result, err
}

// probe calls the methods of an error of an application. They may panic, as those of a nil
// pointer do: handle recovers, and nothing after it does.
func probe(err error) {
	if err != nil {
		_ = err.Error()
		_ = errors.Is(err, tasks.ErrRefused) || errors.As(err, new(*tasks.ExitError))
	}
}

// waited returns how long a task was due, and there, before it was claimed: at most half of what a
// Duration can hold, as a row may have been due since the year 1.
func waited(t *tasks.Task) time.Duration {
	due := t.CreatedAt
	if t.RunAt.After(due) {
		due = t.RunAt
	}
	return min(max(0, t.StartedAt.Sub(due)), math.MaxInt64/2)
}

// judge turns the handler's result, and the cause that ended its context, into a
// completion. A handler that returned success has succeeded, whatever else happened.
func (w *Worker) judge(t *tasks.Task, result tasks.Result, err, cause error) tasks.Completion {
	e := tasks.Completion{ID: t.ID, Fence: t.Fence, Session: t.Session, Outcome: tasks.Succeeded, Next: tasks.StatusSucceeded, Result: result.Value}
	if err == nil {
		return e
	}
	e.Result, e.Error = nil, shortened(err.Error())
	if exit, ok := errors.AsType[*tasks.ExitError](err); ok {
		e.ExitCode = &exit.Code
	}
	delay, requeue := tasks.RequeueDelay(err)
	again := func(o tasks.Outcome) {
		e.Outcome, e.Next = o, tasks.StatusFailed
		if t.Attempt < t.MaxAttempts && !tasks.IsPermanent(err) {
			e.Next, e.Delay = tasks.StatusPending, w.retryDelay(t.Attempt)
			if d, ok := tasks.RetryDelay(err); ok {
				e.Delay = max(e.Delay, d)
			}
		}
	}
	// What ended the attempt is known. A handler's error may be about a lock, a cancel or a shutdown of its own.
	ended := func(target error) bool { return errors.Is(cause, target) }
	is := func(target error) bool { return ended(target) || errors.Is(err, target) }
	switch {
	case ended(lock.ErrLost), ended(lock.ErrRevoked), is(tasks.ErrLeaseEnded):
		e.Outcome, e.Next, e.Requeue, e.Delay = tasks.LeaseLost, tasks.StatusPending, true, w.cfg.LockDelay
		if e.Stalled = w.stalls.lately(); e.Stalled && t.Crashes+t.Stalls+1 >= w.cfg.MaxCrashes && (w.cfg.MaxCrashes == 1 || w.suspects.only(t.Fence)) {
			e.Next, e.Requeue = tasks.StatusFailed, false
			e.Error = fmt.Sprintf("quarantined: %d replicas died or stalled while they worked on it, the last was %s; see what it does to them, then onejob tasks retry %d", t.Crashes+t.Stalls+1, w.cfg.Replica, t.ID)
		}
	case ended(tasks.ErrCancelled):
		e.Outcome, e.Next = tasks.Cancelled, tasks.StatusCancelled
	case ended(tasks.ErrShutdown):
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

// maxError is how many bytes of a handler's error are kept. All errors of a round of completions
// travel in one statement.
const maxError = 64 << 10

func shortened(text string) string {
	if len(text) <= maxError {
		return text
	}
	return fmt.Sprintf("%s ... (%d bytes more)", strings.ToValidUTF8(text[:maxError], ""), len(text)-maxError)
}

// unwritableTries is how often an outcome is written whose row Postgres refuses to change, within
// some seconds, before that is reported: the trigger that refuses it may be of an application that
// is being deployed. From then on it is tried every unwritablePause.
const (
	unwritableTries = 8
	unwritablePause = 10 * time.Second
)

// parkAfter parks an attempt whose row has been written in vain so many times: most likely somebody
// has locked it, or its trigger waits for something. If its lock is lost meanwhile, that is settled at once:
// nobody works under it, and without that the session would not be over for the others.
func (w *Worker) parkAfter(tries int, t *tasks.Task) {
	if lease := w.running.leaseOf(t.Fence); lease != nil && tries == unwritableTries {
		context.AfterFunc(lease.Context(), func() { _ = lease.Release(context.Background()) })
	}
	if tries >= unwritableTries && w.running.park(t.Fence) {
		t.Payload = nil
		w.left(false)
	}
}

// complete makes the completion durable. While Postgres is unavailable, or refuses the row, it
// retries as long as the process lives: a task that is given up would be run again, as often as its
// outcome is refused. Once the lease has ended other replicas may take the task over; the fence then
// refuses a late completion.
func (w *Worker) complete(t *tasks.Task, e tasks.Completion, took time.Duration) {
	refused := 0
	for tries := 1; ; tries++ {
		last := w.shutdown.giveUp.Err() != nil
		err := w.cfg.Store.Complete(w.shutdown.writing, e)
		unwritable := errors.Is(err, tasks.ErrUnwritable)
		if unwritable {
			refused++
		}
		var unstorable *tasks.ResultError
		switch {
		case err == nil:
			w.logOutcome(t, e, took)
			return
		case errors.As(err, &unstorable):
			w.logOutcome(t, unstorable.Written, took)
			return
		case errors.Is(err, tasks.ErrRefused):
			w.logRefused(t, e.Outcome)
			return
		case last:
			w.cfg.Log.Error("completion_abandoned", fields(t, zap.String("outcome", string(e.Outcome)), zap.Error(err))...)
			return
		case tries == 1:
			w.cfg.Log.Warn("completion_delayed", fields(t, zap.String("outcome", string(e.Outcome)), zap.Error(err))...)
		}
		w.parkAfter(tries, t)
		pause := retryPause(tries)
		if unwritable && refused == unwritableTries {
			w.cfg.Log.Error("completion_unwritable", fields(t, zap.String("outcome", string(e.Outcome)), zap.Error(err))...)
			defer w.running.enter(t, unwritten(t, e.Outcome, err), func(error) {})()
		}
		if unwritable && refused >= unwritableTries {
			pause = jitter(unwritablePause)
		}
		retry.Pause(w.shutdown.giveUp, pause)
	}
}

// unwritten is what heartbeats carry of an attempt that has ended and whose outcome cannot be
// written: the reason as its progress, as the row itself cannot say it.
func unwritten(t *tasks.Task, o tasks.Outcome, why error) *tasks.Attempt {
	a := &tasks.Attempt{Task: tasks.Task{ID: t.ID, Fence: t.Fence, StartedAt: t.StartedAt, HeardAt: t.HeardAt}}
	a.Report(-1, fmt.Sprintf("it has ended as %s, which cannot be written: %v", o, why))
	return a
}

// logRefused logs a completion that Postgres refused, because the attempt no longer holds the row.
func (w *Worker) logRefused(t *tasks.Task, o tasks.Outcome) {
	w.measure(Measurement{What: MeasureRefused, Kind: t.Kind, Cause: string(o)})
	w.cfg.Log.Warn("completion_refused", fields(t, zap.String("outcome", string(o)))...)
}

// logOutcome logs how an attempt ended, and measures it.
func (w *Worker) logOutcome(t *tasks.Task, e tasks.Completion, took time.Duration) {
	cause := string(e.Outcome)
	if e.Requeue && e.Outcome == tasks.Failed {
		cause = Requeued
	}
	w.measure(Measurement{What: MeasureEnd, Kind: t.Kind, Cause: cause, Took: took})
	if e.Next == tasks.StatusPending && !e.Requeue {
		w.measure(Measurement{What: MeasureRetry, Kind: t.Kind})
	}
	f := fields(t, zap.String("outcome", string(e.Outcome)), zap.Duration("took", took))
	if e.Outcome == tasks.Succeeded {
		w.cfg.Log.Info("task_succeeded", f...)
		return
	}
	f = append(f, zap.String("error", e.Error))
	switch {
	case e.Outcome == tasks.LeaseLost && e.Next == tasks.StatusFailed:
		w.measure(Measurement{What: MeasureQuarantine, Kind: t.Kind})
		w.cfg.Log.Error("task_failed_after_stalls", append(f, zap.Int("crashes", t.Crashes), zap.Int("stalls", t.Stalls+1))...)
	case e.Outcome == tasks.LeaseLost:
		w.cfg.Log.Warn("task_lease_lost", f...)
	case e.Outcome == tasks.Shutdown:
		w.cfg.Log.Info("task_requeued_at_shutdown", f...)
	case e.Outcome == tasks.Cancelled:
		w.cfg.Log.Info("task_cancelled", f...)
	case e.Next == tasks.StatusPending && e.Requeue:
		w.cfg.Log.Warn("task_requeued", append(f, zap.Duration("in", e.Delay))...)
	case e.Next == tasks.StatusPending:
		w.cfg.Log.Warn("task_retry_scheduled", append(f, zap.Duration("in", e.Delay))...)
	default:
		w.cfg.Log.Error("task_failed", f...)
	}
}

// retryDelay doubles with every attempt up to RetryMax and is shortened by up to a
// fifth, so that tasks that failed together do not retry together.
func (w *Worker) retryDelay(attempt int) time.Duration {
	d := w.cfg.RetryMax
	if shift := attempt - 1; shift < 40 && w.cfg.RetryBase<<shift > 0 {
		d = min(d, w.cfg.RetryBase<<shift)
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

// retryPause is how long to wait before another request to an unavailable store.
func retryPause(tries int) time.Duration {
	return jitter(min(2*time.Second, 100*time.Millisecond<<min(tries-1, 5)))
}

// fields returns the log fields of every line about a task, followed by more.
func fields(t *tasks.Task, more ...zap.Field) []zap.Field {
	id := traceID(t.Traceparent)
	n := 5 + len(more)
	if id != "" {
		n++
	}
	f := make([]zap.Field, 0, n)
	f = append(f, zap.Int64("task_id", t.ID), zap.Int("attempt", t.Attempt), zap.String("kind", t.Kind),
		zap.String("lock_key", t.LockKey), zap.Int64("fence", t.Fence))
	if id != "" {
		f = append(f, zap.String("trace_id", id))
	}
	return append(f, more...)
}

// traceID returns the part of a traceparent that names the trace.
func traceID(traceparent string) string {
	if len(traceparent) < len("00-")+32 {
		return ""
	}
	return traceparent[3:35]
}
