-- onejob.bulk reads fewer rows where it is asked for few tasks. It read up to 10,000 rows even with a
-- small max_tasks, so a call whose filter is slow, such as one that reads large payloads, could not be
-- made shorter.
CREATE OR REPLACE FUNCTION onejob.bulk(action text, filter jsonb, after_id bigint DEFAULT 0, max_tasks int DEFAULT 1000, spread interval DEFAULT '0', action_id bigint DEFAULT NULL, dry_run bool DEFAULT false)
    RETURNS onejob.bulk_result LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off SET lock_timeout = '50ms' AS $$
#variable_conflict use_variable
DECLARE
    most_read CONSTANT int    := 10000;
    to_read   int;      -- by this call
    unknown   text;
    wanted    text[];   -- statuses
    asked     bigint[]; -- ids
    since     timestamptz;
    until     timestamptz;
    pattern   text;     -- of the error
    planned   bigint;   -- the id of the schedule
    portion   int;
    all_read  int := 0;
    looked    bigint[];
    chosen    bigint[];
    these     bigint[];
    changed   int;
    waits     int  := 0; -- that took too long
    told      bool := false;
    who       text;     -- as onejob.actions has it, and the target
    target    text;
    r         onejob.bulk_result;
BEGIN
    IF action IS NULL OR action NOT IN ('cancel', 'retry', 'delete') THEN
        RAISE EXCEPTION 'the action is %; it must be cancel, retry or delete', coalesce(quote_literal(action), 'missing') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF jsonb_typeof(filter) IS DISTINCT FROM 'object' OR filter = '{}' THEN
        RAISE EXCEPTION 'the filter chooses all tasks; name at least one of status, kind, queue, command, error, schedule, limit, lock_key, since, until, ids' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT key INTO unknown FROM jsonb_object_keys(filter) key
     WHERE key NOT IN ('status', 'kind', 'queue', 'command', 'error', 'schedule', 'limit', 'lock_key', 'since', 'until', 'ids') LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'the filter has %; what it may have is status, kind, queue, command, error, schedule, limit, lock_key, since, until, ids', quote_literal(unknown) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- A null is a value that is missing by mistake, such as that of a variable. Taken for no
    -- filter it would choose all tasks.
    SELECT key INTO unknown FROM jsonb_each(filter) field(key, value) WHERE jsonb_typeof(value) = 'null' ORDER BY key LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'the field % of the filter is null', quote_literal(unknown)
              USING ERRCODE = 'invalid_parameter_value', HINT = 'Leave the field out, or give it a value.';
    END IF;
    IF filter ? 'ids' AND jsonb_typeof(filter -> 'ids') <> 'array' THEN
        RAISE EXCEPTION 'the field ''ids'' of the filter is of type %; it must be an array of task IDs', jsonb_typeof(filter -> 'ids')
              USING ERRCODE = 'invalid_parameter_value', HINT = 'Write it as [17, 18].';
    END IF;
    IF max_tasks NOT BETWEEN 1 AND most_read OR after_id IS NULL OR max_tasks IS NULL THEN
        RAISE EXCEPTION 'max_tasks must be between 1 and %, and after_id must not be NULL', most_read USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF dry_run IS NULL THEN
        RAISE EXCEPTION 'dry_run must be true or false, and is NULL' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF spread IS NULL OR spread NOT BETWEEN interval '0' AND interval '1 year' THEN
        RAISE EXCEPTION 'spread must be between 0 and 1 year' USING ERRCODE = 'invalid_parameter_value';
    END IF;

    asked   := CASE WHEN filter ? 'ids' THEN ARRAY(SELECT jsonb_array_elements_text(filter -> 'ids')::bigint) END;
    since   := (filter ->> 'since')::timestamptz;
    until   := (filter ->> 'until')::timestamptz;
    pattern := '%' || (filter ->> 'error') || '%';
    wanted  := CASE WHEN filter ? 'status' THEN ARRAY[filter ->> 'status']
                    WHEN action = 'cancel' THEN ARRAY['pending', 'running']
                    WHEN action = 'retry' AND asked IS NULL THEN ARRAY['failed']
                    WHEN asked IS NULL THEN NULL
                    ELSE ARRAY['pending', 'succeeded', 'failed', 'cancelled'] END;
    IF wanted IS NULL THEN
        RAISE EXCEPTION 'tasks of which status shall be deleted? The filter needs a status, or ids' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT wanted <@ (CASE WHEN action = 'cancel' THEN ARRAY['pending', 'running'] ELSE ARRAY['pending', 'succeeded', 'failed', 'cancelled'] END) THEN
        RAISE EXCEPTION 'the status is %, and % is for tasks that are %', coalesce(quote_literal(wanted[1]), 'NULL'), action,
                        CASE action WHEN 'cancel' THEN 'pending or running' ELSE 'pending, succeeded, failed or cancelled' END USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF filter ? 'schedule' THEN
        SELECT s.id INTO planned FROM onejob.schedules s WHERE s.name = filter ->> 'schedule';
        IF NOT FOUND THEN
            RAISE EXCEPTION 'there is no schedule %', quote_nullable(filter ->> 'schedule') USING ERRCODE = 'no_data_found';
        END IF;
    END IF;

    -- Rows are read in portions: as many as are asked for, and then twice as many each time.
    -- So a filter that chooses nearly all of them reads hardly more than it chooses.
    to_read  := least(most_read, 50 * max_tasks);
    portion  := max_tasks;
    chosen   := '{}';
    r.next_id := after_id;
    LOOP
        -- These, those that an index has, or all in the order of their ids.
        IF asked IS NOT NULL THEN
            looked := ARRAY(SELECT a FROM unnest(asked) a WHERE a > r.next_id ORDER BY a LIMIT portion);
        ELSIF wanted IN (ARRAY['failed'], ARRAY['cancelled']) THEN
            looked := ARRAY(SELECT t.id FROM onejob.tasks t
                             WHERE t.status = wanted[1] AND t.status IN ('failed', 'cancelled') AND -t.id < -r.next_id
                             ORDER BY -t.id DESC LIMIT portion);
        ELSE
            looked := ARRAY(SELECT t.id FROM onejob.tasks t WHERE t.id > r.next_id ORDER BY t.id LIMIT portion);
        END IF;
        chosen := chosen || ARRAY(
            SELECT t.id
              FROM onejob.tasks t
             WHERE t.id = ANY (looked)
               AND t.status = ANY (wanted)
               AND NOT (action = 'cancel' AND t.cancel_requested)
               AND (NOT filter ? 'kind'     OR t.kind       = filter ->> 'kind')
               AND (NOT filter ? 'queue'    OR t.queue      = filter ->> 'queue')
               AND (NOT filter ? 'limit'    OR t.limit_name = filter ->> 'limit')
               AND (NOT filter ? 'lock_key' OR t.lock_key   = filter ->> 'lock_key')
               AND (NOT filter ? 'schedule' OR t.schedule_id = planned)
               AND (since IS NULL           OR coalesce(t.finished_at, t.created_at) >= since)
               AND (until IS NULL           OR coalesce(t.finished_at, t.created_at) <= until)
               AND (pattern IS NULL         OR t.error ILIKE pattern)
               AND (NOT filter ? 'command'  OR filter ->> 'command' IN (t.payload ->> 'command', t.payload ->> 'statement'))
             ORDER BY t.id
             LIMIT max_tasks - cardinality(chosen));
        IF cardinality(chosen) = max_tasks THEN
            r.next_id := chosen[max_tasks];
            EXIT;
        END IF;
        IF cardinality(looked) < portion THEN
            r.next_id := NULL;
            EXIT;
        END IF;
        r.next_id := looked[portion];
        all_read  := all_read + portion;
        EXIT WHEN all_read >= to_read;
        portion   := least(2 * portion, to_read - all_read);
    END LOOP;
    r.matched   := cardinality(chosen);
    r.affected  := 0;
    r.action_id := action_id;
    IF dry_run THEN
        RETURN r;
    END IF;

    -- What was read may have changed: the row that is locked is looked at again.
    --
    -- All at once first. If Postgres refuses one of them (another row has its unique_key, a
    -- table of the user refers to it, a trigger raises an error, a lock takes too long), one by
    -- one: so a row that is refused each time does not keep the action from those behind it.
    FOR i IN 0 .. cardinality(chosen) LOOP
        these := CASE i WHEN 0 THEN chosen ELSE ARRAY[chosen[i]] END;
        BEGIN
            IF action = 'cancel' THEN
                UPDATE onejob.tasks t
                   SET cancel_requested = true
                 WHERE t.id = ANY (ARRAY(SELECT l.id FROM onejob.tasks l WHERE l.id = ANY (these) AND l.status = ANY (wanted) AND NOT l.cancel_requested ORDER BY l.id FOR NO KEY UPDATE SKIP LOCKED));
                GET DIAGNOSTICS changed = ROW_COUNT;
            ELSIF action = 'delete' THEN
                DELETE FROM onejob.tasks t
                 WHERE t.id = ANY (ARRAY(SELECT l.id FROM onejob.tasks l WHERE l.id = ANY (these) AND l.status = ANY (wanted) ORDER BY l.id FOR UPDATE SKIP LOCKED));
                GET DIAGNOSTICS changed = ROW_COUNT;
            ELSE
                changed := onejob.retry_these(these, wanted, spread);
            END IF;
            r.affected := r.affected + changed;
            EXIT WHEN i = 0;
        EXCEPTION WHEN OTHERS OR assert_failure THEN -- OTHERS leaves out query_canceled
            -- These are about the transaction or the server, and no other row would fare better.
            IF left(SQLSTATE, 2) IN ('25', '40', '53', '57', '58') THEN
                RAISE;
            END IF;
            IF SQLSTATE = '55P03' THEN -- lock_not_available
                waits := waits + 1;
                IF waits = 20 THEN
                    PERFORM set_config('lock_timeout', '1ms', true); -- until the function returns
                END IF;
            END IF;
            IF i > 0 AND NOT told THEN
                told := true;
                RAISE NOTICE 'task % is left: %', chosen[i], SQLERRM;
            END IF;
        END;
    END LOOP;
    IF action = 'retry' AND r.affected > 0 THEN
        PERFORM pg_notify('onejob_due', '');
    END IF;

    -- A call continues the row of an earlier call only if it is the same action of the same
    -- user. With any other ID it gets a row of its own.
    IF r.affected > 0 THEN
        who    := session_user::text || coalesce(' (' || nullif(left(current_setting('onejob.actor', true), 200), '') || ')', '');
        target := CASE WHEN cardinality(asked) = 1 THEN 'task ' || asked[1] ELSE 'tasks ' || left(filter::text, 1990) END;
        UPDATE onejob.actions a
           SET affected = a.affected + r.affected
         WHERE a.id = action_id
           AND a.who = who AND a.action = action AND a.target = target;
        IF NOT FOUND THEN
            INSERT INTO onejob.actions (who, action, target, task_id, affected)
            VALUES (who, action, target, CASE WHEN cardinality(asked) = 1 THEN asked[1] END, r.affected)
         RETURNING actions.id INTO r.action_id;
        END IF;
    END IF;
    RETURN r;
END $$;
