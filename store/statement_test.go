package store_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/store"
	"onejob/tasks"
	sqlkind "onejob/tasks/kinds/sql"
)

// runSQL claims a task and runs a statement for it, as the sql kind does.
func runSQL(b *bench, s sqlkind.Committer, sql string) (*tasks.Task, error) {
	b.t.Helper()
	t := b.claimed()
	t.Payload = jsonOf(`{"statement": "it"}`)
	return t, runStatement(b.t.Context(), s, t, sql)
}

func runStatement(ctx context.Context, s sqlkind.Committer, t *tasks.Task, sql string) error {
	kind, err := sqlkind.New(sqlkind.Config{Statements: map[string]sqlkind.Statement{"it": {SQL: sql}}}, s)
	if err != nil {
		return err
	}
	handler, err := kind.Prepare(t.Payload)
	if err != nil {
		return err
	}
	_, err = handler(ctx, &tasks.Attempt{Task: *t})
	return err
}

// What a statement leaves in its session, the next one does not find.
func TestStatementsLeaveNothingBehind(t *testing.T) {
	t.Parallel()
	db := testenv.Postgres(t)
	b := &bench{t: t, Store: open(t, store.Config{DSN: db.DSN, MaxConns: 1}), pool: db.Pool(t), dsn: db.DSN, session: "6f1ed002-ab59-42fb-a0b4-0123456789ab"}
	if err := b.Migrate(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	b.join()
	b.sql(`CREATE TABLE public.ledger (n int)`)
	run := func(sql string) error {
		t.Helper()
		_, err := runSQL(b, b.Store, sql)
		return err
	}
	// One that fails as pgx's statements do behind a transaction pooler changes nothing of that.
	if err := run(`DO 'BEGIN RAISE EXCEPTION USING ERRCODE = ''42P05'', MESSAGE = ''prepared statement "p" already exists''; END'`); err == nil {
		t.Error("it succeeded")
	}
	for range 2 { // the second time the table would be there
		if err := run(`CREATE TEMP TABLE ledger (n int)`); err != nil {
			t.Error(err)
		}
	}
	if err := run(`INSERT INTO ledger VALUES (1)`); err != nil {
		t.Error(err)
	}
	equal(t, "the rows of the real table", b.one(`SELECT count(*) FROM public.ledger`), "1")

	if err := run(`SELECT pg_advisory_lock(42)`); err != nil {
		t.Error(err)
	}
	if err := run(`SELECT pg_advisory_lock(43), 1/0`); err == nil { // its lock outlives its transaction
		t.Error("it succeeded")
	}
	testenv.Eventually(t, time.Minute, "nobody has an advisory lock", func() bool {
		return b.one(`SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`) == "0"
	})
}

// What a statement defers to the end of its transaction runs as its own: with its search_path and
// settings, and an error of it is judged as one of the statement.
func TestDeferredTriggersOfStatements(t *testing.T) {
	bothWays(t, []string{`search_path = public, pg_catalog`}, func(t *testing.T, db *testenv.DB, cfg store.Config) {
		b := &bench{t: t, Store: open(t, cfg), pool: db.Pool(t), dsn: db.DSN, session: "6f1ed002-ab59-42fb-a0b4-0123456789ab"}
		if err := b.Migrate(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		b.join()
		b.sql(`CREATE TABLE ledger (n int)`)
		b.sql(`CREATE TABLE totals (n int, fence text)`)
		b.sql(`CREATE FUNCTION total() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO totals VALUES (1 / NEW.n, current_setting('onejob.fence'));
    RETURN NULL;
END $$`)
		b.sql(`CREATE CONSTRAINT TRIGGER total AFTER INSERT ON ledger DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION total()`)
		run := func(sql string) (task *tasks.Task, err error) {
			testenv.Eventually(t, time.Minute, "the statement runs", func() bool {
				task, err = runSQL(b, b.Store, sql)
				_, requeue := tasks.RequeueDelay(err) // a busy machine may keep a transaction waiting for too long
				return !requeue
			})
			return task, err
		}
		task, err := run(`INSERT INTO ledger VALUES (1)`)
		if err != nil {
			t.Fatal(err)
		}
		equal(t, "what the trigger did", b.one(`SELECT n::text || ' ' || fence FROM totals`), fmt.Sprintf("1 %d", task.Fence))
		if _, err := run(`INSERT INTO ledger VALUES (0)`); err == nil || !tasks.IsPermanent(err) {
			t.Errorf("a division by zero in the trigger: %v", err)
		}
	})
}

// A data exception of the statement itself is final. One that another server reports, whose data may be
// others the next time, fails the attempt.
func TestDataExceptionsOfAnotherServer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.join()
	b.sql(`CREATE EXTENSION dblink SCHEMA public`)
	elsewhere := `SELECT n FROM public.dblink('` + b.dsn + `', 'SELECT 1 / 0') AS t (n int)`
	for sql, permanent := range map[string]bool{`SELECT 1 / 0`: true, elsewhere: false} {
		_, err := runSQL(b, b.Store, sql)
		if err == nil || !strings.Contains(err.Error(), "division by zero") || tasks.IsPermanent(err) != permanent {
			t.Errorf("%s: %v, permanent: %t", sql, err, tasks.IsPermanent(err))
		}
	}
}

func TestStatementsCannotHurtTheCompletion(t *testing.T) {
	bothWays(t, []string{`search_path = public, pg_catalog`}, func(t *testing.T, db *testenv.DB, cfg store.Config) {
		cfg.MaxConns = 1 // what a statement leaves behind, the next one finds
		b := &bench{t: t, Store: open(t, cfg), pool: db.Pool(t), dsn: db.DSN, session: "6f1ed002-ab59-42fb-a0b4-0123456789ab"}
		if err := b.Migrate(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		other := "other_" + db.Name
		b.sql(`CREATE ROLE ` + other)
		t.Cleanup(func() { b.sql(`DROP OWNED BY ` + other); b.sql(`DROP ROLE ` + other) })
		b.join()
		b.sql(`CREATE TABLE effects (n int)`)
		b.sql(`CREATE PROCEDURE commits() LANGUAGE plpgsql AS 'BEGIN COMMIT; END'`)

		for _, sql := range []string{
			`INSERT INTO effects VALUES (1)`, // the path is the database's
			`SET search_path = nowhere`, `SET LOCAL search_path = nowhere`, `SELECT set_config('search_path', 'nowhere', false)`,
			`SET ROLE ` + other, `SET LOCAL ROLE ` + other, `SELECT set_config('role', '` + other + `', false)`,
			`SET SESSION AUTHORIZATION ` + other, `SET LOCAL SESSION AUTHORIZATION ` + other,
			`SET default_transaction_isolation = serializable`, `SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE`,
			`SET lock_timeout = 1`, `SET enable_indexscan = off`, `RESET ALL`, `RESET search_path`, `DISCARD PLANS`,
		} {
			task, err := runSQL(b, b.Store, sql)
			if err != nil {
				t.Errorf("%s: %v", sql, err)
			}
			equal(t, "the status after "+sql, b.row(task, "status, attempt"), "succeeded 1")
			expect := map[string]string{"search_path": "pg_catalog, pg_temp", "transaction_isolation": "read committed", "role": "none"}
			if !b.Pooled() { // otherwise the session is not ours to reset
				expect["enable_indexscan"], expect["lock_timeout"] = "on", "0"
			}
			for setting, want := range expect {
				values, err := store.SettingsOf(t.Context(), b.Store, setting)
				if err != nil {
					t.Fatalf("after %s: %v", sql, err)
				}
				for way, got := range values {
					equal(t, setting+" by "+way+" after "+sql, got, want)
				}
			}
		}
		equal(t, "the number of effects", b.one(`SELECT count(*) FROM effects`), "1")

		const hidden = `/* /* from the kind's own check */ */ `
		for sql, want := range map[string]string{
			`INSERT INTO effects VALUES (2); COMMIT; SELECT 1/0`: "must be a single one",
			`INSERT INTO effects VALUES (2); SELECT 1`:           "must be a single one",
			hidden + `COMMIT`:             "ended its transaction",
			hidden + `COMMIT AND CHAIN`:   "ended its transaction",
			hidden + `ROLLBACK`:           "ended its transaction",
			hidden + `ROLLBACK AND CHAIN`: "ended its transaction",
			`DO 'BEGIN INSERT INTO public.effects VALUES (2); COMMIT; END'`: "must not end or change it",
			`CALL commits()`:                           "must not end or change it",
			`SET TRANSACTION READ ONLY`:                "made its transaction read-only",
			`SET transaction_isolation = serializable`: "must not end or change it",
		} {
			task, err := runSQL(b, b.Store, sql)
			if err == nil || !tasks.IsPermanent(err) || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v", sql, err)
			}
			equal(t, "the status after "+sql, b.row(task, "status"), "running")
			if err := b.Complete(t.Context(), failed(task, tasks.StatusFailed)); err != nil {
				t.Errorf("the completion after %s: %v", sql, err)
			}
		}
		equal(t, "the number of effects", b.one(`SELECT count(*) FROM effects`), "1")
	})
}

// I8: statements of tasks that wait, for a row that somebody has locked, keep no other task
// waiting, whether there are few of them or many.
func TestStatementsThatWaitStopNoOthers(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.join()
	b.sql(`CREATE TABLE effects (n int)`)
	b.sql(`INSERT INTO effects VALUES (0)`)
	s := open(t, store.Config{DSN: b.dsn, MaxConns: 2})
	holder, err := b.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = holder.Rollback(context.WithoutCancel(t.Context())) }()
	if _, err := holder.Exec(t.Context(), `SELECT FROM effects FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	const statements = 5
	ended := make(chan error, statements)
	for range statements {
		task := b.claimed()
		task.Payload = jsonOf(`{"statement": "it"}`)
		testenv.Go(t, func() {
			for {
				err := runStatement(t.Context(), s, task, `UPDATE effects SET n = n + 1`)
				if t.Context().Err() != nil || !errors.As(err, new(interface{ NotBegun() })) { // for a second there was no room
					ended <- err
					return
				}
			}
		})
	}
	b.eventually("the statements wait", func() bool {
		return b.one(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE 'UPDATE effects%'`) == "2"
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	b.insert()
	for what, do := range map[string]func() error{
		"Ping":           func() error { return s.Ping(ctx) },
		"CancelRequests": func() error { _, err := s.CancelRequests(ctx, b.session); return err },
		"Complete":       func() error { return s.Complete(ctx, failed(b.claimed(), tasks.StatusFailed)) },
		"Claim": func() error {
			_, err := s.Claim(ctx, tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Max: 1})
			return err
		},
	} {
		if err := do(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := holder.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range statements {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	equal(t, "the effects", b.one(`SELECT n FROM effects`), "5")
}

// What is not the task's fault does not use up an attempt.
func TestUnavailableDatabaseRequeues(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.join()
	b.sql(`CREATE TABLE effects (n int)`)
	b.sql(`CREATE EXTENSION dblink SCHEMA public`)
	away := open(t, store.Config{DSN: "postgres://postgres@127.0.0.1:1/nothing?sslmode=disable"})
	readOnly := open(t, store.Config{DSN: b.dsn + "&default_transaction_read_only=on"})
	elsewhere := func(sql string) string { // on a server that is read-only
		return fmt.Sprintf(`SELECT public.dblink_exec(format('host=127.0.0.1 port=%%s dbname=%%s user=postgres options=''-c default_transaction_read_only=on''', current_setting('port'), current_database()), $q$%s$q$)`, sql)
	}
	for _, test := range []struct {
		name    string
		store   *store.Store
		before  func(s *store.Store)
		sql     string
		requeue bool
		forGood bool
	}{
		{"NoServer", away, nil, `SELECT 1`, true, false},
		{"ConnectionTerminated", nil, nil, `SELECT pg_terminate_backend(pg_backend_pid())`, true, false},
		{"AnotherServerShutsDown", nil, nil, `DO 'BEGIN RAISE EXCEPTION USING errcode = ''57P01''; END'`, false, false},
		{"AnotherServerIsUnavailable", nil, nil, `DO 'BEGIN RAISE EXCEPTION USING errcode = ''08001''; END'`, false, false},
		{"OutOfMemory", nil, nil, `DO 'BEGIN RAISE EXCEPTION USING errcode = ''53200''; END'`, false, false},
		{"TooManyTemporaryFiles", nil, nil, `DO 'BEGIN RAISE EXCEPTION USING errcode = ''53400''; END'`, false, false},
		{"ReadOnlyServer", readOnly, nil, `INSERT INTO effects VALUES (1)`, true, false},
		{"ReadOnlyElsewhere", nil, nil, elsewhere(`CREATE TABLE public.new ()`), false, false},
		{"DiskFullElsewhere", nil, nil, elsewhere(`DO 'BEGIN RAISE EXCEPTION USING errcode = ''53100''; END'`), false, false},
		{"TooSlowElsewhere", nil, nil, elsewhere(`DO 'BEGIN RAISE EXCEPTION USING errcode = ''25P03''; END'`), false, false},
		{"ReadOnlyOfItsOwn", nil, nil, `DO 'BEGIN SET LOCAL transaction_read_only = on; INSERT INTO effects VALUES (1); END'`, false, true},
		{"IdleInTransaction", nil, nil, `DO 'BEGIN RAISE EXCEPTION USING errcode = ''25P03''; END'`, true, false},
		{"DiskFull", nil, nil, `DO 'BEGIN RAISE EXCEPTION USING errcode = ''53100''; END'`, true, false},
		{"PreparedStatementsGone", nil, func(s *store.Store) {
			if _, err := store.Works(s).Exec(t.Context(), `DEALLOCATE ALL`); err != nil {
				t.Error(err)
			}
		}, `SELECT 1`, true, false},
		{"Error", nil, nil, `DO 'BEGIN RAISE EXCEPTION ''no''; END'`, false, false},
		{"NoSuchPreparedStatement", nil, nil, `EXECUTE nothing`, false, false},
		{"Data", nil, nil, `SELECT 1 / 0`, false, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := test.store
			if s == nil {
				s = open(t, store.Config{DSN: b.dsn, MaxConns: 1})
				if _, err := runSQL(b, s, `SELECT 1`); err != nil { // prepares
					t.Fatal(err)
				}
			}
			if test.before != nil {
				test.before(s)
			}
			task, err := runSQL(b, s, test.sql)
			if err == nil {
				t.Fatal("it succeeded")
			}
			if _, requeue := tasks.RequeueDelay(err); requeue != test.requeue {
				t.Errorf("requeue %v: %v", requeue, err)
			}
			if forGood := tasks.IsPermanent(err); forGood != test.forGood {
				t.Errorf("for good %v: %v", forGood, err)
			}
			if err := b.Complete(t.Context(), failed(task, tasks.StatusFailed)); err != nil {
				t.Error(err)
			}
		})
	}

	// Cut off by its lease, its timeout or a cancel, it is none of that.
	task := b.claimed()
	task.Payload = jsonOf(`{"statement": "it"}`)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cut := make(chan error, 1)
	go func() { cut <- runStatement(ctx, b.Store, task, `SELECT pg_sleep(600)`) }()
	testenv.Eventually(t, time.Minute, "the statement runs", func() bool {
		return b.one(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'active' AND query = 'SELECT pg_sleep(600)'`) == "1"
	})
	cancel()
	err := <-cut
	if _, requeue := tasks.RequeueDelay(err); err == nil || requeue || errors.As(err, new(interface{ NotBegun() })) {
		t.Errorf("cut off: %v", err)
	}
}

// A statement with more or fewer parameters than its configuration names fails at once, and has
// ended.
func TestWrongNumberOfParameters(t *testing.T) {
	bothWays(t, nil, func(t *testing.T, db *testenv.DB, cfg store.Config) {
		b := onDatabase(t, db, cfg)
		for _, test := range []struct {
			sql    string
			params []string
			bound  string
			want   string
		}{
			{`SELECT 1 WHERE $1 = 'a'`, nil, `{}`, "the number of its parameters is 1, and params names 0"},
			{`SELECT 1`, []string{"a"}, `{"a": "a"}`, "the number of its parameters is 0, and params names 1"},
			{`SELECT 1 WHERE $1 = 'a'`, []string{"a"}, `{"a": "a"}`, ""},
		} {
			err := b.CheckStatement(t.Context(), test.sql, len(test.params))
			if test.want == "" && err != nil || test.want != "" && (err == nil || err.Error() != test.want) {
				t.Errorf("%s with %q: checked: %v", test.sql, test.params, err)
			}
			kind, err := sqlkind.New(sqlkind.Config{Statements: map[string]sqlkind.Statement{"it": {SQL: test.sql, Params: test.params}}}, b.Store)
			if err != nil {
				t.Fatal(err)
			}
			task := b.claimed(`payload='{"statement": "it", "params": ` + test.bound + `}'`)
			run, err := kind.Prepare(task.Payload)
			if err != nil {
				t.Fatal(err)
			}
			_, err = run(t.Context(), &tasks.Attempt{Task: *task})
			if test.want == "" && err != nil || test.want != "" && !tasks.IsPermanent(err) {
				t.Errorf("%s with %q: %v", test.sql, test.params, err)
			}
			if store.Unended(b.Store, task) {
				t.Errorf("%s with %q: the statement counts as one that may go on", test.sql, test.params)
			}
		}
	})
}

// Statements that wait for a connection use up no time of their attempts, and soon say that nothing of
// them was done.
func TestStatementsWaitForNoConnection(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.join()
	s := open(t, store.Config{DSN: b.dsn, MaxConns: 2})
	b.sql(`CREATE TABLE public.mine ()`)
	_, unlock := openTransaction(t, b.dsn, `BEGIN`, `LOCK public.mine`)
	var working sync.WaitGroup
	errs := make([]error, 2)
	var ids []int64
	for i := range errs {
		task := b.claimed()
		task.Payload = jsonOf(`{"statement": "it"}`)
		ids = append(ids, task.ID)
		working.Go(func() { errs[i] = runStatement(t.Context(), s, task, `SELECT FROM public.mine`) })
	}
	testenv.Eventually(t, time.Minute, "two statements wait", func() bool {
		return b.one(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query = 'SELECT FROM public.mine' AND wait_event_type = 'Lock'`) == "2"
	})
	room := func(want string) {
		t.Helper()
		equal(t, "room, and whether it is scarce", fmt.Sprint(s.StatementRoom()), want)
	}
	room("0 false")
	for _, timeout := range []time.Duration{100 * time.Millisecond, time.Hour} {
		task := b.claimed()
		task.Payload = jsonOf(`{"statement": "it"}`)
		ctx, cancel := context.WithTimeoutCause(t.Context(), timeout, tasks.ErrTimeout)
		err := runStatement(ctx, s, task, `SELECT 1`)
		cancel()
		if !errors.As(err, new(interface{ NotBegun() })) {
			t.Errorf("a third one with a timeout of %v: %v", timeout, err)
		}
		room("0 true")
	}
	unlock()
	working.Wait()
	for i, err := range errs {
		if err != nil {
			t.Errorf("statement %d: %v", i, err)
		}
		equal(t, "its row", b.row(&tasks.Task{ID: ids[i]}, "status"), "succeeded")
	}
	if n, _ := s.StatementRoom(); n != 2 {
		t.Errorf("there is room for %d", n)
	}
	if _, err := runSQL(b, s, `SELECT 1`); err != nil {
		t.Error(err)
	}
}
