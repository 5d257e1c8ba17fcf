-- Many tasks are cancelled, retried or deleted by what they have in common, and schedules run
-- when somebody asks.

-- What one call of onejob.bulk did.
CREATE TYPE onejob.bulk_result AS (
    matched   int,
    affected  int,
    next_id   bigint,
    action_id bigint
);
COMMENT ON COLUMN onejob.bulk_result.matched IS 'How many tasks the filter chose.';
COMMENT ON COLUMN onejob.bulk_result.affected IS 'To how many of them it was done. The others were locked, had changed, or could not be retried beside another task with their unique_key.';
COMMENT ON COLUMN onejob.bulk_result.next_id IS 'The after_id of the next call; NULL if no tasks are left.';
COMMENT ON COLUMN onejob.bulk_result.action_id IS 'The row of onejob.actions; pass it to the next call, so that all of them are one action.';

-- Does something to the tasks that a filter chooses: at most max_tasks of them in one call,
-- in the order of their ids. A call reads at most 10,000 rows, so it may find few or none
-- though there are more behind them.
--
-- Rows that others have locked are left: nobody waits for them. What it may wait for is the
-- end of a transaction that has a unique_key which a retried task needs, and that for moments
-- only.
CREATE FUNCTION onejob.bulk(action text, filter jsonb, after_id bigint DEFAULT 0, max_tasks int DEFAULT 1000, spread interval DEFAULT '0', action_id bigint DEFAULT NULL, dry_run bool DEFAULT false)
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

    -- Which rows to read: these, those that an index has, or all in the order of their ids.
    IF asked IS NOT NULL THEN
        looked := ARRAY(SELECT a FROM unnest(asked) a WHERE a > after_id ORDER BY a LIMIT most_read);
    ELSIF wanted IN (ARRAY['failed'], ARRAY['cancelled']) THEN
        looked := ARRAY(SELECT t.id FROM onejob.tasks t
                         WHERE t.status = wanted[1] AND t.status IN ('failed', 'cancelled') AND -t.id < -after_id
                         ORDER BY -t.id DESC LIMIT most_read);
    ELSE
        looked := ARRAY(SELECT t.id FROM onejob.tasks t WHERE t.id > after_id ORDER BY t.id LIMIT most_read);
    END IF;

    chosen := ARRAY(
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
         LIMIT max_tasks);
    r.matched  := cardinality(chosen);
    r.affected := 0;
    r.next_id  := CASE WHEN r.matched = max_tasks              THEN chosen[r.matched]
                       WHEN cardinality(looked) = most_read    THEN looked[most_read] END;
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
COMMENT ON FUNCTION onejob.bulk IS 'Cancels, retries or deletes tasks that a filter chooses, some of them in each call; onejob.actions has it as one action.';

CREATE FUNCTION onejob.retry_these(ids bigint[], statuses text[], spread interval) RETURNS int LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    n int;
BEGIN
    UPDATE onejob.tasks t
       SET status = 'pending', run_at = now() + random() * spread, attempt = 0, crashes = 0, stalls = 0, finished_at = NULL,
           started_at = NULL, cancel_requested = false, result = NULL
     WHERE t.id = ANY (ARRAY(SELECT l.id FROM onejob.tasks l WHERE l.id = ANY (ids) AND l.status = ANY (statuses) ORDER BY l.id FOR NO KEY UPDATE SKIP LOCKED));
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
END $$;
COMMENT ON FUNCTION onejob.retry_these IS 'Makes tasks pending again, those that have one of the statuses and are not locked; onejob.bulk uses it.';

CREATE FUNCTION onejob.run_schedule(name text) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    task bigint;
BEGIN
    INSERT INTO onejob.tasks (kind, payload, queue, priority, lock_key, limit_name, max_attempts, timeout, keep_for, schedule_id)
    SELECT s.kind, s.payload, s.queue, s.priority,
           CASE WHEN s.on_overlap = 'queue' THEN coalesce(s.lock_key, 'schedule ' || s.name) ELSE s.lock_key END,
           s.limit_name, s.max_attempts, s.timeout, s.keep_for, s.id
      FROM onejob.schedules s
     WHERE s.name = run_schedule.name
 RETURNING id INTO task;
    IF task IS NOT NULL THEN
        PERFORM onejob.record('run schedule'::text, 'schedule ' || run_schedule.name, 1::bigint, task, NULL::text);
    END IF;
    RETURN task;
END $$;
COMMENT ON FUNCTION onejob.run_schedule IS 'Enqueues a task of a schedule now, also if it is disabled or one of its tasks runs, and returns the task''s id; NULL if there is no such schedule. Its due times stay as they are.';

REVOKE ALL ON FUNCTION onejob.bulk(text, jsonb, bigint, int, interval, bigint, bool), onejob.retry_these(bigint[], text[], interval), onejob.run_schedule(text) FROM PUBLIC;
