//go:build simulate

package simulate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/consul/api"
	"go.uber.org/zap"

	"onejob/internal/supervisor"
	"onejob/internal/testenv/lifecycle"
	"onejob/lock"
	"onejob/lock/consul"
	"onejob/simulate/fakeconsul"
	"onejob/simulate/fakestore"
	"onejob/tasks"
	"onejob/worker"
)

// maxCrashes is after how many deaths of replicas a task is quarantined.
const maxCrashes = 3

// stallMemory is for how long a stall explains the loss of a lease: 15 s, and a second for a look.
const stallMemory = 16 * time.Second

// How long a task waits before it is retried: the first time, and at most.
const (
	retryBase = 100 * time.Millisecond
	retryMax  = 2 * time.Second
)

// Some tasks have a limit.
const (
	limitName  = "l"
	limitSlots = 2
)

// workers is what the world knows of tasks.
type workers struct {
	db        *fakestore.Database
	handlers  []*handler
	jobs      map[int64]*job     // of the rows that Postgres has, by their ids
	claimed   map[int64]*job     // by the fence of the claim
	highest   map[string]int64   // fence that began, by lock key
	running   map[string]int64   // task whose row is running, by lock key
	fences    map[int64]*handler // that began
	backups   map[*Fault]fakestore.Backup
	other     *fakeconsul.Server // another cluster's Consul
	failed    bool               // Postgres has failed over and lost something
	failovers int
	nextJob   *job     // of the row that is inserted
	overLimit bool     // that was seen
	died      []string // sessions of processes that died
	steps     []lifecycle.Step
	deaths    map[string]time.Duration // by the names of replicas: when nothing of it was on its way any more
	sought    time.Duration            // when checkAbandoned did
	overdue   bool                     // that was seen
	poisoned  bool                     // there is a task that brings down each process that works on it
}

// job is what the world knows of one task.
type job struct {
	takes   time.Duration
	limited bool
	poison  bool
	counted int // attempts that ended by themselves
	success map[int64]bool
	struck  int // processes that died or stood still while they worked on it
}

// handler is one that runs.
type handler struct {
	m       *machine
	life    int
	id      int64
	job     *job
	key     string
	fence   int64
	session string
	began   time.Duration
	ctx     context.Context
	done    bool
}

// startWorker starts a process of the machine, with a worker in it.
func (w *world) startWorker(m *machine) *replica {
	m.life++
	life := m.life
	running, stop := context.WithCancel(context.Background())
	r := &replica{w: w, m: m, life: life, done: make(chan struct{}), kill: stop, process: w.newID(), began: w.now()}
	r.stop = func() {
		if r.told == 0 {
			r.told = w.now()
		}
		stop()
	}
	w.started = append(w.started, r)
	grace := short(w.rand, 6*time.Second)
	go func() {
		m.process()
		name := fmt.Sprintf("r%d.%d", m.id, life)
		locker, log := w.newLocker(m, name)
		r.locker = locker
		wk, err := worker.New(worker.Config{
			Store: w.db.Store(m.query), Locks: locker, Kinds: tasks.Kinds{"k": kind{w, m, life}}, Replica: name, Process: r.process,
			Concurrency: 1 + w.plan.Workers, PollOnly: true, MaxCrashes: maxCrashes, RetryBase: retryBase, RetryMax: retryMax,
			Limits: locker.Semaphores(), LimitSlots: map[string]int{limitName: limitSlots}, LockDelay: w.timing().LockDelay, ShutdownGrace: grace, Log: log,
		})
		if err != nil {
			panic(err)
		}
		err = wk.Run(running)
		w.note("replica %d: has stopped: %v", m.id, err)
		w.noteDeath(r)
		close(r.done)
	}()
	return r
}

func (w *world) newLocker(m *machine, name string) (*consul.Locker, *zap.Logger) {
	cfg := timings[w.plan.Timing]
	cfg.Client = api.DefaultConfig()
	cfg.Client.Address = "consul.simulated:8500"
	cfg.Prefix, cfg.RoundTripper = prefix, m
	cfg.Replica = consul.Replica{Name: name, Host: "h", PID: 1, Started: w.began}
	cfg.Log = w.logger(name)
	locker, err := consul.New(cfg)
	if err != nil {
		panic(err)
	}
	return locker, cfg.Log
}

// reportDeath does what the supervisor of a process that died does.
func (w *world) reportDeath(m *machine, process string) {
	go func() {
		m.process()
		locker, log := w.newLocker(m, fmt.Sprintf("r%d.supervisor", m.id))
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		supervisor.ReportDeath(ctx, log, []string{process}, w.db.Store(m.query).DeclareProcessDead, locker.ReportDeath, func() {})
	}()
}

