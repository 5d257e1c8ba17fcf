package worker_test

import (
	"context"
	"sync"
	"testing"

	"onejob/tasks"
	"onejob/worker"
)

// weights is what payloads weigh whose tasks are at work.
type weights struct {
	mu              sync.Mutex
	begun, now, max int
	changed         chan struct{} // closed, and another one put there, when one begins
}

// carry stays until so much is at work at once that no more can be claimed, or until
// all tasks have begun.
func (w *weights) carry(ctx context.Context, bytes, enough, all int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.begun++
	w.now += bytes
	w.max = max(w.max, w.now)
	close(w.changed)
	w.changed = make(chan struct{})
	for w.now <= enough && w.begun < all && ctx.Err() == nil {
		changed := w.changed
		w.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		}
		w.mu.Lock()
	}
	w.now -= bytes
}

// Payloads that are at work take no more memory than PayloadMemory allows and one
// portion, in which payloads are read. What there is no room for waits, and uses up no
// attempt.
func TestPayloadMemoryIsBounded(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	const n, memory, portion = 40, 8 << 20, 1<<20 + 100
	c.exec(t, `INSERT INTO onejob.tasks (kind, payload)
SELECT 'carry', to_jsonb((SELECT string_agg(md5(random()::text || i || j), '') FROM generate_series(1, 32768) j)) FROM generate_series(1, $1) i`, n)
	w := weights{changed: make(chan struct{})}
	k := tasks.Kinds{}
	tasks.Handle(k, "carry", func(ctx context.Context, _ *tasks.Attempt, payload string) (none, error) {
		w.carry(ctx, len(payload)+len(`""`), memory-worker.MaxPayload, n)
		return none{}, nil
	})
	c.replica(t, "a", k, func(w *worker.Worker) { w.Concurrency, w.PayloadMemory = n, memory })
	c.awaitAll(t, 5*patience)
	if got := get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'succeeded' AND attempt = 1"); got != n {
		t.Errorf("%d of %d tasks succeeded in their first attempt", got, n)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.max > memory+portion || w.max <= memory-worker.MaxPayload {
		t.Errorf("payloads of %d bytes were at work at once, want more than %d and at most %d", w.max, memory-worker.MaxPayload, memory+portion)
	}
}
