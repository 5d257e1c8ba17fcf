-- What the claim needs: rows that it can carry, and the order in which it takes
-- them. Rows from before that break a new rule are brought within it, and counted
-- in a warning.

-- 1. Rows that exist already

CREATE FUNCTION onejob.bring_within_rules() RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    ids bigint[];
BEGIN
    -- Rows that can never run. They end here: nothing is left of them that a replica could carry.
    WITH changed AS (
        UPDATE onejob.tasks
           SET status      = 'failed',
               error       = 'a kind, queue or limit_name may hold no control characters, and a limit_name no white space or slash, no dot at its beginning, and 100 bytes at most: enqueue the task again under another name',
               finished_at = now(),
               session     = NULL,
               replica     = NULL
         WHERE status IN ('pending', 'running')
           AND (kind ~ '[[:cntrl:]]' OR queue ~ '[[:cntrl:]]' OR limit_name ~ '^\.|[/\u0001-\u0020\u007f\u00a0\u2028\u2029]' OR octet_length(limit_name) > 100)
     RETURNING id
    ) SELECT array_agg(id ORDER BY id) INTO ids FROM changed;
    PERFORM onejob.warn_of_rows('failed, because a kind, queue or limit name cannot be used', ids);

    WITH changed AS (
        UPDATE onejob.tasks
           SET status      = 'failed',
               error       = 'the row was running but said not where, since when, or under which fence; onejob does not write such rows',
               finished_at = now(),
               session     = NULL,
               replica     = NULL
         WHERE status = 'running'
           AND num_nulls(session, replica, fence, started_at) > 0
     RETURNING id
    ) SELECT array_agg(id ORDER BY id) INTO ids FROM changed;
    PERFORM onejob.warn_of_rows('failed, because they were marked as running without a session, replica, fence or started_at', ids);

    WITH changed AS (
        UPDATE onejob.tasks
           SET kind       = regexp_replace(kind,       '[[:cntrl:]]', '?', 'g'),
               queue      = regexp_replace(queue,      '[[:cntrl:]]', '?', 'g'),
               limit_name = left(regexp_replace(limit_name, '^\.|[/\u0001-\u0020\u007f\u00a0\u2028\u2029]', '?', 'g'), CASE WHEN octet_length(limit_name) > 100 THEN 25 ELSE 100 END)
         WHERE kind ~ '[[:cntrl:]]' OR queue ~ '[[:cntrl:]]' OR limit_name ~ '^\.|[/\u0001-\u0020\u007f\u00a0\u2028\u2029]' OR octet_length(limit_name) > 100
     RETURNING id
    ) SELECT array_agg(id ORDER BY id) INTO ids FROM changed;
    PERFORM onejob.warn_of_rows('renamed: what a name may not hold became a question mark', ids);

    WITH changed AS (
        UPDATE onejob.tasks
           SET run_at      = CASE WHEN run_at < '0001-01-01 UTC' THEN now() WHEN run_at >= '10000-01-01 UTC' THEN 'infinity' ELSE run_at END,
               created_at  = CASE WHEN created_at  >= '0001-01-01 UTC' AND created_at  < '10000-01-01 UTC' THEN created_at  ELSE now() END,
               started_at  = CASE WHEN started_at  >= '0001-01-01 UTC' AND started_at  < '10000-01-01 UTC' OR started_at  IS NULL THEN started_at  ELSE now() END,
               finished_at = CASE WHEN finished_at >= '0001-01-01 UTC' AND finished_at < '10000-01-01 UTC' OR finished_at IS NULL THEN finished_at ELSE now() END,
               timeout     = CASE WHEN timeout > '100 years' THEN '100 years' ELSE timeout END,
               attempt     = least(attempt, 1000000),
               crashes     = least(crashes, 1000000)
         WHERE run_at < '0001-01-01 UTC' OR run_at >= '10000-01-01 UTC' AND run_at < 'infinity'
            OR created_at  < '0001-01-01 UTC' OR created_at  >= '10000-01-01 UTC'
            OR started_at  < '0001-01-01 UTC' OR started_at  >= '10000-01-01 UTC'
            OR finished_at < '0001-01-01 UTC' OR finished_at >= '10000-01-01 UTC'
            OR timeout > '100 years' OR attempt > 1000000 OR crashes > 1000000
     RETURNING id
    ) SELECT array_agg(id ORDER BY id) INTO ids FROM changed;
    PERFORM onejob.warn_of_rows('given times, a timeout or counts within what can be carried', ids);

    WITH changed AS (
        UPDATE onejob.schedules
           SET name       = CASE WHEN name ~ '[[:cntrl:]]' THEN regexp_replace(name, '[[:cntrl:]]', '?', 'g') || ' ' || id ELSE name END,
               kind       = regexp_replace(kind,       '[[:cntrl:]]', '?', 'g'),
               queue      = regexp_replace(queue,      '[[:cntrl:]]', '?', 'g'),
               limit_name = left(regexp_replace(limit_name, '^\.|[/\u0001-\u0020\u007f\u00a0\u2028\u2029]', '?', 'g'), CASE WHEN octet_length(limit_name) > 100 THEN 25 ELSE 100 END),
               timeout    = CASE WHEN timeout > '100 years' THEN '100 years' ELSE timeout END
         WHERE name ~ '[[:cntrl:]]' OR kind ~ '[[:cntrl:]]' OR queue ~ '[[:cntrl:]]' OR limit_name ~ '^\.|[/\u0001-\u0020\u007f\u00a0\u2028\u2029]'
            OR octet_length(limit_name) > 100 OR timeout > '100 years'
     RETURNING id
    ) SELECT array_agg(id ORDER BY id) INTO ids FROM changed;
    PERFORM onejob.warn_of_rows('of the schedules, and were given names or a timeout that can be carried', ids);
