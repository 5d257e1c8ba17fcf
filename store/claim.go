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
	"github.com/jackc/pgx/v5/pgconn"

	"onejob/tasks"
)

// lanesSQL begins a statement with the lanes that have waiting rows: one probe of
// tasks_pending for each (a loose index scan).
const lanesSQL = `
WITH RECURSIVE lanes AS (
    (SELECT queue, priority, kind, lock_key IS NULL AS keyless
       FROM onejob.tasks
      WHERE status = 'pending'
        AND limit_name IS NULL
      ORDER BY queue, priority, kind, (lock_key IS NULL)
      LIMIT 1)
 UNION ALL
    SELECT next.*
      FROM lanes l
     CROSS JOIN LATERAL (
           SELECT queue, priority, kind, lock_key IS NULL
             FROM onejob.tasks
            WHERE status = 'pending'
              AND limit_name IS NULL
              AND (queue, priority, kind, (lock_key IS NULL)) > (l.queue, l.priority, l.kind, l.keyless)
            ORDER BY queue, priority, kind, (lock_key IS NULL)
            LIMIT 1) next
)`

// Every lane shows its first due rows, @near of them. Of those that share a
// lock_key only the first can be claimed, and none if the key is busy; where such
// rows fill what a lane shows, the lane is asked for the first row of each key
// instead. Then the best of all lanes are locked, one after the other, until
// there are enough. What others have locked is skipped: that is why a lane shows
// more rows than are wanted.
//
// A lock_key is reserved before a row with it is taken, see
// onejob.reserve_lock_key. A row without one shares its key, its id, only with a
// lock_key that happens to be the same number; if it becomes busy just now, or
// both are picked, the unique index on running lock keys refuses, and Claim asks
// again for fewer, with a new snapshot.
//
// now() is when the transaction began, which is before the snapshot: a holder of
// the same lock key may have finished in between. So an attempt starts at
// clock_timestamp(), after its row was locked and its key was seen free.
//
// The subqueries with LIMIT 1, where NOT EXISTS would do, keep the planner from
// a join: it would read all that is running, or by a bad guess the whole table.
// And the CASE hides from it that tasks_pending could find a row by its id, which
// looks right only while the table is empty. See docs/decisions/claim.md.
const claimSQL = lanesSQL + `, near AS (
    SELECT l.*, t.*
      FROM lanes l
     CROSS JOIN LATERAL (
           SELECT id, run_at, lock_key
             FROM onejob.tasks
            WHERE status   = 'pending'
              AND limit_name IS NULL
              AND queue    = l.queue
              AND priority = l.priority
              AND kind     = l.kind
              AND (lock_key IS NULL) = l.keyless
              AND run_at  <= now()
            ORDER BY run_at, id
            LIMIT @near) t
     WHERE l.kind = ANY (@kinds)
       AND (cardinality(@queues::text[]) = 0 OR l.queue = ANY (@queues))
), heads AS (
    SELECT *
      FROM (SELECT DISTINCT ON (lock_key) id, priority, run_at, lock_key
              FROM near
             WHERE NOT keyless
             ORDER BY lock_key, priority DESC, run_at, id) h
     WHERE (SELECT true FROM onejob.tasks r
             WHERE r.status = 'running' AND coalesce(r.lock_key, r.id::text) = h.lock_key LIMIT 1) IS NULL
), clogged AS (
    SELECT queue, priority, kind
      FROM near
     WHERE NOT keyless
       AND (SELECT count(*) FROM heads) < @max
     GROUP BY queue, priority, kind
    HAVING count(*) = @near
), keys AS (
    SELECT c.*, ''::text AS lock_key, NULL::timestamptz AS run_at, NULL::bigint AS id, 0 AS place
      FROM clogged c
 UNION ALL
    SELECT k.queue, k.priority, k.kind, next.*, k.place + 1
      FROM keys k
     CROSS JOIN LATERAL (
           SELECT lock_key, run_at, id
             FROM onejob.tasks
            WHERE status   = 'pending'
              AND limit_name IS NULL
              AND queue    = k.queue
              AND priority = k.priority
              AND kind     = k.kind
              AND lock_key > k.lock_key
            ORDER BY lock_key, run_at, id
            LIMIT 1) next
     WHERE k.place < 500
), candidates AS (
    SELECT id, priority, run_at
      FROM near
     WHERE keyless
 UNION ALL
    SELECT id, priority, run_at
      FROM (SELECT DISTINCT ON (lock_key) id, priority, run_at
              FROM (SELECT id, priority, run_at, lock_key
                      FROM heads
                 UNION ALL
                    SELECT id, priority, run_at, lock_key
                      FROM keys
                     WHERE run_at <= now()) both_ways
             ORDER BY lock_key, priority DESC, run_at, id) one_a_key
), picked AS (
    SELECT t.id
      FROM (SELECT * FROM candidates ORDER BY priority DESC, run_at, id) c
     CROSS JOIN LATERAL (
           SELECT id
             FROM onejob.tasks p
            WHERE id = c.id
              AND CASE WHEN status <> 'pending' OR run_at > now() THEN false
                       WHEN lock_key IS NOT NULL THEN onejob.reserve_lock_key(lock_key)
                       ELSE (SELECT true FROM onejob.tasks r
                              WHERE r.status = 'running' AND coalesce(r.lock_key, r.id::text) = p.id::text LIMIT 1) IS NULL END
              FOR UPDATE SKIP LOCKED) t
     LIMIT @max
)` + takeSQL

