package cli

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"

	"onejob/internal/testenv"
)

// A DSN that is given for one command means that database, and migrations have no way back.
func TestMigrateNoOtherDatabase(t *testing.T) {
	given := testenv.Postgres(t)
	server, _ := testenv.OwnPostgres(t)
	if err := server.Exec(t.Context(), "CREATE DATABASE "+given.Name); err != nil {
		t.Fatal(err)
	}
	t.Setenv("ONEJOB_POSTGRES_DSN", given.DSN)
	migrate := func(listen string) (code int, said string) {
		var out bytes.Buffer
		path := fileWith(t, fmt.Sprintf("postgres: {listen_dsn: %q}\n", listen))
		code = run(t.Context(), Program{}, []string{"migrate", "up", "--config", path}, strings.NewReader(""), &out, &out)
		return code, out.String()
	}
	for listen, want := range map[string]string{
		server.DSN(given.Name): "leads to the server at",
		server.DSN("test"):     "names user",
	} {
		code, said := migrate(listen)
		if code != exitUsage || !strings.Contains(said, want) || !strings.Contains(said, "set ONEJOB_POSTGRES_LISTEN_DSN as well") {
			t.Errorf("with listen_dsn %s it exits with %d: %s", listen, code, said)
		}
	}
	if code, said := migrate(given.DSN); code != 0 {
		t.Errorf("with the same server it exits with %d: %s", code, said)
	}
	t.Setenv("ONEJOB_POSTGRES_LISTEN_DSN", "")
	if code, said := migrate(server.DSN(given.Name)); code != 0 {
		t.Errorf("without a listen_dsn it exits with %d: %s", code, said)
	}
	other := &testenv.DB{Name: given.Name, DSN: server.DSN(given.Name)}
	for db, want := range map[*testenv.DB]bool{given: true, other: false} {
		var migrated bool
		if err := db.Pool(t).QueryRow(t.Context(), `SELECT to_regclass('onejob.tasks') IS NOT NULL`).Scan(&migrated); err != nil || migrated != want {
			t.Errorf("%s has the schema: %v, want %v (%v)", db.DSN, migrated, want, err)
		}
	}
}

// A part of the SQL is no success: it is piped into psql.
func TestRolesThatCannotBeWrittenAreNoSuccess(t *testing.T) {
	t.Parallel()
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	var stderr bytes.Buffer
	if code := run(t.Context(), Program{}, []string{"migrate", "roles"}, strings.NewReader(""), full, &stderr); code != exitFailure {
		t.Errorf("it exits with %d: %s", code, &stderr)
	}
}
