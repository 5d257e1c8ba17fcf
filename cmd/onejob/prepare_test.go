package main

import (
	"strings"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/store"
)

// Whoever may connect can hold the lock of migrations. A replica whose schema is
// current does not care; another one says who holds it, and gives up.
func TestServeWaitsForAnotherMigrationUntilStartTimeout(t *testing.T) {
	t.Parallel()
	db := testenv.Postgres(t)
	cfg := defaults()
	cfg.Postgres.DSN, cfg.StartTimeout = db.DSN, 2*time.Second
	s, err := store.Open(cfg.storeConfig())
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	held, err := db.Pool(t).Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer held.Release()
	const lock = 0x6f6e656a6f62
	if _, err := held.Exec(t.Context(), `SELECT pg_advisory_lock($1)`, lock); err != nil {
		t.Fatal(err)
	}
	log, events := testenv.Logger(t)
	began := time.Now()
	err = prepare(t.Context(), cfg, s, log)
	if err == nil || !strings.Contains(err.Error(), "waited") {
		t.Errorf("it returned %v after %v", err, time.Since(began))
	}
	if waiting := events.FilterMessage("migration_waiting").All(); len(waiting) != 1 || waiting[0].ContextMap()["holder_pid"] != int64(held.Conn().PgConn().PID()) {
		t.Errorf("the events are %v", waiting)
	}

	if _, err := held.Exec(t.Context(), `SELECT pg_advisory_unlock($1)`, lock); err != nil {
		t.Fatal(err)
	}
	if err := prepare(t.Context(), cfg, s, log); err != nil {
		t.Fatal(err)
	}
	if _, err := held.Exec(t.Context(), `SELECT pg_advisory_lock($1)`, lock); err != nil {
		t.Fatal(err)
	}
	if err := prepare(t.Context(), cfg, s, log); err != nil {
		t.Error(err)
	}
}
