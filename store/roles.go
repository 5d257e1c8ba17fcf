package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Roles names the group roles that RolesSQL makes. They cannot log in; they are
// granted to users that can.
type Roles struct {
	Enqueuer string
	Observer string
	Operator string
	Worker   string
}

// grant is privileges on one object of the schema onejob.
type grant struct {
	on         string // TABLE, SEQUENCE, FUNCTION or SCHEMA
	object     string
	privileges string // separated by ", "; they may name columns
}

// What a task is enqueued with. All other columns are the replicas' business.
const (
	taskInput = "kind, payload, queue, priority, run_at, lock_key, limit_name, unique_key, max_attempts, timeout, keep_for, traceparent"

	enqueueFunction = "enqueue(text, jsonb, text, int, timestamptz, text, text, text, int, interval)"
)

var usesSchema = grant{"SCHEMA", "onejob", "USAGE"}

// each returns grants of the same privileges on several objects.
func each(on, privileges string, objects ...string) (list []grant) {
	for _, object := range objects {
		list = append(list, grant{on, object, privileges})
	}
	return list
}

// An enqueuer reads no more of the table than RETURNING id and ON CONFLICT
// (unique_key) need, and what became of a task.
var enqueuerGrants = []grant{
	usesSchema,
	{"TABLE", "tasks", "INSERT (" + taskInput + "), SELECT (id, unique_key, status)"},
	{"FUNCTION", enqueueFunction, "EXECUTE"},
	{"FUNCTION", "cancel(bigint)", "EXECUTE"},
}

// An observer reads everything, payloads, results and output included: without
// them, nobody can tell why a task fails.
var observerGrants = slices.Concat([]grant{usesSchema},
	each("TABLE", "SELECT", "schema_version", "tasks", "attempts", "overlaps", "schedules", "former_schedules", "occurrences", "cluster", "replicas", "progress", "queues", "actions"), whyGrants)

// whyGrants let a role ask why a task waits. What the functions read, it must be able to
// read itself.
var whyGrants = each("FUNCTION", "EXECUTE",
	"why(bigint)", "why_pending(onejob.tasks)", "why_replica(uuid, text)", "why_time(timestamptz)", "why_error(text)", "why_wait(text, bigint, bool)")

// An operator is an observer, too. It has no UPDATE on tasks: the functions run
// with their owner's rights and do nothing else.
var operatorGrants = append([]grant{
	{"FUNCTION", "cancel(bigint)", "EXECUTE"},
	{"FUNCTION", "retry(bigint)", "EXECUTE"},
	{"TABLE", "tasks", "DELETE"},
	{"TABLE", "attempts", "DELETE"},
	{"TABLE", "schedules", "INSERT, UPDATE, DELETE"},
}, actionGrants...)

// actionGrants are for what onejob.actions records.
var actionGrants = each("FUNCTION", "EXECUTE", "pause_queue(text, text, timestamptz)", "resume_queue(text)",
	"record(text, text, bigint, bigint, text)", "bulk(text, jsonb, bigint, int, interval, bigint, bool)",
	"run_schedule(text)", "pause_schedule(text, text, timestamptz)", "resume_schedule(text)")

// A worker has what a replica needs that does not migrate, and the command line on
// its host. CheckRights asks for just this.
var workerGrants = slices.Concat([]grant{
	usesSchema,
	{"TABLE", "schema_version", "SELECT"},
	{"TABLE", "tasks", "SELECT, INSERT, UPDATE, DELETE"},
	{"TABLE", "attempts", "SELECT, INSERT, DELETE"},
	{"TABLE", "overlaps", "SELECT"},
	{"TABLE", "schedules", "SELECT, UPDATE"},
	{"TABLE", "former_schedules", "SELECT, UPDATE, DELETE"},
	{"TABLE", "occurrences", "SELECT, INSERT, UPDATE, DELETE"},
	{"TABLE", "cluster", "SELECT, UPDATE"},
	{"TABLE", "replicas", "SELECT, INSERT, UPDATE, DELETE"},
	{"SEQUENCE", "fences", "USAGE"},
	{"SEQUENCE", "tasks_id_seq", "USAGE"},
	{"FUNCTION", "reserve_lock_key(text)", "EXECUTE"},
	{"FUNCTION", "reserve_task(text, bigint)", "EXECUTE"},
	{"FUNCTION", enqueueFunction, "EXECUTE"},
	{"FUNCTION", "cancel(bigint)", "EXECUTE"},
	{"FUNCTION", "retry(bigint)", "EXECUTE"},
	{"TABLE", "queues", "SELECT"},
	{"TABLE", "actions", "SELECT, DELETE"},
}, whyGrants, actionGrants)

