package store_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/store"
	"onejob/tasks"
)

// overview returns an overview whose parts could all be read. On a busy machine that may take several.
func (b *bench) overview() (o store.Overview) {
	b.t.Helper()
	testenv.Eventually(b.t, time.Minute, "all parts of the overview are read", func() bool {
		var err error
		o, err = b.Overview(b.t.Context())
		err = errors.Join(err, o.Replicas.Err, o.Waiting.Err, o.Nameless.Err, o.Paused.Err, o.Running.Err, o.Schedules.Err, o.Failures.Err, o.Overlaps.Err, o.Held.Err)
		if err != nil && !unread(err) {
			b.t.Fatal(err)
		}
		return err == nil
	})
	return o
}

// story returns a story that could be read. On a busy machine that may take several.
func (b *bench) story(id int64) (s store.Story, err error) {
	b.t.Helper()
	for range testenv.Tries(time.Minute) {
		s, err = b.Story(b.t.Context(), id)
		if (err == nil || !unread(err)) && !strings.HasPrefix(s.Why, "Not known: no answer") {
			break
		}
	}
	return s, err
}

// unread reports whether Postgres took longer for an overview, or for a part of it, than that may take.
func unread(err error) bool {
	return late(err) || strings.Contains(err.Error(), "no answer from Postgres within")
}

func waitingOf(o store.Overview, queue, kind, limit string) (w store.Waiting) {
	for _, w := range o.Waiting.Rows {
		if w.Queue == queue && w.Kind == kind && w.Limit == limit {
			return w
		}
	}
	return w
}

