package store

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/jackc/pgx/v5"

	"onejob/internal/pgerror"
	"onejob/tasks"
)

// lanesSQL begins a statement with the lanes that have waiting rows without a limit,
// and the first row of each: one probe of tasks_pending for each (a loose index scan).
// What it is given of claims' marks it does not look behind, so a lane with a mark may
// be there without a row.
const lanesSQL = `
WITH RECURSIVE marks AS MATERIALIZED (
    SELECT lane, least(run_at, statement_timestamp() - interval '1 second') AS run_at,
           CASE WHEN run_at <= statement_timestamp() - interval '1 second' THEN id ELSE 0 END AS id
      FROM unnest(@lanes::bigint[], @run_ats::timestamptz[], @ids::bigint[]) AS m(lane, run_at, id)
), lanes AS (
    SELECT (-1)::bigint AS lane, NULL::text AS queue, NULL::text AS kind, NULL::timestamptz AS run_at
 UNION ALL
    SELECT next.*
      FROM lanes l
      LEFT JOIN LATERAL (SELECT * FROM marks WHERE lane > l.lane ORDER BY lane LIMIT 1) m ON true
     CROSS JOIN LATERAL (
          (SELECT onejob.lane(priority, queue, kind, lock_key IS NULL), queue, kind, run_at
             FROM onejob.tasks
            WHERE status = 'pending'
              AND limit_name IS NULL
              AND onejob.lane(priority, queue, kind, lock_key IS NULL) > l.lane
              AND onejob.lane(priority, queue, kind, lock_key IS NULL) < coalesce(m.lane, 9223372036854775807)
            ORDER BY onejob.lane(priority, queue, kind, lock_key IS NULL), run_at, id
            LIMIT 1)
       UNION ALL
          (SELECT m.lane, t.queue, t.kind, t.run_at
             FROM (SELECT WHERE m.lane IS NOT NULL) marked
             LEFT JOIN LATERAL (
                  SELECT queue, kind, run_at
                    FROM onejob.tasks
                   WHERE status = 'pending'
                     AND limit_name IS NULL
                     AND onejob.lane(priority, queue, kind, lock_key IS NULL) = m.lane
                     AND (run_at, id) > (m.run_at, m.id)
                   ORDER BY run_at, id
                   LIMIT 1) t ON true)
            LIMIT 1) next
)`

// pausedSQL is the queues that are paused.
const pausedSQL = `(SELECT coalesce(array_agg(name), '{}') FROM onejob.queues WHERE paused_until > statement_timestamp())::text[]`

// UnservedQueues returns up to n queues, in the order of the alphabet, in which tasks
// without a limit have been due for some seconds, and from which no live replica claims.
// Paused ones are left out.
func (s *Store) UnservedQueues(ctx context.Context, n int) ([]string, error) {
	arguments := s.remember.costly()
	arguments["most"] = n
	return fetch(ctx, s.pool, "look for queues that nobody serves", pgx.RowTo[string], lanesSQL+`
SELECT DISTINCT queue
  FROM lanes
 WHERE run_at <= statement_timestamp() - interval '10 seconds'
   AND queue <> ALL (`+pausedSQL+`)
   AND (SELECT true
          FROM onejob.replicas r
         WHERE r.ended_at IS NULL
           AND (cardinality(r.queues) = 0 OR lanes.queue = ANY (r.queues))
         LIMIT 1) IS NULL
 ORDER BY queue
 LIMIT @most::bigint`, arguments)
}

// UnknownKinds returns the kinds of waiting tasks that are not among known.
func (s *Store) UnknownKinds(ctx context.Context, known []string) ([]string, error) {
	arguments := s.remember.costly()
	arguments["known"] = notNil(known)
	return fetch(ctx, s.pool, "look for unknown kinds", pgx.RowTo[string], lanesSQL+`
SELECT DISTINCT kind FROM lanes WHERE kind IS NOT NULL AND kind <> ALL (@known)`, arguments)
}

// DueKinds returns those of c.Kinds of which rows without a limit of their own
// are due, in queues that are not paused.
func (s *Store) DueKinds(ctx context.Context, c tasks.Claim) ([]string, error) {
	arguments := s.remember.costly()
	arguments["kinds"], arguments["queues"] = c.Kinds, notNil(c.Queues)
	return fetch(ctx, s.pool, "look for due kinds", pgx.RowTo[string], lanesSQL+`
SELECT DISTINCT kind
  FROM lanes
 WHERE kind = ANY (@kinds)
   AND (cardinality(@queues::text[]) = 0 OR queue = ANY (@queues))
   AND run_at <= now()
   AND queue <> ALL (`+pausedSQL+`)`, arguments)
}

// Limited reports whether rows with a limit are waiting.
func (s *Store) Limited(ctx context.Context) (bool, error) {
	some, err := fetch(ctx, s.pool, "look for tasks with a limit", pgx.RowTo[bool], `
SELECT true
  FROM onejob.tasks
 WHERE status = 'pending'
   AND limit_name IS NOT NULL
 LIMIT 1`)
	return len(some) > 0, err
}

