package worker_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"onejob/tasks"
	"onejob/worker"
)

// weighed knows how long the payloads are that a replica holds: of tasks that it has
// claimed, and neither completed nor given back.
type weighed struct {
	worker.Store

	mu        sync.Mutex
	held      map[int64]int // by fence
	now, most int
}

func (w *weighed) Claim(ctx context.Context, c tasks.Claim) (tasks.Claimed, error) {
	claimed, err := w.Store.Claim(ctx, c)
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, t := range claimed.Tasks {
		w.held[t.Fence] = len(t.Payload)
		w.now += len(t.Payload)
	}
	w.most = max(w.most, w.now)
	return claimed, err
}

func (w *weighed) Complete(ctx context.Context, e tasks.Completion) error {
	w.drop(e.Fence)
	return w.Store.Complete(ctx, e)
}

func (w *weighed) Requeue(ctx context.Context, t *tasks.Task, delay time.Duration) error {
	w.drop(t.Fence)
	return w.Store.Requeue(ctx, t, delay)
}

func (w *weighed) drop(fence int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.now -= w.held[fence]
	delete(w.held, fence)
}

// few lets handlers wait for each other.
type few struct {
	mu         sync.Mutex
	begun, now int
	changed    chan struct{} // closed, and another one put there, when one begins
}

// stay returns when more than so many are inside, or all have begun.
func (f *few) stay(ctx context.Context, most, all int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.begun++
	f.now++
	close(f.changed)
	f.changed = make(chan struct{})
	for f.now <= most && f.begun < all && ctx.Err() == nil {
		changed := f.changed
		f.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		}
		f.mu.Lock()
	}
	f.now--
}

// Payloads that a replica holds take no more memory than PayloadMemory allows and one
// portion, in which payloads are read. What there is no room for waits, and uses up no
// attempt.
func TestPayloadMemoryIsBounded(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	const n, memory, portion = 40, 8 << 20, 1<<20 + 100
	c.exec(t, `INSERT INTO onejob.tasks (kind, payload)
SELECT 'carry', to_jsonb((SELECT string_agg(md5(random()::text || i || j), '') FROM generate_series(1, 32768) j)) FROM generate_series(1, $1) i`, n)
	f := few{changed: make(chan struct{})}
	k := tasks.Kinds{}
	tasks.Handle(k, "carry", func(ctx context.Context, _ *tasks.Attempt, _ string) (none, error) {
		f.stay(ctx, 3, n) // beside three, there is room for the longest payload
		return none{}, nil
	})
	w := &weighed{held: map[int64]int{}}
	c.replica(t, "a", k, func(r *worker.Config) {
		w.Store = r.Store
		r.Store, r.Concurrency, r.PayloadMemory = w, n, memory
	})
	c.awaitAll(t, 5*maxWait)
	if got := get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'succeeded' AND attempt = 1"); got != n {
		t.Errorf("%d of %d tasks succeeded in their first attempt", got, n)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.most > memory+portion || w.most < memory/2 {
		t.Errorf("the replica held %d bytes of payloads at once, want at least %d and at most %d", w.most, memory/2, memory+portion)
	}
}
