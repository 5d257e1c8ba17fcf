package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"onejob/boottime"
	"onejob/internal/pgerror"
	"onejob/internal/pgjson"
	"onejob/tasks"
)

// completion is one caller's completion on its way through the group.
type completion struct {
	tasks.Completion
	ctx context.Context // the caller's
	err error
}

// gone reports whether the caller's context has ended, which is the answer then.
func (e *completion) gone() bool {
	if e.ctx.Err() == nil {
		return false
	}
	e.err = fmt.Errorf("complete task %d: %w", e.ID, context.Cause(e.ctx))
	return true
}

// An errLocked completion was not written, because somebody else's transaction has
// the row: a cancel, most often.
var errLocked = errors.New("the row is locked by another transaction")

// completeSQL writes completions, each only if its fence and session are the row's, and returns
// the fences that it accepted.
//
// In a batch it skips rows that are locked. So it never waits with rows of its
// own locked, nobody's long UPDATE holds up the others of the batch, and no
// deadlock is possible, in whatever order other people lock.
//
// A change of the row that was committed after the statement's snapshot moves the row:
// before has the place of the new version, where the snapshot has none. Then the
// completion is not accepted, and is asked for again.
const (
	completeSQL     = completeBegin + " SKIP LOCKED" + completeEnd
	completeWaitSQL = completeBegin + completeEnd

	completeBegin = `
WITH given AS (
    SELECT *
      FROM unnest(@ids::bigint[], @fences::bigint[], @sessions::uuid[], @outcomes::text[], @nexts::text[], @delays::bigint[], @back::bool[], @stalled::bool[],
                  @begun::bigint[], @stopped::timestamptz[], @errors::text[], @codes::int[], @results::text[], @outputs::text[])
        AS g(id, fence, by, outcome, next, delay, back, stalled, begun, stopped, error, code, result, output)
), before AS (
    SELECT id, ctid AS tuple, fence, attempt, coalesce(lock_key, id::text) AS lock_key, replica, session, started_at
      FROM onejob.tasks
     WHERE id = ANY (@ids)
       AND CASE WHEN status = 'running' THEN fence = ANY (@fences) AND session = ANY (@sessions) END
       FOR NO KEY UPDATE`

	completeEnd = `
), accepted AS (
    UPDATE onejob.tasks t
       SET status      = CASE WHEN g.next = 'pending' AND t.cancel_requested THEN 'cancelled' ELSE g.next END,
           finished_at = CASE WHEN g.next <> 'pending' OR t.cancel_requested THEN statement_timestamp() END,
           run_at      = CASE WHEN g.next = 'pending' AND g.delay > 0
                              THEN statement_timestamp() + g.delay * interval '1 microsecond' ELSE t.run_at END,
           attempt     = CASE WHEN g.back THEN greatest(t.attempt - 1, 0) ELSE t.attempt END,
           stalls      = least(t.stalls + g.stalled::int, 1000000),
           error       = nullif(g.error, ''),
           result      = g.result::jsonb,
           session     = NULL,
           replica     = NULL
      FROM given g
      JOIN before b ON b.id = g.id AND b.fence = g.fence AND b.session = g.by
     WHERE t.id = g.id
       AND t.ctid = ANY (ARRAY(SELECT tuple FROM before))
 RETURNING t.fence
), history AS (
    INSERT INTO onejob.attempts (fence, task_id, attempt, lock_key, replica, session, started_at, begun_at, stopped_at, finished_at, outcome, error, exit_code, output)
    SELECT b.fence, b.id, b.attempt, b.lock_key, b.replica, b.session, b.started_at,
           statement_timestamp() - g.begun * interval '1 microsecond',
           greatest(coalesce(g.stopped, statement_timestamp()), statement_timestamp() - g.begun * interval '1 microsecond'), statement_timestamp(),
           g.outcome, nullif(g.error, ''), g.code, nullif(g.output, '')
      FROM accepted a
      JOIN before b ON b.fence = a.fence
      JOIN given g ON g.id = b.id AND g.fence = b.fence AND g.by = b.session
        ON CONFLICT (task_id, fence) DO NOTHING
)
SELECT fence FROM accepted`
)

