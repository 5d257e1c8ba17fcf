package worker

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"onejob/tasks/schedule"
)

// idleSchedules are schedules of which one is always about to come due, and never is.
type idleSchedules struct {
	scheduleStore
	rounds int
	most   int
	stop   func()
}

func (s *idleSchedules) DueSchedules(context.Context, []string) (now time.Time, due []schedule.Due, err error) {
	if s.rounds++; s.rounds == s.most {
		s.stop() // time in the bubble stands still for one that never sleeps
	}
	return time.Now(), nil, nil
}

func (s *idleSchedules) UntilNextSchedule(context.Context, time.Duration, []string) (time.Duration, error) {
	return 0, nil
}

func (s *idleSchedules) SchedulesInZones(context.Context, int64) ([]schedule.Ahead, error) {
	return nil, nil
}

func TestLeaderDoesNotSpin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		store := &idleSchedules{most: 1000, stop: cancel}
		(&schedules{store, func() bool { return true }, func(Measurement) {}, zap.NewNop()}).run(ctx)
		if store.rounds > 101 {
			t.Errorf("it looked %d times in a second", store.rounds)
		}
	})
}
