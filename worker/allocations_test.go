package worker

import (
	"context"
	"io"
	"math"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"onejob/boottime"
	"onejob/internal/logging"
	"onejob/lock"
	"onejob/tasks"
)

// freeLocks grants every lock at once.
type freeLocks struct{ lock.Locker }

func (freeLocks) Acquire(context.Context, lock.Request) (lock.Lease, error) { return freeLease{}, nil }

type freeLease struct{}

func (freeLease) Context() context.Context      { return context.Background() }
func (freeLease) Deadline() boottime.Instant    { return boottime.Now().Add(time.Hour) }
func (freeLease) Release(context.Context) error { return nil }

// freeStore takes every completion at once.
type freeStore struct{ Store }

func (freeStore) Complete(context.Context, tasks.Completion) error { return nil }

// TestAllocationsOfAnAttempt bounds what an attempt allocates besides what its lock, its
// statements and its handler do: garbage is what a busy replica pays for most. It takes 12
// objects, and the bound leaves room for what the race detector and other versions of Go add.
func TestAllocationsOfAnAttempt(t *testing.T) {
	const most = 22
	log := zap.New(zapcore.NewCore(logging.JSON(), zapcore.AddSync(io.Discard), zap.InfoLevel))
	w, err := New(Config{Store: freeStore{}, Locks: freeLocks{}, Kinds: tasks.Kinds{"noop": tasks.Noop{}}, Replica: "a", Log: log,
		Measure: func(Measurement) {}})
	if err != nil {
		t.Fatal(err)
	}
	defer w.shutdown.prepare(t.Context())()
	w.database.trusted, w.database.record.FencesTo = true, math.MaxInt64

	task := &tasks.Task{ID: 1 << 40, Fence: 1 << 40, Kind: "noop", LockKey: "1099511627776", Attempt: 1, MaxAttempts: 3, Session: "session", StartedAt: time.Now()}
	got := testing.AllocsPerRun(1000, func() { w.attempt(task, nil) })
	t.Logf("%.1f objects", got)
	if got > most {
		t.Errorf("an attempt allocates %.1f objects, more than %d: see go test -run %s -memprofile ./worker", got, most, t.Name())
	}
}