func TestOverviewHasWhatIsThere(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	if o := b.overview(); len(o.Waiting.Rows)+len(o.Running.Rows)+len(o.Failures.Rows)+len(o.Schedules.Rows)+len(o.Overlaps.Rows) > 0 {
		t.Errorf("of an empty schema: %+v", o)
	}
	b.join()
	running := b.claimed("queue='other'", "lock_key='mine'", "timeout='1 minute'", "payload='{\"a\": 1}'", "priority=900")
	b.sql(`INSERT INTO onejob.tasks (kind, queue, priority, run_at, created_at) SELECT 'noop', 'mail', i % 3, now() - i * interval '1 minute', now() - interval '1 day' FROM generate_series(1, 30) i`)
	b.sql(`INSERT INTO onejob.tasks (kind, queue, run_at, created_at, lock_key) SELECT 'noop', 'mail', now() - interval '2 hours', now() - interval '1 day', 'k' FROM generate_series(1, 2) i`)
	b.sql(`INSERT INTO onejob.tasks (kind, queue, run_at) SELECT 'noop', 'mail', now() + interval '1 hour' FROM generate_series(1, 7) i`)
	b.sql(`INSERT INTO onejob.tasks (kind, queue, run_at) VALUES ('noop', 'mail', 'infinity')`)
	b.sql(`INSERT INTO onejob.tasks (kind, queue, limit_name) SELECT 'http', 'mail', 'calls' FROM generate_series(1, 5) i`)
	b.sql(`INSERT INTO onejob.tasks (kind, queue, limit_name) SELECT 'http', 'mail', 'other' FROM generate_series(1, 3) i`)
	b.sql(`INSERT INTO onejob.tasks (kind, status, error, finished_at) SELECT 'exec', 'failed', 'exit status ' || i % 2, now() - i * interval '1 minute' FROM generate_series(1, 9) i`)
	b.sql(`INSERT INTO onejob.tasks (kind, status, error, finished_at) VALUES ('exec', 'failed', 'long ago', now() - interval '2 days')`)
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind) VALUES ('s', '@hourly', 'noop')`)
	b.sql(`INSERT INTO onejob.occurrences (schedule_id, due_at, task_id, skipped)
	            SELECT s.id, now() - i * interval '1 hour', CASE WHEN i > 2 THEN (SELECT max(id) FROM onejob.tasks WHERE error = 'exit status 0') WHEN i = 2 THEN 1000000 END, CASE WHEN i = 1 THEN 'overlap' END
	              FROM onejob.schedules s CROSS JOIN generate_series(1, 30) i`)

	o := b.overview()
	w := waitingOf(o, "mail", "noop", "")
	if w.Due != 32 || w.Later != 7 || w.DueMore || w.LaterMore || w.Oldest < 2*time.Hour || w.Keyless < 30*time.Minute || w.Keyless > time.Hour {
		t.Errorf("what waits without a limit: %+v", w)
	}
	for limit, due := range map[string]int64{"calls": 5, "other": 3} {
		if w := waitingOf(o, "mail", "http", limit); w.Due != due || w.Later != 0 {
			t.Errorf("what waits for limit %s: %+v", limit, w)
		}
	}
	if len(o.Waiting.Rows) != 3 {
		t.Errorf("what waits: %+v", o.Waiting.Rows)
	}
	if r := o.Rates.Rows; len(r) != 3 || r[0] != (store.Rate{Queue: "mail", Enqueued: 16}) || r[1].Queue != "default" || r[1].Enqueued != 10 || r[1].Ended > 1 || r[2] != (store.Rate{Queue: "other", Enqueued: 1}) {
		t.Errorf("what came and went: %+v", r)
	}
	if len(o.Running.Rows) != 1 {
		t.Fatalf("what runs: %+v", o.Running.Rows)
	}
	r := o.Running.Rows[0]
	if r.ID != running.ID || r.All != 1 || *r.LockKey != "mine" || r.Fence != running.Fence || r.Age <= 0 || r.Age > 5*time.Minute || r.Timeout == nil || *r.Timeout != time.Minute || *r.Payload != `{"a": 1}` {
		t.Errorf("what runs: %+v", r)
	}
	if f := o.Failures.Rows; len(f) != 2 || f[0].Count != 5 || f[0].Error != "exit status 1" || f[1].Count != 4 || f[0].Looked != 10 || !f[0].First.At.Before(f[0].Last.At) {
		t.Errorf("what failed: %+v", f)
	}
	s := o.Schedules.Rows
	if len(s) != 1 || len(s[0].DueAt) != 20 || !slices.IsSortedFunc(s[0].DueAt, time.Time.Compare) || strings.Join(s[0].Became[16:], " ") != "failed failed deleted overlap" || s[0].TaskIDs[19] != 0 || s[0].Behind {
		t.Fatalf("the schedules: %+v", s)
	}
	if len(o.Replicas.Rows) != 1 || o.Replicas.Rows[0].Session != b.session || o.Replicas.Rows[0].Silent < 0 || o.Replicas.Rows[0].Silent > 5*time.Minute {
		t.Fatalf("the replicas: %+v", o.Replicas.Rows)
	}
	if ahead := o.Replicas.Rows[0].ClockAhead; ahead != nil {
		t.Errorf("before its first heartbeat a replica's clock is %v ahead", ahead)
	}
	b.beat(tasks.Replica{Session: b.session, State: tasks.ReplicaWorking}, tasks.Known{})
	if ahead := b.overview().Replicas.Rows[0].ClockAhead; ahead == nil || ahead.Abs() > 30*time.Second {
		t.Errorf("a replica's clock is %v ahead, on the same machine", ahead)
	}
	b.sql(`UPDATE onejob.replicas SET clock_ahead = interval '-7 seconds'`)
	if ahead := b.overview().Replicas.Rows[0].ClockAhead; ahead == nil || *ahead != -7*time.Second {
		t.Errorf("a replica's clock is %v ahead, want -7 s", ahead)
	}
	b.sql(`UPDATE onejob.schedules SET next_at = now() - interval '2 minutes'`)
	if o := b.overview(); !o.Schedules.Rows[0].Behind {
		t.Errorf("a schedule that was due two minutes ago is not behind")
	}
}

// What ended counts for a minute, with its keep_for or without; more than is read is a lower bound.
// A name that no replica has which could claim the task is found, whether the task is due or was just
// given back; what one of them has, what nobody can tell, and what is not due is not.
func TestOverviewHasNamesThatNoReplicaHas(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	add := func(queue, payload, limit, in string) (id int64) {
		b.t.Helper()
		if err := b.pool.QueryRow(t.Context(), `INSERT INTO onejob.tasks (kind, queue, payload, limit_name, run_at) VALUES ('exec', $1, $2, nullif($3, ''), now() + $4::interval) RETURNING id`,
			queue, payload, limit, in).Scan(&id); err != nil {
			t.Fatal(err)
		}
		return id
	}
	task := func(queue, payload string) int64 { return add(queue, payload, "", "0") }
	if n := b.overview().Nameless.Rows; len(n) > 0 {
		t.Errorf("without replicas and tasks: %+v", n)
	}
	task("mail", `{"command": "lost"}`)
	if n := b.overview().Nameless.Rows; len(n) > 0 {
		t.Errorf("without replicas: %+v", n)
	}
	b.serves("one", "{mail}", "{exec,noop}", `{"exec": {"command": ["backup"]}}`, 0, 5)
	b.serves("two", "{mail}", "{exec,noop}", `{"exec": {"command": ["report"]}}`, 0, 5)
	b.serves("old", "{other}", "{exec,noop}", "", 0, 5)
	b.serves("far", "{far}", "{exec}", `{"exec": {"command": ["lost"]}}`, 0, 5)
	lost := task("mail", `{"command": "lost"}`)
	limited := add("mail", `{"command": "limited"}`, "calls", "0")
	back := add("mail", `{"command": "back"}`, "", "20 seconds")
	b.sql(`UPDATE onejob.tasks SET fence = 1 WHERE id = ` + fmt.Sprint(back))
	task("mail", `{"command": "backup"}`)
	add("mail", `{"command": "report"}`, "calls", "0")
	task("mail", `{"args": ["no command"]}`)
	add("mail", `{"command": "later"}`, "", "30 seconds")
	task("other", `{"command": "anything"}`)
	task("nobody's", `{"command": "anything"}`)
	got := b.overview().Nameless.Rows
	want := []store.Nameless{
		{Kind: "exec", Field: "command", Name: "lost", Sample: lost},
		{Kind: "exec", Field: "command", Name: "back", Sample: back},
		{Kind: "exec", Field: "command", Name: "limited", Sample: limited}}
	if !slices.Equal(got, want) {
		t.Errorf("the names are %+v, want %+v", got, want)
	}
}

func TestRates(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`INSERT INTO onejob.tasks (kind, queue, status, finished_at, created_at) SELECT 'noop', 'old', 'succeeded', now() - interval '2 minutes', now() - interval '1 hour' FROM generate_series(1, 3)`)
	b.sql(`INSERT INTO onejob.tasks (kind, queue, status, finished_at, created_at) SELECT 'noop', 'done', s, now(), now() - interval '1 hour' FROM unnest('{succeeded,succeeded,failed,cancelled}'::text[]) s`)
	b.sql(`INSERT INTO onejob.tasks (kind, queue, status, finished_at, keep_for) VALUES ('noop', 'kept', 'succeeded', now(), '1 year')`)
	if got, want := fmt.Sprint(b.overview().Rates.Rows), "[{done 0 false 4 false} {kept 1 false 1 false}]"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	b.sql(`INSERT INTO onejob.tasks (kind, queue, status, finished_at) SELECT 'noop', 'many', 'succeeded', now() FROM generate_series(1, $1)`, store.MostRated+2)
	if got, want := fmt.Sprint(b.overview().Rates.Rows), fmt.Sprintf("[{many %d true %[1]d true} {done 0 true 2 true}]", store.MostRated); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// Rows at the limits of what the table admits are shown like others.
func TestOverviewOfExtremeRows(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	b.sql(`INSERT INTO onejob.tasks (kind, run_at, created_at, timeout) VALUES ('noop', '0001-01-01 UTC', '0001-01-01 UTC', '100 years'), ('http', '9999-12-31 UTC', now(), '100 years')`)
	b.sql(`INSERT INTO onejob.tasks (kind, run_at, created_at) VALUES ('sql', '0001-01-01 UTC', '9999-12-31 UTC')`)
	ids := b.sql(`INSERT INTO onejob.tasks (kind, status, session, replica, fence, attempt, started_at, timeout, created_at)
	              VALUES ('exec', 'running', gen_random_uuid(), '', 1, 1, '0001-01-01 UTC', '100 years', '0001-01-01 UTC') RETURNING id`)
	b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at) VALUES ('exec', 'failed', '0001-01-01 UTC'), ('exec', 'failed', '9999-12-31 UTC')`)
	const longest = 250 * 365 * 24 * time.Hour
	o := b.overview()
	if w := waitingOf(o, "default", "noop", ""); w.Due != 1 || w.Oldest < longest || w.Keyless < longest {
		t.Errorf("what waits since the year 1: %+v", w)
	}
	if w := waitingOf(o, "default", "sql", ""); w.Due != 1 || w.Oldest != 0 || w.Keyless != 0 {
		t.Errorf("what was enqueued in the future: %+v", w)
	}
	if len(o.Running.Rows) != 1 || o.Running.Rows[0].Age < longest {
		t.Errorf("what runs since the year 1: %+v", o.Running.Rows)
	}
	id, err := strconv.ParseInt(ids[0], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.story(id); err != nil {
		t.Error(err)
	}
}

