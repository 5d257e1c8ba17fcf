package store

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"onejob/tasks"
)

// A claim has three steps, sent to Postgres together and answered in one round
// trip:
//
//	choose  lock the most urgent rows that can be had       \ one transaction,
//	take    make them running, under new fences             / which commits here
//	read    their payloads
//
// What was taken is answered before the commit, which waits for a disk: meanwhile the
// locks' backend can be asked. Postgres does not wait for the client in between.
//
// Nothing that a user wrote is converted or sent before the commit: the answers
// to choose and take are some tens of bytes a row. So no row can make a claim
// fail, and a client that is frozen or cut off while it receives payloads holds no
// lock, no turn and no transaction that others wait for.

// claimComment begins each statement of a claim, so that operators and the chaos run know
// one in pg_stat_activity, which keeps the first 1,024 bytes.
const claimComment = `-- onejob claims`

// turnSQL lets those who claim from the same queues do it one after the other.
//
// It is for speed alone. Side by side, each would lock rows that another has
// claimed since its snapshot was taken, to no avail, and keep them locked from
// those who complete them. One after the other, none sees a row that is not to be
// had, and what becomes due or free meanwhile is claimed together.
const turnSQL = claimComment + `
SELECT ` + settings + `,
       pg_catalog.set_config('lock_timeout', $1, true),
       pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended($2, 20180914::bigint))`

// takeSQL makes the chosen rows this session's own.
const takeSQL = claimComment + `
UPDATE onejob.tasks
   SET status     = 'running',
       attempt    = least(attempt + 1, 1000000),
       fence      = @fences_from::bigint + nextval('onejob.fences'::regclass),
       session    = @session,
       replica    = @replica,
       started_at = clock_timestamp()
 WHERE ctid = ANY (current_setting('onejob.tuples')::tid[])
   AND CASE WHEN status = 'pending' THEN true END
RETURNING id, fence, pg_column_size(payload), lock_key IS NULL AND crashes = 0 AND stalls = 0,
          CASE WHEN lock_key ~ '^-?[0-9]{1,19}$' THEN onejob.reserve_task(lock_key, fence) END`

// forgetSQL leaves the connection as it was: behind a pooler somebody else may be next.
const forgetSQL = `SELECT pg_catalog.set_config('onejob.claimed', '', false)`

// runningKey is the unique index on the lock keys of running rows.
const runningKey = "one_running_task_per_lock_key"

// How long a claim waits for its turn before it goes without. Claims take
// milliseconds, and those of many busy replicas on a slow server a second
// until all had their turn. A longer one is that of a replica that was frozen in
// the middle of it, and after one such wait it is expected to be there still.
const (
	turnTimeout      = 3 * time.Second
	turnTimeoutAgain = 100 * time.Millisecond
)

// searchTime is for how long one call of Claim goes on when it finds nothing at first
// and there is more to look at. Each look is a transaction of its own and has its turn.
const searchTime = 10 * time.Millisecond

// taken is a row that was made running, and not yet read.
type taken struct {
	id, fence int64
	size      int  // of the payload as it is stored, perhaps compressed, in bytes
	alone     bool // it has a lock of its own, and has ended no replica
}

// scanTaken scans each row into the same variable.
func scanTaken() pgx.RowToFunc[taken] {
	var t taken
	into := []any{&t.id, &t.fence, &t.size, &t.alone, nil}
	return func(row pgx.CollectableRow) (taken, error) {
		err := row.Scan(into...)
		return t, err
	}
}

