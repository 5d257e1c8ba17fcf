package snapshot

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"onejob/internal/retry"
	"onejob/lock"
	"onejob/store"
)

// Every is how often a snapshot is taken while somebody looks.
const Every = 2 * time.Second

const (
	takeTimeout = 15 * time.Second // a snapshot's, with all statements
	askTimeout  = time.Second      // of the leader

	// limitsTimeout is that of all limits together. In RabbitMQ a look at a limit is some round
	// trips and a second in which its holders may answer, and eight are looked at at a time.
	limitsTimeout = 4 * time.Second

	shownLimits  = 50 // more are not inspected
	shownHolders = 10 // of one limit
)

// Config says where a Source looks.
type Config struct {
	// Store is Postgres.
	Store interface {
		Overview(ctx context.Context) (store.Overview, error)
	}

	// Leader returns who leads, nil if nobody does. Nil: it is not asked.
	Leader func(ctx context.Context) (*Leader, error)

	// Limits returns where limits are kept; nil if that is not known yet. A nil func: limits
	// are not shown.
	Limits func() lock.Semaphores

	// Slots returns the limits that a replica creates when a task needs them. A reload of the
	// configuration may change them. A nil func: there are none.
	Slots func() map[string]int

	// Holder says of what a holder of a slot left who that is, and since when it runs; the
	// time is zero if it does not say.
	Holder func(value []byte) (who string, since time.Time)
}

// Source takes snapshots for all who look. Its methods may be called by many goroutines at
// once.
type Source struct {
	cfg Config

	mu     sync.Mutex
	last   *Snapshot
	flight chan struct{} // closed when the snapshot is there that is being taken; nil: none is

	kept kept // of the one who takes the snapshot
}

// New returns a Source.
func New(cfg Config) *Source { return &Source{cfg: cfg} }

// Get returns a snapshot that is not older than Every, or the one that is being taken.
func (s *Source) Get(ctx context.Context) (*Snapshot, error) { return s.After(ctx, nil) }

// After waits for a snapshot other than seen, which may be nil. All who wait get the same one,
// also if it took longer than Every. Its errors are those of ctx.
func (s *Source) After(ctx context.Context, seen *Snapshot) (*Snapshot, error) {
	for {
		s.mu.Lock()
		last, flight := s.last, s.flight
		fresh := last != nil && time.Since(last.At) < Every
		if flight == nil && !fresh {
			return s.fly(ctx), nil
		}
		s.mu.Unlock()
		switch {
		case fresh && last != seen:
			return last, nil
		case flight != nil:
			taken, err := s.landed(ctx, flight)
			if err != nil || taken != nil && taken != last && taken != seen {
				return taken, err
			}
		default:
			if retry.Pause(ctx, Every-time.Since(last.At)); ctx.Err() != nil {
				return nil, ctx.Err()
			}
		}
	}
}

// Renew returns a snapshot that is taken now, however fresh the last one is, or the one that
// is being taken. Its errors are those of ctx.
func (s *Source) Renew(ctx context.Context) (*Snapshot, error) {
	s.mu.Lock()
	last, flight := s.last, s.flight
	if flight == nil {
		return s.fly(ctx), nil
	}
	s.mu.Unlock()
	taken, err := s.landed(ctx, flight)
	if err != nil || taken != nil && taken != last {
		return taken, err
	}
	return s.Get(ctx)
}

// landed waits until a snapshot is there that somebody else takes, and returns it. While
// Postgres is slow it is older than Every by then; if each who waited for it took one of their
// own instead, the last of them would wait for all of these. If none was taken, it returns the
// one before.
func (s *Source) landed(ctx context.Context, flight chan struct{}) (*Snapshot, error) {
	select {
	case <-flight:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last, nil
}

// fly takes the snapshot that others wait for, too: it does not end with ctx. It is called with s.mu,
// and gives it back.
func (s *Source) fly(ctx context.Context) *Snapshot {
	mine := make(chan struct{})
	s.flight = mine
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), takeTimeout)
	defer cancel()
	var taken *Snapshot
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.last, s.flight = cmp.Or(taken, s.last), nil
		close(mine)
	}()
	taken = s.take(ctx)
	return taken
}

// kept is what the blocks were when they could be read last.
type kept struct {
	replicas  block[store.ReplicaGlance]
	waiting   block[store.Waiting]
	paused    block[store.QueueRow]
	running   block[store.Running]
	rates     block[store.Rate]
	schedules block[store.ScheduleGlance]
	failures  block[store.Failure]
	limits    block[Limit]
}

// block is the rows of a block, and when they were read.
type block[T any] struct {
	rows []T
	at   time.Time
}