// What is enqueued for a time that has passed, as by a backfill, has waited since it was enqueued.
func TestOverviewCountsFromWhenATaskWasEnqueued(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	b.sql(`INSERT INTO onejob.tasks (kind, run_at, limit_name) SELECT 'noop', now() - interval '50 days', l FROM unnest('{NULL,calls}'::text[]) l`)
	b.sql(`INSERT INTO onejob.tasks (kind, run_at, created_at, limit_name) SELECT 'exec', now() - interval '1 hour', now() - interval '2 hours', l FROM unnest('{NULL,calls}'::text[]) l`)
	b.sql(`INSERT INTO onejob.tasks (kind, run_at, created_at, limit_name) SELECT 'http', now() - interval '2 hours', now() - interval '1 hour', l FROM unnest('{NULL,calls}'::text[]) l`)
	o := b.overview()
	for _, limit := range []string{"", "calls"} {
		for kind, atLeast := range map[string]time.Duration{"noop": 0, "exec": time.Hour, "http": time.Hour} {
			if w := waitingOf(o, "default", kind, limit); w.Due != 1 || w.Oldest < atLeast || w.Oldest > atLeast+10*time.Minute || w.Keyless != w.Oldest {
				t.Errorf("with limit %q: %+v, want one of kind %s that has waited for %v", limit, w, kind, atLeast)
			}
		}
	}
}

