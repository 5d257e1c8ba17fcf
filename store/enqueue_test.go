package store_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/store"
)

// Each connection is another program's: with another way to execute statements, and with
// a search_path that has nothing of use.
func TestEnqueueOnOtherConnections(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			config, err := pgx.ParseConfig(b.dsn + "&default_query_exec_mode=" + mode + "&search_path=nowhere&timezone=Asia/Kathmandu")
			if err != nil {
				t.Fatal(err)
			}
			conn, err := pgx.ConnectConfig(t.Context(), config)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close(t.Context())
			at := time.Date(2031, 2, 3, 4, 5, 6, 789000, time.UTC)
			ids, err := store.Enqueue(t.Context(), conn,
				store.NewTask{Kind: "plain"},
				store.NewTask{Kind: "full", Payload: struct {
					Text string `json:"text"`
				}{"<é>"}, Queue: "q", Priority: -7, RunAt: at, LockKey: "k", LimitName: "l", UniqueKey: "u" + mode, MaxAttempts: 2, Timeout: 1500 * time.Millisecond, KeepFor: 36 * time.Hour, Traceparent: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"},
				store.NewTask{Kind: "raw", Payload: json.RawMessage(`[1, "two"]`), Delay: time.Hour},
				store.NewTask{Kind: "parked", Parked: true},
				store.NewTask{Kind: "again", UniqueKey: "u" + mode},
			)
			if err != nil {
				t.Fatal(err)
			}
			if len(ids) != 5 || ids[4] != 0 {
				t.Fatalf("the IDs are %v", ids)
			}
			rows, err := b.pool.Query(t.Context(), `
SELECT concat_ws(' ', kind, payload, queue, priority, lock_key, limit_name, max_attempts, timeout, keep_for, traceparent,
                 CASE WHEN run_at = 'infinity' THEN 'never' WHEN run_at = created_at THEN 'now'
                      WHEN run_at = created_at + interval '1 hour' THEN 'in an hour' ELSE to_char(run_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US') END)
  FROM onejob.tasks
 WHERE id = ANY ($1)
 ORDER BY array_position($1, id)`, ids)
			if err != nil {
				t.Fatal(err)
			}
			got, err := pgx.CollectRows(rows, pgx.RowTo[string])
			if err != nil {
				t.Fatal(err)
			}
			want := []string{
				`plain {} default 0 5 now`,
				`full {"text": "<é>"} q -7 k l 2 00:00:01.5 36:00:00 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01 2031-02-03 04:05:06.000789`,
				`raw [1, "two"] default 0 5 in an hour`,
				`parked {} default 0 5 never`,
			}
			if !slices.Equal(got, want) {
				t.Errorf("the rows are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
			}
		})
	}
}

func TestEnqueueAllOrNone(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	count := func() (n int) {
		t.Helper()
		if err := b.pool.QueryRow(t.Context(), `SELECT count(*) FROM onejob.tasks`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	_, err := store.Enqueue(t.Context(), b.pool, store.NewTask{Kind: "a"}, store.NewTask{Kind: "b", Priority: 5000}, store.NewTask{Kind: "c"})
	if err == nil || !strings.Contains(err.Error(), "enqueue task 2 of 3") {
		t.Errorf("a row that is refused: %v", err)
	}
	if _, err := store.Enqueue(t.Context(), b.pool, store.NewTask{Kind: "a", Payload: func() {}}); err == nil {
		t.Error("a payload that cannot be encoded was enqueued")
	}
	if _, err := store.Enqueue(t.Context(), b.pool, store.NewTask{Kind: "a", Payload: []byte(`{}`)}); err == nil || !strings.Contains(err.Error(), "use json.RawMessage") {
		t.Errorf("a payload of bytes: %v", err)
	}
	for what, task := range map[string]store.NewTask{
		"Delay and RunAt":  {Kind: "a", Delay: time.Hour, RunAt: time.Now()},
		"Delay and Parked": {Kind: "a", Delay: time.Hour, Parked: true},
		"RunAt and Parked": {Kind: "a", RunAt: time.Now(), Parked: true},
		"negative":         {Kind: "a", Delay: -time.Second},
	} {
		if _, err := store.Enqueue(t.Context(), b.pool, task); err == nil || !strings.Contains(err.Error(), "Delay") {
			t.Errorf("%s: %v", what, err)
		}
	}
	far := time.Unix(0, 0).AddDate(584_580, 0, 0) // pgx would make a time of this century of it
	if _, err := store.Enqueue(t.Context(), b.pool, store.NewTask{Kind: "a", RunAt: far}); err == nil || !strings.Contains(err.Error(), "a year from 1 to 9999") {
		t.Errorf("a time of the year %d: %v", far.Year(), err)
	}
	// pgx cannot encode these, and would end the connection for that.
	for want, task := range map[string]store.NewTask{
		"enqueue task 2 of 2: the Priority must be from -1000 to 1000, not 100000": {Kind: "a", Priority: 100_000},
		"enqueue task 2 of 2: the MaxAttempts of 3000000000 are more than":         {Kind: "a", MaxAttempts: 3_000_000_000},
	} {
		tx, err := b.pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := store.Enqueue(t.Context(), tx, store.NewTask{Kind: "a"}, task); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
		if _, err := tx.Exec(t.Context(), `SELECT`); err != nil {
			t.Errorf("the transaction, after %s: %v", want, err)
		}
		_ = tx.Rollback(t.Context())
	}
	if n := count(); n != 0 {
		t.Errorf("%d tasks are left of calls that failed", n)
	}

	for _, commit := range []bool{false, true} {
		tx, err := b.pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := store.Enqueue(t.Context(), tx, store.NewTask{Kind: "a"}, store.NewTask{Kind: "b"}); err != nil {
			t.Fatal(err)
		}
		end, want := tx.Rollback, 0
		if commit {
			end, want = tx.Commit, 2
		}
		if err := end(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := count(); n != want {
			t.Errorf("commit %v: there are %d tasks, want %d", commit, n, want)
		}
	}
	if ids, err := store.Enqueue(t.Context(), b.pool); err != nil || len(ids) != 0 {
		t.Errorf("no tasks: %v, %v", ids, err)
	}
}
