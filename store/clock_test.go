package store_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"onejob/tasks/schedule"
)

// Rows that were to be due at once are made so; those that are parked, or were to wait, are
// left alone.
func TestAfterSetBack(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	early := b.insert("run_at=now() + interval '1 hour'", "created_at=now() + interval '1 hour'")
	later := b.insert("run_at=now() + interval '1 hour'")
	b.insert("run_at='infinity'")
	due, err := b.AfterSetBack(t.Context())
	if err != nil || due != 1 {
		t.Errorf("%d were made due, %v", due, err)
	}
	equal(t, "what is due", b.one(`SELECT string_agg(id::text, ' ') FROM onejob.tasks WHERE run_at <= now()`), early)
	equal(t, "what waits an hour", b.one(`SELECT string_agg(id::text, ' ') FROM onejob.tasks WHERE run_at > now() AND isfinite(run_at)`), later)
}

// A row that cannot be made due does not keep the others from it, and is named.
func TestAfterSetBackPassesOverRows(t *testing.T) {
	t.Parallel()
	for name, statement := range map[string]string{"refused": `RAISE 'on hold'`, "left as they are": `RETURN NULL`, "waited for": waits["55P03"]} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			b.sql(`CREATE TABLE public.mine AS SELECT 1 AS n`)
			openTransaction(t, b.dsn, `BEGIN`, `SELECT FROM public.mine FOR UPDATE`)
			b.sql(`INSERT INTO onejob.tasks (kind, limit_name, run_at, created_at)
SELECT CASE WHEN i % 700 = 3 THEN 'other' ELSE 'noop' END, CASE WHEN i % 2 = 0 THEN 'l' END, now() + interval '1 hour', now() + interval '1 hour' FROM generate_series(1, 2500) i`)
			openTransaction(t, b.dsn, `BEGIN`, `SELECT FROM onejob.tasks WHERE id = 2400 FOR UPDATE`)
			b.refusingBy(`NEW.status = 'pending'`, statement)
			due, err := b.AfterSetBack(t.Context())
			for tries := 0; due < 2495 && tries < 20; tries++ { // on a slow machine a healthy row may take too long
				var more int
				more, err = b.AfterSetBack(t.Context())
				due += more
			}
			equal(t, "how many were made due", due, 2495)
			if err == nil || !strings.Contains(err.Error(), "5 tasks are not due") || strings.Contains(err.Error(), "on hold") != (name == "refused") {
				t.Errorf("the error: %v", err)
			}
			equal(t, "those that are not due", b.one(`SELECT string_agg(id::text, ' ' ORDER BY id) FROM onejob.tasks WHERE run_at > now()`), "3 703 1403 2103 2400")
		})
	}
}

// An edit that is made while last_at lies ahead of the clock loses nothing when the clock
// has reached that.
func TestEditAfterSetBack(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind) VALUES ('s', '* * * * * *', 'noop')`)
	b.sql(`UPDATE onejob.schedules SET next_at = now() + interval '1 hour', last_at = now() + interval '1 second'`)
	b.sql(`UPDATE onejob.schedules SET cron = '*/2 * * * * *'`)
	b.sql(`SELECT pg_sleep_until(now() + interval '1100 ms')`)
	_, due, err := b.DueSchedules(t.Context(), nil)
	if err != nil || len(due) != 1 {
		t.Fatalf("%d schedules are due, %v", len(due), err)
	}
	if d := due[0]; d.Begin == nil || d.Changed == nil || !d.Begin.Equal(*d.Changed) {
		t.Errorf("it begins at %v, and was edited at %v", d.Begin, d.Changed)
	}
}

// A schedule that was enabled while the clock was ahead, and that no leader has seen until the clock was
// set back, begins then: not with the due times of the month in which it was disabled.
func TestEditOfAClockThatWasAhead(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind, on_missed, enabled) VALUES ('s', '0 * * * *', 'noop', 'all', false)`)
	b.sql(`UPDATE onejob.schedules SET last_at = now() - interval '30 days'`)
	b.sql(`UPDATE onejob.schedules SET enabled = true`)
	b.sql(`UPDATE onejob.schedules SET changed_at = now() + interval '1 hour'`)
	_, due, err := b.DueSchedules(t.Context(), nil)
	if err != nil || len(due) != 1 || due[0].Begin != nil {
		t.Fatalf("%+v are due, %v", due, err)
	}
	// The same of the line before another edit.
	b.sql(`UPDATE onejob.schedules SET cron = '30 * * * *'`)
	equal(t, "where the line between the edits begins", b.one(`SELECT begun_at = until FROM onejob.former_schedules`), "true")
}