// Of more priorities, queues and kinds than are looked at, what is counted is a lower bound.
func TestOverviewOfManyLanes(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	b.sql(`INSERT INTO onejob.tasks (kind, priority) SELECT 'noop', 500 - i FROM generate_series(1, 1000) i, generate_series(1, 2)`)
	b.sql(`INSERT INTO onejob.tasks (kind, limit_name) SELECT 'http', 'l' || i FROM generate_series(1, 1000) i`)
	o := b.overview()
	if w := waitingOf(o, "default", "noop", ""); w.Due != 2000 || w.DueMore || w.LaterMore || w.LeftOut {
		t.Errorf("of 1,000 priorities: %+v, want exactly 2,000", w)
	}
	b.sql(`INSERT INTO onejob.tasks (kind, priority) SELECT 'noop', -600 - i FROM generate_series(1, 100) i, generate_series(1, 2)`)
	o = b.overview()
	if w := waitingOf(o, "default", "noop", ""); w.Due < 2000 || w.Due > 2100 || !w.DueMore || !w.LaterMore || !w.LeftOut {
		t.Errorf("of 1,100 priorities: %+v, want 2,000 or some more, as a lower bound", w)
	}
	if w := waitingOf(o, "default", "http", "l7"); w.Due != 1 || w.DueMore || w.LeftOut {
		t.Errorf("of 1,000 limits: %+v, want exactly one", w)
	}
	b.sql(`INSERT INTO onejob.tasks (kind, limit_name) SELECT 'http', 'm' || i FROM generate_series(1, 100) i`)
	if w := waitingOf(b.overview(), "default", "http", "l7"); w.Due != 1 || !w.DueMore || !w.LeftOut {
		t.Errorf("of 1,100 limits: %+v, want one or more", w)
	}
}

