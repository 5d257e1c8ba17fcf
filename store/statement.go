package store

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/boottime"
	"onejob/tasks"
)

// A user's statement (the sql kind) runs in one transaction with statements of
// ours, and may change anything that a transaction or a session has. What is ours
// is set again before the completion. A transaction that ended cannot be brought
// back: that is noticed.

// transaction is what a user's statement must leave as it was.
type transaction struct {
	id      string
	repeats int // how often the connection has broken before under the statement of the task
}

// statements are those of CompleteWith that are at work. There are no more than the pool has
// connections, so that none waits there: the time of its attempt would pass, and a slot of the worker be
// taken that others need.
type statements struct {
	slots chan struct{}
	vain  atomic.Int64 // when one has waited in vain last, or all were in use after that, by the boot-time clock
}

// roomPatience is how long a statement waits for others to end: most take less. scarceFor is for how
// long there seem to be more of them than connections after one has waited in vain.
const (
	roomPatience = time.Second
	scarceFor    = 10 * time.Second
)

// enter waits until the statement may begin, for a while. Call leave when it has ended, unless there is
// an error.
func (s *statements) enter(ctx context.Context) error {
	select {
	case s.slots <- struct{}{}:
		return nil
	default:
	}
	select {
	case s.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		if errors.Is(context.Cause(ctx), tasks.ErrTimeout) { // its own is shorter
			s.vain.Store(int64(boottime.Now()))
		}
		return errNotBegun{context.Cause(ctx)}
	case <-time.After(roomPatience):
		s.vain.Store(int64(boottime.Now()))
		return errNotBegun{fmt.Errorf("%d statements are at work, and postgres.max_conns allows no more", cap(s.slots))}
	}
}

func (s *statements) leave() { <-s.slots }

// StatementRoom returns how many calls of CompleteWith could begin at once now. It reports whether there
// seem to be more of them than that for longer: one has waited in vain lately, and all the time since
// then there was room for none when somebody asked, but for some seconds.
func (s *Store) StatementRoom() (n int, scarce bool) {
	n = cap(s.statements.slots) - len(s.statements.slots)
	vain := boottime.Instant(s.statements.vain.Load())
	if vain == 0 {
		return n, false
	}
	now := boottime.Now()
	if scarce = now.Sub(vain) < scarceFor; scarce && n == 0 {
		s.statements.vain.Store(int64(now))
	}
	return n, scarce
}

// errNotBegun says that nothing of an attempt was done.
type errNotBegun struct{ error }

func (e errNotBegun) Unwrap() error { return e.error }
func (e errNotBegun) NotBegun()     {}

// errBroken says that the connection broke while the statement of an attempt was at work.
type errBroken struct {
	error
	repeats int
}

// brokenText begins the text of an errBroken. Attempts are counted by it (oursSQL).
const brokenText = "the connection broke under the statement: "

func (e errBroken) Error() string { return brokenText + e.error.Error() }
func (e errBroken) Unwrap() error { return e.error }
func (e errBroken) Broken() int   { return e.repeats }

