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
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/robfig/cron/v3"
	"go.uber.org/zap"

	"onejob/internal/logging"
	"onejob/internal/mutant"
	"onejob/internal/procfs"
	"onejob/lock"
	"onejob/tasks"
)

// Store is what a worker asks of the database.
type Store interface {
	Claim(context.Context, tasks.Claim) (tasks.Claimed, error)
	LookBehind(context.Context, tasks.Claim) (some bool, err error)
	Begin(context.Context, *tasks.Task) error
	Requeue(ctx context.Context, t *tasks.Task, delay time.Duration) error
	Complete(context.Context, tasks.Completion) error
	Sessions(ctx context.Context, mine string) ([]string, error)
	TakeOver(ctx context.Context, dead []string, maxCrashes int) ([]tasks.Abandoned, []tasks.RowError, error)
	UnknownKinds(ctx context.Context, known []string) ([]string, error)
	CancelRequests(ctx context.Context, session string) ([]int64, error)
	Held(ctx context.Context, session string) ([]*tasks.Task, error)
	MemberStore
	DatabaseStore
	Limited(context.Context) (bool, error)
	DueLimits(ctx context.Context, c tasks.Claim, names []string) ([]string, error)
	UnknownLimits(ctx context.Context, known []string, n int) ([]string, error)
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
	Version       string        // of the program, for people
	Process       string        // a uuid for this process, the same for all its sessions; default a new one
	Concurrency   int           // how many tasks run at once; default 32
	PayloadMemory int           // bytes of payloads of tasks that are held at once; default 128 MiB, at least MaxPayload
	Queues        []string      // which queues to serve; default all
	Poll          string        // a cron spec for looking at the table; default @every 1s
	PollOnly      bool          // do not LISTEN
	Timeout       time.Duration // of attempts whose row has none; default none
	MaxCrashes    int           // replicas that a task may take down; default 3
	RetryBase     time.Duration // wait before the second attempt; it doubles from then on; default 1 s
	RetryMax      time.Duration // but never more than this; default 1 h
	LockDelay     time.Duration // how long to leave a key alone whose holder died; default 3 s
	ShutdownGrace time.Duration // how long running work may go on after ctx ended; default 30 s
	Log           *zap.Logger   // default: JSON on stderr, from level info on; zap.NewNop() for none

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

	// The leader logs transactions that have held back vacuum for longer; default 5 min.
	SnapshotAge time.Duration

	// OverlapsEvery is how often the leader looks for attempts that overlapped, to log
	// them. Default 1 minute.
	OverlapsEvery time.Duration

	schedule      cron.Schedule
	wake          chan struct{} // somebody should look for due tasks
	look          chan struct{} // somebody should look for cancel requests
	bereaved      chan struct{} // another replica is dead
	forceStop     chan struct{} // closed by Hurry
	forceStopOnce sync.Once
	giveUp        context.Context // ends when a shutdown will not wait any longer
	writing       context.Context // ends some time later: so long the store may take to answer those who wait for it then
	stopping      atomic.Bool     // nothing more is claimed
	members       *members
	database      *database
	lockGate      lockGate
	serving       atomic.Pointer[serving]
	running       running
	payloads      payloads // claim's own
	limits        limits

	// A claim whose answer is lost leaves rows that are ours and that nobody runs.
	replyLost atomic.Bool  // there may be some
	claiming  sync.RWMutex // held by claims until their tasks are noted; audit takes it alone

	requeues requeues
	suspects suspects
	stalls   stalls

	unknownKinds, unknownNames reported
}

