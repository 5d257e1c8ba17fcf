package worker

import (
	"context"
	"time"

	"go.uber.org/zap"

	"onejob/internal/retry"
	"onejob/tasks"
)

// snapshots watches for transactions that hold back vacuum.
type snapshots struct {
	store snapshotStore
	age   time.Duration // that is long
	log   *zap.Logger
}

type snapshotStore interface {
	HeldSnapshots(ctx context.Context, longerThan time.Duration) ([]tasks.HeldSnapshot, error)
}

// sayHeldEvery is how often the same held snapshot is logged.
const sayHeldEvery = 10 * time.Minute

// run logs transactions that have held back vacuum for long. Postgres does
// not report them, and when claims become slow the cause may be hours old.
func (s *snapshots) run(ctx context.Context) {
	type held struct {
		what, name string
		pid        int
	}
	said := map[held]time.Time{}
	for ctx.Err() == nil {
		list, err := s.store.HeldSnapshots(ctx, s.age)
		if err != nil && ctx.Err() == nil {
			s.log.Debug("snapshot_lookup_failed", zap.Error(err))
		}
		now := map[held]time.Time{}
		for _, h := range list {
			id := held{h.What, h.Name, h.PID}
			at, known := said[id]
			if !known || time.Since(at) >= sayHeldEvery {
				at = time.Now()
				s.log.Warn("snapshot_held", zap.String("what", h.What), zap.Int("pid", h.PID), zap.String("name", h.Name), zap.String("user", h.User),
					zap.String("application", h.Application), zap.Duration("age", h.Age), zap.Int("behind", h.Behind))
			}
			now[id] = at
		}
		if err == nil {
			said = now // forgets those that have ended
		}
		retry.Pause(ctx, min(s.age, time.Minute))
	}
}
