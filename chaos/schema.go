package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/boottime"
	"onejob/chaos/checker"
	"onejob/chaos/observer"
	"onejob/internal/testenv/lifecycle"
)

// What the database notes by itself, besides every step of a task's row: that is for
// package lifecycle. A trigger is as far outside as one can be and still see every change
// exactly when it is committed, no matter who makes it.
const schemaSQL = `
CREATE SCHEMA chaos;

-- The machine's clock. That of Postgres is set by a fault; the time since the machine
-- was started is not. It has hundredths of a second.
CREATE FUNCTION chaos.clock() RETURNS timestamptz LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN '{started}'::timestamptz + split_part(pg_read_file('/proc/uptime'), ' ', 1)::interval;
END $$;

-- Tasks that faults insert, beside the workload's. Of hostile ones nothing is
-- asked. due is set where nothing but a claim is missing from then on.
CREATE TABLE chaos.added (
    task    bigint PRIMARY KEY,
    kind    text   NOT NULL,
    hostile bool   NOT NULL,
    due     timestamptz
);

-- What faults do to rows by hand.
CREATE TABLE chaos.touched (
    id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task bigint NOT NULL,
    what text   NOT NULL
);

-- Outcomes of tasks whose id leaves the remainder are refused.
CREATE TABLE chaos.refusing (
    fault     bigint PRIMARY KEY,
    modulus   int NOT NULL,
    remainder int NOT NULL
);
CREATE FUNCTION chaos.refuse() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM chaos.refusing WHERE NEW.id % modulus = remainder) THEN
        RAISE EXCEPTION 'the outcome of task % is refused', NEW.id;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER chaos_refuse BEFORE UPDATE ON onejob.tasks FOR EACH ROW
    WHEN (OLD.status = 'running' AND NEW.status IN ('succeeded', 'failed', 'cancelled')) EXECUTE FUNCTION chaos.refuse();

-- What schedules say, and since when.
CREATE TABLE chaos.edits (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    schedule text NOT NULL,
    cron     text NOT NULL,
    zone     text NOT NULL,
    enabled  bool NOT NULL,
    paused   timestamptz, -- until then
    at       timestamptz NOT NULL
);
CREATE FUNCTION chaos.note_edit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO chaos.edits (schedule, cron, zone, enabled, paused, at) VALUES (NEW.name, NEW.cron, NEW.time_zone, NEW.enabled, NEW.paused_until, chaos.clock());
    RETURN NULL;
END $$;
CREATE TRIGGER note_edit AFTER INSERT OR UPDATE OF cron, time_zone, enabled, paused_until ON onejob.schedules
    FOR EACH ROW EXECUTE FUNCTION chaos.note_edit();

-- Tasks of schedules that were not made as the schedule was then.
CREATE TABLE chaos.odd (
    task bigint PRIMARY KEY,
    was  jsonb NOT NULL,
    want jsonb NOT NULL
);
CREATE FUNCTION chaos.note_odd() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO chaos.odd SELECT NEW.id, NEW.payload, s.payload FROM onejob.schedules s WHERE s.id = NEW.schedule_id AND s.payload IS DISTINCT FROM NEW.payload;
    RETURN NULL;
END $$;
CREATE TRIGGER note_odd AFTER INSERT ON onejob.tasks
    FOR EACH ROW WHEN (NEW.schedule_id IS NOT NULL) EXECUTE FUNCTION chaos.note_odd();

-- A table of a user's, whose rows belong to tasks.
CREATE TABLE chaos.referring (
    task bigint NOT NULL REFERENCES onejob.tasks (id) ON DELETE CASCADE
);
CREATE INDEX ON chaos.referring (task);

-- A payload that is small in the table and large on its way. Postgres takes many
-- times as long to make it as to copy it.
CREATE TABLE chaos.large AS SELECT to_jsonb(repeat('x', 1000000)) AS payload;

CREATE TABLE chaos.effects (
    id    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task  bigint NOT NULL,
    fence bigint NOT NULL,
    key   text   NOT NULL,
    began timestamptz NOT NULL,
    slept text,
    ended timestamptz NOT NULL
);

-- A statement shows that it is at work by a lock that keeps nobody out: a table
-- would show it only when it is over, see statements. The lock's name has room for the
-- lowest bits of the fence.
CREATE FUNCTION chaos.enter() RETURNS timestamptz LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(hashtext(current_setting('onejob.lock_key')), (current_setting('onejob.fence')::bigint & 2147483647)::int);
    RETURN chaos.clock();
END $$;`

// effectSQL is the statement of sql tasks. Nothing in the table keeps a second
// effect out: that is for onejob to see to.
const effectSQL = `
INSERT INTO chaos.effects (task, fence, key, began, slept, ended)
SELECT current_setting('onejob.task_id')::bigint, current_setting('onejob.fence')::bigint, current_setting('onejob.lock_key'),
       chaos.enter(), pg_sleep($1::float8)::text, chaos.clock()`