// However many rows there are, an overview reads some ten thousands, whatever the planner
// knows; what it counts in part is marked.
func TestOverviewReadsFewRows(t *testing.T) {
	t.Parallel()
	for _, statistics := range []string{"none", "ofAnEmptyTable", "analyzed"} {
		t.Run(statistics, func(t *testing.T) {
			t.Parallel()
			b := newBareBench(t)
			b.sql(`ALTER TABLE onejob.tasks SET (autovacuum_enabled = false)`)
			if statistics == "ofAnEmptyTable" {
				b.sql(`VACUUM ANALYZE onejob.tasks`)
				for range 8 {
					b.overview()
				}
			}
			b.sql(`INSERT INTO onejob.tasks (kind, run_at) SELECT 'noop', now() - i * interval '1 ms' FROM generate_series(1, 20000) i`)
			b.sql(`INSERT INTO onejob.tasks (kind, queue, limit_name) SELECT 'noop', 'q' || i % 50, 'l' || i % 20 FROM generate_series(1, 1000) i`)
			b.finished("failed", 12_000)
			b.finished("succeeded", 20_000)
			if statistics == "analyzed" {
				b.sql(`ANALYZE onejob.tasks`)
			}
			b.overview() // meets what the INSERTs left to clean up
			var o store.Overview
			rows := int64(math.MaxInt64)
			for range 5 { // one that Postgres has no time for is read again
				seen := b.glanced()
				o = b.overview()
				rows = min(rows, b.glanced()-seen)
				t.Logf("read %d rows and entries", rows)
				if rows <= 30_000 {
					break
				}
			}
			if rows > 30_000 { // an entry and a row for each of 10,000 that are due and 10,000 that failed, and more
				t.Errorf("an overview read %d rows and entries of a table of 53,000", rows)
			}
			if w := waitingOf(o, "default", "noop", ""); !w.DueMore || w.Due == 0 || w.Due > 10_001 {
				t.Errorf("of 20,000 due tasks, %d were counted, more: %v", w.Due, w.DueMore)
			}
			if f := o.Failures.Rows; len(f) != 1 || f[0].Count != 10_000 || f[0].Looked != 10_000 {
				t.Errorf("the failures are %+v", f)
			}
		})
	}
}

// glanced returns how many rows and entries of tasks were read, as readOf does.
func (b *bench) glanced() int64 {
	b.t.Helper()
	flushCounts(b.t, store.Glances(b.Store))
	return b.read()
}

