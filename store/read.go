package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"onejob/boottime"
	"onejob/internal/pgerror"
	"onejob/tasks"
)

// maxPayload is the longest payload that runs, in bytes of its text. A row with a
// longer one is from before the table refused them.
const maxPayload = 4 << 20

// Payloads are read in portions of so many bytes as they are stored, or of one row.
// The first portion comes with the claim; most are smaller.
const (
	maxFirstBytes = 256 << 10
	maxReadBytes  = 1 << 20
)

// readClaimedSQL reads the rows that the claim in the same round trip has left in
// onejob.claimed, the most urgent first, as many as @bytes allow, and readSQL those of @ids.
// Sizes are those of the stored values, which cost nothing to know.
//
// They are two statements because the planner evaluates current_setting for its estimates,
// whether the executor would or not. A connection that has not claimed, or has forgotten what,
// has no such array.
const (
	readClaimedSQL = readBegin + `current_setting('onejob.claimed')::bigint[]` + readEnd
	readSQL        = readBegin + `@ids::bigint[]` + readEnd

	readBegin = claimComment + `
SELECT t.id, t.fence, t.kind, t.queue, t.priority, coalesce(t.lock_key, t.id::text), t.lock_key IS NOT NULL, t.attempt, t.max_attempts, t.crashes, t.stalls, t.timeout, t.run_at, t.created_at,
       t.started_at, coalesce(t.traceparent, ''), octet_length(b.body), CASE WHEN octet_length(b.body) <= @max_payload THEN b.body END
  FROM (SELECT id, fence, kind, queue, priority, lock_key, attempt, max_attempts, crashes, stalls, timeout, run_at, created_at, started_at, traceparent, payload,
               sum(pg_column_size(payload)) OVER (ORDER BY priority DESC, run_at, id ROWS UNBOUNDED PRECEDING) AS bytes
          FROM onejob.tasks
         WHERE id = ANY (`
	readEnd = `)
           AND CASE WHEN status = 'running' THEN session = @session END) t
 CROSS JOIN LATERAL (SELECT t.payload::text AS body OFFSET 0) b
 WHERE t.bytes <= @bytes`
)

func readArguments(session string, bytes int) namedArgs {
	return namedArgs{"session": session, "bytes": bytes, "max_payload": maxPayload}
}

// claimed is a task as it was read, and where it stood in the order of claims.
type claimed struct {
	*tasks.Task
	length int // of the payload's text
}

// scanClaimed scans values of which none can be out of range: what a row holds is
// brought within what Go can carry, and an infinite time is the zero time. All rows are
// scanned into the same variables.
func scanClaimed(c tasks.Claim) pgx.RowToFunc[claimed] {
	var t tasks.Task
	var kind, queue repeated
	var length int
	var timeout pgtype.Interval
	var runAt, createdAt, startedAt pgtype.Timestamptz
	into := []any{&t.ID, &t.Fence, &kind, &queue, &t.Priority, &t.LockKey, &t.LockShared, &t.Attempt, &t.MaxAttempts, &t.Crashes, &t.Stalls,
		&timeout, &runAt, &createdAt, &startedAt, &t.Traceparent, &length, (*[]byte)(&t.Payload)}
	return func(row pgx.CollectableRow) (claimed, error) {
		t = tasks.Task{Session: c.Session, Replica: c.Replica, Server: c.Server, HeardAt: boottime.Now()}
		err := row.Scan(into...)
		t.Kind, t.Queue = string(kind), string(queue)
		t.Timeout, t.RunAt, t.CreatedAt, t.StartedAt = duration(timeout), runAt.Time, createdAt.Time, startedAt.Time
		own := t
		return claimed{&own, length}, err
	}
}

// duration returns an interval as Postgres' extract(epoch ...) reckons it: a year
// has 365.25 days, a month 30. What Go cannot hold is the longest that it can, and below zero none.
func duration(i pgtype.Interval) time.Duration {
	days := float64(i.Months/12)*365.25 + float64(i.Months%12)*30 + float64(i.Days)
	micros := days*24*3600*1e6 + float64(i.Microseconds)
	if micros >= float64(math.MaxInt64/1000) {
		return math.MaxInt64
	}
	return time.Duration(max(micros, 0)) * time.Microsecond
}

