package worker_test

import (
	"fmt"
	"sync/atomic"
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
	const replicas, watch = 10, 10
	var claims atomic.Int64
	for i := range replicas {
		c.replica(t, fmt.Sprint("r", i), kinds(nil), func(cfg *worker.Config) {
			cfg.Poll, cfg.Concurrency = "@every 1s", 1
			cfg.Measure = func(m worker.Measurement) {
				if m.What == worker.MeasureClaim {
					claims.Add(1)
				}
			}
		})
	}
	testenv.Eventually(t, maxWait, "all replicas know each other", func() bool {
		return get[int](t, c, "SELECT count(*) FROM onejob.replicas WHERE state = 'working' AND heartbeat_at > (SELECT max(began_at) FROM onejob.replicas)") == replicas
	})
	time.Sleep(5 * time.Second) // they listen by then
	began, before := time.Now(), claims.Load()
	time.Sleep(watch * time.Second)
	// Two a second, and one each 5 s of each replica, where every replica had one a second.
	n, seconds := claims.Load()-before, time.Since(began).Seconds()
	if most := int64(seconds * replicas * 3 / 4); n > most || n < int64(seconds/2) {
		t.Errorf("%d claims in %.0f s, want %.0f to %d", n, seconds, seconds/2, most)
	}
	// More than one replica can take, and than the two that look: they wake the others.
	c.exec(t, "INSERT INTO onejob.tasks (kind, run_at) SELECT 'noop', now() + interval '3 seconds' FROM generate_series(1, $1)", 3*replicas)
	testenv.Eventually(t, maxWait, "all tasks are done", func() bool {
		return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'succeeded'") == 3*replicas
	})
	if late := get[float64](t, c, "SELECT extract(epoch FROM min(started_at - run_at))::float8 FROM onejob.tasks"); late > 3 {
		t.Errorf("the first of the tasks began %.1f s after it came due", late)
	}
}
