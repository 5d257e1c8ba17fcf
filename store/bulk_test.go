package store_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"pgregory.net/rapid"

	"onejob/store"
)

// bulk does something to tasks and returns how many were chosen and changed.
func (b *bench) bulk(action store.Action, f store.TaskFilter) string {
	b.t.Helper()
	r, err := b.Bulk(b.t.Context(), store.Bulk{Action: action, Filter: f}, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	return fmt.Sprintf("%d of %d", r.Affected, r.Matched)
}

// A row as the oracle knows it.
type chosen struct {
	id                                          int64
	status, kind, queue, limit, key, word, text string
	schedule                                    string
	age                                         int // hours since it finished or was created
}

// Each filter chooses what a loop over all rows chooses, for every action, on random tables.
func TestBulkChoosesWhatTheFilterSays(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind) VALUES ('nightly', '@daily', 'noop'), ('hourly', '@hourly', 'noop')`)
	errorTexts := []string{"", "connection refused", "exit status 3", `50%_off \ odd`}
	parts := map[string]func(string) bool{
		"":        func(string) bool { return true },
		"REFUSED": func(s string) bool { return s == "connection refused" },
		"exit%3":  func(s string) bool { return s == "exit status 3" },
		`50\%\_`:  func(s string) bool { return s == `50%_off \ odd` },
		"nothing": func(string) bool { return false },
	}
	rapid.Check(t, func(rt *rapid.T) {
		pick := func(label string, from ...string) string { return rapid.SampledFrom(from).Draw(rt, label) }
		b.sql(`TRUNCATE onejob.tasks, onejob.attempts, onejob.actions`)
		var rows []chosen
		for i := range rapid.IntRange(1, 30).Draw(rt, "rows") {
			r := chosen{id: int64(i + 1), status: pick("status", "pending", "running", "succeeded", "failed", "cancelled"), kind: pick("kind", "exec", "sql", "noop"), queue: pick("queue", "default", "mail"),
				limit: pick("limit", "", "api"), key: pick("key", "", "k"), word: pick("word", "", "backup"), text: pick("text", errorTexts...), schedule: pick("schedule", "", "nightly"),
				age: rapid.IntRange(0, 5).Draw(rt, "age")}
			if r.status == "running" && r.key != "" {
				r.key = fmt.Sprint("k", i) // one at a time
			}
			rows = append(rows, r)
			b.sql(`
INSERT INTO onejob.tasks (id, kind, queue, limit_name, lock_key, payload, error, status, schedule_id, created_at, finished_at, session, replica, fence, started_at, attempt)
OVERRIDING SYSTEM VALUE
SELECT $1, $2, $3, nullif($4, ''), nullif($5, ''), CASE WHEN $6 = '' THEN '{}'::jsonb ELSE jsonb_build_object(CASE $2 WHEN 'sql' THEN 'statement' ELSE 'command' END, $6) END, nullif($7, ''), $8,
       (SELECT id FROM onejob.schedules WHERE name = $9),
       CASE WHEN f THEN now() - interval '1 year' ELSE at END, CASE WHEN f THEN at END, CASE WHEN r THEN gen_random_uuid() END, CASE WHEN r THEN 'one' END, CASE WHEN r THEN $1::bigint END, CASE WHEN r THEN now() END, CASE WHEN r THEN 1 ELSE 0 END
  FROM (SELECT $8 IN ('succeeded', 'failed', 'cancelled') AS f, $8 = 'running' AS r, now() - $10 * interval '1 hour' - interval '1 minute' AS at) x`,
				r.id, r.kind, r.queue, r.limit, r.key, r.word, r.text, r.status, r.schedule, r.age)
		}
		f := store.TaskFilter{Kind: pick("by kind", "", "exec", "none"), Queue: pick("by queue", "", "mail"), Limit: pick("by limit", "", "api"), LockKey: pick("by key", "", "k"),
			Command: pick("by command", "", "backup"), Schedule: pick("by schedule", "", "nightly", "hourly"), Error: pick("by error", "", "REFUSED", "exit%3", `50\%\_`, "nothing")}
		action := rapid.SampledFrom([]store.Action{store.ActionCancel, store.ActionRetry, store.ActionDelete}).Draw(rt, "action")
		statuses := map[store.Action][]string{store.ActionCancel: {"pending", "running"}, store.ActionRetry: {"failed"}}[action]
		if action == store.ActionDelete || rapid.Bool().Draw(rt, "with a status") {
			all := []string{"pending", "succeeded", "failed", "cancelled"}
			if action == store.ActionCancel {
				all = []string{"pending", "running"}
			}
			f.Status = pick("of status", all...)
			statuses = []string{f.Status}
		}
		now := time.Now()
		since, until := rapid.IntRange(-1, 5).Draw(rt, "since"), rapid.IntRange(-1, 5).Draw(rt, "until")
		if since >= 0 {
			at := now.Add(-time.Duration(since) * time.Hour)
			f.Since = &at
		}
		if until >= 0 {
			at := now.Add(-time.Duration(until) * time.Hour)
			f.Until = &at
		}
		var want []string
		for _, r := range rows {
			if slices.Contains(statuses, r.status) && (f.Kind == "" || f.Kind == r.kind) && (f.Queue == "" || f.Queue == r.queue) && (f.Limit == "" || f.Limit == r.limit) && (f.LockKey == "" || f.LockKey == r.key) &&
				(f.Command == "" || f.Command == r.word) && (f.Schedule == "" || f.Schedule == r.schedule) && (f.Error == "" || parts[f.Error](r.text)) && (since < 0 || r.age < since) && (until < 0 || r.age >= until) {
				want = append(want, fmt.Sprint(r.id))
			}
		}
		n, err := b.Bulk(t.Context(), store.Bulk{Action: action, Filter: f, Count: true}, nil)
		if err != nil || n.Affected != 0 || n.Matched != int64(len(want)) {
			rt.Fatalf("counted %+v, %v; want %d", n, err, len(want))
		}
		before := b.sql(`SELECT t::text FROM onejob.tasks t ORDER BY id`)
		r, err := b.Bulk(t.Context(), store.Bulk{Action: action, Filter: f}, nil)
		if err != nil || r.Affected != int64(len(want)) || r.Left() != 0 {
			rt.Fatalf("%s %+v did %+v, %v; want %v", action, f, r, err, want)
		}
		var touched []string
		for i, row := range before {
			if now := b.sql(`SELECT t::text FROM onejob.tasks t WHERE id = $1`, rows[i].id); len(now) == 0 || now[0] != row {
				touched = append(touched, fmt.Sprint(rows[i].id))
			}
		}
		if !slices.Equal(touched, want) {
			rt.Fatalf("%s %+v changed %v; want %v", action, f, touched, want)
		}
		if got := strings.Join(b.sql(`SELECT concat_ws(' ', action, affected) FROM onejob.actions`), ", "); len(want) > 0 && got != fmt.Sprint(action, " ", len(want)) || len(want) == 0 && got != "" {
			rt.Fatalf("on record: %q", got)
		}
	})
}

// Tens of thousands of tasks go in small transactions, are one action on record, and those
// that fail again meanwhile are left.
func TestBulkOfMany(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	b.sql(`INSERT INTO onejob.tasks (kind, status, error, finished_at) SELECT CASE WHEN i % 10 = 0 THEN 'other' ELSE 'noop' END, 'failed', 'refused ' || i, now() FROM generate_series(1, 30000) i`)
	var seen []int64
	r, err := b.Bulk(t.Context(), store.Bulk{Action: store.ActionRetry, Filter: store.TaskFilter{Kind: "noop", Error: "refused"}, Spread: time.Hour}, func(r store.BulkResult) {
		seen = append(seen, r.Affected)
		b.sql(`UPDATE onejob.tasks SET status = 'failed', finished_at = clock_timestamp(), error = 'refused again' WHERE id IN (SELECT id FROM onejob.tasks WHERE kind = 'noop' AND status = 'pending' ORDER BY id DESC LIMIT 3)`)
	})
	if err != nil || r.Affected != 27000 || r.Matched != 27000 {
		t.Fatalf("%+v, %v", r, err)
	}
	if len(seen) < 27 || !slices.IsSorted(seen) {
		t.Errorf("progress was %v", seen)
	}
	equal(t, "what is on record", b.one(`SELECT string_agg(concat_ws(' ', action, affected, target ~ 'refused'), ', ') FROM onejob.actions`), "retry 27000 t")
	equal(t, "tasks that are due within an hour, and in each half of it", b.one(`
SELECT concat_ws(' ', count(*) FILTER (WHERE run_at > now() + interval '1 hour'), count(*) FILTER (WHERE run_at > now() + interval '30 minutes') BETWEEN 12000 AND 15000)
  FROM onejob.tasks WHERE kind = 'noop' AND status = 'pending'`), "0 t")
	equal(t, "others", b.one(`SELECT count(*) FROM onejob.tasks WHERE kind = 'other' AND status = 'failed'`), "3000")

	all := b.one(`SELECT count(*) || ' of ' || count(*) FROM onejob.tasks WHERE status = 'pending'`)
	equal(t, "cancelled", b.bulk(store.ActionCancel, store.TaskFilter{Queue: "default"}), all)
	equal(t, "deleted", b.bulk(store.ActionDelete, store.TaskFilter{Status: "cancelled"}), all)
	equal(t, "those that are left", b.one(`SELECT string_agg(DISTINCT status, ' ') FROM onejob.tasks`), "failed")
}

// Rows that others hold, and tasks whose unique_key another one has, are left and counted.
func TestBulkLeavesWhatIsNotItsOwn(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	for range 6 {
		b.insert("status='failed'", "finished_at=now()", "attempt=1")
	}
	b.sql(`UPDATE onejob.tasks SET unique_key = 'same' WHERE id IN (2, 3)`)
	b.sql(`UPDATE onejob.tasks SET unique_key = 'taken' WHERE id = 4`)
	b.insert("unique_key='taken'")
	tx, err := b.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	if _, err := tx.Exec(t.Context(), `SELECT FROM onejob.tasks WHERE id = 6 FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	equal(t, "retried", b.bulk(store.ActionRetry, store.TaskFilter{Kind: "noop"}), "3 of 6")
	equal(t, "what is pending", b.one(`SELECT string_agg(id::text, ' ' ORDER BY id) FROM onejob.tasks WHERE status = 'pending'`), "1 2 5 7")
	equal(t, "on record", b.one(`SELECT affected FROM onejob.actions`), "3")
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	equal(t, "the locked one, afterwards", b.bulk(store.ActionRetry, store.TaskFilter{IDs: []int64{6, 99}}), "1 of 1")
}

