//go:build simulate

package simulate

import (
	"time"

	"onejob/internal/testenv/lifecycle"
	"onejob/simulate/fakestore"
	"onejob/tasks"
)

// step notes a change of a row, as the trigger of package lifecycle does in Postgres. All
// replicas have one name, as their connections do by default.
func (w *world) step(before, after fakestore.Row, by string) {
	who := "onejob"
	switch {
	case by == "insert" && !w.failed:
		return // a new row is as all new rows are
	case by == "insert", by == "cancel", by == "failover": // after a failover ids are given out again
		who = "operator"
	}
	now := lifecycle.At(time.Now())
	w.steps = append(w.steps, lifecycle.Step{Task: after.ID, By: who, At: now, Began: now, Statement: now, Noted: now, Was: noted(before), Is: noted(after)})
}

// failOver makes a standby the primary that has what the backup has. What that does to rows is
// noted as if it had been done by hand.
func (w *world) failOver(b fakestore.Backup) {
	before := w.db.Rows()
	w.db.Failover(b)
	after := map[int64]fakestore.Row{}
	clear(w.running)
	for _, r := range w.db.Rows() {
		after[r.ID] = r
		if r.Status == tasks.StatusRunning {
			w.running[r.Key()] = r.ID
		}
	}
	for _, r := range before {
		if is := after[r.ID]; noted(is) != noted(r) {
			is.ID = r.ID
			w.step(r, is, "failover")
		}
	}
}

// noted is what package lifecycle looks at in a row.
func noted(r fakestore.Row) lifecycle.Row {
	at := func(t time.Time) lifecycle.Time {
		if t.IsZero() {
			return 0
		}
		return lifecycle.At(t)
	}
	return lifecycle.Row{
		Status: string(r.Status), Kind: r.Kind, Queue: r.Queue, Priority: int(r.Priority), RunAt: at(r.RunAt), LockKey: r.LockKey, LimitName: r.Limit,
		Attempt: r.Attempt, MaxAttempts: r.MaxAttempts, Crashes: r.Crashes, Stalls: r.Stalls, Fence: r.Fence, Session: r.Session, Replica: r.Replica,
		StartedAt: at(r.StartedAt), BegunAt: at(r.BegunAt), FinishedAt: at(r.FinishedAt), CreatedAt: at(r.CreatedAt), Error: r.Error, CancelRequested: r.Cancel,
	}
}

// checkSteps looks for a change of a row that the state machine of tasks has no rule for.
func (w *world) checkSteps() {
	config := lifecycle.Config{
		Replica: func(by string) bool { return by == "onejob" }, MaxCrashes: maxCrashes,
		RetryBase: retryBase, RetryMax: retryMax, LockDelay: w.timing().LockDelay,
	}
	for _, i := range config.Replay(w.steps).Illegal {
		w.violate("lifecycle", "%v", i)
	}
}
