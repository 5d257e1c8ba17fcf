package worker

import (
	"context"
	"slices"
	"time"

	"onejob/internal/retry"
	"onejob/tasks"
)

// auditStore is what the audit of claims needs of the database.
type auditStore interface {
	Held(ctx context.Context, session string) ([]*tasks.Task, error)
}

// audit requeues tasks that belong to this replica in Postgres and that it does not
// know of, because the reply to a claim was lost. Without it they would wait for the
// end of the session. One that failed is tried again after 20 times as long as it took,
// because claims wait for it.
func (w *Worker) audit(ctx context.Context) {
	if !w.replyLost.Load() {
		return
	}
	if time.Now().Before(w.auditAgain) {
		return
	}
	w.claiming.Lock() // tasks of a claim in flight are not registered yet
	defer w.claiming.Unlock()
	session := w.cfg.Locks.Session()
	if session == "" {
		return
	}
	w.replyLost.Store(false)
	known := w.running.known() // before the query: tasks that end meanwhile are among them
	began := time.Now()
	held, err := w.cfg.Store.Held(ctx, session)
	w.lookups.saw("claims_unanswered", err)
	if err != nil {
		w.replyLost.Store(true)
		w.auditAgain = time.Now().Add(min(20*time.Since(began), time.Minute))
		return
	}
	for _, t := range held {
		if _, heard := known[t.Fence]; !heard {
			w.cfg.Log.Warn("claim_reply_lost", fields(t)...)
			w.giveBack(t, errReplyLost)
		}
	}
}

// suspect checks from time to time for tasks that belong to this replica and that it does
// not know of although every claim was answered: an operator may have edited the row. Each
// check reads all running rows; audit does the requeueing.
func (w *Worker) suspect(ctx context.Context) {
	var pace pace
	for ctx.Err() == nil {
		began := time.Now()
		if session := w.cfg.Locks.Session(); session != "" {
			held, err := w.cfg.Store.Held(ctx, session)
			w.lookups.saw("claims_held", err)
			unknown := func(t *tasks.Task) bool { return !w.running.has(t.Fence) }
			if err == nil && slices.ContainsFunc(held, unknown) {
				w.replyLost.Store(true)
				notify(w.wake)
			}
		}
		retry.Pause(ctx, pace.rest(5*time.Second, time.Since(began)))
	}
}

// pace decides how long to wait between periodic checks that read many rows. Urgent
// checks are triggered by events instead.
type pace struct{ last time.Duration }

// rest returns how long to wait after a check that took the given time: at least the
// given minimum, and long enough that checks use at most 1/200 of the time, or 1/20 where
// that would mean a wait of more than 30 s. One slow check may be the machine's fault. If
// the previous one was slow too, an old snapshot keeps index entries of millions of dead
// rows, and each check reads them: then checks use at most 1/400 of the time, so that
// claims do not wait for the processor.
func (p *pace) rest(least, took time.Duration) time.Duration {
	both := min(took, p.last)
	p.last = took
	if both < 250*time.Millisecond {
		both = 0
	}
	return max(least, min(200*took, 30*time.Second), 20*took, 400*both)
}
