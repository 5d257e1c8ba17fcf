-- A line that was written while the clock was ahead begins with the edit that ends it, not with the
-- last due time before: that may be of another line, or from before a time in which the schedule was
-- disabled.
CREATE OR REPLACE FUNCTION onejob.keep_former_schedule() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO onejob.former_schedules (schedule_id, cron, time_zone, next_at, begun_at, until)
    VALUES (OLD.id, OLD.cron, OLD.time_zone, nullif(OLD.next_at, '-infinity'),
            CASE WHEN OLD.changed_at > NEW.changed_at AND isfinite(OLD.changed_at) THEN NEW.changed_at
                 ELSE coalesce(nullif(greatest(CASE WHEN OLD.changed_at   <= NEW.changed_at THEN OLD.changed_at END,
                                               CASE WHEN OLD.last_at      <= NEW.changed_at THEN OLD.last_at END,
                                               CASE WHEN OLD.paused_until <= NEW.changed_at
                                                    THEN OLD.paused_until - CASE WHEN OLD.cron LIKE '@every%' THEN interval '0' ELSE interval '1 microsecond' END END), '-infinity'), NEW.changed_at) END,
            NEW.changed_at);
    RETURN NULL;
END $$;