// hashJoins comes before completeSQL. Of a list that it is given Postgres expects
// ten elements, whatever it has, and for ten it would look up each row by its id
// and in the list of all ids: for 512, that took as long as everything else. And while the
// table is small it would rather read all of an index than ten rows by their places; the
// rows that are named by their ids it finds by a bitmap.
const hashJoins = indexesOnly + `, pg_catalog.set_config('enable_nestloop', 'off', true), pg_catalog.set_config('enable_indexscan', 'off', true)`

// settleSQL says what to think of the completions that completeSQL did not accept.
// It is a statement of its own because it needs a snapshot of its own: what made
// completeSQL wait, or skip a row, is seen only by a later one.
//
// A row that is still running under the fence was locked. A caller whose
// connection broke cannot know whether its completion was committed, and asks again:
// so a completion that finds its own fence in the history, with its own outcome, was
// accepted. Only the holder of a fence writes that outcome under it; 'crashed',
// which others write, and 'refused' are nobody's own.
//
// That a completion was committed does not mean that a synchronous standby has it: Postgres ends the wait
// for one when the statement is cancelled, as it is when its answer does not come in time. So what is
// called accepted here leaves a message in the log of Postgres: the commit of that waits for the standby
// anew, and for all that was committed before.
//
// All others are refused. That changes nothing; but an attempt that has no row in
// the history gets one, with what is known: the rest of it is NULL once the task
// has been claimed again. It gets none if the task is gone: with the task its attempts
// were deleted, and nobody would delete this one. If others have taken the task over, the
// row that they wrote is replaced by one that also says when the work stopped. And if they
// have called its replica dead, it lives: a crash that was charged is given back, with the
// attempt (charged is NULL if a version wrote that did not note it).
const settleSQL = `
WITH given AS (
    SELECT id, fence, by, outcome, stalled, statement_timestamp() - begun * interval '1 microsecond' AS begun_at, stopped AS stopped_at, error, code, output,
           greatest((SELECT fences_from FROM onejob.cluster LIMIT 1), 0) + pg_sequence_last_value('onejob.fences'::regclass) AS last_fence
      FROM unnest(@ids::bigint[], @fences::bigint[], @sessions::uuid[], @outcomes::text[], @stalled::bool[], @begun::bigint[], @stopped::timestamptz[],
                  @errors::text[], @codes::int[], @outputs::text[])
        AS g(id, fence, by, outcome, stalled, begun, stopped, error, code, output)
), verdicts AS (
    SELECT g.*, t.id IS NOT NULL AS known, t.fence = g.fence AND coalesce(t.session, g.by) = g.by AS same, t.attempt, t.lock_key, t.replica, t.session, t.started_at,
           CASE WHEN t.fence = g.fence AND t.session = g.by AND t.status = 'running'                              THEN 'locked'
                WHEN a.outcome = g.outcome AND a.session = g.by AND g.outcome NOT IN ('crashed', 'refused') THEN 'accepted'
                                                                                                           ELSE 'refused' END AS verdict
      FROM given g
      LEFT JOIN LATERAL (SELECT * FROM onejob.tasks    WHERE id    = g.id    LIMIT 1) t ON true
      LEFT JOIN LATERAL (SELECT * FROM onejob.attempts WHERE task_id = g.id AND fence = g.fence LIMIT 1) a ON true
), history AS (
    INSERT INTO onejob.attempts (fence, task_id, attempt, lock_key, replica, session, started_at, begun_at, stopped_at, stopped_fence, finished_at, outcome, error, exit_code, output)
    SELECT fence, id, CASE WHEN same THEN attempt END, coalesce(lock_key, id::text),
           CASE WHEN same THEN replica END, CASE WHEN same THEN session END, CASE WHEN same THEN started_at END,
           begun_at, stopped_at, last_fence, statement_timestamp(), 'refused', concat_ws(': ', format('it ended as %s, under a fence that was not the row''s any more', outcome), nullif(error, '')),
           code, nullif(output, '')
      FROM verdicts
     WHERE verdict = 'refused'
       AND known
     ORDER BY fence
        ON CONFLICT (task_id, fence) DO NOTHING
), wrong AS (
    DELETE FROM onejob.attempts a
     USING verdicts v
     WHERE v.verdict <> 'locked'
       AND a.task_id = v.id
       AND a.fence = v.fence
       AND (a.outcome = 'crashed' AND v.verdict = 'refused' OR a.outcome = 'lease_lost' AND a.stopped_at IS NULL)
 RETURNING a.fence, a.task_id, a.attempt, a.lock_key, a.replica, a.session, a.started_at, a.finished_at, a.outcome, a.charged, a.error, v.begun_at, v.stopped_at, v.last_fence, v.stalled
), alive AS (
    INSERT INTO onejob.attempts (fence, task_id, attempt, lock_key, replica, session, started_at, begun_at, stopped_at, stopped_fence, finished_at, outcome, error)
    SELECT fence, task_id, attempt, lock_key, replica, session, started_at, begun_at, stopped_at, last_fence, finished_at, 'lease_lost',
           CASE WHEN outcome = 'crashed' THEN format('replica %s was silent for long, and lived', replica) ELSE error END
      FROM wrong
), blamed AS (
    SELECT id
      FROM onejob.tasks
     WHERE id = ANY (ARRAY(SELECT task_id FROM wrong WHERE outcome = 'crashed' AND charged IS NOT FALSE))
       AND CASE WHEN status IN ('pending', 'running') THEN crashes > 0 END
       FOR NO KEY UPDATE SKIP LOCKED
), pardoned AS (
    UPDATE onejob.tasks t
       SET crashes = crashes - 1,
           attempt = greatest(t.attempt - 1, CASE WHEN t.status = 'running' THEN 1 ELSE 0 END),
           stalls  = least(t.stalls + w.stalled::int, 1000000)
      FROM wrong w
     WHERE t.id = w.task_id
       AND w.outcome = 'crashed'
       AND w.charged IS NOT FALSE
       AND t.id = ANY (ARRAY(SELECT id FROM blamed))
)
SELECT fence, verdict
  FROM verdicts
 WHERE verdict <> 'accepted'
    OR pg_catalog.pg_logical_emit_message(true, 'onejob', '') IS NOT NULL`

