package store_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"onejob/tasks"
)

func TestNonsenseIsRefusedByName(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	wrong := map[string][]string{
		"status_is_pending_running_succeeded_failed_or_cancelled":         {"status='done'"},
		"kind_is_1_to_100_characters":                                     {"kind=''", "kind=repeat('k', 101)"},
		"queue_is_1_to_100_characters":                                    {"queue=''", "queue=repeat('q', 101)"},
		"priority_is_between_minus_1000_and_1000":                         {"priority=1001", "priority=-1001"},
		"max_attempts_is_between_1_and_1000":                              {"max_attempts=0", "max_attempts=1001"},
		"attempt_and_crashes_are_not_negative":                            {"attempt=-1", "crashes=-1"},
		"attempt_and_crashes_are_at_most_a_million":                       {"attempt=1000001", "crashes=2147483647"},
		"stalls_are_between_0_and_a_million":                              {"stalls=-1", "stalls=1000001"},
		"traceparent_is_as_w3c_trace_context_says":                        {"traceparent=''", "traceparent='00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7'", "traceparent='00-00000000000000000000000000000000-00f067aa0ba902b7-01'"},
		"timeout_is_above_zero":                                           {"timeout='0'", "timeout='-1 s'"},
		"timeout_is_at_most_100_years":                                    {"timeout='101 years'", "timeout='178000000 years'"},
		"run_at_is_from_year_1_to_9999_or_infinity":                       {"run_at='-infinity'", "run_at='0001-01-01 BC'", "run_at='10000-01-01 UTC'"},
		"lock_key_is_1_to_512_bytes_without_control_characters":           {"lock_key=''", "lock_key=repeat('é', 257)", `lock_key=E'a\nb'`},
		"limit_name_is_1_to_100_bytes":                                    {"limit_name=''", "limit_name=repeat('é', 51)"},
		"unique_key_is_1_to_512_bytes":                                    {"unique_key=''", "unique_key=repeat('é', 257)"},
		"payload_is_at_most_4_mib":                                        {"payload=to_jsonb(repeat('x', 4 << 20))", "payload='[1e131071]'::jsonb || (SELECT jsonb_agg(1e131071) FROM generate_series(1, 40))"},
		"kind_has_no_control_characters":                                  {`kind=E'a\tb'`, `kind=E'\x1b[31m'`},
		"queue_has_no_control_characters":                                 {`queue=E'a\nb'`},
		"limit_name_begins_with_no_dot_and_has_no_slash_space_or_control": {"limit_name='.lock'", "limit_name='a/b'", "limit_name='a b'", `limit_name=E'a\u00a0b'`, `limit_name=E'a\u2028'`, `limit_name=E'a\nb'`},
		"only_a_running_task_has_a_session":                               {"session=gen_random_uuid()"},
		"payload_is_at_most_8_times_as_long_as_text":                      {"payload=(SELECT jsonb_agg(1e131071) FROM generate_series(1, 31))", "payload='{\"n\": 1e65000}' || jsonb_build_object('m', 1e65000)"},
		"keep_for_is_not_negative":                                        {"keep_for='-1 s'"},
		"keep_for_has_no_part_below_minus_1000_years":                     {"keep_for=make_interval(years => -5965232, days => 2147483647)", "keep_for=make_interval(years => -292271, secs => 9223372000000)", "keep_for=make_interval(years => 1100, days => -386000)"},
		"timeout_has_no_part_below_minus_1000_years":                      {"timeout=make_interval(years => 5965232, days => -2147483500)"},
		"only_a_finished_task_has_finished_at":                            {"status='failed'", "finished_at=now()"},
	}
	for _, at := range []string{"created_at", "started_at", "finished_at"} {
		c := "created_started_and_finished_at_are_from_year_1_to_9999"
		wrong[c] = append(wrong[c], at+"='infinity'", at+"='-infinity'", at+"='10000-01-01 UTC'")
	}
	for constraint, columns := range wrong {
		for _, c := range columns {
			name, value, _ := strings.Cut(c, "=")
			statement := fmt.Sprintf(`INSERT INTO onejob.tasks (kind, %s) VALUES ('noop', %s)`, name, value)
			if name == "kind" {
				statement = fmt.Sprintf(`INSERT INTO onejob.tasks (kind) VALUES (%s)`, value)
			}
			_, err := b.try(statement)
			var pg *pgconn.PgError
			if !errors.As(err, &pg) || pg.ConstraintName != constraint && pg.Code != "22008" { // Postgres 13 has no such interval
				t.Errorf("%s: %v, want %s", c, err, constraint)
			}
		}
	}
	for _, task := range []string{"session = NULL", "replica = NULL", "fence = NULL", "started_at = NULL"} {
		_, err := b.try(`UPDATE onejob.tasks SET `+task+` WHERE id = $1`, b.inState(tasks.StatusRunning).ID)
		var pg *pgconn.PgError
		const constraint = "a_running_task_has_session_replica_fence_and_started_at"
		if !errors.As(err, &pg) || pg.ConstraintName != constraint {
			t.Errorf("%s: %v, want %s", task, err, constraint)
		}
		wrong[constraint] = []string{task}
	}
	for _, name := range b.sql(`SELECT conname FROM pg_constraint WHERE conrelid = 'onejob.tasks'::regclass AND contype = 'c'
		UNION SELECT tgname FROM pg_trigger WHERE tgrelid = 'onejob.tasks'::regclass AND tgfoid = 'onejob.refuse'::regproc`) {
		if wrong[name] == nil {
			t.Errorf("nothing here violates %s", name)
		}
	}
	// A payload that is short as it is stored and long as text.
	_, err := b.try(`INSERT INTO onejob.schedules (name, cron, kind, payload) VALUES ('s', '@daily', 'noop', '[1e131071]'::jsonb || (SELECT jsonb_agg(1e131071) FROM generate_series(1, 40)))`)
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.ConstraintName != "payload_is_at_most_4_mib" || pg.TableName != "schedules" {
		t.Errorf("a schedule with a long payload: %v", err)
	}
	// A line that names each second, minute, hour and day has less than 600 characters.
	long := `'0' || repeat(',1', 498) || ' * * * *'` // 1,005 characters
	for _, statement := range []string{`INSERT INTO onejob.schedules (name, cron, kind) VALUES ('s', ` + long + `, 'noop')`, `UPDATE onejob.schedules SET cron = ` + long} {
		b.sql(`INSERT INTO onejob.schedules (name, cron, kind) VALUES ('long', right(` + long + `, 1000), 'noop') ON CONFLICT DO NOTHING`)
		_, err := b.try(statement)
		if !errors.As(err, &pg) || pg.ConstraintName != "cron_is_at_most_1000_characters" || pg.TableName != "schedules" {
			t.Errorf("%.20s: a schedule with a long line: %v", statement, err)
		}
	}
	for constraint, statement := range map[string]string{
		"outcome_is_known": `UPDATE onejob.attempts SET outcome = 'odd'`,
		"only_a_refused_attempt_may_be_known_in_part": `UPDATE onejob.attempts SET replica = NULL`,
	} {
		task := b.inState(tasks.StatusSucceeded)
		_, err := b.try(statement+` WHERE task_id = $1`, task.ID)
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.ConstraintName != constraint {
			t.Errorf("%v, want %s", err, constraint)
		}
	}
}