// query is the way of a machine to Postgres.
func (m *machine) query(ctx context.Context, what string, apply func()) error {
	w := m.w
	_, alive := w.me()
	w.gate()
	if !alive {
		<-ctx.Done()
		return ctx.Err()
	}
	w.requests++
	m.asked++
	if w.is(DBDown, m.id) != nil {
		return errors.New("connection refused")
	}
	done := make(chan struct{}, 2)
	delay, heard := m.line(SlowDB)
	if heard {
		time.AfterFunc(delay, func() {
			apply()
			w.detail("replica %d: Postgres does %s", m.id, what)
			delay, heard := m.line(SlowDB)
			if f := w.is(DropDB, m.id); f != nil && w.rand.IntN(100) < f.Part {
				heard = false
			}
			if heard {
				time.AfterFunc(delay, func() { done <- struct{}{} })
			}
		})
	}
	if heard && w.is(DropDB, m.id) != nil && w.rand.IntN(4) == 0 { // the connection is reset, and nobody knows
		select {
		case <-time.After(between(w.rand, 0, 20*time.Millisecond)):
			w.gate()
			return io.ErrUnexpectedEOF
		case <-ctx.Done():
		}
	}
	select {
	case <-done:
		w.gate()
		return nil
	case <-ctx.Done():
		w.gate()
		return ctx.Err()
	}
}

// line returns how long a message to or from Postgres takes, and whether it arrives.
func (m *machine) line(slow Kind) (delay time.Duration, arrives bool) {
	w := m.w
	delay = between(w.rand, 50*time.Microsecond, 500*time.Microsecond)
	if w.is(CutDB, m.id) != nil || w.is(CutBoth, m.id) != nil {
		return delay, false
	}
	if f := w.is(slow, m.id); f != nil && w.rand.IntN(100) < f.Part {
		delay += between(w.rand, 0, f.Size)
	}
	return delay, true
}

// kind is what tasks do.
type kind struct {
	w    *world
	m    *machine
	life int
}

// Prepare implements tasks.Kind.
func (k kind) Prepare(json.RawMessage) (tasks.Handler, error) { return k.run, nil }

func (k kind) run(ctx context.Context, a *tasks.Attempt) (tasks.Result, error) {
	w := k.w
	began, deadline := k.m.clockAt(w.now()), a.Deadline() // the worker has just looked at both
	w.gate()
	if k.m.life != k.life {
		return tasks.Result{}, errors.New("dead")
	}
	if deadline <= began {
		w.violate("late", "task %d begins on replica %d %v after its lease", a.ID, k.m.id, began.Sub(deadline))
	}
	j := w.claimed[a.Fence]
	h := &handler{m: k.m, life: k.life, id: a.ID, job: j, key: a.LockKey, fence: a.Fence, session: a.Session, began: w.now(), ctx: ctx}
	defer func() {
		h.done = true
		w.handlers = slices.DeleteFunc(w.handlers, func(o *handler) bool { return o == h })
	}()
	w.handlers = append(w.handlers, h)
	w.handovers++
	w.note("replica %d: begins task %d (lock key %s, fence %d, attempt %d)", k.m.id, a.ID, a.LockKey, a.Fence, a.Attempt)
	if w.fences[a.Fence] != nil {
		w.violate("I10 fence", "fence %d of task %d was used before", a.Fence, a.ID)
	}
	if a.Fence <= w.highest[a.LockKey] && !k.m.stood() {
		w.violate("I10 fence", "task %d begins with fence %d, after fence %d of lock key %s", a.ID, a.Fence, w.highest[a.LockKey], a.LockKey)
	}
	w.fences[a.Fence] = h
	w.highest[a.LockKey] = max(w.highest[a.LockKey], a.Fence)
	w.checkHandlers()
	w.checkLimit()

	if j.poison {
		time.AfterFunc(between(w.rand, 0, time.Second), func() {
			if !h.done && k.m.life == k.life && k.m.thawed == nil && !w.settled {
				w.begin(&Fault{Kind: w.plan.Poison, At: w.now(), Who: k.m.id, For: between(w.rand, 3*time.Second, 15*time.Second)})
			}
		})
	}
	takes := j.takes
	if w.settled {
		takes = min(takes, 300*time.Millisecond)
	}
	for until := w.now() + takes; w.now() < until && ctx.Err() == nil; {
		if deadline := a.Deadline(); ctx.Err() == nil {
			w.believe(k.m, a.Session, deadline)
		}
		step := time.NewTimer(min(between(w.rand, 30*time.Millisecond, 300*time.Millisecond), until-w.now()))
		select {
		case <-step.C:
		case <-ctx.Done():
		}
		step.Stop()
		w.gate()
		if k.m.life != k.life {
			return tasks.Result{}, errors.New("dead")
		}
	}
	if ctx.Err() != nil {
		w.note("replica %d: told to end task %d: %v", k.m.id, a.ID, context.Cause(ctx))
		time.Sleep(between(w.rand, 0, handlerGrace))
		w.gate()
		return tasks.Result{}, context.Cause(ctx)
	}
	j.counted++
	if w.rand.IntN(8) == 0 {
		w.note("replica %d: fails task %d", k.m.id, a.ID)
		return tasks.Result{}, errors.New("it failed")
	}
	w.note("replica %d: ends task %d", k.m.id, a.ID)
	j.success[a.Fence] = true
	return tasks.Result{}, nil
}