// Complete makes a completion durable. It returns tasks.ErrRefused if the fence
// has been superseded, and any other error if the completion may or may not have
// been written: the caller may ask again, and will be told the truth.
//
// A result that Postgres cannot keep is no reason to ask again: the attempt, and
// with it the task, fails with an error that says so, and Complete returns a
// *tasks.ResultError. It returns tasks.ErrUnwritable if Postgres refuses the row
// and the result is not why.
//
// When ctx ends, it returns ctx's cause soon. Completions of other callers are written
// together with this one; theirs are tried again then.
func (s *Store) Complete(ctx context.Context, e tasks.Completion) error {
	if err := s.endOwn(ctx, e.ID, e.Fence); err != nil {
		return fmt.Errorf("complete task %d: %w", e.ID, err)
	}
	return untilUnlocked(func() error {
		v := &completion{Completion: e, ctx: ctx}
		if s.apart.has(e.ID) {
			s.apart.do(func() { s.commitAll([]*completion{v}) })
		} else {
			s.completions.Do(v)
		}
		if v.err == nil && v.Outcome != e.Outcome {
			return &tasks.ResultError{Written: v.Completion}
		}
		return v.err
	})
}

// untilUnlocked calls f until it does not find the row locked, for half a second. The
// others in the group need not wait for it.
func untilUnlocked(f func() error) error {
	for wait := 2 * time.Millisecond; ; wait *= 2 {
		err := f()
		if !errors.Is(err, errLocked) || wait > 256*time.Millisecond {
			return err
		}
		time.Sleep(wait)
	}
}

