package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/chaos/checker"
	"onejob/chaos/observer"
)

// dsn is the address of the database as replicas have it: all hosts, of which one takes
// writes.
func dsn() string {
	var hosts []string
	for n := range hostCount {
		hosts = append(hosts, network(n+1))
	}
	return "host=" + strings.Join(hosts, ",") + " port=5432 user=postgres dbname=postgres sslmode=disable target_session_attrs=read-write connect_timeout=2"
}

// What the database notes by itself of every change of a task's status, and what sql
// tasks do. Nothing in the table keeps a second effect out: that is for onejob to see to.
const schemaSQL = `
CREATE SCHEMA ha;

CREATE TABLE ha.transitions (
    id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task    bigint NOT NULL,
    kind    text   NOT NULL,
    key     text   NOT NULL,
    was     text   NOT NULL,
    became  text   NOT NULL,
    fence   bigint,
    replica text,
    attempt int    NOT NULL,
    at      timestamptz NOT NULL
);

CREATE FUNCTION ha.note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO ha.transitions (task, kind, key, was, became, fence, replica, attempt, at)
    VALUES (NEW.id, NEW.kind, coalesce(NEW.lock_key, NEW.id::text), OLD.status, NEW.status, NEW.fence,
            coalesce(NEW.replica, OLD.replica), NEW.attempt, clock_timestamp());
    RETURN NULL;
END $$;
CREATE TRIGGER note AFTER UPDATE ON onejob.tasks
    FOR EACH ROW WHEN (OLD.status <> NEW.status) EXECUTE FUNCTION ha.note();
CREATE TRIGGER note_success AFTER UPDATE OF status ON onejob.tasks
    FOR EACH ROW WHEN (OLD.status = 'succeeded' AND NEW.status = 'succeeded') EXECUTE FUNCTION ha.note();

CREATE TABLE ha.effects (
    id    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task  bigint NOT NULL,
    fence bigint NOT NULL,
    key   text   NOT NULL,
    began timestamptz NOT NULL,
    slept text,
    ended timestamptz NOT NULL
);`

// effectSQL is the statement of sql tasks.
const effectSQL = `
INSERT INTO ha.effects (task, fence, key, began, slept, ended)
SELECT current_setting('onejob.task_id')::bigint, current_setting('onejob.fence')::bigint, current_setting('onejob.lock_key'),
       clock_timestamp(), pg_sleep($1::float8)::text, clock_timestamp()`

// rows asks the primary.
func rows[T any](ctx context.Context, sql string, scan pgx.RowToFunc[T], args ...any) ([]T, error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, dsn())
	if err != nil {
		return nil, err
	}
	defer conn.Close(ctx)
	found, err := conn.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(found, scan)
}

// readEvidence fills in what the database has to say. It returns the unique keys of all
// tasks that are there.
func readEvidence(ctx context.Context, e *checker.Evidence) (there map[string]bool, err error) {
	if e.Transitions, err = rows(ctx, `
SELECT task, kind, key, was, became, coalesce(fence, 0), coalesce(replica, ''), attempt, at
  FROM ha.transitions
 ORDER BY id`, func(row pgx.CollectableRow) (t checker.Transition, err error) {
		var at time.Time
		err = row.Scan(&t.Task, &t.Kind, &t.Key, &t.From, &t.To, &t.Fence, &t.Replica, &t.Attempt, &at)
		t.At = observer.At(at)
		return t, err
	}); err != nil {
		return nil, fmt.Errorf("read transitions: %w", err)
	}
	if e.Effects, err = rows(ctx, `SELECT task, fence, key, began, ended FROM ha.effects ORDER BY id`, func(row pgx.CollectableRow) (f checker.Effect, err error) {
		var began, ended time.Time
		err = row.Scan(&f.Task, &f.Fence, &f.Key, &began, &ended)
		f.Began, f.Ended = observer.At(began), observer.At(ended)
		return f, err
	}); err != nil {
		return nil, fmt.Errorf("read effects: %w", err)
	}
	type row struct {
		id          int64
		token, kind string
		checker.Final
	}
	all, err := rows(ctx, `SELECT id, unique_key, kind, status, coalesce(error, '') FROM onejob.tasks ORDER BY id`, func(r pgx.CollectableRow) (f row, err error) {
		return f, r.Scan(&f.id, &f.token, &f.kind, &f.Status, &f.Error)
	})
	if err != nil {
		return nil, fmt.Errorf("read tasks: %w", err)
	}
	e.Final = make(map[int64]checker.Final, len(all))
	there = make(map[string]bool, len(all))
	acked := map[int64]bool{}
	for _, q := range e.Enqueued {
		acked[q.Task] = true
	}
	for _, f := range all {
		e.Final[f.id], there[f.token] = f.Final, true
		if !acked[f.id] { // the answer to its INSERT was lost
			e.Enqueued = append(e.Enqueued, checker.Enqueued{Task: f.id, Kind: f.kind})
		}
	}
	return there, nil
}