// CheckStatement lets Postgres parse a user's statement, with the search_path that it will run with,
// and returns what is wrong with it, or with the number of parameters that it will be given. It does
// not run it.
func (s *Store) CheckStatement(ctx context.Context, sql string, params int) error {
	return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT pg_catalog.set_config('search_path', NULL, true)`); err != nil {
			return err
		}
		prepared, err := tx.Conn().PgConn().Prepare(ctx, "", sql, nil)
		if err != nil {
			return err
		}
		if n := len(prepared.ParamOIDs); n != params {
			return fmt.Errorf("the number of its parameters is %d, and params names %d", n, params)
		}
		return nil
	})
}

// errReadOnlyServer says that transactions begin as read-only ones.
var errReadOnlyServer = errors.New("the database is read-only (default_transaction_read_only)")

// beginStatement prepares a transaction for a user's statement: the settings that
// the statement may read, and the search_path that the database or the role has,
// because users' tables are most often in public.
//
// A replica that freezes would keep the row locks until somebody notices;
// idle_in_transaction_session_timeout makes Postgres notice. The transaction ID is
// assigned here because it names the transaction; the completion would need one
// anyway.
//
// It marks the transaction, so that others find it, and returns tasks.ErrRefused if the
// task is not the attempt's any more. It returns errNotAlone if another transaction has the mark of
// the lock key, unless that is known to be none of ours.
//
// If the transaction is read-only, in which no task can be completed, it asks for a requeue. So if that
// is why the statement fails, the statement has made it read-only, or another server says so of its own.
func beginStatement(ctx context.Context, tx pgx.Tx, t *tasks.Task, strangers bool) (before transaction, err error) {
	var b pgx.Batch
	b.Queue(`SELECT ` + safe) // no more: the statement has the DateStyle of its role, and so on
	b.Queue(markSQL, t.Session, t.Fence, t.LockKey)
	b.Queue(oursSQL, t.ID, t.Fence, t.Session, t.Attempt, brokenText)
	b.Queue(`
SELECT pg_catalog.pg_current_xact_id()::pg_catalog.text,
       pg_catalog.current_setting('transaction_read_only')::pg_catalog.bool,
       pg_catalog.set_config('onejob.task_id',  $1, true),
       pg_catalog.set_config('onejob.attempt',  $2, true),
       pg_catalog.set_config('onejob.fence',    $3, true),
       pg_catalog.set_config('onejob.lock_key', $4, true),
       pg_catalog.set_config('idle_in_transaction_session_timeout', '10s', true),
       pg_catalog.set_config('tcp_user_timeout', '10s', true),
       pg_catalog.set_config('search_path', NULL, true)`, // NULL: what it was before we SET it for the session
		fmt.Sprint(t.ID), fmt.Sprint(t.Attempt), fmt.Sprint(t.Fence), t.LockKey)
	r := tx.SendBatch(ctx, &b)
	defer r.Close()
	var marked, alone, ours, readOnly bool
	if _, err := r.Exec(); err != nil {
		return before, err
	}
	if err := r.QueryRow().Scan(&marked, &alone); err != nil {
		return before, err
	}
	if err := r.QueryRow().Scan(&ours, &before.repeats); err != nil {
		return before, err
	}
	if err := r.QueryRow().Scan(&before.id, &readOnly, nil, nil, nil, nil, nil, nil, nil); err != nil {
		return before, err
	}
	switch {
	case !ours:
		return before, tasks.ErrRefused
	case readOnly:
		return before, tasks.Requeue(time.Second, errReadOnlyServer)
	case !marked:
		return before, tasks.Requeue(0, errMarked)
	case !alone && !strangers:
		return before, errNotAlone
	}
	return before, r.Close()
}

// restoreSQL makes a transaction ours again. Whatever the user's statement SET, with
// or without LOCAL, ends with its task on a direct connection. Through a pooler the
// session's settings are not ours to reset; those that could hurt the completion
// are overruled for the transaction.
const (
	restoreSQL = `
SELECT pg_catalog.pg_current_xact_id(), pg_catalog.current_setting('transaction_read_only');
SET SESSION AUTHORIZATION DEFAULT;
RESET ROLE;`

	restoreDirectSQL = restoreSQL + `
RESET ALL;
SET search_path = pg_catalog, pg_temp;
SET default_transaction_isolation = 'read committed';
SET tcp_user_timeout = '10s';
SET LOCAL idle_in_transaction_session_timeout = '10s'`

	restorePooledSQL = restoreSQL + `
SET LOCAL search_path = pg_catalog, pg_temp;
SET LOCAL statement_timeout TO DEFAULT;
SET LOCAL lock_timeout TO DEFAULT;
SET LOCAL tcp_user_timeout = '10s';
SET LOCAL idle_in_transaction_session_timeout = '10s'`
)

// forget removes what a user's statement has left in its session, for the next one: temporary
// tables, which hide others of their names, locks that no transaction holds, cursors, and LISTEN.
// It reports whether the connection can be used again. Through a pooler the session is not ours.
func forget(conn *pgx.Conn) bool {
	if linkOf(conn).pooled {
		return true
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return conn.PgConn().Exec(ctx, `SELECT pg_catalog.pg_advisory_unlock_all(); DISCARD TEMP; CLOSE ALL; UNLISTEN *`).Close() == nil
}

// Errors of a user's statement that another attempt cannot fix.
var (
	errEnded    = errors.New("the statement ended its transaction (COMMIT, ROLLBACK or PREPARE TRANSACTION), so what it did before that may have been kept although the task fails; remove it from the statement")
	errReadOnly = errors.New("the statement made its transaction read-only, so that the task cannot be completed in it; remove that from the statement")
)

// endStatement makes the transaction ours again after a user's statement. It fails,
// for good, if this is not the transaction any more that was prepared.
func endStatement(ctx context.Context, tx pgx.Tx, before transaction) error {
	conn := tx.Conn()
	ended := func() error {
		// What the statement SET has been committed with the rest. The pool opens
		// another connection.
		closeConn(conn)
		return tasks.Permanent(errEnded)
	}
	if conn.PgConn().TxStatus() != 'T' {
		return ended()
	}
	sql := restoreDirectSQL
	if linkOf(conn).pooled {
		sql = restorePooledSQL
	}
	results, err := conn.PgConn().Exec(ctx, sql).ReadAll() // the simple protocol: one round trip
	if err != nil {
		return err
	}
	switch row := results[0].Rows[0]; {
	case string(row[0]) != before.id: // COMMIT AND CHAIN
		return ended()
	case string(row[1]) == "on":
		return tasks.Permanent(errReadOnly)
	}
	return nil
}