// MaxPayload is the longest payload of a task, in bytes.
const MaxPayload = 4 << 20

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
	setDefault(&w.PayloadMemory, 128<<20)
	setDefault(&w.Poll, "@every 1s")
	setDefault(&w.MaxCrashes, 3)
	setDefault(&w.RetryBase, time.Second)
	setDefault(&w.RetryMax, time.Hour)
	setDefault(&w.LockDelay, 3*time.Second)
	setDefault(&w.ShutdownGrace, 30*time.Second)
	setDefault(&w.KeepSucceeded, 7*24*time.Hour)
	setDefault(&w.KeepFailed, 30*24*time.Hour)
	setDefault(&w.RetentionEvery, time.Minute)
	setDefault(&w.SnapshotAge, 5*time.Minute)
	setDefault(&w.OverlapsEvery, time.Minute)
	setDefault(&w.Log, logging.Stderr())
	setDefault(&w.Process, uuid.NewString())
	var err error
	if w.schedule, err = ParsePoll(w.Poll); err != nil {
		return fmt.Errorf("worker: poll %q: %w", w.Poll, err)
	}
	if w.Concurrency < 0 || w.MaxCrashes < 0 || w.Timeout < 0 || w.RetryBase < 0 || w.ShutdownGrace < 0 {
		return errors.New("worker: a number or duration is below zero")
	}
	if w.PayloadMemory < MaxPayload {
		return fmt.Errorf("worker: PayloadMemory %d is below %d, the longest payload", w.PayloadMemory, MaxPayload)
	}
	w.wake, w.look, w.bereaved, w.forceStop = make(chan struct{}, 1), make(chan struct{}, 1), make(chan struct{}, 1), make(chan struct{})
	host, _ := os.Hostname()
	w.members = &members{store: w.Store, me: tasks.Replica{Process: w.Process, Name: w.Replica, Host: host, PID: os.Getpid(),
		Machine: procfs.Machine(), Started: procfs.Started(), Version: w.Version, Kinds: w.Kinds.Names(), Queues: w.Queues, Concurrency: w.Concurrency}}
	w.database = &database{store: w.Store, locks: w.Locks, log: w.Log, replica: w.Replica, doubts: make(chan struct{}, 1)}
	w.database.found = func() {
		w.replyLost.Store(true) // another server may have tasks as ours that had ended on the one before
		w.claimSoon()
	}
	w.running.fences, w.running.tasks = map[int64]int{}, map[int64]handler{}
	w.limits.init(w.LimitSlots)
	w.serving.Store(newServing(w.Kinds, w.LimitSlots, w.KindLimits))
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
	writing, stopWriting := context.WithCancelCause(context.WithoutCancel(ctx))
	w.giveUp, w.writing = giveUp, writing
	defer setGiveUp()
	defer stopWriting(nil)

	var lockErr error
	var holding, helping sync.WaitGroup
	holding.Go(func() {
		if lockErr = w.Locks.Run(locks, w.members); lockErr != nil {
			stopIntake(lockErr)
		}
	})
	holding.Go(func() { w.database.run(locks, w.Locks) })
	helping.Go(func() { w.tick(intake) })
	helping.Go(func() { w.watchSessions(intake) })
	holding.Go(func() { w.beat(locks) })
	helping.Go(func() { w.lead(intake) })
	helping.Go(func() { w.lookBehind(intake) })
	helping.Go(func() { w.suspect(intake) })
	helping.Go(func() { w.stalls.watch(work) })
	helping.Go(func() { w.findLimits(intake) })
	helping.Go(func() { w.watchCancels(work) })
	if !w.PollOnly {
		helping.Go(func() { w.listen(work) })
	}

	w.claim(intake)

	w.stopping.Store(true)
	err := w.drain(func() {
		setGiveUp()
		time.AfterFunc(lastTry, func() { stopWriting(errGivenUp) })
	})
	if err == nil { // or else somebody may serve a limit whose handler never returns
		w.limits.wg.Wait()
	}
	stopWork()
	stopIntake(nil)
	helping.Wait()
	stopLocks()
	holding.Wait()
	return errors.Join(lockErr, err)
}

// ForceStop ends the grace of a shutdown: what still runs is cancelled now.
func (w *Worker) ForceStop() { w.forceStopOnce.Do(func() { close(w.forceStop) }) }

// maxClaim is how many tasks are claimed at once. More make a task no cheaper.
const maxClaim = 512

