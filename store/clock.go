package store

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/tasks/schedule"
)

// Clock returns what Postgres' clock says, and when the server was started that says it.
func (s *Store) Clock(ctx context.Context) (now, started time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	if err := s.pool.QueryRow(ctx, `SELECT clock_timestamp(), pg_postmaster_start_time()`).Scan(&now, &started); err != nil {
		return now, started, fmt.Errorf("ask for the time: %w", err)
	}
	return now, started, nil
}

// dueAtOnceSQL makes tasks due that were to be due when they were enqueued, at a time
// which the clock has yet to reach.
const dueAtOnceSQL = `
WITH early AS (
    SELECT id
      FROM onejob.tasks
     WHERE status = 'pending'
       AND {limit}
       AND run_at > clock_timestamp()
       AND run_at <= created_at
     LIMIT 1000
       FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE onejob.tasks
   SET run_at = statement_timestamp()
 WHERE id = ANY (ARRAY(SELECT id FROM early))
RETURNING true`

// AfterSetBack makes pending tasks due that were to be due at once, and were enqueued while
// Postgres' clock was ahead. It returns how many. It reads all pending tasks.
func (s *Store) AfterSetBack(ctx context.Context) (due int, err error) {
	for _, limit := range []string{"limit_name IS NULL", "limit_name IS NOT NULL"} {
		for more := true; more; {
			rows, err := s.short(ctx, strings.Replace(dueAtOnceSQL, "{limit}", limit, 1))
			if err != nil {
				return due, fmt.Errorf("make tasks due after the clock was set back: %w", err)
			}
			due += rows
			more = rows > 0
		}
	}
	return due, nil
}

// short runs a statement within the time for one, and counts its rows.
func (s *Store) short(ctx context.Context, sql string, args ...any) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	rows, err := query(ctx, s.pool, pgx.RowTo[bool], sql, args...)
	return len(rows), err
}

// SchedulesAhead returns schedules whose due times were made, or which were edited, at a
// time that Postgres' clock has yet to reach: it has been set back.
func (s *Store) SchedulesAhead(ctx context.Context) ([]schedule.Ahead, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	list, err := query(ctx, s.pool, pgx.RowToStructByPos[schedule.Ahead], `
SELECT id, name, cron, time_zone, next_at, clock_timestamp(), CASE WHEN isfinite(paused_until) THEN paused_until END
  FROM onejob.schedules
 WHERE enabled
   AND isfinite(next_at)
   AND next_at > clock_timestamp()
   AND (last_at > clock_timestamp() AND isfinite(last_at) OR changed_at > clock_timestamp() AND isfinite(changed_at))`)
	if err != nil {
		return nil, fmt.Errorf("look for schedules ahead of the clock: %w", err)
	}
	return list, nil
}

// SetNext sets when a schedule comes due next, unless it has changed since it was read, and
// forgets its due times from then on that have no task. It returns how many those were.
//
// Both are one statement. A leader that forgot due times and was stopped before it set the
// schedule back would leave them without a task and without a reason.
func (s *Store) SetNext(ctx context.Context, a schedule.Ahead, next time.Time) (set bool, forgotten int, err error) {
	type answer struct {
		Set       bool
		Forgotten int
	}
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	answers, err := query(ctx, s.pool, pgx.RowToStructByPos[answer], `
WITH moved AS (
    UPDATE onejob.schedules
       SET next_at = $5
     WHERE id = $1
       AND cron = $2
       AND time_zone = $3
       AND next_at = $4
 RETURNING id
), forgotten AS (
    DELETE FROM onejob.occurrences o
     USING moved
     WHERE o.schedule_id = moved.id
       AND o.due_at >= $5
       AND o.task_id IS NULL
 RETURNING true
)
SELECT EXISTS (SELECT FROM moved), (SELECT count(*) FROM forgotten)`, a.ID, a.Cron, a.Zone, a.Next, next)
	if err != nil {
		return false, 0, fmt.Errorf("set when schedule %s comes due: %w", a.Name, err)
	}
	return answers[0].Set, answers[0].Forgotten, nil
}
