package worker

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"onejob/boottime"
	"onejob/tasks/schedule"
)

// aheadStore has a schedule that is ahead of the clock until it is set back, and more
// pending tasks than can be read in time.
type aheadStore struct {
	tries, set atomic.Int64
	tooMany    atomic.Bool
}

func (s *aheadStore) Clock(context.Context) (now, started time.Time, err error) {
	return time.Unix(0, int64(boottime.Now())), time.Unix(1, 0), nil
}

func (s *aheadStore) AfterSetBack(context.Context) (int, error) {
	if s.tries.Add(1); s.tooMany.Load() {
		return 1, errors.New("too many")
	}
	return 0, nil
}

func (s *aheadStore) SchedulesAhead(context.Context) ([]schedule.Ahead, error) {
	if s.set.Load() > 0 {
		return nil, nil
	}
	return []schedule.Ahead{{Cron: "@hourly", Zone: "UTC", Now: time.Unix(0, 0), Next: time.Unix(1e6, 0)}}, nil
}

func (s *aheadStore) SetNext(context.Context, schedule.Ahead, time.Time) (bool, int, error) {
	s.set.Add(1)
	return true, 3, nil
}

// Pending tasks that cannot be read keep no schedule from being set back. They are
// read again less and less often, and the log says so.
func TestTooManyTasksKeepNoScheduleAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, events := observer.New(zap.DebugLevel)
		store := &aheadStore{}
		store.tooMany.Store(true)
		clock := &postgresClock{store, func() bool { return true }, &lookups{}, zap.New(core)}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); clock.run(ctx) }()

		time.Sleep(3 * time.Hour)
		synctest.Wait()
		if store.set.Load() != 1 {
			t.Errorf("schedules were set back %d times", store.set.Load())
		}
		if n := store.tries.Load(); n < 18 || n > 40 { // each ten minutes in the end
			t.Errorf("it tried %d times in three hours", n)
		}
		if n := events.FilterMessage("clock_repair_failed").Len(); int64(n) != store.tries.Load() {
			t.Errorf("clock_repair_failed was logged %d times for %d failures", n, store.tries.Load())
		}
		if log := events.FilterMessage("clock_set_back_repaired").All(); len(log) == 0 || log[0].ContextMap()["schedules"] != int64(1) {
			t.Errorf("what was repaired: %v", log)
		}

		store.tooMany.Store(false)
		time.Sleep(time.Hour)
		synctest.Wait()
		tries := store.tries.Load()
		time.Sleep(time.Hour)
		synctest.Wait()
		if store.tries.Load() != tries {
			t.Error("it repairs again what is repaired")
		}
		cancel()
		<-ended
	})
}
