package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/internal/pgerror"
	"onejob/tasks"
)

// beatTimeout bounds a heartbeat. One that takes longer is given to Consul.
const beatTimeout = 2 * time.Second

// ClusterID returns the id that the Consul of this database has; empty if there was
// none yet.
func (s *Store) ClusterID(ctx context.Context) (string, error) {
	ids, err := fetch(ctx, s.list, "read the cluster's id", pgx.RowTo[string], `SELECT coalesce(id::text, '') FROM onejob.cluster`)
	if err != nil {
		return "", err
	}
	if len(ids) == 0 {
		return "", errors.New("read the cluster's id: somebody deleted the row of onejob.cluster; INSERT INTO onejob.cluster DEFAULT VALUES")
	}
	return ids[0], nil
}

// AdoptConsul gives the cluster a new id, which write puts into Consul, if every
// replica that may be alive is among the sessions that Consul knows. If foreign is set,
// because Consul has another cluster's id, there must be no other session either. Else
// it returns a tasks.OtherClusterError. If the id is not the one given any more it does
// nothing.
func (s *Store) AdoptConsul(ctx context.Context, id string, sessions []string, foreign bool, by string, write func(ctx context.Context, id string) error) error {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		// All others wait for this row. A replica that is frozen or lost meanwhile must not keep it.
		if _, err := tx.Exec(ctx, indexesOnly+`, pg_catalog.set_config('idle_in_transaction_session_timeout', '10s', true)`); err != nil {
			return err
		}
		var now, next string
		if err := tx.QueryRow(ctx, `SELECT coalesce(id::text, ''), gen_random_uuid()::text FROM onejob.cluster FOR UPDATE`).Scan(&now, &next); err != nil {
			return fmt.Errorf("read the cluster's id: %w", err)
		}
		if now != id {
			return nil
		}
		// A session of an older version has no row; one that holds a task counts, but
		// not before there was an id, when there were older versions only.
		rows, err := tx.Query(ctx, `
SELECT session::text, name FROM onejob.replicas WHERE ended_at IS NULL
 UNION
SELECT t.session::text, t.replica
  FROM onejob.tasks t
 WHERE t.status = 'running'
   AND $1 <> ''
   AND (SELECT true FROM onejob.replicas r WHERE r.session = t.session AND r.ended_at IS NOT NULL LIMIT 1) IS NULL`, id)
		if err != nil {
			return fmt.Errorf("look for replicas: %w", err)
		}
		type replica struct{ Session, Name string }
		ours, err := pgx.CollectRows(rows, pgx.RowToStructByPos[replica])
		if err != nil {
			return fmt.Errorf("look for replicas: %w", err)
		}
		for _, r := range ours {
			if !slices.Contains(sessions, r.Session) {
				return &tasks.OtherClusterError{Why: fmt.Sprintf("replica %s, which may be at work, has no session here (%s); is this the right Consul (consul.address, consul.prefix)? If it was wiped or rebuilt, and that replica is gone: onejob adopt-consul", r.Name, r.Session)}
			}
		}
		for _, session := range sessions {
			if foreign && !slices.ContainsFunc(ours, func(r replica) bool { return r.Session == session }) {
				return &tasks.OtherClusterError{Why: fmt.Sprintf("replicas of another database are at work here (session %s); is this the right Consul (consul.address)? Each cluster needs a consul.prefix of its own", session)}
			}
		}
		if err := write(ctx, next); err != nil {
			return fmt.Errorf("write the cluster's id: %w", err)
		}
		if _, err := tx.Exec(ctx, `UPDATE onejob.cluster SET id = $1, adopted_at = clock_timestamp(), adopted_by = $2`, next, by); err != nil {
			return fmt.Errorf("write the cluster's id: %w", err)
		}
		return nil
	})
}

// ForgetReplicas calls all replicas dead that may be alive and are not known in
// Consul, and returns their names. A person who does that knows that they are gone.
//
// It ends the statements of all sessions that have ended and are not known, of whatever rows, so
// that a call that did not end all of them can be repeated. If one goes on it returns an error
// beside the names.
func (s *Store) ForgetReplicas(ctx context.Context, known []string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	names, err := query(ctx, s.pool, pgx.RowTo[string], `
WITH gone AS (
    SELECT DISTINCT ON (session) session, name
      FROM (SELECT session, replica AS name, true AS told_by_a_row FROM onejob.tasks WHERE status = 'running'
         UNION ALL
            SELECT session, name, false FROM onejob.replicas WHERE ended_at IS NULL) candidates
     ORDER BY session, told_by_a_row, name
)
INSERT INTO onejob.replicas (session, process, name, host, pid, version, kinds, queues, concurrency, running, state, ended_at)
SELECT session, session, name, '', 0, '', '{}', '{}', 0, 0, 'dead', clock_timestamp()
  FROM gone
 WHERE session::text <> ALL ($1)
    ON CONFLICT (session) DO UPDATE SET state = 'dead', ended_at = clock_timestamp() WHERE replicas.ended_at IS NULL
RETURNING name`, notNil(known))
	if err != nil {
		return nil, fmt.Errorf("forget replicas: %w", err)
	}
	if err := s.endStatementsUnder(ctx, `session::text <> ALL ($1)`, notNil(known)); err != nil {
		return names, fmt.Errorf("statements of dead replicas may run on; do this again to end them: %w", err)
	}
	return names, nil
}

