package tasks_test

import (
	"errors"
	"testing"
	"time"

	"onejob/tasks"
)

func TestRequeue(t *testing.T) {
	t.Parallel()
	if tasks.Requeue(time.Second, nil) != nil {
		t.Error("Requeue of nil is not nil")
	}
	cause := errors.New("the database is unavailable")
	err := tasks.Requeue(time.Second, cause)
	if !errors.Is(err, cause) || err.Error() != cause.Error() {
		t.Errorf("it is %v", err)
	}
	if d, ok := tasks.RequeueDelay(errors.Join(err)); !ok || d != time.Second {
		t.Errorf("the delay is %v, %v", d, ok)
	}
	if _, ok := tasks.RequeueDelay(tasks.RetryAfter(time.Second, cause)); ok {
		t.Error("RetryAfter asks for a requeue")
	}
}
