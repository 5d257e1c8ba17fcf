package store_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"onejob/migrations"
	"onejob/store"
)

// A user is somebody with one of the documented roles.
type user struct {
	t    *testing.T
	conn *pgx.Conn
	dsn  string
}

func (u user) may(sql string, args ...any) {
	u.t.Helper()
	if _, err := u.conn.Exec(u.t.Context(), sql, args...); err != nil {
		u.t.Errorf("%s: %v", sql, err)
	}
}

func (u user) mayNot(sql string, args ...any) {
	u.t.Helper()
	_, err := u.conn.Exec(u.t.Context(), sql, args...)
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.Code != "42501" { // insufficient_privilege
		u.t.Errorf("%s: %v, want it refused", sql, err)
	}
}

// withRoles makes the documented roles on the server, each with a user, and returns
// the users by the names of the roles.
func withRoles(t *testing.T, b *bench) map[string]user {
	t.Helper()
	prefix := b.one(`SELECT current_database()`) + ` "quoted'_`
	roles := store.Roles{Enqueuer: prefix + "enqueuer", Observer: prefix + "observer", Operator: prefix + "operator", Worker: prefix + "worker"}
	for range 2 { // it may be run again
		if _, err := b.pool.Exec(t.Context(), store.RolesSQL(roles)); err != nil {
			t.Fatal(err)
		}
	}
	users := map[string]user{}
	for what, role := range map[string]string{"enqueuer": roles.Enqueuer, "observer": roles.Observer, "operator": roles.Operator, "worker": roles.Worker, "nobody": ""} {
		login := "user_" + what + "_" + b.one(`SELECT current_database()`)
		b.sql(`CREATE ROLE ` + login + ` LOGIN`)
		t.Cleanup(func() { b.sql(`DROP ROLE ` + login) })
		if role != "" {
			ident := pgx.Identifier{role}.Sanitize()
			equal(t, "whether the role can log in", b.one(`SELECT rolcanlogin FROM pg_roles WHERE rolname = $1`, role), "false")
			b.sql(`GRANT ` + ident + ` TO ` + login)
			t.Cleanup(func() { b.sql(`DROP OWNED BY ` + ident); b.sql(`DROP ROLE ` + ident) })
		}
		dsn := as(t, b.dsn, login)
		conn, err := pgx.Connect(t.Context(), dsn)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close(context.WithoutCancel(t.Context())) })
		users[what] = user{t, conn, dsn}
	}
	return users
}

