package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"onejob/internal/pgerror"
	"onejob/internal/retry"
	"onejob/migrations"
)

// Progress is called by Migrate. Each field may be nil.
type Progress struct {
	// Applying is called for every migration that is about to run, once, however
	// often it has to be tried.
	Applying func(number int, name string)

	// Applied is called for every migration that this call has committed.
	Applied func(number int, name string)

	// Waiting is called when another session holds the lock of migrations, again when
	// another one does, and again with long when the wait has taken 5 s. An
	// application_name of "" is not known.
	Waiting func(pid int, applicationName string, long bool)

	// Blocked is called when a migration cannot lock the tables, and again every 10 s
	// while that lasts. waited is how long it has tried. by lists the transactions that
	// are in the way, the oldest first, as far as this role may see them.
	Blocked func(name string, waited time.Duration, by []Blocker)

	// Changed is called with what a migration did to rows that broke a new rule, when
	// it is committed.
	Changed func(what string)

	// WaitAtMost bounds the wait for the lock of migrations, and for the locks on the
	// tables; zero means as long as ctx allows. A migration that has its locks takes as
	// long as it takes.
	WaitAtMost time.Duration
}

// A Blocker is a transaction that holds a lock on a table of the schema onejob.
type Blocker struct {
	PID         int           // of the server process; zero for a prepared transaction
	Prepared    string        // the name of a prepared transaction
	User        string        // who began it
	Application string        // application_name, which its client chose; empty if it is not known
	Open        time.Duration // since it began; zero if this role may not see that
}

// String says what it is, and what there is to find it by.
func (b Blocker) String() string {
	what := fmt.Sprintf("process %d of the server", b.PID)
	if b.PID == 0 {
		what = fmt.Sprintf("prepared transaction %q", b.Prepared)
	}
	open := "not known for how long"
	if b.Open > 0 {
		open = fmt.Sprintf("in a transaction for %v", b.Open.Round(time.Second))
	}
	return fmt.Sprintf("%s (user %q, application %q, %s)", what, b.User, b.Application, open)
}

// Ending returns the statement that ends it.
func (b Blocker) Ending() string {
	if b.PID == 0 {
		return "ROLLBACK PREPARED '" + strings.ReplaceAll(b.Prepared, "'", "''") + "'"
	}
	return fmt.Sprintf("SELECT pg_terminate_backend(%d)", b.PID)
}

// migrationLock is the advisory lock that migrations hold: "onejob". The number is
// public, and any role that may connect can take it. That is why it is asked for
// only if there is something to migrate, and why waiting for it is reported.
const migrationLock = 0x6f6e656a6f62

const (
	// migrationPoll is how often the lock of migrations is tried while another session
	// holds it. Nobody waits in its queue: its holder gives it up between two tries of
	// a migration, and a waiter in the queue would get it, and try at once.
	migrationPoll = 500 * time.Millisecond

	// migrationLongWait is when a wait for that lock is called long. Replicas that are
	// started together wait for the first of them, which takes less as a rule.
	migrationLongWait = 5 * time.Second

	// migrationLockTimeout is how long a migration waits for each lock on a table. All
	// claims, completions and inserts wait behind it meanwhile. It must exceed
	// Postgres' deadlock_timeout (1 s by default): only then does Postgres cancel an
	// autovacuum that is in the way.
	migrationLockTimeout = 1500 * time.Millisecond

	// migrationPause is how long a migration that did not get its locks lets others
	// work before it tries again.
	migrationPause = 4 * time.Second

	// blockedEvery is how often Progress.Blocked is called.
	blockedEvery = 10 * time.Second
)

// errMigrationLockHeld is returned by applyNext if another session holds the lock of
// migrations.
var errMigrationLockHeld = errors.New("another session holds the migration lock")

