package worker_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/tasks"
	"onejob/worker"
)

// A task need not wait for the outcomes of others: a handler that has returned leaves its room to
// the next one. Of a replica whose outcomes do not become durable, that is true for as many
// attempts as may run at once. With a lock key the next task waits, for the key anyway.
func TestRoomIsFreeWhenTheHandlerReturns(t *testing.T) {
	t.Parallel()
	const most = 2
	for name, test := range map[string]struct {
		keys  bool
		begin int32 // how many handlers begin while no outcome becomes durable
	}{
		"without lock keys": {false, 2 * most},
		"with lock keys":    {true, most},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			var running, begun atomic.Int32
			var returns atomic.Pointer[chan struct{}]
			held := make(chan struct{})
			returns.Store(&held)
			k := tasks.Kinds{}
			tasks.Handle(k, "held", func(ctx context.Context, _ *tasks.Attempt, _ none) (none, error) {
				if n := running.Add(1); n > most {
					t.Errorf("%d handlers at once, with room for %d", n, most)
				}
				defer running.Add(-1)
				held := *returns.Load()
				begun.Add(1)
				select {
				case <-held:
				case <-ctx.Done():
				}
				return none{}, ctx.Err()
			})
			c.replica(t, "a", k, func(cfg *worker.Config) { cfg.Concurrency = most })

			// Somebody has locked the rows, so outcomes must wait.
			tx, err := c.pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = tx.Rollback(context.Background()) }()
			lockRows := func(n int32) {
				testenv.Eventually(t, maxWait, "handlers run", func() bool { return begun.Load() == n })
				if _, err := tx.Exec(t.Context(), "SELECT FROM onejob.tasks WHERE status = 'running' FOR UPDATE"); err != nil {
					t.Fatal(err)
				}
				next := make(chan struct{})
				close(*returns.Swap(&next))
			}
			c.exec(t, "INSERT INTO onejob.tasks (kind, lock_key) SELECT 'held', CASE WHEN $1 THEN 'key ' || n END FROM generate_series(1, $2) n", test.keys, 3*most)
			for n := int32(most); n <= test.begin; n += most {
				lockRows(n)
			}
			time.Sleep(500 * time.Millisecond)
			if n := begun.Load(); n != test.begin {
				t.Errorf("%d handlers have begun while no outcome was durable, want %d", n, test.begin)
			}
			if n := get[int32](t, c, "SELECT count(*)::int FROM onejob.tasks WHERE status = 'running'"); n != test.begin {
				t.Errorf("%d tasks are running, want %d", n, test.begin)
			}
			close(*returns.Load())
			if err := tx.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
			c.awaitAll(t, maxWait)
			c.noOverlaps(t)
		})
	}
}
