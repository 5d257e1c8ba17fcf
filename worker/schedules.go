package worker

import (
	"context"
	"errors"
	"slices"
	"time"

	"go.uber.org/zap"

	"onejob/internal/retry"
	"onejob/tasks"
	"onejob/tasks/schedule"
)

// schedules creates the tasks of due schedules.
type schedules struct {
	store   scheduleStore
	ready   func() bool // there is a server that is known to be the database
	measure func(Measurement)
	log     *zap.Logger
}

type scheduleStore interface {
	DueSchedules(ctx context.Context, unknownZones []string) (now time.Time, due []schedule.Due, err error)
	MakeOccurrences(context.Context, schedule.Due, schedule.Plan) (current bool, made int, err error)
	MarkSchedule(ctx context.Context, d schedule.Due, message string) (news bool, err error)
	UntilNextSchedule(ctx context.Context, atMost time.Duration, unknownZones []string) (time.Duration, error)
	SchedulesInZones(ctx context.Context, above int64) ([]schedule.Ahead, error)
	SetNext(ctx context.Context, a schedule.Ahead, next time.Time) (set bool, forgotten int, err error)
}

// minWait is between two looks at schedules. One that counts as due and of which nothing is made
// must not occupy a processor and Postgres.
const minWait = 10 * time.Millisecond

// run creates the tasks of due schedules. It checks every second, which is also
// how soon a changed schedule takes effect.
func (s *schedules) run(ctx context.Context) {
	failing := false
	var unknown []string // zones, see makeDue
	var zones zoneLook
	for ctx.Err() == nil {
		wait := time.Second
		if !s.ready() {
			retry.Pause(ctx, wait)
			continue
		}
		var err error
		unknown, err = s.makeDue(ctx, unknown)
		if err == nil {
			s.followZones(ctx, &zones)
			wait, err = s.store.UntilNextSchedule(ctx, wait, unknown)
		}
		if err != nil && ctx.Err() == nil && !failing {
			s.log.Warn("schedules_failed", zap.Error(err))
		}
		if failing = err != nil; failing {
			wait = time.Second
		}
		retry.Pause(ctx, max(wait, minWait))
	}
}

// A zoneLook goes through all schedules, some at a time, and begins anew an hour after its end; after an
// error, a minute.
type zoneLook struct {
	above  int64 // the id of the last one
	failed bool
	next   time.Time
}

// followZones makes schedules come due earlier whose due time was worked out by other rules of their
// zone than those of now: it has changed since, or another leader had older ones. What has come due too early is
// seen then (schedule.Due.Plan).
func (s *schedules) followZones(ctx context.Context, z *zoneLook) {
	if time.Now().Before(z.next) {
		return
	}
	list, err := s.store.SchedulesInZones(ctx, z.above)
	z.failed = z.failed || err != nil
	for _, a := range list {
		z.above = a.ID
		c, invalid := schedule.Parse(a.Cron, a.Zone)
		if invalid != nil {
			continue // which is reported when it is due
		}
		next := a.ByTheZone(c)
		if next.IsZero() || !next.Before(a.Next) {
			continue
		}
		set, _, err := s.store.SetNext(ctx, a, next)
		z.failed = z.failed || err != nil // somebody has locked the row, perhaps
		if set {
			s.log.Info("schedule_zone_changed", zap.String("schedule", a.Name), zap.String("time_zone", a.Zone), zap.Time("from", a.Next), zap.Time("to", next))
		}
	}
	if err == nil && len(list) > 0 {
		return
	}
	rest := time.Hour
	if z.failed {
		rest = time.Minute
	}
	*z = zoneLook{next: time.Now().Add(rest)}
}

// makeDue creates the due tasks of every schedule. An invalid schedule does not stop
// the others.
//
// A time zone that this replica does not know may be known to the next leader. Its
// schedules are left unchanged, and are not queried until the zone is known. makeDue
// takes the zones that were unknown the last time, and returns those that are now.
func (s *schedules) makeDue(ctx context.Context, unknown []string) ([]string, error) {
	unknown = slices.DeleteFunc(unknown, func(zone string) bool {
		_, err := time.LoadLocation(zone)
		return err == nil
	})
	now, due, err := s.store.DueSchedules(ctx, unknown)
	if err != nil {
		return unknown, err
	}
	noteZone := func(d schedule.Due, zone string, err error) {
		if !slices.Contains(unknown, zone) {
			s.log.Error("schedule_zone_unknown", zap.String("schedule", d.Name), zap.String("time_zone", zone), zap.Error(err))
			unknown = append(unknown, zone)
		}
	}
	var errs []error
	for _, d := range due {
		var cron schedule.Cron
		var invalid error
		if !d.Off {
			cron, invalid = schedule.Parse(d.Cron, d.Zone)
			d.Off = invalid != nil // the line from before the edit may still be valid
			if errors.Is(invalid, schedule.ErrUnknownZone) {
				noteZone(d, d.Zone, invalid)
				invalid = nil
			}
		}
		p := d.Plan(cron, now)
		for _, zone := range p.UnknownZones {
			noteZone(d, zone, schedule.ErrUnknownZone)
		}
		if !d.Off || len(p.Done) > 0 || p.Cut != 0 {
			err := s.makePlan(ctx, d, p)
			if errors.Is(err, tasks.ErrUnwritable) { // the reason may pass, so this is tried again later
				invalid, err = err, nil
			}
			errs = append(errs, err)
		}
		if invalid != nil {
			news, err := s.store.MarkSchedule(ctx, d, invalid.Error())
			if news {
				s.log.Error("schedule_invalid", zap.String("schedule", d.Name), zap.Error(invalid))
			}
			errs = append(errs, err)
		}
	}
	return unknown, errors.Join(errs...)
}

// makePlan writes the planned occurrences of a schedule. If the schedule was edited
// meanwhile it writes nothing; the next round uses the edited schedule.
func (s *schedules) makePlan(ctx context.Context, d schedule.Due, p schedule.Plan) error {
	current, made, err := s.store.MakeOccurrences(ctx, d, p)
	if err != nil || !current {
		return err
	}
	name := zap.String("schedule", d.Name)
	skipped := map[schedule.SkipReason]int{}
	for _, o := range p.Occurrences {
		if o.Skipped != schedule.NotSkipped {
			skipped[o.Skipped]++
		}
	}
	if p.Next.IsZero() && !p.Keep {
		s.log.Warn("schedule_never_due", name, zap.String("cron", d.Cron))
	}
	if !p.PassedTo.IsZero() {
		s.log.Warn("schedule_passed_over", name, zap.Time("from", p.PassedFrom), zap.Time("to", p.PassedTo))
	}
	if made > 0 {
		s.measure(Measurement{What: MeasureOccurrence, Count: made})
		s.log.Debug("schedule_enqueued", name, zap.Int("tasks", made))
	}
	for reason, n := range skipped {
		s.measure(Measurement{What: MeasureOccurrence, Cause: string(reason), Count: n})
		s.log.Warn("schedule_skipped", name, zap.String("reason", string(reason)), zap.Int("due_times", n))
	}
	return nil
}