// Migrate brings the schema up to what this binary wants, or waits until somebody
// else has. It may be called by any number of replicas at once, also through a
// transaction pooler. It takes no lock if the schema is current. It waits for the
// lock of migrations as long as ctx and Progress.WaitAtMost allow.
//
// A migration that cannot lock the tables, because an open transaction has used them,
// is rolled back after 1.5 s and tried again 4 s later, so that replicas and users are
// not held up for as long as that transaction lasts. Of a migration that fails nothing
// is kept.
func (s *Store) Migrate(ctx context.Context, progress *Progress) error {
	m := migration{began: time.Now()}
	if progress != nil {
		m.Progress = *progress
	}
	var err error
	if m.files, err = migrationFiles(); err != nil {
		return err
	}
	m.conn, err = s.connect(ctx, func(_ *pgconn.PgConn, n *pgconn.Notice) {
		if n.SeverityUnlocalized == "WARNING" {
			m.changed = append(m.changed, n.Message)
		}
	})
	if err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	defer closeConn(m.conn)
	for {
		v, err := connVersion(ctx, m.conn)
		switch {
		case err != nil:
			return err
		case v.Have > v.Want:
			return v.newer()
		case v.Have == v.Want:
			return inTransaction(ctx, m.conn, func(tx pgx.Tx) error { return checkParts(ctx, tx) })
		case v.Have == 0:
			if err := checkEncoding(ctx, m.conn); err != nil {
				return err
			}
		}
		m.next = m.files[v.Have]
		err = m.applyNext(ctx)
		for notLocked(err) {
			m.blocked = true
			err = m.applyNext(ctx)
		}
		switch {
		case errors.Is(err, errMigrationLockHeld):
			err = m.awaitHolder(ctx)
		case err == nil:
			m.began, m.blocked, m.reported = time.Now(), false, time.Time{}
		}
		if err != nil {
			return err
		}
	}
}

// A migration is one call of Migrate.
type migration struct {
	Progress
	conn     *pgx.Conn
	files    []string
	began    time.Time // when the last step was done; what is waited for is waited for since
	holder   int       // the process that held the lock of migrations at the last look
	long     bool      // the wait for it was long then
	next     string    // the migration that is to be applied
	applying int       // the number of the last migration that Applying heard of
	blocked  bool      // the last try did not get its locks
	reported time.Time // when Blocked was called for this migration
	changed  []string  // what the migration has warned of; not yet committed
}

// notLocked reports whether a migration failed because it did not get a lock. It was
// rolled back as a whole, and may be tried again.
func notLocked(err error) bool { return pgerror.Is(err, lockTimeout, deadlock) }

// applyNext applies the next migration, in one transaction with the lock and the
// version. A transaction's lock cannot be left behind in a connection that a pooler
// lends to the next client.
func (m *migration) applyNext(ctx context.Context) error {
	m.changed = nil // a try that was rolled back has changed nothing
	applied := 0
	err := inTransaction(ctx, m.conn, func(tx pgx.Tx) error {
		var got bool
		if err := tx.QueryRow(ctx, `SELECT pg_try_advisory_xact_lock($1)`, int64(migrationLock)).Scan(&got); err != nil {
			return fmt.Errorf("migrate: take the migration lock: %w", err)
		}
		if !got {
			return errMigrationLockHeld
		}
		// A bound of the role or the database on how long a statement takes would end each try at a
		// large table, after it has kept everybody from that table for as long. And warnings say which
		// rows were changed.
		if _, err := tx.Exec(ctx, `SELECT pg_catalog.set_config(name, CASE name WHEN 'lock_timeout' THEN $1 WHEN 'client_min_messages' THEN 'warning' ELSE '0' END, true)
			  FROM pg_catalog.pg_settings WHERE name IN ('lock_timeout', 'statement_timeout', 'transaction_timeout', 'client_min_messages')`, strconv.FormatInt(migrationLockTimeout.Milliseconds(), 10)); err != nil {
			return fmt.Errorf("migrate: %w", err)
		}
		if m.blocked {
			if err := m.makeWay(ctx, tx); err != nil {
				return err
			}
		}
		v, err := schemaVersion(ctx, tx) // sees what the holder before us committed
		if err != nil {
			return err
		}
		if v.Have >= v.Want {
			return nil // somebody else was here
		}
		if v.Have == 0 {
			if err := createSchema(ctx, tx); err != nil {
				return err
			}
		}
		number, name := v.Have+1, m.files[v.Have]
		if m.Applying != nil && m.applying != number {
			m.Applying(number, name)
		}
		m.applying, m.next = number, name
		sql, err := fs.ReadFile(migrations.Files, name)
		if err != nil {
			return fmt.Errorf("migrate: %w", err)
		}
		if _, err := tx.Exec(ctx, string(sql)); err != nil {
			return fmt.Errorf("migrate: %s: %w; nothing of that migration was kept, fix the cause and try again", name, err)
		}
		if err := addVersionKey(ctx, tx); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `UPDATE onejob.schema_version SET version = $1`, number); err != nil {
			return fmt.Errorf("migrate: %w", err)
		}
		applied = number
		return nil
	})
	if err != nil || applied == 0 {
		return err
	}
	if m.Applied != nil {
		m.Applied(applied, m.files[applied-1])
	}
	for _, what := range m.changed {
		if m.Changed != nil {
			m.Changed(what)
		}
	}
	return nil
}

