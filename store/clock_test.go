package store_test

import (
	"testing"
	"time"
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
