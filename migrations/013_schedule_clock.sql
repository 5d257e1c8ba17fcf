-- An edit takes effect from changed_at on. A last_at that lies after it is from a clock that
-- was set back since: once the clock has reached it again, due times between the two would
-- count as dealt with.
CREATE OR REPLACE FUNCTION onejob.check_schedule() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM now() AT TIME ZONE NEW.time_zone;
    IF TG_OP = 'INSERT' OR (NEW.cron, NEW.time_zone, NEW.enabled) IS DISTINCT FROM (OLD.cron, OLD.time_zone, OLD.enabled) THEN
        NEW.next_at    := NULL;  -- worked out anew, from changed_at on
        NEW.error      := NULL;
        NEW.changed_at := clock_timestamp();  -- the row is locked: edits follow one another, and the leader's statements too
        IF NEW.last_at > NEW.changed_at AND isfinite(NEW.last_at) THEN
            NEW.last_at := NULL;
        END IF;
    END IF;
    RETURN NEW;
END $$;
