package worker

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"onejob/boottime"
	"onejob/internal/retry"
	"onejob/tasks/schedule"
)

const (
	lookAtClock = time.Second

	// clockStep is by how much Postgres' clock must have moved against this machine's
	// between two looks to have been set. A clock that is adjusted runs less than a
	// thousandth faster or slower.
	clockStep = 2 * time.Second

	// repairPause is the longest pause before a repair that failed is tried again. It reads all
	// pending tasks, which may take longer than a statement may.
	repairPause = 10 * time.Minute
)

// postgresClock watches the clock of Postgres.
type postgresClock struct {
	store   clockStore
	ready   func() bool // there is a server that is known to be the database
	lookups *lookups
	log     *zap.Logger
}

type clockStore interface {
	Clock(ctx context.Context) (now, started time.Time, err error)
	AfterSetBack(ctx context.Context) (due int, err error)
	SchedulesAhead(ctx context.Context) ([]schedule.Ahead, error)
	SetNext(ctx context.Context, a schedule.Ahead, next time.Time) (set bool, forgotten int, err error)
}

// run repairs what was written by a clock of Postgres' that was ahead, when it has
// been set back: tasks that were to run at once would wait until it is there again, and
// schedules would be silent. It looks at what is there when this replica begins to lead,
// whenever it has seen a step, and when Postgres was started, or is another server. A step
// forward needs no repair: due times that were passed over are missed ones.
func (c *postgresClock) run(ctx context.Context) {
	var repair bool
	var pause, left time.Duration // after a repair that failed, and what is left of that
	var ahead time.Duration       // of this machine's time since its start
	var of time.Time              // when the server was started whose clock that was
	for ; ctx.Err() == nil; retry.Pause(ctx, lookAtClock) {
		if !c.ready() {
			continue
		}
		asked := boottime.Now()
		now, started, err := c.store.Clock(ctx)
		c.lookups.saw("clock", err)
		if err != nil {
			continue
		}
		took := boottime.Now().Sub(asked)
		is := time.Duration(now.UnixNano()) - time.Duration(asked)
		switch step := is - ahead; {
		case !started.Equal(of): // another server, or the same one anew: its clock may be behind
			repair, pause, left = true, 0, 0
		case step < -clockStep || step > clockStep+took:
			c.log.Warn("postgres_clock_set", zap.Duration("by", step.Round(time.Millisecond)), zap.Time("to", now))
			repair, pause, left = true, 0, 0
		}
		ahead, of = is, started
		if repair {
			if left -= lookAtClock; left > 0 {
				continue
			}
			err := c.afterSetBack(ctx)
			repair = err != nil
			if err != nil && ctx.Err() == nil {
				pause = min(max(2*pause, lookAtClock), repairPause)
				left = pause
				c.log.Warn("clock_repair_failed", zap.Duration("in", pause), zap.Error(err))
			}
		}
	}
}

// afterSetBack makes things as if the clock had not been ahead, as far as that can be had.
func (c *postgresClock) afterSetBack(ctx context.Context) error {
	var errs []error
	due, err := c.store.AfterSetBack(ctx)
	errs = append(errs, err) // schedules do not depend on tasks
	list, err := c.store.SchedulesAhead(ctx)
	errs = append(errs, err)
	pulled, forgotten := 0, 0
	for _, a := range list {
		s, err := schedule.Parse(a.Cron, a.Zone)
		if err != nil {
			continue // the next leader may know the zone
		}
		next := a.From(s)
		if next.IsZero() || !next.Before(a.Next) {
			continue
		}
		set, n, err := c.store.SetNext(ctx, a, next)
		if err != nil { // somebody has locked the row, perhaps: the others do not wait for that
			errs = append(errs, err)
		}
		if set {
			pulled++
			forgotten += n
		}
	}
	if due+forgotten+pulled > 0 {
		c.log.Warn("clock_set_back_repaired", zap.Int("tasks", due), zap.Int("due_times", forgotten), zap.Int("schedules", pulled))
	}
	return errors.Join(errs...)
}
