package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"onejob/internal/pgerror"
)

// ErrSchema says that the schema in the database is not the one that this
// binary works with. The errors that wrap it say what to do.
var ErrSchema = errors.New("the schema does not fit")

// SchemaVersion is what a database holds, and what this binary wants.
type SchemaVersion struct {
	Have int // 0 means that there is no schema yet
	Want int
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
	files, err := migrationFiles()
	if err != nil {
		return SchemaVersion{}, err
	}
	v := SchemaVersion{Want: len(files)}
	// Asked first, because an error would end a transaction. to_regclass would not do:
	// it may answer from a cache that is older than the lock of migrations.
	var exists bool
	if err = q.QueryRow(ctx, `
SELECT EXISTS (SELECT
                 FROM pg_class c
                 JOIN pg_namespace n ON n.oid = c.relnamespace
                WHERE n.nspname = 'onejob'
                  AND c.relname = 'schema_version')`).Scan(&exists); err == nil && exists {
		err = q.QueryRow(ctx, `SELECT version FROM onejob.schema_version`).Scan(&v.Have)
	}
	switch {
	case pgerror.Is(err, insufficientPrivilege):
		return v, fmt.Errorf("read the schema's version: %w; GRANT USAGE ON SCHEMA onejob and privileges on its tables, sequences and functions to this user", err)
	case errors.Is(err, pgx.ErrNoRows):
		return v, fmt.Errorf("%w: onejob.schema_version is empty; restore the schema from a backup, or drop the schema if it holds nothing of value", ErrSchema)
	case err != nil:
		return v, fmt.Errorf("read the schema's version: %w", sanitized(err))
	}
	return v, nil
}

// CheckEncoding returns an error that says what to do, if the database takes any bytes for
// text. One that has a schema may be used like that as long as all text in it is UTF-8.
func (s *Store) CheckEncoding(ctx context.Context) error { return checkEncoding(ctx, s.pool) }

func checkEncoding(ctx context.Context, q rower) error {
	var name, encoding string
	if err := q.QueryRow(ctx, `SELECT pg_catalog.current_database(), pg_catalog.current_setting('server_encoding')`).Scan(&name, &encoding); err != nil {
		return fmt.Errorf("read the encoding of the database: %w", sanitized(err))
	}
	if encoding == "SQL_ASCII" {
		return fmt.Errorf("database %s has the encoding SQL_ASCII, so text in it may be any bytes, and no lock can be had under a lock_key that is not UTF-8; use one that was created with ENCODING 'UTF8'", name)
	}
	return nil
}

// checkParts finds a schema that claims its version but lacks parts, as after
// a restore that stopped half-way.
func checkParts(ctx context.Context, q rower) error {
	var missing []string
	if err := q.QueryRow(ctx, `
SELECT coalesce(array_agg(name), '{}')
  FROM (SELECT name FROM unnest(ARRAY['onejob.tasks', 'onejob.attempts', 'onejob.overlaps', 'onejob.fences', 'onejob.tasks_pending', 'onejob.tasks_pending_by_lock_key', 'onejob.tasks_pending_by_limit',
                                      'onejob.one_running_task_per_lock_key', 'onejob.unique_key_is_taken_by_a_pending_or_running_task',
                                      'onejob.schedules', 'onejob.former_schedules', 'onejob.occurrences']) AS name
         WHERE to_regclass(name) IS NULL
     UNION ALL
        SELECT 'onejob.' || name FROM unnest(ARRAY['enqueue', 'cancel', 'retry', 'reserve_lock_key']) AS name
         WHERE NOT EXISTS (SELECT -- more than one may have the name
                             FROM pg_proc p
                             JOIN pg_namespace n ON n.oid = p.pronamespace
                            WHERE n.nspname = 'onejob'
                              AND p.proname = name)) parts`).Scan(&missing); err != nil {
		return fmt.Errorf("check the schema: %w", err)
	}
	if len(missing) > 0 {
		return fmt.Errorf("%w: its version says that it is whole, but %v are missing; restore the schema onejob from a backup", ErrSchema, missing)
	}
	return nil
}
