package worker

import (
	"context"
	"time"

	"go.uber.org/zap"

	"onejob/internal/retry"
	"onejob/tasks"
)

// retention deletes what has been kept for long enough.
type retention struct {
	store         retentionStore
	keepSucceeded time.Duration
	keepFailed    time.Duration // also for cancelled tasks
	every         time.Duration
	log           *zap.Logger
}

// mostNamed is of how many rows that cannot be claimed, taken over or deleted the log has the IDs, each time.
const mostNamed = 10

type retentionStore interface {
	Purge(ctx context.Context, status tasks.Status, keep time.Duration, n int) (deleted int, more bool, refused []tasks.RowError, err error)
	PurgeOccurrences(ctx context.Context, keep time.Duration, n int) (int, error)
	PurgeActions(ctx context.Context, keep time.Duration, n int) (int, error)
}

// run deletes finished tasks past their retention, in small batches with pauses,
// so that no snapshot is held for long and waiting tasks are not delayed. What takes longer than
// every, such as many rows that cannot be deleted, is interrupted by the rest.
func (r *retention) run(ctx context.Context) {
	const batch = 1000
	interrupted := false
	purge := func(what string, f func() (n int, more bool, err error)) {
		total := 0
		for began := time.Now(); ctx.Err() == nil; retry.Pause(ctx, 50*time.Millisecond) {
			n, more, err := f()
			if err != nil {
				if ctx.Err() == nil {
					r.log.Warn("retention_failed", zap.Error(err))
				}
				return
			}
			total += n
			if !more {
				break
			}
			if time.Since(began) >= r.every {
				interrupted = true
				break
			}
		}
		if total > 0 {
			r.log.Info("retention_deleted", zap.String("what", what), zap.Int("rows", total))
		}
	}
	for ctx.Err() == nil {
		interrupted = false
		for status, keep := range map[tasks.Status]time.Duration{
			tasks.StatusSucceeded: r.keepSucceeded, tasks.StatusFailed: r.keepFailed, tasks.StatusCancelled: r.keepFailed,
		} {
			left := 0
			purge(string(status), func() (int, bool, error) {
				n, more, refused, err := r.store.Purge(ctx, status, keep, batch)
				logRefusedRows(r.log, refused[:min(len(refused), max(0, mostNamed-left))])
				left += len(refused)
				return n, more, err
			})
			if left > mostNamed {
				r.log.Error("retention_refused", zap.String("what", string(status)), zap.Int("rows", left))
			}
		}
		purge("occurrences", func() (int, bool, error) {
			n, err := r.store.PurgeOccurrences(ctx, max(r.keepSucceeded, r.keepFailed), batch)
			return n, n == batch, err
		})
		purge("actions", func() (int, bool, error) {
			n, err := r.store.PurgeActions(ctx, max(r.keepSucceeded, r.keepFailed), batch)
			return n, n == batch, err
		})
		if !interrupted {
			retry.Pause(ctx, r.every)
		}
	}
}
