package lifecycle

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Schema returns the statements that make Postgres note every change of a task's row from
// now on, in lifecycle.steps. clock is an SQL expression for the moment of a step.
//
// INSERTs are noted of rows that a schedule made, and of rows that are not as a new task
// is. There are many others in tests, and none of them says anything.
//
// Payloads and results are left out, so a step costs some microseconds however large
// they are.
func Schema(clock string) string {
	object := func(row string) string {
		pairs := make([]string, len(columns))
		for i, c := range columns {
			value := row + "." + c
			switch c {
			case "has_result":
				value = row + ".result IS NOT NULL"
			case "timeout", "keep_for":
				value += "::text"
			}
			pairs[i] = fmt.Sprintf("'%s', %s", c, value)
		}
		return "jsonb_strip_nulls(jsonb_build_object(" + strings.Join(pairs, ", ") + "))"
	}
	return strings.NewReplacer("{clock}", clock, "{old}", object("OLD"), "{new}", object("NEW")).Replace(`
CREATE SCHEMA lifecycle;
CREATE TABLE lifecycle.steps (
    id        bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task      bigint      NOT NULL,
    by        text        NOT NULL,
    at        timestamptz NOT NULL,
    began     timestamptz NOT NULL,
    statement timestamptz NOT NULL,
    noted     timestamptz NOT NULL,
    was       jsonb       NOT NULL,
    became    jsonb       NOT NULL
);
CREATE FUNCTION lifecycle.note() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    was    jsonb := '{}';
    became jsonb := '{}';
BEGIN
    IF TG_OP IN ('UPDATE', 'DELETE') THEN
        was := {old};
    END IF;
    IF TG_OP IN ('INSERT', 'UPDATE') THEN
        became := {new};
    END IF;
    INSERT INTO lifecycle.steps (task, by, at, began, statement, noted, was, became)
    VALUES (coalesce(NEW.id, OLD.id, 0), current_setting('application_name'), {clock}, transaction_timestamp(), statement_timestamp(), clock_timestamp(), was, became);
    RETURN NULL;
END $$;
CREATE TRIGGER note_change AFTER UPDATE OR DELETE ON onejob.tasks
    FOR EACH ROW EXECUTE FUNCTION lifecycle.note();
CREATE TRIGGER note_truncate AFTER TRUNCATE ON onejob.tasks
    FOR EACH STATEMENT EXECUTE FUNCTION lifecycle.note();
CREATE TRIGGER note_insert AFTER INSERT ON onejob.tasks
    FOR EACH ROW WHEN (NEW.schedule_id IS NOT NULL OR NEW.status <> 'pending' OR NEW.attempt + NEW.crashes + NEW.stalls > 0 OR NEW.fence IS NOT NULL)
    EXECUTE FUNCTION lifecycle.note();
`)
}

// Querier is a connection or a pool.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Read returns all steps that were noted. Those of one row are in the order in which they
// were made.
func Read(ctx context.Context, db Querier) ([]Step, error) {
	found, err := db.Query(ctx, `
SELECT json_build_object('task', task, 'by', by, 'at', at, 'began', began, 'statement', statement, 'noted', noted, 'was', was, 'is', became)::text
  FROM lifecycle.steps
 ORDER BY id`)
	if err != nil {
		return nil, fmt.Errorf("read the steps of tasks: %w", err)
	}
	steps, err := pgx.CollectRows(found, func(row pgx.CollectableRow) (s Step, err error) {
		var text []byte
		if err := row.Scan(&text); err != nil {
			return s, err
		}
		return s, json.Unmarshal(text, &s)
	})
	if err != nil {
		return nil, fmt.Errorf("read the steps of tasks: %w", err)
	}
	return slices.Clip(steps), nil
}
