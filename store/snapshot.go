package store

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"onejob/internal/pgerror"
	"onejob/tasks"
)

// What people who watch the cluster see of Postgres: all that is going on (Overview), one
// task (Story), and tasks by what is known of them (Find).
//
// Somebody looks every two seconds, for hours, when the database is in trouble. So this has
// a connection of its own, in a transaction that can write nothing; each statement ends
// after glanceTimeout; and none reads more than some tens of thousands of index entries, or
// counts what it does not read. The isolation level is READ COMMITTED, so that no statement's
// snapshot is held while the next one runs.
const (
	glanceTimeout  = 500 * time.Millisecond
	glancesTimeout = 10 * time.Second // of all statements together, with the connection

	// MostCounted is the highest number of tasks that Overview counts. One more means that
	// there are more.
	MostCounted = 10_000

	// MostRated is the same of tasks that came or ended within a minute.
	MostRated = 2000

	waitingLanes = 1000   // that are looked at, with a limit and without; one more shows that there are more
	waitingRead  = 50_000 // due rows that are counted in all of them, and as many that are due later
	namesRead    = 2000   // rows whose payloads are searched for names that no replica has
	shownNames   = 20
	shownRunning = 50
	failedLooked = MostCounted

	shownRates       = 200
	shownSchedules   = 200
	shownPaused      = 1000
	shownOccurrences = 20

	// MostReplicas is how many live replicas Overview returns, of more those that began last.
	MostReplicas  = 2000
	shownReplicas = 200 // without the live ones above that number

	// longestShown is the longest duration that is shown, in seconds: 285 years, about what a
	// time.Duration holds. A row may have been due since the year 1.
	longestShown = 9_000_000_000

	// HeldTooLong is from when on a transaction that holds back vacuum is reported.
	HeldTooLong = 5 * time.Minute
)

// Overview is what Postgres knows of the cluster. Each part was read by a statement of its
// own, and has an error of its own.
type Overview struct {
	Now       time.Time // by Postgres' clock, when the first part was read
	Replicas  Part[ReplicaGlance]
	Waiting   Part[Waiting]
	Nameless  Part[Nameless]
	Rates     Part[Rate]
	Paused    Part[QueueRow]
	Running   Part[Running]
	Schedules Part[ScheduleGlance]
	Failures  Part[Failure]
	Overlaps  Part[tasks.Overlap]
	Held      Part[tasks.HeldSnapshot]
}

// A Part is one list of an Overview, or why there is none.
type Part[T any] struct {
	Rows []T
	Took time.Duration
	Err  error
}

// ReplicaGlance is a replica that has not ended, or ended within the last ten minutes.
type ReplicaGlance struct {
	Session     string             `db:"session"`
	Name        string             `db:"name"`
	Host        string             `db:"host"`
	PID         int                `db:"pid"`
	Version     string             `db:"version"`
	Kinds       []string           `db:"kinds"`
	Queues      []string           `db:"queues"` // empty: all
	Concurrency int                `db:"concurrency"`
	Running     int                `db:"running"`
	State       tasks.ReplicaState `db:"state"`
	Silent      time.Duration      `db:"silent"`      // since its last heartbeat, by Postgres' clock
	ClockAhead  *time.Duration     `db:"clock_ahead"` // its wall clock's, of Postgres' clock; nil if it has not said so yet
	BeganAt     Time               `db:"began_at"`
}

// replicaGlanceSQL has all that live, since who serves a queue is judged by them, and of those that
// ended within minutes no more than are shown.
const replicaGlanceSQL = `
SELECT session::text, name, host, pid, version, kinds, queues, concurrency, running, state,
       (least(extract(epoch FROM greatest(clock_timestamp() - heartbeat_at, interval '0')), @longest) * 1000000000)::bigint AS silent,
       CASE WHEN clock_ahead IS NOT NULL THEN (greatest(least(extract(epoch FROM clock_ahead), @longest), -@longest::bigint) * 1000000000)::bigint END AS clock_ahead, began_at
  FROM (SELECT *, row_number() OVER (ORDER BY ended_at IS NOT NULL, began_at DESC, session) AS place
          FROM onejob.replicas
         WHERE ended_at IS NULL
            OR ended_at > statement_timestamp() - interval '10 minutes') listed
 WHERE place <= CASE WHEN ended_at IS NULL THEN @live::bigint ELSE @replicas::bigint END
 ORDER BY place`

// Waiting is what waits in one queue, of one kind, under one limit. A count of which there is
// more is a lower bound.
type Waiting struct {
	Limit     string        `db:"limit_name"` // empty: none
	Queue     string        `db:"queue"`
	Kind      string        `db:"kind"`
	Due       int64         `db:"due"`
	DueMore   bool          `db:"due_more"`
	Oldest    time.Duration `db:"oldest"`         // for how long the first one has waited; see waitingSQL
	Keyless   time.Duration `db:"oldest_keyless"` // the same of those that wait for no lock key of others
	Later     int64         `db:"later"`          // tasks that are due at some later time; not the parked ones
	LaterMore bool          `db:"later_more"`

	// LeftOut: there are more priorities, queues and kinds than are looked at, so there may be
	// rows of this form that are missing, and older tasks. Those of the lowest priorities are.
	LeftOut bool `db:"left_out"`
}

