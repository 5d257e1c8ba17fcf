package store_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"onejob/internal/testenv"
	"onejob/store"
	"onejob/tasks"
	sqlkind "onejob/tasks/kinds/sql"
)

// onDatabase migrates a database that has settings of its own, and joins.
func onDatabase(t *testing.T, db *testenv.DB, cfg store.Config) *bench {
	t.Helper()
	b := &bench{t: t, Store: open(t, cfg), pool: db.Pool(t), dsn: db.DSN, session: uuid.NewString()}
	if err := b.Migrate(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	b.join()
	return b
}

// I5, I6: a task's lock is released, and its fence passed, when its outcome is committed. It must
// not be gone after a crash of the server.
func TestWhatIsCommittedIsDurable(t *testing.T) {
	for setting, want := range map[string]string{"off": "on", "local": "local", "remote_apply": "remote_apply"} {
		t.Run(setting, func(t *testing.T) {
			bothWays(t, []string{`synchronous_commit = ` + setting}, func(t *testing.T, db *testenv.DB, cfg store.Config) {
				b := onDatabase(t, db, cfg)
				b.sql(`CREATE TABLE public.commits (as_what text, synchronous text)`)
				b.sql(`CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO public.commits VALUES (NEW.status, current_setting('synchronous_commit')); RETURN NULL; END $$`)
				b.sql(`CREATE TRIGGER note AFTER UPDATE ON onejob.tasks FOR EACH ROW EXECUTE FUNCTION public.note()`)
				for range 2 { // the second time after what a statement has left behind
					task, back := b.claimed(), b.claimed()
					if err := b.Complete(t.Context(), succeeded(task)); err != nil {
						t.Fatal(err)
					}
					if err := b.Requeue(t.Context(), back, 0); err != nil {
						t.Fatal(err)
					}
					b.sql(`DELETE FROM onejob.tasks`)
					for _, sql := range []string{`SELECT 1`, `RESET ALL`, `SET LOCAL synchronous_commit = ` + setting} {
						if _, err := runSQL(b, b.Store, sql); err != nil {
							t.Fatal(err)
						}
					}
				}
				equal(t, "what was committed", strings.Join(b.sql(`SELECT DISTINCT as_what || ' ' || synchronous FROM public.commits ORDER BY 1`), ", "),
					"pending "+want+", running "+want+", succeeded "+want)
			})
		})
	}
}

// Behind a pooler results are text, of which pgx knows only one form.
func TestStylesOfTheDatabase(t *testing.T) {
	settings := []string{`DateStyle = 'SQL, DMY'`, `IntervalStyle = iso_8601`, `standard_conforming_strings = off`}
	bothWays(t, settings, func(t *testing.T, db *testenv.DB, cfg store.Config) {
		b := onDatabase(t, db, cfg)
		if _, err := b.Which(t.Context()); err != nil {
			t.Error(err)
		}
		for _, h := range b.Hosts(t.Context()) {
			if h.Err != nil {
				t.Errorf("%s: %v", h.Name, h.Err)
			}
		}
		if _, _, err := b.Clock(t.Context()); err != nil {
			t.Error(err)
		}
		b.insert("timeout='1 day 01:02:03.5'")
		b.insert("timeout='3 months'")
		for i, task := range b.claimMax(2) {
			equal(t, "the timeout", task.Timeout.String(), []string{"25h2m3.5s", "2160h0m0s"}[i])
			equal(t, "whether the time is that of Postgres", b.one(`SELECT (run_at = $2)::text FROM onejob.tasks WHERE id = $1`, task.ID, task.RunAt), "true")
		}

		// The migrations mean a backslash.
		b.insert("limit_name='a.b'")
		for _, name := range []string{".a", "a/b", "a b"} {
			if _, err := b.try(`INSERT INTO onejob.tasks (kind, limit_name) VALUES ('noop', $1)`, name); err == nil {
				t.Errorf("limit_name %q is accepted", name)
			}
		}

		// A user's statement is written for the settings of its role.
		b.sql(`CREATE TABLE public.effects (n serial, style text)`)
		for range 2 {
			if _, err := runSQL(b, b.Store, `INSERT INTO public.effects (style) SELECT concat_ws(' ', date '02/03/2026', interval '1 day', '\\')`); err != nil {
				t.Fatal(err)
			}
		}
		equal(t, "what the statements wrote", strings.Join(b.sql(`SELECT style FROM public.effects ORDER BY n`), ", "), `02/03/2026 P1D \, 02/03/2026 P1D \`)

		// People call functions with the settings of their roles.
		b.serves("one", "{}", "{noop}", "", 0, 5)
		b.insert("limit_name='a(b'")
		b.insert("queue='a(b'")
		b.sql(`SELECT onejob.pause_queue('a(b')`)
		for column, want := range map[string]string{"limit_name": "onejob limits show 'a(b' has its slots", "queue": "onejob queues resume 'a(b'"} {
			if why := b.one(`SELECT onejob.why(id) FROM onejob.tasks WHERE ` + column + ` = 'a(b'`); !strings.Contains(why, want) {
				t.Errorf("of a task whose %s is a(b: %s", column, why)
			}
		}
	})
}

// What is in the database, and what clients take for their encoding, is not always UTF-8.
func TestEncodings(t *testing.T) {
	t.Parallel()
	latin := func(t *testing.T) *testenv.DB { return encoded(t, "LATIN1") }
	client := func(t *testing.T) *testenv.DB {
		db := testenv.Postgres(t)
		if _, err := db.Pool(t).Exec(t.Context(), `ALTER DATABASE `+db.Name+` SET client_encoding = 'LATIN1'`); err != nil {
			t.Fatal(err)
		}
		return db
	}
	for name, database := range map[string]func(*testing.T) *testenv.DB{"OfTheDatabase": latin, "OfTheClient": client} {
		for _, pooled := range []bool{false, true} {
			way := map[bool]string{false: "Direct", true: "ThroughAPooler"}[pooled]
			t.Run(name+way, func(t *testing.T) {
				t.Parallel()
				db := database(t)
				cfg := store.Config{DSN: db.DSN + "&client_encoding=LATIN1"} // is overruled
				if pooled {
					cfg.DSN = testenv.Pooler(t, db, 2)
				}
				cfg.MaxConns = 1
				b := onDatabase(t, db, cfg)
				people, err := pgxpool.New(t.Context(), db.DSN+"&client_encoding=UTF8")
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(people.Close)
				b.pool = people
				for range 2 { // and what is left of this does not matter
					if _, err := runSQL(b, b.Store, `SET client_encoding = 'LATIN1'`); err != nil {
						t.Fatal(err)
					}
				}
				b.insert(`queue='grün'`, `lock_key='müller'`, `payload='{"name": "über"}'`)
				claimed, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Queues: []string{"grün"}, Max: 1})
				if err != nil || len(claimed.Tasks) != 1 {
					t.Fatalf("%d tasks, %v", len(claimed.Tasks), err)
				}
				task := claimed.Tasks[0]
				equal(t, "the lock key", task.LockKey, "müller")
				equal(t, "the payload", string(task.Payload), `{"name": "über"}`)
				e := failed(task, tasks.StatusFailed)
				e.Error = "größer"
				if err := b.Complete(t.Context(), e); err != nil {
					t.Fatal(err)
				}
				equal(t, "the error", b.row(task, "error"), "größer")

				// What the database's encoding does not have keeps no outcome from being written.
				other := b.claimed()
				e = failed(other, tasks.StatusFailed)
				e.Error = "größer ✓"
				if err := b.Complete(t.Context(), e); err != nil {
					t.Fatal(err)
				}
				want := e.Error
				if name == "OfTheDatabase" {
					want = "gr??er ?"
				}
				equal(t, "the error", b.row(other, "error"), want)

				// Nor do names of limits that others have made keep those that rows have from being served.
				b.insert("limit_name='größe'")
				for range 2 {
					due, err := b.DueLimits(t.Context(), tasks.Claim{Kinds: []string{"noop"}}, []string{"größe", "限", "x ✓"})
					equal(t, "the limits that are due", fmt.Sprint(due, err), "[größe] <nil>")
					unknown, err := b.UnknownLimits(t.Context(), []string{"限"}, 3)
					equal(t, "the limits that nobody knows", fmt.Sprint(unknown, err), "[größe] <nil>")
				}

				// Nor its replica from the list.
				r := b.joined("r")
				r.Progress = map[int64]tasks.ProgressAt{task.Fence: {Text: "3 €", At: time.Now()}}
				if a := b.beat(r, tasks.Known{}); a.Ended {
					t.Errorf("heartbeat: %+v", a)
				}
				all := map[string]map[string][]string{"exec": {"command": {"backup", "grün", "限", "a\x00b"}}}
				known := `{"exec": {"command": ["backup", "grün", "限"]}}`
				if name == "OfTheDatabase" {
					known = `{"exec": {"command": ["backup", "grün"]}}`
				}
				r.Choices = all
				if a := b.beat(r, tasks.Known{}); a.Ended {
					t.Errorf("heartbeat with names: %+v", a)
				}
				equal(t, "the names of the heartbeat", b.one(`SELECT names::text FROM onejob.replicas WHERE session = $1`, r.Session), known)
				r.Session = uuid.NewString()
				id, err := b.ClusterID(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if err := b.Join(t.Context(), id, r); err != nil {
					t.Errorf("join with names: %v", err)
				}
				equal(t, "the names of who has joined", b.one(`SELECT names::text FROM onejob.replicas WHERE session = $1`, r.Session), known)

				b.sql(`CREATE TABLE public.effects (word text)`)
				kind, err := sqlkind.New(sqlkind.Config{Statements: map[string]sqlkind.Statement{"it": {SQL: `INSERT INTO public.effects VALUES ($1), ('ä')`, Params: []string{"word"}}}}, b.Store)
				if err != nil {
					t.Fatal(err)
				}
				next := b.claimed(`payload='{"statement": "it", "params": {"word": "süß"}}'`)
				run, err := kind.Prepare(next.Payload)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := run(t.Context(), &tasks.Attempt{Task: *next}); err != nil {
					t.Fatal(err)
				}
				equal(t, "what the statement wrote", strings.Join(b.sql(`SELECT word FROM public.effects`), " "), "süß ä")
			})
		}
	}
}

// encoded returns a new database of an encoding.
func encoded(t *testing.T, encoding string) *testenv.DB {
	t.Helper()
	db := testenv.Postgres(t)
	pool, name := db.Pool(t), db.Name+"_encoded"
	if _, err := pool.Exec(t.Context(), `CREATE DATABASE `+name+` TEMPLATE template0 ENCODING '`+encoding+`' LC_COLLATE 'C' LC_CTYPE 'C'`); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := pool.Exec(context.WithoutCancel(t.Context()), `DROP DATABASE `+name+` WITH (FORCE)`); err != nil {
			t.Error(err)
		}
	})
	return &testenv.DB{Name: name, DSN: strings.Replace(db.DSN, db.Name, name, 1)}
}

// A database that takes any bytes for text is no place for lock keys.
func TestEncodingOfAnyBytes(t *testing.T) {
	t.Parallel()
	s := open(t, store.Config{DSN: encoded(t, "SQL_ASCII").DSN})
	for what, err := range map[string]error{"migrate": s.Migrate(t.Context(), nil), "check": s.CheckEncoding(t.Context())} {
		if err == nil || !strings.Contains(err.Error(), "ENCODING 'UTF8'") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if v, err := s.SchemaVersion(t.Context()); err != nil || v.Have != 0 {
		t.Errorf("the schema is at version %d, %v", v.Have, err)
	}
}
