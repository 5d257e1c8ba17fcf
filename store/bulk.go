package store

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"onejob/internal/pgerror"
)

// What people do to many tasks at once.

// An Action is something that people do to tasks.
type Action string

// The actions.
const (
	ActionCancel Action = "cancel" // pending tasks at once, running ones within seconds
	ActionRetry  Action = "retry"  // makes tasks due again, with all their attempts; not running ones
	ActionDelete Action = "delete" // and their attempts; not running ones
)

// TaskFilter chooses tasks by what they have in common. A field that is empty chooses all;
// one field at least must not be.
type TaskFilter struct {
	// Status is one status. If it is empty, a cancel is for pending and running tasks and a
	// retry for failed ones; a delete needs it, or IDs.
	Status string `json:"status,omitempty"`

	Kind     string `json:"kind,omitempty"`
	Queue    string `json:"queue,omitempty"`
	Command  string `json:"command,omitempty"` // of the kind exec, or the statement of the kind sql
	Schedule string `json:"schedule,omitempty"`
	Limit    string `json:"limit,omitempty"`
	LockKey  string `json:"lock_key,omitempty"`

	// Error is a part of the error, in any case; % stands for any text and _ for any
	// character, as in LIKE.
	Error string `json:"error,omitempty"`

	// Since and Until are about when a task finished or, if it has not, was created.
	Since *time.Time `json:"since,omitempty"`
	Until *time.Time `json:"until,omitempty"`

	// IDs chooses these tasks. A list that is empty and not nil chooses none.
	IDs []int64 `json:"ids,omitzero"`
}

// Bulk is an action on the tasks that a filter chooses.
type Bulk struct {
	Action Action
	Filter TaskFilter

	// Spread lets tasks that are retried become due at random times from now until then, so
	// that new tasks need not wait behind all of them.
	Spread time.Duration

	// Count counts the tasks, and does nothing to them.
	Count bool
}

// BulkResult is what became of a [Bulk].
type BulkResult struct {
	Matched  int64 // tasks that the filter chose
	Affected int64 // to which it was done
	Slow     int64 // to which it was not done because one alone takes longer than [Config].Timeout

	// Rest is true if the action ended before all tasks were looked at, because of an error.
	Rest bool
}

// Left is how many tasks the filter chose to which it was not done: others had locked them,
// they had changed, they could not be pending beside another task with their unique_key,
// Postgres refused to change them, because of a foreign key of another table for instance, or
// they are Slow.
func (r BulkResult) Left() int64 { return r.Matched - r.Affected }

// How many tasks one transaction changes at most, and how many it counts. Other commits wait
// while the log of a transaction is written to the disk, so those that change are small.
const (
	bulkChanges = 200
	bulkCounts  = 5000
)

// ErrFilter says that a filter cannot be used; its text says why.
var ErrFilter = errors.New("invalid filter")

// Bulk does something to the tasks that a filter chooses, in the order of their ids, in
// transactions of at most 200. After each it calls progress, if that is not nil, and pauses
// for as long as the transaction took. Tasks that come to be chosen only by what happens after
// the beginning are left out.
//
// A transaction that takes longer than a quarter of [Config].Timeout is tried again with fewer tasks. A
// task that alone takes longer than the whole is left, and those behind it are not.
//
// With an error, what the result counts was done. It returns ErrFilter if the filter cannot be
// used: then nothing was done.
func (s *Store) Bulk(ctx context.Context, b Bulk, progress func(BulkResult)) (total BulkResult, err error) {
	if b.Filter.IDs == nil && b.Filter.Until == nil {
		now, err := s.Now(ctx)
		if err != nil {
			return total, fmt.Errorf("%s tasks: %w", b.Action, err)
		}
		b.Filter.Until = &now
	}
	largest := bulkChanges
	if b.Count {
		largest = bulkCounts
	}
	if n := len(b.Filter.IDs); n > 0 {
		largest = min(largest, n)
	}
	next, action := new(int64), (*int64)(nil)
	most := largest
	for total.Rest = true; ; {
		began := time.Now()
		r, err := s.bulk(ctx, b, *next, most, action)
		slow := tookTooLong(ctx, err)
		switch {
		case slow && most > 1:
			most = max(most/8, 1) // not by halves: people wait
			continue
		case slow && !b.Count && pgerror.Is(err, queryCanceled): // without an answer it is not about a row
			which := b
			which.Count = true
			began = time.Now()
			if r, err = s.bulk(ctx, which, *next, 1, action); err == nil {
				total.Slow += int64(r.Matched)
			}
		case err == nil && time.Since(began) < s.timeout/16:
			most = min(2*most, largest)
		}
		if err != nil {
			return total, fmt.Errorf("%s tasks: %w", b.Action, filterError(err))
		}
		next, action = r.Next, r.Action
		total.Matched += int64(r.Matched)
		total.Affected += int64(r.Affected)
		if progress != nil {
			progress(total)
		}
		if next == nil {
			total.Rest = false
			return total, nil
		}
		if b.Count {
			continue
		}
		select {
		case <-ctx.Done():
			return total, fmt.Errorf("%s tasks: %w", b.Action, context.Cause(ctx))
		case <-time.After(time.Since(began)):
		}
	}
}