// Join adds a session to the replicas of the cluster with this id. If the cluster has
// another id by now it returns a tasks.OtherClusterError. It also deletes what is left of
// sessions that have ended a day ago, except those that a row still runs under: how they ended decides
// what it is charged.
func (s *Store) Join(ctx context.Context, id string, r tasks.Replica) error {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	join := func() ([]bool, error) {
		return query(ctx, s.list, pgx.RowTo[bool], `
INSERT INTO onejob.replicas (session, process, name, host, pid, version, kinds, queues, concurrency, limits_backend, running, state, machine, started, names, server)
SELECT @session, @process, @name, @host, @pid, @version, @kinds, @queues, @concurrency, nullif(@limits_backend, ''), @running, @state, @machine, @started, @names::jsonb, pg_postmaster_start_time()
  FROM (SELECT FROM onejob.cluster WHERE id = @cluster FOR SHARE) ours
RETURNING true`, replicaArguments(r, id))
	}
	joined, err := join()
	if pgerror.Is(err, untranslatable) && r.Choices != nil {
		if r.Choices, err = s.sayable(ctx, r.Choices); err == nil {
			joined, err = join()
		}
	}
	switch {
	case err != nil:
		return fmt.Errorf("join the cluster: %w", err)
	case len(joined) == 0:
		return &tasks.OtherClusterError{Why: fmt.Sprintf("the cluster has another id than %s by now", id)}
	}
	// Housekeeping: a row that is locked, and after an error all of them, are left for another time.
	_, _ = query(ctx, s.list, pgx.RowTo[bool], `
DELETE FROM onejob.replicas
 WHERE session = ANY (ARRAY(SELECT session
                              FROM onejob.replicas
                             WHERE ended_at < statement_timestamp() - interval '1 day'
                               AND (SELECT true FROM onejob.tasks t WHERE t.status = 'running' AND t.session = replicas.session LIMIT 1) IS NULL
                               FOR UPDATE SKIP LOCKED))
RETURNING true`)
	return nil
}

func replicaArguments(r tasks.Replica, cluster string) namedArgs {
	return namedArgs{"session": r.Session, "process": r.Process, "name": r.Name, "host": r.Host, "pid": r.PID, "version": r.Version,
		"kinds": notNil(r.Kinds), "queues": notNil(r.Queues), "concurrency": r.Concurrency, "limits_backend": r.LimitsBackend, "running": r.Running, "state": r.State,
		"machine": r.Machine, "started": int64(r.Started), "names": choices(r), "cluster": cluster}
}

// choices returns what a replica's payloads can choose, as JSON; nil if it is not told.
func choices(r tasks.Replica) *string {
	if r.Choices == nil {
		return nil
	}
	raw, _ := json.Marshal(r.Choices) // a map of this type always can be
	return new(string(raw))
}

// sayable returns choices without the names that the database cannot hold: those with a character that
// its encoding lacks, or with a NUL. No payload there can have them either, and they must not keep their
// replica off the list.
func (s *Store) sayable(ctx context.Context, choices map[string]map[string][]string) (map[string]map[string][]string, error) {
	all := map[string]map[string][]string{}
	for kind, fields := range choices {
		all[kind] = map[string][]string{}
		for field, names := range fields {
			known := []string{}
			for _, name := range names {
				if ascii(name) != name || strings.Contains(name, "\x00") {
					raw, _ := json.Marshal(name) // a string always can be
					switch _, err := query(ctx, s.list, pgx.RowTo[bool], `SELECT $1::jsonb IS NULL`, string(raw)); {
					case pgerror.Is(err, untranslatable):
						continue
					case err != nil:
						return nil, err
					}
				}
				known = append(known, name)
			}
			all[kind][field] = known
		}
	}
	return all, nil
}