// maxResult is the longest result that is kept: one statement carries those of
// several who end together, and Postgres takes no more than 1 GiB.
const maxResult = tasks.MaxResult

// maxCompletions and maxCompletionBytes are how many completions one statement carries, and
// how much of their results and outputs unless it is one alone.
const (
	maxCompletions     = 512
	maxCompletionBytes = 32 << 20
)

// commitAll writes completions, in as few statements as they fit into.
func (s *Store) commitAll(completions []*completion) {
	for _, e := range completions {
		if why := pgjson.TooLong(e.Result, maxResult); why != "" {
			e.Completion = withoutResult(e.Completion, why)
		}
	}
	for len(completions) > 0 {
		n := fitting(completions, (*completion).size, maxCompletionBytes)
		s.writeCompletions(completions[:n])
		completions = completions[n:]
	}
}

// fitting returns how many of a list go into one statement of so many bytes, at least one.
func fitting[T any](list []T, size func(T) int, most int) int {
	sum := 0
	for i, x := range list {
		if sum += size(x); i > 0 && sum > most {
			return i
		}
	}
	return len(list)
}

// size is about how many bytes a completion brings to Postgres, before they are escaped.
func (e *completion) size() int { return len(e.Result) + len(e.Output) + len(e.Error) }

// smallFirst divides several completions: the small ones are written without the rest. There is at least
// one of each.
func smallFirst(completions []*completion) (small, rest []*completion) {
	sorted := slices.SortedStableFunc(slices.Values(completions), func(a, b *completion) int { return a.size() - b.size() })
	n := slices.IndexFunc(sorted, func(e *completion) bool { return e.size() > smallCompletions })
	if n <= 0 {
		n = len(sorted) / 2
	}
	return sorted[:n], sorted[n:]
}

// A statement that carries much is given a second more for each secondBytes, as for a slow network.
// Completions of more than smallCompletions bytes together may be too much even so: then they are
// written in parts.
const (
	secondBytes      = 1 << 20
	smallCompletions = 256 << 10
)

func (s *Store) writeCompletions(completions []*completion) {
	completions = slices.DeleteFunc(completions, (*completion).gone)
	if len(completions) == 0 {
		return
	}
	size := 0
	for _, e := range completions {
		size += e.size()
	}
	more := time.Duration(size/secondBytes) * time.Second
	ctx, cancel := context.WithTimeout(completions[0].ctx, s.timeout+more)
	defer cancel()
	err := s.completeOrSettle(ctx, completions, more)
	if err == nil {
		return
	}
	var pg *pgconn.PgError
	switch e := completions[0]; {
	case e.gone():
		s.writeCompletions(completions)
		return
	case ctx.Err() != nil && size > smallCompletions && s.canComplete(e.ctx) == nil: // Postgres answers what is small
		if len(completions) > 1 {
			small, rest := smallFirst(completions)
			s.writeCompletions(small)
			s.writeCompletions(rest)
			return
		}
		s.apart.add(e.ID) // it keeps no others waiting
	case !mayBeARow(err) || !errors.As(err, &pg):
	case (waitedInVain(err) || relayed(err)) && s.canComplete(ctx) != nil: // it is about all of them
	case len(completions) > 1:
		// One of them is to blame; it must not take the others along.
		for _, e := range completions {
			s.writeCompletions([]*completion{e})
		}
		return
	case s.canComplete(ctx) != nil: // it is about no row
	case pg.Code == untranslatable && ascii(e.Error)+ascii(e.Output) != e.Error+e.Output && !s.isUTF8(ctx):
		e.Error, e.Output = ascii(e.Error), ascii(e.Output)
		s.writeCompletions(completions)
		return
	case waitedInVain(err): // for a trigger; somebody lets go of the lock in the end
		s.writes.inVain(1)
		s.apart.add(e.ID)
	case relayed(err): // the other server is back in the end
		s.apart.add(e.ID)
	case unfit(err) && e.Result != nil && s.refusesResult(ctx, e):
		e.Completion = withoutResult(e.Completion, pg.Message)
		s.writeCompletions(completions)
		return
	default:
		s.apart.add(e.ID)
		err = fmt.Errorf("%w: %w", tasks.ErrUnwritable, err)
	}
	for _, e := range completions {
		e.err = fmt.Errorf("complete task %d: %w", e.ID, err)
	}
}

