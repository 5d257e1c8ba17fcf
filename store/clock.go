package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
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

// early is of pending rows that were to be due when they were enqueued, at a time which the clock has
// yet to reach.
const early = `run_at > clock_timestamp() AND run_at <= created_at`

const earlySQL = `
SELECT id
  FROM onejob.tasks
 WHERE status = 'pending'
   AND {limit}
   AND ` + early + `
   AND id <> ALL ($1)
 LIMIT 100000`

const dueAtOnceSQL = `
WITH early AS (
    SELECT id
      FROM onejob.tasks
     WHERE id = ANY ($1)
       AND CASE WHEN status = 'pending' THEN ` + early + ` END
       FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE onejob.tasks
   SET run_at = statement_timestamp()
 WHERE id = ANY (ARRAY(SELECT id FROM early))
RETURNING id`

const stillEarlySQL = `
SELECT id
  FROM onejob.tasks
 WHERE id = ANY ($1)
   AND CASE WHEN status = 'pending' THEN ` + early + ` END`

const (
	dueAtOnceRows = 1000   // of one statement
	mostLeftEarly = 10_000 // then others must do without
)

// AfterSetBack makes pending tasks due that were to be due at once, and were enqueued while
// Postgres' clock was ahead. It returns how many. It reads all pending tasks. A row that is locked,
// that Postgres refuses to change, or whose trigger keeps it waiting or leaves it as it is, does not
// keep the others; the error names one.
//
// Schedules that were edited while the clock was ahead count as edited now, see DueSchedules.
func (s *Store) AfterSetBack(ctx context.Context) (due int, err error) {
	edits := s.bringEditsForward(ctx) // tasks do not depend on schedules
	due, err = s.makeEarlyDue(ctx)
	return due, errors.Join(edits, err)
}

// bringEditsForward lets what a schedule was before an edit that lies ahead of the clock count until
// now: the due times of that line which lie ahead are the new line's.
func (s *Store) bringEditsForward(ctx context.Context) error {
	_, err := fetchFreely(ctx, s.pool, "bring edits forward after the clock was set back", pgx.RowTo[int64], `
UPDATE onejob.former_schedules
   SET until = clock_timestamp()
 WHERE id = ANY (ARRAY(SELECT id FROM onejob.former_schedules WHERE until > clock_timestamp() FOR NO KEY UPDATE SKIP LOCKED))`)
	return err
}

func (s *Store) makeEarlyDue(ctx context.Context) (due int, err error) {
	left := []int64{} // tried in vain
	var why error     // of one of these
	for _, limit := range []string{"limit_name IS NULL", "limit_name IS NOT NULL"} {
		for more := true; more && len(left) < mostLeftEarly; {
			ids, err := s.early(ctx, strings.Replace(earlySQL, "{limit}", limit, 1), left)
			if err != nil {
				return due, err
			}
			more = len(ids) > 0
			for part := range slices.Chunk(ids, dueAtOnceRows) {
				made, one, err := s.makeDue(ctx, part)
				due += len(made)
				if err != nil {
					return due, fmt.Errorf("make tasks due after the clock was set back: %w", err)
				}
				why = cmp.Or(one, why)
				left = append(left, notAmong(part, made)...)
			}
		}
	}
	if left, err = s.early(ctx, stillEarlySQL, left); err == nil && len(left) > 0 {
		err = fmt.Errorf("%d tasks are not due after the clock was set back, such as %d: %w", len(left), left[0], cmp.Or(why, errLeftEarly))
	}
	return due, err
}

var errLeftEarly = errors.New("somebody has locked the row, or a trigger leaves it as it is")

func (s *Store) early(ctx context.Context, sql string, ids []int64) ([]int64, error) {
	return fetch(ctx, s.pool, "look for tasks to make due after the clock was set back", pgx.RowTo[int64], sql, ids)
}

// makeDue makes those rows due that can be. It returns them, and what Postgres said of one that
// cannot.
func (s *Store) makeDue(ctx context.Context, ids []int64) (made []int64, why, err error) {
	made, err = s.dueAtOnce(ctx, ids)
	switch {
	case !mayBeARow(err):
		return made, nil, err
	case len(ids) > 1:
		if waitedInVain(err) {
			s.writes.inVain(len(ids))
		}
		for part := range slices.Chunk(ids, (len(ids)+1)/2) {
			some, one, err := s.makeDue(ctx, part)
			made, why = append(made, some...), cmp.Or(one, why)
			if err != nil {
				return made, why, err
			}
		}
		return made, why, nil
	}
	if _, err := s.dueAtOnce(ctx, []int64{}); err != nil {
		return nil, nil, err // it is about no row
	}
	return nil, err, nil
}

func (s *Store) dueAtOnce(ctx context.Context, ids []int64) ([]int64, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	return queryAfter(ctx, s.pool, pgx.RowTo[int64], boundedWrites, s.writes.bounds(len(ids), s.timeout), dueAtOnceSQL, ids)
}

// notAmong returns the ids that are not among others.
func notAmong(ids, others []int64) []int64 {
	among := make(map[int64]bool, len(others))
	for _, id := range others {
		among[id] = true
	}
	return slices.DeleteFunc(slices.Clone(ids), func(id int64) bool { return among[id] })
}