END $$;

CREATE FUNCTION onejob.warn_of_rows(what text, ids bigint[]) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF ids IS NOT NULL THEN
        RAISE WARNING '% rows were %: %', cardinality(ids), what,
              array_to_string(ids[1:20], ', ') || CASE WHEN cardinality(ids) > 20 THEN ' and more' ELSE '' END;
    END IF;
END $$;

SELECT onejob.bring_within_rules();
DROP FUNCTION onejob.bring_within_rules, onejob.warn_of_rows;

-- 2. Rules. Postgres looks at a CHECK whenever a row is written, thus three times
-- in a task's life; so what costs more than a comparison is looked at by a trigger,
-- when its column is written. Its name and its error are those of a CHECK.

ALTER TABLE onejob.tasks
    ADD CONSTRAINT run_at_is_from_year_1_to_9999_or_infinity
        CHECK (run_at >= '0001-01-01 UTC' AND run_at < '10000-01-01 UTC' OR run_at = 'infinity'),
    ADD CONSTRAINT created_started_and_finished_at_are_from_year_1_to_9999
        CHECK (created_at >= '0001-01-01 UTC' AND created_at < '10000-01-01 UTC'
           AND started_at >= '0001-01-01 UTC' AND started_at < '10000-01-01 UTC'
           AND finished_at >= '0001-01-01 UTC' AND finished_at < '10000-01-01 UTC'),
    ADD CONSTRAINT timeout_is_at_most_100_years
        CHECK (timeout <= '100 years'),
    ADD CONSTRAINT attempt_and_crashes_are_at_most_a_million
        CHECK (attempt <= 1000000 AND crashes <= 1000000),
    ADD CONSTRAINT a_running_task_has_session_replica_fence_and_started_at
        CHECK (status <> 'running' OR num_nulls(session, replica, fence, started_at) = 0),
    ADD CONSTRAINT limit_name_is_1_to_100_bytes
        CHECK (octet_length(limit_name) BETWEEN 1 AND 100),
    DROP CONSTRAINT limit_name_is_1_to_100_characters,
    DROP CONSTRAINT payload_is_at_most_4_mib;
ALTER TABLE onejob.schedules
    ADD CONSTRAINT timeout_is_at_most_100_years
        CHECK (timeout <= '100 years'),
    ADD CONSTRAINT name_has_no_control_characters
        CHECK (name !~ '[[:cntrl:]]'),
    ADD CONSTRAINT limit_name_is_1_to_100_bytes
        CHECK (octet_length(limit_name) BETWEEN 1 AND 100),
    DROP CONSTRAINT limit_name_is_1_to_100_characters,
    DROP CONSTRAINT payload_is_at_most_4_mib;

-- Refuses a row as a CHECK would, with the sentence that is the trigger's name.
CREATE FUNCTION onejob.refuse() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'new row for relation "%" violates check constraint "%"', TG_TABLE_NAME, TG_NAME
          USING ERRCODE = 'check_violation', CONSTRAINT = TG_NAME, SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME;
END $$;

CREATE TRIGGER payload_is_at_most_4_mib BEFORE INSERT OR UPDATE OF payload ON onejob.tasks
    FOR EACH ROW WHEN (octet_length(NEW.payload::text) > 4194304) EXECUTE FUNCTION onejob.refuse();
