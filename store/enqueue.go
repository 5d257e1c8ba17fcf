package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// NewTask is a task to enqueue. Kind is required. Zero values of the other fields mean the
// table's defaults.
type NewTask struct {
	Kind        string
	Payload     any           // is stored as JSON; a json.RawMessage as it is; no []byte; default {}
	Queue       string        // default "default"
	Priority    int           // higher runs first, -1000 to 1000
	Delay       time.Duration // from now, by Postgres' clock, to run_at; default 0
	RunAt       time.Time     // run_at; default now. At most one of Delay, RunAt and Parked may be set
	Parked      bool          // run_at is infinity: the task waits until somebody changes that
	LockKey     string        // what must not overlap; default the task itself
	LimitName   string        // the limit under a slot of which the task runs; default none
	UniqueKey   string        // of which only one pending or running task may exist; default none
	MaxAttempts int           // default 5
	Timeout     time.Duration // of one attempt, to a microsecond; default none
	KeepFor     time.Duration // how long the finished task is kept, to a microsecond; default as the configuration says

	// Traceparent is the span that enqueues the task, as the HTTP header of that name has it
	// (W3C Trace Context); default none.
	Traceparent string
}

// statement returns the INSERT that adds the task, as onejob.enqueue does it. It has only the
// columns that are given: the defaults are those of the table. It returns no row if a
// pending or running task has the same unique key. Without such a key it fails if it adds no row,
// with an error that leftOut knows.
//
// All names are qualified, because it also runs on connections of other programs, with any
// search_path.
func (n NewTask) statement() (sql string, args []any, err error) {
	var columns, values strings.Builder
	columns.WriteString("kind")
	values.WriteString("$1")
	args = append(args, n.Kind)
	add := func(given bool, name, value string, arg any) {
		if given {
			args = append(args, arg)
			columns.WriteString(", " + name)
			fmt.Fprintf(&values, ", "+value, len(args))
		}
	}
	when := 0
	for _, given := range []bool{n.Delay != 0, !n.RunAt.IsZero(), n.Parked} {
		if given {
			when++
		}
	}
	if when > 1 {
		return "", nil, errors.New("at most one of Delay, RunAt and Parked may be set")
	}
	if y := n.RunAt.UTC().Year(); y < 1 || y > 9999 { // pgx would send a wrong time of a year that Postgres does not have
		return "", nil, fmt.Errorf("the RunAt is not of a year from 1 to 9999, but of %d", y)
	}
	if n.Delay < 0 {
		return "", nil, fmt.Errorf("the Delay is negative: %v", n.Delay)
	}
	// The table's own bounds are narrower. pgx ends the connection when it cannot encode a value in the
	// middle of a batch.
	if n.Priority != int(int16(n.Priority)) {
		return "", nil, fmt.Errorf("the Priority must be from -1000 to 1000, not %d", n.Priority)
	}
	if n.MaxAttempts != int(int32(n.MaxAttempts)) {
		return "", nil, fmt.Errorf("the MaxAttempts of %d are more than a column holds", n.MaxAttempts)
	}
	switch payload := n.Payload.(type) {
	case nil:
	case json.RawMessage:
		add(len(payload) > 0, "payload", "$%d", string(payload))
	case []byte: // json.Marshal would write base64, of what is JSON already
		return "", nil, errors.New("the Payload is a []byte, which JSON has as base64: use json.RawMessage if it is JSON")
	default:
		text, err := json.Marshal(payload)
		if err != nil {
			return "", nil, fmt.Errorf("encode the payload: %w", err)
		}
		add(true, "payload", "$%d", string(text))
	}
	add(n.Queue != "", "queue", "$%d", n.Queue)
	add(n.Priority != 0, "priority", "$%d", n.Priority)
	switch {
	case n.Parked:
		add(true, "run_at", "$%d", "infinity")
	case !n.RunAt.IsZero():
		add(true, "run_at", "$%d", n.RunAt)
	default:
		add(n.Delay != 0, "run_at", "pg_catalog.now() OPERATOR(pg_catalog.+) $%d::pg_catalog.interval", interval(n.Delay))
	}
	add(n.LockKey != "", "lock_key", "$%d", n.LockKey)
	add(n.LimitName != "", "limit_name", "$%d", n.LimitName)
	add(n.UniqueKey != "", "unique_key", "$%d", n.UniqueKey)
	add(n.MaxAttempts != 0, "max_attempts", "$%d", n.MaxAttempts)
	add(n.Timeout != 0, "timeout", "$%d", interval(n.Timeout))
	add(n.KeepFor != 0, "keep_for", "$%d", interval(n.KeepFor))
	add(n.Traceparent != "", "traceparent", "$%d", n.Traceparent)
	insert := "INSERT INTO onejob.tasks (" + columns.String() + ") VALUES (" + values.String() + ")"
	if n.UniqueKey == "" {
		return "WITH made AS (" + insert + " RETURNING id)" + `
SELECT CASE WHEN EXISTS (SELECT FROM made) THEN (SELECT id FROM made)
            ELSE ('` + errLeftOut.Error() + `' OPERATOR(pg_catalog.||) (SELECT pg_catalog.count(*)::pg_catalog.text FROM made))::pg_catalog.int8 END`, args, nil
	}
	return insert + `
    ON CONFLICT (unique_key) WHERE unique_key IS NOT NULL AND status OPERATOR(pg_catalog.=) ANY (ARRAY['pending'::pg_catalog.text, 'running'::pg_catalog.text]) DO NOTHING
RETURNING id`, args, nil
}

