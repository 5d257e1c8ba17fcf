package store

import (
	"context"

	"github.com/jackc/pgx/v5"

	"onejob/tasks"
)

// Overlaps returns the first pairs of onejob.overlaps, as many as max, the latest first,
// and how many there are. It reads the attempts that ended late, and for each the others
// of its lock key.
func (s *Store) Overlaps(ctx context.Context, max int) (list []tasks.Overlap, total int, err error) {
	list, err = fetch(ctx, s.pool, "look for overlaps", func(row pgx.CollectableRow) (o tasks.Overlap, err error) {
		return o, row.Scan(&total, &o.LockKey, &o.Task, &o.Fence, &o.Replica, &o.OtherTask, &o.OtherFence, &o.OtherReplica, &o.Began, &o.Ended, &o.Age)
	}, `
SELECT count(*) OVER (), lock_key, task_id, fence, coalesce(replica, ''), other_task_id, other_fence, coalesce(other_replica, ''), overlap_began, overlap_ended, clock_timestamp() - overlap_ended
  FROM onejob.overlaps
 ORDER BY other_fence DESC, fence DESC
 LIMIT $1`, max)
	return list, total, err
}