// checkHandlers looks whether two work on one lock key.
func (w *world) checkHandlers() {
	for i, a := range w.handlers {
		for _, b := range w.handlers[i+1:] {
			if a.key == b.key && !a.excused() && !b.excused() {
				w.violate("I2 two inside", "replica %d with task %d (fence %d, session %s) and replica %d with task %d (fence %d, session %s) work on lock key %s",
					a.m.id, a.id, a.fence, a.session, b.m.id, b.id, b.fence, b.session, a.key)
				a.done, b.done = true, true
			}
		}
	}
}

// checkLimit looks whether more work under the limit than it has slots. A standby that takes
// over gives out ids of rows that it never received again. The handler of such a row goes on
// beside another task with its id, and needs a slot only if its own row had the limit.
func (w *world) checkLimit() {
	inside := 0
	for _, h := range w.handlers {
		if h.job.limited && !h.excused() && !h.slotTaken() {
			inside++
		}
	}
	if inside > limitSlots && !w.overLimit {
		w.overLimit = true
		w.violate("limit", "%d work under a limit of %d", inside, limitSlots)
	}
}

// slotTaken reports whether a handler's slot may have been taken away by hand, or by a
// restore, and its replica has not noticed yet: nobody knows of which session it is.
func (h *handler) slotTaken() bool {
	w := h.m.w
	if w.restored >= h.began && w.unnoticed(h.m.id, w.restored) {
		return true
	}
	for _, at := range w.revoked {
		if w.unnoticed(h.m.id, at) {
			return true
		}
	}
	return false
}

// excused reports whether a handler cannot act, or could not until a moment ago. If Postgres
// has forgotten the row, Consul alone protects, and who takes the lock away by hand as well
// takes away both.
func (h *handler) excused() bool {
	w := h.m.w
	if h.done || h.m.stood() || h.m.life != h.life {
		return true
	}
	return w.failed && (w.takenAway(h.m.id, w.revoked[h.session]) || w.takenAway(h.m.id, w.deleted[h.key]) || w.restored >= h.began && w.unnoticed(h.m.id, w.restored))
}

// takenAway reports whether something was taken away by hand at a moment, if that is not zero, and the
// replica may not have noticed yet.
func (w *world) takenAway(who int, at time.Duration) bool { return at > 0 && w.unnoticed(who, at) }

// strike notes that the process of a machine dies or stands still.
func (w *world) strike(m *machine) {
	for _, h := range w.handlers {
		if h.m == m && h.life == m.life {
			h.job.struck++
		}
	}
}

