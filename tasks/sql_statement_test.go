package tasks_test

import (
	"errors"
	"testing"
	"time"

	"onejob/tasks"
)

func TestSQLRefusesTransactionControl(t *testing.T) {
	t.Parallel()
	for _, sql := range []string{"COMMIT", " commit;", "-- a comment\nEnd", "/* one */ /* two\n*/ rollback to x", "begin; SELECT 1", "START TRANSACTION", "SAVEPOINT a", "PREPARE TRANSACTION 'x'", "abort", "release a", "", "-- nothing", "/* nothing"} {
		if err := (tasks.SQL{Statements: map[string]tasks.Statement{"it": {SQL: sql}}}).Validate(); err == nil {
			t.Errorf("%q is accepted", sql)
		}
	}
	for _, sql := range []string{"SELECT 1", "(SELECT 1)", "WITH a AS (SELECT 1) SELECT * FROM a", "CALL commit()", "-- COMMIT\nSELECT 1", "/* COMMIT */ UPDATE commits SET n = 1", "ENDPOINT"} {
		if err := (tasks.SQL{Statements: map[string]tasks.Statement{"it": {SQL: sql}}}).Validate(); err != nil {
			t.Errorf("%q: %v", sql, err)
		}
	}
}

func TestRequeue(t *testing.T) {
	t.Parallel()
	if tasks.Requeue(time.Second, nil) != nil {
		t.Error("Requeue of nil is not nil")
	}
	cause := errors.New("the database is unavailable")
	err := tasks.Requeue(time.Second, cause)
	if !errors.Is(err, cause) || err.Error() != cause.Error() {
		t.Errorf("it is %v", err)
	}
	if d, ok := tasks.RequeueDelay(errors.Join(err)); !ok || d != time.Second {
		t.Errorf("the delay is %v, %v", d, ok)
	}
	if _, ok := tasks.RequeueDelay(tasks.RetryAfter(time.Second, cause)); ok {
		t.Error("RetryAfter asks for a requeue")
	}
}
