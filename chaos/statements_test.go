package main

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/chaos/checker"
	"onejob/chaos/harness"
	"onejob/internal/retry"
)

// What is seen in a real Postgres is enough for the checker: two statements of one lock
// key at work at once, and neither a transaction that is merely open nor one of another
// lock key.
func TestStatementsAtWorkAreSeen(t *testing.T) {
	c := tables(t)
	// begin begins a transaction that works under a fence for a while.
	begin := func(replica, key string, fence int, seconds float64) (over chan error, tx pgx.Tx) {
		config := c.operator.Config().ConnConfig
		config.RuntimeParams["application_name"] = replica
		conn, err := pgx.ConnectConfig(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{}, 1) // the statement, by the test's context if not by itself
		t.Cleanup(func() {
			<-ended
			_ = conn.Close(context.Background())
		})
		if tx, err = conn.Begin(t.Context()); err != nil {
			close(ended)
			t.Fatal(err)
		}
		_, err = tx.Exec(t.Context(), `
SELECT set_config('onejob.task_id', '7', true), set_config('onejob.fence', $1, true), set_config('onejob.lock_key', $2, true)`, fmt.Sprint(fence), key)
		if err != nil {
			close(ended)
			t.Fatal(err)
		}
		over = make(chan error, 1)
		go func(tx pgx.Tx) {
			_, err := tx.Exec(t.Context(), effectSQL, seconds)
			over <- err
			close(ended)
		}(tx)
		return over, tx
	}
	working := func(want ...string) {
		t.Helper()
		err := harness.Eventually(t.Context(), 20*time.Second, "statements are at work", func() error {
			names := c.working(t.Context())
			for _, name := range want {
				if !names[name] {
					return fmt.Errorf("at work are %v", names)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	s := watchStatements(t.Context(), c)
	defer s.stop()

	// The first one of this key is over, though its transaction is open.
	first, firstTx := begin("a", "k", 1, 0.3)
	working("a")
	if err := <-first; err != nil {
		t.Fatal(err)
	}
	defer func() { _ = firstTx.Rollback(context.Background()) }()
	begin("b", "k", 2, 600)
	begin("c", "other", 3, 600)
	working("b", "c")
	begin("d", "k", 4, 600)
	working("b", "c", "d")
	retry.Pause(t.Context(), 3*lookEvery)

	seen := s.end()
	v := checker.Check(checker.Evidence{Statements: seen})
	if v.DoubleStatements != 1 || !v.Violated() {
		t.Errorf("the checker found %v in %+v", v.Violations, seen)
	}
	if len(seen) != 4 || seen[1].Replica != "b" || seen[1].Fence != 2 {
		t.Errorf("seen were %+v", seen)
	}
}
