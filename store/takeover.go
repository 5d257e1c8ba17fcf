package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"onejob/tasks"
)

// Sessions returns the sessions, other than mine, that hold running tasks.
func (s *Store) Sessions(ctx context.Context, mine string) ([]string, error) {
	return fetch(ctx, s.pool, "list the sessions of running tasks", pgx.RowTo[string], `
SELECT DISTINCT session::text
  FROM onejob.tasks
 WHERE status = 'running'
   AND session::text <> $1`, mine)
}

// TakeOver takes the running tasks of dead sessions from them: they become due again,
// or fail when they have ended maxCrashes replicas or used up their attempts. A replica
// that is on the list and has not ended there keeps its tasks. Two replicas may do it at
// once; each task is moved by one of them, and as neither waits for a row, no order is
// needed against deadlocks.
//
// What a task is charged:
//
//   - nothing, not even the attempt, if the process lived on when it lost the session, or
//     if the handler had not begun, where that is known (see Begin);
//   - the attempt alone, if other replicas died at the same time, of which the task had
//     nothing: it is not to blame;
//   - the attempt and a crash otherwise. The crash that would be the last quarantines it
//     only if it alone, of those for which it would be, had begun within
//     tasks.SuspectTime. Such a task stays where it is while another replica that was
//     last heard of at about the same time may have died as well: up to 4.5 s after its last heartbeat.
//
// A row that Postgres refuses to change, or whose trigger keeps it waiting or leaves it as it is,
// does not keep the others: it stays as it is, is among the refused, and is left alone for a while.
//
// Statements of theirs that still run are ended first. A task whose statement cannot be
// ended keeps its row; the error says so, and the others are taken anyway.
func (s *Store) TakeOver(ctx context.Context, dead []string, maxCrashes int) (abandoned []tasks.Abandoned, refused []tasks.RowError, err error) {
	statements, err := s.endStatementsOf(ctx, dead)
	if err != nil {
		return nil, nil, fmt.Errorf("take over tasks: %w", err)
	}
	except := s.stuck.list()
	for _, l := range statements {
		except = append(except, l.Task)
	}
	if abandoned, refused, err = s.takeOverAll(ctx, dead, except, maxCrashes); err == nil && len(statements) > 0 {
		l := statements[0]
		err = fmt.Errorf("%d tasks are not taken over while statements of theirs run, such as that of task %d in %s", len(statements), l.Task, l.where())
	}
	return abandoned, refused, err
}

// takeOverAll takes over all tasks of dead sessions but some, and those that Postgres
// does not refuse one by one.
func (s *Store) takeOverAll(ctx context.Context, dead []string, except []int64, maxCrashes int) (abandoned []tasks.Abandoned, refused []tasks.RowError, err error) {
	abandoned, refused, err = s.takeOver(ctx, dead, nil, except, maxCrashes)
	if !mayBeARow(err) {
		return abandoned, refused, err
	}
	if _, _, err := s.takeOver(ctx, dead, []int64{}, except, maxCrashes); err != nil {
		return nil, nil, err // it is about no row
	}
	ids, err := s.heldBy(ctx, dead, except)
	if err != nil {
		return nil, nil, err
	}
	for _, id := range ids {
		one, unchanged, err := s.takeOver(ctx, dead, []int64{id}, []int64{}, maxCrashes)
		var pg *pgconn.PgError
		switch {
		case mayBeARow(err) && errors.As(err, &pg):
			wait := avoidFor
			if waitedInVain(err) {
				s.writes.inVain(1)
			}
			if waitedInVain(err) || relayed(err) {
				wait = avoidFirst
			}
			s.stuck.add(id, wait)
			refused = append(refused, tasks.RowError{ID: id, Err: errors.New(words(pg))})
		case err != nil:
			return abandoned, refused, err
		}
		abandoned, refused = append(abandoned, one...), append(refused, unchanged...)
	}
	return abandoned, refused, nil
}

// heldBy returns the running tasks of dead sessions, but some.
func (s *Store) heldBy(ctx context.Context, dead []string, except []int64) ([]int64, error) {
	return fetch(ctx, s.pool, "take over tasks", pgx.RowTo[int64], `
SELECT id
  FROM onejob.tasks
 WHERE status = 'running'
   AND session = ANY ($1::uuid[])
   AND id <> ALL ($2)
 LIMIT 1000`, dead, except)
}

// Begin notes that the handler of an attempt is about to begin, for tasks whose replica
// has died or stalled before. It returns tasks.ErrRefused if the fence has been
// superseded.
func (s *Store) Begin(ctx context.Context, t *tasks.Task) error {
	begun, err := fetch(ctx, s.pool, fmt.Sprintf("begin task %d", t.ID), pgx.RowTo[bool], `
UPDATE onejob.tasks
   SET begun_at = clock_timestamp()
 WHERE id = $1
   AND CASE WHEN status = 'running' THEN fence = $2 AND session = $3 END
RETURNING true`, t.ID, t.Fence, t.Session)
	if err == nil && len(begun) == 0 {
		return tasks.ErrRefused
	}
	return err
}

