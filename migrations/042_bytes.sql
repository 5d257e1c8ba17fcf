-- The order of text is that of the C library or of ICU, which changes with their versions: when the
-- operating system is upgraded, or a standby on another one is promoted. An index of before may find
-- nothing then, so that a second row with a running lock_key, or with a unique_key that is taken, gets
-- in. These indexes compare bytes, whose order never changes. Those for limits and names only lead to
-- rows; see docs/operate/high-availability.md.
DROP INDEX onejob.one_running_task_per_lock_key;
CREATE UNIQUE INDEX one_running_task_per_lock_key ON onejob.tasks ((coalesce(lock_key, id::text)) text_pattern_ops) WHERE status = 'running';
DROP INDEX onejob.unique_key_is_taken_by_a_pending_or_running_task;
CREATE UNIQUE INDEX unique_key_is_taken_by_a_pending_or_running_task ON onejob.tasks (unique_key text_pattern_ops)
    WHERE unique_key IS NOT NULL AND status IN ('pending', 'running');
DROP INDEX onejob.tasks_pending_by_lock_key;
CREATE INDEX tasks_pending_by_lock_key ON onejob.tasks (onejob.lane(priority, queue, kind, lock_key IS NULL), lock_key text_pattern_ops, run_at, id)
    WHERE status = 'pending' AND limit_name IS NULL AND lock_key IS NOT NULL;
DROP INDEX onejob.attempts_by_lock_key;
CREATE INDEX attempts_by_lock_key ON onejob.attempts (lock_key text_pattern_ops, fence) WHERE lock_key <> task_id::text;

-- PL/pgSQL reads a function with the settings of the session that calls it. With this one off, a
-- backslash in a string is not what it was written as, and both functions failed.
ALTER FUNCTION onejob.why(bigint) SET standard_conforming_strings = on;
ALTER FUNCTION onejob.why_pending(onejob.tasks) SET standard_conforming_strings = on;

-- Up to Postgres 13, || does not join a string and an object.
CREATE OR REPLACE FUNCTION onejob.refuse_long_payload() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    broken text;
BEGIN
    -- What comes from another table may be compressed. What is built anew is not.
    broken := CASE WHEN octet_length(NEW.payload::text) > 4194304 THEN 'payload_is_at_most_4_mib'
                   WHEN octet_length(NEW.payload::text) > 65536 + 8 * pg_column_size(jsonb_build_array(NEW.payload)) THEN 'payload_is_at_most_8_times_as_long_as_text' END;
    IF broken IS NOT NULL THEN
        RAISE EXCEPTION 'new row for relation "%" violates check constraint "%"', TG_TABLE_NAME, broken
              USING ERRCODE = 'check_violation', CONSTRAINT = broken, SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME;
    END IF;
    RETURN NEW;
END $$;
