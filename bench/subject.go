package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/jackc/pgx/v5"

	"onejob/bench/riverjobs"
	"onejob/store"
)

// Settings of the subjects. What is not here is the subject's own default.
const (
	naiveWorkers  = 64 // more are no faster
	baselineLoops = 4
	baselineBatch = 128 // as onejob's
	heldRowLoops  = 32  // connections
)

// place is where a subject runs: addresses and a folder for its files.
type place struct {
	*environment
	dsn    string
	consul string // host and port, of the server or of a proxy before it
	number int    // of the replica
}

func (p place) file(name string) string {
	return filepath.Join(p.scratch, fmt.Sprintf("%s-%d", name, p.number))
}

// A subject is something that works on tasks, in processes of its own.
type subject struct {
	jobs   table
	consul bool // needs it
	start  func(place) (*process, error)
}

// onejobConcurrency is many, as River's is, and for the same reason: tiny tasks.
var onejobConcurrency = riverjobs.BulkMaxWorkers

var (
	onejobSubject = subject{onejobTable, true, func(p place) (*process, error) { return startOnejob(p, onejobConcurrency) }}
	riverSubject  = subject{riverTable, false, func(p place) (*process, error) {
		return startProcess("river", p.file("river.log"), p.self, "river", "-dsn", p.dsn)
	}}
	riverAdvisorySubject = subject{riverTable, false, func(p place) (*process, error) {
		return startProcess("river", p.file("river.log"), p.self, "river", "-dsn", p.dsn, "-lock", "advisory")
	}}
	riverConsulSubject = subject{riverTable, true, func(p place) (*process, error) {
		return startProcess("river", p.file("river.log"), p.self, "river", "-dsn", p.dsn, "-lock", "consul", "-consul", p.consul)
	}}
	heldRowSubject = subject{onejobTable, false, func(p place) (*process, error) {
		return startProcess("held-row", p.file("held-row.log"), p.self, "held-row", "-dsn", p.dsn)
	}}
	naiveSubject = subject{onejobTable, true, func(p place) (*process, error) {
		return startProcess("naive", p.file("naive.log"), p.self, "naive", "-dsn", p.dsn, "-consul", p.consul, "-workers", strconv.Itoa(naiveWorkers))
	}}
	baselineSubject = subject{onejobTable, false, func(p place) (*process, error) {
		return startProcess("floor", p.file("floor.log"), p.self, "floor", "-dsn", p.dsn, "-loops", strconv.Itoa(baselineLoops), "-batch", strconv.Itoa(baselineBatch))
	}}
)

// startOnejob starts "onejob serve" with a configuration file, its log in
// another. A concurrency of zero leaves the default.
func startOnejob(p place, concurrency int, more ...string) (*process, error) {
	config := fmt.Sprintf("replica: replica-%d\npostgres: {dsn: %q}\nconsul: {address: %q}\n", p.number, p.dsn, p.consul)
	if concurrency > 0 {
		config += fmt.Sprintf("worker: {concurrency: %d}\n", concurrency)
	}
	for _, line := range more {
		config += line + "\n"
	}
	path := p.file("onejob.yaml")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		return nil, err
	}
	return startProcess("onejob", p.file("onejob.log"), p.onejob, "serve", "--config", path)
}

// table is where a subject's tasks are.
type table struct {
	template string // the empty database
	enqueue  string // statement that adds $1 no-op tasks
	notify   string // statement that tells the runner, if enqueue does not
	analyze  string
	progress string // statement that returns up to which id, after $1 and at most $2, all are final; looks at 1,000
	done     string // statement that counts those that ended well
	failed   string // statement that counts those that ended otherwise
	claims   string // statement that counts claims, those requeued included; may be empty
}

var onejobTable = table{
	template: "onejob_empty",
	enqueue:  `INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, $1)`,
	analyze:  `ANALYZE onejob.tasks`,
	progress: `
SELECT coalesce(min(id) - 1, least($1::bigint + 1000, $2::bigint))
  FROM onejob.tasks
 WHERE id > $1
   AND id <= least($1 + 1000, $2)
   AND status IN ('pending', 'running')`,
	done:   `SELECT count(*) FROM onejob.tasks WHERE status = 'succeeded'`,
	failed: `SELECT count(*) FROM onejob.tasks WHERE status IN ('failed', 'cancelled')`,
	claims: `SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM onejob.fences`,
}

// River's InsertMany leaves the same rows, and the same notification.
var riverTable = table{
	template: "river_empty",
	enqueue:  `INSERT INTO river_job (kind, args, max_attempts) SELECT 'noop', '{}', 25 FROM generate_series(1, $1)`,
	notify:   `SELECT pg_notify(concat(current_schema(), '.river_insert'), '{"queue": "default"}')`,
	analyze:  `ANALYZE river_job`,
	progress: `
SELECT coalesce(min(id) - 1, least($1::bigint + 1000, $2::bigint))
  FROM river_job
 WHERE id > $1
   AND id <= least($1 + 1000, $2)
   AND state NOT IN ('completed', 'cancelled', 'discarded')`,
	done:   `SELECT count(*) FROM river_job WHERE state = 'completed'`,
	failed: `SELECT count(*) FROM river_job WHERE state IN ('cancelled', 'discarded')`,
}

// migrateOnejob makes onejob's tables.
func migrateOnejob(ctx context.Context, dsn string) error {
	db, err := store.Open(store.Config{DSN: dsn})
	if err != nil {
		return err
	}
	defer db.Close()
	return db.Migrate(ctx, nil)
}

// waiting fills a database with n due no-op tasks.
func waiting(n int) func(context.Context, string) error {
	return func(ctx context.Context, dsn string) error {
		return fillOnejob(ctx, dsn, n, onejobTable.enqueue)
	}
}

// finished fills a database with n tasks that have succeeded, as onejob leaves
// them.
func finished(n int) func(context.Context, string) error {
	return func(ctx context.Context, dsn string) error {
		return fillOnejob(ctx, dsn, n, `
WITH done AS (
    INSERT INTO onejob.tasks (kind, status, attempt, fence, started_at, finished_at)
    SELECT 'noop', 'succeeded', 1, nextval('onejob.fences'), now(), now()
      FROM generate_series(1, $1)
 RETURNING *
)
INSERT INTO onejob.attempts (fence, task_id, attempt, lock_key, replica, session, started_at, finished_at, outcome)
SELECT fence, id, attempt, id::text, 'replica-0', '00000000-0000-0000-0000-000000000001', started_at, finished_at, 'succeeded'
  FROM done`)
	}
}

func fillOnejob(ctx context.Context, dsn string, n int, sql string) error {
	if err := migrateOnejob(ctx, dsn); err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, sql, n)
	return err
}