// lanesOfAllSQL begins a statement with the lanes that have waiting rows, found by a loose index scan:
// those of rows without a limit and those of rows with one, @lanes of each, and one more if there are
// more. since is from when on the first row of the lane has waited, if it is due.
const lanesOfAllSQL = `
WITH RECURSIVE unlimited AS (
    SELECT (-1)::bigint AS lane, NULL::text AS queue, NULL::text AS kind, false AS keyless, NULL::timestamptz AS since, 0 AS n
 UNION ALL
    SELECT next.lane, next.queue, next.kind, next.keyless, next.since, l.n + 1
      FROM unlimited l
     CROSS JOIN LATERAL (
           SELECT onejob.lane(priority, queue, kind, lock_key IS NULL) AS lane, queue, kind, lock_key IS NULL AS keyless,
                  CASE WHEN run_at <= statement_timestamp()
                       THEN least(greatest(run_at, created_at, '0001-01-01 UTC'), statement_timestamp()) END AS since
             FROM onejob.tasks
            WHERE status = 'pending'
              AND limit_name IS NULL
              AND onejob.lane(priority, queue, kind, lock_key IS NULL) > l.lane
            ORDER BY onejob.lane(priority, queue, kind, lock_key IS NULL), run_at, id
            LIMIT 1) next
     WHERE l.n <= @lanes
), limited AS (
    SELECT ''::text AS limit_name, (-1)::bigint AS lane, NULL::text AS queue, NULL::text AS kind, false AS keyless, NULL::timestamptz AS since, 0 AS n
 UNION ALL
    SELECT next.limit_name, next.lane, next.queue, next.kind, next.keyless, next.since, l.n + 1
      FROM limited l
     CROSS JOIN LATERAL (
           SELECT limit_name, onejob.lane(priority, queue, kind, lock_key IS NULL) AS lane, queue, kind, lock_key IS NULL AS keyless,
                  CASE WHEN run_at <= statement_timestamp()
                       THEN least(greatest(run_at, created_at, '0001-01-01 UTC'), statement_timestamp()) END AS since
             FROM onejob.tasks
            WHERE status = 'pending'
              AND limit_name IS NOT NULL
              AND (limit_name, onejob.lane(priority, queue, kind, lock_key IS NULL)) > (l.limit_name, l.lane)
            ORDER BY limit_name, onejob.lane(priority, queue, kind, lock_key IS NULL), run_at, id
            LIMIT 1) next
     WHERE l.n <= @lanes
)`

// waitingSQL counts some rows of each lane: all lanes together show at most @read of what is due, and
// one lane at most @most.
//
// How long the oldest one has waited is that of the first row of each lane, by run_at: from its run_at,
// or from when it was enqueued if that was later, as after a backfill of a schedule. A row behind it may
// have waited for longer, if the first one was enqueued for a time that had passed. To know that, the
// statement would have to read the rows as well as the entries of the index.
var waitingSQL = lanesOfAllSQL + `, portion AS MATERIALIZED (
    SELECT least(@most::bigint, greatest(50, @read::bigint / greatest(1, (SELECT count(*) FROM unlimited) + (SELECT count(*) FROM limited) - 2))) AS n
), counted AS (` + countedSQL("unlimited", "''", "limit_name IS NULL") + `
 UNION ALL` + countedSQL("limited", "l.limit_name", "limit_name = l.limit_name") + `
)
SELECT limit_name, queue, kind, sum(due)::bigint AS due, bool_or(due >= n OR left_out) AS due_more,
       (least(greatest(coalesce(extract(epoch FROM statement_timestamp() - min(since)), 0), 0), @longest) * 1000000000)::bigint AS oldest,
       (least(greatest(coalesce(extract(epoch FROM statement_timestamp() - min(since) FILTER (WHERE keyless)), 0), 0), @longest) * 1000000000)::bigint AS oldest_keyless,
       sum(later)::bigint AS later, bool_or(later >= n OR left_out) AS later_more, bool_or(left_out) AS left_out
  FROM counted
 CROSS JOIN portion
 GROUP BY limit_name, queue, kind
 ORDER BY limit_name, queue, kind`

