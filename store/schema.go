package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/tern/v2/migrate"

	"onejob/migrations"
)

// ErrSchema says that the schema in the database is not the one that this
// binary works with. The errors that wrap it say what to do.
var ErrSchema = errors.New("the schema does not fit")

const versionTable = "onejob.schema_version"

// SchemaVersion is what a database holds, and what this binary wants.
type SchemaVersion struct {
	Have int // 0 means that there is no schema yet
	Want int
}

// Migrate brings the schema up to what this binary wants. It may be called by
// any number of replicas at once: one migrates, the others wait for it. It goes
// over the listening connection, because its lock belongs to a connection.
// applied is called for every migration that is about to run; it may be nil.
func (s *Store) Migrate(ctx context.Context, applied func(number int, name string)) error {
	conn, err := s.connect(ctx)
	if err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	defer closeConn(conn)

	// The migrator's own lock comes after it has made its version table, which
	// lives in the schema. So the whole is done under a lock of ours.
	const lock = 0x6f6e656a6f62 // "onejob"
	if _, err := conn.Exec(ctx, `SELECT pg_advisory_lock($1)`, lock); err != nil {
		return fmt.Errorf("migrate: wait for other replicas: %w", err)
	}
	v, err := schemaVersion(ctx, conn)
	if err != nil {
		return err
	}
	if v.Have > v.Want {
		return v.newer()
	}
	if v.Have == v.Want {
		return checkParts(ctx, conn)
	}
	if v.Have == 0 {
		// Privilege to create it is needed only where it is not there.
		if _, err := conn.Exec(ctx, `
DO $$ BEGIN
    IF to_regnamespace('onejob') IS NULL THEN CREATE SCHEMA onejob; END IF;
END $$`); err != nil {
			return fmt.Errorf("create schema onejob: %w; let somebody who may run: CREATE SCHEMA onejob AUTHORIZATION %q", err, conn.Config().User)
		}
	}
	m, err := migrate.NewMigrator(ctx, conn, versionTable)
	if err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	if err := m.LoadMigrations(migrations.Files); err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	m.OnStart = func(n int32, name, _, _ string) {
		if applied != nil {
			applied(int(n), name)
		}
	}
	if err := m.Migrate(ctx); err != nil {
		return fmt.Errorf("migrate: %w; nothing of that migration was kept, mend the cause and try again", err)
	}
	return nil
}

// CheckSchema returns an error that wraps ErrSchema and says what to do, if the
// database does not hold just the schema that this binary wants.
func (s *Store) CheckSchema(ctx context.Context) error {
	v, err := s.SchemaVersion(ctx)
	switch {
	case err != nil:
		return err
	case v.Have == 0:
		return fmt.Errorf("%w: the database has no onejob schema; run onejob migrate up", ErrSchema)
	case v.Have < v.Want:
		return fmt.Errorf("%w: it is at version %d of %d; run onejob migrate up", ErrSchema, v.Have, v.Want)
	case v.Have > v.Want:
		return v.newer()
	}
	return checkParts(ctx, s.pool)
}

// SchemaVersion returns what the database holds and what this binary wants.
func (s *Store) SchemaVersion(ctx context.Context) (SchemaVersion, error) {
	return schemaVersion(ctx, s.pool)
}

func (v SchemaVersion) newer() error {
	return fmt.Errorf("%w: it is at version %d, this binary knows %d; upgrade this binary, a newer one has migrated the database", ErrSchema, v.Have, v.Want)
}

type rower interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

func schemaVersion(ctx context.Context, q rower) (SchemaVersion, error) {
	files, err := migrate.FindMigrations(migrations.Files)
	if err != nil {
		return SchemaVersion{}, err
	}
	v := SchemaVersion{Want: len(files)}
	err = q.QueryRow(ctx, `SELECT version FROM onejob.schema_version`).Scan(&v.Have)
	var pg *pgconn.PgError
	switch {
	case errors.As(err, &pg) && (pg.Code == "42P01" || pg.Code == "3F000"): // no such table, no such schema
		return v, nil
	case errors.As(err, &pg) && pg.Code == "42501":
		return v, fmt.Errorf("read the schema's version: %w; GRANT USAGE ON SCHEMA onejob and privileges on its tables, sequences and functions to this user", err)
	case errors.Is(err, pgx.ErrNoRows):
		return v, fmt.Errorf("%w: onejob.schema_version is empty; restore the schema from a backup, or drop the schema if it holds nothing of value", ErrSchema)
	case err != nil:
		return v, fmt.Errorf("read the schema's version: %w", sanitized(err))
	}
	return v, nil
}

// checkParts finds a schema that claims its version but lacks parts, as after
// a restore that stopped half-way.
func checkParts(ctx context.Context, q rower) error {
	var missing []string
	if err := q.QueryRow(ctx, `
SELECT coalesce(array_agg(name), '{}')
  FROM (SELECT name FROM unnest(ARRAY['onejob.tasks', 'onejob.attempts', 'onejob.overlaps', 'onejob.fences', 'onejob.tasks_pending', 'onejob.tasks_pending_by_lock_key', 'onejob.tasks_pending_by_limit',
                                      'onejob.one_running_task_per_lock_key', 'onejob.unique_key_is_taken_by_a_pending_or_running_task',
                                      'onejob.schedules', 'onejob.occurrences']) AS name
         WHERE to_regclass(name) IS NULL
     UNION ALL
        SELECT name FROM unnest(ARRAY['onejob.enqueue', 'onejob.cancel', 'onejob.retry', 'onejob.reserve_lock_key']) AS name
         WHERE to_regproc(name) IS NULL) parts`).Scan(&missing); err != nil {
		return fmt.Errorf("check the schema: %w", err)
	}
	if len(missing) > 0 {
		return fmt.Errorf("%w: its version says that it is whole, but %v are missing; restore the schema onejob from a backup", ErrSchema, missing)
	}
	return nil
}

// CheckRights returns what this user may not do of what a replica does, and the
// statement that mends it.
func (s *Store) CheckRights(ctx context.Context) error {
	var user string
	var lacks []string
	if err := s.pool.QueryRow(ctx, `
SELECT current_user, coalesce(array_agg(what) FILTER (WHERE NOT has), '{}')
  FROM (VALUES ('USAGE ON SCHEMA onejob',                has_schema_privilege('onejob', 'USAGE')),
               ('USAGE ON SEQUENCE onejob.fences',       has_sequence_privilege('onejob.fences', 'USAGE')),
               ('USAGE ON SEQUENCE onejob.tasks_id_seq', has_sequence_privilege('onejob.tasks_id_seq', 'USAGE'))
     UNION ALL
        SELECT format('%s ON onejob.%s', privilege, t), has_table_privilege('onejob.' || t, privilege)
          FROM (VALUES ('schema_version', 'SELECT'),
                       ('tasks', 'SELECT, INSERT, UPDATE, DELETE'), ('attempts', 'SELECT, INSERT, DELETE'),
                       ('schedules', 'SELECT, UPDATE'), ('occurrences', 'SELECT, INSERT, DELETE')) AS tables(t, privileges)
         CROSS JOIN unnest(string_to_array(privileges, ', ')) AS privilege) AS needed(what, has)`).Scan(&user, &lacks); err != nil {
		return fmt.Errorf("check rights: %w", err)
	}
	var errs []error
	for _, what := range lacks {
		errs = append(errs, fmt.Errorf("missing: GRANT %s TO %q", what, user))
	}
	return errors.Join(errs...)
}
