package worker_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/tasks"
	"onejob/worker"
)

// listening waits until all replicas hear notifications, and each knows all others.
func (c *cluster) listening(t *testing.T, n int) {
	t.Helper()
	listen := map[int32]bool{} // backends that have said so, or were asked since whether they live
	testenv.Eventually(t, maxWait, "all replicas listen, and know each other", func() bool {
		for _, pid := range get[[]int32](t, c, `SELECT coalesce(array_agg(pid), '{}') FROM pg_stat_activity WHERE datname = current_database() AND (query LIKE 'LISTEN%' OR query = '-- ping')`) {
			listen[pid] = true
		}
		return len(listen) >= n &&
			get[int](t, c, `SELECT count(*) FROM onejob.replicas WHERE state = 'working' AND heartbeat_at > (SELECT max(began_at) FROM onejob.replicas)`) == n
	})
}

// countClaims starts n replicas and counts their claims. It also calls their Measure, if change
// sets one.
func (c *cluster) countClaims(t *testing.T, n int, change func(*worker.Config)) *atomic.Int64 {
	t.Helper()
	var claims atomic.Int64
	for i := range n {
		c.replica(t, fmt.Sprint("r", i), kinds(nil), func(cfg *worker.Config) {
			change(cfg)
			also := cfg.Measure
			cfg.Measure = func(m worker.Measurement) {
				if m.What == worker.MeasureClaim {
					claims.Add(1)
				}
				if also != nil {
					also(m)
				}
			}
		})
	}
	return &claims
}

// Of ten replicas that hear of a task, few claim it.
func TestAnInsertWakesFewReplicas(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	const replicas, inserts = 10, 50
	claims := c.countClaims(t, replicas, func(cfg *worker.Config) { cfg.Poll = "@every 1h" })
	c.listening(t, replicas)
	began, before := time.Now(), claims.Load()
	for range inserts {
		c.insert(t, "kind", "noop")
		time.Sleep(20 * time.Millisecond)
	}
	testenv.Eventually(t, maxWait, "all tasks are done", func() bool {
		return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'succeeded'") == inserts
	})
	// Two for each INSERT, and one more for a task that has ended; one a second of each replica.
	seconds := int64(time.Since(began)/time.Second) + 1
	if n, most := claims.Load()-before, 4*inserts+replicas*seconds; n > most {
		t.Errorf("%d claims for %d INSERTs in %d s, want %d at the most", n, inserts, seconds, most)
	}
	if n := get[int](t, c, "SELECT count(DISTINCT replica) FROM onejob.attempts"); n < replicas/2 {
		t.Errorf("%d of %d replicas did something", n, replicas)
	}
}

// Attempts that end one by one cost no claim each, where nothing else is due. One that ends
// while another task waits for its lock key does, and so does each one where notifications do
// not tell of what is due.
func TestClaimsAfterAttempts(t *testing.T) {
	t.Parallel()
	for name, deaf := range map[string]bool{"with notifications": false, "without": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			const slots = 60
			began, release, key := make(chan struct{}, slots), make(chan struct{}), make(chan struct{})
			held := tasks.Kinds{"noop": tasks.Noop{}}
			tasks.Handle(held, "held", func(ctx context.Context, a *tasks.Attempt, _ none) (none, error) {
				began <- struct{}{}
				until := release
				if a.LockShared {
					until = key
				}
				select {
				case <-until:
				case <-ctx.Done():
				}
				return none{}, nil
			})
			claims := c.countClaims(t, 1, func(cfg *worker.Config) {
				cfg.Kinds, cfg.Poll, cfg.PollOnly, cfg.Concurrency = held, "@every 1h", deaf, 2*slots
			})
			if !deaf {
				c.listening(t, 1)
			}
			c.exec(t, "INSERT INTO onejob.tasks (kind, lock_key) SELECT 'held', CASE i WHEN 1 THEN 'k' END FROM generate_series(1, $1) i", slots)
			for range slots {
				<-began
			}
			waits := c.insert(t, "kind, lock_key", "noop", "k")
			c.await(t, c.insert(t, "kind", "noop"), "succeeded") // a claim has passed the one that waits
			before := claims.Load()
			for i := range slots - 1 {
				release <- struct{}{}
				testenv.Eventually(t, maxWait, "another one is done", func() bool {
					return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'succeeded'") >= i+2
				})
			}
			if n := claims.Load() - before; !deaf && n > slots/4 || deaf && n < slots/2 {
				t.Errorf("%d claims for %d attempts that ended", n, slots-1)
			}
			close(key)
			c.await(t, waits, "succeeded")
		})
	}
}

// Many tasks of one INSERT keep all replicas busy, without a poll.
func TestManyTasksWakeAllReplicas(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	const replicas, slots = 6, 3
	began := make(chan string, 100)
	for i := range replicas {
		c.replica(t, fmt.Sprint("r", i), kinds(began), func(cfg *worker.Config) { cfg.Poll, cfg.Concurrency = "@every 1h", slots })
	}
	c.listening(t, replicas)
	c.exec(t, "INSERT INTO onejob.tasks (kind) SELECT 'wait' FROM generate_series(1, $1)", 2*replicas*slots)
	testenv.Eventually(t, maxWait, "all slots are taken", func() bool {
		return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'running'") == replicas*slots
	})
	c.exec(t, "UPDATE onejob.tasks SET cancel_requested = true WHERE status IN ('pending', 'running')")
}

// A task does not wait for a replica that has been cut off, and that the others still count on.
func TestAReplicaThatIsCutOffKeepsNoTaskWaiting(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	for i := range 2 {
		c.replica(t, fmt.Sprint("r", i), kinds(nil), func(cfg *worker.Config) { cfg.Poll = "@every 1h" })
	}
	behind, toPostgres, _ := c.behind(t)
	behind.replica(t, "cut off", kinds(nil), func(cfg *worker.Config) { cfg.Poll = "@every 1h" })
	c.listening(t, 3)
	toPostgres.Cut()
	defer toPostgres.Heal()
	for range 20 {
		c.insert(t, "kind", "noop")
	}
	// A claim that it had sent before may have found some of them.
	testenv.Eventually(t, maxWait, "all tasks are done that it has not claimed", func() bool {
		return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'succeeded' OR replica = 'cut off'") == 20
	})
	if n := get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'succeeded'"); n == 0 {
		t.Error("it has claimed all")
	}
}