// The loop that the documentation shows.
func TestBulkInSQL(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	b.sql(`INSERT INTO onejob.tasks (kind, status, error, finished_at) SELECT 'http', 'failed', 'Connection refused', now() FROM generate_series(1, 2500) i`)
	page, err := os.ReadFile("../docs/reference/sql.md")
	if err != nil {
		t.Fatal(err)
	}
	_, loop, found := strings.Cut(string(page), "```sql\nDO $$")
	loop, _, ended := strings.Cut(loop, "```")
	if !found || !ended {
		t.Fatal("the documentation has no loop")
	}
	if _, err := b.pool.Exec(t.Context(), "DO $$"+loop, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
	equal(t, "what is due", b.one(`SELECT count(*) FROM onejob.tasks WHERE status = 'pending'`), "2500")
	equal(t, "on record", b.one(`SELECT string_agg(concat_ws(' ', action, affected), ', ') FROM onejob.actions`), "retry 2500")
}

// Somebody interrupts it: what was done is done and on record, and the same again goes on.
func TestBulkIsInterrupted(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at) SELECT 'noop', 'failed', now() FROM generate_series(1, 5000)`)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	all := store.Bulk{Action: store.ActionRetry, Filter: store.TaskFilter{Kind: "noop"}}
	r, err := b.Bulk(ctx, all, func(r store.BulkResult) {
		if r.Affected >= 2000 {
			cancel()
		}
	})
	if err == nil || !r.Rest || r.Affected != 2000 {
		t.Fatalf("%+v, %v", r, err)
	}
	equal(t, "pending, and on record", b.one(`SELECT concat_ws(' ', (SELECT count(*) FROM onejob.tasks WHERE status = 'pending'), (SELECT affected FROM onejob.actions))`), "2000 2000")
	if r, err = b.Bulk(t.Context(), all, nil); err != nil || r.Rest || r.Affected != 3000 {
		t.Fatalf("%+v, %v", r, err)
	}
	equal(t, "on record", b.one(`SELECT string_agg(affected::text, ' ' ORDER BY id) FROM onejob.actions`), "2000 3000")
}

// A transaction that has a unique_key and goes on keeps back the one task that needs it.
func TestBulkBesideAnOpenTransaction(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at, unique_key) SELECT 'noop', 'failed', now(), 'key ' || i FROM generate_series(1, 300) i`)
	tx, err := b.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	if _, err := tx.Exec(t.Context(), `INSERT INTO onejob.tasks (kind, unique_key) VALUES ('noop', 'key 7'), ('noop', 'key 9')`); err != nil {
		t.Fatal(err)
	}
	equal(t, "retried", b.bulk(store.ActionRetry, store.TaskFilter{Kind: "noop"}), "298 of 300")
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	equal(t, "retried afterwards", b.bulk(store.ActionRetry, store.TaskFilter{Kind: "noop"}), "2 of 2")
}