CREATE TRIGGER kind_has_no_control_characters BEFORE INSERT OR UPDATE OF kind ON onejob.tasks
    FOR EACH ROW WHEN (NEW.kind ~ '[[:cntrl:]]') EXECUTE FUNCTION onejob.refuse();
CREATE TRIGGER queue_has_no_control_characters BEFORE INSERT OR UPDATE OF queue ON onejob.tasks
    FOR EACH ROW WHEN (NEW.queue ~ '[[:cntrl:]]') EXECUTE FUNCTION onejob.refuse();
CREATE TRIGGER limit_name_begins_with_no_dot_and_has_no_slash_space_or_control BEFORE INSERT OR UPDATE OF limit_name ON onejob.tasks
    FOR EACH ROW WHEN (NEW.limit_name ~ '^\.|[/\u0001-\u0020\u007f\u00a0\u2028\u2029]') EXECUTE FUNCTION onejob.refuse();

CREATE TRIGGER payload_is_at_most_4_mib BEFORE INSERT OR UPDATE OF payload ON onejob.schedules
    FOR EACH ROW WHEN (octet_length(NEW.payload::text) > 4194304) EXECUTE FUNCTION onejob.refuse();
CREATE TRIGGER kind_has_no_control_characters BEFORE INSERT OR UPDATE OF kind ON onejob.schedules
    FOR EACH ROW WHEN (NEW.kind ~ '[[:cntrl:]]') EXECUTE FUNCTION onejob.refuse();
CREATE TRIGGER queue_has_no_control_characters BEFORE INSERT OR UPDATE OF queue ON onejob.schedules
    FOR EACH ROW WHEN (NEW.queue ~ '[[:cntrl:]]') EXECUTE FUNCTION onejob.refuse();
CREATE TRIGGER limit_name_begins_with_no_dot_and_has_no_slash_space_or_control BEFORE INSERT OR UPDATE OF limit_name ON onejob.schedules
    FOR EACH ROW WHEN (NEW.limit_name ~ '^\.|[/\u0001-\u0020\u007f\u00a0\u2028\u2029]') EXECUTE FUNCTION onejob.refuse();

-- 3. The order of claims. A lane is what shares priority, queue and kind, and
-- whether there is a lock_key; within it rows stand in the order in which they are
-- due. So neither rows of the future, nor rows of a kind that nobody runs, nor rows
-- behind a busy lock_key are in the way of others. A lane is a number: lanes of a
-- higher priority have a lower one. One comparison of numbers for each index entry,
-- where four columns would take four, halves the time to look at all lanes.
--
-- Postgres puts the function's body into the statements that call it. It could not
-- if the function had settings of its own, so all in it is qualified.
CREATE FUNCTION onejob.lane(priority smallint, queue text, kind text, keyless bool) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT ((1000 OPERATOR(pg_catalog.-) priority)::pg_catalog.int8 OPERATOR(pg_catalog.<<) 52)
           OPERATOR(pg_catalog.|) (pg_catalog.hashtextextended(queue OPERATOR(pg_catalog.||) e'\n' OPERATOR(pg_catalog.||) kind, keyless::pg_catalog.int4::pg_catalog.int8)
                                   OPERATOR(pg_catalog.&) 4503599627370495)
$$;

DROP INDEX onejob.tasks_pending, onejob.tasks_pending_by_lock_key, onejob.tasks_pending_by_limit;

CREATE INDEX tasks_pending ON onejob.tasks (onejob.lane(priority, queue, kind, lock_key IS NULL), run_at, id)
    WHERE status = 'pending' AND limit_name IS NULL;

-- Leads from a lock_key that has become free to the first row that waited for it.
CREATE INDEX tasks_pending_by_lock_key ON onejob.tasks (onejob.lane(priority, queue, kind, lock_key IS NULL), lock_key, run_at, id)
    WHERE status = 'pending' AND limit_name IS NULL AND lock_key IS NOT NULL;

-- The same for rows with a limit, which are looked at when there is a slot for them.
CREATE INDEX tasks_pending_by_limit ON onejob.tasks (limit_name, onejob.lane(priority, queue, kind, lock_key IS NULL), run_at, id)
    WHERE status = 'pending' AND limit_name IS NOT NULL;
CREATE INDEX tasks_pending_by_limit_and_lock_key ON onejob.tasks (limit_name, onejob.lane(priority, queue, kind, lock_key IS NULL), lock_key, run_at, id)
    WHERE status = 'pending' AND limit_name IS NOT NULL AND lock_key IS NOT NULL;