func TestPlainInsert(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`INSERT INTO onejob.tasks (kind) VALUES ('noop')`)
	equal(t, "the row", b.one(`SELECT concat_ws(' ', kind, payload, status, queue, priority, attempt, max_attempts, crashes, run_at <= now()) FROM onejob.tasks`),
		"noop {} pending default 0 0 5 0 t")

	b.sql(`INSERT INTO onejob.tasks (kind, priority, payload) VALUES ('noop', 1, to_jsonb(repeat('x', 1 << 20)))`)
	equal(t, "the length of the payload", len(b.claimOne().Payload), 1<<20+2)
}

func TestUniqueKey(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	const again = `INSERT INTO onejob.tasks (kind, unique_key) VALUES ('noop', 'u') ON CONFLICT DO NOTHING RETURNING id`
	taken := func(when string, want bool) {
		t.Helper()
		_, err := b.try(`INSERT INTO onejob.tasks (kind, unique_key) VALUES ('noop', 'u')`)
		var pg *pgconn.PgError
		if got := errors.As(err, &pg) && pg.ConstraintName == "unique_key_is_taken_by_a_pending_or_running_task"; got != want {
			t.Errorf("%s: taken is %v, %v", when, got, err)
		}
	}
	taken("at first", false)
	taken("while it is pending", true)
	equal(t, "ON CONFLICT DO NOTHING: the number of rows", len(b.sql(again)), 0)
	equal(t, "enqueue", b.one(`SELECT onejob.enqueue('noop', unique_key => 'u') IS NULL`), "true")
	first := b.claimOne()
	taken("while it runs", true)
	if err := b.Complete(t.Context(), succeeded(first)); err != nil {
		t.Fatal(err)
	}
	taken("when it is done", false)
	if _, err := b.Retry(t.Context(), first.ID); err == nil || !strings.Contains(err.Error(), "unique_key_is_taken_by_a_pending_or_running_task") {
		t.Errorf("the retry of a task whose key another has taken: %v", err)
	}
}