// takeSQL ends a statement that has picked rows: they become this session's own.
const takeSQL = `
UPDATE onejob.tasks t
   SET status     = 'running',
       attempt    = t.attempt + 1,
       fence      = nextval('onejob.fences'),
       session    = @session,
       replica    = @replica,
       started_at = clock_timestamp()
 WHERE t.id = ANY (ARRAY(SELECT id FROM picked))
RETURNING t.id, t.kind, t.payload, t.queue, t.priority, coalesce(t.lock_key, t.id::text), t.attempt, t.max_attempts,
          t.crashes, coalesce((extract(epoch FROM t.timeout) * 1000000)::bigint, 0), t.fence, t.run_at, t.created_at`

// Rows with a limit are claimed under a slot of that limit, few at a time.
const claimLimitedSQL = `
WITH picked AS (
    SELECT id
      FROM onejob.tasks p
     WHERE status     = 'pending'
       AND limit_name = @limit
       AND run_at    <= now()
       AND kind       = ANY (@kinds)
       AND (cardinality(@queues::text[]) = 0 OR queue = ANY (@queues))
       AND CASE WHEN lock_key IS NOT NULL THEN onejob.reserve_lock_key(lock_key)
                ELSE (SELECT true FROM onejob.tasks r
                       WHERE r.status = 'running' AND coalesce(r.lock_key, r.id::text) = p.id::text LIMIT 1) IS NULL END
     ORDER BY priority DESC, run_at, id
     LIMIT @max
       FOR UPDATE SKIP LOCKED
)` + takeSQL

// turnSQL comes before claimSQL in its transaction, and lets those who claim from
// the same queues do it one after the other.
//
// It is for speed alone. Side by side, each would lock rows that another has
// claimed since its snapshot was taken, to no avail, and keep them locked from
// whoever completes them. One after the other, none sees a row that is not to be
// had, and what becomes due or free meanwhile is claimed together.
const turnSQL = `
SELECT ` + settings + `,
       set_config('lock_timeout', $1, true),
       pg_advisory_xact_lock(hashtextextended($2, 20180914))`

// How long a claim waits for its turn before it goes without. Claims take
// milliseconds, and those of many busy replicas on a slow server a second
// until all had their turn. A longer one is that of a replica that was frozen in
// the middle of it, and after one such wait it is expected to be there still.
const (
	turnTimeout      = 3 * time.Second
	turnTimeoutAgain = 100 * time.Millisecond
)

// Claim makes up to c.Max due tasks this session's own and returns them, the
// most urgent first. An empty answer is an ordinary one.
func (s *Store) Claim(ctx context.Context, c tasks.Claim) ([]*tasks.Task, error) {
	wait := min(turnTimeout, s.timeout/4) // the claim itself needs time, too
	if s.turnStuck.Load() {
		wait = turnTimeoutAgain
	}
	first, args := turnSQL, []any{fmt.Sprint(wait.Milliseconds()), "onejob claims " + strings.Join(slices.Sorted(slices.Values(c.Queues)), "\x1f")}
	if c.Limit != "" { // those are few, and come one by one
		first, args = indexesOnly, nil
	}
	for tries := 1; ; {
		claimed, err := s.claim(ctx, c, first, args)
		var pg *pgconn.PgError
		switch errors.As(err, &pg); {
		case err == nil:
			if first == turnSQL {
				s.turnStuck.Store(false)
			}
			return claimed, nil
		case pg == nil || tries == 5:
			return nil, fmt.Errorf("claim tasks: %w", err)
		case pg.Code == lockTimeout:
			s.turnStuck.Store(true)
			first, args = indexesOnly, nil
			tries++
		case pg.ConstraintName == "one_running_task_per_lock_key" && c.Max > 1:
			// A row without a lock_key and one whose lock_key is that row's id: no
			// statement can make both running. Fewer rows hold only one of them.
			c.Max /= 2
		case pg.ConstraintName == "one_running_task_per_lock_key", pg.Code == deadlock:
			tries++
		default:
			return nil, fmt.Errorf("claim tasks: %w", err)
		}
	}
}