// progress returns how far a replica's handlers are, as JSON; nil if it is not told.
func progress(r tasks.Replica) *string {
	if r.Progress == nil {
		return nil
	}
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false) // six bytes for one
	if e.Encode(r.Progress) != nil {
		return nil // a year above 9999: a clock is wrong
	}
	return new(b.String())
}

// The table is read once: beside an old snapshot it has a version of each row for every second.
var beatSQL = `
WITH beat AS (
    UPDATE onejob.replicas
       SET heartbeat_at = clock_timestamp(),
           running      = $2,
           state        = $3,
           kinds        = $4,
           names        = coalesce($5::jsonb, names),
           progress     = coalesce($7::jsonb, progress),
           clock_ahead  = greatest(least($6::bigint - (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, 1000000000000000), -1000000000000000) * interval '1 microsecond',
           server       = pg_postmaster_start_time()
     WHERE session = $1
       AND ended_at IS NULL
 RETURNING true
), listed AS MATERIALIZED (
    SELECT ` + listColumns + `, xmin AS written
      FROM onejob.replicas` + onList + `
), now_listed AS (
    SELECT sum(hashtextextended(state, uuid_hash_extended(session, running # hash_array_extended(kinds, 0))))::text AS digest
      FROM listed
), answer AS (
    SELECT (SELECT true FROM beat) IS NULL AS ended, pg_current_xact_id()::xid AS transaction, digest,
           digest <> $8 OR pg_postmaster_start_time() <> $9 AS whole
      FROM now_listed
)` + replicasSQL(`,
       quiet, ended, transaction, digest, whole`, `listed
 CROSS JOIN answer
 CROSS JOIN LATERAL (SELECT ended_at IS NULL AND pg_postmaster_start_time() = $9 AND age(written) > age($10::xid) AS quiet) q`, `
   AND (whole OR quiet OR session = $1)`)

// Beat writes a heartbeat of a session. It answers with what Replicas returns if that is
// another list than the caller knows, and otherwise only with replicas that have sent no
// heartbeat since a transaction. Choices and Progress that are nil are left as they are.
//
// The digest of the list is over what may change of a row, but for its heartbeat: with many
// replicas, to send all rows to each of them every second is most of what they cost.
//
// Heartbeats are compared by their transactions, because Postgres' clock may be set back. No
// transaction that comes after a heartbeat was acknowledged has a lower number than that, even
// if Postgres crashes in between: the heartbeat is on the disk by then. Another server may give
// the number out again; its answer is the whole list.
func (s *Store) Beat(ctx context.Context, r tasks.Replica, known tasks.Known) (tasks.Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, min(beatTimeout, s.timeout))
	defer cancel()
	a := tasks.Answer{Ended: true}
	beat := func(progress *string) ([]tasks.Replica, error) {
		return query(ctx, s.list, func(row pgx.CollectableRow) (listed tasks.Replica, err error) {
			return listed, row.Scan(append(replicaColumns(&listed), &listed.Quiet, &a.Ended, &a.Transaction, &a.Digest, &a.Whole)...)
		}, beatSQL,
			r.Session, r.Running, r.State, notNil(r.Kinds), choices(r), time.Now().UnixMicro(), progress, known.Digest, known.Server, known.Since)
	}
	told := progress(r)
	list, err := beat(told)
	if pgerror.Is(err, untranslatable) && r.Choices != nil {
		if r.Choices, err = s.sayable(ctx, r.Choices); err == nil {
			list, err = beat(told)
		}
	}
	if pgerror.Is(err, untranslatable) && told != nil {
		plain := ascii(*told) // what a handler says must not keep its replica off the list
		list, err = beat(&plain)
	}
	if err != nil {
		return tasks.Answer{}, fmt.Errorf("heartbeat: %w", err)
	}
	for _, l := range list {
		a.Server = l.Server
		if a.Whole || l.Session != r.Session { // its own row is there for the rest of the answer
			a.Replicas = append(a.Replicas, l)
		}
	}
	return a, nil
}

// Replicas returns the replicas that have not ended, or have ended within the last ten
// minutes, in the order in which they began.
func (s *Store) Replicas(ctx context.Context) ([]tasks.Replica, error) {
	return fetch(ctx, s.list, "list replicas", func(row pgx.CollectableRow) (r tasks.Replica, err error) {
		return r, row.Scan(replicaColumns(&r)...)
	}, replicasSQL("", "onejob.replicas", ""))
}

// onList says which rows are on the list.
const onList = `
 WHERE (ended_at IS NULL OR ended_at > statement_timestamp() - interval '10 minutes')`

