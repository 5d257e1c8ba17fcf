package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// What people ask about schedules, at the command line.

// ErrNoSchedule says that there is no schedule with that name.
var ErrNoSchedule = errors.New("there is no such schedule")

// ErrScheduleChanged says that a schedule is not as it was a moment ago.
var ErrScheduleChanged = errors.New("the schedule was changed meanwhile; look at it again")

// ScheduleRow is a schedule as people see it.
type ScheduleRow struct {
	ID          int64           `json:"id" db:"id"`
	Name        string          `json:"name" db:"name"`
	Cron        string          `json:"cron" db:"cron"`
	TimeZone    string          `json:"time_zone" db:"time_zone"`
	Kind        string          `json:"kind" db:"kind"`
	Payload     json.RawMessage `json:"payload" db:"payload"`
	Queue       string          `json:"queue" db:"queue"`
	Priority    int16           `json:"priority" db:"priority"`
	LockKey     *string         `json:"lock_key" db:"lock_key"`
	LimitName   *string         `json:"limit_name" db:"limit_name"`
	MaxAttempts int             `json:"max_attempts" db:"max_attempts"`
	Timeout     *string         `json:"timeout" db:"timeout"`
	KeepFor     *string         `json:"keep_for" db:"keep_for"`
	Enabled     bool            `json:"enabled" db:"enabled"`
	PausedUntil *Time           `json:"paused_until" db:"paused_until"` // nil if it is not paused; infinite: until it is resumed
	PausedAt    *Time           `json:"paused_at" db:"paused_at"`
	PausedBy    *string         `json:"paused_by" db:"paused_by"`
	PauseReason *string         `json:"pause_reason" db:"pause_reason"`
	OnMissed    string          `json:"on_missed" db:"on_missed"`
	MissedCap   int             `json:"missed_cap" db:"missed_cap"`
	OnOverlap   string          `json:"on_overlap" db:"on_overlap"`
	QueueCap    int             `json:"queue_cap" db:"queue_cap"`
	NextAt      *Time           `json:"next_at" db:"next_at"`     // nil if it has yet to be worked out, or never comes
	NeverDue    bool            `json:"never_due" db:"never_due"` // next_at is infinity
	LastAt      *Time           `json:"last_at" db:"last_at"`
	Error       *string         `json:"error" db:"error"`
	CreatedAt   Time            `json:"created_at" db:"created_at"`
}

const scheduleColumns = `id, name, cron, time_zone, kind, payload::text AS payload, queue, priority, lock_key, limit_name, max_attempts, timeout::text, keep_for::text,
       enabled, ` + pauseColumns + `, on_missed, missed_cap, on_overlap, queue_cap, CASE WHEN isfinite(next_at) THEN next_at END AS next_at, coalesce(next_at = 'infinity', false) AS never_due,
       last_at, error, created_at`

// pauseColumns are those of a pause, while it lasts.
const pauseColumns = `CASE WHEN paused_until > statement_timestamp() THEN paused_until END AS paused_until,
       CASE WHEN paused_until > statement_timestamp() THEN paused_at    END AS paused_at,
       CASE WHEN paused_until > statement_timestamp() THEN paused_by    END AS paused_by,
       CASE WHEN paused_until > statement_timestamp() THEN pause_reason END AS pause_reason`

// OccurrenceRow is a due time as people see it: it has a task, or a reason why
// there is none.
type OccurrenceRow struct {
	DueAt   Time    `json:"due_at" db:"due_at"`
	TaskID  *int64  `json:"task_id" db:"task_id"`
	Status  *string `json:"status" db:"status"` // of the task; nil if retention has deleted it
	Skipped *string `json:"skipped" db:"skipped"`
	MadeAt  Time    `json:"made_at" db:"made_at"`
}

// Schedules returns all schedules by their names.
func (s *Store) Schedules(ctx context.Context) ([]ScheduleRow, error) {
	list, err := fetchFreely(ctx, s.pool, "list schedules", pgx.RowToStructByName[ScheduleRow], `SELECT `+scheduleColumns+` FROM onejob.schedules ORDER BY name`)
	for i := range list {
		list[i].Payload = readable(list[i].Payload)
	}
	return list, err
}

// Schedule returns a schedule, and what Postgres' clock says, or ErrNoSchedule.
func (s *Store) Schedule(ctx context.Context, name string) (now time.Time, row ScheduleRow, err error) {
	type clocked struct {
		Now time.Time `db:"now"`
		ScheduleRow
	}
	found, err := fetchFreely(ctx, s.pool, "show schedule "+name, pgx.RowToStructByName[clocked], `SELECT now(), `+scheduleColumns+` FROM onejob.schedules WHERE name = $1`, name)
	if err != nil {
		return now, row, err
	}
	if len(found) == 0 {
		return now, row, fmt.Errorf("schedule %s: %w", name, ErrNoSchedule)
	}
	row = found[0].ScheduleRow
	row.Payload = readable(row.Payload)
	return found[0].Now, row, nil
}

// Occurrences returns the last n due times of a schedule, the newest first.
func (s *Store) Occurrences(ctx context.Context, id int64, n int) ([]OccurrenceRow, error) {
	return fetchFreely(ctx, s.pool, "list occurrences", pgx.RowToStructByName[OccurrenceRow], `
SELECT o.due_at, o.task_id, t.status, o.skipped, o.made_at
  FROM onejob.occurrences o
  LEFT JOIN onejob.tasks t ON t.id = o.task_id
 WHERE o.schedule_id = $1
 ORDER BY o.due_at DESC
 LIMIT $2`, id, n)
}