const takeOverSQL = `
WITH counted AS ( -- by the first statement that takes tasks of a session: later ones miss those taken before
    UPDATE onejob.replicas r
       SET suspects = (SELECT count(*)
                         FROM onejob.tasks s
                        WHERE s.status = 'running'
                          AND s.session = r.session
                          AND s.crashes + s.stalls + 1 >= $2
                          AND s.begun_at >= s.started_at
                          AND r.heartbeat_at - s.begun_at < $5::bigint * interval '1 microsecond')
     WHERE r.session = ANY (ARRAY(
               SELECT n.session
                 FROM onejob.replicas n
                WHERE n.session = ANY ($1::uuid[])
                  AND n.ended_at IS NOT NULL
                  AND n.suspects IS NULL
                  FOR NO KEY UPDATE SKIP LOCKED))
), abandoned AS (
    SELECT id, fence, attempt, max_attempts, crashes, stalls, lock_key, replica, session, started_at, cancel_requested,
           coalesce((SELECT r.state = 'dead' FROM onejob.replicas r WHERE r.session = t.session LIMIT 1), true) AS died,
           (SELECT true
              FROM onejob.replicas r
              JOIN onejob.replicas o ON o.process <> r.process
               AND o.heartbeat_at BETWEEN r.heartbeat_at - interval '5 seconds' AND r.heartbeat_at + interval '5 seconds'
               AND (o.state = 'dead' OR o.ended_at IS NULL AND o.heartbeat_at < clock_timestamp() - interval '3 seconds')
             WHERE r.session = t.session
               AND (SELECT true FROM onejob.attempts a WHERE a.task_id = t.id AND a.session = o.session LIMIT 1) IS NULL
             LIMIT 1) IS NOT NULL AS others_died,
           crashes + stalls = 0 AND $2 > 1 AND
                     -- A claim that was carried out when nobody had heard of its replica for longer than a lease lasts began nothing.
                     coalesce((SELECT t.started_at <= r.heartbeat_at + interval '7 seconds' FROM onejob.replicas r WHERE r.session = t.session LIMIT 1), true)
                     OR coalesce(begun_at >= started_at, false) AS begun,
           crashes + stalls + 1 >= $2 AS last,
           $2 = 1 OR crashes + stalls + 1 >= $2 AND
                     (SELECT coalesce((SELECT r.suspects FROM onejob.replicas r WHERE r.session = t.session LIMIT 1), count(*)) = 1 AND bool_or(s.id = t.id)
                        FROM onejob.tasks s
                       WHERE s.status = 'running'
                         AND s.session = t.session
                         AND s.crashes + s.stalls + 1 >= $2
                         AND s.begun_at >= s.started_at
                         AND coalesce((SELECT r.heartbeat_at - s.begun_at < $5::bigint * interval '1 microsecond' FROM onejob.replicas r WHERE r.session = s.session LIMIT 1), true)) AS proven,
           crashes + stalls + 1 >= $2 AND
           (SELECT true
              FROM onejob.replicas r
              JOIN onejob.replicas o ON o.process <> r.process
               AND o.heartbeat_at BETWEEN r.heartbeat_at - interval '5 seconds' AND r.heartbeat_at + interval '1.5 seconds'
               AND o.heartbeat_at >= clock_timestamp() - interval '3 seconds'
               AND o.ended_at IS NULL
             WHERE r.session = t.session
               AND (SELECT true FROM onejob.attempts a WHERE a.task_id = t.id AND a.session = o.session LIMIT 1) IS NULL
             LIMIT 1) IS NOT NULL AS others_unheard
      FROM onejob.tasks t
     WHERE status = 'running'
       AND session = ANY ($1::uuid[])
       AND id <> ALL ($3)
       AND ($4::bigint[] IS NULL OR id = ANY ($4))
       AND (SELECT true FROM onejob.replicas r WHERE r.session = t.session AND r.ended_at IS NULL LIMIT 1) IS NULL
     LIMIT 1000
       FOR NO KEY UPDATE SKIP LOCKED
), judged AS ( -- whom the crash would quarantine waits until it is known who else died
    SELECT *
      FROM abandoned
     WHERE NOT (died AND begun AND last AND coalesce(proven, false) AND NOT others_died AND others_unheard)
), history AS (
    INSERT INTO onejob.attempts (fence, task_id, attempt, lock_key, replica, session, started_at, finished_at, outcome, charged, error)
    SELECT fence, id, attempt, coalesce(lock_key, id::text), replica, session, started_at, now(),
           CASE WHEN died THEN 'crashed' ELSE 'lease_lost' END,
           CASE WHEN died THEN begun AND NOT others_died END,
           format(CASE WHEN died THEN 'replica %s died' ELSE 'the session of replica %s ended' END, replica)
      FROM judged
        ON CONFLICT (task_id, fence) DO NOTHING
), blamed AS (
    SELECT *,
           (died AND begun)::int AS used_up,
           (died AND begun AND NOT others_died)::int AS blame
      FROM judged
), verdicts AS (
    SELECT id, session AS dead_session, replica AS dead_replica, attempt, used_up, blame, guilty AND NOT cancel_requested AS quarantined,
           CASE WHEN cancel_requested         THEN 'cancelled'
                WHEN used_up = 0              THEN 'pending'
                WHEN guilty                   THEN 'failed'
                WHEN attempt >= max_attempts  THEN 'failed'
                                              ELSE 'pending' END AS next,
           CASE WHEN NOT died
                THEN format('replica %s lost its session during attempt %s of %s', replica, attempt, max_attempts)
                WHEN guilty
                THEN format('quarantined: %s replicas died%s while they worked on it, the last was %s; see what it does to them, then onejob tasks retry %s',
                            crashes + stalls + 1, CASE WHEN stalls > 0 THEN ' or stalled' END, replica, id)
                ELSE format('replica %s died during attempt %s of %s', replica, attempt, max_attempts) END AS error
      FROM (SELECT *, last AND blame = 1 AND coalesce(proven, false) AS guilty FROM blamed) b
), taken AS (
    UPDATE onejob.tasks t
       SET status      = v.next,
           crashes     = least(t.crashes + v.blame, 1000000),
           attempt     = greatest(t.attempt - (1 - v.used_up), 0),
           error       = v.error,
           session     = NULL,
           replica     = NULL,
           finished_at = CASE WHEN v.next <> 'pending' THEN now() END
      FROM verdicts v
     WHERE t.id = v.id
       AND t.id = ANY (ARRAY(SELECT id FROM judged))
 RETURNING t.id, t.kind, coalesce(t.lock_key, t.id::text) AS lock_key, v.attempt, t.crashes, t.stalls, t.fence, v.dead_replica, t.status, v.quarantined,
           (extract(epoch FROM now() - t.started_at) * 1000000)::bigint AS micros
)
SELECT j.id, t.kind, t.lock_key, t.attempt, t.crashes, t.stalls, t.fence, t.dead_replica, t.status, t.quarantined, t.micros
  FROM judged j
  LEFT JOIN taken t USING (id)`