// refusesResult reports whether Postgres would accept the completion without its result, and still
// refuses it with it: what refused it before may be over, and then the result is not to blame. It looks
// at both in one transaction, which sees the database as it was at one moment and is rolled back.
func (s *Store) refusesResult(ctx context.Context, e *completion) bool {
	rolledBack := errors.New("rolled back")
	blamed := false
	err := pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
		try := func(c tasks.Completion) error {
			return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
				rest, err := complete(ctx, tx, completeSQL, []*completion{{Completion: c, ctx: ctx}}, s.writes.bounds(1, s.timeout))
				if err != nil || len(rest) > 0 {
					return err
				}
				if _, err := tx.Exec(ctx, `SET CONSTRAINTS ALL IMMEDIATE`); err != nil {
					return err
				}
				return rolledBack
			})
		}
		with, bare := e.Completion, e.Completion
		bare.Result = nil
		blamed = errors.Is(try(bare), rolledBack) && unfit(try(with))
		return rolledBack
	})
	return blamed && errors.Is(err, rolledBack)
}

// canComplete returns why no completion at all can be written, if so.
func (s *Store) canComplete(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	_, err := complete(ctx, s.pool, completeSQL, nil, s.writes.bounds(0, s.timeout))
	return err
}

// untranslatable is the SQLSTATE of a character that the encoding of the database, which is
// not UTF8 then, does not have.
const untranslatable = "22P05"

// isUTF8 reports whether the database is known to have every character.
func (s *Store) isUTF8(ctx context.Context) bool {
	var encoding string
	err := s.pool.QueryRow(ctx, `SELECT pg_catalog.current_setting('server_encoding')`).Scan(&encoding)
	return err != nil || encoding == "UTF8"
}

// ascii returns text that every encoding has.
func ascii(s string) string {
	return strings.Map(func(r rune) rune {
		if r >= utf8.RuneSelf {
			return '?'
		}
		return r
	}, s)
}

// withoutResult is how a completion is written whose result cannot be.
func withoutResult(e tasks.Completion, why string) tasks.Completion {
	e.Outcome, e.Next, e.Delay, e.Requeue, e.Result = tasks.Failed, tasks.StatusFailed, 0, false, nil
	e.Error = "the result cannot be stored: " + why
	return e
}

func (s *Store) completeOrSettle(ctx context.Context, completions []*completion, more time.Duration) error {
	bounds := s.writes.bounds(len(completions), s.timeout+rowStatementPart*more) // it may begin before all of it has arrived
	rest, err := complete(ctx, s.pool, completeSQL, completions, bounds)
	if err != nil || len(rest) == 0 {
		return err
	}
	return settle(ctx, s.pool, rest, bounds)
}

// complete writes completions, all or none of those that are accepted, and returns
// the others. It waits for triggers as bounds say (see patience), without bounds for as long as
// they like.
func complete(ctx context.Context, db DB, sql string, completions []*completion, bounds []any) (rest []*completion, err error) {
	first := hashJoins
	if bounds != nil {
		first = hashJoins + bounded
	}
	fences, err := queryAfter(ctx, db, rowTo[int64](), first, bounds, sql, arguments(completions))
	if err != nil {
		return nil, err
	}
	accepted := make(map[int64]bool, len(fences))
	for _, f := range fences {
		accepted[f] = true
	}
	for _, e := range completions {
		if !accepted[e.Fence] {
			rest = append(rest, e)
		}
	}
	return rest, nil
}

