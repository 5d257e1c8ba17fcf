package sql_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"onejob/tasks"
	sqlkind "onejob/tasks/kinds/sql"
)

func TestPrepare(t *testing.T) {
	t.Parallel()
	k, err := sqlkind.New(sqlkind.Config{Statements: map[string]sqlkind.Statement{"close": {SQL: "SELECT $1", Params: []string{"month"}}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for payload, want := range map[string]string{
		`{"statement": "close", "params": {"month": 1}}`:         "",
		`{"statement": "close", "params": {"month": 1}, "a": 1}`: `unknown field "a"; allowed are statement, params`,
		`{"STATEMENT": "close", "params": {"month": 1}}`:         `unknown field "STATEMENT"; allowed are statement, params`,
		`{"statement": "close", "params": {"moth": 1}}`:          `needs the parameter "month"`,
		`{"params": {"month": 1}}`:                               `it names no statement`,
		`{"statement": "open", "params": 1}`:                     `payload: params cannot be a JSON number; write {"statement"`,
		`[1]`:                                                    `payload: it cannot be a JSON array; write {"statement"`,
		`{"statement": "open"}`:                                  `statement "open" is not in the configuration (kinds.sql.statements), which has ["close"]`,
	} {
		_, err := k.Prepare(json.RawMessage(payload))
		if got := err == nil; got != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", payload, err, want)
		}
		unknown := strings.Contains(want, "is not in the configuration") // another replica may have it
		if errors.Is(err, tasks.ErrUnknown) != unknown {
			t.Errorf("%s: is %v an ErrUnknown? want %v", payload, err, unknown)
		}
	}
}
