package store

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// A Reference is a foreign key of another table that refers to onejob.tasks. Its table and
// columns are quoted where SQL needs it.
type Reference struct {
	Table   string
	Columns string // separated by ", "
	Keeps   bool   // a task that a row refers to cannot be deleted
	Indexed bool   // an index leads from a task to the rows that refer to it
}

func (r Reference) String() string { return fmt.Sprintf("%s (%s)", r.Table, r.Columns) }

// References returns the foreign keys that decide what retention can delete, and what that
// costs. Those of partitions are left out, as their tables have the same.
func (s *Store) References(ctx context.Context) ([]Reference, error) {
	list, err := queryAfter(ctx, s.pool, pgx.RowToStructByPos[Reference], fixed, nil, `
SELECT c.conrelid::regclass::text,
       (SELECT string_agg(quote_ident(a.attname), ', ' ORDER BY k.n)
          FROM unnest(c.conkey) WITH ORDINALITY AS k(attnum, n)
          JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = k.attnum),
       c.confdeltype IN ('a', 'r'),
       EXISTS (SELECT
                 FROM pg_index i
                WHERE i.indrelid = c.conrelid AND i.indisvalid AND i.indpred IS NULL
                  AND c.conkey <@ (i.indkey::int2[])[0:cardinality(c.conkey) - 1])
  FROM pg_constraint c
 WHERE c.contype = 'f' AND c.confrelid = 'onejob.tasks'::regclass AND c.conparentid = 0
 ORDER BY c.conrelid::regclass::text, c.conname`)
	if err != nil {
		return nil, fmt.Errorf("read the foreign keys to onejob.tasks: %w", sanitized(err))
	}
	return list, nil
}