// readRest reads what did not come along with the claim, in portions, and requeues
// what there is no room for.
//
// After an error that is about no row it neither requeues nor fails anything: each statement would
// wait for Postgres as long as the one before, and the next claim, and a stop of the replica, wait
// for this one. What was not read stays the session's own, and Held returns it.
func (s *Store) readRest(ctx context.Context, c tasks.Claim, r round) (tasks.Claimed, error) {
	out := tasks.Claimed{More: r.chosen.more}
	list, bytes := r.read, 0
	for _, t := range list {
		bytes += t.length
	}
	rest := r.unread
	var err error
	for len(rest) > 0 && err == nil && (c.MaxBytes <= 0 || bytes < c.MaxBytes) {
		n := fitting(rest, func(t taken) int { return t.size }, maxReadBytes)
		var read []claimed
		read, err = s.readPortion(ctx, c, rest[:n], &out)
		for _, t := range read {
			bytes += t.length
		}
		list = append(list, read...)
		rest = rest[n:]
	}
	slices.SortFunc(list, func(a, b claimed) int {
		return cmp.Or(cmp.Compare(b.Priority, a.Priority), a.RunAt.Compare(b.RunAt), cmp.Compare(a.ID, b.ID))
	})
	for _, t := range list {
		switch {
		case t.Payload != nil:
			out.Tasks = append(out.Tasks, t.Task)
		case err == nil:
			err = s.failUnread(ctx, t.ID, t.Fence, c.Session, fmt.Sprintf("the payload has %d bytes, of at most %d", t.length, maxPayload), &out)
		}
	}
	if len(rest) > 0 {
		out.More = true
	}
	if err == nil && len(rest) > 0 {
		err = s.requeueUnread(ctx, c.Session, rest)
	}
	return out, err
}

// requeueUnread requeues claimed rows that there is no room for, in one statement. Those that another
// transaction has locked are tried again for half a second, and those that lately kept Postgres
// waiting (see apart) are requeued one by one. All of it may take as long as one statement.
func (s *Store) requeueUnread(ctx context.Context, session string, rows []taken) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.timeout)
	defer cancel()
	var left, single []*requeue
	for _, t := range rows {
		r := &requeue{id: t.id, fence: t.fence, session: session, ctx: ctx}
		if s.apart.has(t.id) {
			single = append(single, r)
		} else {
			left = append(left, r)
		}
	}
	var failures []error
	locked := untilUnlocked(func() (err error) {
		s.commitReturns(slices.Clone(left)) // it removes elements of its list
		again := left[:0]
		for _, r := range left {
			switch {
			case errors.Is(r.err, errLocked):
				err, r.err = r.err, nil
				again = append(again, r)
			case r.err != nil:
				failures = append(failures, r.err)
			}
		}
		left = again
		return err
	})
	if locked != nil {
		failures = append(failures, locked)
	}
	for _, r := range single {
		if err := s.Requeue(ctx, &tasks.Task{ID: r.id, Fence: r.fence, Session: r.session}, 0); err != nil {
			failures = append(failures, err)
		}
	}
	if len(failures) == 0 {
		return nil
	}
	n := len(failures)
	if locked != nil {
		n += len(left) - 1
	}
	return fmt.Errorf("requeue %d of %d claimed tasks for whose payloads there is no room: %w", n, len(rows), failures[0])
}

// readPortion reads rows together or, if Postgres cannot read one of them, each on
// its own. A row that is not the session's own any more is left out.
func (s *Store) readPortion(ctx context.Context, c tasks.Claim, rows []taken, out *tasks.Claimed) ([]claimed, error) {
	ids := make([]int64, len(rows))
	for i, t := range rows {
		ids[i] = t.id
	}
	read, err := s.read(ctx, c, ids)
	var pg *pgconn.PgError
	switch {
	case err == nil:
		return read, nil
	case !aboutARow(err), relayed(err), pgerror.Is(err, lockTimeout): // of the role's: nothing that is read has a trigger
		return nil, fmt.Errorf("read claimed tasks: %w", err)
	case len(rows) == 1:
		if _, other := s.read(ctx, c, []int64{}); other != nil { // it is about no row
			return nil, fmt.Errorf("read claimed tasks: %w", other)
		}
		errors.As(err, &pg)
		return nil, s.failUnread(ctx, rows[0].id, rows[0].fence, c.Session, "the payload cannot be read: "+words(pg), out)
	}
	var list []claimed
	for _, t := range rows {
		read, err := s.readPortion(ctx, c, []taken{t}, out)
		if err != nil {
			return list, err
		}
		list = append(list, read...)
	}
	return list, nil
}

func (s *Store) read(ctx context.Context, c tasks.Claim, ids []int64) ([]claimed, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	arguments := readArguments(c.Session, math.MaxInt32)
	arguments["ids"] = ids
	return query(ctx, s.pool, scanClaimed(c), readSQL, arguments)
}

// failUnread fails a claimed task that cannot be handed to anybody. It returns an error that is about
// no row, after which others cannot be failed either.
func (s *Store) failUnread(ctx context.Context, id, fence int64, session, why string, out *tasks.Claimed) error {
	err := s.Complete(context.WithoutCancel(ctx), tasks.Completion{ID: id, Fence: fence, Session: session, Outcome: tasks.Failed, Next: tasks.StatusFailed, Error: why})
	out.Refused = append(out.Refused, tasks.RowError{ID: id, Failed: err == nil, Err: errors.New(why)})
	if errors.Is(err, tasks.ErrRefused) || errors.Is(err, tasks.ErrUnwritable) || errors.Is(err, errLocked) || waitedInVain(err) || relayed(err) {
		return nil
	}
	return err
}

func without(all []taken, read []claimed) []taken {
	known := make(map[int64]bool, len(read))
	for _, t := range read {
		known[t.ID] = true
	}
	return slices.DeleteFunc(all, func(t taken) bool { return known[t.id] })
}