// settle answers completions that complete did not accept.
func settle(ctx context.Context, db DB, completions []*completion, bounds []any) error {
	type answer struct {
		Fence  int64
		Answer string
	}
	answers, err := queryAfter(ctx, db, pgx.RowToStructByPos[answer], boundedWrites, bounds, settleSQL, arguments(completions))
	if err != nil {
		return err
	}
	byFence := make(map[int64]string, len(answers))
	for _, a := range answers {
		byFence[a.Fence] = a.Answer
	}
	for _, e := range completions {
		switch byFence[e.Fence] {
		case "accepted":
		case "locked":
			e.err = fmt.Errorf("complete task %d: %w", e.ID, errLocked)
		default:
			e.err = tasks.ErrRefused
		}
	}
	return nil
}

func arguments(completions []*completion) namedArgs {
	n, now := len(completions), boottime.Now()
	var (
		ids, fences, delays, begun = make(column[pgtype.Int8], n), make(column[pgtype.Int8], n), make(column[pgtype.Int8], n), make(column[pgtype.Int8], n)
		outcomes, nexts, results   = make(column[pgtype.Text], n), make(column[pgtype.Text], n), make(column[pgtype.Text], n)
		errs, outputs              = make(column[pgtype.Text], n), make(column[pgtype.Text], n)
		back, stalled              = make(column[pgtype.Bool], n), make(column[pgtype.Bool], n)
		sessions                   = make(column[pgtype.UUID], n)
		codes                      = make(column[pgtype.Int4], n)
		stopped                    = make(column[pgtype.Timestamptz], n)
	)
	for i, e := range completions {
		ids[i], fences[i], delays[i] = integer(e.ID), integer(e.Fence), integer(e.Delay.Microseconds())
		outcomes[i], nexts[i] = text(string(e.Outcome)), text(string(e.Next))
		back[i], stalled[i] = pgtype.Bool{Bool: e.Requeue, Valid: true}, pgtype.Bool{Bool: e.Stalled, Valid: true}
		switch {
		case i > 0 && e.Session == completions[i-1].Session:
			sessions[i] = sessions[i-1]
		case sessions[i].Scan(e.Session) != nil:
			sessions[i] = pgtype.UUID{} // nobody's
		}
		errs[i], outputs[i] = text(tasks.Text(e.Error)), text(tasks.Text(e.Output))
		if e.ExitCode != nil {
			codes[i] = pgtype.Int4{Int32: int32(*e.ExitCode), Valid: true}
		}
		if e.Begun != 0 {
			begun[i] = integer(max(0, now.Sub(e.Begun).Microseconds()))
		}
		stopped[i] = pgtype.Timestamptz{Time: e.StoppedAt, Valid: !e.StoppedAt.IsZero()}
		if len(e.Result) > 0 {
			results[i] = text(string(e.Result))
		}
	}
	return namedArgs{
		"ids": ids, "fences": fences, "sessions": sessions, "outcomes": outcomes, "nexts": nexts, "delays": delays, "back": back, "stalled": stalled,
		"begun": begun, "stopped": stopped, "errors": errs, "codes": codes, "results": results, "outputs": outputs,
	}
}

func integer(n int64) pgtype.Int8 { return pgtype.Int8{Int64: n, Valid: true} }
func text(s string) pgtype.Text   { return pgtype.Text{String: s, Valid: true} }

