package worker

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"onejob/boottime"
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

	heardAt atomic.Int64  // boottime.Instant of the last heartbeat that the database has acknowledged
	news    chan struct{} // there was one
}

// unheard is for how long the database may acknowledge no heartbeat of a leader before it resigns.
const unheard = 10 * time.Second

var errUnheard = errors.New("the database has acknowledged no heartbeat for 10 s")

// heard says that the database has acknowledged a heartbeat that was sent at the given moment.
func (l *leader) heard(sent boottime.Instant) {
	l.heardAt.Store(int64(sent))
	notify(l.news)
}

// left returns how long this replica may lead unless there is another heartbeat; zero or less if it may not.
func (l *leader) left() time.Duration {
	at := l.heardAt.Load()
	if at == 0 {
		return 0
	}
	return unheard - boottime.Now().Sub(boottime.Instant(at))
}

// run leads whenever it can and the database hears this replica, until ctx ends.
func (l *leader) run(ctx context.Context, elector lock.Elector) {
	for ctx.Err() == nil {
		if l.left() <= 0 {
			select {
			case <-l.news:
			case <-ctx.Done():
			}
			continue
		}
		fit, resign := context.WithCancelCause(ctx)
		var watch sync.WaitGroup
		watch.Go(func() {
			for left := l.left(); left > 0 && fit.Err() == nil; left = l.left() {
				select {
				case <-time.After(left):
				case <-fit.Done():
				}
			}
			resign(errUnheard)
		})
		l.lead(fit, elector)
		resign(nil)
		watch.Wait()
	}
}

// lead leads whenever it can, until ctx ends.
func (l *leader) lead(ctx context.Context, elector lock.Elector) {
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