func (s *Store) claim(ctx context.Context, c tasks.Claim, first string, args []any) ([]*tasks.Task, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	type claimed struct {
		task  *tasks.Task
		runAt time.Time
	}
	sql := claimSQL
	if c.Limit != "" {
		sql = claimLimitedSQL
	}
	list, err := queryAfter(ctx, s.pool, func(row pgx.CollectableRow) (claimed, error) {
		t := &tasks.Task{Session: c.Session, Replica: c.Replica}
		var micros int64
		var runAt time.Time
		err := row.Scan(&t.ID, &t.Kind, &t.Payload, &t.Queue, &t.Priority, &t.LockKey, &t.Attempt, &t.MaxAttempts,
			&t.Crashes, &micros, &t.Fence, &runAt, &t.CreatedAt)
		t.Timeout = time.Duration(micros) * time.Microsecond
		return claimed{t, runAt}, err
	}, first, args, sql, pgx.NamedArgs{
		"limit": c.Limit, "session": c.Session, "replica": c.Replica, "kinds": c.Kinds, "queues": notNil(c.Queues), "max": c.Max,
		"near": max(64, 2*c.Max),
	})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(list, func(a, b claimed) int {
		return cmp.Or(cmp.Compare(b.task.Priority, a.task.Priority), a.runAt.Compare(b.runAt), cmp.Compare(a.task.ID, b.task.ID))
	})
	out := make([]*tasks.Task, len(list))
	for i, c := range list {
		out[i] = c.task
	}
	return out, nil
}

// Sessions returns the sessions, other than mine, that hold running tasks.
func (s *Store) Sessions(ctx context.Context, mine string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	sessions, err := query(ctx, s.pool, pgx.RowTo[string], `
SELECT DISTINCT session::text
  FROM onejob.tasks
 WHERE status = 'running'
   AND session::text <> $1`, mine)
	if err != nil {
		return nil, fmt.Errorf("list the sessions of running tasks: %w", err)
	}
	return sessions, nil
}

// TakeOver takes the running tasks of dead sessions from them: they become due
// again, or fail when they have ended maxCrashes replicas or used up their
// attempts. Two replicas may do it at once; each task is moved by one of them,
// and as neither waits for a row, no order is needed against deadlocks.
func (s *Store) TakeOver(ctx context.Context, dead []string, maxCrashes int) ([]tasks.Orphan, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	orphans, err := query(ctx, s.pool, func(row pgx.CollectableRow) (tasks.Orphan, error) {
		var o tasks.Orphan
		var micros int64
		err := row.Scan(&o.ID, &o.Kind, &o.LockKey, &o.Attempt, &o.Crashes, &o.Fence, &o.Replica, &o.Next, &micros)
		o.Since = time.Duration(micros) * time.Microsecond
		return o, err
	}, `
WITH orphans AS (
    SELECT id, fence, attempt, max_attempts, crashes, lock_key, replica, session, started_at, cancel_requested
      FROM onejob.tasks
     WHERE status = 'running'
       AND session = ANY ($1::uuid[])
     LIMIT 1000
       FOR UPDATE SKIP LOCKED
), history AS (
    INSERT INTO onejob.attempts (fence, task_id, attempt, lock_key, replica, session, started_at, finished_at, outcome, error)
    SELECT fence, id, attempt, coalesce(lock_key, id::text), replica, session, started_at, now(), 'crashed',
           format('the session of replica %s ended', replica)
      FROM orphans
        ON CONFLICT (task_id, fence) DO NOTHING
), verdicts AS (
    SELECT id, session AS dead_session, replica AS dead_replica,
           CASE WHEN cancel_requested         THEN 'cancelled'
                WHEN crashes + 1 >= $2        THEN 'failed'
                WHEN attempt >= max_attempts  THEN 'failed'
                                              ELSE 'pending' END AS next,
           CASE WHEN crashes + 1 >= $2
                THEN format('quarantined: %s replicas died while they worked on it, the last was %s; see what it does to them, then onejob tasks retry %s', crashes + 1, replica, id)
                ELSE format('replica %s died during attempt %s of %s', replica, attempt, max_attempts) END AS error
      FROM orphans
)
UPDATE onejob.tasks t
   SET status      = v.next,
       crashes     = t.crashes + 1,
       error       = v.error,
       session     = NULL,
       replica     = NULL,
       finished_at = CASE WHEN v.next <> 'pending' THEN now() END
  FROM verdicts v
 WHERE t.id = v.id
   AND t.id = ANY (ARRAY(SELECT id FROM orphans))
RETURNING t.id, t.kind, coalesce(t.lock_key, t.id::text), t.attempt, t.crashes, t.fence, v.dead_replica, t.status,
          (extract(epoch FROM now() - t.started_at) * 1000000)::bigint`, dead, maxCrashes)
	if err != nil {
		return nil, fmt.Errorf("take over tasks: %w", err)
	}
	return orphans, nil
}