// Rows that Postgres refuses to change are left and counted; the action reaches all others.
func TestBulkGoesOnBehindRefusedRows(t *testing.T) {
	t.Parallel()
	failed := func(t *testing.T) *bench {
		b := newBareBench(t)
		b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at) SELECT 'noop', 'failed', now() FROM generate_series(1, 30)`)
		return b
	}
	all := store.TaskFilter{Status: "failed", Kind: "noop"}
	const left = `SELECT string_agg(id::text, ' ' ORDER BY id) FROM onejob.tasks WHERE status = 'failed'`
	onRecord := func(b *bench) string {
		b.t.Helper()
		return b.one(`SELECT string_agg(concat_ws(' ', action, affected), ', ') FROM onejob.actions`)
	}

	t.Run("ForeignKey", func(t *testing.T) {
		t.Parallel()
		b := failed(t)
		b.sql(`CREATE TABLE public.invoices (task_id bigint REFERENCES onejob.tasks)`)
		b.sql(`INSERT INTO public.invoices VALUES (1), (2), (20)`)
		equal(t, "deleted", b.bulk(store.ActionDelete, all), "27 of 30")
		equal(t, "left", b.one(left), "1 2 20")
		equal(t, "on record", onRecord(b), "delete 27")
		equal(t, "once more", b.bulk(store.ActionDelete, all), "0 of 3")

		// In calls of two, the first of which changes nothing.
		b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at) SELECT 'noop', 'failed', now() FROM generate_series(1, 3)`)
		b.sql(`
DO $$
DECLARE r onejob.bulk_result; calls int := 0;
BEGIN
    r.next_id := 0;
    WHILE r.next_id IS NOT NULL LOOP
        r := onejob.bulk('delete', '{"status": "failed"}', r.next_id, 2, action_id => r.action_id);
        COMMIT;
        calls := calls + 1;
        ASSERT calls < 10;
    END LOOP;
END $$`)
		equal(t, "left by small calls", b.one(left), "1 2 20")
		equal(t, "on record", onRecord(b), "delete 27, delete 3")
	})
	t.Run("CascadeIntoALockedTable", func(t *testing.T) {
		t.Parallel()
		b := failed(t)
		b.sql(`CREATE TABLE public.lines (task_id bigint REFERENCES onejob.tasks ON DELETE CASCADE, n int)`)
		b.sql(`INSERT INTO public.lines SELECT i, 1 FROM generate_series(1, 25) i`)
		tx, err := b.pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = tx.Rollback(t.Context()) }()
		// An update of another column: the tasks themselves are not locked.
		if _, err := tx.Exec(t.Context(), `UPDATE public.lines SET n = 2`); err != nil {
			t.Fatal(err)
		}
		equal(t, "deleted beside it", b.bulk(store.ActionDelete, all), "5 of 30") // those after the 20 waits, too
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		equal(t, "deleted afterwards", b.bulk(store.ActionDelete, all), "25 of 25")
	})
	for action, from := range map[store.Action]string{store.ActionRetry: "failed", store.ActionCancel: "pending", store.ActionDelete: "failed"} {
		t.Run("Trigger/"+string(action), func(t *testing.T) {
			t.Parallel()
			b := failed(t)
			b.sql(`UPDATE onejob.tasks SET status = $1, finished_at = CASE $1 WHEN 'failed' THEN now() END`, from)
			b.sql(`CREATE FUNCTION public.keep() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.id = 7 THEN RAISE 'not this one'; END IF;
    ASSERT OLD.id <> 8;
    RETURN coalesce(NEW, OLD);
END $$`)
			b.sql(`CREATE TRIGGER keep BEFORE UPDATE OR DELETE ON onejob.tasks FOR EACH ROW EXECUTE FUNCTION public.keep()`)
			equal(t, "done", b.bulk(action, store.TaskFilter{Status: from, Kind: "noop"}), "28 of 30")
			equal(t, "left", b.one(`SELECT string_agg(id::text, ' ' ORDER BY id) FROM onejob.tasks WHERE status = $1 AND NOT cancel_requested AND ($2 <> 'retry' OR status <> 'pending')`, from, string(action)), "7 8")
			equal(t, "on record", onRecord(b), string(action)+" 28")
		})
	}
	// What is about the transaction or the server is an error: no other row would fare better.
	for name, state := range map[string]string{"SerializationFailure": "40001", "Deadlock": "40P01", "ReadOnly": "25006", "DiskFull": "53100"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := failed(t)
			b.sql(`CREATE FUNCTION public.keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'stop' USING ERRCODE = '` + state + `'; END $$`)
			b.sql(`CREATE TRIGGER keep BEFORE DELETE ON onejob.tasks FOR EACH ROW WHEN (OLD.id = 7) EXECUTE FUNCTION public.keep()`)
			_, err := b.Bulk(t.Context(), store.Bulk{Action: store.ActionDelete, Filter: all}, nil)
			var pg *pgconn.PgError
			if !errors.As(err, &pg) || pg.Code != state {
				t.Errorf("%v", err)
			}
			equal(t, "tasks", b.one(`SELECT count(*) FROM onejob.tasks`), "30")
		})
	}
	// A call ends with it, as it may be about all rows; Store.Bulk finds out that it is one row.
	t.Run("QueryCanceled", func(t *testing.T) {
		t.Parallel()
		b := failed(t)
		b.sql(`CREATE FUNCTION public.keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'stop' USING ERRCODE = '57014'; END $$`)
		b.sql(`CREATE TRIGGER keep BEFORE DELETE ON onejob.tasks FOR EACH ROW WHEN (OLD.id = 7) EXECUTE FUNCTION public.keep()`)
		if _, err := b.try(`SELECT onejob.bulk('delete', '{"status": "failed"}')`); err == nil || !strings.Contains(err.Error(), "57014") {
			t.Error(err)
		}
		equal(t, "deleted", b.bulk(store.ActionDelete, all), "29 of 30")
	})
}