// countedSQL counts in the lanes of a part of waitingSQL.
func countedSQL(lanes, name, limit string) string {
	return strings.NewReplacer("{lanes}", lanes, "{name}", name, "{limit}", limit).Replace(`
    SELECT {name} AS limit_name, l.queue, l.kind, l.keyless, l.since, d.due, f.later, (SELECT max(n) > @lanes FROM {lanes}) AS left_out
      FROM {lanes} l
     CROSS JOIN LATERAL (
           SELECT count(*) AS due
             FROM (SELECT
                     FROM onejob.tasks
                    WHERE status = 'pending'
                      AND {limit}
                      AND onejob.lane(priority, queue, kind, lock_key IS NULL) = l.lane
                      AND run_at <= statement_timestamp()
                    ORDER BY run_at, id
                    LIMIT (SELECT n FROM portion)) first) d
     CROSS JOIN LATERAL (
           SELECT count(*) AS later
             FROM (SELECT
                     FROM onejob.tasks
                    WHERE status = 'pending'
                      AND {limit}
                      AND onejob.lane(priority, queue, kind, lock_key IS NULL) = l.lane
                      AND run_at > statement_timestamp()
                      AND run_at < 'infinity'
                    ORDER BY run_at, id
                    LIMIT (SELECT n FROM portion)) first) f
     WHERE l.n > 0`)
}

// Nameless is a name in payloads of due tasks that no replica which could claim them has in its
// configuration, such as a command of the kind exec.
type Nameless struct {
	Kind   string `db:"kind"`
	Field  string `db:"field"` // of the payload
	Name   string `db:"name"`  // its beginning
	Sample int64  `db:"sample"`
}

// namelessSQL looks at the first rows of each lane, @read in all lanes together or one of each: those
// that are due, and those that were given back a moment ago.
var namelessSQL = lanesOfAllSQL + `, known AS MATERIALIZED (
    SELECT DISTINCT r.queues, k.kind, n.field, n.names
      FROM onejob.replicas r
     CROSS JOIN LATERAL unnest(r.kinds) k(kind)
      LEFT JOIN LATERAL (
           SELECT key AS field, value AS names
             FROM jsonb_each(CASE WHEN jsonb_typeof(r.names -> k.kind) = 'object' THEN r.names -> k.kind END)
            LIMIT 1) n ON true
     WHERE r.ended_at IS NULL
       AND r.state = 'working'
       AND r.heartbeat_at > statement_timestamp() - interval '7 seconds'
), portion AS MATERIALIZED (
    SELECT greatest(1, @read::bigint / greatest(1, (SELECT count(*) FROM unlimited) + (SELECT count(*) FROM limited) - 2)) AS n
), looked AS MATERIALIZED (` + lookedSQL("unlimited", "limit_name IS NULL") + `
 UNION ALL` + lookedSQL("limited", "limit_name = l.limit_name") + `
)
SELECT l.kind, k.field, left(l.payload ->> k.field, 200) AS name, max(l.id) AS sample
  FROM looked l
 CROSS JOIN LATERAL (
       SELECT max(field) AS field
         FROM known
        WHERE kind = l.kind
          AND (cardinality(queues) = 0 OR l.queue = ANY (queues))
       HAVING NOT bool_or(coalesce(names ? (l.payload ->> field), true))) k
 GROUP BY 1, 2, 3
 ORDER BY count(*) DESC, 1, 3
 LIMIT @names`

// lookedSQL looks into the lanes of a part of namelessSQL.
func lookedSQL(lanes, limit string) string {
	return strings.NewReplacer("{lanes}", lanes, "{limit}", limit).Replace(`
    SELECT f.*
      FROM {lanes} l
     CROSS JOIN LATERAL (
           SELECT id, kind, queue, payload, fence, started_at, run_at
             FROM onejob.tasks
            WHERE status = 'pending'
              AND {limit}
              AND onejob.lane(priority, queue, kind, lock_key IS NULL) = l.lane
              AND run_at < statement_timestamp() + interval '1 minute'
            ORDER BY run_at, id
            LIMIT (SELECT n FROM portion)) f
     WHERE l.n > 0
       AND EXISTS (SELECT FROM known WHERE kind = l.kind AND field IS NOT NULL)
       AND (f.run_at <= statement_timestamp() OR f.fence IS NOT NULL AND f.started_at IS NULL)
       AND pg_column_size(f.payload) < 4000`)
}

// Rate is how many tasks came into a queue and how many ended there, within the last minute.
type Rate struct {
	Queue        string `db:"queue"`
	Enqueued     int64  `db:"enqueued"`
	EnqueuedMore bool   `db:"enqueued_more"` // there may be more: not all were read
	Ended        int64  `db:"ended"`
	EndedMore    bool   `db:"ended_more"`
}