// rowChanged is called with every change of a row.
func (w *world) rowChanged(before, after fakestore.Row, by string) {
	w.note("task %d: %s -> %s by %s, attempt %d, crashes %d, stalls %d, fence %d %s", after.ID, before.Status, after.Status, by, after.Attempt, after.Crashes, after.Stalls, after.Fence, after.Error)
	j := w.jobs[after.ID]
	w.step(before, after, by)
	w.checkRunning(before, after)
	switch by {
	case "insert", "cancel", "begin":
		return
	case "claim":
		w.claimed[after.Fence] = j
	case "takeover":
		if w.plan.calm() {
			w.violate("I11 stop", "task %d is taken over from a replica that has stopped", after.ID)
		}
		for _, h := range w.handlers {
			if h.id == after.ID && h.fence == before.Fence && !h.excused() {
				w.violate("I4 takeover", "task %d is taken from replica %d (session %s), which works on it", h.id, h.m.id, h.session)
			}
		}
	case "complete":
		if after.Status == tasks.StatusSucceeded && !j.success[before.Fence] {
			w.violate("I3 success", "task %d has succeeded under fence %d, and its handler has not", after.ID, before.Fence)
		}
		for _, h := range w.handlers {
			if h.id == after.ID && h.fence == before.Fence && !h.done {
				w.violate("I3 early", "task %d has ended, and its handler of fence %d has not", after.ID, h.fence)
			}
		}
		w.checkDurable(before)
		if h := w.fences[before.Fence]; h != nil && after.Stalls > before.Stalls && h.m.frozen < before.StartedAt.Sub(w.began)-stallMemory {
			w.violate("I12 quarantine", "task %d is charged a stall of replica %d, which has not stood still", after.ID, h.m.id)
		}
	}
	if after.Status == tasks.StatusFailed && strings.HasPrefix(after.Error, "quarantined:") && j.struck == 0 {
		w.violate("I12 quarantine", "task %d is quarantined, and no process has died or stood still while it worked on it", after.ID)
	}
	if before.Status == tasks.StatusSucceeded || before.Status == tasks.StatusFailed {
		w.violate("I6 undone", "task %d was %s and is %s", after.ID, before.Status, after.Status)
	}
}

// checkRunning: of a lock key one row is running at a time.
func (w *world) checkRunning(before, after fakestore.Row) {
	key := after.Key()
	if before.Status == tasks.StatusRunning && w.running[key] == before.ID {
		delete(w.running, key)
	}
	if after.Status != tasks.StatusRunning {
		return
	}
	if other, ok := w.running[key]; ok {
		w.violate("I1 running", "tasks %d and %d of lock key %s are both running", other, after.ID, key)
	}
	w.running[key] = after.ID
}

// checkDurable: while an outcome is written, its lock is still held. What was taken away from the
// replica it may not have noticed yet, as the locks of a process that stood still, which others
// delete when they take over; that answers are late or lost takes nothing away. What it has noticed
// it writes as soon as Postgres hears it, which may take long. A
// replica that stops gives up in the end, and what it has sent until then may still be applied.
func (w *world) checkDurable(r fakestore.Row) {
	if !w.consul.Lives(r.Session) || w.gaveUp(w.fences[r.Fence]) {
		return
	}
	claimed := r.StartedAt.Sub(w.began)
	if h := w.fences[r.Fence]; h != nil && errors.Is(context.Cause(h.ctx), lock.ErrRevoked) &&
		(max(w.deleted[r.Key()], w.revoked[r.Session], w.restored) >= claimed || w.repeated(h.m.id, claimed)) {
		return
	}
	for _, m := range w.machines {
		if w.replicas[m.id].sessionWas(r.Session) && (m.stood() || w.repeated(m.id, w.now()) || w.takenAway(m.id, w.deleted[r.Key()]) || w.takenAway(m.id, w.revoked[r.Session]) ||
			w.restored >= claimed && w.takenAway(m.id, w.restored)) {
			return
		}
	}
	if w.holder(r) != r.Session {
		w.violate("I5 durable", "the outcome of task %d is written, and its lock is not held any more", r.ID)
	}
}

// noteDeath notes that a process has ended: as long as what it has sent is on its way, others hear
// of it.
func (w *world) noteDeath(r *replica) {
	name := fmt.Sprintf("r%d.%d", r.m.id, r.life)
	if _, known := w.deaths[name]; known || r.process == "" {
		return
	}
	w.deaths[name] = w.now()
	for _, f := range append(w.past, pointees(w.active)...) {
		if f.Who == r.m.id && f.At+f.For+f.Size >= w.now() {
			w.deaths[name] = max(w.deaths[name], w.now()+f.Size)
		}
	}
}

// checkAbandoned looks for a row that has been running for long under a process that has ended,
// while a replica was there that could have taken it over. That takes 7 s of silence and a
// moment: up to 14 s were seen.
func (w *world) checkAbandoned() {
	const every, most = time.Second, 20 * time.Second
	if w.now()-w.sought < every || w.overdue || len(w.deaths) == 0 {
		return
	}
	w.sought = w.now()
	w.overdue = w.db.Any(func(r *fakestore.Row) bool {
		wait := w.abandonedFor(r)
		if wait > most {
			w.violate("abandoned", "task %d has been running under replica %s, which is dead, for %v in which another one could have taken it over", r.ID, r.Replica, wait)
		}
		return wait > most
	})
}

