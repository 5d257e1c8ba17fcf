package worker

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"onejob/tasks"
)

// endlessRows is a table in which there are always more succeeded rows that cannot be deleted.
type endlessRows struct {
	calls   map[tasks.Status]int
	actions int
	enough  func(actions int)
}

func (e *endlessRows) Purge(_ context.Context, status tasks.Status, _ time.Duration, _ int) (int, bool, []tasks.RowError, error) {
	e.calls[status]++
	if status != tasks.StatusSucceeded {
		return 0, false, nil, nil
	}
	refused := make([]tasks.RowError, 2*mostNamed)
	for i := range refused {
		refused[i].Err = errors.New("another table refers to it")
	}
	return 0, true, refused, nil
}

func (e *endlessRows) PurgeOccurrences(context.Context, time.Duration, int) (int, error) {
	return 0, errors.New("not today")
}

func (e *endlessRows) PurgeActions(context.Context, time.Duration, int) (int, error) {
	e.actions++
	e.enough(e.actions)
	return 0, nil
}

// Rows that cannot be deleted, and have no end, do not keep the rest from being deleted, or the
// log from saying how many they are.
func TestRetentionOfOneStatusDoesNotStopTheRest(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	rows := &endlessRows{calls: map[tasks.Status]int{}, enough: func(actions int) {
		if actions == 3 {
			cancel()
		}
	}}
	core, logs := observer.New(zap.ErrorLevel)
	(&retention{rows, time.Hour, time.Hour, time.Millisecond, zap.New(core)}).run(ctx)
	if rows.actions != 3 || rows.calls[tasks.StatusFailed] == 0 || rows.calls[tasks.StatusCancelled] == 0 {
		t.Errorf("%d times actions, and by status %v", rows.actions, rows.calls)
	}
	if n := logs.FilterMessage("retention_refused").Len(); n != 3 {
		t.Errorf("the number of those that cannot be deleted was logged %d times, want 3", n)
	}
}