// readEvidence fills in what the database has to say.
func (c *cluster) readEvidence(ctx context.Context, e *checker.Evidence) error {
	var err error
	read := func(what string, f func() error) {
		if err == nil {
			if err = f(); err != nil {
				err = fmt.Errorf("read %s: %w", what, err)
			}
		}
	}
	read("steps", func() (err error) {
		e.Steps, err = lifecycle.Read(ctx, c.operator)
		e.Transitions, e.Begun = checker.TransitionsOf(e.Steps)
		return err
	})
	read("effects", func() (err error) {
		e.Effects, err = rows(ctx, c, `SELECT task, fence, key, began, ended FROM chaos.effects ORDER BY id`,
			func(row pgx.CollectableRow) (f checker.Effect, err error) {
				var began, ended time.Time
				err = row.Scan(&f.Task, &f.Fence, &f.Key, &began, &ended)
				f.Began, f.Ended = observer.At(began), observer.At(ended)
				return f, err
			})
		return err
	})
	read("tasks", func() error {
		type row struct {
			id int64
			checker.Final
		}
		all, err := rows(ctx, c, `
SELECT t.id, t.status, coalesce(s.name, ''), coalesce(t.error, '')
  FROM onejob.tasks t
  LEFT JOIN onejob.schedules s ON s.id = t.schedule_id`, func(r pgx.CollectableRow) (f row, err error) {
			return f, r.Scan(&f.id, &f.Status, &f.Schedule, &f.Error)
		})
		e.Final = make(map[int64]checker.Final, len(all))
		for _, f := range all {
			e.Final[f.id] = f.Final
		}
		return err
	})
	read("tasks that faults added", func() error {
		type row struct {
			checker.Enqueued
			hostile bool
		}
		all, err := rows(ctx, c, `SELECT task, kind, hostile, due FROM chaos.added ORDER BY task`, func(r pgx.CollectableRow) (a row, err error) {
			var due *time.Time
			err = r.Scan(&a.Task, &a.Kind, &a.hostile, &due)
			if due != nil {
				a.Due = observer.At(*due)
			}
			return a, err
		})
		for _, a := range all {
			if a.hostile {
				e.Hostile = append(e.Hostile, a.Task)
			} else {
				a.MaxAttempts = defaultAttempts
				e.Enqueued = append(e.Enqueued, a.Enqueued)
			}
		}
		return err
	})
	read("rows that were touched", func() (err error) {
		e.Touched, err = rows(ctx, c, `SELECT task, what FROM chaos.touched ORDER BY id`, pgx.RowToStructByPos[checker.Touched])
		return err
	})
	read("outputs", func() (err error) {
		e.BadOutputs, err = rows(ctx, c, `
SELECT DISTINCT a.task_id
  FROM onejob.attempts a
  JOIN onejob.tasks t ON t.id = a.task_id
 WHERE t.kind = 'exec'
   AND t.payload #> '{data,print}' IS NOT NULL
   AND a.outcome = 'succeeded'
   AND (coalesce(a.output, '') NOT LIKE $1 || '%' OR a.output NOT LIKE '%' || $2 || '%')
 ORDER BY 1`, pgx.RowTo[int64], printHead, printTail)
		return err
	})
	read("edits of schedules", func() (err error) {
		e.Edits, err = rows(ctx, c, `SELECT schedule, cron, zone, enabled AND paused IS DISTINCT FROM 'infinity', CASE WHEN isfinite(paused) THEN paused END, at FROM chaos.edits ORDER BY id`, func(row pgx.CollectableRow) (d checker.Edit, err error) {
			var at time.Time
			var paused *time.Time
			err = row.Scan(&d.Schedule, &d.Cron, &d.Zone, &d.Enabled, &paused, &at)
			d.At = observer.At(at)
			if paused != nil {
				d.Paused = observer.At(*paused)
			}
			return d, err
		})
		return err
	})
	read("odd tasks of schedules", func() (err error) {
		e.Odd, err = rows(ctx, c, `SELECT task, was::text, want::text FROM chaos.odd ORDER BY task`, pgx.RowToStructByPos[checker.Odd])
		return err
	})
	read("occurrences", func() (err error) {
		e.Occurrences, err = rows(ctx, c, `
SELECT s.name, o.due_at, coalesce(o.task_id, 0), coalesce(o.skipped, ''), o.made_at
  FROM onejob.occurrences o
  JOIN onejob.schedules s ON s.id = o.schedule_id`, func(row pgx.CollectableRow) (o checker.Occurrence, err error) {
			var due, made time.Time
			err = row.Scan(&o.Schedule, &due, &o.Task, &o.Skipped, &made)
			o.Due, o.Made = observer.At(due), observer.At(made)
			return o, err
		})
		return err
	})
	return err
}

// defaultAttempts are the attempts of tasks whose INSERT does not say how many.
const defaultAttempts = 5

// schema is schemaSQL for this machine, and what lifecycle needs.
func schema() string {
	started := time.Now().Add(-time.Duration(boottime.Now()))
	return strings.Replace(schemaSQL, "{started}", started.UTC().Format(time.RFC3339Nano), 1) + lifecycle.Schema("chaos.clock()")
}

func rows[T any](ctx context.Context, c *cluster, sql string, scan pgx.RowToFunc[T], args ...any) ([]T, error) {
	found, err := c.operator.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(found, scan)
}
