package worker

import (
	"context"
	"time"

	"go.uber.org/zap"

	"onejob/internal/retry"
	"onejob/tasks"
)

// overlaps logs attempts that overlapped on a lock key. None are expected.
type overlaps struct {
	store   overlapStore
	every   time.Duration
	measure func(Measurement)
	log     *zap.Logger
}

type overlapStore interface {
	Overlaps(ctx context.Context, max int) (list []tasks.Overlap, total int, err error)
}

// maxOverlaps bounds how many overlaps are logged at once.
const maxOverlaps = 100

// overlapIsNew is for how long an overlap is counted by the leader that finds it.
const overlapIsNew = time.Hour

// run logs overlaps, each once while this replica leads.
func (o *overlaps) run(ctx context.Context) {
	said := map[[2]int64]bool{} // by their fences
	for ctx.Err() == nil {
		list, total, err := o.store.Overlaps(ctx, maxOverlaps)
		if err != nil && ctx.Err() == nil {
			o.log.Debug("overlap_lookup_failed", zap.Error(err))
		}
		now := map[[2]int64]bool{}
		for _, found := range list {
			id := [2]int64{found.Fence, found.OtherFence}
			if now[id] = true; said[id] {
				continue
			}
			if found.Age < overlapIsNew { // or each new leader would count the history again
				o.measure(Measurement{What: MeasureOverlap, Count: 1})
			}
			o.log.Error("overlap_found", zap.String("lock_key", found.LockKey), zap.Int64("task_id", found.Task), zap.Int64("fence", found.Fence), zap.String("by", found.Replica),
				zap.Int64("other_task_id", found.OtherTask), zap.Int64("other_fence", found.OtherFence), zap.String("other_by", found.OtherReplica),
				zap.Time("began", found.Began), zap.Duration("took", found.Ended.Sub(found.Began)), zap.Int("total", total))
		}
		if err == nil {
			said = now
		}
		retry.Pause(ctx, o.every)
	}
}