// renew returns the rows of a block: the new ones, or those of before if there was an error,
// which then stands in s.Stale.
func renew[T any](s *Snapshot, b *block[T], name string, rows []T, err error) []T {
	if err == nil {
		b.rows, b.at = rows, s.At
		return rows
	}
	stale := Stale{Block: name, Error: err.Error()}
	if !b.at.IsZero() {
		stale.AsOf = new(b.at)
	}
	s.Stale = append(s.Stale, stale)
	return b.rows
}

// take takes one snapshot. Nobody else does meanwhile.
func (s *Source) take(ctx context.Context) *Snapshot {
	snap := &Snapshot{At: time.Now(), Needs: []Need{}, Replicas: []Replica{}, Queues: []Queue{}, Limits: []Limit{}, Schedules: []Schedule{}, Failures: []Failure{}, Stale: []Stale{}}
	snap.Running.Tasks = []RunningTask{}

	var asking sync.WaitGroup
	var leader *Leader
	var leaderErr, limitsErr error
	var limits []Limit
	if s.cfg.Leader != nil {
		asking.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, askTimeout)
			defer cancel()
			leader, leaderErr = s.cfg.Leader(ctx)
		})
	}
	asking.Go(func() { limits, limitsErr = s.limits(ctx) })
	o, err := s.cfg.Store.Overview(ctx)
	asking.Wait()
	if snap.Err = err; err != nil {
		// Each block is as old as it is; the reason is the same for all.
		o.Replicas.Err, o.Waiting.Err, o.Nameless.Err, o.Rates.Err, o.Paused.Err, o.Running.Err, o.Schedules.Err, o.Failures.Err, o.Overlaps.Err, o.Held.Err = err, err, err, err, err, err, err, err, err, err
	}
	replicas := renew(snap, &s.kept.replicas, BlockReplicas, o.Replicas.Rows, o.Replicas.Err)
	waiting := renew(snap, &s.kept.waiting, BlockQueues, o.Waiting.Rows, o.Waiting.Err)
	paused := renew(snap, &s.kept.paused, BlockPaused, o.Paused.Rows, o.Paused.Err)
	rates := renew(snap, &s.kept.rates, BlockRates, o.Rates.Rows, o.Rates.Err)
	running := renew(snap, &s.kept.running, BlockRunning, o.Running.Rows, o.Running.Err)
	schedules := renew(snap, &s.kept.schedules, BlockSchedules, o.Schedules.Rows, o.Schedules.Err)
	failures := renew(snap, &s.kept.failures, BlockFailures, o.Failures.Rows, o.Failures.Err)
	var missing map[string]bool
	if limitsErr == nil {
		limits, missing = s.waitedFor(ctx, limits, waiting)
	}
	limits = renew(snap, &s.kept.limits, BlockLimits, limits, limitsErr)
	for name, err := range map[string]error{BlockOverlaps: o.Overlaps.Err, BlockVacuum: o.Held.Err, BlockNames: o.Nameless.Err, BlockLeader: leaderErr} {
		if err != nil {
			snap.Stale = append(snap.Stale, Stale{Block: name, Error: err.Error()})
		}
	}
	slices.SortFunc(snap.Stale, func(a, b Stale) int { return cmp.Compare(a.Block, b.Block) })

	snap.Leader = leader
	snap.Now = cmp.Or(o.Now, snap.At)
	snap.Replicas = append(snap.Replicas, replicasOf(replicas, leader)...)
	snap.Queues = append(snap.Queues, queuesOf(waiting, rates, paused, snap.Replicas)...)
	snap.Limits = append(snap.Limits, withDue(limits, waiting)...)
	for _, r := range running {
		snap.Running.Count = Count{N: r.All}
		snap.Running.Tasks = append(snap.Running.Tasks, runningOf(r))
	}
	for _, r := range schedules {
		snap.Schedules = append(snap.Schedules, scheduleOf(r))
	}
	snap.Failures = append(snap.Failures, failuresOf(failures, snap.Now)...)

	v := view{Snapshot: snap, waiting: waiting, missing: missing, nameless: o.Nameless.Rows, overlaps: o.Overlaps.Rows, held: o.Held.Rows, asksLeader: s.cfg.Leader != nil && leaderErr == nil}
	if s.cfg.Slots != nil {
		v.slots = s.cfg.Slots()
	}
	v.needs()
	v.verdict()
	return snap
}