// Where 200 tasks take too long, fewer are changed at once. One that alone takes too long is left, and
// those behind it are not.
func TestBulkGoesOnBehindSlowRows(t *testing.T) {
	t.Parallel()
	slow := func(t *testing.T) (*bench, *store.Store) {
		b := newBareBench(t)
		b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at) SELECT 'noop', 'failed', now() FROM generate_series(1, 250) i`)
		b.sql(`CREATE FUNCTION public.wait() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_sleep(CASE WHEN OLD.id IN (100, 101) THEN 60 ELSE 0.005 END);
    RETURN coalesce(NEW, OLD);
END $$`)
		b.sql(`CREATE TRIGGER wait BEFORE UPDATE OR DELETE ON onejob.tasks FOR EACH ROW EXECUTE FUNCTION public.wait()`)
		return b, open(t, store.Config{DSN: b.dsn, Timeout: 2 * time.Second})
	}
	for _, action := range []store.Action{store.ActionDelete, store.ActionRetry} {
		t.Run(string(action), func(t *testing.T) {
			t.Parallel()
			var b *bench
			var r store.BulkResult
			var err error
			shown := 0
			for range 3 { // on a machine that stands still for as long, others take too long as well
				var s *store.Store
				b, s = slow(t)
				shown = 0
				r, err = s.Bulk(t.Context(), store.Bulk{Action: action, Filter: store.TaskFilter{Status: "failed"}}, func(store.BulkResult) { shown++ })
				if err == nil && r.Slow == 2 {
					break
				}
			}
			if err != nil || r != (store.BulkResult{Matched: 250, Affected: 248, Slow: 2}) || r.Left() != 2 || shown < 5 {
				t.Errorf("%+v in %d parts, %v", r, shown, err)
			}
			equal(t, "left", b.one(`SELECT string_agg(id::text, ' ' ORDER BY id) FROM onejob.tasks WHERE status = 'failed'`), "100 101")
			equal(t, "on record", b.one(`SELECT string_agg(concat_ws(' ', action, affected), ', ') FROM onejob.actions`), string(action)+" 248")
		})
	}
	t.Run("OneTask", func(t *testing.T) {
		t.Parallel()
		_, s := slow(t)
		if ok, err := s.Delete(t.Context(), 100); ok || err == nil || !strings.Contains(err.Error(), "task 100: it takes longer than 2s") {
			t.Error(ok, err)
		}
	})
	t.Run("Reading", func(t *testing.T) {
		t.Parallel()
		b := newBareBench(t)
		// It takes some milliseconds to look into one of these errors.
		b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at, error) SELECT 'noop', 'failed', now(), CASE WHEN i IN (7, 390) THEN 'b' ELSE repeat('a', 500000) END FROM generate_series(1, 400) i`)
		s := open(t, store.Config{DSN: b.dsn, Timeout: 2 * time.Second})
		all := store.Bulk{Action: store.ActionRetry, Filter: store.TaskFilter{Error: "b"}, Count: true}
		if r, err := s.Bulk(t.Context(), all, nil); err != nil || r != (store.BulkResult{Matched: 2}) {
			t.Errorf("counted %+v, %v", r, err)
		}
		all.Count = false
		if r, err := s.Bulk(t.Context(), all, nil); err != nil || r != (store.BulkResult{Matched: 2, Affected: 2}) {
			t.Errorf("%+v, %v", r, err)
		}
	})
	t.Run("SmallCallsReadLess", func(t *testing.T) {
		t.Parallel()
		b := newBareBench(t)
		b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at) SELECT 'noop', 'failed', now() FROM generate_series(1, 12000)`)
		for most, read := range map[int]string{1: "50", 3: "150", 200: "10000", 10000: "10000"} {
			equal(t, fmt.Sprintf("rows that a call for %d reads", most), b.one(`SELECT (onejob.bulk('retry', '{"kind": "none"}', max_tasks => $1)).next_id`, most), read)
		}
	})
}

// A call continues no record but that of its own action.
func TestBulkContinuesOnlyItsOwnRecord(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at) SELECT 'noop', 'failed', now() FROM generate_series(1, 10)`)
	b.sql(`INSERT INTO onejob.actions (who, action, target, affected) SELECT session_user, 'retry', 'tasks {"kind": "noop"}', 0`)             // 1
	b.sql(`INSERT INTO onejob.actions (who, action, target, affected) SELECT session_user, 'delete', 'tasks {"kind": "noop"}', 0`)            // 2
	b.sql(`INSERT INTO onejob.actions (who, action, target, affected) SELECT session_user, 'retry', 'tasks {"kind": "other"}', 0`)            // 3
	b.sql(`INSERT INTO onejob.actions (who, action, target, affected) SELECT session_user || ' (bob)', 'retry', 'tasks {"kind": "noop"}', 0`) // 4
	equal(t, "its own", b.one(`SELECT (onejob.bulk('retry', '{"kind": "noop"}', max_tasks => 1, action_id => 1)).action_id`), "1")
	for i, foreign := range []string{"2", "3", "4", "-1", "NULL"} {
		equal(t, "the record after "+foreign, b.one(`SELECT (onejob.bulk('retry', '{"kind": "noop"}', max_tasks => 1, action_id => `+foreign+`)).action_id`), fmt.Sprint(5+i))
	}
	equal(t, "on record", b.one(`SELECT string_agg(affected::text, ' ' ORDER BY id) FROM onejob.actions`), "1 0 0 0 1 1 1 1 1")
	equal(t, "whose the new ones are", b.one(`SELECT count(*) FROM onejob.actions WHERE id > 4 AND who = session_user AND action = 'retry' AND target = 'tasks {"kind": "noop"}'`), "5")
}