// claim takes tasks in, as many as there are free slots, until ctx ends.
func (w *Worker) claim(ctx context.Context) {
	failing := false
	for {
		select {
		case <-ctx.Done():
			// What it does not find now is given back when others see that we have stopped.
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
			w.audit(last)
			cancel()
			return
		case <-w.wake:
		}
		w.audit(context.WithoutCancel(ctx))
		limited := w.limits.due
		if limited { // first: they take little room, and would never get any after the others
			w.serveLimits(ctx)
		}
		for more := true; more && ctx.Err() == nil; {
			runtime.Gosched() // those who leave together make room for one claim
			var asked bool
			var err error
			more, asked, err = w.claimSome(ctx)
			switch {
			case err != nil && !failing:
				w.Log.Warn("claim_failed", zap.Error(err))
			case err == nil && asked && failing:
				w.Log.Info("claim_recovered")
			}
			if asked {
				failing = err != nil
			}
			more = more && err == nil // or else the next tick tries again
		}
		if !limited {
			w.serveLimits(ctx)
		}
	}
}

// claimSome claims as many tasks as there is room for and starts them. It reports
// whether to ask again at once, and whether it asked at all.
//
// A claim that has begun is finished, whether or not ctx ends meanwhile: to give up
// on its answer would leave tasks that are ours and that nobody runs.
func (w *Worker) claimSome(ctx context.Context) (more, asked bool, err error) {
	session := w.Locks.Session()
	room := w.running.take(maxClaim, w.Concurrency)
	bytes := w.running.reserve(w.PayloadMemory, MaxPayload, w.PayloadMemory)
	defer w.running.unreserve(bytes)
	c := tasks.Claim{}
	before, known := w.database.put(&c, session)
	if room == 0 || bytes == 0 || session == "" || !known {
		w.running.leave(room)
		return false, false, nil // room that is given back, a session, or a database wakes us
	}
	if pass := w.lockGate.pass(room); pass < room && !mutant.LockGate {
		w.running.leave(room - pass)
		if room = pass; room == 0 {
			return false, false, nil // the next tick asks again
		}
	}
	w.claiming.RLock()
	defer w.claiming.RUnlock()
	c = tasks.Claim{Server: c.Server, FencesFrom: c.FencesFrom, Session: session, Replica: w.Replica, Kinds: w.serving.Load().none, Queues: w.Queues, Max: w.payloads.fit(room, bytes), MaxBytes: bytes}
	whole := context.WithoutCancel(ctx)
	if mutant.Claims {
		whole = ctx
	}
	claimed, err := w.Store.Claim(whole, c)
	if !w.usable(&claimed, before, err) {
		w.running.leave(room)
		return false, false, nil
	}
	w.running.leave(room - len(claimed.Tasks))
	w.reportRefused(claimed.Refused)
	w.payloads.saw(claimed.Tasks)
	for _, t := range claimed.Tasks {
		run := func() { w.attempt(t) }
		if ctx.Err() != nil {
			run = func() { w.requeue(t, tasks.ErrShutdown) }
		}
		w.running.start(t.Fence, len(t.Payload), run, func() { notify(w.wake) })
	}
	if err != nil {
		w.replyLost.Store(true)
	}
	return claimed.More, true, err
}

// usable reports whether what was claimed may be worked on. It may not if the claim met
// another server than the database on record, or if fences have gone back; it is given
// back then.
func (w *Worker) usable(claimed *tasks.Claimed, before int64, err error) bool {
	if errors.Is(err, tasks.ErrOtherServer) {
		w.database.doubt()
		return false
	}
	if w.database.rising(claimed.Tasks, before) {
		return true
	}
	for _, t := range claimed.Tasks {
		w.requeue(t, errFenceBack)
	}
	return false
}

// reportRefused logs rows that Postgres refuses to change. Each is refused once: it
// has failed, or is left alone.
func (w *Worker) reportRefused(rows []tasks.RowError) {
	for _, r := range rows {
		w.Log.Error("row_refused", zap.Int64("task_id", r.ID), zap.Bool("failed", r.Failed), zap.Error(r.Err))
	}
}