// What needs somebody is there, however much else there is.
func TestOverviewOfManySchedulesAndReplicas(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind, enabled) SELECT 'a' || i, '@hourly', 'noop', false FROM generate_series(1, 300) i`)
	b.schedule("wrong", time.Now().Add(time.Hour), "error = 'no such zone'")
	b.schedule("late", time.Now().Add(-time.Hour))
	b.serves("old", "{}", "{noop}", "", 0, 5)
	b.sql(`INSERT INTO onejob.replicas (session, process, name, host, pid, version, kinds, queues, concurrency, running, state, began_at, heartbeat_at, ended_at)
	       SELECT gen_random_uuid(), gen_random_uuid(), 'restarted', 'h', 1, 'v', '{noop}', '{}', 5, 0, 'stopped', now() + interval '1 second', now(), now() FROM generate_series(1, 300)`)
	o := b.overview()
	found := map[string]store.ScheduleGlance{}
	for _, s := range o.Schedules.Rows {
		found[s.Name] = s
	}
	if len(found) != 200 || found["wrong"].Error != "no such zone" || !found["late"].Behind || !slices.IsSortedFunc(o.Schedules.Rows, func(a, b store.ScheduleGlance) int { return strings.Compare(a.Name, b.Name) }) {
		t.Errorf("%d schedules, with %+v and %+v; want 200 in order, with the error of one and that one is late", len(found), found["wrong"], found["late"])
	}
	if r := o.Replicas.Rows; len(r) != 200 || r[0].Name != "old" {
		t.Errorf("%d replicas, the first is %s; want 200 that begin with the one that lives", len(r), r[0].Name)
	}
	b.sql(`INSERT INTO onejob.replicas (session, process, name, host, pid, version, kinds, queues, concurrency, running, state, began_at, heartbeat_at)
	       SELECT gen_random_uuid(), gen_random_uuid(), 'alive', 'h', 1, 'v', '{noop}', '{}', 5, 0, 'working', now() + interval '1 second', now() FROM generate_series(1, 260)`)
	if r := b.overview().Replicas.Rows; len(r) != 261 || r[260].Name != "old" {
		t.Errorf("%d replicas; want the 261 that live, the oldest last", len(r))
	}
}

// In a database without the schema, such as another one, nothing at all can be seen. That is an error, and
// not an empty cluster.
func TestOverviewWithoutTheSchema(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	b.sql(`ALTER TABLE onejob.occurrences RENAME TO former_occurrences`)
	if o, err := b.Overview(t.Context()); err != nil || o.Schedules.Err == nil {
		t.Errorf("without one table: %v, and the schedules %v; want that part without an answer", err, o.Schedules.Err)
	}
	b.sql(`DROP SCHEMA onejob CASCADE`)
	if _, err := b.Overview(t.Context()); !errors.Is(err, store.ErrSchema) || !strings.Contains(err.Error(), `"onejob.replicas" does not exist`) {
		t.Errorf("without the schema: %v", err)
	}
}

// A part that takes too long says so, and the others are there.
func TestOverviewWithoutWhatIsLocked(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.join()
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind) VALUES ('s', '@hourly', 'noop')`)
	tx, err := b.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	if _, err := tx.Exec(t.Context(), `LOCK TABLE onejob.tasks IN ACCESS EXCLUSIVE MODE`); err != nil {
		t.Fatal(err)
	}
	const late = "no answer from Postgres within 500ms"
	var o store.Overview
	// On a busy machine the others may take too long as well, once.
	testenv.Eventually(t, time.Minute, "the other parts are read", func() bool {
		if o, err = b.Overview(t.Context()); err != nil {
			if !unread(err) {
				t.Fatal(err)
			}
			return false
		}
		others := errors.Join(o.Replicas.Err, o.Held.Err)
		return others == nil || !strings.Contains(others.Error(), late)
	})
	for what, err := range map[string]error{"waiting": o.Waiting.Err, "running": o.Running.Err, "failures": o.Failures.Err} {
		if err == nil || !strings.Contains(err.Error(), late) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if o.Replicas.Err != nil || len(o.Replicas.Rows) != 1 || o.Held.Err != nil {
		t.Errorf("the others are %+v and %+v", o.Replicas, o.Held)
	}
}

// Who looks can write nothing, even by a mistake in a statement.
func TestGlancesCannotWrite(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	if err := store.WriteAtAGlance(t.Context(), b.Store); err == nil || !strings.Contains(err.Error(), "read-only") {
		t.Errorf("a write: %v", err)
	}
}

