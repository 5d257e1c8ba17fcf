package store_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/store"
)

// A caller that does not wait any longer is answered while Postgres is not, and what others
// asked for together with it is done.
func TestACallerThatGoesTakesNobodyAlong(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.Store = open(t, store.Config{DSN: b.dsn, Timeout: time.Hour})
	b.insert()
	b.insert()
	b.insert()
	b.insert()
	list := b.claimMax(4)
	if len(list) != 4 {
		t.Fatalf("%d tasks are claimed, want 4", len(list))
	}
	_, unlock := openTransaction(t, b.dsn, `BEGIN`, `LOCK TABLE onejob.tasks IN ACCESS EXCLUSIVE MODE`)
	gone := errors.New("gone")
	ctx, leave := context.WithCancelCause(t.Context())
	those, others := make(chan error, 2), make(chan error, 2)
	go func() { those <- b.Complete(ctx, succeeded(list[0])) }()
	go func() { those <- b.Requeue(ctx, list[1], 0) }()
	testenv.Eventually(t, time.Minute, "both wait for Postgres", func() bool {
		return b.one(`SELECT count(*)::text FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()`) == "2"
	})
	go func() { others <- b.Complete(t.Context(), succeeded(list[2])) }()
	go func() { others <- b.Requeue(t.Context(), list[3], 0) }()
	leave(gone)
	for range 2 {
		select {
		case err := <-those:
			if !errors.Is(err, gone) {
				t.Errorf("who has gone is answered %v", err)
			}
		case <-time.After(time.Minute):
			t.Fatal("who has gone is not answered")
		}
	}
	unlock()
	for range 2 {
		if err := <-others; err != nil {
			t.Errorf("another one is answered %v", err)
		}
	}
}
