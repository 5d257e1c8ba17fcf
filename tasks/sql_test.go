package tasks_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"onejob/tasks"
)

func TestSQLCheck(t *testing.T) {
	t.Parallel()
	k := tasks.SQL{Statements: map[string]tasks.Statement{"close": {SQL: "SELECT $1", Params: []string{"month"}}}}
	for payload, want := range map[string]string{
		`{"statement": "close", "params": {"month": 1}}`:         "",
		`{"statement": "close", "params": {"month": 1}, "a": 1}`: `unknown field "a"; allowed are statement, params`,
		`{"STATEMENT": "close", "params": {"month": 1}}`:         `unknown field "STATEMENT"; allowed are statement, params`,
		`{"statement": "close", "params": {"moth": 1}}`:          `needs the parameter "month"`,
		`{"params": {"month": 1}}`:                               `it names no statement`,
		`{"statement": "open", "params": 1}`:                     `cannot unmarshal number`,
		`{"statement": "open"}`:                                  `statement "open" is not in the configuration (kinds.sql.statements), which has ["close"]`,
	} {
		err := k.Check(json.RawMessage(payload))
		if got := err == nil; got != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", payload, err, want)
		}
		unknown := strings.Contains(want, "is not in the configuration") // another replica may have it
		if errors.Is(err, tasks.ErrUnknown) != unknown {
			t.Errorf("%s: is %v an ErrUnknown? want %v", payload, err, unknown)
		}
		if err == nil {
			continue
		}
		_, err = k.Run(t.Context(), &tasks.Attempt{Task: tasks.Task{Payload: json.RawMessage(payload)}})
		if _, requeued := tasks.RequeueDelay(err); requeued != unknown || tasks.IsPermanent(err) == unknown {
			t.Errorf("Run of %s: %v: is it to be requeued? %v, want %v", payload, err, requeued, unknown)
		}
	}
}
