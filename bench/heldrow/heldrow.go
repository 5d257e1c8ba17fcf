// Package heldrow works on one row at a time under the row's own lock: a transaction stays
// open while the work runs, and its end releases the row. It is the simplest way to have a
// task done by one worker at a time with Postgres alone. There is no fence, no history and
// no takeover but the end of a connection; each task under way takes a connection.
package heldrow

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"onejob/bench/loops"
)

// Config says where the tasks are and how to work on them.
type Config struct {
	DSN   string // of Postgres
	Loops int    // tasks at once, each on a connection of its own
}

const takeSQL = `
SELECT id
  FROM onejob.tasks
 WHERE status = 'pending'
   AND limit_name IS NULL
   AND onejob.lane(priority, queue, kind, lock_key IS NULL) = onejob.lane(0::smallint, 'default', 'noop', true)
   AND run_at <= now()
 ORDER BY run_at, id
 LIMIT 1
   FOR UPDATE SKIP LOCKED`

// The row never has the status running: its lock says that it does.
const completeSQL = `
UPDATE onejob.tasks
   SET status      = 'succeeded',
       attempt     = attempt + 1,
       started_at  = now(),
       finished_at = clock_timestamp()
 WHERE id = $1`

// Run works until ctx ends. It returns an error if Postgres does.
func Run(ctx context.Context, c Config) error {
	if err := loops.Run(ctx, c.DSN, c.Loops, one); err != nil {
		return fmt.Errorf("held row: %w", err)
	}
	return nil
}

// one works on a task, if one is due: nothing, between the statements.
func one(ctx context.Context, pool *pgxpool.Pool) (some bool, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var id int64
		if err := tx.QueryRow(ctx, takeSQL).Scan(&id); err != nil {
			return err
		}
		some = true
		_, err := tx.Exec(ctx, completeSQL, id)
		return err
	})
	if errors.Is(err, pgx.ErrNoRows) {
		err = nil
	}
	return some, err
}
