package worker_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/lock/consul"
	"onejob/lock/rabbitmq"
	"onejob/tasks"
	"onejob/worker"
)

// semaphores are the cluster's limits, for a test to look at and to change.
func (c *cluster) limited(t *testing.T, name string, k tasks.Kinds, change func(*worker.Worker)) *replica {
	t.Helper()
	return c.replica(t, name, k, func(w *worker.Worker) {
		w.Limits = w.Locks.(*consul.Locker).Semaphores()
		if change != nil {
			change(w)
		}
	})
}

// inside counts who is inside of a limit, and remembers the most.
type inside struct{ now, most atomic.Int32 }

func (i *inside) visit(d time.Duration) {
	n := i.now.Add(1)
	for m := i.most.Load(); n > m && !i.most.CompareAndSwap(m, n); m = i.most.Load() {
	}
	time.Sleep(d)
	i.now.Add(-1)
}

func TestLimitHolds(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	var in inside
	k := tasks.Kinds{"noop": tasks.Noop{}}
	tasks.Handle(k, "visit", func(context.Context, *tasks.Attempt, none) (none, error) {
		in.visit(5 * time.Millisecond)
		return none{}, nil
	})
	var replicas []*replica
	for i := range 3 {
		replicas = append(replicas, c.limited(t, fmt.Sprint("r", i), k, func(w *worker.Worker) { w.LimitSlots = map[string]int{"three": 3} }))
	}
	const n = 2000
	unlimited := func() time.Duration {
		before := get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE kind = 'noop'")
		c.exec(t, `INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, $1)`, n)
		began := time.Now()
		testenv.Eventually(t, patience, "those without a limit are done", func() bool {
			return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE kind = 'noop' AND status = 'succeeded'") == before+n
		})
		return time.Since(began)
	}
	unlimited() // to warm up
	alone := unlimited()
	c.exec(t, `INSERT INTO onejob.tasks (kind, limit_name) SELECT 'visit', 'three' FROM generate_series(1, $1)`, n)
	beside := unlimited()
	began := time.Now()
	c.awaitAll(t, 3*patience)
	t.Logf("%d tasks without a limit took %v alone, and %v beside as many with a limit of 3 (ratio %.2f); those took %v more",
		n, alone, beside, beside.Seconds()/alone.Seconds(), time.Since(began))
	if most := in.most.Load(); most > 3 || most < 2 {
		t.Errorf("%d were inside at once, with a limit of 3", most)
	}
	testenv.Eventually(t, patience, "all slots are free again", func() bool {
		s, err := replicas[0].Limits.Inspect(t.Context(), "three")
		return err == nil && len(s.Holders) == 0
	})
	c.noOverlaps(t)
}

func TestLimitThatIsNotThere(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	id := c.insert(t, "kind, limit_name", "noop", "later")
	r := c.limited(t, "a", kinds(nil), nil)
	if got := r.logged(t, "limit_unknown")["limit"]; got != "later" {
		t.Errorf("reported limit %v", got)
	}
	c.await(t, c.insert(t, "kind", "noop"), "succeeded") // the others go on
	if err := r.Limits.Create(t.Context(), "later", 0); err != nil {
		t.Fatal(err)
	}
	c.await(t, c.insert(t, "kind", "noop"), "succeeded")
	if got := get[string](t, c, "SELECT status FROM onejob.tasks WHERE id = $1", id); got != "pending" {
		t.Errorf("with 0 slots the task is %s", got)
	}
	if err := r.Limits.Resize(t.Context(), "later", 1); err != nil {
		t.Fatal(err)
	}
	c.await(t, id, "succeeded")
	if n := r.events.FilterMessage("limit_unknown").Len(); n != 1 {
		t.Errorf("reported %d times", n)
	}
}

func TestKindWithALimit(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	var in inside
	k := tasks.Kinds{}
	tasks.Handle(k, "visit", func(context.Context, *tasks.Attempt, none) (none, error) {
		in.visit(20 * time.Millisecond)
		return none{}, nil
	})
	change := func(w *worker.Worker) {
		w.LimitSlots, w.KindLimits = map[string]int{"one": 1}, map[string]string{"visit": "one"}
	}
	c.limited(t, "a", k, change)
	c.limited(t, "b", k, change)
	c.exec(t, `INSERT INTO onejob.tasks (kind) SELECT 'visit' FROM generate_series(1, 30)`)
	c.awaitAll(t, patience)
	if most := in.most.Load(); most != 1 {
		t.Errorf("%d were inside at once, with a limit of 1", most)
	}
}

// A replica that holds a slot dies: its slot and its task are taken over.
func TestSlotOfADeadReplicaComesFree(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	began := make(chan string, 10)
	change := func(w *worker.Worker) { w.LimitSlots = map[string]int{"one": 1} }
	a := c.limited(t, "a", kinds(began), change)
	id := c.insert(t, "kind, limit_name", "wait", "one")
	<-began
	b := c.limited(t, "b", kinds(began), change)
	behind := c.insert(t, "kind, limit_name", "noop", "one")
	if _, err := c.kv.Client.Session().Destroy(a.locks.Session(), nil); err != nil {
		t.Fatal(err)
	}
	<-began // by either of them
	c.exec(t, "SELECT onejob.cancel($1)", id)
	c.await(t, id, "cancelled")
	c.await(t, behind, "succeeded")
	_ = b
}

func TestLimitHoldsOnRabbitMQ(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	vhost := testenv.RabbitMQ(t)
	var in inside
	k := tasks.Kinds{}
	tasks.Handle(k, "visit", func(context.Context, *tasks.Attempt, none) (none, error) {
		in.visit(5 * time.Millisecond)
		return none{}, nil
	})
	for i := range 2 {
		limits, err := rabbitmq.New(rabbitmq.Config{URL: vhost.URL, Cooldown: time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- limits.Run(ctx) }()
		t.Cleanup(func() { cancel(); <-done })
		c.replica(t, fmt.Sprint("r", i), k, func(w *worker.Worker) {
			w.Limits, w.LimitSlots = limits, map[string]int{"two": 2}
		})
	}
	c.exec(t, `INSERT INTO onejob.tasks (kind, limit_name) SELECT 'visit', 'two' FROM generate_series(1, 60)`)
	c.awaitAll(t, patience)
	if most := in.most.Load(); most > 2 {
		t.Errorf("%d were inside at once, with a limit of 2", most)
	}
	c.noOverlaps(t)
}
