package lifecycle_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"onejob/internal/testenv"
	"onejob/internal/testenv/lifecycle"
	"onejob/store"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// What Postgres notes is what happened, also of rows with odd values, and an illegal step is
// found in it.
func TestPostgresNotesEachStep(t *testing.T) {
	db := testenv.Postgres(t)
	s, err := store.Open(store.Config{DSN: db.DSN})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.Migrate(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	conn, err := pgx.Connect(t.Context(), db.DSN+"&application_name=somebody")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	do := func(sql string) {
		t.Helper()
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	do(lifecycle.Schema("clock_timestamp()"))
	do(`SET timezone = 'Asia/Kathmandu'`)
	do(`INSERT INTO onejob.tasks (kind, payload) SELECT 'noop', to_jsonb(repeat('x', 100000)) FROM generate_series(1, 2)`) // as new tasks are
	do(`INSERT INTO onejob.tasks (kind, attempt, run_at, timeout, lock_key) VALUES ('odd', 3, 'infinity', '1 year', 'key')`)
	do(`UPDATE onejob.tasks SET run_at = '0001-01-01 UTC', error = E'it''s \u2028 "odd"' WHERE id = 3`)
	do(`BEGIN; UPDATE onejob.tasks SET priority = 5; ROLLBACK`)
	do(`UPDATE onejob.tasks SET priority = priority WHERE id = 3`)
	do(`SELECT onejob.cancel(2)`)
	do(`DELETE FROM onejob.tasks WHERE id = 3`)
	do(`SET application_name = 'replica'`)
	do(`UPDATE onejob.tasks SET status = 'running', session = gen_random_uuid(), replica = 'replica', fence = 1, started_at = clock_timestamp() WHERE id = 1`)
	do(`SET application_name = 'somebody'`)
	do(`TRUNCATE onejob.tasks`)

	steps, err := lifecycle.Read(t.Context(), conn)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range steps {
		text := s.String()
		got = append(got, text[:strings.Index(text, " at ")]+text[strings.Index(text, " ["):])
		if s.At < s.Began || s.Noted < s.Statement || s.Statement < s.Began {
			t.Errorf("the moments of %v: %v %v %v %v", s, s.At, s.Began, s.Statement, s.Noted)
		}
	}
	want := []string{
		`task 3 (odd), no row to pending by "somebody" []`,
		`task 3 (odd), pending to pending by "somebody" [run_at infinity to 00:00:00.000000, error  to it's ` + "\u2028" + ` "odd"]`,
		`task 3 (odd), pending to pending by "somebody" []`,
		`task 2 (noop), pending to cancelled by "somebody" [finished_at NULL to`, // a moment
		`task 3 (odd), pending to deleted by "somebody" []`,
		`task 1 (noop), pending to running by "replica" [fence 0 to 1, session  to`, // and so on
		`task 0 (), no row to deleted by "somebody" []`,
	}
	if !slices.EqualFunc(got, want, strings.HasPrefix) {
		t.Errorf("noted:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	odd := steps[0].Is
	if odd.Attempt != 3 || odd.MaxAttempts != 5 || odd.Timeout != "1 year" || odd.LockKey != "key" || odd.RunAt != lifecycle.Infinity || odd.CreatedAt == 0 {
		t.Errorf("the row is noted as %+v", odd)
	}

	trace := lifecycle.Config{Replica: func(by string) bool { return by == "replica" }}.Replay(steps)
	if len(trace.Illegal) != 1 || trace.Illegal[0].Step != steps[5] || !strings.Contains(trace.Illegal[0].Why, "the attempt is counted") {
		t.Errorf("illegal are %v, want the claim that counts no attempt", trace.Illegal)
	}
	if trace.Rules[3] != "cancel of a pending task" || trace.Rules[4] != lifecycle.ByHand {
		t.Errorf("the rules are %q", trace.Rules)
	}
}