// SchedulesAhead returns schedules whose due times were made, or which were edited, at a
// time that Postgres' clock has yet to reach: it has been set back.
func (s *Store) SchedulesAhead(ctx context.Context) ([]schedule.Ahead, error) {
	return fetch(ctx, s.pool, "look for schedules ahead of the clock", pgx.RowToStructByPos[schedule.Ahead], `
SELECT id, name, cron, time_zone, next_at, clock_timestamp(), CASE WHEN isfinite(paused_until) THEN paused_until END, NULL::timestamptz
  FROM onejob.schedules
 WHERE enabled
   AND isfinite(next_at)
   AND next_at > clock_timestamp()
   AND (last_at > clock_timestamp() AND isfinite(last_at) OR changed_at > clock_timestamp() AND isfinite(changed_at))`)
}

// SchedulesInZones returns up to 1,000 schedules with a due time in the future that depends on the rules
// of a time zone, in the order of their ids, those above an id alone.
func (s *Store) SchedulesInZones(ctx context.Context, above int64) ([]schedule.Ahead, error) {
	return fetch(ctx, s.pool, "look for schedules in time zones", pgx.RowToStructByPos[schedule.Ahead], `
SELECT id, name, cron, time_zone, next_at, clock_timestamp(), CASE WHEN isfinite(paused_until) THEN paused_until END,
       nullif(greatest(CASE WHEN changed_at <= clock_timestamp() THEN changed_at END, CASE WHEN last_at <= clock_timestamp() THEN last_at END), '-infinity')
  FROM onejob.schedules
 WHERE id > $1
   AND enabled
   AND isfinite(next_at)
   AND next_at > clock_timestamp()
   AND cron NOT LIKE '@every%'
   AND time_zone <> 'UTC'
   AND paused_until IS DISTINCT FROM 'infinity'
 ORDER BY id
 LIMIT 1000`, above)
}

// forgetAtOnce is how many due times a statement of SetNext forgets. A schedule of every second
// has 86,400 a day.
const forgetAtOnce = 10_000

// setNextSQL forgets the latest due times without a task, and makes the schedule come due at the
// earliest of them, or at $5 if there are no others. Whenever it is stopped, the forgotten ones
// come due again.
const setNextSQL = `
WITH schedule AS (
    SELECT id
      FROM onejob.schedules
     WHERE id = $1
       AND cron = $2
       AND time_zone = $3
       AND next_at = $4
       FOR NO KEY UPDATE SKIP LOCKED
), latest AS (
    SELECT due_at
      FROM onejob.occurrences
     WHERE schedule_id = $1
       AND due_at >= $5
       AND task_id IS NULL
     ORDER BY due_at DESC
     LIMIT $6
), reached AS (
    SELECT CASE WHEN count(*) < $6 THEN $5 ELSE least(min(due_at), $4) END AS next_at
      FROM latest
), moved AS (
    UPDATE onejob.schedules s
       SET next_at = reached.next_at
      FROM schedule, reached
     WHERE s.id = schedule.id
 RETURNING s.next_at
), forgotten AS (
    DELETE FROM onejob.occurrences o
     USING schedule, reached
     WHERE o.schedule_id = schedule.id
       AND o.due_at >= reached.next_at
       AND o.task_id IS NULL
 RETURNING true
)
SELECT EXISTS (SELECT FROM moved),
       NOT EXISTS (SELECT FROM schedule) AND EXISTS (SELECT FROM onejob.schedules WHERE id = $1 AND cron = $2 AND time_zone = $3 AND next_at = $4),
       (SELECT count(*) < $6 FROM latest), (SELECT next_at FROM moved), (SELECT count(*) FROM forgotten)`

// SetNext sets when a schedule comes due next, unless it has changed since it was read, and
// forgets its due times from then on that have no task. It returns how many those were.
//
// If they are many it goes backwards, and a statement does both for some of them. A leader that
// forgot due times and was stopped before it set the schedule back would leave them without a
// task and without a reason. After an error the schedule may be set back in part; set is true
// then. It does not wait for a schedule that somebody has locked: that is an error.
func (s *Store) SetNext(ctx context.Context, a schedule.Ahead, next time.Time) (set bool, forgotten int, err error) {
	for at := a.Next; ; {
		p, err := s.setNext(ctx, a, at, next)
		if p.Locked {
			err = errScheduleLocked
		}
		if err != nil {
			return set, forgotten, fmt.Errorf("set when schedule %s comes due: %w", a.Name, err)
		}
		set, forgotten = set || p.Moved, forgotten+p.Forgotten
		if !p.Moved || p.Last {
			return set, forgotten, nil
		}
		at = *p.To
	}
}

var errScheduleLocked = errors.New("somebody has locked the row")

// setPart is what one statement of SetNext did.
type setPart struct {
	Moved     bool // false if the schedule has changed, or is locked
	Locked    bool
	Last      bool
	To        *time.Time
	Forgotten int
}

func (s *Store) setNext(ctx context.Context, a schedule.Ahead, at, next time.Time) (setPart, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	return one(query(ctx, s.pool, pgx.RowToStructByPos[setPart], setNextSQL, a.ID, a.Cron, a.Zone, at, next, forgetAtOnce))
}