// takeOver is TakeOver for all tasks of dead sessions, or for these ids, but for some:
// all or none, except for those that a trigger leaves as they are, which are left alone for some minutes.
func (s *Store) takeOver(ctx context.Context, dead []string, ids, except []int64, maxCrashes int) (abandoned []tasks.Abandoned, unchanged []tasks.RowError, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	n := len(ids)
	if ids == nil {
		n = 1000
	}
	judged, err := queryAfter(ctx, s.pool, func(row pgx.CollectableRow) (tasks.Abandoned, error) {
		var o tasks.Abandoned
		var micros int64
		into := []any{&o.ID, &o.Kind, &o.LockKey, &o.Attempt, &o.Crashes, &o.Stalls, &o.Fence, &o.Replica, &o.Next, &o.Quarantined, &micros}
		if row.RawValues()[1] == nil { // a trigger has left it as it is
			clear(into[1:])
		}
		err := row.Scan(into...)
		o.Since = time.Duration(micros) * time.Microsecond
		return o, err
	}, boundedWrites, s.writes.bounds(n, s.timeout), takeOverSQL, dead, maxCrashes, except, ids, tasks.SuspectTime.Microseconds())
	if err != nil {
		return nil, nil, fmt.Errorf("take over tasks: %w", err)
	}
	for _, o := range judged {
		if o.Next != "" {
			abandoned = append(abandoned, o)
			continue
		}
		s.stuck.add(o.ID, avoidFor)
		unchanged = append(unchanged, tasks.RowError{ID: o.ID, Err: errUnchanged})
	}
	return abandoned, unchanged, nil
}

// CancelRequests returns those running tasks of session that somebody wants
// cancelled. It is asked every second, so it reads the index tasks_to_cancel and no other:
// that of running rows has millions of dead entries beside an old snapshot.
func (s *Store) CancelRequests(ctx context.Context, session string) ([]int64, error) {
	return fetch(ctx, s.pool, "look for cancel requests", pgx.RowTo[int64], `
SELECT id
  FROM onejob.tasks
 WHERE session = $1
   AND cancel_requested
   AND CASE WHEN cancel_requested THEN status = 'running' END`, session)
}

// Held returns the running tasks of session: enough of each to give it back.
func (s *Store) Held(ctx context.Context, session string) ([]*tasks.Task, error) {
	return fetch(ctx, s.pool, "list held tasks", func(row pgx.CollectableRow) (*tasks.Task, error) {
		t := &tasks.Task{Session: session}
		return t, row.Scan(&t.ID, &t.Kind, &t.LockKey, &t.Attempt, &t.Fence)
	}, `
SELECT id, kind, coalesce(lock_key, id::text), attempt, fence
  FROM onejob.tasks
 WHERE status = 'running'
   AND session = $1`, session)
}