// Who looks at a task does not wait for a connection that claims and completions use, nor take one.
func TestStoryWhileAllConnectionsAreBusy(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	id := idOf(t, b.insert("run_at='infinity'"))
	b.Store = open(t, store.Config{DSN: b.dsn, MaxConns: 1, Timeout: 10 * time.Minute})
	_, end := openTransaction(t, b.dsn, `BEGIN`, `LOCK TABLE onejob.occurrences IN ACCESS EXCLUSIVE MODE`)
	busy := make(chan error, 1)
	go func() {
		_, err := b.Occurrences(context.WithoutCancel(t.Context()), 1, 1)
		busy <- err
	}()
	b.eventually("the connection is busy", func() bool {
		return b.one(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) == "1"
	})
	s, err := b.story(id)
	if want := fmt.Sprintf("Task %d is parked", id); err != nil || !strings.HasPrefix(s.Why, want) {
		t.Errorf("while a statement waits on the only connection of claims: %q, %v; want %q", s.Why, err, want)
	}
	end()
	if err := <-busy; err != nil {
		t.Error(err)
	}
}

func TestStory(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	b.join()
	if _, err := b.story(7); !errors.Is(err, store.ErrNoTask) {
		t.Errorf("of no task: %v", err)
	}
	before := b.claimed("lock_key='k'")
	finish := func(task *tasks.Task) {
		t.Helper()
		if err := b.Complete(t.Context(), succeeded(task)); err != nil {
			t.Fatal(err)
		}
	}
	finish(before)
	long := strings.Repeat("x", 70_000)
	mine := b.claimed("lock_key='k'", fmt.Sprintf("payload='{\"a\": \"%s\"}'", long))
	s, err := b.story(mine.ID)
	if err != nil {
		t.Fatal(err)
	}
	if s.Status != "running" || len(s.Attempts) != 0 || len(s.Before) != 1 || s.Before[0].TaskID != before.ID || s.Holder != nil || len(s.After) != 0 {
		t.Errorf("while it runs: %+v", s)
	}
	if !s.Payload.Cut || len(s.Payload.Text) != 64<<10 {
		t.Errorf("the payload has %d bytes, cut %v", len(s.Payload.Text), s.Payload.Cut)
	}
	finish(mine)
	after := b.claimed("lock_key='k'")
	s, err = b.story(mine.ID)
	if err != nil || len(s.Attempts) != 1 || s.Attempts[0].Outcome != "succeeded" || s.Attempts[0].Fence != mine.Fence || len(s.Before) != 1 || s.Holder == nil || s.Holder.TaskID != after.ID {
		t.Errorf("when it has succeeded: %+v, %v", s, err)
	}
	finish(after)
	b.sql(`UPDATE onejob.attempts SET output = repeat('o', 100000) || 'end' WHERE task_id = $1`, mine.ID)
	s, err = b.story(mine.ID)
	if err != nil || len(s.After) != 1 || s.After[0].TaskID != after.ID || s.Holder != nil {
		t.Errorf("when the next one has succeeded: %+v, %v", s.After, err)
	}
	if a := s.Attempts[0]; !a.OutputCut || a.OutputLength != 100_003 || len(a.Output) > 66_000 || !strings.HasSuffix(a.Output, "end") {
		t.Errorf("the output has %d bytes of %d, cut %v", len(a.Output), a.OutputLength, a.OutputCut)
	}
	b.sql(`INSERT INTO onejob.attempts (task_id, fence, attempt, lock_key, replica, session, started_at, finished_at, outcome)
	            SELECT $1, nextval('onejob.fences'), i, 'k', 'r', gen_random_uuid(), now(), now(), 'failed' FROM generate_series(1, 60) i`, mine.ID)
	if s, err = b.story(mine.ID); err != nil || len(s.Attempts) != 50 || !s.MoreAttempts || s.Attempts[0].Fence < s.Attempts[1].Fence {
		t.Errorf("of 61 attempts there are %d, more: %v, %v", len(s.Attempts), s.MoreAttempts, err)
	}
	b.sql(`UPDATE onejob.attempts SET error = repeat('e', 30000), output = repeat('o', 60000) WHERE task_id = $1`, mine.ID)
	if s, err = b.story(mine.ID); err != nil {
		t.Fatal(err)
	}
	characters := 0
	for i, a := range s.Attempts {
		characters += len(a.Error) + len(a.Output)
		if whole := len(a.Error) == 30_000 && len(a.Output) == 60_000 && !a.OutputCut; whole != (i < 5) || a.Error == "" || a.Output == "" && !a.OutputCut {
			t.Errorf("attempt %d from the newest has %d bytes of its error, and %d of its output, cut %v", i, len(a.Error), len(a.Output), a.OutputCut)
		}
	}
	if characters > 600_000 {
		t.Errorf("the attempts have %d characters", characters)
	}
}

