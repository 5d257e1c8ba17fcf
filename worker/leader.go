package worker

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"onejob/lock"
	"onejob/tasks"
)

// LeaderStore is what a worker asks of the database while it leads.
type LeaderStore interface {
	DueSchedules(ctx context.Context, unknownZones []string) (now time.Time, due []tasks.DueSchedule, err error)
	MakeOccurrences(context.Context, tasks.DueSchedule, tasks.Plan) (current bool, made int, err error)
	MarkSchedule(ctx context.Context, d tasks.DueSchedule, message string) error
	UntilNextSchedule(ctx context.Context, atMost time.Duration, unknownZones []string) (time.Duration, error)
	Purge(ctx context.Context, status tasks.Status, keep time.Duration, n int) (deleted int, more bool, refused []tasks.RowError, err error)
	PurgeOccurrences(ctx context.Context, keep time.Duration, n int) (int, error)
	HeldSnapshots(ctx context.Context, longerThan time.Duration) ([]tasks.HeldSnapshot, error)
	Overlaps(ctx context.Context, max int) (list []tasks.Overlap, total int, err error)
	Clock(ctx context.Context) (now, started time.Time, err error)
	AfterSetBack(ctx context.Context) (due int, err error)
	SchedulesAhead(ctx context.Context) ([]tasks.ScheduleAhead, error)
	SetNext(ctx context.Context, a tasks.ScheduleAhead, next time.Time) (set bool, forgotten int, err error)
}

// lead does what one replica does for all, whenever it is the leader, until ctx
// ends. Two leaders would do no harm: Postgres sees to it that a due time is
// made once, and deleting what is old twice is the same as once.
func (w *Worker) lead(ctx context.Context) {
	_ = lock.Lead(ctx, w.Locks, func(ctx context.Context) error {
		w.Log.Info("leadership_acquired")
		var wg sync.WaitGroup
		wg.Go(func() { w.makeTasks(ctx) })
		wg.Go(func() { w.deleteOld(ctx) })
		wg.Go(func() { w.watchSnapshots(ctx) })
		wg.Go(func() { w.watchOverlaps(ctx) })
		wg.Go(func() { w.watchClock(ctx) })
		wg.Wait()
		w.Log.Info("leadership_lost", zap.Error(context.Cause(ctx)))
		return nil
	})
}

// makeTasks makes the tasks of schedules that come due. It looks every second,
// which is also how soon a changed schedule takes effect.
func (w *Worker) makeTasks(ctx context.Context) {
	failing := false
	var unknown []string // zones, see makeDue
	for ctx.Err() == nil {
		wait := time.Second
		if !w.database.is() {
			sleep(ctx, wait)
			continue
		}
		var err error
		unknown, err = w.makeDue(ctx, unknown)
		if err == nil {
			wait, err = w.Store.UntilNextSchedule(ctx, wait, unknown)
		}
		if err != nil && ctx.Err() == nil && !failing {
			w.Log.Warn("schedules_failed", zap.Error(err))
		}
		if failing = err != nil; failing {
			wait = time.Second
		}
		sleep(ctx, wait)
	}
}

// makeDue makes what is due of every schedule. What is wrong with one of them
// does not stop the others.
//
// A zone that is unknown here may be known to the next leader. Its schedules are
// left as they are, and not asked for until the zone is known. makeDue takes the zones
// that were unknown the last time, and returns those that are now.
func (w *Worker) makeDue(ctx context.Context, unknown []string) ([]string, error) {
	unknown = slices.DeleteFunc(unknown, func(zone string) bool {
		_, err := time.LoadLocation(zone)
		return err == nil
	})
	now, due, err := w.Store.DueSchedules(ctx, unknown)
	if err != nil {
		return unknown, err
	}
	noteZone := func(d tasks.DueSchedule, zone string, err error) {
		if !slices.Contains(unknown, zone) {
			w.Log.Error("schedule_zone_unknown", zap.String("schedule", d.Name), zap.String("time_zone", zone), zap.Error(err))
			unknown = append(unknown, zone)
		}
	}
	var errs []error
	for _, d := range due {
		var s tasks.Schedule
		var invalid error
		if !d.Off {
			s, invalid = tasks.ParseSchedule(d.Cron, d.Zone)
			d.Off = invalid != nil // what it was before an edit may be understood
			if errors.Is(invalid, tasks.ErrUnknownZone) {
				noteZone(d, d.Zone, invalid)
				invalid = nil
			}
		}
		p := d.Plan(s, now)
		for _, zone := range p.UnknownZones {
			noteZone(d, zone, tasks.ErrUnknownZone)
		}
		if !d.Off || len(p.Done) > 0 || p.Cut != 0 {
			err := w.makePlan(ctx, d, p)
			if errors.Is(err, tasks.ErrUnwritable) { // as it would be the next time
				invalid, err = err, nil
			}
			errs = append(errs, err)
		}
		if invalid != nil {
			w.Log.Error("schedule_invalid", zap.String("schedule", d.Name), zap.Error(invalid))
			errs = append(errs, w.Store.MarkSchedule(ctx, d, invalid.Error()))
		}
	}
	return unknown, errors.Join(errs...)
}

