package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"onejob/migrations"
)

// Progress is called by Migrate. Each field may be nil.
type Progress struct {
	// Applying is called for every migration that is about to run.
	Applying func(number int, name string)

	// Waiting is called when another session holds the lock of migrations, and
	// again when another one does. An application_name of "" is not known.
	Waiting func(pid int, applicationName string)

	// Changed is called with what a migration did to rows that broke a new rule.
	Changed func(what string)

	// WaitAtMost bounds the wait for the lock; zero means as long as ctx allows. A
	// migration that has begun takes as long as it takes.
	WaitAtMost time.Duration
}

// migrationLock is the advisory lock that migrations hold: "onejob". The number is
// public, and any role that may connect can take it. That is why it is asked for
// only if there is something to migrate, and why waiting for it is reported.
const migrationLock = 0x6f6e656a6f62

// migrationWait is how long one try waits for the lock. Between tries the holder is
// looked up.
const migrationWait = 500 * time.Millisecond

// Migrate brings the schema up to what this binary wants, or waits until somebody
// else has. It may be called by any number of replicas at once, also through a
// transaction pooler. It takes no lock if the schema is current. It waits for the
// lock as long as ctx allows. Of a migration that fails nothing is kept.
func (s *Store) Migrate(ctx context.Context, progress *Progress) error {
	var p Progress
	if progress != nil {
		p = *progress
	}
	files, err := migrationFiles()
	if err != nil {
		return err
	}
	conn, err := s.connect(ctx, func(_ *pgconn.PgConn, n *pgconn.Notice) {
		if n.SeverityUnlocalized == "WARNING" && p.Changed != nil {
			p.Changed(n.Message)
		}
	})
	if err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	defer closeConn(conn)
	var holder int
	for began := time.Now(); ; {
		v, err := connVersion(ctx, conn)
		switch {
		case err != nil:
			return err
		case v.Have > v.Want:
			return v.newer()
		case v.Have == v.Want:
			return inTransaction(ctx, conn, func(tx pgx.Tx) error { return checkParts(ctx, tx) })
		}
		err = migrateOne(ctx, conn, files, p)
		var pg *pgconn.PgError
		switch {
		case errors.As(err, &pg) && pg.Code == lockTimeout:
			pid, name, err := migrationHolder(ctx, conn)
			if err != nil {
				return fmt.Errorf("migrate: wait for the migration lock: %w", err)
			}
			if pid != 0 && pid != holder && p.Waiting != nil {
				p.Waiting(pid, name)
			}
			holder = pid
			if waited := time.Since(began); pid != 0 && p.WaitAtMost > 0 && waited >= p.WaitAtMost {
				return fmt.Errorf("migrate: waited %v for the migration lock, which process %d of the server holds (application %q); if that is no migration, SELECT pg_terminate_backend(%d)",
					waited.Round(time.Second), pid, name, pid)
			}
		case err != nil:
			return err
		default:
			began = time.Now() // that was progress
		}
	}
}

// migrateOne applies the next migration, in one transaction with the lock and the
// version. A transaction's lock cannot be left behind in a connection that a pooler
// lends to the next client.
func migrateOne(ctx context.Context, conn *pgx.Conn, files []string, p Progress) error {
	return inTransaction(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT pg_catalog.set_config('lock_timeout', $1, true)`, strconv.FormatInt(migrationWait.Milliseconds(), 10)); err != nil {
			return fmt.Errorf("migrate: %w", err)
		}
		if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock($1)`, int64(migrationLock)); err != nil {
			return fmt.Errorf("migrate: wait for the migration lock: %w", err)
		}
		if _, err := tx.Exec(ctx, `SET LOCAL lock_timeout TO DEFAULT`); err != nil {
			return fmt.Errorf("migrate: %w", err)
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
		number, name := v.Have+1, files[v.Have]
		if p.Applying != nil {
			p.Applying(number, name)
		}
		sql, err := fs.ReadFile(migrations.Files, name)
		if err != nil {
			return fmt.Errorf("migrate: %w", err)
		}
		if _, err := tx.Exec(ctx, string(sql)); err != nil {
			return fmt.Errorf("migrate: %s: %w; nothing of that migration was kept, fix the cause and try again", name, err)
		}
		if _, err := tx.Exec(ctx, `UPDATE onejob.schema_version SET version = $1`, number); err != nil {
			return fmt.Errorf("migrate: %w", err)
		}
		return nil
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
CREATE TABLE IF NOT EXISTS onejob.schema_version (version int NOT NULL);
INSERT INTO onejob.schema_version SELECT 0 WHERE NOT EXISTS (SELECT FROM onejob.schema_version)`); err != nil {
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
		if _, err := tx.Exec(ctx, fmt.Sprintf(`SET LOCAL tcp_user_timeout = %d`, cutOff.Milliseconds())); err != nil {
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
