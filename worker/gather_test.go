package worker

import "testing"

// A trigger that comes while slots are gathered may be of a task with a limit, for which the claims of
// the backlog do not look.
func TestGatherReportsTriggers(t *testing.T) {
	w := Worker{cfg: Config{Concurrency: 64}, wake: make(chan struct{}, 1), running: newRunning()}
	w.running.take(64, 64)
	if w.gather(t.Context()) {
		t.Error("it was triggered by nothing")
	}
	notify(w.wake)
	if !w.gather(t.Context()) {
		t.Error("a trigger is lost")
	}
	w.running.leave(64)
	notify(w.wake)
	if w.gather(t.Context()) || len(w.wake) != 1 {
		t.Error("it takes a trigger that it does not wait for")
	}
}
