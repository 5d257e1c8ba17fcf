package testenv

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/internal/testenv/lifecycle"
)

// Lifecycle makes Postgres note every change of a task's row, and fails the test if, when it
// ends, a step of a replica is illegal. Replicas are those whose application_name is the
// store's own; everybody else changes rows by hand. Call it when the schema is there and
// before any replica starts: what begins later ends earlier, so all steps are seen.
//
// with may change what is known of the replicas, and keep it to do so until the test ends.
func Lifecycle(t testing.TB, dsn string, with ...func(*lifecycle.Config)) {
	t.Helper()
	c := lifecycle.Config{Replica: func(by string) bool { return by == "onejob" }}
	for _, f := range with {
		f(&c)
	}
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
	defer cancel()
	if err := connected(ctx, dsn, func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, lifecycle.Schema("clock_timestamp()"))
		return err
	}); err != nil {
		t.Fatalf("testenv: note the steps of tasks: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*cleanupTimeout) // there may be many
		defer cancel()
		var steps []lifecycle.Step
		if err := connected(ctx, dsn, func(conn *pgx.Conn) (err error) {
			steps, err = lifecycle.Read(ctx, conn)
			return err
		}); err != nil {
			t.Errorf("testenv: %v", err)
		}
		const most = 20
		illegal := slices.DeleteFunc(c.Replay(steps).Illegal, func(i lifecycle.Illegal) bool { return clockSet(i.Step) })
		for i, step := range illegal {
			if i == most {
				t.Errorf("and more illegal steps")
				break
			}
			t.Errorf("illegal step: %v", step)
		}
	})
}

// clockSet reports whether Postgres' clock was set in the transaction of a step, as some
// tests do. The times in such a step do not fit together.
func clockSet(s lifecycle.Step) bool {
	took := s.Noted.Sub(s.Began)
	return took < 0 || took > 30*time.Minute
}

func connected(ctx context.Context, dsn string, f func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	return f(conn)
}