// UnknownKinds returns the kinds of waiting tasks that are not among known.
func (s *Store) UnknownKinds(ctx context.Context, known []string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	kinds, err := query(ctx, s.pool, pgx.RowTo[string], lanesSQL+`
SELECT DISTINCT kind FROM lanes WHERE kind <> ALL ($1)`, notNil(known))
	if err != nil {
		return nil, fmt.Errorf("look for unknown kinds: %w", err)
	}
	return kinds, nil
}

// DueLimits returns the names of limits under which rows are due that c would
// claim. Whether their lock keys are free is not asked.
func (s *Store) DueLimits(ctx context.Context, c tasks.Claim) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	names, err := query(ctx, s.pool, pgx.RowTo[string], `
WITH RECURSIVE names AS (
    (SELECT limit_name
       FROM onejob.tasks
      WHERE status = 'pending'
        AND limit_name IS NOT NULL
      ORDER BY limit_name
      LIMIT 1)
 UNION ALL
    SELECT next.limit_name
      FROM names n
     CROSS JOIN LATERAL (
           SELECT limit_name
             FROM onejob.tasks
            WHERE status = 'pending'
              AND limit_name > n.limit_name
            ORDER BY limit_name
            LIMIT 1) next
)
SELECT limit_name
  FROM names n
 WHERE (SELECT true
          FROM onejob.tasks
         WHERE status     = 'pending'
           AND limit_name = n.limit_name
           AND run_at    <= now()
           AND kind       = ANY ($1)
           AND (cardinality($2::text[]) = 0 OR queue = ANY ($2))
         LIMIT 1)`, c.Kinds, notNil(c.Queues))
	if err != nil {
		return nil, fmt.Errorf("look for limits with due tasks: %w", err)
	}
	return names, nil
}

// DueKinds returns those of c.Kinds of which rows without a limit of their own
// are due.
func (s *Store) DueKinds(ctx context.Context, c tasks.Claim) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	kinds, err := query(ctx, s.pool, pgx.RowTo[string], lanesSQL+`
SELECT DISTINCT kind
  FROM lanes l
 WHERE kind = ANY ($1)
   AND (cardinality($2::text[]) = 0 OR queue = ANY ($2))
   AND (SELECT true
          FROM onejob.tasks
         WHERE status   = 'pending'
           AND limit_name IS NULL
           AND queue    = l.queue
           AND priority = l.priority
           AND kind     = l.kind
           AND (lock_key IS NULL) = l.keyless
           AND run_at  <= now()
         LIMIT 1)`, c.Kinds, notNil(c.Queues))
	if err != nil {
		return nil, fmt.Errorf("look for due kinds: %w", err)
	}
	return kinds, nil
}

// CancelRequests returns those running tasks of session that somebody wants
// cancelled.
func (s *Store) CancelRequests(ctx context.Context, session string) ([]int64, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	ids, err := query(ctx, s.pool, pgx.RowTo[int64], `
SELECT id
  FROM onejob.tasks
 WHERE status = 'running'
   AND session = $1
   AND cancel_requested`, session)
	if err != nil {
		return nil, fmt.Errorf("look for cancel requests: %w", err)
	}
	return ids, nil
}

// Held returns the running tasks of session: enough of each to give it back.
func (s *Store) Held(ctx context.Context, session string) ([]*tasks.Task, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	held, err := query(ctx, s.pool, func(row pgx.CollectableRow) (*tasks.Task, error) {
		t := &tasks.Task{Session: session}
		return t, row.Scan(&t.ID, &t.Kind, &t.LockKey, &t.Attempt, &t.Fence)
	}, `
SELECT id, kind, coalesce(lock_key, id::text), attempt, fence
  FROM onejob.tasks
 WHERE status = 'running'
   AND session = $1`, session)
	if err != nil {
		return nil, fmt.Errorf("list held tasks: %w", err)
	}
	return held, nil
}

func notNil(s []string) []string {
	if s == nil {
		return []string{}
	}
	return s
}