// ratesSQL reads the newest rows, and those of each final status that ended last. No index
// has the latter of rows with a keep_for; of these it sees what is among the newest.
const ratesSQL = `
WITH minute AS (
    SELECT statement_timestamp() - interval '1 minute' AS began
), newest AS MATERIALIZED (
    SELECT queue, created_at, CASE WHEN keep_for IS NOT NULL THEN finished_at END AS finished_at
      FROM onejob.tasks
     ORDER BY id DESC
     LIMIT @most + 1
), finished AS MATERIALIZED (
    SELECT s.status, f.queue
      FROM (VALUES ('succeeded'), ('failed'), ('cancelled')) s(status)
     CROSS JOIN LATERAL (
           SELECT queue
             FROM onejob.tasks t
            WHERE t.status = s.status
              AND finished_at IS NOT NULL
              AND keep_for IS NULL
              AND finished_at > (SELECT began FROM minute)
            ORDER BY finished_at DESC
            LIMIT @most + 1) f
), counted AS (
    SELECT queue, count(*) FILTER (WHERE created_at > began) AS enqueued, count(*) FILTER (WHERE finished_at > began) AS ended
      FROM newest
     CROSS JOIN minute
     GROUP BY queue
 UNION ALL
    SELECT queue, 0, count(*)
      FROM finished
     GROUP BY queue
)
SELECT queue, least(sum(enqueued), @most)::bigint AS enqueued, (SELECT count(*) > @most AND min(created_at) > (SELECT began FROM minute) FROM newest) AS enqueued_more,
       least(sum(ended), @most)::bigint AS ended, EXISTS (SELECT FROM finished GROUP BY status HAVING count(*) > @most) AS ended_more
  FROM counted
 GROUP BY queue
HAVING sum(enqueued) + sum(ended) > 0
 ORDER BY sum(enqueued) + sum(ended) DESC, queue
 LIMIT @queues`

// Running is an attempt that is under way.
type Running struct {
	ID              int64          `db:"id"`
	Kind            string         `db:"kind"`
	Queue           string         `db:"queue"`
	Payload         *string        `db:"payload"` // nil if it is longer than a few KB
	LockKey         *string        `db:"lock_key"`
	LimitName       *string        `db:"limit_name"`
	Replica         string         `db:"replica"`
	Session         string         `db:"session"`
	Attempt         int            `db:"attempt"`
	MaxAttempts     int            `db:"max_attempts"`
	Fence           int64          `db:"fence"`
	StartedAt       Time           `db:"started_at"`
	Age             time.Duration  `db:"age"`     // since then, by Postgres' clock
	Timeout         *time.Duration `db:"timeout"` // the row's own
	CancelRequested bool           `db:"cancel_requested"`
	Progress        *TaskProgress  `db:"progress"`
	All             int64          `db:"all"` // how many run; MostCounted + 1 if there are more
}

// runningSQL reads the rows that run, which are few: as many as the replicas run at once. No
// index has them by their age.
var runningSQL = `
WITH running AS MATERIALIZED (
    SELECT id, started_at
      FROM onejob.tasks
     WHERE status = 'running'
     LIMIT @most + 1
)
SELECT id, kind, queue, CASE WHEN pg_column_size(payload) < 4000 THEN left(payload::text, 4000) END AS payload, lock_key, limit_name,
       coalesce(replica, '') AS replica, coalesce(session::text, '') AS session, attempt, max_attempts, coalesce(fence, 0) AS fence, started_at,
       (least(extract(epoch FROM greatest(statement_timestamp() - started_at, interval '0')), @longest) * 1000000000)::bigint AS age,
       CASE WHEN timeout IS NOT NULL THEN (greatest(least(extract(epoch FROM timeout), @longest), 0) * 1000000000)::bigint END AS timeout, cancel_requested, ` + progressColumn + `,
       (SELECT count(*) FROM running) AS "all"
  FROM onejob.tasks
 WHERE id = ANY (ARRAY(SELECT id FROM running ORDER BY started_at, id LIMIT @shown))
   AND status = 'running'
 ORDER BY started_at, id`

// ScheduleGlance is a schedule and its last due times, the oldest first.
type ScheduleGlance struct {
	ID       int64       `db:"id"`
	Name     string      `db:"name"`
	Cron     string      `db:"cron"`
	TimeZone string      `db:"time_zone"`
	Kind     string      `db:"kind"`
	Queue    string      `db:"queue"`
	Enabled  bool        `db:"enabled"`
	Paused   *Time       `db:"paused_until"` // nil if it is not paused; infinite: until it is resumed
	PausedAt *Time       `db:"paused_at"`
	PausedBy *string     `db:"paused_by"`
	Reason   *string     `db:"pause_reason"`
	NextAt   *Time       `db:"next_at"`
	LastAt   *Time       `db:"last_at"`
	Error    string      `db:"error"`
	Behind   bool        `db:"behind"` // it is enabled, and its next due time was more than a minute ago
	DueAt    []time.Time `db:"due_at"`
	TaskIDs  []int64     `db:"task_ids"` // zero: none
	Became   []string    `db:"became"`   // the task's status, "deleted", or why there is no task
}