// limits returns the limits with their holders. A limit that cannot be read has an error of
// its own.
func (s *Source) limits(ctx context.Context) ([]Limit, error) {
	if s.cfg.Limits == nil {
		return nil, nil
	}
	limits := s.cfg.Limits()
	if limits == nil {
		return nil, errors.New("they are not known yet")
	}
	ctx, cancel := context.WithTimeout(ctx, limitsTimeout)
	defer cancel()
	names, err := limits.List(ctx)
	if err != nil && !errors.Is(err, lock.ErrCannotList) { // those that due tasks wait for are looked for by their names
		return nil, err
	}
	list, _ := s.inspect(ctx, limits, names[:min(len(names), shownLimits)])
	return list, nil
}

// waitedFor adds to the list of limits those that due tasks wait for, and returns the names of those
// that do not exist. The list need not have all: with RabbitMQ it has those of the configuration.
func (s *Source) waitedFor(ctx context.Context, list []Limit, waiting []store.Waiting) (more []Limit, missing map[string]bool) {
	var names []string
	for _, w := range waiting {
		if w.Limit != "" && w.Due > 0 && !slices.Contains(names, w.Limit) && !slices.ContainsFunc(list, func(l Limit) bool { return l.Name == w.Limit }) {
			names = append(names, w.Limit)
		}
	}
	if len(names) == 0 || s.cfg.Limits == nil {
		return list, nil
	}
	limits := s.cfg.Limits()
	if limits == nil {
		return list, nil
	}
	ctx, cancel := context.WithTimeout(ctx, limitsTimeout)
	defer cancel()
	found, missing := s.inspect(ctx, limits, names[:min(len(names), shownLimits)])
	more = append(list, found...)
	slices.SortFunc(more, func(a, b Limit) int { return cmp.Compare(a.Name, b.Name) })
	return more, missing
}

// inspect looks at limits. It returns those that exist, and the names of the others.
func (s *Source) inspect(ctx context.Context, limits lock.Semaphores, names []string) (list []Limit, missing map[string]bool) {
	list, missing = []Limit{}, map[string]bool{}
	sems, errs := lock.InspectAll(ctx, limits, names)
	for i, sem := range sems {
		l := Limit{Name: names[i], Holders: []Holder{}}
		switch err := errs[i]; {
		case errors.Is(err, lock.ErrNoSemaphore):
			missing[names[i]] = true
			continue
		case err != nil:
			l.Error, sem.Waiting = err.Error(), -1
		}
		l.Slots, l.Held, l.Waiting = sem.Slots, len(sem.Holders), sem.Waiting
		for _, h := range sem.Holders[:min(len(sem.Holders), shownHolders)] {
			l.Holders = append(l.Holders, s.holder(h))
		}
		list = append(list, l)
	}
	return list, missing
}

func (s *Source) holder(h lock.SlotHolder) Holder {
	who, since := fmt.Sprintf("%.200q", h.Value), h.Since
	if s.cfg.Holder != nil {
		var started time.Time
		who, started = s.cfg.Holder(h.Value)
		since = cmp.Or(since, started)
	}
	if since.IsZero() {
		return Holder{Who: who}
	}
	return Holder{Who: who, Since: &since}
}

func replicasOf(rows []store.ReplicaGlance, leader *Leader) (list []Replica) {
	for _, r := range rows {
		list = append(list, Replica{
			Name: r.Name, State: r.State, Leads: leader != nil && leader.Session == r.Session, Host: r.Host, PID: r.PID, Version: r.Version,
			Queues: r.Queues, Kinds: r.Kinds, Running: r.Running, Concurrency: r.Concurrency, Heartbeat: Seconds(r.Silent), ClockAhead: (*Seconds)(r.ClockAhead), BeganAt: r.BeganAt, Session: r.Session,
		})
	}
	slices.SortStableFunc(list, func(a, b Replica) int { // live ones first
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.Name, b.Name))
	})
	return list
}

func rank(r Replica) int {
	if r.Live() {
		return 0
	}
	return 1
}

// queuesOf adds up what waits in each queue.
func queuesOf(rows []store.Waiting, rates []store.Rate, paused []store.QueueRow, replicas []Replica) (list []Queue) {
	index := map[string]int{}
	called := func(name string) *Queue {
		i, ok := index[name]
		if !ok {
			i = len(list)
			index[name] = i
			list = append(list, Queue{Name: name, Kinds: []string{}, Replicas: serving(replicas, name)})
		}
		return &list[i]
	}
	for _, r := range rows {
		q := called(r.Queue)
		q.Due = Count{q.Due.N + r.Due, q.Due.More || r.DueMore}
		q.Later = Count{q.Later.N + r.Later, q.Later.More || r.LaterMore}
		q.OldestDue = max(q.OldestDue, Seconds(r.Oldest))
		if !slices.Contains(q.Kinds, r.Kind) {
			q.Kinds = append(q.Kinds, r.Kind)
		}
	}
	// Queues in which nothing waits are there as well, if something happened in them or a
	// replica names them.
	for _, r := range rates {
		q := called(r.Queue)
		q.Enqueued, q.Ended = Count{r.Enqueued, r.EnqueuedMore && r.Enqueued > 0}, Count{r.Ended, r.EndedMore && r.Ended > 0}
	}
	for _, r := range replicas {
		for _, name := range r.Queues {
			if r.Live() {
				called(name)
			}
		}
	}
	for _, p := range paused {
		called(p.Name).Paused = pauseOf(&p.PausedUntil, &p.PausedAt, &p.PausedBy, p.Reason)
	}
	slices.SortFunc(list, func(a, b Queue) int {
		return cmp.Or(cmp.Compare(b.OldestDue, a.OldestDue), strings.Compare(a.Name, b.Name))
	})
	return list
}

