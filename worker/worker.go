// Package worker is the plot of onejob: claim a task, lock it, run it, record
// the outcome, release the lock. attempt.go has the whole life of one task.
//
// It promises that a handler runs only under a valid lease, that the handler's
// context ends when the lease does, and that an outcome is durable before the lock
// is released. It relies on the store for what is due and whose fence is valid, and
// on the locker for which sessions are alive and what is locked. It cannot stop a
// Go handler that ignores its context: such a handler keeps its slot, and once the
// lease has expired only the fence protects against its writes.
package worker

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/robfig/cron/v3"

	"onejob/internal/logging"
	"onejob/internal/procfs"
	"onejob/lock"
	"onejob/tasks"
)

// Store is what a worker needs of the database. *store.Store is the implementation.
type Store interface {
	claimStore
	attemptStore
	auditStore
	cancelStore
	takeoverStore
	memberStore
	limitStore
	DatabaseStore

	scheduleStore
	retentionStore
	snapshotStore
	queueStore
	overlapStore
	clockStore
}

// Worker is one replica.
type Worker struct {
	cfg Config

	schedule cron.Schedule
	wake     chan struct{} // tasks may be due
	look     chan struct{} // there may be cancel requests
	bereaved chan struct{} // another replica is dead
	listed   chan struct{} // a heartbeat has had the list of replicas
	full     chan struct{} // tasks are due, and there is no free slot for them
	shutdown shutdown
	leader   leader
	members  *members
	database *database
	lockGate lockGate
	serving  atomic.Pointer[serving]
	running  running
	wakeups  wakeups
	payloads payloads // claim's own
	limits   *limits
	lookups  lookups

	// A claim whose reply is lost leaves rows that belong to this replica and that nobody runs.
	replyLost  atomic.Bool  // there may be such rows
	claiming   sync.RWMutex // read-locked by claims until their tasks are registered; audit takes the write lock
	auditAgain time.Time    // when one that failed is tried again; claim's own

	requeues requeues
	releases linger
	suspects suspects
	stalls   stalls

	unknownKinds, unknownNames reported
}

// New returns a Worker, or an error if the configuration is invalid.
func New(cfg Config) (*Worker, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	w := &Worker{cfg: cfg, wake: make(chan struct{}, 1), look: make(chan struct{}, 1), bereaved: make(chan struct{}, 1), listed: make(chan struct{}, 1), full: make(chan struct{}, 1)}
	w.schedule, _ = ParsePoll(cfg.Poll) // was validated
	w.shutdown.forced, w.shutdown.force = context.WithCancel(context.Background())
	host, _ := os.Hostname()
	w.members = &members{store: cfg.Store, me: tasks.Replica{Process: cfg.Process, Name: cfg.Replica, Host: host, PID: os.Getpid(),
		Machine: procfs.Machine(), Started: procfs.Started(), Version: cfg.Version, Kinds: cfg.Kinds.Names(), Choices: cfg.Kinds.Choices(), Queues: cfg.Queues, Concurrency: cfg.Concurrency, LimitsBackend: cfg.LimitsBackend}}
	w.database = &database{store: cfg.Store, locks: cfg.Locks, log: cfg.Log, replica: cfg.Replica, doubts: make(chan struct{}, 1)}
	w.database.found = func() {
		w.replyLost.Store(true) // on another server, tasks that had ended on the previous one may still be running under our session
		w.claimSoon()
	}
	w.running = newRunning()
	w.lookups.log = cfg.Log
	w.serving.Store(newServing(cfg.Kinds, cfg.LimitSlots, cfg.KindLimits))
	w.limits = &limits{
		semaphores: cfg.Limits, store: cfg.Store, log: cfg.Log, replica: cfg.Replica, queues: cfg.Queues, concurrency: cfg.Concurrency,
		config: w.serving.Load, running: &w.running, lookups: &w.lookups, ours: func() error { return w.members.sameBackend(cfg.Locks.Session()) }, wake: w.claimAgain, hears: w.wakeups.hears.Load, claim: w.claimOne, attempt: func(t *tasks.Task, slot lock.Lease) { w.attemptUnder(t, slot, nil) },
		fresh: make(chan struct{}, 1), known: map[string]bool{}, missing: map[string]time.Time{}, served: map[string]bool{}, pauses: map[string]time.Duration{}, rests: map[string]time.Duration{}, stirred: make(chan struct{}), came: make(chan struct{}), told: map[string]string{},
	}
	w.limits.know(cfg.LimitSlots)
	w.leader.log = cfg.Log
	w.leader.reach = func(ctx context.Context) error {
		_, err := w.Database()
		if err == nil {
			_, _, err = cfg.Store.Clock(ctx)
		}
		return err
	}
	w.leader.parts = []func(context.Context){
		(&schedules{cfg.Store, w.database.is, w.measure, cfg.Log}).run,
		(&retention{cfg.Store, cfg.KeepSucceeded, cfg.KeepFailed, cfg.RetentionEvery, cfg.Log}).run,
		(&snapshots{cfg.Store, cfg.SnapshotAge, cfg.Log}).run,
		(&queues{cfg.Store, &w.lookups, cfg.Log}).run,
		(&overlaps{cfg.Store, cfg.OverlapsEvery, w.measure, cfg.Log}).run,
		(&postgresClock{cfg.Store, w.database.is, &w.lookups, cfg.Log}).run,
	}
	return w, nil
}