// makePlan makes what is planned of a schedule. If somebody changed it meanwhile it
// makes nothing; the next round sees it as it is then.
func (w *Worker) makePlan(ctx context.Context, d tasks.DueSchedule, p tasks.Plan) error {
	current, made, err := w.Store.MakeOccurrences(ctx, d, p)
	if err != nil || !current {
		return err
	}
	name := zap.String("schedule", d.Name)
	skipped := map[tasks.SkipReason]int{}
	for _, o := range p.Occurrences {
		if o.Skipped != tasks.NotSkipped {
			skipped[o.Skipped]++
		}
	}
	if p.Next.IsZero() && !p.Keep {
		w.Log.Warn("schedule_never_due", name, zap.String("cron", d.Cron))
	}
	if made > 0 {
		w.Log.Debug("schedule_enqueued", name, zap.Int("tasks", made))
	}
	for reason, n := range skipped {
		w.Log.Warn("schedule_skipped", name, zap.String("reason", string(reason)), zap.Int("due_times", n))
	}
	return nil
}

// deleteOld deletes what has been kept for long enough, in small batches with a
// rest in between, so that neither a snapshot is held for long nor the tasks
// that wait are held up.
func (w *Worker) deleteOld(ctx context.Context) {
	const batch = 1000
	purge := func(what string, f func() (n int, more bool, err error)) {
		total := 0
		for ctx.Err() == nil {
			n, more, err := f()
			if err != nil {
				if ctx.Err() == nil {
					w.Log.Warn("retention_failed", zap.Error(err))
				}
				return
			}
			total += n
			if !more {
				break
			}
			sleep(ctx, 50*time.Millisecond)
		}
		if total > 0 {
			w.Log.Info("retention_deleted", zap.String("what", what), zap.Int("rows", total))
		}
	}
	for ctx.Err() == nil {
		for status, keep := range map[tasks.Status]time.Duration{
			tasks.StatusSucceeded: w.KeepSucceeded, tasks.StatusFailed: w.KeepFailed, tasks.StatusCancelled: w.KeepFailed,
		} {
			purge(string(status), func() (int, bool, error) {
				n, more, refused, err := w.Store.Purge(ctx, status, keep, batch)
				w.reportRefused(refused)
				return n, more, err
			})
		}
		purge("occurrences", func() (int, bool, error) {
			n, err := w.Store.PurgeOccurrences(ctx, max(w.KeepSucceeded, w.KeepFailed), batch)
			return n, n == batch, err
		})
		sleep(ctx, w.RetentionEvery)
	}
}

// maxOverlaps is how many overlaps are logged at once. There should be none.
const maxOverlaps = 100

// watchOverlaps logs overlaps, each once for as long as this replica leads.
func (w *Worker) watchOverlaps(ctx context.Context) {
	said := map[[2]int64]bool{} // by their fences
	for ctx.Err() == nil {
		list, total, err := w.Store.Overlaps(ctx, maxOverlaps)
		if err != nil && ctx.Err() == nil {
			w.Log.Debug("overlap_lookup_failed", zap.Error(err))
		}
		now := map[[2]int64]bool{}
		for _, o := range list {
			id := [2]int64{o.Fence, o.OtherFence}
			if now[id] = true; said[id] {
				continue
			}
			w.Log.Error("overlap_found", zap.String("lock_key", o.LockKey), zap.Int64("task_id", o.Task), zap.Int64("fence", o.Fence), zap.String("by", o.Replica),
				zap.Int64("other_task_id", o.OtherTask), zap.Int64("other_fence", o.OtherFence), zap.String("other_by", o.OtherReplica),
				zap.Time("began", o.Began), zap.Duration("took", o.Ended.Sub(o.Began)), zap.Int("total", total))
		}
		if err == nil {
			said = now
		}
		sleep(ctx, w.OverlapsEvery)
	}
}

// sayHeldEvery is how long nothing more is logged about the same held snapshot.
const sayHeldEvery = 10 * time.Minute

// watchSnapshots logs what has held back vacuum for long. Nobody else says so, and
// by the time that claims are slow the cause may be hours old.
func (w *Worker) watchSnapshots(ctx context.Context) {
	type held struct {
		what, name string
		pid        int
	}
	said := map[held]time.Time{}
	for ctx.Err() == nil {
		list, err := w.Store.HeldSnapshots(ctx, w.SnapshotAge)
		if err != nil && ctx.Err() == nil {
			w.Log.Debug("snapshot_lookup_failed", zap.Error(err))
		}
		now := map[held]time.Time{}
		for _, h := range list {
			id := held{h.What, h.Name, h.PID}
			at, known := said[id]
			if !known || time.Since(at) >= sayHeldEvery {
				at = time.Now()
				w.Log.Warn("snapshot_held", zap.String("what", h.What), zap.Int("pid", h.PID), zap.String("name", h.Name), zap.String("user", h.User),
					zap.String("application", h.Application), zap.Duration("age", h.Age), zap.Int("behind", h.Behind))
			}
			now[id] = at
		}
		if err == nil {
			said = now // what has ended is forgotten
		}
		sleep(ctx, min(w.SnapshotAge, time.Minute))
	}
}