// audit requeues tasks that Postgres says are ours and that we know nothing
// of: the answer to a claim was lost on the way. Without it they would wait for
// the end of our session.
func (w *Worker) audit(ctx context.Context) {
	if !w.replyLost.Load() {
		return
	}
	w.claiming.Lock() // what is being claimed is not yet known either
	defer w.claiming.Unlock()
	session := w.Locks.Session()
	if session == "" {
		return
	}
	w.replyLost.Store(false)
	known := w.running.known() // before the question: what ends meanwhile was known
	held, err := w.Store.Held(ctx, session)
	if err != nil {
		w.replyLost.Store(true)
		return // claim_failed reports a database that is unavailable
	}
	for _, t := range held {
		if _, heard := known[t.Fence]; !heard {
			w.Log.Warn("claim_reply_lost", fields(t)...)
			w.running.take(1, math.MaxInt)
			w.running.start(t.Fence, 0, func() { w.requeue(t, errReplyLost) }, w.claimSoon)
		}
	}
}

// suspect looks now and then for tasks that are ours and that nobody here knows of,
// although every claim was answered: somebody's hand may have made them so. Each look
// reads all that is running; it is the audit that acts.
func (w *Worker) suspect(ctx context.Context) {
	var pace pace
	for ctx.Err() == nil {
		began := time.Now()
		if session := w.Locks.Session(); session != "" {
			held, err := w.Store.Held(ctx, session)
			unknown := func(t *tasks.Task) bool { return !w.running.has(t.Fence) }
			if err == nil && slices.ContainsFunc(held, unknown) { // claim_failed reports a database that is unavailable
				w.replyLost.Store(true)
				notify(w.wake)
			}
		}
		sleep(ctx, pace.rest(5*time.Second, time.Since(began)))
	}
}

// pace says how long to wait between looks at many rows, of which nobody has to hear at
// once: an event makes the looks that are urgent.
type pace struct{ last time.Duration }

// rest returns how long to wait after a look that took so long: at least so much, and so
// that such looks take no more than a two-hundredth of the time, or a twentieth where that
// would be a rest of more than half a minute. A look may have been slow because of the
// machine, once. If the one before was slow as well, it is an old snapshot that keeps the
// index entries of millions of rows that are gone, and each look reads them: then looks
// take no more than a four-hundredth of the time, or claims would wait for the processor.
func (p *pace) rest(least, took time.Duration) time.Duration {
	both := min(took, p.last)
	p.last = took
	if both < 250*time.Millisecond {
		both = 0
	}
	return max(least, min(200*took, 30*time.Second), 20*took, 400*both)
}

// payloads knows how long payloads have been of late, so that no more tasks are
// claimed than can be read.
type payloads struct{ mean float64 }

// fit returns how many tasks of so much room fit into so many bytes, at least one.
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

// lookBehind looks for due tasks that claims pass over, until ctx ends.
func (w *Worker) lookBehind(ctx context.Context) {
	for ctx.Err() == nil {
		sleep(ctx, time.Second)
		some, err := w.Store.LookBehind(ctx, tasks.Claim{Kinds: w.serving.Load().none, Queues: w.Queues})
		if err == nil && some { // claim_failed reports a database that is unavailable
			w.claimSoon()
		}
	}
}

// tick looks for due tasks at every poll.
func (w *Worker) tick(ctx context.Context) {
	var unknown time.Time // when to look for kinds that are unknown here
	var pace pace
	for ctx.Err() == nil {
		w.claimSoon()
		now := time.Now()
		if now.After(unknown) {
			w.reportUnknown(ctx)
			took := time.Since(now)
			now = now.Add(took)
			unknown = now.Add(pace.rest(5*time.Second, took))
		}
		next := w.schedule.Next(now)
		if next.IsZero() {
			next = now.Add(time.Minute) // a spec that never comes true
		}
		sleep(ctx, next.Sub(now))
	}
}

// watchSessions looks for abandoned tasks when sessions come and go: that is when there may be
// any. After a look that failed, or found some, it soon looks again, and
// otherwise now and then, because each look reads all that is running.
func (w *Worker) watchSessions(ctx context.Context) {
	var pace pace
	for {
		changed := w.Locks.Changed()
		w.claimSoon()
		if list, err := w.Store.Replicas(ctx); err == nil { // the last heartbeat's may be a second old
			w.members.saw(list)
		}
		again := time.Second
		if took, none := w.takeOver(ctx); none {
			again = pace.rest(10*time.Second, took)
		}
		select {
		case <-changed:
		case <-w.bereaved:
		case <-time.After(again):
		case <-ctx.Done():
			return
		}
	}
}

