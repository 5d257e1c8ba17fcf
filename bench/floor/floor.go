// Package floor is the least that a queue in this table costs: a claim of many
// rows with SKIP LOCKED, and a completion of the same rows, in a loop. It has no
// locks, no fences, no history of attempts, and nobody would take over from it.
package floor

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"onejob/bench/loops"
)

// Config says where the tasks are and how to work on them.
type Config struct {
	DSN   string // of Postgres
	Loops int    // how many claim side by side
	Batch int    // rows in a claim
}

const claimSQL = `
WITH picked AS (
    SELECT id
      FROM onejob.tasks
     WHERE status = 'pending'
       AND limit_name IS NULL
       AND onejob.lane(priority, queue, kind, lock_key IS NULL) = onejob.lane(0::smallint, 'default', 'noop', true)
       AND run_at <= now()
     ORDER BY run_at, id
     LIMIT $1
       FOR UPDATE SKIP LOCKED
)
UPDATE onejob.tasks
   SET status     = 'running',
       attempt    = attempt + 1,
       fence      = 0,
       session    = '00000000-0000-0000-0000-000000000001',
       replica    = '',
       started_at = now()
 WHERE id = ANY (ARRAY(SELECT id FROM picked))
RETURNING id`

const completeSQL = `
UPDATE onejob.tasks
   SET status      = 'succeeded',
       session     = NULL,
       finished_at = now()
 WHERE id = ANY ($1)`

// Run works until ctx ends. It returns an error if Postgres does.
func Run(ctx context.Context, c Config) error {
	err := loops.Run(ctx, c.DSN, c.Loops, func(ctx context.Context, pool *pgxpool.Pool) (bool, error) {
		n, err := batch(ctx, pool, c.Batch)
		return n > 0, err
	})
	if err != nil {
		return fmt.Errorf("floor: %w", err)
	}
	return nil
}

// batch claims rows and completes them. It returns how many there were.
func batch(ctx context.Context, pool *pgxpool.Pool, most int) (int, error) {
	rows, err := pool.Query(ctx, claimSQL, most)
	if err != nil {
		return 0, fmt.Errorf("claim: %w", err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil || len(ids) == 0 {
		return 0, err
	}
	if _, err := pool.Exec(ctx, completeSQL, ids); err != nil {
		return 0, fmt.Errorf("complete: %w", err)
	}
	return len(ids), nil
}
