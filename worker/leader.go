package worker

import (
	"context"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"

	"onejob/lock"
)

// leader does what is done once for the cluster whenever this replica leads. Two leaders
// at once would do no harm: a unique index allows one occurrence per due time, and
// deletion is idempotent.
type leader struct {
	log     *zap.Logger
	leading atomic.Bool
	parts   []func(context.Context) // each runs until its context ends
}

// run leads whenever it can, until ctx ends.
func (l *leader) run(ctx context.Context, elector lock.Elector) {
	_ = lock.Lead(ctx, elector, func(ctx context.Context) error {
		l.leading.Store(true)
		defer l.leading.Store(false)
		l.log.Info("leadership_acquired")
		var wg sync.WaitGroup
		for _, part := range l.parts {
			wg.Go(func() { part(ctx) })
		}
		wg.Wait()
		l.log.Info("leadership_lost", zap.Error(context.Cause(ctx)))
		return nil
	})
}
