package cli

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/zap"

	"onejob/internal/testenv"
	"onejob/migrations"
	"onejob/store"
)

// Whoever may connect can hold the lock of migrations. A replica whose schema is
// current does not care; another one says who holds it, and gives up.
func TestServeWaitsForAnotherMigrationUntilStartTimeout(t *testing.T) {
	t.Parallel()
	db := testenv.Postgres(t)
	cfg := defaults()
	cfg.Postgres.DSN, cfg.StartTimeout = db.DSN, 7*time.Second
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
	// The first seconds are those of replicas that are started together.
	waiting := events.FilterMessage("migration_waiting").All()
	if len(waiting) != 2 || waiting[0].Level != zap.InfoLevel || waiting[1].Level != zap.WarnLevel || waiting[1].Time.Sub(began) < 5*time.Second {
		t.Errorf("the events are %v, want one of level info, and one of level warn after 5 s", waiting)
	}
	for _, w := range waiting {
		if w.ContextMap()["holder_pid"] != int64(held.Conn().PgConn().PID()) {
			t.Errorf("the event is %v", w)
		}
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

// A replica that cannot lock the tables for a migration says who is in the way, and
// gives up.
func TestServeWaitsForALongTransactionUntilStartTimeout(t *testing.T) {
	t.Parallel()
	db := testenv.Postgres(t)
	reader := oldSchemaInUse(t, db)
	cfg := defaults()
	cfg.Postgres.DSN, cfg.StartTimeout = db.DSN, 10*time.Second
	s, err := store.Open(cfg.storeConfig())
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	pid := int(reader.Conn().PgConn().PID())

	log, events := testenv.Logger(t)
	err = prepare(t.Context(), cfg, s, log)
	if want := fmt.Sprintf("end them: SELECT pg_terminate_backend(%d)", pid); err == nil || !strings.HasSuffix(err.Error(), want) {
		t.Errorf("it returned %v, want an error that ends with %s", err, want)
	}
	blocked := events.FilterMessage("migration_blocked").All()
	if len(blocked) == 0 || fmt.Sprint(blocked[0].ContextMap()["pids"]) != fmt.Sprintf("[%d]", pid) {
		t.Errorf("the events are %v, want process %d", blocked, pid)
	}
	if applied := events.FilterMessage("migration_applied").All(); len(applied) != 0 {
		t.Errorf("migrations that were not applied are reported: %v", applied)
	}

	if err := reader.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := prepare(t.Context(), cfg, s, log); err != nil {
		t.Fatal(err)
	}
	v, err := s.SchemaVersion(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if applied := events.FilterMessage("migration_applied").Len(); applied != v.Want-2 {
		t.Errorf("%d migrations are reported, want %d", applied, v.Want-2)
	}
}

func TestMigrateUpSaysWhatIsInItsWay(t *testing.T) {
	t.Parallel()
	db := testenv.Postgres(t)
	reader := oldSchemaInUse(t, db)
	s, err := store.Open(store.Config{DSN: db.DSN})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var stdout, stderr strings.Builder
	c := migrateCommand()
	c.SetContext(t.Context())
	c.SetOut(&stdout)
	c.SetErr(writeFunc(func(p []byte) (int, error) {
		if bytes.Contains(p, []byte("to end it")) { // and then it ends
			if err := reader.Rollback(t.Context()); err != nil {
				t.Error(err)
			}
		}
		return stderr.Write(p)
	}))
	pid := reader.Conn().PgConn().PID()
	if err := migrateUp(c, s); err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("to end it: SELECT pg_terminate_backend(%d)\n", pid); !strings.HasPrefix(stderr.String(), "003_claim.sql has tried for ") || !strings.HasSuffix(stderr.String(), want) {
		t.Errorf("it wrote %q, want the end %q", stderr.String(), want)
	}
	if n := strings.Count(stdout.String(), "applying 003_claim.sql\n"); n != 1 {
		t.Errorf("it says %d times that it applies the migration:\n%s", n, stdout.String())
	}
}

type writeFunc func(p []byte) (int, error)

func (f writeFunc) Write(p []byte) (int, error) { return f(p) }

// oldSchemaInUse makes a schema of version 2, and returns a transaction that has read
// its tasks.
func oldSchemaInUse(t *testing.T, db *testenv.DB) pgx.Tx {
	t.Helper()
	pool := db.Pool(t)
	for _, sql := range []string{"CREATE SCHEMA onejob", "CREATE TABLE onejob.schema_version (version int NOT NULL)", "INSERT INTO onejob.schema_version VALUES (2)", "001_tasks.sql", "002_schedules.sql"} {
		if strings.HasSuffix(sql, ".sql") {
			file, err := migrations.Files.ReadFile(sql)
			if err != nil {
				t.Fatal(err)
			}
			sql = string(file)
		}
		if _, err := pool.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Fatal(err)
		}
	}
	reader, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = reader.Rollback(context.Background()) })
	if _, err := reader.Exec(t.Context(), "TABLE onejob.tasks"); err != nil {
		t.Fatal(err)
	}
	return reader
}
