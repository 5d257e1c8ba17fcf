package worker

import (
	"cmp"
	"context"
	"time"

	"go.uber.org/zap"

	"onejob/boottime"
	"onejob/lock"
	"onejob/tasks"
)

// takeoverStore is what takeovers need of the database.
type takeoverStore interface {
	Sessions(ctx context.Context, mine string) ([]string, error)
	TakeOver(ctx context.Context, dead []string, maxCrashes int) ([]tasks.Abandoned, []tasks.RowError, error)
}

// watchSessions searches for abandoned tasks whenever the set of live sessions changes.
// After a search that failed or found some it soon searches again, otherwise from time to
// time, because each search reads all running rows.
func (w *Worker) watchSessions(ctx context.Context) {
	var pace pace
	for news := true; ; {
		changed := w.cfg.Locks.Changed()
		w.claimSoon()
		if news { // the last heartbeat's list may be a second old
			sent := boottime.Now()
			if list, err := w.cfg.Store.Replicas(ctx); err == nil {
				w.members.saw(list, sent)
			}
		}
		again := time.Second
		took, none := w.takeOver(ctx)
		if none {
			again = pace.rest(10*time.Second, took)
		}
		news = true
		select {
		case <-changed:
		case <-w.bereaved:
		case <-time.After(again):
			news = !none
		case <-ctx.Done():
			return
		}
	}
}

// takeOver takes over tasks of replicas that died. It returns how long it took to read
// all running rows, and whether the search succeeded and found none.
func (w *Worker) takeOver(ctx context.Context) (took time.Duration, none bool) {
	mine := w.cfg.Locks.Session()
	if mine == "" || !w.database.is() {
		return 0, false
	}
	began := time.Now()
	sessions, err := w.cfg.Store.Sessions(ctx, mine)
	took = time.Since(began)
	w.lookups.saw("sessions", err)
	if err != nil {
		return took, false
	}
	dead, err := w.dead(ctx, sessions)
	if err != nil && ctx.Err() == nil {
		w.cfg.Log.Debug("session_lookup_failed", zap.Error(err))
	}
	if len(dead) == 0 {
		return took, err == nil
	}
	silent := map[string]time.Duration{} // by the replica's name
	for _, s := range dead {
		if r, long, known := w.members.of(s); known {
			silent[r.Name] = long
		}
	}
	abandoned, refused, err := w.cfg.Store.TakeOver(ctx, dead, w.cfg.MaxCrashes)
	logRefusedRows(w.cfg.Log, refused)
	if err != nil && ctx.Err() == nil {
		w.cfg.Log.Warn("takeover_failed", zap.Error(err))
	}
	for _, o := range abandoned {
		fields := []zap.Field{zap.Int64("task_id", o.ID), zap.String("kind", o.Kind), zap.Int("attempt", o.Attempt), zap.String("lock_key", o.LockKey),
			zap.Int64("fence", o.Fence), zap.String("from", o.Replica), zap.Int("crashes", o.Crashes), zap.Int("stalls", o.Stalls), zap.Duration("since_start", o.Since)}
		w.measure(Measurement{What: MeasureTakeover, Kind: o.Kind, Count: 1, Took: silent[o.Replica]})
		switch {
		case o.Quarantined:
			w.measure(Measurement{What: MeasureQuarantine, Kind: o.Kind})
			w.cfg.Log.Error("task_quarantined", fields...)
		case o.Next == tasks.StatusFailed:
			w.cfg.Log.Error("task_failed_after_crashes", fields...)
		default:
			w.cfg.Log.Warn("task_taken_over", fields...)
		}
	}
	w.claimSoon()
	return took, false
}

// dead returns the sessions whose tasks may be taken over: Consul and the list of
// replicas both say that nothing runs under them any more.
func (w *Worker) dead(ctx context.Context, sessions []string) (dead []string, err error) {
	var strangers []string
	for _, s := range sessions {
		switch r, _, known := w.members.of(s); {
		case !known: // of an older version, or gone from the list long ago
			strangers = append(strangers, s)
		case r.State.Final():
			end, e := w.cfg.Locks.End(ctx, s, 0)
			if err = cmp.Or(err, e); end != lock.Alive {
				dead = append(dead, s)
			}
		}
	}
	others, e := w.cfg.Locks.Dead(ctx, strangers)
	return append(dead, others...), cmp.Or(err, e)
}
