package cli

import (
	"context"
	"fmt"
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

// A Postgres that goes away again while the schema is looked at is waited for.
func TestServeWaitsForPostgresThatGoesAwayAgain(t *testing.T) {
	t.Parallel()
	db := testenv.Postgres(t)
	pool := db.Pool(t)
	role := fmt.Sprintf("starting_%d", time.Now().UnixNano())
	for _, sql := range []string{
		"CREATE ROLE " + role + " LOGIN CONNECTION LIMIT 1", // one for the ping, none for the migration
		"DO $$ BEGIN EXECUTE format('GRANT CREATE ON DATABASE %I TO " + role + "', current_database()); END $$",
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		for _, sql := range []string{"DROP OWNED BY " + role + " CASCADE", "DROP ROLE " + role} {
			if _, err := pool.Exec(context.Background(), sql); err != nil {
				t.Error(err)
			}
		}
	})
	cfg := defaults()
	cfg.Postgres.DSN = strings.Replace(db.DSN, "postgres://postgres@", "postgres://"+role+"@", 1)
	s, err := store.Open(cfg.storeConfig())
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	log, events := testenv.Logger(t)
	done := make(chan error, 1)
	go func() { done <- prepare(t.Context(), cfg, s, log) }()
	testenv.Eventually(t, time.Minute, "it says that it waits", func() bool { return events.FilterMessage("postgres_unavailable").Len() > 0 })
	if _, err := pool.Exec(t.Context(), "ALTER ROLE "+role+" CONNECTION LIMIT -1"); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if events.FilterMessage("migration_applied").Len() == 0 {
		t.Error("it went on without the schema")
	}
}