// bulkPart is what one call of onejob.bulk did.
type bulkPart struct {
	Matched  int
	Affected int
	Next     *int64
	Action   *int64
}

// bulk does something to up to most tasks with ids above after.
func (s *Store) bulk(ctx context.Context, b Bulk, after int64, most int, action *int64) (bulkPart, error) {
	filter, err := json.Marshal(b.Filter)
	if err != nil {
		return bulkPart{}, err
	}
	within := s.timeout / 4
	if most == 1 {
		within = s.timeout - s.timeout/10
	}
	actor := cmp.Or(Actor(ctx), s.actor)
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	// Postgres ends a statement that takes too long before the context does: its rows must not
	// be locked any more when a statement for fewer of them follows, as that leaves locked rows.
	return one(queryAfter(ctx, s.pool, pgx.RowToStructByPos[bulkPart], recorded+`, pg_catalog.set_config('statement_timeout', $2, true)`,
		[]any{actor, strconv.FormatInt(within.Milliseconds(), 10)}, `
SELECT matched, affected, next_id, action_id
  FROM onejob.bulk(@action::text, @filter::text::jsonb, @after::bigint, @most::int, @spread::bigint * interval '1 microsecond', @recorded::bigint, @count::bool)`,
		namedArgs{"action": string(b.Action), "filter": string(filter), "after": after, "most": most, "spread": b.Spread.Microseconds(), "recorded": action, "count": b.Count}))
}

// Now returns the time by Postgres' clock, which is the one that the times in rows come from.
func (s *Store) Now(ctx context.Context) (now time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	if err := s.pool.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&now); err != nil {
		return now, fmt.Errorf("read the time: %w", sanitized(err))
	}
	return now, nil
}

// filterError makes ErrFilter of what onejob.bulk says of its arguments.
func filterError(err error) error {
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok && (pg.Code == "22023" || pg.Code == "P0002") {
		return fmt.Errorf("%w: %s", ErrFilter, pg.Message)
	}
	return sanitized(err)
}

// Delete deletes a task that is not running, and its attempts. It reports whether there was
// such a task, nobody had locked it, and Postgres did not refuse it.
func (s *Store) Delete(ctx context.Context, id int64) (bool, error) {
	r, err := s.Bulk(ctx, Bulk{Action: ActionDelete, Filter: TaskFilter{IDs: []int64{id}}}, nil)
	if err == nil && r.Slow > 0 {
		err = fmt.Errorf("delete task %d: it takes longer than %v", id, s.timeout)
	}
	return r.Affected > 0, err
}

// RunSchedule enqueues a task of a schedule now, and returns its id, or zero if there is no
// such schedule. Its due times stay as they are.
func (s *Store) RunSchedule(ctx context.Context, name string) (int64, error) {
	id, err := one(act[*int64](ctx, s, "run schedule "+name, `SELECT onejob.run_schedule(@name::text)`, namedArgs{"name": name}))
	if err != nil || id == nil {
		return 0, err
	}
	return *id, nil
}

// Record notes in onejob.actions what was done elsewhere, such as in Consul.
func (s *Store) Record(ctx context.Context, action, target string) error {
	_, err := act[bool](ctx, s, "record "+action, `SELECT onejob.record(@action::text, @target::text, 1) IS NULL`, namedArgs{"action": action, "target": target})
	return err
}
