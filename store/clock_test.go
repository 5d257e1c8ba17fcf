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
