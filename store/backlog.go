package store

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// Backlog is the due tasks of one queue and kind.
type Backlog struct {
	Queue string
	Kind  string
	Due   int           // how many are due; MaxBacklog stands for that many or more
	Age   time.Duration // for how long the first of them has waited; 0 if the queue is paused
}

// MaxBacklog is where Backlog stops counting.
const MaxBacklog = 10_001

const (
	// maxBacklogs is how many queues and kinds Backlog tells apart. Anybody who may INSERT
	// can make up names, and each becomes a time series.
	maxBacklogs = 200

	// maxBacklogLanes is how many lanes with a limit Backlog looks at.
	maxBacklogLanes = 2000
)

// backlogSQL counts the due rows of each lane up to MaxBacklog, and adds up what shares a
// queue and a kind. Lanes without a limit come from lanesSQL; those with one are found in
// the same way, by one probe of tasks_pending_by_limit for each.
//
// The age is that of the first row of each lane, by run_at: from its run_at, or from when it was
// enqueued if that was later, as after a backfill of a schedule. See waitingSQL.
const backlogSQL = lanesSQL + `, limited AS (
    SELECT ''::text AS limit_name, (-1)::bigint AS lane, NULL::text AS queue, NULL::text AS kind, NULL::timestamptz AS run_at, NULL::timestamptz AS created_at, 0 AS number
 UNION ALL
    SELECT next.*, l.number + 1
      FROM limited l
     CROSS JOIN LATERAL (
           SELECT limit_name, onejob.lane(priority, queue, kind, lock_key IS NULL), queue, kind, run_at, created_at
             FROM onejob.tasks
            WHERE status = 'pending'
              AND limit_name IS NOT NULL
              AND (limit_name, onejob.lane(priority, queue, kind, lock_key IS NULL)) > (l.limit_name, l.lane)
            ORDER BY limit_name, onejob.lane(priority, queue, kind, lock_key IS NULL), run_at, id
            LIMIT 1) next
     WHERE l.number < @lanes_with_a_limit
), counted AS (
    SELECT l.queue, l.kind, f.since, c.due
      FROM lanes l
     CROSS JOIN LATERAL (
           SELECT greatest(run_at, created_at) AS since
             FROM onejob.tasks
            WHERE status = 'pending'
              AND limit_name IS NULL
              AND onejob.lane(priority, queue, kind, lock_key IS NULL) = l.lane
              AND run_at >= l.run_at
            ORDER BY run_at, id
            LIMIT 1) f
     CROSS JOIN LATERAL (
           SELECT count(*) AS due
             FROM (SELECT
                     FROM onejob.tasks
                    WHERE status = 'pending'
                      AND limit_name IS NULL
                      AND onejob.lane(priority, queue, kind, lock_key IS NULL) = l.lane
                      AND run_at >= l.run_at
                      AND run_at <= statement_timestamp()
                    LIMIT @most) first_rows) c
     WHERE l.run_at <= statement_timestamp()
 UNION ALL
    SELECT l.queue, l.kind, greatest(l.run_at, l.created_at) AS since, c.due
      FROM limited l
     CROSS JOIN LATERAL (
           SELECT count(*) AS due
             FROM (SELECT
                     FROM onejob.tasks
                    WHERE status = 'pending'
                      AND limit_name = l.limit_name
                      AND onejob.lane(priority, queue, kind, lock_key IS NULL) = l.lane
                      AND run_at <= statement_timestamp()
                    LIMIT @most) first_rows) c
     WHERE l.run_at <= statement_timestamp()
), totals AS (
    SELECT queue, kind, least(sum(due), @most)::int AS due, min(since) FILTER (WHERE queue <> ALL (` + pausedSQL + `)) AS since
      FROM counted
     GROUP BY queue, kind
), ranked AS (
    SELECT *, row_number() OVER (ORDER BY due DESC, queue, kind) <= @pairs AS shown
      FROM totals
)
SELECT CASE WHEN shown THEN queue ELSE 'other' END,
       CASE WHEN shown THEN kind  ELSE 'other' END,
       least(sum(due), @most)::int,
       CASE WHEN min(since) IS NULL THEN 0 ELSE greatest(0, least(extract(epoch FROM statement_timestamp() - least(greatest(min(since), '0001-01-01 UTC'), statement_timestamp())), 9e9)) END::float8
  FROM ranked
 GROUP BY 1, 2`

// Backlog returns the due tasks by queue and kind, also those that wait for a limit or a lock
// key. It reads at most MaxBacklog index entries of each lane, which is what shares
// priority, queue, kind and limit. Of many pairs of queue and kind those with few tasks
// are added up as queue and kind "other", with what has these names itself.
func (s *Store) Backlog(ctx context.Context) ([]Backlog, error) {
	arguments := s.remember.costly()
	arguments["most"], arguments["pairs"], arguments["lanes_with_a_limit"] = MaxBacklog, maxBacklogs, maxBacklogLanes
	return fetch(ctx, s.pool, "count due tasks", func(row pgx.CollectableRow) (b Backlog, err error) {
		var age float64
		err = row.Scan(&b.Queue, &b.Kind, &b.Due, &age)
		b.Age = time.Duration(age * float64(time.Second))
		return b, err
	}, backlogSQL, arguments)
}