// Claim makes up to c.Max due tasks this session's own and returns them, the
// most urgent first. An empty answer is an ordinary one.
//
// A row that Postgres cannot make running, or whose payload cannot be read, is no
// error: it is among Refused, and has failed with Postgres' words if those could be
// written. Rows for whose payloads c.MaxBytes has no room are requeued. Together
// with an error there may be tasks, and there may be rows that are the session's own
// and not among them: Held returns those.
func (s *Store) Claim(ctx context.Context, c tasks.Claim) (tasks.Claimed, error) {
	turn := turn{wait: min(turnTimeout, s.timeout/4), name: strings.Join(slices.Sorted(slices.Values(c.Queues)), "\x1f")} // the claim itself needs time, too
	switch {
	case c.Limit != "": // those are few, and come one by one
		turn.wait = 0
	case s.turnStuck.Load():
		turn.wait = turnTimeoutAgain
	}
	lanes := s.lanesOf(c)
	look := lanes.look(s.claims.rows(c.Max))
	for tries, began := 1, time.Now(); ; {
		r, err := s.claimOnce(ctx, c, look, turn)
		var pg *pgconn.PgError
		switch errors.As(err, &pg); {
		case err == nil:
			if turn.wait > 0 {
				s.turnStuck.Store(false)
			}
			if r.chosen.other {
				s.pool.renew()
				return tasks.Claimed{}, fmt.Errorf("claim tasks: %w", tasks.ErrOtherServer)
			}
			unchanged := s.unchanged(r)
			if took := r.chosen.picked - len(unchanged); took > 0 {
				s.claims.took(took)
				s.refusals.Store(0)
			} else if n := len(unchanged); n > 0 && int(s.refusals.Add(int32(n))) > maxRefusals {
				time.Sleep(refusalPause * time.Duration(1+n/maxRefusals))
			}
			if !lanes.looked(look, r.chosen) {
				r.chosen.more = false
			}
			if r.chosen.picked == 0 && r.chosen.more && time.Since(began) < searchTime {
				look = lanes.look(s.claims.rows(c.Max))
				continue
			}
			claimed, err := s.readRest(ctx, c, r)
			claimed.Refused = append(claimed.Refused, unchanged...)
			claimed.More = claimed.More || len(unchanged) > 0
			return claimed, err
		case pg == nil || tries == 5:
			lanes.restart() // the marks may be what took so long
			return tasks.Claimed{}, fmt.Errorf("claim tasks: %w", err)
		case waitedInVain(err) && !r.writing && turn.wait > 0: // by a statement_timeout of the role, too
			s.turnStuck.Store(true)
			turn.wait = 0
			tries++
		case waitedInVain(err) && !r.writing: // it has looked at rows, and at no trigger
			return tasks.Claimed{}, fmt.Errorf("claim tasks: %w", err)
		case pg.ConstraintName == runningKey && look.max > 1:
			// A row without a lock_key and one whose lock_key is that row's id: no
			// statement can make both running. Fewer rows hold only one of them.
			look.max /= 2
		case pg.ConstraintName == runningKey, pg.Code == deadlock:
			tries++
		case waitedInVain(err) && look.max > 1 && s.claims.inVain(look.max) > fewVain:
			return s.passOverAll(r.chosen.ids(), err), nil
		case waitedInVain(err) && look.max > 1:
			look.max = 1 // each time takes long
		case aboutARow(pg) && look.max > 1:
			look.max /= 2 // until it is one row that Postgres refuses
		case mayBeARow(pg):
			return s.claimOne(ctx, c, look, turn)
		default:
			return tasks.Claimed{}, fmt.Errorf("claim tasks: %w", err)
		}
	}
}

// unchanged returns the rows that were chosen and that a trigger has left as they were. They are left
// alone for some minutes.
func (s *Store) unchanged(r round) (rows []tasks.RowError) {
	if len(r.read)+len(r.unread) == r.chosen.picked {
		return nil
	}
	took := make(map[int64]bool, r.chosen.picked)
	for _, t := range r.read {
		took[t.ID] = true
	}
	for _, t := range r.unread {
		took[t.id] = true
	}
	for _, id := range r.chosen.ids() {
		if !took[id] {
			s.avoid.add(id, avoidFor)
			rows = append(rows, tasks.RowError{ID: id, Err: errUnchanged})
		}
	}
	return rows
}

var errUnchanged = errors.New("a trigger leaves it as it is")

// passOverAll leaves rows alone for a moment of which one keeps Postgres waiting, where there seem to be
// many such: to find out which ones they are would keep what is behind them waiting. The more are
// avoided, the later they come back, so that most of the time is that of others; and at different
// times, so that each is tried beside other ones.
func (s *Store) passOverAll(ids []int64, why error) tasks.Claimed {
	out := tasks.Claimed{More: true}
	wait := time.Duration(len(s.avoid.list())+len(ids)) * avoidTogether
	for _, id := range ids {
		s.avoid.pass(id, wait/2+rand.N(wait))
	}
	if len(ids) > 0 {
		out.Refused = []tasks.RowError{{ID: ids[0], Err: fmt.Errorf("it, or one of %d others that were claimed with it, keeps Postgres waiting: %w", len(ids)-1, why)}}
	}
	return out
}

// maxRefusals is how many rows Postgres may refuse one after the other, each for another reason
// than its data, before every one more takes refusalPause: it may be that it refuses all.
const (
	maxRefusals  = 100
	refusalPause = 100 * time.Millisecond
)