// abandonedFor returns for how long a row has been running under a process that has ended, while a
// replica was there that nothing had disturbed; zero if there was none.
func (w *world) abandonedFor(r *fakestore.Row) (wait time.Duration) {
	died, dead := w.deaths[r.Replica]
	if !dead || r.Status != tasks.StatusRunning {
		return 0
	}
	since := max(died, r.StartedAt.Sub(w.began))
	for _, o := range w.replicas {
		if o.life == o.m.life && o.told == 0 {
			wait = max(wait, w.now()-max(since, o.began, w.undisturbed(o.m.id)))
		}
	}
	return wait
}

// undisturbed returns since when a replica must be over all that has happened to it or to all.
// After another cluster's Consul was adopted, everybody may wait for an operator. A key of a
// replica that somebody writes is a sign of its life as long as its session is there.
func (w *world) undisturbed(who int) (since time.Duration) {
	const after = 15 * time.Second // as long as it may be without a session
	for _, f := range w.past {
		switch f.Kind {
		case Stranger:
			return w.now()
		case DeleteByHand:
			continue
		case NoLeader, Election, Restore, Failover, DBStart, PlantKey:
		default:
			if f.Who != who {
				continue
			}
		}
		since = max(since, f.At+f.For+f.Size+after)
	}
	for _, f := range w.active {
		if f.Who == who || f.Kind == NoLeader || f.Kind == Stranger {
			return w.now()
		}
	}
	return since
}

// gaveUp reports whether the process of a handler was told to stop so long ago that it waits for
// Postgres no more: handlers have 10 s when the grace period is over.
func (w *world) gaveUp(h *handler) bool {
	return h != nil && slices.ContainsFunc(w.started, func(r *replica) bool {
		return r.m == h.m && r.life == h.life && r.told > 0 && w.now()-r.told > 10*time.Second
	})
}

// holder returns the session that has locked a task, under whichever of its names.
func (w *world) holder(r fakestore.Row) string {
	if by, _ := w.consul.Held(prefix + "/tasks/" + r.Key()); by != "" || r.LockKey != "" {
		return by
	}
	for _, key := range w.consul.Below(prefix + "/running/") {
		if by, value := w.consul.Held(key); by != "" && strings.HasPrefix(string(value), r.Key()+" ") {
			return by
		}
	}
	return ""
}

// sessionWas reports whether the replica has that session now.
func (r *replica) sessionWas(session string) bool {
	return r.w.consul.Node(session) == r.m.agent.Node()
}

// addTasks inserts so many tasks, in the time that follows: half of them at once.
func (w *world) addTasks(n int, during time.Duration) {
	for range n {
		row := fakestore.Row{Kind: "k", Priority: int16(w.rand.IntN(2)), MaxAttempts: 1 + w.rand.IntN(5)}
		if w.plan.Seed%3 > 0 && w.rand.IntN(2) == 0 { // others are locked under names that are used again
			row.LockKey = fmt.Sprintf("k%d", w.rand.IntN(w.plan.Keys))
		}
		if w.rand.IntN(4) == 0 {
			row.Limit = limitName
		}
		at := time.Duration(0)
		if w.rand.IntN(2) == 0 {
			at = between(w.rand, 0, during)
		}
		takes := short(w.rand, 20*time.Second)
		poison := w.plan.Poison != "" && !w.poisoned
		if poison {
			w.poisoned = true
			row.MaxAttempts, at, takes = 10, 0, 20*time.Second
		}
		time.AfterFunc(at, func() {
			if w.settled {
				return
			}
			w.nextJob = &job{takes: takes, limited: row.Limit != "", poison: poison, success: map[int64]bool{}}
			id := w.db.Insert(row)
			w.jobs[id] = w.nextJob
		})
	}
}

// checkTasks looks at the rows when everything has had its time.
func (w *world) checkTasks() {
	for _, r := range w.db.Rows() {
		if open(&r) {
			w.violate("lost", "task %d is %s (session %s), long after the last fault", r.ID, r.Status, r.Session)
		}
		if j := w.jobs[r.ID]; w.plan.calm() && (r.Crashes > 0 || r.Attempt != j.counted) {
			w.violate("I11 stop", "task %d has %d attempts and %d crashes, and %d of its handlers have ended", r.ID, r.Attempt, r.Crashes, j.counted)
		}
	}
}

// open reports whether a task has not ended.
func open(r *fakestore.Row) bool {
	return r.Status == tasks.StatusPending || r.Status == tasks.StatusRunning
}