// Run works on tasks until ctx ends. It then stops claiming, lets running tasks
// continue for ShutdownGrace, cancels the rest, requeues what was cancelled, and
// releases the locks. It returns nil if all of that succeeded, and an error at once if one of the
// kinds cannot run here. Call it once.
func (w *Worker) Run(ctx context.Context) error {
	defer logging.SyncStderr()
	if err := w.cfg.enableKinds(w.serving.Load().kinds); err != nil {
		return err
	}
	// Three lifetimes, each longer than the one before: claiming tasks, running
	// them, holding locks.
	intake, stopIntake := context.WithCancelCause(ctx)
	work, stopWork := context.WithCancel(context.WithoutCancel(ctx))
	locks, stopLocks := context.WithCancel(context.WithoutCancel(ctx))
	defer w.shutdown.prepare(ctx)()

	var lockErr error
	var holding, helping sync.WaitGroup
	holding.Go(func() {
		if lockErr = w.cfg.Locks.Run(locks, peers{w.members, w}); lockErr != nil {
			stopIntake(lockErr)
		}
	})
	holding.Go(func() { w.database.run(locks, w.cfg.Locks) })
	helping.Go(func() { w.tick(intake) })
	helping.Go(func() { w.watchSessions(intake) })
	holding.Go(func() { w.beat(locks) })
	holding.Go(func() { w.watchSilence(locks) })
	helping.Go(func() { w.leader.run(intake, w.cfg.Locks) })
	helping.Go(func() { w.lookBehind(intake) })
	helping.Go(func() { w.suspect(intake) })
	helping.Go(func() {
		w.stalls.watch(work, func(late time.Duration) { w.measure(Measurement{What: MeasureLate, Took: late}) })
	})
	helping.Go(func() { w.limits.find(intake) })
	helping.Go(func() { w.watchCancels(work) })
	if !w.cfg.PollOnly {
		helping.Go(func() { w.listen(work) })
		helping.Go(func() { w.wakeOthers(intake) })
	}

	asked := make(chan time.Time, 1)
	defer context.AfterFunc(intake, func() { asked <- time.Now() })()
	w.claim(intake)

	w.shutdown.stopping.Store(true)
	grace := w.cfg.ShutdownGrace
	select {
	case at := <-asked: // a claim that was under way may have taken long
		grace = max(0, grace-time.Since(at))
	default:
	}
	err := w.shutdown.drain(&w.running, grace, w.cfg.Log)
	if err == nil { // otherwise a limit may be waiting for a handler that never returns
		w.limits.wg.Wait()
	}
	stopWork()
	stopIntake(nil)
	helping.Wait()
	stopLocks()
	holding.Wait()
	return errors.Join(lockErr, err)
}

// ForceStop ends the grace period of a shutdown: running tasks are cancelled now.
func (w *Worker) ForceStop() { w.shutdown.force() }