// turn says whose turn a claim waits for, and for how long; zero means not at all.
type turn struct {
	wait time.Duration
	name string
}

// beginClaim begins a batch with the transaction of a claim and its turn.
func beginClaim(conn *pgxpool.Conn, t turn) (b *pgx.Batch, statements int) {
	b = &pgx.Batch{}
	b.Queue(beginSQL)
	if linkOf(conn.Conn()).pooled {
		b.Queue(setCutOff)
	}
	if t.wait == 0 {
		b.Queue(indexesOnly)
	} else {
		b.Queue(turnSQL, fmt.Sprint(t.wait.Milliseconds()), "onejob claims "+t.name)
	}
	return b, b.Len()
}

// round is what came of one round trip.
type round struct {
	writing bool // the rows are chosen
	chosen  chosen
	read    []claimed
	unread  []taken // rows that are ours too, and whose payloads did not come along
}

// claimOnce chooses, takes and reads. After an error nothing was taken, unless the
// connection broke. Each of its transactions must begin as a batch for SendBatch does.
func (s *Store) claimOnce(ctx context.Context, c tasks.Claim, l look, turn turn) (r round, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	conn, err := s.pool.inner.Acquire(ctx)
	if err != nil {
		return r, err
	}
	defer func() { s.pool.release(conn, err) }()

	b, begun := beginClaim(conn, turn)
	b.Queue(chooseSQL(c.Limit, l.plain), l.arguments(c, s.avoid.list(), s.claims.bounds(l.max, s.timeout)))
	b.Queue(takeSQL, namedArgs{"session": c.Session, "replica": c.Replica, "fences_from": c.FencesFrom})
	b.Queue(`COMMIT`)
	b.Queue(indexesOnly)
	b.Queue(readClaimedSQL, readArguments(c.Session, maxFirstBytes))
	if linkOf(conn.Conn()).pooled {
		b.Queue(forgetSQL)
	}
	results, err := sendPipeline(ctx, conn.Conn(), b, begun+2)
	if err != nil {
		return r, err
	}
	defer results.Close()
	for range begun {
		if _, err := results.Exec(); err != nil {
			return r, err
		}
	}
	if r.chosen, err = readChosen(results.QueryRow(), l.plain); err != nil {
		return r, err
	}
	r.writing = true
	rows, err := results.Query()
	if err != nil {
		return r, err
	}
	if r.unread, err = pgx.CollectRows(rows, scanTaken()); err != nil {
		return r, err
	}
	announce(c, r.unread)
	if _, err := results.Exec(); err != nil { // the commit
		return r, err
	}
	// From here on the rows are ours. What could not be read is asked for again.
	if _, err := results.Exec(); err != nil {
		return r, nil
	}
	if rows, err := results.Query(); err == nil {
		if list, err := pgx.CollectRows(rows, scanClaimed(c)); err == nil {
			r.read, r.unread = list, without(r.unread, list)
		}
	}
	return r, nil
}

// claimOne is a claim of one row, after one has failed. What Postgres refuses to make
// running fails with Postgres' words. If those cannot be written either, or are not about
// its data, so that they may be others soon, it is left alone for some minutes; if it kept
// Postgres waiting, for avoidFirst or longer.
func (s *Store) claimOne(ctx context.Context, c tasks.Claim, l look, turn turn) (tasks.Claimed, error) {
	r, refused, wait, err := s.tryOne(ctx, c, l, turn)
	switch {
	case err != nil:
		return tasks.Claimed{}, fmt.Errorf("claim tasks: %w", err)
	case refused == nil:
		r.chosen.more = true // than one
		return s.readRest(ctx, c, r)
	case !refused.Failed:
		s.avoid.add(refused.ID, wait)
		if s.refusals.Add(1) > maxRefusals {
			time.Sleep(refusalPause)
		}
	}
	return tasks.Claimed{More: true, Refused: []tasks.RowError{*refused}}, nil
}

