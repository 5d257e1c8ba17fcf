package worker

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"onejob/boottime"
	"onejob/internal/retry"
	"onejob/lock"
)

// leader does what is done once for the cluster whenever this replica leads. Two leaders
// at once would do no harm: a unique index allows one occurrence per due time, and
// deletion is idempotent.
//
// All of that is work on the database. So a replica leads only while it reaches the database: its
// session in the locks' backend may live for hours after it was cut off from Postgres alone, or with
// a server that is not the cluster's.
type leader struct {
	log     *zap.Logger
	leading atomic.Bool
	parts   []func(context.Context) // each runs until its context ends

	reach func(context.Context) error // asks the database
}

// unreached is for how long a leader may fail to reach the database before it resigns.
const unreached = 10 * time.Second

var errUnreached = errors.New("the database has not answered for 10 s")

// run leads whenever it can, until ctx ends. It does not try while the database cannot be reached.
func (l *leader) run(ctx context.Context, elector lock.Elector) {
	for ctx.Err() == nil {
		if l.reach(ctx) != nil {
			retry.Pause(ctx, time.Second)
			continue
		}
		_ = lock.Lead(ctx, elector, l.lead)
	}
}

// lead leads until ctx ends, or until the database cannot be reached.
func (l *leader) lead(ctx context.Context) error {
	if err := l.reach(ctx); err != nil { // it may have waited for long
		return err
	}
	l.leading.Store(true)
	defer l.leading.Store(false)
	l.log.Info("leadership_acquired")
	work, resign := context.WithCancelCause(ctx)
	defer resign(nil)
	var wg sync.WaitGroup
	wg.Go(func() {
		for last := boottime.Now(); work.Err() == nil; retry.Pause(work, time.Second) {
			asking, stop := context.WithTimeout(work, unreached)
			err := l.reach(asking)
			stop()
			switch now := boottime.Now(); {
			case err == nil:
				last = now
			case now.Sub(last) >= unreached:
				resign(errUnreached)
			}
		}
	})
	for _, part := range l.parts {
		wg.Go(func() { part(work) })
	}
	wg.Wait()
	l.log.Info("leadership_lost", zap.Error(context.Cause(work)))
	return nil
}
