package worker_test

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"testing"
	"time"

	"onejob/boottime"
	"onejob/lock"
	"onejob/tasks"
	"onejob/worker"
)

// The locker and the store of this file are fakes: a lease that runs out just
// between its being granted and the handler's turn, or a completion that cannot be
// written while the lease runs out, cannot be had from real servers at will.

type fakeLocker struct {
	ctx      context.Context
	deadline boottime.Instant
	changed  chan struct{}

	mu       sync.Mutex
	released bool
}

func (l *fakeLocker) Run(ctx context.Context, _ lock.Cluster) error { <-ctx.Done(); return nil }
func (l *fakeLocker) Session() string                               { return "session" }
func (l *fakeLocker) Changed() <-chan struct{}                      { return l.changed }
func (l *fakeLocker) Heard(string, boottime.Instant)                {}
func (l *fakeLocker) Lose(string, error)                            {}
func (l *fakeLocker) End(context.Context, string, time.Duration) (lock.End, error) {
	return lock.Alive, nil
}
func (l *fakeLocker) Dead(context.Context, []string) ([]string, error) {
	return nil, nil
}
func (l *fakeLocker) Acquire(context.Context, lock.Request) (lock.Lease, error) { return l, nil }
func (l *fakeLocker) Database(context.Context) ([]byte, uint64, error)          { return nil, 0, nil }
func (l *fakeLocker) SetDatabase(context.Context, []byte, uint64) (uint64, error) {
	return 1, nil
}
func (l *fakeLocker) Campaign(ctx context.Context) (lock.Lease, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}
func (l *fakeLocker) Context() context.Context   { return l.ctx }
func (l *fakeLocker) Deadline() boottime.Instant { return l.deadline }
func (l *fakeLocker) Release(context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.released = true
	return nil
}

var fakeServer = tasks.ServerReport{Server: tasks.Server{System: "1", Timeline: 1, Started: time.Unix(1, 0)}, FencesFrom: -1}

type fakeStore struct {
	worker.Store // what is not overridden is not called
	mu           sync.Mutex
	task         tasks.Task
	claimed      bool
	completions  chan tasks.Completion
	complete     func(tries int) error
	tries        int
}

func (s *fakeStore) Claim(_ context.Context, c tasks.Claim) (tasks.Claimed, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.claimed {
		return tasks.Claimed{}, nil
	}
	s.claimed = true
	s.task.Fence++
	t := s.task
	t.Server = c.Server
	return tasks.Claimed{Tasks: []*tasks.Task{&t}}, nil
}
func (s *fakeStore) Requeue(context.Context, *tasks.Task, time.Duration) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.claimed = false
	return nil
}
func (s *fakeStore) Complete(_ context.Context, e tasks.Completion) error {
	s.tries++
	if s.complete != nil {
		if err := s.complete(s.tries); err != nil {
			return err
		}
	}
	s.completions <- e
	return nil
}
func (s *fakeStore) Beat(_ context.Context, r tasks.Replica, _ tasks.Known) (tasks.Answer, error) {
	r.Server = fakeServer.Started
	return tasks.Answer{Server: fakeServer.Started, Whole: true, Replicas: []tasks.Replica{r}}, nil
}
func (s *fakeStore) Server(context.Context) (tasks.ServerReport, error)           { return fakeServer, nil }
func (s *fakeStore) Recorded(context.Context, int64) error                        { return nil }
func (s *fakeStore) Refuse(tasks.Server)                                          {}
func (s *fakeStore) Follow(context.Context, tasks.Server) bool                    { return false }
func (s *fakeStore) EndReplica(context.Context, string, tasks.ReplicaState) error { return nil }
func (s *fakeStore) Replicas(context.Context) ([]tasks.Replica, error)            { return nil, nil }
func (s *fakeStore) Sessions(context.Context, string) ([]string, error)           { return nil, nil }
func (s *fakeStore) UnknownKinds(context.Context, []string) ([]string, error)     { return nil, nil }
func (s *fakeStore) CancelRequests(context.Context, string) ([]int64, error)      { return nil, nil }
func (s *fakeStore) Held(context.Context, string) ([]*tasks.Task, error)          { return nil, nil }
func (s *fakeStore) Limited(context.Context) (bool, error)                        { return false, nil }
func (s *fakeStore) LookBehind(context.Context, tasks.Claim) (bool, error)        { return false, nil }
func (s *fakeStore) Listen(ctx context.Context, _ func(tasks.Signal, string)) error {
	<-ctx.Done()
	return ctx.Err()
}