func (g grant) name() string {
	if g.on == "SCHEMA" {
		return g.object
	}
	return "onejob." + g.object
}

func (g grant) to(role string) string {
	return fmt.Sprintf("GRANT %s ON %s %s TO %s;\n", g.privileges, g.on, g.name(), pgx.Identifier{role}.Sanitize())
}

// RolesSQL returns the statements that make the roles and give each just what it
// needs. They may be run again, after an upgrade for instance: what a role has
// besides is revoked.
func RolesSQL(r Roles) string {
	var b strings.Builder
	b.WriteString(`-- The roles of onejob. Run this as the owner of the schema onejob, with the right to
-- create roles, and again after each upgrade. Then grant a role to each user:
-- GRANT role TO user.
BEGIN;
SET LOCAL search_path = pg_catalog, pg_temp;
REVOKE ALL ON SCHEMA onejob FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA onejob FROM PUBLIC;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA onejob FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA onejob FROM PUBLIC;
GRANT EXECUTE ON FUNCTION onejob.lane(smallint, text, text, bool) TO PUBLIC; -- every INSERT computes it
`)
	literal := func(name string) string { return "'" + strings.ReplaceAll(name, "'", "''") + "'" }
	// An owner has all rights, and would keep those of one of the roles.
	fmt.Fprintf(&b, `
DO $do$
DECLARE owner name;
BEGIN
    SELECT rolname
      INTO owner
      FROM pg_roles
     WHERE rolname IN (%s, %s, %s, %s)
       AND (oid IN (SELECT nspowner FROM pg_namespace WHERE nspname = 'onejob')
            OR oid IN (SELECT relowner FROM pg_class WHERE relnamespace = 'onejob'::regnamespace)
            OR oid IN (SELECT proowner FROM pg_proc WHERE pronamespace = 'onejob'::regnamespace))
     LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'the role %% owns the schema onejob, or something in it, and would lose rights that its owner needs', quote_ident(owner)
              USING HINT = 'Choose other names: --prefix, --enqueuer, --observer, --operator, --worker.';
    END IF;
END $do$;
`, literal(r.Enqueuer), literal(r.Observer), literal(r.Operator), literal(r.Worker))
	for _, role := range []struct {
		name, what string
		grants     []grant
	}{
		{r.Enqueuer, "adds tasks and cancels them", enqueuerGrants},
		{r.Observer, "reads everything, payloads and output included", observerGrants},
		{r.Operator, "reads everything; cancels, retries and deletes tasks; pauses queues and schedules; edits schedules", append(observerGrants[:len(observerGrants):len(observerGrants)], operatorGrants...)},
		{r.Worker, "runs replicas that do not migrate the schema", workerGrants},
	} {
		ident := pgx.Identifier{role.name}.Sanitize()
		fmt.Fprintf(&b, "\n-- %s: %s.\n", strings.ReplaceAll(role.name, "\n", " "), role.what)
		fmt.Fprintf(&b, "DO $do$ BEGIN\n    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = %s) THEN\n        EXECUTE format('CREATE ROLE %%I NOLOGIN', %[1]s);\n    END IF;\nEND $do$;\n", literal(role.name))
		fmt.Fprintf(&b, "REVOKE ALL ON SCHEMA onejob FROM %[1]s;\nREVOKE ALL ON ALL TABLES IN SCHEMA onejob FROM %[1]s;\nREVOKE ALL ON ALL SEQUENCES IN SCHEMA onejob FROM %[1]s;\nREVOKE ALL ON ALL FUNCTIONS IN SCHEMA onejob FROM %[1]s;\n", ident)
		for _, g := range role.grants {
			b.WriteString(g.to(role.name))
		}
	}
	b.WriteString("COMMIT;\n")
	return b.String()
}

