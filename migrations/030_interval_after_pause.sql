-- An interval (@every) is counted from the end of a pause. The due times of a line that was
-- edited before a leader had seen that end were counted from a moment before it, and came due a
-- second too early. What any other line names at that end comes due then, as before.
CREATE OR REPLACE FUNCTION onejob.keep_former_schedule() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO onejob.former_schedules (schedule_id, cron, time_zone, next_at, begun_at, until)
    VALUES (OLD.id, OLD.cron, OLD.time_zone, nullif(OLD.next_at, '-infinity'),
            coalesce(nullif(greatest(CASE WHEN OLD.changed_at   <= NEW.changed_at THEN OLD.changed_at END,
                                     CASE WHEN OLD.last_at      <= NEW.changed_at THEN OLD.last_at END,
                                     CASE WHEN OLD.paused_until <= NEW.changed_at
                                          THEN OLD.paused_until - CASE WHEN OLD.cron LIKE '@every%' THEN interval '0' ELSE interval '1 microsecond' END END), '-infinity'), NEW.changed_at),
            NEW.changed_at);
    RETURN NULL;
END $$;
