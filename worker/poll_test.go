package worker_test

import (
	"sync"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/worker"
)

// Of ten replicas with nothing to do few look at each poll, and what comes due without a
// notification is found as soon as before.
func TestIdleReplicasPollInTurns(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	const replicas, watch = 10, 10 * time.Second
	type span struct{ from, to time.Time }
	var mu sync.Mutex
	var vain []span // of the claims that brought nothing
	claims := c.countClaims(t, replicas, func(cfg *worker.Config) {
		cfg.Poll, cfg.Concurrency = "@every 1s", 1
		cfg.Measure = func(m worker.Measurement) {
			if m.What == worker.MeasureClaim && m.Count == 0 {
				now := time.Now()
				mu.Lock()
				defer mu.Unlock()
				vain = append(vain, span{now.Add(-m.Took), now})
			}
		}
	})
	began, before := time.Now(), claims.Load()
	// Two a second, and one each 5 s of each replica, where every replica had one a second. That
	// begins when all know each other and have heard that notifications come.
	testenv.Eventually(t, maxWait, "the replicas claim in turns", func() bool {
		if time.Since(began) < watch {
			return false
		}
		n, seconds := claims.Load()-before, time.Since(began).Seconds()
		t.Logf("%d claims in %.0f s", n, seconds)
		began, before = time.Now(), claims.Load()
		return n <= int64(seconds*replicas*3/4) && n >= int64(seconds/2)
	})
	// More than one replica can take, and than the two that look: they wake the others.
	c.exec(t, "INSERT INTO onejob.tasks (kind, run_at) SELECT 'noop', now() + interval '3 seconds' FROM generate_series(1, $1)", 3*replicas)
	testenv.Eventually(t, maxWait, "all tasks are done", func() bool {
		return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'succeeded'") == 3*replicas
	})
	// On a slow machine polls are late, and all of them are: what counts is that they do not pass by
	// what has come due.
	due, first := get[time.Time](t, c, "SELECT min(run_at) FROM onejob.tasks"), get[time.Time](t, c, "SELECT min(started_at) FROM onejob.tasks")
	passed := 0
	mu.Lock()
	defer mu.Unlock()
	for _, claim := range vain {
		if claim.from.After(due) && claim.to.Before(first) {
			passed++
		}
	}
	t.Logf("the first of the tasks began %v after it came due", first.Sub(due))
	if passed > replicas/2 {
		t.Errorf("%d claims in vain after the tasks came due and before the first began", passed)
	}
}