func TestBulkRefusesWhatItCannotMean(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	b.insert("status='succeeded'", "finished_at=now()")
	for sql, want := range map[string]string{
		`'retry', '{}'`:                                        "the filter chooses all tasks",
		`'retry', NULL`:                                        "the filter chooses all tasks",
		`'retry', '[]'`:                                        "the filter chooses all tasks",
		`'retry', '{"kinds": "a"}'`:                            "the filter has 'kinds'; what it may have is status, kind",
		`'repeat', '{"kind": "a"}'`:                            "the action is 'repeat'; it must be cancel, retry or delete",
		`NULL, '{"kind": "a"}'`:                                "the action is missing",
		`'delete', '{"kind": "a"}'`:                            "tasks of which status shall be deleted?",
		`'delete', '{"status": "running"}'`:                    "the status is 'running', and delete is for tasks that are pending, succeeded, failed or cancelled",
		`'cancel', '{"status": "failed"}'`:                     "the status is 'failed', and cancel is for tasks that are pending or running",
		`'cancel', '{"status": null}'`:                         "the field 'status' of the filter is null",
		`'cancel', '{"since": null}'`:                          "the field 'since' of the filter is null",
		`'cancel', '{"until": null}'`:                          "the field 'until' of the filter is null",
		`'cancel', '{"error": null}'`:                          "the field 'error' of the filter is null",
		`'cancel', '{"error": ""}'`:                            "the field 'error' of the filter is empty",
		`'cancel', '{"kind": "noop", "ids": null}'`:            "the field 'ids' of the filter is null",
		`'cancel', jsonb_build_object('queue', NULL)`:          "the field 'queue' of the filter is null",
		`'cancel', '{"ids": 1}'`:                               "the field 'ids' of the filter is of type number; it must be an array of task IDs",
		`'cancel', '{"ids": {"1": 1}}'`:                        "the field 'ids' of the filter is of type object",
		`'retry', '{"schedule": "x"}'`:                         "there is no schedule 'x'",
		`'retry', '{"since": "soon"}'`:                         "invalid input syntax",
		`'retry', '{"kind": "a"}', max_tasks => 0`:             "max_tasks must be between 1 and 10000",
		`'retry', '{"kind": "a"}', spread => '-1 s'`:           "spread must be between 0 and 1 year",
		`'retry', '{"kind": "a"}', spread => 'infinity'::text`: "does not exist",
		`'delete', '{"ids": [1]}', dry_run => NULL`:            "dry_run must be true or false, and is NULL",
	} {
		if _, err := b.try(`SELECT onejob.bulk(` + sql + `)`); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", sql, err, want)
		}
	}
	_, err := b.try(`SELECT onejob.bulk('cancel', '{"since": null}')`)
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.Code != "22023" || pg.Hint != "Leave the field out, or give it a value." {
		t.Errorf("of a null: %+v", pg)
	}
	// A selection that is empty is no reason to choose all.
	result, err := b.Bulk(t.Context(), store.Bulk{Action: store.ActionDelete, Filter: store.TaskFilter{Status: "succeeded", IDs: []int64{}}}, nil)
	if err != nil || result != (store.BulkResult{}) {
		t.Errorf("of no task: %+v, %v", result, err)
	}
	_, err = b.Bulk(t.Context(), store.Bulk{Action: store.ActionRetry, Filter: store.TaskFilter{Schedule: "x"}}, nil)
	if !errors.Is(err, store.ErrFilter) || !strings.Contains(err.Error(), "there is no schedule 'x'") {
		t.Error(err)
	}
	equal(t, "on record", b.one(`SELECT count(*) FROM onejob.actions`), "0")
	if ok, err := b.Delete(t.Context(), 1); !ok || err != nil {
		t.Error(ok, err)
	}
	if ok, err := b.Delete(t.Context(), 1); ok || err != nil {
		t.Error(ok, err)
	}
	equal(t, "on record", b.one(`SELECT concat_ws(' ', action, target, task_id, affected) FROM onejob.actions`), "delete task 1 1 1")
}

