package store

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/tasks"
)

// A user's statement runs in Postgres, and goes on there when the replica that sent it
// is gone: the backend looks at its client only when it has something to say. Before
// another attempt of its lock key begins, it must have ended.
//
// So a statement has a mark that others see, an advisory lock, taken before the
// statement is sent and held until its transaction ends. The replica that takes a
// task over looks for the mark and ends the backend that has it. What keeps a replica
// that was frozen meanwhile from sending its statement after that look: the replica's
// end is on the list before anybody looks, and the statement is not sent unless the
// list, read under the mark, says that the replica has not ended.
//
// That look does not find the statement of a row that a person has made pending, or has deleted:
// it is no running row of a dead replica. And others than tasks may have the lock key as soon as
// Consul frees it, as "onejob lock" does. So a statement has two more marks. One is of its session:
// the replica that records the end of a session ends all its statements. One is of its lock key, which
// one alone can have: the attempt that has the row ends what keeps it from that.

// markOf is the number of the advisory lock of an attempt, given the table or alias that
// has its session and fence.
func markOf(of string) string {
	return strings.ReplaceAll(`pg_catalog.hashtextextended(pg_catalog.concat('onejob statement ', X.session, ' ', X.fence), 0)`, "X", of)
}

// markOfKey is the number of the advisory lock of a lock key, given the expression that has it.
func markOfKey(key string) string {
	return `pg_catalog.hashtextextended(pg_catalog.concat('onejob statement of lock key ', ` + key + `), 0)`
}

// markOfSession is the number of the advisory lock that all statements of a session share, given
// the table or alias that has it.
func markOfSession(of string) string {
	return `pg_catalog.hashtextextended(pg_catalog.concat('onejob statements of session ', ` + of + `.session), 0)`
}

// markSQL marks a transaction as that of the statement of an attempt, given session and
// fence, and as the only one of the lock key; oursSQL says whether its task and its replica are
// still what they were, and how often the connection has broken under the statement of the task since it
// was last retried, by the errors of its latest attempts, given what they contain. Read committed: it
// sees what was committed before it began, and so after the mark was there.
//
// A retry leaves no trace but the attempt, which begins anew: it came after all with a higher number, and
// after one with the same number that was used up. Of that one the error has something before the text.
var markSQL = `SELECT pg_catalog.pg_try_advisory_xact_lock_shared(` + markOf("a") + `) AND pg_catalog.pg_try_advisory_xact_lock_shared(` + markOfSession("a") + `),
       pg_catalog.pg_try_advisory_xact_lock(` + markOfKey("$3::text") + `)
  FROM (SELECT $1::uuid AS session, $2::bigint AS fence) a`

const oursSQL = `
WITH latest AS (
    SELECT fence, attempt, strpos(error, $5) AS broken
      FROM onejob.attempts
     WHERE task_id = $1
     ORDER BY fence DESC
     LIMIT 1000
)
SELECT (SELECT true FROM onejob.tasks    WHERE id = $1 AND CASE WHEN fence = $2 THEN status = 'running' END LIMIT 1) IS NOT NULL
   AND (SELECT true FROM onejob.replicas WHERE session = $3 AND ended_at IS NULL LIMIT 1) IS NOT NULL,
       (SELECT count(*)
          FROM latest
         WHERE broken > 0
           AND fence > coalesce((SELECT max(fence) FROM latest WHERE attempt > $4 OR attempt = $4 AND broken > 1), 0))`

// errMarked says that somebody else has the advisory lock: it is nobody of ours.
var errMarked = errors.New("somebody else holds the advisory lock that marks its statement")

// errNotAlone says that somebody else has the mark of the lock key.
var errNotAlone = errors.New("another statement of the lock key holds its advisory lock")

// statement is a user's statement that runs, or has not been committed yet.
type statement struct {
	Task int64
	PID  int   // of its backend
	ours *bool // not nil if this role may end it; then it was asked to
}

// where says in which backend it still runs, and why.
func (l statement) where() string {
	if l.ours == nil {
		return fmt.Sprintf("backend %d, which this role may not end", l.PID)
	}
	return fmt.Sprintf("backend %d, which was terminated and has not ended yet", l.PID)
}

