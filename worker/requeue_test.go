package worker

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"onejob/lock"
	"onejob/tasks"
)

// requeueRecorder records how tasks are requeued.
type requeueRecorder struct {
	Store  // what is not overridden is not called
	delays []time.Duration
}

func (s *requeueRecorder) Requeue(_ context.Context, _ *tasks.Task, delay time.Duration) error {
	s.delays = append(s.delays, delay)
	return nil
}

// A task whose lock somebody else holds is looked at less and less often, and reported
// once. The delay is shortened by up to a fifth, so that tasks do not come in step.
func TestTaskWhoseLockIsHeldWaitsLongerEachTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, events := observer.New(zap.DebugLevel)
		db := &requeueRecorder{}
		w := Worker{cfg: Config{Store: db, Log: zap.New(core)}, shutdown: shutdown{giveUp: t.Context(), writing: t.Context()}}
		task := &tasks.Task{ID: 7, LockKey: "k", Attempt: 1, Fence: 1}
		for i, seconds := range []int{1, 2, 4, 8, 8, 8} {
			w.requeue(task, fmt.Errorf("k: %w", lock.ErrHeld))
			if len(db.delays) != i+1 {
				t.Fatalf("it was requeued %d times in %d rounds", len(db.delays), i+1)
			}
			want := time.Duration(seconds) * time.Second
			if got := db.delays[i]; got > want || got < want-want/5 {
				t.Errorf("round %d: it waits %v, want %v less up to a fifth", i+1, got, want)
			}
			time.Sleep(db.delays[i]) // in the bubble; then it is claimed again
		}
		if n := events.FilterMessage("lock_held").Len(); n != 6 {
			t.Errorf("lock_held was logged %d times, want 6", n)
		}
		if n := events.FilterMessage("lock_held_for_long").Len(); n != 1 {
			t.Errorf("lock_held_for_long was logged %d times, want once", n)
		}

		// Another task begins with the shortest delay.
		w.requeue(&tasks.Task{ID: 8, LockKey: "other", Attempt: 1, Fence: 2}, lock.ErrHeld)
		if got := db.delays[len(db.delays)-1]; got > time.Second || got < 800*time.Millisecond {
			t.Errorf("another task waits %v, want 1s less up to a fifth", got)
		}
	})
}
