-- A time zone with a slash and an offset, such as Etc/UTC+2 or Europe/Berlin1, is none that Go knows, and a
-- schedule with one never came due. Postgres takes what stands before the offset for an abbreviation and
-- shows it in capitals; the zones of Etc that are named by an offset it shows as they are written.
CREATE OR REPLACE FUNCTION onejob.check_schedule() RETURNS trigger LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp SET "TimeZone" = 'UTC' AS $$
DECLARE zone text;
BEGIN
    IF NEW.time_zone IS NOT NULL AND (TG_OP = 'INSERT' OR NEW.time_zone <> OLD.time_zone) THEN
        BEGIN
            PERFORM set_config('TimeZone', NEW.time_zone, true);  -- until this function ends
            zone := current_setting('TimeZone');
        EXCEPTION WHEN invalid_parameter_value THEN
            NULL;
        END;
        IF zone IS NULL OR zone ~ '[<,]' OR zone ~ '[0-9]' AND zone !~ '^Etc/GMT[+-]?[0-9]+$' AND zone NOT IN ('EST5EDT', 'CST6CDT', 'MST7MDT', 'PST8PDT', 'GMT0', 'GMT+0', 'GMT-0') THEN
            RAISE EXCEPTION 'time_zone % is not the name of a time zone', quote_literal(left(NEW.time_zone, 100))
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Write a name such as UTC or Europe/Berlin. pg_timezone_names has them all.';
        END IF;
        NEW.time_zone := zone;
    END IF;
    IF TG_OP = 'INSERT' OR (NEW.cron, NEW.time_zone, NEW.enabled, NEW.paused_until) IS DISTINCT FROM (OLD.cron, OLD.time_zone, OLD.enabled, OLD.paused_until) THEN
        NEW.next_at    := NULL;  -- worked out anew, from changed_at on
        NEW.changed_at := clock_timestamp();  -- the row is locked: edits follow one another, and the leader's statements too
        IF NEW.last_at > NEW.changed_at AND isfinite(NEW.last_at) THEN
            NEW.last_at := NULL;
        END IF;
        IF TG_OP = 'INSERT' OR (NEW.cron, NEW.time_zone, NEW.enabled) IS DISTINCT FROM (OLD.cron, OLD.time_zone, OLD.enabled) THEN
            NEW.error  := NULL;
        END IF;
    END IF;
    RETURN NEW;
END $$;

-- An empty text, such as that of a variable without a value, is part of every error: onejob.bulk would
-- choose all tasks that have one.
DO $do$
BEGIN
    EXECUTE replace(pg_get_functiondef('onejob.bulk(text, jsonb, bigint, int, interval, bigint, bool)'::regprocedure),
        $$    IF filter ? 'ids' AND jsonb_typeof$$,
        $$    IF filter ->> 'error' = '' THEN
        RAISE EXCEPTION 'the field ''error'' of the filter is empty'
              USING ERRCODE = 'invalid_parameter_value', HINT = 'Leave the field out, or give it a part of an error.';
    END IF;
    IF filter ? 'ids' AND jsonb_typeof$$);
END $do$;
