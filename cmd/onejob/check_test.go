package main

import (
	"fmt"
	"strings"
	"testing"

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
	var warned string
	report := func(what string, err error, good string) bool {
		t.Errorf("reported %s: %v, %s", what, err, good)
		return true
	}
	checkSnapshots(t.Context(), s, 0, report, func(what, text string) { warned += what + ": " + text })
	for _, want := range []string{"vacuum: transaction of pid ", fmt.Sprint(tx.Conn().PgConn().PID()), "user ", "open for ", "end it"} {
		if !strings.Contains(warned, want) {
			t.Errorf("%q is not in the warning: %s", want, warned)
		}
	}
}
