-- Smaller calls of onejob.bulk cost less: as before, but it reads hardly more rows than it
-- changes where the filter chooses most of them.
CREATE OR REPLACE FUNCTION onejob.bulk(action text, filter jsonb, after_id bigint DEFAULT 0, max_tasks int DEFAULT 1000, spread interval DEFAULT '0', action_id bigint DEFAULT NULL, dry_run bool DEFAULT false)
    RETURNS onejob.bulk_result LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off SET lock_timeout = '50ms' AS $$
#variable_conflict use_variable
DECLARE
    most_read CONSTANT int    := 10000;
    unknown   text;
    wanted    text[];   -- statuses
    asked     bigint[]  := CASE WHEN filter ? 'ids' THEN ARRAY(SELECT jsonb_array_elements_text(filter -> 'ids')::bigint) END;
    since     timestamptz := (filter ->> 'since')::timestamptz;
    until     timestamptz := (filter ->> 'until')::timestamptz;
    pattern   text      := CASE WHEN filter ? 'error' THEN '%' || (filter ->> 'error') || '%' END;
    planned   bigint;   -- the id of the schedule
    portion   int;
    all_read  int := 0;
    looked    bigint[];
    chosen    bigint[];
    id        bigint;
    waits     int := 0; -- that took too long
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
    IF max_tasks NOT BETWEEN 1 AND most_read OR after_id IS NULL OR max_tasks IS NULL THEN
        RAISE EXCEPTION 'max_tasks must be between 1 and %, and after_id must not be NULL', most_read USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF spread IS NULL OR spread NOT BETWEEN interval '0' AND interval '1 year' THEN
        RAISE EXCEPTION 'spread must be between 0 and 1 year' USING ERRCODE = 'invalid_parameter_value';
    END IF;

    wanted := CASE WHEN filter ? 'status' THEN ARRAY[filter ->> 'status']
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
        EXIT WHEN all_read >= most_read;
        portion   := least(2 * portion, most_read - all_read);
    END LOOP;
    r.matched   := cardinality(chosen);
    r.affected  := 0;
    r.action_id := action_id;
    IF dry_run THEN
        RETURN r;
    END IF;

    -- What was read may have changed: the row that is locked is looked at again.
    IF action = 'cancel' THEN
        UPDATE onejob.tasks t
           SET cancel_requested = true
         WHERE t.id = ANY (ARRAY(SELECT l.id FROM onejob.tasks l WHERE l.id = ANY (chosen) AND l.status = ANY (wanted) AND NOT l.cancel_requested ORDER BY l.id FOR NO KEY UPDATE SKIP LOCKED));
        GET DIAGNOSTICS r.affected = ROW_COUNT;
    ELSIF action = 'delete' THEN
        DELETE FROM onejob.tasks t
         WHERE t.id = ANY (ARRAY(SELECT l.id FROM onejob.tasks l WHERE l.id = ANY (chosen) AND l.status = ANY (wanted) ORDER BY l.id FOR UPDATE SKIP LOCKED));
        GET DIAGNOSTICS r.affected = ROW_COUNT;
    ELSE
        BEGIN
            r.affected := onejob.retry_these(chosen, wanted, spread);
        EXCEPTION WHEN unique_violation OR lock_not_available THEN -- of a unique_key: one task at a time finds out whose
            FOREACH id IN ARRAY chosen LOOP
                EXIT WHEN waits = 20;
                BEGIN
                    r.affected := r.affected + onejob.retry_these(ARRAY[id], wanted, spread);
                EXCEPTION WHEN unique_violation THEN
                    NULL;
                WHEN lock_not_available THEN
                    waits := waits + 1;
                END;
            END LOOP;
        END;
        IF r.affected > 0 THEN
            PERFORM pg_notify('onejob_due', '');
        END IF;
    END IF;

    IF action_id IS NULL AND r.affected > 0 THEN
        INSERT INTO onejob.actions (who, action, target, task_id, affected)
        VALUES (session_user::text || coalesce(' (' || nullif(left(current_setting('onejob.actor', true), 200), '') || ')', ''), action,
                CASE WHEN cardinality(asked) = 1 THEN 'task ' || asked[1] ELSE 'tasks ' || left(filter::text, 1990) END,
                CASE WHEN cardinality(asked) = 1 THEN asked[1] END, r.affected)
     RETURNING actions.id INTO r.action_id;
    ELSIF r.affected > 0 THEN
        UPDATE onejob.actions a SET affected = a.affected + r.affected WHERE a.id = action_id;
    END IF;
    RETURN r;
END $$;
