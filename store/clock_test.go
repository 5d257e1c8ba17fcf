package store_test

import "testing"

// Rows that were to be due at once are made so; those that are parked, or were to wait, are
// left alone.
func TestAfterSetBack(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	early := b.insert("run_at=now() + interval '1 hour'", "created_at=now() + interval '1 hour'")
	later := b.insert("run_at=now() + interval '1 hour'")
	b.insert("run_at='infinity'")
	due, _, err := b.AfterSetBack(t.Context())
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
