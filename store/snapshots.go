package store

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/tasks"
)

// behindAtLeast is from how many transactions on a standby or a replication slot is
// reported. Postgres does not say since when it has its xmin.
const behindAtLeast = 100_000

// heldSQL lists what holds back vacuum in this database, the oldest first.
//
// A transaction counts only if it has a snapshot or an xid: one that is idle
// between two statements at READ COMMITTED, and has written nothing, holds nothing
// back. Nor does vacuum itself. Of other users' backends a role sees these columns
// only with the rights of pg_read_all_stats.
const heldSQL = `
SELECT what, coalesce(pid, 0), coalesce(name, ''), coalesce(usename, ''), coalesce(application_name, ''),
       coalesce((extract(epoch FROM clock_timestamp() - since) * 1000000)::bigint, 0), behind
  FROM (SELECT CASE backend_type WHEN 'walsender' THEN 'standby' ELSE 'transaction' END AS what, pid, NULL AS name, usename::text, application_name,
               CASE WHEN backend_type <> 'walsender' THEN xact_start END AS since,
               greatest(age(backend_xmin), age(backend_xid)) AS behind
          FROM pg_stat_activity a
         WHERE (datname = current_database() OR backend_type = 'walsender')
           AND num_nonnulls(backend_xmin, backend_xid) > 0
           AND backend_type NOT IN ('autovacuum worker', 'parallel worker')
           AND pid <> pg_backend_pid()
           AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum v WHERE v.pid = a.pid)
     UNION ALL
        SELECT 'prepared transaction', NULL, gid, owner::text, NULL, prepared, age(transaction)
          FROM pg_prepared_xacts
         WHERE database = current_database()
     UNION ALL
        SELECT 'replication slot', active_pid, slot_name::text, NULL, NULL, NULL, age(xmin)
          FROM pg_replication_slots
         WHERE xmin IS NOT NULL) held
 WHERE since < clock_timestamp() - $1 * interval '1 microsecond'
    OR since IS NULL AND behind >= $2
 ORDER BY behind DESC, since
 LIMIT 100`

// HeldSnapshots returns what has held back vacuum for longer than a time, as far as
// this role may see it, the oldest first.
func (s *Store) HeldSnapshots(ctx context.Context, longerThan time.Duration) ([]tasks.HeldSnapshot, error) {
	return fetchFreely(ctx, s.pool, "look for held snapshots", scanHeld, heldSQL, longerThan.Microseconds(), behindAtLeast)
}

func scanHeld(row pgx.CollectableRow) (h tasks.HeldSnapshot, err error) {
	var micros int64
	err = row.Scan(&h.What, &h.PID, &h.Name, &h.User, &h.Application, &micros, &h.Behind)
	h.Age = time.Duration(micros) * time.Microsecond
	return h, err
}

// SeesAllBackends reports whether HeldSnapshots sees other users' transactions.
func (s *Store) SeesAllBackends(ctx context.Context) (all bool, err error) {
	return one(fetchFreely(ctx, s.pool, "look up the rights of pg_read_all_stats", pgx.RowTo[bool], `SELECT pg_has_role('pg_read_all_stats', 'USAGE')`))
}