// scheduleGlanceSQL chooses those first that create no tasks because of an error, and those
// that are late: of more schedules than are shown, these must not be left out.
const scheduleGlanceSQL = `
SELECT s.id, s.name, s.cron, s.time_zone, s.kind, s.queue, s.enabled,
       ` + pauseColumns + `,
       s.next_at, s.last_at, coalesce(s.error, '') AS error,
       coalesce(s.enabled AND s.next_at < statement_timestamp() - interval '1 minute', false) AS behind,
       o.due_at, o.task_ids, o.became
  FROM (SELECT *
          FROM onejob.schedules
         ORDER BY coalesce(error, '') = '', coalesce(enabled AND next_at < statement_timestamp() - interval '1 minute', false) DESC, name
         LIMIT @schedules) s
 CROSS JOIN LATERAL (
       SELECT coalesce(array_agg(due_at  ORDER BY due_at), '{}') AS due_at,
              coalesce(array_agg(task_id ORDER BY due_at), '{}') AS task_ids,
              coalesce(array_agg(became  ORDER BY due_at), '{}') AS became
         FROM (SELECT c.due_at, coalesce(c.task_id, 0) AS task_id,
                      coalesce(c.skipped, (SELECT t.status FROM onejob.tasks t WHERE t.id = c.task_id), 'deleted') AS became
                 FROM onejob.occurrences c
                WHERE c.schedule_id = s.id
                ORDER BY c.due_at DESC
                LIMIT @occurrences) last) o
 ORDER BY s.name`

// Failure is how many tasks of a kind failed with the same error within a day, of the newest
// that failed.
type Failure struct {
	Kind   string `db:"kind"`
	Error  string `db:"error"` // its beginning
	Count  int64  `db:"count"`
	First  Time   `db:"first"`
	Last   Time   `db:"last"`
	Sample int64  `db:"sample"` // the id of the newest
	Looked int64  `db:"looked"` // failed tasks that were read; MostCounted if there may be more
}

// failuresSQL reads the failed tasks with the highest ids.
const failuresSQL = `
WITH newest AS MATERIALIZED (
    SELECT id, kind, left(error, 300) AS error, finished_at
      FROM onejob.tasks
     WHERE status = 'failed'
     ORDER BY -id
     LIMIT @failed
)
SELECT kind, coalesce(error, '') AS error, count(*) AS count, min(finished_at) AS first, max(finished_at) AS last, max(id) AS sample,
       (SELECT count(*) FROM newest) AS looked
  FROM newest
 WHERE finished_at > statement_timestamp() - interval '1 day'
 GROUP BY kind, error
 ORDER BY count DESC, sample DESC`

// someOverlapsSQL does not count them, as Overlaps does.
const someOverlapsSQL = `
SELECT lock_key, task_id, fence, coalesce(replica, ''), other_task_id, other_fence, coalesce(other_replica, ''), overlap_began, overlap_ended
  FROM onejob.overlaps
 LIMIT 10`

// noSchema returns the error of the first part if none could be read because the tables are not there,
// as in another database.
func (o *Overview) noSchema() error {
	for _, err := range []error{o.Replicas.Err, o.Waiting.Err, o.Nameless.Err, o.Rates.Err, o.Paused.Err, o.Running.Err, o.Schedules.Err, o.Failures.Err, o.Overlaps.Err} {
		if !pgerror.Is(err, undefinedTable, undefinedSchema) {
			return nil
		}
	}
	return fmt.Errorf("%w: %w", ErrSchema, o.Replicas.Err)
}

// SQLSTATEs of a table that is not there, and of a function of a schema that is not.
const (
	undefinedTable  = "42P01"
	undefinedSchema = "3F000"
)

// Overview reads what there is to see. An error is about all parts: there was no connection, or there is
// no schema (ErrSchema).
func (s *Store) Overview(ctx context.Context) (o Overview, err error) {
	err = s.glance(ctx, func(g glance) error {
		if err := g.tx.QueryRow(g.ctx, `SELECT statement_timestamp()`).Scan(&o.Now); err != nil {
			return err
		}
		part(g, &o.Replicas, pgx.RowToStructByName[ReplicaGlance], replicaGlanceSQL, namedArgs{"live": MostReplicas, "replicas": shownReplicas, "longest": longestShown})
		part(g, &o.Waiting, pgx.RowToStructByName[Waiting], waitingSQL, namedArgs{"lanes": waitingLanes, "most": MostCounted + 1, "read": waitingRead, "longest": longestShown})
		part(g, &o.Nameless, pgx.RowToStructByName[Nameless], namelessSQL, namedArgs{"lanes": waitingLanes, "read": namesRead, "names": shownNames})
		part(g, &o.Rates, pgx.RowToStructByName[Rate], ratesSQL, namedArgs{"most": MostRated, "queues": shownRates})
		part(g, &o.Paused, pgx.RowToStructByName[QueueRow], pausedRowsSQL+` LIMIT @paused`, namedArgs{"paused": shownPaused})
		part(g, &o.Running, pgx.RowToStructByName[Running], runningSQL, namedArgs{"most": MostCounted, "shown": shownRunning, "longest": longestShown})
		part(g, &o.Schedules, pgx.RowToStructByName[ScheduleGlance], scheduleGlanceSQL, namedArgs{"schedules": shownSchedules, "occurrences": shownOccurrences})
		part(g, &o.Failures, pgx.RowToStructByName[Failure], failuresSQL, namedArgs{"failed": failedLooked})
		part(g, &o.Overlaps, func(row pgx.CollectableRow) (o tasks.Overlap, err error) {
			return o, row.Scan(&o.LockKey, &o.Task, &o.Fence, &o.Replica, &o.OtherTask, &o.OtherFence, &o.OtherReplica, &o.Began, &o.Ended)
		}, someOverlapsSQL)
		part(g, &o.Held, scanHeld, heldSQL, HeldTooLong.Microseconds(), behindAtLeast)
		return o.noSchema()
	})
	if err != nil {
		return o, fmt.Errorf("read the overview: %w", sanitized(err))
	}
	return o, nil
}

