package main

import (
	"encoding/json"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob"
	"onejob/boottime"
	"onejob/onejobtest"
	"onejob/tasks"
)

func TestGreet(t *testing.T) {
	a := onejobtest.NewAttempt("greet", Greeting{Name: "Zoë"})
	a.Fence = 7
	result, err := onejobtest.Run(t.Context(), onejob.Handle("greet", greet), a)
	if err != nil || string(result.Value) != `"hello Zoë"` || a.Output.String() != "attempt 1 under fence 7\n" {
		t.Errorf("%s, %v, output %q", result.Value, err, a.Output)
	}
	_, err = onejobtest.Run(t.Context(), onejob.Handle("greet", greet), onejobtest.NewAttempt("greet", json.RawMessage(`{"nmae": "Zoë"}`)))
	if !tasks.IsPermanent(err) {
		t.Errorf("an unknown field: %v", err)
	}
}

// An Attempt can be made by hand.
func TestGreetByHand(t *testing.T) {
	lease := boottime.Now().Add(time.Minute)
	a := &tasks.Attempt{
		Task:     tasks.Task{Payload: json.RawMessage(`{"name": "Zoë"}`), Attempt: 2, Fence: 9},
		Deadline: func() boottime.Instant { return lease },
		Output:   tasks.NewOutput(0),
	}
	handler, err := onejob.Handle("greet", greet)["greet"].Prepare(a.Payload)
	if err != nil {
		t.Fatal(err)
	}
	result, err := handler(t.Context(), a)
	if err != nil || string(result.Value) != `"hello Zoë"` {
		t.Errorf("%s, %v", result.Value, err)
	}
}

// A replica of this program is running meanwhile.
func TestEnqueueInTransaction(t *testing.T) {
	conn, err := pgx.Connect(t.Context(), os.Getenv("ONEJOB_POSTGRES_DSN"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if _, err := conn.Exec(t.Context(), `CREATE TABLE orders (id int PRIMARY KEY, task bigint)`); err != nil {
		t.Fatal(err)
	}
	order := func(id int, fail error) error {
		return pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
			task, err := onejob.EnqueueTx(t.Context(), tx, onejob.NewTask{Kind: "greet", Payload: Greeting{Name: "Zoë"}, LockKey: "orders"})
			if err != nil {
				return err
			}
			if _, err := tx.Exec(t.Context(), `INSERT INTO orders VALUES ($1, $2)`, id, task); err != nil {
				return err
			}
			return fail
		})
	}
	if err := order(1, nil); err != nil {
		t.Fatal(err)
	}
	undone := errors.New("undone")
	if err := order(2, undone); !errors.Is(err, undone) {
		t.Fatal(err)
	}
	ids, err := onejob.EnqueueMany(t.Context(), conn, []onejob.NewTask{{Kind: "noop"}, {Kind: "greet", Payload: json.RawMessage(`{"nmae": "Zoë"}`)}})
	if err != nil || len(ids) != 2 {
		t.Fatal(ids, err)
	}
	one, err := onejob.Enqueue(t.Context(), conn, onejob.NewTask{Kind: "greet"})
	if err != nil {
		t.Fatal(err)
	}

	deadline := time.Now().Add(time.Minute)
	for unfinished := -1; unfinished != 0; time.Sleep(50 * time.Millisecond) {
		if err := conn.QueryRow(t.Context(), `SELECT count(*) FROM onejob.tasks WHERE finished_at IS NULL`).Scan(&unfinished); err != nil {
			t.Fatal(err)
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d tasks have not finished", unfinished)
		}
	}
	var orders, tasks int
	var status, result, output string
	if err := conn.QueryRow(t.Context(), `
SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM onejob.tasks), t.status, t.result::text, a.output
  FROM orders o JOIN onejob.tasks t ON t.id = o.task JOIN onejob.attempts a ON a.task_id = t.id`).Scan(&orders, &tasks, &status, &result, &output); err != nil {
		t.Fatal(err)
	}
	if orders != 1 || tasks != 4 || status != "succeeded" || result != `"hello Zoë"` || output == "" {
		t.Errorf("%d orders, %d tasks; that of the order: %s, result %s, output %q", orders, tasks, status, result, output)
	}
	for id, want := range map[int64]string{ids[0]: "succeeded", ids[1]: "failed", one: "succeeded"} {
		if err := conn.QueryRow(t.Context(), `SELECT status FROM onejob.tasks WHERE id = $1`, id).Scan(&status); err != nil || status != want {
			t.Errorf("task %d: %s, want %s (%v)", id, status, want, err)
		}
	}
}