// CompleteWith runs fn in a transaction, and commits its effect together with
// the success of the attempt, under the fence: both are there, or neither is
// (the sql kind). fn's value is kept as the result. The settings onejob.task_id,
// onejob.attempt, onejob.fence and onejob.lock_key are there for fn to read.
//
// It returns tasks.ErrRefused, and leaves no trace of fn, if the fence has been
// superseded. After any other error nothing of fn was kept, except if the
// connection broke during the commit: then a later Complete finds out. When ctx ends,
// or the connection breaks, the statement may go on in Postgres; Complete ends it.
//
// No more than Config.MaxConns of these are at work at a time. If another one has to wait for more than
// a second, or ctx ends before fn is called, the error has a method NotBegun(): nothing was done. If the
// connection breaks after that, the error has a method Broken() int, which returns how often that has
// happened before to the task, since it was last retried. Those are counted by the errors of attempts: one
// that is not used up must have the error as it is, and one that is used up must have it with something before it.
func (s *Store) CompleteWith(ctx context.Context, t *tasks.Task, fn func(ctx context.Context, tx pgx.Tx) (json.RawMessage, error)) error {
	if err := s.statements.enter(ctx); err != nil {
		return fmt.Errorf("begin task %d: %w", t.ID, err)
	}
	defer s.statements.leave()
	e := &completion{Completion: tasks.Completion{ID: t.ID, Fence: t.Fence, Session: t.Session, Outcome: tasks.Succeeded, Next: tasks.StatusSucceeded}, ctx: ctx}
	sent, answered, strangers, repeats := false, false, false, 0
	work := func() error {
		return pgx.BeginFunc(ctx, s.works, func(tx pgx.Tx) error {
			before, err := beginStatement(ctx, tx, t, strangers)
			if err != nil {
				return fmt.Errorf("begin task %d: %w", t.ID, err)
			}
			sent, repeats, e.Begun = true, before.repeats, boottime.Now()
			if e.Result, err = fn(ctx, tx); err != nil {
				conn := tx.Conn().PgConn()
				answered = conn.TxStatus() == 'E' && !conn.IsClosed() // the server waits for a ROLLBACK: whatever the error, the statement has ended
				return err
			}
			if err := endStatement(ctx, tx, before); err != nil {
				return fmt.Errorf("complete task %d: %w", t.ID, err)
			}
			rest, err := complete(ctx, tx, completeWaitSQL, []*completion{e}, nil)
			if err == nil && len(rest) > 0 { // what it waited for may have moved the row, which is locked by now
				rest, err = complete(ctx, tx, completeWaitSQL, rest, nil)
			}
			if err != nil {
				return fmt.Errorf("complete task %d: %w", t.ID, err)
			}
			if len(rest) > 0 {
				return tasks.ErrRefused
			}
			return nil
		})
	}
	err := work()
	if errors.Is(err, errNotAlone) {
		if err = s.makeRoom(ctx, t); err == nil {
			strangers = true // what is there now is none of ours: anybody can hold any advisory lock
			err = work()
		}
	}
	s.works.heal(err)
	ended := answered || hasEnded(err)
	if sent && err != nil && !errors.Is(err, tasks.ErrRefused) && !ended {
		s.unended.Store(t.Fence, t.Session)
	}
	switch {
	case errors.Is(err, tasks.ErrRefused):
		// The refusal stands, whether or not there is a row about it.
		_ = settle(ctx, s.pool, []*completion{e}, s.writes.bounds(1, s.timeout))
	case err != nil && !sent && ctx.Err() != nil:
		err = errNotBegun{fmt.Errorf("begin task %d: %w", t.ID, context.Cause(ctx))}
	case err != nil && sent && ctx.Err() == nil && !ended && !relayed(err) && pgerror.Unavailable(err):
		err = errBroken{err, repeats}
	}
	return err
}

// hasEnded reports whether Postgres says that a statement has ended, with this error. A pooler that
// ends a connection says so as Postgres would, and the statement goes on.
func hasEnded(err error) bool {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pg.SeverityUnlocalized != "FATAL" && !strings.HasPrefix(pg.Code, "08")
}

// requeue is one claim on its way back.
type requeue struct {
	id, fence int64
	session   string
	delay     time.Duration
	ctx       context.Context // the caller's
	err       error
}

// gone reports whether the caller's context has ended, which is the answer then.
func (r *requeue) gone() bool {
	if r.ctx.Err() == nil {
		return false
	}
	r.err = fmt.Errorf("give back task %d: %w", r.id, context.Cause(r.ctx))
	return true
}

