-- Queues can be paused, and what people do is on record.

-- A queue has a row only while it is paused, and perhaps for a while after.
CREATE TABLE onejob.queues (
    name         text        PRIMARY KEY,
    paused_until timestamptz NOT NULL,
    paused_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    paused_by    text        NOT NULL,
    reason       text,

    CONSTRAINT name_is_1_to_100_characters
        CHECK (length(name) BETWEEN 1 AND 100),
    CONSTRAINT reason_is_at_most_1000_characters
        CHECK (length(reason) <= 1000)
);
COMMENT ON TABLE onejob.queues IS 'Queues that are paused: claims take nothing from them. Write it with onejob.pause_queue and onejob.resume_queue.';
COMMENT ON COLUMN onejob.queues.paused_until IS 'When claims begin again by themselves; infinity means when somebody resumes the queue.';

CREATE TABLE onejob.actions (
    id       bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    who      text        NOT NULL,
    action   text        NOT NULL,
    target   text        NOT NULL,
    task_id  bigint,
    affected bigint      NOT NULL,
    reason   text
);
CREATE INDEX actions_at ON onejob.actions (at);
CREATE INDEX actions_of_task ON onejob.actions (task_id, id) WHERE task_id IS NOT NULL;
COMMENT ON TABLE onejob.actions IS 'What people and programs did to tasks, queues and schedules, by the functions of this schema or the command line.';
COMMENT ON COLUMN onejob.actions.who IS 'The user of the database, and in brackets whom the command line says it acts for.';
COMMENT ON COLUMN onejob.actions.target IS 'Such as "task 17" or "queue mail", or the filter of an action on many tasks.';
COMMENT ON COLUMN onejob.actions.affected IS 'To how many tasks, queues or schedules it was done.';

-- Writes a row of onejob.actions, in the transaction of what was done. The user is the one
-- who is connected; the setting onejob.actor adds a name and proves nothing.
CREATE FUNCTION onejob.record(action text, target text, affected bigint, task_id bigint DEFAULT NULL, reason text DEFAULT NULL) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO onejob.actions (who, action, target, task_id, affected, reason)
    VALUES (session_user::text || coalesce(' (' || nullif(left(current_setting('onejob.actor', true), 200), '') || ')', ''),
            left(record.action, 100), left(record.target, 2000), record.task_id, record.affected, left(record.reason, 1000))
$$;
COMMENT ON FUNCTION onejob.record IS 'Notes an action in onejob.actions.';

CREATE FUNCTION onejob.pause_queue(name text, reason text DEFAULT NULL, until timestamptz DEFAULT 'infinity') RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    IF pause_queue.name IS NULL THEN
        RAISE EXCEPTION 'the name of the queue is missing' USING ERRCODE = 'null_value_not_allowed';
    END IF;
    IF coalesce(until, 'infinity'::timestamptz) <= clock_timestamp() THEN
        RAISE EXCEPTION 'until (%) is not in the future', until USING ERRCODE = 'invalid_parameter_value';
    END IF;
    INSERT INTO onejob.queues (name, paused_until, paused_by, reason)
    VALUES (pause_queue.name, coalesce(until, 'infinity'::timestamptz),
            session_user::text || coalesce(' (' || nullif(left(current_setting('onejob.actor', true), 200), '') || ')', ''), pause_queue.reason)
        ON CONFLICT (name) DO UPDATE
       SET paused_until = excluded.paused_until,
           paused_at    = CASE WHEN queues.paused_until > clock_timestamp() THEN queues.paused_at ELSE excluded.paused_at END,
           paused_by    = excluded.paused_by,
           reason       = excluded.reason;
    PERFORM onejob.record('pause queue'::text, 'queue ' || pause_queue.name, 1::bigint, NULL::bigint,
                          nullif(concat_ws(', ', pause_queue.reason, CASE WHEN isfinite(until) THEN 'until ' || onejob.why_time(until) END), ''));
END $$;
COMMENT ON FUNCTION onejob.pause_queue IS 'Lets claims take no more tasks from a queue, until then or until it is resumed. What runs goes on.';

CREATE FUNCTION onejob.resume_queue(name text) RETURNS bool
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    until timestamptz;
BEGIN
    DELETE FROM onejob.queues WHERE name = resume_queue.name RETURNING paused_until INTO until;
    IF until IS NULL OR until <= clock_timestamp() THEN
        RETURN false;
    END IF;
    PERFORM onejob.record('resume queue'::text, 'queue ' || resume_queue.name, 1::bigint, NULL::bigint, NULL::text);
    PERFORM pg_notify('onejob_due', '');
    RETURN true;
END $$;
COMMENT ON FUNCTION onejob.resume_queue IS 'Lets claims take tasks from a paused queue again, at once; false if it is not paused.';

-- As before, and on record.
CREATE OR REPLACE FUNCTION onejob.cancel(task_id bigint) RETURNS bool LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    WITH cancelled AS (
        UPDATE onejob.tasks
           SET cancel_requested = true
         WHERE id = task_id
           AND status IN ('pending', 'running')
     RETURNING id
    ), recorded AS (
        SELECT onejob.record('cancel'::text, 'task ' || id, 1::bigint, id, NULL::text) FROM cancelled
    )
    SELECT count(*) > 0 FROM recorded
$$;

