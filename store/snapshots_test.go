package store_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/internal/testenv"
	"onejob/store"
	"onejob/tasks"
)

// openTransaction opens a transaction, does something in it, and leaves it open
// until the test ends or the func that it returns is called.
func openTransaction(t *testing.T, dsn, begin string, statements ...string) (pid int, end func()) {
	t.Helper()
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	cfg.RuntimeParams["application_name"] = "forgotten"
	conn, err := pgx.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	end = func() { _ = conn.Close(t.Context()) }
	t.Cleanup(end)
	for _, sql := range append([]string{begin}, statements...) {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	return int(conn.PgConn().PID()), end
}

func TestHeldSnapshots(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	held := func(s *store.Store, longerThan time.Duration) []tasks.HeldSnapshot {
		t.Helper()
		list, err := s.HeldSnapshots(t.Context(), longerThan)
		if err != nil {
			t.Fatal(err)
		}
		return list
	}
	// of returns what is said of a backend; tests beside this one have other databases.
	of := func(pid int, longerThan time.Duration) *tasks.HeldSnapshot {
		t.Helper()
		list := held(b.Store, longerThan)
		if i := slices.IndexFunc(list, func(h tasks.HeldSnapshot) bool { return h.PID == pid }); i >= 0 {
			return &list[i]
		}
		return nil
	}
	idle, _ := openTransaction(t, b.dsn, `BEGIN`, `SELECT 1`)
	reads, _ := openTransaction(t, b.dsn, `BEGIN ISOLATION LEVEL REPEATABLE READ`, `SELECT count(*) FROM onejob.tasks`)
	writes, end := openTransaction(t, b.dsn, `BEGIN`, `INSERT INTO onejob.tasks (kind) VALUES ('noop')`)

	for what, pid := range map[string]int{"a snapshot": reads, "a write": writes} {
		h := of(pid, 0)
		if h == nil {
			t.Fatalf("%s is not held", what)
		}
		if h.What != "transaction" || h.User == "" || h.Application != "forgotten" || h.Age <= 0 || h.Behind < 0 {
			t.Errorf("%s: %+v", what, h)
		}
		if s := h.String(); !strings.Contains(s, `application "forgotten"`) || !strings.Contains(s, "of pid ") {
			t.Errorf("%s: %s", what, s)
		}
	}
	if h := of(reads, time.Hour); h != nil {
		t.Errorf("held for an hour: %v", h)
	}
	if h := of(idle, 0); h != nil {
		t.Errorf("a transaction without a snapshot holds nothing, and is there: %v", h)
	}
	if list := held(b.Store, 0); len(list) == 0 || list[0].PID != reads {
		t.Errorf("held are %v, want the oldest first", list)
	}
	end()
	testenv.Eventually(t, time.Minute, "what has ended is gone", func() bool { return of(writes, 0) == nil })
}

// A role without rights sees no other users' transactions, and is told so.
func TestHeldSnapshotsOfOthers(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	role := "blind_" + b.one(`SELECT current_database()`)
	b.sql(`CREATE ROLE ` + role + ` LOGIN`)
	t.Cleanup(func() { b.sql(`DROP ROLE ` + role) })
	blind := open(t, store.Config{DSN: as(t, b.dsn, role)})
	openTransaction(t, b.dsn, `BEGIN ISOLATION LEVEL REPEATABLE READ`, `SELECT count(*) FROM onejob.tasks`)
	list, err := blind.HeldSnapshots(t.Context(), 0)
	if err != nil || len(list) > 0 {
		t.Errorf("the role sees %v, %v", list, err)
	}
	for s, want := range map[*store.Store]bool{blind: false, b.Store: true} {
		if all, err := s.SeesAllBackends(t.Context()); err != nil || all != want {
			t.Errorf("sees all: %v, %v; want %v", all, err, want)
		}
	}
}
