package store

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// QueueRow is a queue that is paused.
type QueueRow struct {
	Name        string  `json:"name" db:"name"`
	PausedUntil Time    `json:"paused_until" db:"paused_until"` // infinite: until it is resumed
	PausedAt    Time    `json:"paused_at" db:"paused_at"`
	PausedBy    string  `json:"paused_by" db:"paused_by"`
	Reason      *string `json:"reason" db:"reason"`
}

const pausedRowsSQL = `
SELECT name, paused_until, paused_at, paused_by, reason
  FROM onejob.queues
 WHERE paused_until > statement_timestamp()
 ORDER BY name`

// PausedQueues returns the queues that are paused, in the order of their names.
func (s *Store) PausedQueues(ctx context.Context) ([]QueueRow, error) {
	rows, err := list(ctx, s, pgx.RowToStructByName[QueueRow], pausedRowsSQL, nil)
	if err != nil {
		return nil, fmt.Errorf("list paused queues: %w", listReason(err))
	}
	return rows, nil
}

// PauseQueue lets claims take no more tasks from a queue, from the next claim of every
// replica on. What runs goes on. It ends at a time, or if that is zero after a duration, or
// if that is zero too when somebody resumes the queue. A queue that is paused already gets
// the new reason and end.
func (s *Store) PauseQueue(ctx context.Context, name, reason string, until time.Time, after time.Duration) error {
	_, err := act[bool](ctx, s, "pause queue "+name, `
SELECT onejob.pause_queue(@name::text, nullif(@reason::text, ''), `+pauseEnd+`) IS NULL`,
		namedArgs{"name": name, "reason": reason, "until": moment(until), "after": atLeastOne(after)})
	return err
}

// atLeastOne returns a duration in microseconds, of which a pause that has an end lasts at least one.
func atLeastOne(d time.Duration) int64 {
	if d > 0 {
		return max(d.Microseconds(), 1)
	}
	return d.Microseconds()
}

// pauseEnd is when a pause ends: at a time, after a duration, or when somebody ends it.
const pauseEnd = `coalesce(@until::timestamptz, statement_timestamp() + nullif(@after::bigint, 0) * interval '1 microsecond', 'infinity')`

// ResumeQueue lets claims take tasks from a paused queue again, and wakes the replicas. It
// reports whether the queue was paused.
func (s *Store) ResumeQueue(ctx context.Context, name string) (bool, error) {
	return one(act[bool](ctx, s, "resume queue "+name, `SELECT onejob.resume_queue(@name::text)`, namedArgs{"name": name}))
}

// act runs a statement that onejob.actions records for the actor of the context, or else
// for Config.Actor. doing begins its error.
func act[T any](ctx context.Context, s *Store, doing, sql string, args ...any) ([]T, error) {
	return fetchAfter(ctx, s.pool, doing, pgx.RowTo[T], recorded, []any{cmp.Or(Actor(ctx), s.actor)}, sql, args...)
}

// recorded comes before a statement that onejob.actions records. $1 is the actor.
const recorded = indexesOnly + `, pg_catalog.set_config('onejob.actor', $1, true)`

type actorKey struct{}

// WithActor returns a context in which people's actions are done for somebody else than
// Config.Actor says.
func WithActor(ctx context.Context, actor string) context.Context {
	return context.WithValue(ctx, actorKey{}, actor)
}

// Actor returns for whom a context lets actions be done, or "".
func Actor(ctx context.Context) string {
	actor, _ := ctx.Value(actorKey{}).(string)
	return actor
}

// PurgeActions deletes the oldest n rows of onejob.actions that are older than keep, and
// returns how many.
func (s *Store) PurgeActions(ctx context.Context, keep time.Duration, n int) (int, error) {
	deleted, err := fetch(ctx, s.pool, "delete old actions", pgx.RowTo[bool], `
DELETE FROM onejob.actions
 WHERE id = ANY (ARRAY(SELECT id
                         FROM onejob.actions
                        WHERE at < now() - $1 * interval '1 microsecond'
                        ORDER BY at
                        LIMIT $2))
RETURNING true`, keep.Microseconds(), n)
	return len(deleted), err
}
