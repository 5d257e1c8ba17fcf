package worker

import (
	"context"
	"time"

	"onejob/tasks"
)

// cancelStore tells which tasks are to be cancelled.
type cancelStore interface {
	CancelRequests(ctx context.Context, session string) ([]int64, error)
}

// watchCancels cancels running tasks on request, until ctx ends.
func (w *Worker) watchCancels(ctx context.Context) {
	for ctx.Err() == nil {
		select {
		case <-w.look:
		case <-time.After(time.Second):
		case <-ctx.Done():
			return
		}
		session := w.cfg.Locks.Session()
		if session == "" || w.running.count() == 0 {
			continue
		}
		ids, err := w.cfg.Store.CancelRequests(ctx, session)
		w.lookups.saw("cancel_requests", err)
		for _, id := range ids {
			w.running.cancel(id, tasks.ErrCancelled)
		}
	}
}