// interval returns d as Postgres reads it.
func interval(d time.Duration) string {
	return fmt.Sprintf("%d hours %d seconds %d microseconds", d/time.Hour, d%time.Hour/time.Second, d%time.Second/time.Microsecond)
}

// A DB runs statements: a *pgxpool.Pool, a *pgx.Conn or a pgx.Tx.
type DB interface {
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// Enqueue adds tasks in one round trip, all or none, and returns their ids in the same
// order. An id is 0 if the task was not added because a pending or running one has the
// same unique key. That a trigger or rule leaves out a task without a unique key is an error.
func Enqueue(ctx context.Context, db DB, list ...NewTask) ([]int64, error) {
	if len(list) == 0 {
		return nil, nil
	}
	ids := make([]int64, len(list))
	var batch pgx.Batch // one implicit transaction, unless db has begun one
	for i, n := range list {
		sql, args, err := n.statement()
		if err != nil {
			return nil, notEnqueued(i, len(list), err)
		}
		batch.Queue(sql, args...)
	}
	results := db.SendBatch(ctx, &batch)
	for i := range list {
		if err := results.QueryRow().Scan(&ids[i]); err != nil && !errors.Is(err, pgx.ErrNoRows) {
			_ = results.Close() // with the same error
			return nil, notEnqueued(i, len(list), leftOut(err))
		}
	}
	if err := results.Close(); err != nil {
		return nil, fmt.Errorf("enqueue: %w", err)
	}
	return ids, nil
}

func notEnqueued(i, n int, err error) error {
	if n == 1 {
		return fmt.Errorf("enqueue: %w", err)
	}
	return fmt.Errorf("enqueue task %d of %d: %w", i+1, n, err)
}

// Enqueue adds a task and returns its id, or 0 if a pending or running task has
// the same unique key. That a trigger or rule leaves out a task without one is an error.
func (s *Store) Enqueue(ctx context.Context, n NewTask) (int64, error) {
	sql, args, err := n.statement()
	if err != nil {
		return 0, notEnqueued(0, 1, err)
	}
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	var id int64
	if err := s.pool.QueryRow(ctx, sql, args...).Scan(&id); err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return 0, notEnqueued(0, 1, leftOut(err))
	}
	return id, nil
}