// awaitHolder waits a moment for the session that holds the lock of migrations, and
// reports it.
func (m *migration) awaitHolder(ctx context.Context) error {
	if retry.Pause(ctx, migrationPoll); ctx.Err() != nil {
		return fmt.Errorf("migrate: wait for the migration lock: %w", context.Cause(ctx))
	}
	pid, name, err := migrationHolder(ctx, m.conn)
	if err != nil {
		return fmt.Errorf("migrate: wait for the migration lock: %w", err)
	}
	waited := time.Since(m.began)
	long := waited >= migrationLongWait
	if pid != 0 && (pid != m.holder || long && !m.long) && m.Waiting != nil {
		m.Waiting(pid, name, long)
	}
	m.holder, m.long = pid, long
	if pid != 0 && m.WaitAtMost > 0 && waited >= m.WaitAtMost {
		return fmt.Errorf("migrate: waited %v for the migration lock, which process %d of the server holds (application %q); if that is no migration, SELECT pg_terminate_backend(%d)",
			waited.Round(time.Second), pid, name, pid)
	}
	return nil
}

// makeWay lets others work before a migration that did not get its locks is tried
// again, and reports what is in its way. It returns an error if there is no time for
// another try.
//
// tx holds the lock of migrations, and nothing else: neither a snapshot nor a
// transaction ID, so it keeps vacuum from nothing. If it did not hold that lock, the
// tries of several replicas would follow one another without a pause.
func (m *migration) makeWay(ctx context.Context, tx pgx.Tx) error {
	by, err := blockers(ctx, tx)
	if err != nil {
		return fmt.Errorf("migrate: %s: look for what holds its locks: %w", m.next, err)
	}
	waited := time.Since(m.began)
	if m.WaitAtMost > 0 && waited+migrationPause > m.WaitAtMost {
		return blockedError(m.next, waited, by)
	}
	if now := time.Now(); m.Blocked != nil && now.Sub(m.reported) >= blockedEvery {
		m.reported = now
		m.Blocked(m.next, waited, by)
	}
	// A server may be set to end sessions that are idle within a transaction sooner.
	if _, err := tx.Exec(ctx, `SET LOCAL idle_in_transaction_session_timeout = '1min'`); err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	if retry.Pause(ctx, migrationPause); ctx.Err() != nil {
		return fmt.Errorf("migrate: %s: wait for locks on the tables of schema onejob: %w", m.next, context.Cause(ctx))
	}
	return nil
}

// blockedError says what is in the way of a migration, and how to end it.
func blockedError(name string, waited time.Duration, by []Blocker) error {
	if len(by) == 0 {
		return fmt.Errorf("migrate: %s: tried for %v to lock the tables of schema onejob; no transaction was found that has held them for long; nothing of that migration was kept, try again at a quiet time",
			name, waited.Round(time.Second))
	}
	var who, endings []string
	for _, b := range by {
		who, endings = append(who, b.String()), append(endings, b.Ending())
	}
	return fmt.Errorf("migrate: %s: tried for %v to lock the tables of schema onejob, which are in use by %s; nothing of that migration was kept; try again when they have ended, or end them: %s",
		name, waited.Round(time.Second), strings.Join(who, ", "), strings.Join(endings, "; "))
}

// blockers returns the oldest transactions that hold locks on what is in the schema
// onejob. One that began during the migration's wait was not in its way: it waited
// itself. Of other users' transactions a role sees the beginning, and the state, only with the
// rights of pg_read_all_stats; of one's own that has no beginning, the end has just come.
func blockers(ctx context.Context, tx pgx.Tx) ([]Blocker, error) {
	rows, err := tx.Query(ctx, `
SELECT coalesce(l.pid, 0), coalesce(p.gid, ''), coalesce(a.usename, p.owner, '')::text, coalesce(a.application_name, ''),
       coalesce((extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, p.prepared)) * 1000000)::bigint, 0)
  FROM (SELECT DISTINCT pid, CASE WHEN pid IS NULL THEN virtualtransaction END AS prepared -- which has no process
          FROM pg_locks
         WHERE locktype = 'relation'
           AND granted
           AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
           AND relation IN (SELECT oid FROM pg_class WHERE relnamespace = to_regnamespace('onejob'))
           AND pid IS DISTINCT FROM pg_backend_pid()) l
  LEFT JOIN pg_stat_activity a ON a.pid = l.pid
  LEFT JOIN pg_prepared_xacts p
    ON EXISTS (SELECT FROM pg_locks x WHERE x.locktype = 'transactionid' AND x.pid IS NULL AND x.virtualtransaction = l.prepared AND x.transactionid = p.transaction)
 WHERE coalesce(a.xact_start, p.prepared, '-infinity') < clock_timestamp() - $1 * interval '1 microsecond'
   AND (a.xact_start IS NOT NULL OR a.state IS NULL)
   AND a.backend_type IS DISTINCT FROM 'parallel worker'
 ORDER BY coalesce(a.xact_start, p.prepared) NULLS LAST, l.pid
 LIMIT 5`, migrationLockTimeout.Microseconds())
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (b Blocker, err error) {
		var micros int64
		err = row.Scan(&b.PID, &b.Prepared, &b.User, &b.Application, &micros)
		b.Open = time.Duration(micros) * time.Microsecond
		return b, err
	})
}

