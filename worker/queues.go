package worker

import (
	"context"
	"time"

	"go.uber.org/zap"

	"onejob/internal/retry"
)

// queues watches for queues that nobody serves.
type queues struct {
	store   queueStore
	lookups *lookups
	log     *zap.Logger
}

type queueStore interface {
	UnservedQueues(ctx context.Context, n int) ([]string, error)
}

// run logs queues in which tasks are due and that no replica serves, each once until it is
// served, and no more than maxReported at a time: anybody who enqueues chooses their names.
func (q *queues) run(ctx context.Context) {
	said := map[string]bool{}
	var pace pace
	for ctx.Err() == nil {
		began := time.Now()
		list, err := q.store.UnservedQueues(ctx, maxReported)
		q.lookups.saw("queues_unserved", err)
		now := map[string]bool{}
		for _, queue := range list {
			if now[queue] = true; !said[queue] {
				q.log.Warn("queue_unserved", zap.String("queue", queue))
			}
		}
		if err == nil {
			said = now
		}
		retry.Pause(ctx, pace.rest(10*time.Second, time.Since(began)))
	}
}