func (s *fakeStore) WakeAll(context.Context) error { return nil }

func (s *fakeStore) Clock(context.Context) (now, started time.Time, err error) {
	return time.Now(), fakeServer.Started, nil
}

// run runs a worker on one task until its completion is written.
func run(t *testing.T, locks *fakeLocker, db *fakeStore, kind tasks.Kind) tasks.Completion {
	t.Helper()
	db.task = tasks.Task{ID: 1, Kind: "k", LockKey: "1", Attempt: 1, MaxAttempts: 5, Session: "session"}
	db.completions = make(chan tasks.Completion, 1)
	w, err := worker.New(worker.Config{Store: db, Locks: locks, Kinds: tasks.Kinds{"k": kind}, Replica: "r"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	var e tasks.Completion
	select {
	case e = <-db.completions:
	case <-time.After(maxWait):
		t.Error("no ending was written")
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	return e
}

// kindFunc is the handler of every payload.
type kindFunc tasks.Handler

func (f kindFunc) Prepare(json.RawMessage) (tasks.Handler, error) { return tasks.Handler(f), nil }

// I2: no handler begins after the lease's deadline, although its context has
// not ended yet.
func TestHandlerDoesNotBeginAfterTheDeadline(t *testing.T) {
	t.Parallel()
	locks := &fakeLocker{ctx: context.Background(), deadline: boottime.Now(), changed: make(chan struct{})}
	began := false
	e := run(t, locks, &fakeStore{}, kindFunc(func(context.Context, *tasks.Attempt) (tasks.Result, error) {
		began = true
		return tasks.Result{}, nil
	}))
	if began {
		t.Error("the handler began")
	}
	if e.Outcome != tasks.LeaseLost || e.Next != tasks.StatusPending || !e.Requeue {
		t.Errorf("ending: %+v", e)
	}
	if !locks.released {
		t.Error("the lease was not released")
	}
}

// I7: while Postgres is away the outcome is tried again as long as the lease
// holds, and nothing is released before it is written.
func TestOutcomeIsTriedAgainWhileTheLeaseHolds(t *testing.T) {
	t.Parallel()
	locks := &fakeLocker{ctx: context.Background(), deadline: boottime.Now().Add(time.Hour), changed: make(chan struct{})}
	db := &fakeStore{complete: func(tries int) error {
		locks.mu.Lock()
		defer locks.mu.Unlock()
		if locks.released {
			t.Error("the lease was released before the outcome was written")
		}
		if tries < 4 {
			return errors.New("no connection")
		}
		return nil
	}}
	e := run(t, locks, db, tasks.Noop{})
	if e.Outcome != tasks.Succeeded || db.tries != 4 {
		t.Errorf("ending after %d tries: %+v", db.tries, e)
	}
}

// When the lease is over the outcome is not forgotten: the fence refuses it if another
// has taken the task meanwhile, and if nobody has it counts.
func TestOutcomeIsKeptAfterTheLease(t *testing.T) {
	t.Parallel()
	ctx, lose := context.WithCancelCause(context.Background())
	locks := &fakeLocker{ctx: ctx, deadline: boottime.Now().Add(time.Hour), changed: make(chan struct{})}
	db := &fakeStore{complete: func(tries int) error {
		if tries == 1 {
			lose(lock.ErrLost)
		}
		if tries < 4 {
			return errors.New("no connection")
		}
		return nil
	}}
	e := run(t, locks, db, tasks.Noop{})
	if e.Outcome != tasks.Succeeded || db.tries != 4 {
		t.Errorf("ending after %d tries: %+v", db.tries, e)
	}
}

// An outcome whose row Postgres refuses is kept for as long as it does: a task that is given up
// would be run again.
func TestOutcomeThatARowRefusesIsKept(t *testing.T) {
	t.Parallel()
	locks := &fakeLocker{ctx: context.Background(), deadline: boottime.Now().Add(time.Hour), changed: make(chan struct{})}
	const refusals = 9
	db := &fakeStore{complete: func(tries int) error {
		if tries <= refusals {
			return tasks.ErrUnwritable
		}
		return nil
	}}
	e := run(t, locks, db, tasks.Noop{})
	if e.Outcome != tasks.Succeeded || db.tries != refusals+1 {
		t.Errorf("ending after %d tries: %+v", db.tries, e)
	}
}