// What a schedule was before such an edit has no due times in what lies ahead.
func TestLineBeforeAnEditThatIsAhead(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind) VALUES ('s', '0,30 * * * *', 'noop')`)
	b.sql(`UPDATE onejob.schedules SET changed_at = now() + interval '1 day'`)
	b.sql(`INSERT INTO onejob.former_schedules (schedule_id, cron, time_zone, next_at, begun_at, until)
           SELECT id, '0 * * * *', 'UTC', date_trunc('hour', now()) + interval '2 hours', date_trunc('hour', now()), changed_at FROM onejob.schedules`)
	_, due, err := b.DueSchedules(t.Context(), nil)
	if err != nil || len(due) != 1 || len(due[0].Former) > 0 {
		t.Errorf("before the repair: %+v, %v", due, err)
	}
	if _, err := b.AfterSetBack(t.Context()); err != nil {
		t.Fatal(err)
	}
	now, due, err := b.DueSchedules(t.Context(), nil)
	if err != nil || len(due) != 1 || len(due[0].Former) != 1 || due[0].Former[0].Until.After(now) {
		t.Fatalf("after the repair: %+v, %v", due, err)
	}
	cron, err := schedule.Parse(due[0].Cron, due[0].Zone)
	if err != nil {
		t.Fatal(err)
	}
	if p := due[0].Plan(cron, now); len(p.Occurrences) > 0 || len(p.Done) != 1 || !p.Next.After(now) {
		t.Errorf("the plan is %+v", p)
	}
}

// Due times that lie ahead are forgotten only together with setting the schedule back: a
// leader that is stopped in between would leave them without a task and without a reason.
func TestSetNext(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind) VALUES ('s', '* * * * * *', 'noop')`)
	b.sql(`UPDATE onejob.schedules SET next_at = date_trunc('second', now()) + interval '1 hour', last_at = now() + interval '1 hour'`)
	b.sql(`INSERT INTO onejob.occurrences (schedule_id, due_at, skipped) SELECT id, date_trunc('second', now()) + i * interval '1 minute', 'missed' FROM onejob.schedules, generate_series(1, 4) i`)
	list, err := b.SchedulesAhead(t.Context())
	if err != nil || len(list) != 1 {
		t.Fatalf("%d schedules are ahead, %v", len(list), err)
	}
	next := time.Now().Truncate(time.Second).Add(150 * time.Second)
	changed := list[0]
	changed.Next = changed.Next.Add(time.Second)
	if set, forgotten, err := b.SetNext(t.Context(), changed, next); set || forgotten != 0 || err != nil {
		t.Errorf("of a schedule that changed: set is %v, %d were forgotten, %v", set, forgotten, err)
	}
	if set, forgotten, err := b.SetNext(t.Context(), list[0], next); !set || forgotten != 2 || err != nil {
		t.Errorf("set is %v, %d were forgotten, %v", set, forgotten, err)
	}
	equal(t, "what is left", b.one(`SELECT count(*)::text FROM onejob.occurrences`), "2")
}

