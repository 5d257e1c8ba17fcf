package store_test

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/internal/testenv"
	"onejob/migrations"
	"onejob/store"
	"onejob/tasks"
	"onejob/tasks/schedule"
)

func TestTenReplicasMigrateAtOnce(t *testing.T) {
	t.Parallel()
	db := testenv.Postgres(t)
	// The first one at work, so that the ten are sure to meet.
	held, err := db.Pool(t).Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer held.Release()
	const lock = 0x6f6e656a6f62
	if _, err := held.Exec(t.Context(), `SELECT pg_advisory_lock($1)`, lock); err != nil {
		t.Fatal(err)
	}
	var applied, waiting atomic.Int32
	var wg sync.WaitGroup
	for range 10 {
		var once sync.Once
		s := open(t, store.Config{DSN: db.DSN})
		wg.Go(func() {
			if err := s.Migrate(t.Context(), &store.Progress{
				Applying: func(int, string) { applied.Add(1) },
				Waiting:  func(int, string, bool) { once.Do(func() { waiting.Add(1) }) },
			}); err != nil {
				t.Error(err)
			}
			if err := s.CheckSchema(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(wg.Wait)
	testenv.Eventually(t, 2*time.Minute, "all ten wait", func() bool { return waiting.Load() == 10 })
	if _, err := held.Exec(t.Context(), `SELECT pg_advisory_unlock($1)`, lock); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	v, err := open(t, store.Config{DSN: db.DSN}).SchemaVersion(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "the number of migrations applied", int(applied.Load()), v.Want)
}

// Rows from before the rules of a migration are brought within them, and reported.
func TestMigrationOfRowsThatBreakNewRules(t *testing.T) {
	t.Parallel()
	db := testenv.Postgres(t)
	b := &bench{Store: open(t, store.Config{DSN: db.DSN}), t: t, pool: db.Pool(t), dsn: db.DSN, session: "6f1ed002-ab59-42fb-a0b4-0123456789ab"}
	for _, name := range []string{"001_tasks.sql", "002_schedules.sql"} {
		sql, err := migrations.Files.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if name == "001_tasks.sql" {
			b.sql(`CREATE SCHEMA onejob`)
		}
		if _, err := b.pool.Exec(t.Context(), string(sql), pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Fatal(err)
		}
	}
	b.sql(`CREATE TABLE onejob.schema_version (version int NOT NULL)`)
	b.sql(`INSERT INTO onejob.schema_version VALUES (2)`)
	good := b.insert("lock_key='k'", "timeout='99 years'")
	odd := []string{
		b.insert("run_at='-infinity'", "created_at='infinity'", "timeout='178000000 years'", "attempt=2147483647", "crashes=2147483647", "max_attempts=1000"),
		b.insert("run_at='294276-01-01 UTC'"),
		b.insert("run_at='infinity'"),
		b.insert(`kind=E'a\tb'`),
		b.insert("limit_name=repeat('é', 100)"),
		b.insert("limit_name='.lock'", "status='succeeded'", "finished_at='infinity'"),
		b.insert("status='running'", "session=gen_random_uuid()"),
		b.insert("status='running'", "session=gen_random_uuid()", "replica='r'", "fence=7", "started_at='-infinity'"),
	}
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind, queue, limit_name, timeout) VALUES (E'a\nb', '@daily', E'k\n', 'q', 'a b', '1000 years')`)

	var changed []string
	if err := b.Migrate(t.Context(), &store.Progress{Changed: func(what string) { changed = append(changed, what) }}); err != nil {
		t.Fatal(err)
	}
	if err := b.CheckSchema(t.Context()); err != nil {
		t.Error(err)
	}
	equal(t, "the number of reports", len(changed), 5)
	for i, want := range []string{"2 rows were failed", "1 rows were failed", "3 rows were renamed", "4 rows were given times", "1 rows were of the schedules"} {
		if i < len(changed) && !strings.HasPrefix(changed[i], want) {
			t.Errorf("report %d is %q, want %q", i, changed[i], want)
		}
	}
	for i, want := range []string{"pending 1000000 1000000 100 years t", "pending 0 0 infinity", "pending 0 0 infinity", "failed 0 0 t", "failed 0 0 t", "succeeded 0 0 t", "failed 0 0 t", "running 0 0 t"} {
		equal(t, "row "+odd[i], b.one(`SELECT concat_ws(' ', status, attempt, crashes, timeout, CASE WHEN run_at = 'infinity' THEN 'infinity' ELSE (run_at <= now())::text::char END) FROM onejob.tasks WHERE id = $1::text::bigint`, odd[i]), want)
	}
	// Nothing of them is in the way.
	equal(t, "what is claimed", len(b.claimMax(9)), 2)
	equal(t, "the row that was good", b.one(`SELECT status FROM onejob.tasks WHERE id = $1::text::bigint`, good), "running")
	equal(t, "the schedule", b.one(`SELECT concat_ws(' ', name, kind, queue, limit_name, timeout) FROM onejob.schedules`), "a?b 1 k? q a?b 100 years")
}

// The number of the lock is public. Who holds it delays a migration, but nobody whose
// schema is current.
func TestMigrationLockHeldByAStranger(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	held, err := b.pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer held.Release()
	var pid int
	if err := held.QueryRow(t.Context(), `SELECT set_config('application_name', 'stranger', false), pg_advisory_lock($1), pg_backend_pid()`, 0x6f6e656a6f62).Scan(nil, nil, &pid); err != nil {
		t.Fatal(err)
	}
	if err := b.Migrate(t.Context(), &store.Progress{Waiting: func(int, string, bool) { t.Error("a current schema waits for the lock") }}); err != nil {
		t.Error(err)
	}

	b.sql(`UPDATE onejob.schema_version SET version = version - 1`)
	type holder struct {
		pid  int
		name string
	}
	var holders []holder
	err = b.Migrate(t.Context(), &store.Progress{
		WaitAtMost: 2 * time.Second,
		Waiting:    func(pid int, name string, _ bool) { holders = append(holders, holder{pid, name}) },
	})
	if err == nil || !strings.Contains(err.Error(), `application "stranger"`) {
		t.Errorf("it returned %v", err)
	}
	if want := []holder{{pid, "stranger"}}; !slices.Equal(holders, want) {
		t.Errorf("it waited for %v, want %v", holders, want)
	}
}

// I1: the order of text depends on the version of a library. An index that keeps a second row out
// compares bytes, as do those that find out which lock key is free.
func TestIndexesThatKeepRowsOutCompareBytes(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	got := b.sql(`
SELECT DISTINCT c.relname::text
  FROM pg_index i
  JOIN pg_class c ON c.oid = i.indexrelid
  JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = 'onejob'
 CROSS JOIN LATERAL unnest(i.indclass::oid[], i.indcollation::oid[]) AS k(opclass, sorts)
  JOIN pg_opclass o ON o.oid = k.opclass
  JOIN pg_collation l ON l.oid = k.sorts
 WHERE i.indrelid IN ('onejob.tasks'::regclass, 'onejob.attempts'::regclass)
   AND o.opcname = 'text_ops'
   AND l.collname <> 'C'
 ORDER BY 1`)
	equal(t, "indexes in the order of a library", strings.Join(got, " "),
		"tasks_failed_or_cancelled tasks_finished tasks_finished_kept_until tasks_pending_by_limit tasks_pending_by_limit_and_lock_key")
}

func TestSchemaThatDoesNotFit(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, change, says string
		mends              bool // Migrate does
	}{
		{"Newer", `UPDATE onejob.schema_version SET version = version + 1`, "upgrade this binary", false},
		{"None", `DROP SCHEMA onejob CASCADE`, "run onejob migrate up", true},
		{"Older", `DROP SCHEMA onejob CASCADE; CREATE SCHEMA onejob; CREATE TABLE onejob.schema_version (version int NOT NULL); INSERT INTO onejob.schema_version VALUES (0)`, "run onejob migrate up", true},
		{"TableDropped", `DROP TABLE onejob.attempts CASCADE`, "[onejob.attempts onejob.overlaps] are missing; restore the schema onejob from a backup", false},
		{"IndexDropped", `DROP INDEX onejob.one_running_task_per_lock_key`, "one_running_task_per_lock_key", false},
		{"VersionLost", `DELETE FROM onejob.schema_version`, "restore the schema from a backup", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			if _, err := b.pool.Exec(t.Context(), test.change); err != nil {
				t.Fatal(err)
			}
			err := b.CheckSchema(t.Context())
			if !errors.Is(err, store.ErrSchema) || !strings.Contains(err.Error(), test.says) {
				t.Errorf("CheckSchema says %v, want %s", err, test.says)
			}
			err = b.Migrate(t.Context(), nil)
			if test.mends != (err == nil) {
				t.Errorf("Migrate returns %v", err)
			}
			if err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("Migrate says %v, want %s", err, test.says)
			}
		})
	}
}

// A function of the user's may have the name of one of onejob's.
func TestSchemaWithAnOverload(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`CREATE FUNCTION onejob.enqueue(kind text, delay interval) RETURNS bigint LANGUAGE sql AS $$ SELECT onejob.enqueue(kind, run_at => now() + delay) $$`)
	if err := b.CheckSchema(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestRights(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	role := "poor_" + b.one(`SELECT current_database()`)
	b.sql(`CREATE ROLE ` + role + ` LOGIN`)
	t.Cleanup(func() { b.sql(`DROP OWNED BY ` + role); b.sql(`DROP ROLE ` + role) })
	poor := open(t, store.Config{DSN: as(t, b.dsn, role)})

	if err := poor.CheckSchema(t.Context()); err == nil || !strings.Contains(err.Error(), "GRANT USAGE ON SCHEMA onejob") {
		t.Errorf("without any rights, CheckSchema says %v", err)
	}
	b.sql(`GRANT USAGE ON SCHEMA onejob TO ` + role)
	// Each statement that CheckRights asks for is run, until it asks for no more.
	asked := 0
	for err := poor.CheckRights(t.Context()); err != nil; err = poor.CheckRights(t.Context()) {
		if asked++; asked > 60 {
			t.Fatal(err)
		}
		statement, ok := strings.CutPrefix(strings.Split(err.Error(), "\n")[0], "missing: ")
		if !ok {
			t.Fatal(err)
		}
		b.sql(statement)
	}
	equal(t, "the number of rights asked for", asked, 47)

	// They are enough for all that a replica does.
	b.insert()
	b.insert("lock_key='k'")
	poorBench := *b
	poorBench.Store = poor
	list := poorBench.claimMax(10)
	if len(list) != 2 {
		t.Fatalf("%d tasks are claimed, want 2", len(list))
	}
	if err := poor.Complete(t.Context(), succeeded(list[0])); err != nil {
		t.Error(err)
	}
	if err := poor.Requeue(t.Context(), list[1], 0); err != nil {
		t.Error(err)
	}
	if _, _, err := poor.TakeOver(t.Context(), []string{b.session}, 3); err != nil {
		t.Error(err)
	}
	if err := poor.CheckSchema(t.Context()); err != nil {
		t.Error(err)
	}
	if server, err := poor.Server(t.Context()); err != nil || server.Timeline != 1 {
		t.Errorf("which server it is: %+v, %v", server, err)
	}
	if err := poor.Recorded(t.Context(), 0); err != nil {
		t.Error(err)
	}
	// A provider may keep these functions to itself.
	_, ownDB := testenv.OwnPostgres(t)
	closed := ownDB.Pool(t)
	for _, f := range []string{"pg_control_system()", "pg_walfile_name(pg_lsn)"} {
		if _, err := closed.Exec(t.Context(), "REVOKE EXECUTE ON FUNCTION "+f+" FROM PUBLIC"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := closed.Exec(t.Context(), "CREATE ROLE guest LOGIN"); err != nil {
		t.Fatal(err)
	}
	guest := open(t, store.Config{DSN: as(t, ownDB.DSN, "guest")})
	server, err := guest.Which(t.Context())
	if err != nil || server.Timeline != 0 || server.Started.IsZero() {
		t.Errorf("where nobody may ask: %+v, %v", server, err)
	}

	// And for the leader.
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind) VALUES ('s', '@hourly', 'noop')`)
	now, due, err := poor.DueSchedules(t.Context(), nil)
	if err != nil || len(due) != 1 {
		t.Fatalf("due schedules: %v, %v", due, err)
	}
	plan := schedule.Plan{Occurrences: []schedule.Occurrence{{Due: now}}, Next: now.Add(time.Hour)}
	if _, made, err := poor.MakeOccurrences(t.Context(), due[0], plan); err != nil || made != 1 {
		t.Errorf("made %d tasks: %v", made, err)
	}
	if _, _, _, err := poor.Purge(t.Context(), tasks.StatusSucceeded, 0, 10); err != nil {
		t.Error(err)
	}
	if _, err := poor.PurgeOccurrences(t.Context(), 0, 10); err != nil {
		t.Error(err)
	}
}

func TestMigrateWithoutTheRightToCreateTheSchema(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`DROP SCHEMA onejob CASCADE`)
	role := "poor_" + b.one(`SELECT current_database()`)
	b.sql(`CREATE ROLE ` + role + ` LOGIN`)
	t.Cleanup(func() { b.sql(`DROP OWNED BY ` + role); b.sql(`DROP ROLE ` + role) })
	poor := open(t, store.Config{DSN: as(t, b.dsn, role)})

	err := poor.Migrate(t.Context(), nil)
	if err == nil {
		t.Fatal("it was created")
	}
	_, statement, ok := strings.Cut(err.Error(), "let somebody who may run: ")
	if !ok {
		t.Fatal(err)
	}
	b.sql(statement)
	if err := poor.Migrate(t.Context(), nil); err != nil {
		t.Error(err)
	}
}