// CheckRights returns what this user may not do of what a replica does, and the
// statements that permit it.
func (s *Store) CheckRights(ctx context.Context) error {
	var ons, names, privileges []string
	for _, g := range workerGrants {
		for p := range strings.SplitSeq(g.privileges, ", ") {
			ons, names, privileges = append(ons, g.on), append(names, g.name()), append(privileges, p)
		}
	}
	var user string
	var lacks []string
	// Without USAGE on the schema nothing in it can be asked for by name.
	if err := s.pool.QueryRow(ctx, `
SELECT current_user, coalesce(array_agg(format('%s ON %s %s', privilege, object_type, name)) FILTER (WHERE NOT has), '{}')
  FROM unnest($1::text[], $2::text[], $3::text[]) AS needed(object_type, name, privilege)
 CROSS JOIN LATERAL (
       SELECT CASE WHEN object_type = 'SCHEMA'                         THEN has_schema_privilege(name, privilege)
                   WHEN NOT has_schema_privilege('onejob', 'USAGE')    THEN true
                   WHEN object_type = 'TABLE'                          THEN has_table_privilege(name, privilege)
                   WHEN object_type = 'SEQUENCE'                       THEN has_sequence_privilege(name, privilege)
                   WHEN object_type = 'FUNCTION'                       THEN has_function_privilege(name, privilege) END) AS rights(has)`,
		ons, names, privileges).Scan(&user, &lacks); err != nil {
		return fmt.Errorf("check rights: %w", err)
	}
	var errs []error
	for _, what := range lacks {
		errs = append(errs, fmt.Errorf("missing: GRANT %s TO %q", what, user))
	}
	return errors.Join(errs...)
}

// CheckPath returns, for each schema on the search_path that the user's own
// statements (the sql kind) have, who else may CREATE in it. Such a role can plant a
// function there, and a statement that calls one without its schema may run it as our
// user. Superusers are left out.
func (s *Store) CheckPath(ctx context.Context) ([]string, error) {
	var warnings []string
	err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT pg_catalog.set_config('search_path', NULL, true)`); err != nil {
			return err
		}
		var schemas []string
		if err := tx.QueryRow(ctx, `SELECT pg_catalog.current_schemas(false)::pg_catalog.text[]`).Scan(&schemas); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, fixed); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, `
WITH grantees AS (
    SELECT n.nspname, CASE WHEN a.grantee = to_regrole('pg_database_owner') THEN d.datdba ELSE a.grantee END AS grantee
      FROM pg_namespace n
      JOIN pg_database d ON d.datname = current_database()
     CROSS JOIN LATERAL (
           SELECT grantee FROM aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) WHERE privilege_type = 'CREATE'
        UNION
           SELECT n.nspowner) a
     WHERE n.nspname = ANY ($1)
)
SELECT format('%s may CREATE in the schema %s, which is on the search_path', string_agg(DISTINCT coalesce(r.rolname, 'everybody'), ', '), g.nspname)
  FROM grantees g
  LEFT JOIN pg_roles r ON r.oid = g.grantee
 WHERE g.grantee = 0
    OR NOT r.rolsuper AND r.rolname <> current_user
 GROUP BY g.nspname
 ORDER BY g.nspname`, schemas)
		if err != nil {
			return err
		}
		warnings, err = pgx.CollectRows(rows, pgx.RowTo[string])
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("check the search_path: %w", err)
	}
	return warnings, nil
}
