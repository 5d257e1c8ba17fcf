-- As before, and pauses that ended an hour ago are removed: with a queue for each customer they became
-- ever more.
CREATE OR REPLACE FUNCTION onejob.pause_queue(name text, reason text DEFAULT NULL, until timestamptz DEFAULT 'infinity') RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    IF pause_queue.name IS NULL THEN
        RAISE EXCEPTION 'the name of the queue is missing' USING ERRCODE = 'null_value_not_allowed';
    END IF;
    IF coalesce(until, 'infinity'::timestamptz) <= clock_timestamp() THEN
        RAISE EXCEPTION 'until (%) is not in the future', until USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- Claims read this table. Nobody else removes pauses that have ended by themselves.
    DELETE FROM onejob.queues
     WHERE name = ANY (ARRAY(SELECT name FROM onejob.queues WHERE paused_until < clock_timestamp() - interval '1 hour' FOR UPDATE SKIP LOCKED));
    INSERT INTO onejob.queues (name, paused_until, paused_by, reason)
    VALUES (pause_queue.name, coalesce(until, 'infinity'::timestamptz),
            session_user::text || coalesce(' (' || nullif(left(current_setting('onejob.actor', true), 200), '') || ')', ''), pause_queue.reason)
        ON CONFLICT (name) DO UPDATE
       SET paused_until = excluded.paused_until,
           paused_at    = CASE WHEN queues.paused_until > clock_timestamp() THEN queues.paused_at ELSE excluded.paused_at END,
           paused_by    = excluded.paused_by,
           reason       = excluded.reason;
    PERFORM onejob.record('pause queue'::text, 'queue ' || pause_queue.name, 1::bigint, NULL::bigint,
                          nullif(concat_ws(', ', pause_queue.reason, CASE WHEN isfinite(until) THEN 'until ' || to_char(until AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS UTC') END), ''));
END $$;