// A glance is a transaction that reads.
type glance struct {
	ctx context.Context
	tx  pgx.Tx
}

// glance opens the transaction in which do reads.
func (s *Store) glance(ctx context.Context, do func(g glance) error) error {
	ctx, cancel := context.WithTimeout(ctx, glancesTimeout)
	defer cancel()
	tx, err := s.glances.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadOnly})
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = tx.Rollback(ctx)
	}()
	if _, err := tx.Exec(ctx, indexesOnly+`, pg_catalog.set_config('statement_timeout', $1, true)`, fmt.Sprint(glanceTimeout.Milliseconds())); err != nil {
		s.glances.heal(err)
		return err
	}
	return do(glance{ctx, tx})
}

// part fills a part of an Overview.
func part[T any](g glance, p *Part[T], scan pgx.RowToFunc[T], sql string, args ...any) {
	began := time.Now()
	p.Rows, p.Err = read(g, scan, sql, args...)
	p.Took = time.Since(began)
}

// read runs one statement of a glance. One that fails does not end the transaction.
func read[T any](g glance, scan pgx.RowToFunc[T], sql string, args ...any) (list []T, err error) {
	err = pgx.BeginFunc(g.ctx, g.tx, func(tx pgx.Tx) error {
		rows, err := tx.Query(g.ctx, sql, args...)
		if err != nil {
			return err
		}
		list, err = pgx.CollectRows(rows, scan)
		return err
	})
	if pgerror.Is(err, queryCanceled) {
		return nil, fmt.Errorf("no answer from Postgres within %v", glanceTimeout)
	}
	return list, err
}

// What is shown of one task.
const (
	shownAttempts   = 50
	shownNeighbours = 3
	shownText       = 64 << 10  // characters of a payload, a result or an output
	shownTexts      = 512 << 10 // characters of the errors and outputs of all attempts
	readText        = 1 << 20   // bytes as they are stored; what is longer is not read
)

// Story is one task, and all that happened to it.
type Story struct {
	Row     // without payload and result
	Now     time.Time
	Payload Text
	Result  Text
	Why     string // as Store.Why, or why that is not known

	Attempts     []StoryAttempt // the newest first
	MoreAttempts bool           // there are older ones

	// Of other tasks on the same lock_key, if the task has one: the attempts before its
	// first one and after its last one, the nearest first, and the one that runs.
	Before, After []Neighbour
	Holder        *Neighbour
}

// Text may be the beginning of a longer one.
type Text struct {
	Text   string
	Length int64 // in bytes, of the whole
	Cut    bool
}

// StoryAttempt is an attempt.
type StoryAttempt struct {
	Fence        int64  `db:"fence"`
	Attempt      int    `db:"attempt"`
	Replica      string `db:"replica"`
	StartedAt    Time   `db:"started_at"`
	BegunAt      *Time  `db:"begun_at"`
	StoppedAt    *Time  `db:"stopped_at"`
	FinishedAt   Time   `db:"finished_at"`
	Outcome      string `db:"outcome"`
	Error        string `db:"error"`
	ExitCode     *int   `db:"exit_code"`
	Output       string `db:"output"`
	OutputLength int64  `db:"output_length"` // in bytes
	OutputCut    bool   `db:"output_cut"`    // the middle is missing, or all of it
}

// cutTexts leaves out outputs and the ends of errors of older attempts, if the newer ones have long
// ones: a page that shows all of them would take hundreds of megabytes.
func cutTexts(newestFirst []StoryAttempt) {
	const shortError = 500
	left := shownTexts
	for i := range newestFirst {
		a := &newestFirst[i]
		if text := []rune(a.Error); len(text) > max(left, shortError) {
			a.Error = string(text[:shortError]) + " [...]"
		}
		if left -= utf8.RuneCountInString(a.Error); utf8.RuneCountInString(a.Output) > left {
			a.Output, a.OutputCut = "", true
		}
		left -= utf8.RuneCountInString(a.Output)
	}
}

// Neighbour is an attempt at another task. One that runs has no end and no outcome.
type Neighbour struct {
	TaskID     int64  `db:"task_id"`
	Fence      int64  `db:"fence"`
	Replica    string `db:"replica"`
	StartedAt  *Time  `db:"started_at"`
	FinishedAt *Time  `db:"finished_at"`
	Outcome    string `db:"outcome"`
}