// A schedule runs when somebody asks, disabled or not, and its due times stay.
func TestScheduleRunsNow(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind, queue, lock_key, on_overlap, enabled, payload, timeout) VALUES ('nightly', '@daily', 'exec', 'night', 'k', 'skip', false, '{"command": "x"}', '5 s')`)
	before := b.one(`SELECT s::text FROM onejob.schedules s`)
	id, err := b.RunSchedule(store.WithActor(t.Context(), "alice"), "nightly")
	if err != nil || id == 0 {
		t.Fatal(id, err)
	}
	equal(t, "the task", b.one(`SELECT concat_ws(' ', kind, queue, lock_key, payload, timeout, status, schedule_id IS NOT NULL, run_at <= now()) FROM onejob.tasks WHERE id = $1`, id),
		`exec night k {"command": "x"} 00:00:05 pending t t`)
	equal(t, "the schedule", b.one(`SELECT s::text FROM onejob.schedules s`), before)
	equal(t, "on record", b.one(`SELECT concat_ws(' ', who ~ '[(]alice[)]$', action, target, task_id = $1) FROM onejob.actions`, id), "t run schedule schedule nightly t")
	if id, err := b.RunSchedule(t.Context(), "none"); id != 0 || err != nil {
		t.Error(id, err)
	}
}

// BenchmarkBulk retries 500,000 tasks that failed, in a table with as many others of which each
// status has a fifth. ONEJOB_BENCH_ROWS is another number.
func BenchmarkBulk(bm *testing.B) {
	n := number("ONEJOB_BENCH_ROWS", 500_000)
	b := newBareBench(bm)
	for bm.Loop() {
		bm.StopTimer()
		b.sql(`TRUNCATE onejob.tasks, onejob.attempts`)
		for _, status := range []string{"succeeded", "failed", "cancelled"} {
			b.finished(status, n/5)
		}
		b.sql(`INSERT INTO onejob.tasks (kind, status, attempt, finished_at, error) SELECT 'retried', 'failed', 5, now(), 'connection refused' FROM generate_series(1, $1::int)`, n)
		b.sql(`VACUUM ANALYZE onejob.tasks`)
		bm.StartTimer()
		began := time.Now()
		var longest time.Duration
		last := began
		r, err := b.Bulk(bm.Context(), store.Bulk{Action: store.ActionRetry, Filter: store.TaskFilter{Kind: "retried", Error: "refused"}}, func(store.BulkResult) {
			longest, last = max(longest, time.Since(last)), time.Now()
		})
		if err != nil || r.Affected != int64(n) {
			bm.Fatal(r, err)
		}
		bm.ReportMetric(float64(n)/time.Since(began).Seconds(), "tasks/s")
		bm.ReportMetric(float64(longest.Microseconds())/1000, "longest-transaction-ms")
	}
}