// EnableSchedule enables or disables a schedule. It reports whether there is
// one. Enabling one that is marked with an error clears the mark, so that it is tried again.
func (s *Store) EnableSchedule(ctx context.Context, name string, enabled bool) (bool, error) {
	found, err := act[bool](ctx, s, "schedule "+name, `
UPDATE onejob.schedules
   SET enabled = @enabled::bool,
       error   = CASE WHEN @enabled THEN NULL ELSE error END
 WHERE name = @name
RETURNING true`, namedArgs{"name": name, "enabled": enabled})
	return len(found) > 0, err
}

// PauseSchedule lets a schedule create no tasks for due times from now on. It ends at a
// time, or if that is zero after a duration, or if that is zero too when somebody resumes the
// schedule. One that is paused already gets the new reason and end. It reports whether there
// is a schedule with that name.
func (s *Store) PauseSchedule(ctx context.Context, name, reason string, until time.Time, after time.Duration) (bool, error) {
	return one(act[bool](ctx, s, "pause schedule "+name, `
SELECT onejob.pause_schedule(@name::text, nullif(@reason::text, ''), `+pauseEnd+`)`,
		namedArgs{"name": name, "reason": reason, "until": moment(until), "after": atLeastOne(after)}))
}

// ResumeSchedule lets a paused schedule create tasks again, for due times from now on. It
// reports whether the schedule was paused.
func (s *Store) ResumeSchedule(ctx context.Context, name string) (bool, error) {
	return one(act[bool](ctx, s, "resume schedule "+name, `SELECT onejob.resume_schedule(@name::text)`, namedArgs{"name": name}))
}

// SkippedDueTimes returns the due times from one time to another, both included,
// that made no task, the oldest n of them.
func (s *Store) SkippedDueTimes(ctx context.Context, id int64, from, to time.Time, n int) ([]time.Time, error) {
	return s.dueTimes(ctx, `
SELECT due_at
  FROM onejob.occurrences
 WHERE schedule_id = $1
   AND due_at BETWEEN $2 AND $3
   AND skipped IS NOT NULL
 ORDER BY due_at
 LIMIT $4`, id, from, to, n)
}

// WithoutTask returns those of the due times that no task was ever made for, as
// far as that is remembered.
func (s *Store) WithoutTask(ctx context.Context, id int64, dues []time.Time) ([]time.Time, error) {
	return s.dueTimes(ctx, `
SELECT d.due_at
  FROM unnest($2::timestamptz[]) AS d(due_at)
 WHERE NOT EXISTS (SELECT
                     FROM onejob.occurrences o
                    WHERE o.schedule_id = $1
                      AND o.due_at = d.due_at
                      AND o.task_id IS NOT NULL)
 ORDER BY d.due_at`, id, dues)
}

func (s *Store) dueTimes(ctx context.Context, sql string, args ...any) ([]time.Time, error) {
	return fetchFreely(ctx, s.pool, "look for due times", pgx.RowTo[time.Time], sql, args...)
}

// MadeTask is a task that was made for a due time.
type MadeTask struct {
	DueAt  time.Time `json:"due_at" db:"due_at"`
	TaskID int64     `json:"task_id" db:"task_id"`
}

// Backfill makes tasks for those of the due times that are past and have none,
// all or nothing, and returns them. It returns ErrScheduleChanged if the line or
// the zone are not those by which the due times were worked out.
//
// The leader may be at the same due times. The lock on the schedule's row makes this
// statement wait for the leader's, and the leader's do nothing for now; the primary key of
// occurrences lets only one of them make a task. A due time that was skipped becomes one with
// a task. The schedule itself is not changed.
func (s *Store) Backfill(ctx context.Context, row ScheduleRow, dues []time.Time) ([]MadeTask, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout+time.Duration(len(dues))*time.Millisecond) // there may be 100,000
	defer cancel()
	rows, err := s.pool.Query(ctx, `
WITH schedule AS (
    SELECT *
      FROM onejob.schedules
     WHERE id        = @id
       AND cron      = @cron
       AND time_zone = @zone
       FOR NO KEY UPDATE
), occurrences AS (
    INSERT INTO onejob.occurrences AS o (schedule_id, due_at, task_id)
    SELECT s.id, d.due_at, nextval(pg_get_serial_sequence('onejob.tasks', 'id'))
      FROM schedule s
     CROSS JOIN unnest(@dues::timestamptz[]) AS d(due_at)
     WHERE d.due_at <= now()
        ON CONFLICT (schedule_id, due_at) DO UPDATE
       SET task_id = excluded.task_id,
           skipped = NULL,
           made_at = now()
     WHERE o.task_id IS NULL
 RETURNING schedule_id, due_at, task_id
), made AS (`+insertTasks+`
 RETURNING id
)
SELECT o.due_at, o.task_id
  FROM schedule
  LEFT JOIN occurrences o ON true
 WHERE `+allMade+`
 ORDER BY o.due_at`, namedArgs{"id": row.ID, "cron": row.Cron, "zone": row.TimeZone, "dues": dues, "left_out": errLeftOut.Error()})
	if err != nil {
		return nil, fmt.Errorf("backfill schedule %s: %w", row.Name, err)
	}
	current := false
	made := []MadeTask{}
	var due *time.Time
	var id *int64
	if _, err := pgx.ForEachRow(rows, []any{&due, &id}, func() error {
		current = true
		if due != nil {
			made = append(made, MadeTask{*due, *id})
		}
		return nil
	}); err != nil {
		return nil, fmt.Errorf("backfill schedule %s: %w", row.Name, leftOut(err))
	}
	if !current {
		return nil, fmt.Errorf("backfill schedule %s: %w", row.Name, ErrScheduleChanged)
	}
	return made, nil
}