var storySQL = `
SELECT ` + strings.NewReplacer("payload::text AS", "NULL AS", "result::text AS", "NULL AS").Replace(rowColumns) + `,
       statement_timestamp() AS now,
       pg_column_size(payload)::bigint AS payload_size, CASE WHEN pg_column_size(payload) <= @read THEN left(payload::text, @text + 1) END AS payload_text,
       coalesce(pg_column_size(result), 0)::bigint AS result_size, CASE WHEN pg_column_size(result) <= @read THEN left(result::text, @text + 1) END AS result_text
  FROM onejob.tasks
 WHERE id = @id`

const storyAttemptsSQL = `
SELECT fence, coalesce(attempt, 0) AS attempt, coalesce(replica, '') AS replica, coalesce(started_at, finished_at) AS started_at, begun_at, stopped_at, finished_at,
       outcome, coalesce(error, '') AS error, exit_code, coalesce(octet_length(output), 0)::bigint AS output_length,
       CASE WHEN pg_column_size(output) > @read THEN ''
            WHEN length(output) > @text THEN left(output, @text / 2) || e'\n[...]\n' || right(output, @text / 2)
            ELSE coalesce(output, '') END AS output,
       coalesce(pg_column_size(output) > @read OR length(output) > @text, false) AS output_cut
  FROM onejob.attempts
 WHERE task_id = @id
 ORDER BY onejob.attempts.fence DESC
 LIMIT @attempts`

const neighboursSQL = `
SELECT task_id, fence, coalesce(replica, '') AS replica, started_at, finished_at, outcome
  FROM onejob.attempts
 WHERE lock_key = @key
   AND lock_key <> task_id::text
   AND task_id <> @id
   AND fence {than} @fence
 ORDER BY fence {order}
 LIMIT @neighbours`

var (
	neighboursBeforeSQL = strings.NewReplacer("{than}", "<", "{order}", "DESC").Replace(neighboursSQL)
	neighboursAfterSQL  = strings.NewReplacer("{than}", ">", "{order}", "ASC").Replace(neighboursSQL)
)

const holderSQL = `
SELECT id AS task_id, coalesce(fence, 0) AS fence, coalesce(replica, '') AS replica, started_at, NULL::timestamptz AS finished_at, '' AS outcome
  FROM onejob.tasks
 WHERE status = 'running'
   AND coalesce(lock_key, id::text) = @key
   AND id <> @id`

// Story returns a task and what happened to it, or ErrNoTask. What is longer than a page can
// show is cut.
func (s *Store) Story(ctx context.Context, id int64) (story Story, err error) {
	type row struct {
		Row
		Now         time.Time `db:"now"`
		PayloadSize int64     `db:"payload_size"`
		PayloadText *string   `db:"payload_text"`
		ResultSize  int64     `db:"result_size"`
		ResultText  *string   `db:"result_text"`
	}
	err = s.glance(ctx, func(g glance) error {
		texts := namedArgs{"id": id, "read": readText, "text": shownText, "attempts": shownAttempts + 1}
		rows, err := read(g, pgx.RowToStructByName[row], storySQL, texts)
		if err != nil {
			return err
		}
		if len(rows) == 0 {
			return ErrNoTask
		}
		r := rows[0]
		story.Row, story.Now = r.Row, r.Now
		story.Payload, story.Result = cut(r.PayloadText, r.PayloadSize), cut(r.ResultText, r.ResultSize)
		if sentences, err := read(g, pgx.RowTo[string], `SELECT onejob.why(@id::bigint)`, texts); err != nil {
			story.Why = "Not known: " + sanitized(err).Error()
		} else {
			story.Why = sentences[0]
		}
		if story.Attempts, err = read(g, pgx.RowToStructByName[StoryAttempt], storyAttemptsSQL, texts); err != nil {
			return err
		}
		if story.MoreAttempts = len(story.Attempts) > shownAttempts; story.MoreAttempts {
			story.Attempts = story.Attempts[:shownAttempts]
		}
		cutTexts(story.Attempts)
		if r.LockKey == nil {
			return nil
		}
		const none = int64(math.MaxInt64)
		first, last := none, none
		if r.Fence != nil && r.Status == "running" {
			first, last = *r.Fence, *r.Fence
		}
		if n := len(story.Attempts); n > 0 {
			first = story.Attempts[n-1].Fence
			if last == none {
				last = story.Attempts[0].Fence
			}
		}
		key := namedArgs{"key": *r.LockKey, "id": id, "fence": first, "neighbours": shownNeighbours}
		if story.Before, err = read(g, pgx.RowToStructByName[Neighbour], neighboursBeforeSQL, key); err != nil {
			return err
		}
		key["fence"] = last
		if story.After, err = read(g, pgx.RowToStructByName[Neighbour], neighboursAfterSQL, key); err != nil {
			return err
		}
		holders, err := read(g, pgx.RowToStructByName[Neighbour], holderSQL, key)
		if len(holders) > 0 {
			story.Holder = &holders[0]
		}
		return err
	})
	if err != nil {
		return story, fmt.Errorf("task %d: %w", id, sanitized(err))
	}
	return story, nil
}