// tryOne does step by step what claimOnce does, so that what Postgres says is about the row
// that is locked meanwhile. It takes that row, or none, or says which one is refused and for how
// long it is to be avoided.
func (s *Store) tryOne(ctx context.Context, c tasks.Claim, l look, turn turn) (r round, refused *tasks.RowError, wait time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	conn, err := s.pool.inner.Acquire(ctx)
	if err != nil {
		return r, nil, 0, err
	}
	defer func() { s.pool.release(conn, err) }() // which ends the transaction, too

	var id int64
	if r.chosen, id, err = s.chooseOne(ctx, conn, c, l, turn); err != nil || id == 0 {
		return r, nil, 0, err
	}
	take := func() (err error) {
		rows, _ := conn.Query(ctx, takeSQL, namedArgs{"session": c.Session, "replica": c.Replica, "fences_from": c.FencesFrom})
		r.unread, err = pgx.CollectRows(rows, scanTaken())
		return err
	}
	wait = avoidFor
	const (
		keep  = `SAVEPOINT one`
		check = `SET CONSTRAINTS ALL IMMEDIATE` // or the commit would
	)
	var why *pgconn.PgError
	switch err = inOrder(do(ctx, conn, keep), take, do(ctx, conn, check)); {
	case err == nil && len(r.unread) == 0:
		why = &pgconn.PgError{Message: errUnchanged.Error()}
	case err == nil:
		return r, nil, 0, do(ctx, conn, forgetSQL, `COMMIT`)()
	case !mayBeARow(err) || !errors.As(err, &why):
		return r, nil, 0, err
	case why.ConstraintName == runningKey: // as in Claim
		return r, nil, 0, nil
	case waitedInVain(err):
		s.claims.inVain(1)
		wait = avoidFirst
	case relayed(err):
		wait = avoidFirst
	}
	// If it fails with no row, or there is no fence, none is to blame.
	none := `SELECT pg_catalog.set_config('onejob.tuples', '{}', true)`
	fence := fmt.Sprintf(`SELECT %d::bigint + nextval('onejob.fences'::regclass)`, c.FencesFrom)
	if err = inOrder(do(ctx, conn, `ROLLBACK TO SAVEPOINT one`, none), take, do(ctx, conn, fence)); err != nil {
		return r, nil, 0, err
	}
	refused = &tasks.RowError{ID: id, Err: errors.New(words(why))}
	if !unfit(why) {
		return r, refused, wait, nil
	}
	fail := func() error {
		tag, err := conn.Exec(ctx, `
UPDATE onejob.tasks
   SET status      = 'failed',
       finished_at = statement_timestamp(),
       error       = $2
 WHERE id = $1
   AND status = 'pending'`, id, "Postgres refuses to make this task running: "+words(why))
		refused.Failed = tag.RowsAffected() == 1
		return err
	}
	if err = inOrder(fail, do(ctx, conn, check, forgetSQL, `COMMIT`)); err != nil {
		if refused.Failed = false; !mayBeARow(err) {
			return r, nil, 0, fmt.Errorf("fail task %d: %w", id, err)
		}
	}
	return r, refused, wait, nil
}

// inOrder calls one after the other until one fails.
func inOrder(steps ...func() error) error {
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// do executes statements.
func do(ctx context.Context, conn *pgxpool.Conn, statements ...string) func() error {
	return func() error {
		for _, sql := range statements {
			if _, err := conn.Exec(ctx, sql); err != nil {
				return err
			}
		}
		return nil
	}
}

// chooseOne begins the transaction of a claim of one, and returns the row that it has
// locked; 0 if there is none.
func (s *Store) chooseOne(ctx context.Context, conn *pgxpool.Conn, c tasks.Claim, l look, turn turn) (found chosen, id int64, err error) {
	l.max = 1
	b, begun := beginClaim(conn, turn)
	// A replica that freezes between the next statements would keep its locks, and others waiting.
	b.Queue(`SELECT pg_catalog.set_config('idle_in_transaction_session_timeout', '5s', true)`)
	b.Queue(chooseSQL(c.Limit, l.plain), l.arguments(c, s.avoid.list(), s.claims.bounds(1, s.timeout)))
	b.Queue(`SELECT coalesce((current_setting('onejob.claimed')::bigint[])[1], 0)`)
	results := conn.SendBatch(ctx, b)
	defer func() { err = errors.Join(err, results.Close()) }()
	for range begun + 1 {
		if _, err := results.Exec(); err != nil {
			return found, 0, err
		}
	}
	if found, err = readChosen(results.QueryRow(), l.plain); err != nil {
		return found, 0, err
	}
	err = results.QueryRow().Scan(&id)
	return found, id, err
}

// words are what Postgres says of a row.
func words(why *pgconn.PgError) string {
	if why.Code == "" {
		return why.Message
	}
	return fmt.Sprintf("%s (SQLSTATE %s)", tasks.Text(why.Message), why.Code)
}
