package store

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Why returns one sentence that says why a task waits, where it runs, or what became of it,
// as onejob.why does, or ErrNoTask. It knows what Postgres knows: who holds a lock key or
// slots without a task, only the locks' backend can tell.
func (s *Store) Why(ctx context.Context, id int64) (string, error) {
	type answer struct {
		There bool
		Why   string
	}
	answers, err := list(ctx, s, pgx.RowToStructByPos[answer], `
SELECT (SELECT true FROM onejob.tasks WHERE id = @id::bigint LIMIT 1) IS NOT NULL,
       onejob.why(@id::bigint)`, namedArgs{"id": id})
	switch {
	case err != nil:
		return "", fmt.Errorf("explain task %d: %w", id, listReason(err))
	case !answers[0].There:
		return "", fmt.Errorf("task %d: %w", id, ErrNoTask)
	}
	return answers[0].Why, nil
}