// inState returns a task in the given state.
func (b *bench) inState(status tasks.Status) *tasks.Task {
	b.t.Helper()
	t := b.claimed()
	var err error
	switch status {
	case tasks.StatusPending:
		err = b.Requeue(b.t.Context(), t, 0)
	case tasks.StatusRunning:
	case tasks.StatusSucceeded:
		err = b.Complete(b.t.Context(), succeeded(t))
	default:
		err = b.Complete(b.t.Context(), failed(t, status))
	}
	if err != nil {
		b.t.Fatal(err)
	}
	equal(b.t, "the status", b.row(t, "status"), string(status))
	return t
}

func TestCancelAndRetryInAllStates(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for _, test := range []struct {
		status                tasks.Status
		cancelled, retried    bool
		afterCancel, afterTry string
	}{
		{tasks.StatusPending, true, true, "cancelled t t", "pending 0 f f"},
		{tasks.StatusRunning, true, false, "running t f", "running 1 f f"},
		{tasks.StatusSucceeded, false, true, "succeeded f t", "pending 0 f f"},
		{tasks.StatusFailed, false, true, "failed f t", "pending 0 f f"},
		{tasks.StatusCancelled, false, true, "cancelled f t", "pending 0 f f"},
	} {
		for _, how := range []string{"function", "UPDATE"} {
			task := b.inState(test.status)
			if how == "UPDATE" {
				b.sql(`UPDATE onejob.tasks SET cancel_requested = true WHERE id = $1 AND status IN ('pending', 'running')`, task.ID)
			} else if got, err := b.Cancel(t.Context(), task.ID); err != nil || got != test.cancelled {
				t.Errorf("cancel of a %s task: %v, %v", test.status, got, err)
			}
			equal(t, fmt.Sprintf("a %s task after a cancel by %s", test.status, how), b.row(task, "status, cancel_requested, finished_at IS NOT NULL"), test.afterCancel)
		}
		task := b.inState(test.status)
		if got, err := b.Retry(t.Context(), task.ID); err != nil || got != test.retried {
			t.Errorf("retry of a %s task: %v, %v", test.status, got, err)
		}
		equal(t, fmt.Sprintf("a %s task after a retry", test.status), b.row(task, "status, attempt, cancel_requested, finished_at IS NOT NULL"), test.afterTry)
	}
	if got, err := b.Cancel(t.Context(), 1<<40); got || err != nil {
		t.Errorf("cancel of no task: %v, %v", got, err)
	}
	if got, err := b.Retry(t.Context(), 1<<40); got || err != nil {
		t.Errorf("retry of no task: %v, %v", got, err)
	}
}

func TestACancelledTaskThatRunsIsSeenByItsReplicaAlone(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	task := b.claimed()
	other := *b
	other.session = "6f1ed002-ab59-42fb-a0b4-0123456789ab"
	other.claimed()
	b.sql(`UPDATE onejob.tasks SET cancel_requested = true WHERE id = $1`, task.ID)
	mine, err := b.CancelRequests(t.Context(), b.session)
	equal(t, "mine", fmt.Sprint(mine, err), fmt.Sprint([]int64{task.ID}, nil))
	others, err := b.CancelRequests(t.Context(), other.session)
	equal(t, "the other's", fmt.Sprint(others, err), "[] <nil>")
}

func TestEnqueueFromSQL(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	id := b.one(`SELECT onejob.enqueue('noop', '{"a": 1}', queue => 'q', priority => 7, run_at => '2001-01-01Z', lock_key => 'k',
		limit_name => 'l', unique_key => 'u', max_attempts => 2, timeout => '3 s')`)
	equal(t, "the row", b.one(`SELECT concat_ws(' ', kind, payload, queue, priority, extract(year FROM run_at), lock_key, limit_name, unique_key, max_attempts, timeout) FROM onejob.tasks WHERE id = $1::text::bigint`, id),
		`noop {"a": 1} q 7 2001 k l u 2 00:00:03`)
}