// cut returns the text that was read, or that it was too long to be read.
func cut(text *string, size int64) Text {
	if text == nil {
		return Text{Length: size, Cut: size > 0}
	}
	if runes := []rune(*text); len(runes) > shownText {
		return Text{string(runes[:shownText]), size, true}
	}
	return Text{*text, int64(len(*text)), false}
}

// Found is a task that Find found.
type Found struct {
	By        string  `db:"by"` // id, lock_key, unique_key or kind
	ID        int64   `db:"id"`
	Kind      string  `db:"kind"`
	Status    string  `db:"status"`
	Queue     string  `db:"queue"`
	LockKey   *string `db:"lock_key"`
	CreatedAt Time    `db:"created_at"`
}

// mostFound is how many tasks each of the ways of Find finds.
const mostFound = 50

// findSQL are the ways to find tasks by a text. Each is served by indexes:
//   - a unique_key only of tasks that wait or run;
//   - a lock_key of tasks that run, that wait, and whose attempts are in the history;
//   - a kind among the tasks that wait, the newest that failed and the newest of all.
var findSQL = []struct{ by, sql string }{
	{"id", `SELECT id FROM onejob.tasks WHERE id = CASE WHEN @text::text ~ '^[1-9][0-9]{0,17}$' THEN @text::text::bigint END`},
	{"unique_key", `SELECT id FROM onejob.tasks WHERE unique_key = @text AND status IN ('pending', 'running')`},
	{"lock_key", `
   (SELECT id FROM onejob.tasks WHERE status = 'running' AND coalesce(lock_key, id::text) = @text AND lock_key IS NOT NULL)
 UNION
   (SELECT task_id FROM onejob.attempts WHERE lock_key = @text AND lock_key <> task_id::text ORDER BY fence DESC LIMIT @most)
 UNION
   (SELECT t.id FROM unlimited l CROSS JOIN LATERAL (
           SELECT id
             FROM onejob.tasks
            WHERE status = 'pending' AND limit_name IS NULL AND lock_key IS NOT NULL
              AND onejob.lane(priority, queue, kind, lock_key IS NULL) = l.lane
              AND lock_key = @text
            ORDER BY run_at, id
            LIMIT @most) t)
 UNION
   (SELECT t.id FROM limited l CROSS JOIN LATERAL (
           SELECT id
             FROM onejob.tasks
            WHERE status = 'pending' AND limit_name = l.limit_name AND lock_key IS NOT NULL
              AND onejob.lane(priority, queue, kind, lock_key IS NULL) = l.lane
              AND lock_key = @text
            ORDER BY run_at, id
            LIMIT @most) t)`},
	{"kind", `
   (SELECT t.id FROM unlimited l CROSS JOIN LATERAL (
           SELECT id
             FROM onejob.tasks
            WHERE status = 'pending' AND limit_name IS NULL
              AND onejob.lane(priority, queue, kind, lock_key IS NULL) = l.lane
            ORDER BY run_at, id
            LIMIT @most) t
     WHERE l.kind = @text)
 UNION
   (SELECT id FROM (SELECT id, kind FROM onejob.tasks WHERE status = 'failed' ORDER BY -id LIMIT 2000) newest WHERE kind = @text LIMIT @most)
 UNION
   (SELECT id FROM (SELECT id, kind FROM onejob.tasks ORDER BY id DESC LIMIT 2000) newest WHERE kind = @text LIMIT @most)`},
}

// Find returns the tasks that a text may mean: their id, lock key, unique key or kind, the
// newest first, at most some 50 for each. A way that takes too long finds nothing, and is
// part of the error.
func (s *Store) Find(ctx context.Context, text string) (found []Found, err error) {
	var failed []error
	err = s.glance(ctx, func(g glance) error {
		for _, way := range findSQL {
			args := namedArgs{"text": text, "most": mostFound, "lanes": waitingLanes, "by": way.by}
			list, err := read(g, pgx.RowToStructByName[Found], lanesOfAllSQL+`, ids AS MATERIALIZED (`+way.sql+`)
SELECT @by::text AS by, id, kind, status, queue, lock_key, created_at
  FROM onejob.tasks
 WHERE id = ANY (ARRAY(SELECT id FROM ids ORDER BY id DESC LIMIT @most))
 ORDER BY id DESC`, args)
			if err != nil {
				failed = append(failed, fmt.Errorf("by %s: %w", way.by, err))
			}
			found = append(found, list...)
		}
		return nil
	})
	if err = errors.Join(append(failed, err)...); err != nil {
		return found, fmt.Errorf("find tasks: %w", sanitized(err))
	}
	return found, nil
}