// createSchema makes the schema and the table that holds its version, where they
// are not there.
func createSchema(ctx context.Context, tx pgx.Tx) error {
	// Privilege to create it is needed only where it is not there.
	if _, err := tx.Exec(ctx, `
DO $$ BEGIN
    IF to_regnamespace('onejob') IS NULL THEN CREATE SCHEMA onejob; END IF;
END $$`); err != nil {
		return fmt.Errorf("create schema onejob: %w; let somebody who may run: CREATE SCHEMA onejob AUTHORIZATION %q", err, tx.Conn().Config().User)
	}
	if _, err := tx.Exec(ctx, `
CREATE TABLE IF NOT EXISTS onejob.schema_version (version int PRIMARY KEY);
INSERT INTO onejob.schema_version SELECT 0 WHERE NOT EXISTS (SELECT FROM onejob.schema_version)`); err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	return nil
}

// addVersionKey gives the table of the version a primary key, which it did not always have. A
// publication of all tables lets no row be updated without one.
func addVersionKey(ctx context.Context, tx pgx.Tx) error {
	if _, err := tx.Exec(ctx, `
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_index WHERE indrelid = 'onejob.schema_version'::regclass AND indisprimary) THEN
        ALTER TABLE onejob.schema_version ADD PRIMARY KEY (version);
    END IF;
END $$`); err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	return nil
}

// migrationHolder returns the server process that holds the migration lock, and
// its application_name; zero if none does.
func migrationHolder(ctx context.Context, conn *pgx.Conn) (pid int, name string, err error) {
	err = inTransaction(ctx, conn, func(tx pgx.Tx) error {
		err := tx.QueryRow(ctx, `
SELECT l.pid, coalesce(a.application_name, '')
  FROM pg_locks l
  LEFT JOIN pg_stat_activity a ON a.pid = l.pid
 WHERE l.locktype = 'advisory'
   AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND l.classid  = ($1::bigint >> 32)::text::oid
   AND l.objid    = ($1::bigint & 4294967295)::text::oid
   AND l.objsubid = 1
   AND l.granted
 LIMIT 1`, int64(migrationLock)).Scan(&pid, &name)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		return err
	})
	return pid, name, err
}

// connVersion is schemaVersion in a transaction of its own.
func connVersion(ctx context.Context, conn *pgx.Conn) (v SchemaVersion, err error) {
	err = inTransaction(ctx, conn, func(tx pgx.Tx) error {
		v, err = schemaVersion(ctx, tx)
		return err
	})
	return v, err
}

// inTransaction runs fn in a transaction with the settings that all statements of
// the store have (see pool), on a connection past the pool.
func inTransaction(ctx context.Context, conn *pgx.Conn, fn func(pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, fixed); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, setCutOff); err != nil {
			return err
		}
		return fn(tx)
	})
}

var migrationName = regexp.MustCompile(`^([0-9]{3})_[a-z_]+\.sql$`)

// migrationFiles returns the names of the migrations, the first one first. Their
// numbers begin at 1 and leave none out.
func migrationFiles() ([]string, error) {
	names, err := fs.Glob(migrations.Files, "*.sql") // in order
	if err != nil {
		return nil, err
	}
	for i, name := range names {
		m := migrationName.FindStringSubmatch(name)
		if m == nil || m[1] != fmt.Sprintf("%03d", i+1) {
			return nil, fmt.Errorf("migration %s is not number %d", name, i+1)
		}
	}
	return names, nil
}