// listColumns are what the list has of a row.
const listColumns = `session, process, name, host, pid, version, kinds, queues, concurrency, limits_backend, running, state, heartbeat_at, machine, started, server, began_at, ended_at`

// replicasSQL returns a statement for rows on the list, with more columns, from a table, and with more
// conditions.
func replicasSQL(columns, from, where string) string {
	return `
SELECT session::text, process::text, name, host, pid, version, kinds, queues, concurrency, coalesce(limits_backend, ''), running, state, heartbeat_at, machine, started,
       server IS NOT DISTINCT FROM pg_postmaster_start_time(), pg_postmaster_start_time()` + columns + `
  FROM ` + from + onList + where + `
 ORDER BY began_at, session`
}

// replicaColumns returns where the columns of replicasSQL go.
func replicaColumns(r *tasks.Replica) []any {
	return []any{&r.Session, &r.Process, &r.Name, &r.Host, &r.PID, &r.Version, &r.Kinds, &r.Queues, &r.Concurrency, &r.LimitsBackend, &r.Running, &r.State, &r.HeartbeatAt, &r.Machine, &r.Started, &r.Here, &r.Server}
}

// EndReplica notes that nobody works under a session any more, and why: the replica
// has stopped, or lost it.
func (s *Store) EndReplica(ctx context.Context, session string, how tasks.ReplicaState) error {
	ctx, cancel := context.WithTimeout(ctx, min(beatTimeout, s.timeout))
	defer cancel()
	if _, err := query(ctx, s.list, pgx.RowTo[bool], `
UPDATE onejob.replicas
   SET state    = $2,
       running  = 0,
       ended_at = clock_timestamp()
 WHERE session = $1
   AND ended_at IS NULL
RETURNING true`, session, how); err != nil {
		return fmt.Errorf("end replica %s: %w", session, err)
	}
	return nil
}

// DeclareDead notes that a session has ended, unless there was a heartbeat after the
// one given, and returns how: stopped if it is known to have stopped in order, and lost
// if the process lives on under another one. The answer is empty if it was not changed.
//
// It ends the statements of the session, of whatever rows. If one cannot be ended, TakeOver says so
// for a row that is still running.
func (s *Store) DeclareDead(ctx context.Context, r tasks.Replica, stopped bool) (tasks.ReplicaState, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	how, err := query(ctx, s.list, pgx.RowTo[tasks.ReplicaState], `
WITH declared AS (
    UPDATE onejob.replicas d
       SET state    = CASE WHEN $3 THEN 'stopped'
                           WHEN (SELECT true FROM onejob.replicas o WHERE o.process = d.process AND o.ended_at IS NULL AND o.began_at > d.began_at LIMIT 1)
                           THEN 'lost' ELSE 'dead' END,
           ended_at = clock_timestamp()
     WHERE session = (SELECT session
                        FROM onejob.replicas
                       WHERE session = $1
                         AND ended_at IS NULL
                         AND heartbeat_at = $2
                         FOR NO KEY UPDATE SKIP LOCKED)
 RETURNING state
)
SELECT state
  FROM declared
 UNION ALL
SELECT ''
  FROM onejob.replicas
 WHERE session = $1
   AND ended_at IS NULL
   AND heartbeat_at = $2
   AND NOT EXISTS (SELECT FROM declared)`, r.Session, r.HeartbeatAt, stopped)
	if err != nil {
		return "", fmt.Errorf("declare replica %s dead: %w", r.Session, err)
	}
	if len(how) == 0 {
		return "", nil
	}
	if how[0] == "" {
		return "", fmt.Errorf("declare replica %s (%s) dead: another transaction has locked its row in onejob.replicas", r.Name, r.Session)
	}
	_ = s.endStatementsUnder(ctx, `session = $1`, r.Session)
	return how[0], nil
}

// DeclareProcessDead notes that all sessions of a process are dead, whose end the
// caller has seen, and returns those that had not ended. It ends their statements, of whatever
// rows, and returns an error too if one goes on.
func (s *Store) DeclareProcessDead(ctx context.Context, process string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	sessions, err := query(ctx, s.list, pgx.RowTo[string], `
UPDATE onejob.replicas
   SET state    = 'dead',
       ended_at = clock_timestamp()
 WHERE process = $1
   AND ended_at IS NULL
RETURNING session::text`, process)
	if err != nil {
		return nil, fmt.Errorf("declare process %s dead: %w", process, err)
	}
	if err := s.endStatementsUnder(ctx, `process = $1`, process); err != nil {
		return sessions, fmt.Errorf("end the statements of process %s: %w", process, err)
	}
	return sessions, nil
}
