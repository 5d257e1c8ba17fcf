package worker_test

import (
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
	claims := c.countClaims(t, replicas, func(cfg *worker.Config) { cfg.Poll, cfg.Concurrency = "@every 1s", 1 })
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
	if late := get[float64](t, c, "SELECT extract(epoch FROM min(started_at - run_at))::float8 FROM onejob.tasks"); late > 3 {
		t.Errorf("the first of the tasks began %.1f s after it came due", late)
	}
}