// takeOver takes tasks from replicas that died. It reports how long it took to read all
// that is running, and whether it could look at all, and found none.
func (w *Worker) takeOver(ctx context.Context) (took time.Duration, none bool) {
	mine := w.Locks.Session()
	if mine == "" || !w.database.is() {
		return 0, false
	}
	began := time.Now()
	sessions, err := w.Store.Sessions(ctx, mine)
	took = time.Since(began)
	if err != nil {
		return took, false // claim_failed reports a database that is unavailable
	}
	dead, err := w.dead(ctx, sessions)
	if err != nil && ctx.Err() == nil {
		w.Log.Debug("session_lookup_failed", zap.Error(err))
	}
	if len(dead) == 0 {
		return took, err == nil
	}
	if mutant.Late {
		sleep(ctx, 20*time.Second)
	}
	abandoned, refused, err := w.Store.TakeOver(ctx, dead, w.MaxCrashes)
	w.reportRefused(refused)
	if err != nil && ctx.Err() == nil {
		w.Log.Warn("takeover_failed", zap.Error(err))
	}
	for _, o := range abandoned {
		fields := []zap.Field{zap.Int64("task_id", o.ID), zap.String("kind", o.Kind), zap.Int("attempt", o.Attempt), zap.String("lock_key", o.LockKey),
			zap.Int64("fence", o.Fence), zap.String("from", o.Replica), zap.Int("crashes", o.Crashes), zap.Int("stalls", o.Stalls), zap.Duration("since_start", o.Since)}
		switch {
		case o.Next == tasks.StatusFailed && o.Crashes+o.Stalls >= w.MaxCrashes:
			w.Log.Error("task_quarantined", fields...)
		case o.Next == tasks.StatusFailed:
			w.Log.Error("task_failed_after_crashes", fields...)
		default:
			w.Log.Warn("task_taken_over", fields...)
		}
	}
	w.claimSoon()
	return took, false
}

// dead returns those of sessions whose tasks may be taken: both witnesses say that
// nobody works under them any more.
func (w *Worker) dead(ctx context.Context, sessions []string) (dead []string, err error) {
	var strangers []string
	for _, s := range sessions {
		switch r, _, known := w.members.of(s); {
		case !known || mutant.Witness: // of an older version, or gone from the list long ago
			strangers = append(strangers, s)
		case r.State.Final():
			end, e := w.Locks.End(ctx, s, 0)
			if err = cmp.Or(err, e); end != lock.Alive {
				dead = append(dead, s)
			}
		}
	}
	others, e := w.Locks.Dead(ctx, strangers)
	return append(dead, others...), cmp.Or(err, e)
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
				w.claimSoon()
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
		if session == "" || w.running.count() == 0 || mutant.Cancels {
			continue
		}
		ids, err := w.Store.CancelRequests(ctx, session)
		if err != nil {
			continue // claim_failed reports a database that is unavailable
		}
		for _, id := range ids {
			w.running.cancel(id, tasks.ErrCancelled)
		}
	}
}

// drain waits for running work: for the grace as it is, then cancelled, then
// no longer.
func (w *Worker) drain(giveUp func()) error {
	const maxWait = 10 * time.Second
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
	case <-w.forceStop:
	}
	w.running.cancelAll(tasks.ErrShutdown)
	last := time.NewTimer(maxWait)
	defer last.Stop()
	select {
	case <-done:
		return nil
	case <-last.C:
	}
	giveUp()
	select {
	case <-done:
	case <-time.After(lastTry + 500*time.Millisecond):
	}
	if n := w.running.count(); n > 0 {
		w.Log.Error("drain_incomplete", zap.Int("running", n))
		return fmt.Errorf("%d tasks were still running %v after they were cancelled; others take them over", n, maxWait)
	}
	return nil
}

// claimSoon makes claim look for due tasks, those with a limit too.
func (w *Worker) claimSoon() {
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