// DueLimits returns those of names under which rows are due that c would claim. Rows of
// paused queues do not count, or replicas would take slots in vain.
// Whether their lock keys are free is not asked. The cost is that of the lanes of
// these limits: what waits under other names is not looked at. Names that no row can have, as the
// encoding of the database lacks a character, are passed over.
func (s *Store) DueLimits(ctx context.Context, c tasks.Claim, names []string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	due, err := s.unsayable.spare(ctx, s.pool, names, func(names []string) ([]string, error) {
		return query(ctx, s.pool, pgx.RowTo[string], dueLimitsSQL, names, c.Kinds, notNil(c.Queues))
	})
	if err != nil {
		return nil, fmt.Errorf("look for limits with due tasks: %w", err)
	}
	return due, nil
}

const dueLimitsSQL = `
WITH RECURSIVE lanes AS (
    SELECT name, (-1)::bigint AS lane, NULL::text AS queue, NULL::text AS kind, NULL::timestamptz AS run_at
      FROM unnest($1::text[]) AS n(name)
 UNION ALL
    SELECT l.name, next.*
      FROM lanes l
     CROSS JOIN LATERAL (
           SELECT onejob.lane(priority, queue, kind, lock_key IS NULL), queue, kind, run_at
             FROM onejob.tasks
            WHERE status = 'pending'
              AND limit_name = l.name
              AND onejob.lane(priority, queue, kind, lock_key IS NULL) > l.lane
            ORDER BY onejob.lane(priority, queue, kind, lock_key IS NULL), run_at, id
            LIMIT 1) next
)
SELECT DISTINCT name
  FROM lanes
 WHERE run_at <= now()
   AND kind = ANY ($2)
   AND (cardinality($3::text[]) = 0 OR queue = ANY ($3))
   AND queue <> ALL (` + pausedSQL + `)`

// UnknownLimits returns up to n names of limits that waiting tasks have and that
// are not among known, in the order of the alphabet. It goes on behind the last name of
// the call before, and begins anew when that was the last of all. So each name has its
// turn, however many there are.
func (s *Store) UnknownLimits(ctx context.Context, known []string, n int) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	last, _ := s.unknown.Load().(string)
	names, err := s.unsayable.spare(ctx, s.pool, known, func(known []string) ([]string, error) {
		return query(ctx, s.pool, pgx.RowTo[string], unknownLimitsSQL, known, n, last)
	})
	if err != nil {
		return nil, fmt.Errorf("look for unknown limits: %w", err)
	}
	last = ""
	if n > 0 && len(names) >= n {
		last = names[len(names)-1]
	}
	s.unknown.Store(last)
	return names, nil
}

// The known ones are looked up in a hash table. With an array in its place each name would be compared
// with all of them: it is no constant, of which Postgres would make such a table.
const unknownLimitsSQL = `
WITH RECURSIVE names AS (
    (SELECT limit_name, (limit_name NOT IN (SELECT unnest($1::text[])))::int AS unknown
       FROM onejob.tasks
      WHERE status = 'pending'
        AND limit_name > $3
      ORDER BY limit_name
      LIMIT 1)
 UNION ALL
    SELECT next.limit_name, n.unknown + (next.limit_name NOT IN (SELECT unnest($1::text[])))::int
      FROM names n
     CROSS JOIN LATERAL (
           SELECT limit_name
             FROM onejob.tasks
            WHERE status = 'pending'
              AND limit_name > n.limit_name
            ORDER BY limit_name
            LIMIT 1) next
     WHERE n.unknown < $2
)
SELECT limit_name FROM names WHERE limit_name NOT IN (SELECT unnest($1::text[])) ORDER BY limit_name`

// unsayable are names that the encoding of the database, which is not UTF8 then, lacks a
// character of. Anybody who may write to Consul can give a limit such a name. The zero value is ready.
type unsayable struct {
	mu    sync.Mutex
	names map[string]bool
}

// spare calls f with names, but for those.
func (u *unsayable) spare(ctx context.Context, db *pool, names []string, f func(names []string) ([]string, error)) ([]string, error) {
	list, err := f(u.without(names))
	if !pgerror.Is(err, untranslatable) {
		return list, err
	}
	for _, name := range u.without(names) {
		if ascii(name) == name {
			continue
		}
		_, err := query(ctx, db, pgx.RowTo[bool], `SELECT $1::text IS NULL`, name)
		if pgerror.Is(err, untranslatable) {
			u.mu.Lock()
			if u.names == nil || len(u.names) >= maxUnsayable {
				u.names = map[string]bool{}
			}
			u.names[name] = true
			u.mu.Unlock()
		} else if err != nil {
			return nil, err
		}
	}
	return f(u.without(names))
}

// maxUnsayable is how many such names are remembered.
const maxUnsayable = 4096

func (u *unsayable) without(names []string) []string {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.names) == 0 {
		return notNil(names)
	}
	return slices.DeleteFunc(slices.Clone(notNil(names)), func(name string) bool { return u.names[name] })
}

func notNil(s []string) []string {
	if s == nil {
		return []string{}
	}
	return s
}