// serving returns how many live replicas claim from a queue.
func serving(replicas []Replica, queue string) (n int) {
	for _, r := range replicas {
		if r.Live() && (len(r.Queues) == 0 || slices.Contains(r.Queues, queue)) {
			n++
		}
	}
	return n
}

// withDue returns the limits with how many due tasks name them. The lists are new ones: the
// given one is kept.
func withDue(limits []Limit, waiting []store.Waiting) []Limit {
	list := slices.Clone(limits)
	for i := range list {
		list[i].Due = Count{}
		for _, w := range waiting {
			if w.Limit == list[i].Name {
				list[i].Due = Count{list[i].Due.N + w.Due, list[i].Due.More || w.DueMore}
			}
		}
	}
	return list
}

func runningOf(r store.Running) RunningTask {
	t := RunningTask{
		ID: r.ID, Kind: r.Kind, Queue: r.Queue, LockKey: r.LockKey, Limit: r.LimitName, Replica: r.Replica, Attempt: r.Attempt, MaxAttempts: r.MaxAttempts,
		Fence: r.Fence, StartedAt: r.StartedAt, Age: Seconds(r.Age), CancelRequested: r.CancelRequested,
		Progress: r.Progress,
	}
	if r.Payload != nil {
		t.Target = Target(r.Kind, json.RawMessage(*r.Payload))
	}
	if r.Timeout != nil {
		t.TimeoutLeft = new(Seconds(*r.Timeout - r.Age))
	}
	return t
}

// pauseOf returns a pause, or nil if there is no end of it. A person may have written the end
// and nothing else.
func pauseOf(until, at *store.Time, by, reason *string) *Pause {
	if until == nil {
		return nil
	}
	p := &Pause{Until: *until, By: "somebody"}
	if at != nil {
		p.At = *at
	}
	if by != nil {
		p.By = *by
	}
	if reason != nil {
		p.Reason = *reason
	}
	return p
}

func scheduleOf(r store.ScheduleGlance) Schedule {
	s := Schedule{
		Name: r.Name, Cron: r.Cron, TimeZone: r.TimeZone, Kind: r.Kind, Enabled: r.Enabled, NextAt: r.NextAt, LastAt: r.LastAt, Behind: r.Behind, Error: r.Error,
		Occurrences: []Occurrence{}, Paused: pauseOf(r.Paused, r.PausedAt, r.PausedBy, r.Reason),
	}
	for i, due := range r.DueAt {
		s.Occurrences = append(s.Occurrences, Occurrence{DueAt: due, Task: r.TaskIDs[i], Became: r.Became[i]})
	}
	return s
}

// failuresOf puts failures together whose errors differ only in what Mask masks.
func failuresOf(rows []store.Failure, now time.Time) (list []Failure) {
	index := map[[2]string]int{}
	for _, r := range rows {
		text := Mask(r.Error)
		i, ok := index[[2]string{r.Kind, text}]
		if !ok {
			i = len(list)
			index[[2]string{r.Kind, text}] = i
			list = append(list, Failure{Kind: r.Kind, Error: text, Pattern: Pattern(r.Error), First: r.First, Last: r.Last, Sample: r.Sample})
		}
		f := &list[i]
		f.Count += r.Count
		f.Sample = max(f.Sample, r.Sample)
		if d, ok := r.First.Sub(f.First); ok && d < 0 {
			f.First = r.First
		}
		if d, ok := r.Last.Sub(f.Last); ok && d > 0 {
			f.Last = r.Last
		}
	}
	for i := range list {
		f := &list[i]
		if age, ok := (store.Time{At: now}).Sub(f.Last); ok {
			f.Recent = age < time.Hour
		}
	}
	slices.SortStableFunc(list, func(a, b Failure) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(b.Sample, a.Sample))
	})
	return list[:min(len(list), shownFailures)]
}

// shownFailures is how many groups of failures are shown.
const shownFailures = 100
