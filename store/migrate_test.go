package store_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/internal/servers"
	"onejob/internal/testenv"
	"onejob/migrations"
	"onejob/store"
)

// oldSchema returns a bench whose schema has only the first migrations.
func oldSchema(t *testing.T, version int) *bench {
	t.Helper()
	return oldSchemaIn(t, testenv.Postgres(t), version)
}

func oldSchemaIn(t *testing.T, db *testenv.DB, version int) *bench {
	t.Helper()
	b := &bench{Store: open(t, store.Config{DSN: db.DSN}), t: t, pool: db.Pool(t), dsn: db.DSN}
	files, err := migrations.Files.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	b.sql(`CREATE SCHEMA onejob`)
	for _, file := range files[:version] {
		sql, err := migrations.Files.ReadFile(file.Name())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.pool.Exec(t.Context(), string(sql), pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Fatal(err)
		}
	}
	b.sql(`CREATE TABLE onejob.schema_version (version int NOT NULL)`)
	b.sql(`INSERT INTO onejob.schema_version VALUES ($1)`, version)
	return b
}

// A publication of all tables, as replication by logical decoding has it, lets nobody update rows
// that it could not name.
func TestMigrateBesideAPublication(t *testing.T) {
	t.Parallel()
	for _, version := range []int{0, 17} {
		t.Run(fmt.Sprintf("From%d", version), func(t *testing.T) {
			t.Parallel()
			var b *bench
			if version > 0 {
				b = oldSchema(t, version)
			} else {
				db := testenv.Postgres(t)
				b = &bench{Store: open(t, store.Config{DSN: db.DSN}), t: t, pool: db.Pool(t), dsn: db.DSN}
			}
			b.sql(`CREATE PUBLICATION everything FOR ALL TABLES`)
			if err := b.Migrate(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
			equal(t, "tables whose rows cannot be named", b.one(`
SELECT count(*)
  FROM pg_class c
 WHERE relnamespace = 'onejob'::regnamespace
   AND relkind IN ('r', 'p')
   AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary)`), "0")
			b.session = "6f1ed002-ab59-42fb-a0b4-0123456789ab"
			b.insert()
			if err := b.CheckSchema(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// reader begins a transaction that has read a table, as pg_dump does.
func (b *bench) reader(table string) pgx.Tx {
	b.t.Helper()
	conn, err := pgx.Connect(b.t.Context(), b.dsn)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { conn.Close(context.Background()) })
	tx, err := conn.Begin(b.t.Context())
	if err != nil {
		b.t.Fatal(err)
	}
	for _, sql := range []string{`SET application_name = 'a backup'`, `LOCK TABLE ` + table + ` IN ACCESS SHARE MODE`} {
		if _, err := tx.Exec(b.t.Context(), sql); err != nil {
			b.t.Fatal(err)
		}
	}
	return tx
}

// A migration beside a long transaction waits for it without keeping others waiting. It
// says whom it waits for, and is applied as a whole when that has ended.
func TestMigrateBesideALongTransaction(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name    string
		version int // of the schema before
		holds   string
		waits   string // the migration that cannot lock its tables
	}{
		{"ATaskColumn", 17, "onejob.tasks", "018_traceparent.sql"},
		{"RulesOfTasks", 2, "onejob.tasks", "003_claim.sql"},
		{"RulesOfTasksThenOfSchedules", 2, "onejob.schedules", "003_claim.sql"}, // tasks are altered before
		{"TriggersOfTasksThenOfSchedules", 11, "onejob.schedules", "012_limit_names.sql"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			b := oldSchema(t, test.version)
			if test.version == 2 {
				b.insert("run_at='-infinity'") // which 003 changes, and reports
			}
			held := b.reader(test.holds)
			type blocked struct {
				name string
				by   []store.Blocker
			}
			var applying, applied, changed atomic.Int32
			reports := make(chan blocked, 100)
			var wg sync.WaitGroup
			for range 3 {
				s := open(t, store.Config{DSN: b.dsn})
				wg.Go(func() {
					if err := s.Migrate(t.Context(), &store.Progress{
						Applying: func(int, string) { applying.Add(1) },
						Applied:  func(int, string) { applied.Add(1) },
						Changed:  func(string) { changed.Add(1) },
						Blocked:  func(name string, _ time.Duration, by []store.Blocker) { reports <- blocked{name, by} },
					}); err != nil {
						t.Error(err)
					}
				})
			}
			t.Cleanup(wg.Wait)

			// When the migration waits for its lock, others wait behind it, but not for
			// as long as the transaction lasts.
			testenv.Eventually(t, time.Minute, "the migration waits for a lock", func() bool {
				return b.one(`SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'relation' AND relation = $1::text::regclass`, test.holds) != "0"
			})
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if _, err := b.pool.Exec(ctx, `INSERT INTO onejob.tasks (kind) VALUES ('noop')`); err != nil {
				t.Fatalf("an INSERT beside a migration that waits: %v", err)
			}
			alone := time.After(time.Minute)
			for waits := true; waits; {
				select {
				case got := <-reports:
					pid := int(held.Conn().PgConn().PID())
					if len(got.by) > 1 {
						break // on a busy machine another one has not let go of its lock yet
					}
					waits = false
					if len(got.by) != 1 || got.name != test.waits {
						t.Errorf("%s waits for %v, want %s for process %d", got.name, got.by, test.waits, pid)
					} else if by := got.by[0]; by.PID != pid || by.Application != "a backup" || by.User != "postgres" || by.Open <= 0 {
						t.Errorf("it waits for %+v, want process %d", by, pid)
					}
				case <-alone:
					t.Error("it was not reported that it waits for that transaction alone")
					waits = false
				}
			}
			equal(t, "the version meanwhile", b.one(`SELECT version FROM onejob.schema_version`), fmt.Sprint(int(applied.Load())+test.version))

			if err := held.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
			wg.Wait()
			if err := b.CheckSchema(t.Context()); err != nil {
				t.Error(err)
			}
			v, err := b.SchemaVersion(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			equal(t, "the version", v.Have, v.Want)
			equal(t, "the number of migrations applied", int(applied.Load()), v.Want-test.version)
			if applying.Load() < applied.Load() {
				t.Errorf("%d migrations began, and %d were applied", applying.Load(), applied.Load())
			}
			if test.version == 2 {
				equal(t, "the number of reports of changed rows", int(changed.Load()), 1)
			}
		})
	}
}

func TestMigrateGivesUpBesideALongTransaction(t *testing.T) {
	t.Parallel()
	b := oldSchema(t, 17)
	role := "poor_" + b.one(`SELECT current_database()`)
	b.sql(`CREATE ROLE ` + role + ` LOGIN`)
	t.Cleanup(func() { b.sql(`DROP OWNED BY ` + role + ` CASCADE`); b.sql(`DROP ROLE ` + role) })
	b.sql(`ALTER SCHEMA onejob OWNER TO ` + role)
	for _, table := range b.sql(`SELECT format('%I.%I', schemaname, tablename) FROM pg_tables WHERE schemaname = 'onejob'`) {
		b.sql(`ALTER TABLE ` + table + ` OWNER TO ` + role)
	}
	held := b.reader("onejob.tasks")
	// Its owner may not see since when other users' transactions are open.
	poor := open(t, store.Config{DSN: as(t, b.dsn, role)})
	for _, s := range []*store.Store{b.Store, poor} {
		var applied atomic.Int32
		err := s.Migrate(t.Context(), &store.Progress{WaitAtMost: time.Second, Applied: func(int, string) { applied.Add(1) }})
		pid := held.Conn().PgConn().PID()
		if err == nil || !strings.Contains(err.Error(), "018_traceparent.sql") || !strings.Contains(err.Error(), `application "a backup"`) ||
			!strings.HasSuffix(err.Error(), fmt.Sprintf("SELECT pg_terminate_backend(%d)", pid)) {
			t.Errorf("it returned %v, want process %d and how to end it", err, pid)
		}
		equal(t, "the number of migrations applied", int(applied.Load()), 0)
	}
	equal(t, "the version", b.one(`SELECT version FROM onejob.schema_version`), "17")
}

// A migration of a large table may take longer than statements of the database may otherwise.
func TestMigrateTakesAsLongAsItTakes(t *testing.T) {
	t.Parallel()
	db := testenv.Postgres(t)
	b := &bench{t: t, Store: open(t, store.Config{DSN: db.DSN}), pool: db.Pool(t), dsn: db.DSN}
	b.sql(`CREATE FUNCTION public.take_long() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_catalog.pg_sleep(4); END $$`)
	b.sql(`CREATE EVENT TRIGGER take_long ON ddl_command_end WHEN TAG IN ('CREATE SCHEMA') EXECUTE FUNCTION public.take_long()`)
	b.sql(`ALTER DATABASE ` + db.Name + ` SET statement_timeout = '3s'`)
	began := time.Now()
	if err := b.Migrate(t.Context(), nil); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took < 4*time.Second {
		t.Errorf("it took %v, and no longer than a statement may", took)
	}
}

// What ends a migration that waits is its context.
func TestMigrateThatWaitsEndsWithItsContext(t *testing.T) {
	t.Parallel()
	b := oldSchema(t, 17)
	b.reader("onejob.tasks")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	err := b.Migrate(ctx, &store.Progress{Blocked: func(string, time.Duration, []store.Blocker) { cancel() }})
	if err == nil || !strings.Contains(err.Error(), context.Canceled.Error()) {
		t.Errorf("it returned %v", err)
	}
	// The lock of migrations is free again.
	testenv.Eventually(t, time.Minute, "the connection is closed", func() bool {
		return b.one(`SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`) == "0"
	})
}

func TestMigrateBesideAPreparedTransaction(t *testing.T) {
	t.Parallel()
	_, db := testenv.OwnPostgresWith(t, servers.PostgresConfig{Settings: map[string]string{"max_prepared_transactions": "5"}})
	b := oldSchemaIn(t, db, 17)
	if _, err := b.reader("onejob.tasks").Exec(t.Context(), `PREPARE TRANSACTION 'an order''s'`); err != nil {
		t.Fatal(err)
	}
	err := b.Migrate(t.Context(), &store.Progress{WaitAtMost: time.Second})
	if err == nil {
		t.Fatal("it migrated")
	}
	_, ending, _ := strings.Cut(err.Error(), "end them: ")
	equal(t, "how to end it", ending, `ROLLBACK PREPARED 'an order''s'`)
	b.sql(ending)
	if err := b.Migrate(t.Context(), nil); err != nil {
		t.Error(err)
	}
}
