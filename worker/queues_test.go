package worker_test

import (
	"context"
	"sync/atomic"
	"testing"

	"onejob/internal/testenv"
	"onejob/tasks"
	"onejob/worker"
)

// A paused queue stops on all replicas, and no other one does. When it is resumed, the
// replicas are woken: here nothing else would wake them for an hour.
func TestPausedQueue(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	for _, name := range []string{"one", "two"} {
		c.replica(t, name, tasks.Kinds{"noop": tasks.Noop{}}, func(w *worker.Config) { w.Poll = "@every 1h" })
	}
	c.await(t, c.insert(t, "kind, queue", "noop", "mail"), "succeeded")
	c.exec(t, "SELECT onejob.pause_queue('mail', 'a test')")
	var waiting []int64
	for range 20 {
		waiting = append(waiting, c.insert(t, "kind, queue, priority", "noop", "mail", 10))
		c.await(t, c.insert(t, "kind, queue", "noop", "other"), "succeeded")
	}
	if n := get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE queue = 'mail' AND status = 'pending'"); n != len(waiting) {
		t.Fatalf("%d of %d tasks of the paused queue wait", n, len(waiting))
	}
	c.exec(t, "SELECT onejob.resume_queue('mail')")
	for _, id := range waiting {
		c.await(t, id, "succeeded")
	}
	c.noOverlaps(t)
}

// looking counts how often somebody looked for queues that nobody serves.
type looking struct {
	worker.Store
	n atomic.Int32
}

func (l *looking) UnservedQueues(ctx context.Context, n int) ([]string, error) {
	list, err := l.Store.UnservedQueues(ctx, n)
	l.n.Add(1)
	return list, err
}

// The leader reports, once, a queue in which tasks are due and that no replica serves.
func TestUnservedQueueIsReported(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.exec(t, "INSERT INTO onejob.tasks (kind, queue, run_at) VALUES ('noop', 'nightly', now() - interval '1 hour')")
	var looked looking
	r := c.replica(t, "one", tasks.Kinds{"noop": tasks.Noop{}}, func(w *worker.Config) {
		w.Queues = []string{"mail"}
		looked.Store, w.Store = w.Store, &looked
	})
	testenv.Eventually(t, maxWait, "the queue is reported", func() bool { return r.events.FilterMessage("queue_unserved").Len() > 0 })
	looks := looked.n.Load()
	testenv.Eventually(t, maxWait, "the leader has looked again", func() bool { return looked.n.Load() > looks+1 })
	if n := r.events.FilterMessage("queue_unserved").Len(); n != 1 {
		t.Errorf("the queue is reported %d times", n)
	}
}