// I8: schedules that somebody has locked do not keep the others waiting, and are not taken for
// changed ones, which need no repair.
func TestSetNextOfALockedSchedule(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind) VALUES ('s', '* * * * * *', 'noop')`)
	b.sql(`UPDATE onejob.schedules SET next_at = date_trunc('second', now()) + interval '1 hour', last_at = now() + interval '1 hour'`)
	list, err := b.SchedulesAhead(t.Context())
	if err != nil || len(list) != 1 {
		t.Fatalf("%d schedules are ahead, %v", len(list), err)
	}
	tx, err := b.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := tx.Exec(t.Context(), `SELECT FROM onejob.schedules FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	next := time.Now().Truncate(time.Second).Add(150 * time.Second)
	if set, _, err := b.SetNext(t.Context(), list[0], next); set || err == nil || !strings.Contains(err.Error(), "locked the row") {
		t.Errorf("of a locked schedule: set is %v, %v", set, err)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if set, _, err := b.SetNext(t.Context(), list[0], next); !set || err != nil {
		t.Errorf("of one that is free again: set is %v, %v", set, err)
	}
}

// More due times lie ahead than one statement forgets. Wherever that stops, the schedule has
// none left of those from its next one on, and goes on from there.
func TestSetNextOverManyDueTimes(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind) VALUES ('s', '* * * * * *', 'noop')`)
	b.sql(`UPDATE onejob.schedules SET next_at = date_trunc('second', now()) + interval '25001 s', last_at = now() + interval '1 day'`)
	b.sql(`INSERT INTO onejob.tasks (kind) VALUES ('noop')`)
	b.sql(`INSERT INTO onejob.occurrences (schedule_id, due_at, skipped, task_id)
SELECT s.id, next_at - i * interval '1 s', CASE WHEN i <> 12000 THEN 'missed' END, CASE WHEN i = 12000 THEN 1 END FROM onejob.schedules s, generate_series(1, 25000) i`)
	b.sql(`CREATE SEQUENCE public.statements`)
	b.sql(`CREATE FUNCTION public.judge() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF (SELECT count(*) FROM gone) > 10000 THEN RAISE 'too many at once'; END IF;
    IF EXISTS (SELECT FROM onejob.occurrences o JOIN onejob.schedules s ON o.due_at >= s.next_at WHERE o.task_id IS NULL) THEN RAISE 'one is left behind'; END IF;
    IF nextval('public.statements') = 2 THEN RAISE 'stopped'; END IF;
    RETURN NULL;
END $$`)
	b.sql(`CREATE TRIGGER judge AFTER DELETE ON onejob.occurrences REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION public.judge()`)
	next := time.Now().Truncate(time.Second).Add(10 * time.Second)
	forgotten := 0
	for _, stopped := range []bool{true, false} {
		list, err := b.SchedulesAhead(t.Context())
		if err != nil || len(list) != 1 {
			t.Fatalf("%d schedules are ahead, %v", len(list), err)
		}
		set, n, err := b.SetNext(t.Context(), list[0], next)
		if !set || (err == nil) == stopped || stopped && !strings.Contains(err.Error(), "stopped") {
			t.Fatalf("set is %v, %d were forgotten, %v", set, n, err)
		}
		forgotten += n
		left := b.one(`SELECT count(*) FROM onejob.occurrences o JOIN onejob.schedules s ON o.due_at >= s.next_at AND o.task_id IS NULL`)
		equal(t, "those from its next due time on without a task", left, "0")
		equal(t, "it is at the target", b.one(`SELECT next_at = $1 FROM onejob.schedules`, next) == "true", !stopped)
	}
	equal(t, "what is left from then on", b.one(`SELECT string_agg(task_id::text, ' ') FROM onejob.occurrences WHERE due_at >= $1`, next), "1")
	equal(t, "forgotten and left", fmt.Sprint(forgotten+1), fmt.Sprint(25000-len(b.sql(`SELECT due_at FROM onejob.occurrences WHERE due_at < $1`, next))))
}
