package cli

import (
	"fmt"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/internal/testenv"
	"onejob/store"
)

// A transaction that stays open is a warning, and names its backend.
func TestCheckWarnsOfAnOpenTransaction(t *testing.T) {
	t.Parallel()
	db := testenv.Postgres(t)
	s, err := store.Open(store.Config{DSN: db.DSN})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	tx, err := db.Pool(t).BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	if _, err := tx.Exec(t.Context(), `SELECT count(*) FROM pg_class`); err != nil {
		t.Fatal(err)
	}
	var all findings
	checkSnapshots(t.Context(), s, 0, &all)
	if len(all.list) != 1 || all.list[0].Check != "vacuum" || all.list[0].Status != checkWarns {
		t.Fatalf("found: %+v", all.list)
	}
	warned := all.list[0].Text
	for _, want := range []string{"transaction of pid ", fmt.Sprint(tx.Conn().PgConn().PID()), "user ", "open for ", "end it"} {
		if !strings.Contains(warned, want) {
			t.Errorf("%q is not in the warning: %s", want, warned)
		}
	}
}

// A host of the DSN that never answers takes no time from the checks after it.
func TestCheckGoesOnAfterAHostWithoutAnAnswer(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0") // and nobody accepts
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	dsn, err := url.Parse(testenv.Postgres(t).DSN)
	if err != nil {
		t.Fatal(err)
	}
	dsn.Host += "," + silent.Addr().String()
	dsn.RawQuery += "&connect_timeout=60"
	cfg := defaults()
	cfg.Postgres.DSN = dsn.String()
	var all findings
	checkPostgres(t.Context(), cfg, 3*time.Second, &all)
	lines := map[string]checkStatus{}
	for _, f := range all.list {
		lines[f.Check] = f.Status
	}
	if all.count(checkFailed) > 0 || lines["host "+silent.Addr().String()] != checkWarns || lines["schema"] != checkOK {
		t.Errorf("found: %+v", all.list)
	}
}

// A DSN with several hosts: the role of each is reported, before and after a failover that
// leaves the old primary alive.
func TestCheckReportsTheRoleOfEachHost(t *testing.T) {
	t.Parallel()
	primary, db := testenv.OwnPostgres(t)
	standby, _ := db.Standby(t, primary)
	const nobody = "127.0.0.1:1"
	dsn := strings.Replace(db.DSN, primary.Addr(), strings.Join([]string{nobody, standby.Addr(), primary.Addr()}, ","), 1)
	told := func(attrs string) map[string]string {
		t.Helper()
		s, err := store.Open(store.Config{DSN: dsn + "&target_session_attrs=" + attrs})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		used, err := s.Which(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		lines := map[string]string{}
		var all findings
		checkHosts(t.Context(), s, used, &all)
		for _, f := range all.list {
			lines[f.Check] = string(f.Status) + ": " + f.Text
		}
		return lines
	}
	want := func(lines map[string]string, host, text string) {
		t.Helper()
		if got := lines["host "+host]; !strings.Contains(got, text) {
			t.Errorf("of %s is said %q, want %q in it", host, got, text)
		}
	}
	lines := told("read-write")
	want(lines, nobody, "warn: failed to connect")
	want(lines, standby.Addr(), "ok: a standby")
	want(lines, primary.Addr(), "ok: in use: timeline 1 at "+primary.Addr())

	if err := standby.Promote(t.Context()); err != nil {
		t.Fatal(err)
	}
	lines = told("read-write") // the promoted one comes first
	want(lines, standby.Addr(), "ok: in use: timeline 2 at "+standby.Addr())
	want(lines, primary.Addr(), "warn: an old primary that is still running")
	if len(lines) != 3 {
		t.Errorf("the lines are %v", lines)
	}
}