func TestFind(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.join()
	has := func(text string, want ...string) {
		t.Helper()
		var found []store.Found
		var err error
		for range testenv.Tries(time.Minute) {
			if found, err = b.Find(t.Context(), text); err == nil || !unread(err) {
				break
			}
		}
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, f := range found {
			got = append(got, fmt.Sprintf("%s %d", f.By, f.ID))
		}
		if !slices.Equal(got, want) {
			t.Errorf("by %q: found %q, want %q", text, got, want)
		}
	}
	ended := b.claimed("lock_key='k'")
	if err := b.Complete(t.Context(), succeeded(ended)); err != nil {
		t.Fatal(err)
	}
	running := b.claimed("lock_key='k'")
	pending := b.insert("lock_key='k'", "run_at=now() + interval '1 hour'")
	limited := b.insert("lock_key='k'", "limit_name='l'")
	unique := b.insert("unique_key='u'", "kind='rare'", "run_at=now() + interval '1 hour'")
	b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at) SELECT 'noop', 'succeeded', now() FROM generate_series(1, 3000)`)
	failed := b.one(`INSERT INTO onejob.tasks (kind, status, finished_at) VALUES ('rare', 'failed', now()) RETURNING id`)

	has(unique, "id "+unique)
	has("u", "unique_key "+unique)
	has("k", "lock_key "+limited, "lock_key "+pending, fmt.Sprintf("lock_key %d", running.ID), fmt.Sprintf("lock_key %d", ended.ID))
	has("rare", "kind "+failed, "kind "+unique)
	has("nothing")
	has(`'; DROP TABLE onejob.tasks; --`)
	has("99999999999999999999999")
}

// BenchmarkOverview looks at two million tasks that succeeded, a tenth as many that are due and
// that failed, and 100 schedules. ONEJOB_LIST_ROWS is another number.
func BenchmarkOverview(bm *testing.B) {
	n := number("ONEJOB_LIST_ROWS", 2_000_000)
	b := newBareBench(bm)
	b.finished("succeeded", n)
	b.finished("failed", n/10)
	b.sql(`INSERT INTO onejob.tasks (kind, queue, priority, run_at) SELECT 'noop', 'q' || i % 10, i % 3, now() - i * interval '1 ms' FROM generate_series(1, $1) i`, n/10)
	b.sql(`INSERT INTO onejob.tasks (kind, status, session, replica, fence, started_at) SELECT 'noop', 'running', gen_random_uuid(), 'r', i, now() FROM generate_series(1, 100) i`)
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind) SELECT 's' || i, '@hourly', 'noop' FROM generate_series(1, 100) i`)
	b.sql(`INSERT INTO onejob.occurrences (schedule_id, due_at, task_id) SELECT s.id, now() - i * interval '1 hour', i FROM onejob.schedules s CROSS JOIN generate_series(1, 50) i`)
	b.sql(`VACUUM ANALYZE onejob.tasks`)
	b.overview() // prepares the statements
	took := map[string]time.Duration{}
	for bm.Loop() {
		o := b.overview()
		for name, d := range map[string]time.Duration{"waiting": o.Waiting.Took, "running": o.Running.Took, "schedules": o.Schedules.Took, "failures": o.Failures.Took, "held": o.Held.Took} {
			took[name] += d
		}
	}
	for name, d := range took {
		bm.ReportMetric(float64(d.Microseconds())/1000/float64(bm.N), name+"-ms")
	}
}
