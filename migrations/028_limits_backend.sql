-- A limit is one limit only where all replicas keep it in the same place. A replica that began
-- after one with another limits.backend takes no slots. NULL is unknown: of an older version.

ALTER TABLE onejob.replicas ADD COLUMN limits_backend text;
COMMENT ON COLUMN onejob.replicas.limits_backend IS 'Where the replica keeps limits: consul or rabbitmq; NULL if it serves none, or is older than this column.';

-- A task that a trigger leaves out was reported like a schedule that is not there.
CREATE OR REPLACE FUNCTION onejob.run_schedule(name text) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    schedule bigint;
    task bigint;
BEGIN
    SELECT s.id INTO schedule FROM onejob.schedules s WHERE s.name = run_schedule.name FOR KEY SHARE;
    IF schedule IS NULL THEN
        RETURN NULL;
    END IF;
    INSERT INTO onejob.tasks (kind, payload, queue, priority, lock_key, limit_name, max_attempts, timeout, keep_for, schedule_id)
    SELECT s.kind, s.payload, s.queue, s.priority,
           CASE WHEN s.on_overlap = 'queue' THEN coalesce(s.lock_key, 'schedule ' || s.name) ELSE s.lock_key END,
           s.limit_name, s.max_attempts, s.timeout, s.keep_for, s.id
      FROM onejob.schedules s
     WHERE s.id = schedule
 RETURNING id INTO task;
    IF task IS NULL THEN
        RAISE EXCEPTION 'a trigger or rule of yours on onejob.tasks leaves out the row';
    END IF;
    PERFORM onejob.record('run schedule'::text, 'schedule ' || run_schedule.name, 1::bigint, task, NULL::text);
    RETURN task;
END $$;