CREATE OR REPLACE FUNCTION onejob.retry(task_id bigint) RETURNS bool LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    WITH retried AS (
        UPDATE onejob.tasks
           SET status = 'pending', run_at = now(), attempt = 0, crashes = 0, stalls = 0, finished_at = NULL,
               started_at = NULL, cancel_requested = false, result = NULL
         WHERE id = task_id
           AND status <> 'running'
     RETURNING id
    ), notified AS (
        SELECT pg_notify('onejob_due', ''), onejob.record('retry'::text, 'task ' || id, 1::bigint, id, NULL::text) FROM retried
    )
    SELECT EXISTS (SELECT FROM notified)
$$;

CREATE FUNCTION onejob.record_schedule() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM onejob.record(CASE WHEN NEW.enabled THEN 'enable schedule' ELSE 'disable schedule' END, 'schedule ' || NEW.name, 1::bigint, NULL::bigint, NULL::text);
    RETURN NULL;
END $$;
CREATE TRIGGER record_schedule AFTER UPDATE OF enabled ON onejob.schedules
    FOR EACH ROW WHEN (NEW.enabled <> OLD.enabled) EXECUTE FUNCTION onejob.record_schedule();

-- Why any task is where it is.
CREATE FUNCTION onejob.why(id bigint) RETURNS text LANGUAGE plpgsql STABLE STRICT SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    t      onejob.tasks;
    a      record;  -- the last attempt
    c      record;  -- who asked last to cancel it
    q      onejob.queues;
    paused text;
    answer text;
BEGIN
    SELECT * INTO t FROM onejob.tasks WHERE tasks.id = why.id;
    IF NOT FOUND THEN
        RETURN format('Task %s does not exist: no task ever had this ID, or it was deleted.', why.id);
    END IF;
    IF t.status = 'pending' THEN
        SELECT * INTO q FROM onejob.queues WHERE name = t.queue AND paused_until > statement_timestamp();
        IF NOT FOUND THEN
            RETURN onejob.why_pending(t);
        END IF;
        paused := format('its queue, "%s", was paused at %s by %s, until %s%s', q.name, onejob.why_time(q.paused_at), q.paused_by,
                         CASE WHEN isfinite(q.paused_until) THEN onejob.why_time(q.paused_until) ELSE format('somebody resumes it (onejob queues resume %s)', q.name) END,
                         ': ' || onejob.why_error(q.reason));
        IF t.run_at <= statement_timestamp() THEN
            RETURN format('Task %s has waited since %s, because %s.', t.id, onejob.why_time(greatest(t.run_at, t.created_at)), paused);
        END IF;
        RETURN rtrim(onejob.why_pending(t), '.') || '; and ' || paused || '.';
    END IF;
    SELECT who, at
      INTO c
      FROM onejob.actions
     WHERE task_id = t.id
       AND action = 'cancel'
     ORDER BY id DESC
     LIMIT 1;
    IF t.status = 'running' THEN
        RETURN format('Task %s has run since %s, in attempt %s of %s, on %s%s.', t.id, onejob.why_time(t.started_at), t.attempt, t.max_attempts, onejob.why_replica(t.session, t.replica),
                      CASE WHEN t.cancel_requested AND c.who IS NULL THEN '; somebody has asked to cancel it, and its replica stops it within seconds'
                           WHEN t.cancel_requested THEN format('; %s asked at %s to cancel it, and its replica stops it within seconds', c.who, onejob.why_time(c.at)) END);
    END IF;
    SELECT attempt, replica, outcome
      INTO a
      FROM onejob.attempts
     WHERE task_id = t.id
       AND outcome <> 'refused'
     ORDER BY fence DESC
     LIMIT 1;
    RETURN CASE t.status
        WHEN 'succeeded' THEN format('Task %s succeeded at %s%s.', t.id, onejob.why_time(t.finished_at),
                                     CASE WHEN a.attempt IS NOT NULL THEN format(', in attempt %s of %s on replica %s', a.attempt, t.max_attempts, a.replica) END)
        WHEN 'failed'    THEN format('Task %s failed at %s%s: %s.', t.id, onejob.why_time(t.finished_at),
                                     CASE WHEN a.attempt IS NOT NULL THEN format(', after attempt %s of %s on replica %s', a.attempt, t.max_attempts, a.replica) END,
                                     coalesce(rtrim(onejob.why_error(t.error), '.'), 'there is no error'))
                         ELSE format('Task %s was cancelled at %s%s, %s.', t.id, onejob.why_time(t.finished_at),
                                     CASE WHEN t.cancel_requested THEN ' by ' || c.who END,
                                     CASE WHEN a.outcome = 'cancelled' THEN format('during attempt %s of %s on replica %s', a.attempt, t.max_attempts, a.replica)
                                          WHEN a.attempt IS NOT NULL   THEN format('while it waited after attempt %s of %s', a.attempt, t.max_attempts)
                                          ELSE 'before it ran' END) END;
END $$;

COMMENT ON FUNCTION onejob.why IS 'Says in one sentence why a task waits, where it runs, or what became of it.';

REVOKE ALL ON FUNCTION onejob.why(bigint), onejob.record(text, text, bigint, bigint, text), onejob.pause_queue(text, text, timestamptz), onejob.resume_queue(text), onejob.record_schedule() FROM PUBLIC;