// endStatements ends the statements that have marks, and returns those that are there a
// second later. marked selects task and mark.
//
// Anybody may hold any advisory lock; it is a statement's mark only if its holder may
// change tasks. A backend of another role is not ours to end: it is waited for.
func (s *Store) endStatements(ctx context.Context, marked string, args ...any) ([]statement, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	for wait := 2 * time.Millisecond; ; wait *= 2 {
		left, err := query(ctx, s.pool, func(row pgx.CollectableRow) (l statement, err error) {
			return l, row.Scan(&l.Task, &l.PID, &l.ours)
		}, `
SELECT a.task, l.pid, CASE WHEN pg_has_role(b.usesysid, 'USAGE') THEN pg_terminate_backend(l.pid) END
  FROM (`+marked+`) a
  JOIN pg_locks l ON (l.classid::bigint << 32 | l.objid::bigint) = a.mark
  JOIN pg_stat_activity b ON b.pid = l.pid
 WHERE l.locktype = 'advisory'
   AND l.objsubid = 1
   AND l.granted
   AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND has_table_privilege(b.usesysid, 'onejob.tasks', 'UPDATE')`, args...)
		if err != nil {
			return nil, fmt.Errorf("look for statements that still run: %w", err)
		}
		if len(left) == 0 || wait > time.Second {
			return left, nil
		}
		time.Sleep(wait)
	}
}

// endStatementsUnder ends the statements of sessions that have ended, of whatever rows. It chooses the
// sessions, in the table r of replicas, by a condition on $1. If some go on, the error says so.
func (s *Store) endStatementsUnder(ctx context.Context, chosen string, arg any) error {
	left, err := s.endStatements(ctx, `
SELECT 0::bigint AS task, `+markOfSession("r")+` AS mark
  FROM onejob.replicas r
 WHERE `+chosen+`
   AND ended_at IS NOT NULL`, arg)
	if err == nil && len(left) > 0 {
		err = fmt.Errorf("%d statements run on, such as in %s", len(left), left[0].where())
	}
	return err
}

// endStatementsOf ends the statements of running tasks of sessions that have ended, and returns
// those that go on.
func (s *Store) endStatementsOf(ctx context.Context, sessions []string) ([]statement, error) {
	return s.endStatements(ctx, `
SELECT id AS task, `+markOf("t")+` AS mark
  FROM onejob.tasks t
 WHERE status = 'running'
   AND session = ANY ($1::uuid[])
   AND (SELECT true FROM onejob.replicas r WHERE r.session = t.session AND r.ended_at IS NULL LIMIT 1) IS NULL`, sessions)
}

// endOwn makes sure that nothing runs of an attempt that is about to be completed.
func (s *Store) endOwn(ctx context.Context, id, fence int64) error {
	session, there := s.unended.Load(fence)
	if !there {
		return nil
	}
	left, err := s.endStatements(context.WithoutCancel(ctx), `
SELECT $1::bigint AS task, `+markOf("a")+` AS mark FROM (SELECT $2::uuid AS session, $3::bigint AS fence) a`, id, session, fence)
	if err != nil {
		return err
	}
	if len(left) > 0 {
		return fmt.Errorf("its statement still runs, in %s", left[0].where())
	}
	s.unended.Delete(fence)
	return nil
}

// makeRoom ends what keeps the statement of an attempt from being the only one of its lock key.
// While the attempt is that of the running row, what is there is of a row that a person has changed;
// if it is not, nothing is ended. First it waits a moment: a transaction that was committed holds its marks a little longer.
func (s *Store) makeRoom(ctx context.Context, t *tasks.Task) error {
	time.Sleep(10 * time.Millisecond)
	left, err := s.endStatements(ctx, `
SELECT $1::bigint AS task, `+markOfKey("$2::text")+` AS mark
 WHERE EXISTS (SELECT FROM onejob.tasks WHERE id = $1 AND CASE WHEN fence = $3 THEN status = 'running' END)`, t.ID, t.LockKey, t.Fence)
	if err != nil {
		return err
	}
	if len(left) > 0 {
		return tasks.Requeue(time.Second, fmt.Errorf("another statement of its lock key still runs, in %s", left[0].where()))
	}
	return nil
}