// Requeue gives a task back whose attempt never began: it is pending again, not
// before delay has passed, and no attempt was used up. A fence that has been
// superseded means that there is nothing to give back; that is no error. When ctx ends,
// it returns ctx's cause soon, and the task may or may not have been requeued.
func (s *Store) Requeue(ctx context.Context, t *tasks.Task, delay time.Duration) error {
	return untilUnlocked(func() error {
		r := &requeue{id: t.ID, fence: t.Fence, session: t.Session, delay: delay, ctx: ctx}
		if s.apart.has(t.ID) {
			s.apart.do(func() { s.commitReturns([]*requeue{r}) })
		} else {
			s.returns.Do(r)
		}
		return r.err
	})
}

// returnSQL requeues rows, each only if its fence and session are the row's. As in
// completeSQL, locked rows are skipped; it returns those that were there to be requeued
// and were not.
const returnSQL = `
WITH held AS (
    SELECT id, fence
      FROM onejob.tasks
     WHERE id = ANY ($1)
       AND CASE WHEN status = 'running' THEN fence = ANY ($2) AND session = ANY ($4) END
), free AS (
    SELECT id
      FROM onejob.tasks
     WHERE id = ANY ($1)
       AND CASE WHEN status = 'running' THEN fence = ANY ($2) AND session = ANY ($4) END
       FOR NO KEY UPDATE SKIP LOCKED
), done AS (
    UPDATE onejob.tasks t
       SET status      = CASE WHEN t.cancel_requested THEN 'cancelled' ELSE 'pending' END,
           finished_at = CASE WHEN t.cancel_requested THEN now() END,
           run_at      = CASE WHEN g.delay > 0 THEN now() + g.delay * interval '1 microsecond' ELSE t.run_at END,
           attempt     = greatest(t.attempt - 1, 0),
           session     = NULL,
           replica     = NULL,
           started_at  = NULL
      FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::uuid[]) AS g(id, fence, delay, by)
     WHERE t.id = g.id
       AND t.fence = g.fence
       AND t.session = g.by
       AND t.id = ANY (ARRAY(SELECT id FROM free))
 RETURNING t.fence
)
SELECT fence FROM held
EXCEPT
SELECT fence FROM done`

// canRequeue returns why nothing at all can be requeued, if so.
func (s *Store) canRequeue(ctx context.Context) error {
	_, err := s.requeue(ctx, nil)
	return err
}

func (s *Store) commitReturns(list []*requeue) {
	list = slices.DeleteFunc(list, (*requeue).gone)
	if len(list) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(list[0].ctx, s.timeout)
	defer cancel()
	locked, err := s.requeue(ctx, list)
	if err != nil && list[0].gone() {
		s.commitReturns(list)
		return
	}
	switch {
	case (waitedInVain(err) || relayed(err)) && s.canRequeue(ctx) != nil: // it is about all of them
	case mayBeARow(err) && len(list) > 1: // one of them is to blame
		for _, r := range list {
			s.commitReturns([]*requeue{r})
		}
		return
	case waitedInVain(err):
		s.writes.inVain(1)
		s.apart.add(list[0].id)
	case relayed(err):
		s.apart.add(list[0].id)
	}
	for _, r := range list {
		switch {
		case err != nil:
			r.err = fmt.Errorf("give back task %d: %w", r.id, err)
		case slices.Contains(locked, r.fence):
			r.err = fmt.Errorf("give back task %d: %w", r.id, errLocked)
		}
	}
}

// requeue returns the fences of rows that are locked.
func (s *Store) requeue(ctx context.Context, list []*requeue) (locked []int64, err error) {
	ids, fences, delays, sessions := make([]int64, len(list)), make([]int64, len(list)), make([]int64, len(list)), make([]string, len(list))
	for i, r := range list {
		ids[i], fences[i], delays[i], sessions[i] = r.id, r.fence, r.delay.Microseconds(), r.session
	}
	return queryAfter(ctx, s.pool, pgx.RowTo[int64], boundedWrites, s.writes.bounds(len(list), s.timeout), returnSQL, ids, fences, delays, sessions)
}
