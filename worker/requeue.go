package worker

import (
	"maps"
	"sync"
	"time"
)

// How long a task waits that is requeued for a reason that may last: the time
// doubles each time that this replica requeues it. So another replica that can run
// the task gets its turn within seconds, while one that nobody can run moves less
// and less often.
const (
	requeueMin = time.Second
	requeueMax = 30 * time.Second

	maxRequeued      = 4096             // tasks that are remembered
	requeueForgotten = 10 * time.Minute // since a task was requeued here last
)

// requeues remembers which tasks this replica has requeued. It needs no clock but
// our own, which the age of a task would, and no column. The zero value is ready.
type requeues struct {
	mu    sync.Mutex
	tasks map[int64]requeued

	forgot time.Time // when forget looked last
}

type requeued struct {
	delay time.Duration
	at    time.Time
}

// next returns how long the task is to wait this time. Where too many tasks are
// requeued to remember them all, the others wait for the longest time.
func (r *requeues) next(id int64) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	if r.tasks == nil {
		r.tasks = map[int64]requeued{}
	}
	before, known := r.tasks[id]
	if !known && len(r.tasks) >= maxRequeued {
		r.forget(now)
	}
	if !known && len(r.tasks) >= maxRequeued {
		return requeueMax
	}
	if now.Sub(before.at) > requeueForgotten {
		before.delay = 0
	}
	delay := min(max(2*before.delay, requeueMin), requeueMax)
	r.tasks[id] = requeued{delay, now}
	return delay
}

// forget drops the tasks that have not come back: most likely they have ended. It
// looks at all of them, so it does that once a second at most.
func (r *requeues) forget(now time.Time) {
	if now.Sub(r.forgot) < time.Second {
		return
	}
	r.forgot = now
	maps.DeleteFunc(r.tasks, func(_ int64, t requeued) bool { return now.Sub(t.at) > requeueForgotten })
}
