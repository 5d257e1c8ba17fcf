package worker_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/tasks"
	"onejob/worker"
)

// unaudited takes long to say that it cannot tell which tasks are held, and counts the claims since it
// said so first.
type unaudited struct {
	behind
	failed *atomic.Bool
	claims *atomic.Int32
}

func (u unaudited) Held(ctx context.Context, _ string) ([]*tasks.Task, error) {
	select {
	case <-time.After(3 * time.Second):
	case <-ctx.Done():
	}
	u.failed.Store(true)
	return nil, errors.New("made up by the test")
}

func (u unaudited) Claim(ctx context.Context, c tasks.Claim) (tasks.Claimed, error) {
	if u.failed.Load() {
		u.claims.Add(1)
	}
	return u.behind.Claim(ctx, c)
}

// An audit that fails, and takes long to do so, comes before few claims: before each of these it
// would take minutes.
func TestAuditThatFailsKeepsNoClaimsWaiting(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	u := unaudited{failed: new(atomic.Bool), claims: new(atomic.Int32)}
	c.replica(t, "a", kinds(nil), func(w *worker.Config) { // when it has found the database, it audits
		u.behind = behind{w.Store}
		w.Store = u
	})
	testenv.Eventually(t, maxWait, "50 claims", func() bool { return u.claims.Load() >= 50 })
}
