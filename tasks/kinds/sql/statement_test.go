package sql_test

import (
	"testing"

	sqlkind "onejob/tasks/kinds/sql"
)

func TestNewRefusesTransactionControl(t *testing.T) {
	t.Parallel()
	for _, sql := range []string{"COMMIT", " commit;", "-- a comment\nEnd", "/* one */ /* two\n*/ rollback to x", "begin; SELECT 1", "START TRANSACTION", "SAVEPOINT a", "PREPARE TRANSACTION 'x'", "abort", "release a", "copy t FROM stdin", "COPY t FROM/**/STDIN", "COPY t FROM -- rows\n STDIN", "COPY (SELECT 1)\n TO  STDOUT WITH (FORMAT csv)", "", "-- nothing", "/* nothing"} {
		if _, err := sqlkind.New(sqlkind.Config{Statements: map[string]sqlkind.Statement{"it": {SQL: sql}}}, nil); err == nil {
			t.Errorf("%q is accepted", sql)
		}
	}
	for _, sql := range []string{"SELECT 1", "(SELECT 1)", "WITH a AS (SELECT 1) SELECT * FROM a", "CALL commit()", "-- COMMIT\nSELECT 1", "/* COMMIT */ UPDATE commits SET n = 1", "ENDPOINT", "COPY t FROM '/data/stdin.csv'", "COPY t FROM '/data/from stdin.csv'", "INSERT INTO t SELECT 'from stdin'"} {
		if _, err := sqlkind.New(sqlkind.Config{Statements: map[string]sqlkind.Statement{"it": {SQL: sql}}}, nil); err != nil {
			t.Errorf("%q: %v", sql, err)
		}
	}
}

func TestNewRefusesNames(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"größe ✓": "",
		"a\x00b":  `statement "a\x00b": a name may hold no control characters`,
		"a\nb":    `statement "a\nb": a name may hold no control characters`,
	} {
		_, err := sqlkind.New(sqlkind.Config{Statements: map[string]sqlkind.Statement{name: {SQL: "SELECT 1"}}}, nil)
		if want == "" && err != nil || want != "" && (err == nil || err.Error() != want) {
			t.Errorf("%q: %v", name, err)
		}
	}
}