func TestRoles(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	users := withRoles(t, b)
	id := b.insert()
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind) VALUES ('s', '@hourly', 'noop')`)

	t.Run("Nobody", func(t *testing.T) {
		u := users["nobody"]
		u.t = t
		u.mayNot(`SELECT id FROM onejob.tasks`)
		u.mayNot(`SELECT onejob.cancel(1)`)
		u.mayNot(`SELECT onejob.enqueue('noop')`)
	})

	t.Run("Enqueuer", func(t *testing.T) {
		u := users["enqueuer"]
		u.t = t
		u.may(`INSERT INTO onejob.tasks (kind, payload, queue, priority, run_at, lock_key, limit_name, unique_key, max_attempts, timeout, keep_for, traceparent)
		       VALUES ('noop', '{}', 'q', 1, now(), 'k', 'l', 'u', 3, '1 min', '1 day', NULL) RETURNING id`)
		u.may(`INSERT INTO onejob.tasks (kind, unique_key) VALUES ('noop', 'u')
		       ON CONFLICT (unique_key) WHERE unique_key IS NOT NULL AND status IN ('pending', 'running') DO NOTHING RETURNING id`)
		u.may(`INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, 3)`)
		u.may(`SELECT onejob.enqueue('noop', '{"a": 1}', unique_key => 'v')`)
		u.may(`SELECT onejob.enqueue('noop', unique_key => 'v')`)
		u.may(`SELECT id, unique_key, status FROM onejob.tasks WHERE unique_key = 'v'`)
		cancelled := b.one(`SELECT id FROM onejob.tasks WHERE unique_key = 'v'`)
		u.may(`SELECT onejob.cancel($1)`, cancelled)
		equal(t, "the status", b.one(`SELECT status FROM onejob.tasks WHERE id = $1`, cancelled), "cancelled")

		// Each column that is not for the enqueuer.
		for _, column := range b.sql(`SELECT attname FROM pg_attribute WHERE attrelid = 'onejob.tasks'::regclass AND attnum > 0 AND NOT attisdropped
		                                 AND attname <> ALL ('{kind,payload,queue,priority,run_at,lock_key,limit_name,unique_key,max_attempts,timeout,keep_for,traceparent}')`) {
			u.mayNot(`INSERT INTO onejob.tasks (kind, ` + column + `) VALUES ('noop', DEFAULT)`)
			u.mayNot(`UPDATE onejob.tasks SET ` + column + ` = DEFAULT`)
		}
		u.mayNot(`INSERT INTO onejob.tasks (id, kind) OVERRIDING SYSTEM VALUE VALUES (1000, 'noop')`)
		u.mayNot(`UPDATE onejob.tasks SET payload = '{}'`)
		u.mayNot(`DELETE FROM onejob.tasks`)
		u.mayNot(`TRUNCATE onejob.tasks`)
		u.mayNot(`DO 'BEGIN LOCK TABLE onejob.tasks; END'`)
		u.mayNot(`SELECT payload FROM onejob.tasks`)
		u.mayNot(`SELECT FROM onejob.tasks FOR UPDATE`)
		u.mayNot(`SELECT onejob.retry(1)`)
		u.mayNot(`SELECT onejob.why(1)`)
		u.mayNot(`SELECT onejob.pause_queue('default')`)
		u.mayNot(`SELECT onejob.reserve_lock_key('k')`)
		u.mayNot(`SELECT nextval('onejob.fences')`)
		u.mayNot(`SELECT setval('onejob.fences', 1)`)
		u.mayNot(`SELECT nextval('onejob.tasks_id_seq')`)
		for _, table := range []string{"attempts", "schedules", "occurrences", "overlaps", "progress", "schema_version"} {
			u.mayNot(`SELECT FROM onejob.` + table)
			if table != "overlaps" && table != "progress" { // views that nobody can change
				u.mayNot(`DELETE FROM onejob.` + table)
			}
		}
		u.mayNot(`INSERT INTO onejob.schedules (name, cron, kind) VALUES ('mine', '@hourly', 'noop')`)
		u.mayNot(`CREATE TABLE onejob.mine ()`)
		u.mayNot(`CREATE TRIGGER mine BEFORE INSERT ON onejob.tasks EXECUTE FUNCTION onejob.notify_due()`)
		u.mayNot(`ALTER TABLE onejob.tasks DISABLE TRIGGER ALL`)
	})

	readable := b.sql(`SELECT relname FROM pg_class WHERE relnamespace = 'onejob'::regnamespace AND relkind IN ('r', 'v') ORDER BY 1`)
	reads := func(u user) {
		for _, table := range readable {
			u.may(`SELECT * FROM onejob.` + table)
		}
	}
	t.Run("Observer", func(t *testing.T) {
		u := users["observer"]
		u.t = t
		reads(u)
		for _, table := range readable {
			if table != "overlaps" && table != "progress" { // views that nobody can change
				u.mayNot(`DELETE FROM onejob.` + table)
			}
		}
		u.mayNot(`INSERT INTO onejob.tasks (kind) VALUES ('noop')`)
		u.mayNot(`UPDATE onejob.tasks SET cancel_requested = true`)
		u.mayNot(`SELECT FROM onejob.tasks FOR SHARE`)
		for _, f := range []string{`enqueue('noop')`, `cancel(1)`, `retry(1)`, `pause_queue('default')`, `resume_queue('default')`, `record('a', 'b', 1)`, `bulk('cancel', '{"kind": "noop"}')`, `retry_these('{1}', '{failed}', '0')`, `run_schedule('s')`, `reserve_lock_key('k')`} {
			u.mayNot(`SELECT onejob.` + f)
		}
		u.mayNot(`SELECT nextval('onejob.fences')`)
		s := open(t, store.Config{DSN: u.dsn})
		if _, err := s.List(t.Context(), store.Filter{Limit: 10}); err != nil {
			t.Error(err)
		}
		if _, err := s.Schedules(t.Context()); err != nil {
			t.Error(err)
		}
		u.may(`SELECT onejob.why(id) FROM onejob.tasks`)
		o, err := s.Overview(t.Context())
		if err := errors.Join(err, o.Replicas.Err, o.Waiting.Err, o.Nameless.Err, o.Running.Err, o.Schedules.Err, o.Failures.Err, o.Overlaps.Err, o.Held.Err); err != nil {
			t.Error(err)
		}
	})

	t.Run("Operator", func(t *testing.T) {
		u := users["operator"]
		u.t = t
		reads(u)
		s := open(t, store.Config{DSN: u.dsn})
		if why, err := s.Why(t.Context(), idOf(t, id)); err != nil || !strings.Contains(why, "no replica is alive") {
			t.Errorf("why: %s, %v", why, err)
		}
		if done, err := s.Cancel(t.Context(), idOf(t, id)); err != nil || !done {
			t.Errorf("cancel: %v, %v", done, err)
		}
		if done, err := s.Retry(t.Context(), idOf(t, id)); err != nil || !done {
			t.Errorf("retry: %v, %v", done, err)
		}
		if err := s.PauseQueue(t.Context(), "default", "", time.Time{}, 0); err != nil {
			t.Error(err)
		}
		if done, err := s.ResumeQueue(t.Context(), "default"); err != nil || !done {
			t.Errorf("resume: %v, %v", done, err)
		}
		equal(t, "what is on record of it", b.one(`SELECT string_agg(action || ' ' || target || ' ' || (who LIKE 'user_operator_%')::text, ', ' ORDER BY id) FROM onejob.actions WHERE target LIKE 'queue %'`),
			"pause queue queue default true, resume queue queue default true")
		u.mayNot(`UPDATE onejob.queues SET paused_until = now()`)
		u.mayNot(`DELETE FROM onejob.actions`)
		if done, err := s.PauseSchedule(t.Context(), "s", "a test", time.Time{}, time.Hour); err != nil || !done {
			t.Errorf("pause: %v, %v", done, err)
		}
		if done, err := s.ResumeSchedule(t.Context(), "s"); err != nil || !done {
			t.Errorf("resume: %v, %v", done, err)
		}
		if done, err := s.EnableSchedule(t.Context(), "s", false); err != nil || !done {
			t.Errorf("disable: %v, %v", done, err)
		}
		u.may(`INSERT INTO onejob.schedules (name, cron, kind) VALUES ('mine', '@hourly', 'noop')`)
		u.may(`UPDATE onejob.schedules SET cron = '@daily' WHERE name = 'mine'`)
		b.sql(`INSERT INTO onejob.occurrences (schedule_id, due_at, skipped) SELECT id, now(), 'missed' FROM onejob.schedules WHERE name = 'mine'`)
		u.may(`DELETE FROM onejob.schedules WHERE name = 'mine'`) // and its occurrences
		u.may(`DELETE FROM onejob.attempts WHERE task_id = $1`, id)
		u.may(`DELETE FROM onejob.tasks WHERE id = $1`, id)
		u.mayNot(`INSERT INTO onejob.tasks (kind) VALUES ('noop')`)
		u.mayNot(`UPDATE onejob.tasks SET status = 'succeeded'`)
		u.mayNot(`UPDATE onejob.attempts SET outcome = 'succeeded'`)
		u.mayNot(`INSERT INTO onejob.attempts DEFAULT VALUES`)
		u.mayNot(`DELETE FROM onejob.occurrences`)
		u.mayNot(`SELECT nextval('onejob.fences')`)
		u.mayNot(`UPDATE onejob.schema_version SET version = 1`)
	})

	t.Run("Worker", func(t *testing.T) {
		u := users["worker"]
		u.t = t
		b := newBench(t) // of its own, to run everything on
		u = withRoles(t, b)["worker"]
		b.Store = open(t, store.Config{DSN: u.dsn})
		if err := b.CheckRights(t.Context()); err != nil {
			t.Error(err)
		}
		runEveryMethod(t, b)
		u.mayNot(`UPDATE onejob.schema_version SET version = 1`)
		u.mayNot(`UPDATE onejob.attempts SET outcome = 'succeeded'`)
		u.mayNot(`SELECT setval('onejob.fences', 1)`)
		u.mayNot(`TRUNCATE onejob.tasks`)
		u.mayNot(`DROP TABLE onejob.attempts`)
		u.mayNot(`ALTER FUNCTION onejob.retry(bigint) SECURITY INVOKER`)
		u.mayNot(`CREATE FUNCTION onejob.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'`)

		// CheckRights misses each right that is taken away.
		role := pgx.Identifier{b.one(`SELECT current_database()`) + ` "quoted'_worker`}.Sanitize()
		for _, right := range []string{"USAGE ON SCHEMA onejob", "DELETE ON TABLE onejob.tasks", "USAGE ON SEQUENCE onejob.fences", "EXECUTE ON FUNCTION onejob.reserve_lock_key(text)"} {
			b.sql(`REVOKE ` + right + ` FROM ` + role)
			if err := b.CheckRights(t.Context()); err == nil || !strings.Contains(err.Error(), "GRANT "+right) {
				t.Errorf("without %s, CheckRights says: %v", right, err)
			}
			b.sql(`GRANT ` + right + ` TO ` + role)
		}
		if err := b.CheckRights(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func idOf(t *testing.T, s string) (n int64) {
	t.Helper()
	if _, err := fmt.Sscan(s, &n); err != nil {
		t.Fatal(err)
	}
	return n
}

// Replicas go on with the grants that they had before the migration that adds the function.
// An owner would lose rights that it needs for what it does by the functions.
func TestRolesThatOwnTheSchema(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	owner := b.one(`SELECT nspowner::regrole::text FROM pg_namespace WHERE nspname = 'onejob'`)
	_, err := b.pool.Exec(t.Context(), store.RolesSQL(store.Roles{Enqueuer: "e_" + b.session, Observer: "o_" + b.session, Operator: "p_" + b.session, Worker: owner}))
	if err == nil || !strings.Contains(err.Error(), "owns the schema onejob") {
		t.Errorf("the owner as a worker: %v", err)
	}
	id := b.insert()
	b.sql(`SELECT onejob.cancel($1)`, id)
	equal(t, "the status", b.one(`SELECT status FROM onejob.tasks WHERE id = $1`, id), "cancelled")
}

func TestRolesOfBeforeMayReserveTasks(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	users := withRoles(t, b)
	b.sql(`DROP FUNCTION onejob.reserve_task`)
	text, err := migrations.Files.ReadFile("041_keys_that_are_ids.sql")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.pool.Exec(t.Context(), string(text)); err != nil {
		t.Fatal(err)
	}
	b.insert()
	users["worker"].may(`SELECT onejob.reserve_lock_key('1')`)
	users["operator"].mayNot(`SELECT onejob.reserve_task('1')`)
	users["nobody"].mayNot(`SELECT onejob.reserve_task('1')`)
}
