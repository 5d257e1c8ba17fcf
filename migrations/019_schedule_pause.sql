-- Schedules can be paused, until a time or until somebody resumes them.

-- A pause is an edit: due times of before it are created, those of the pause do not exist,
-- and the first one after it is known at once.
ALTER TABLE onejob.schedules
    ADD COLUMN paused_until timestamptz CONSTRAINT paused_until_is_before_the_year_10000_or_infinity CHECK (paused_until < timestamptz '10000-01-01 UTC' OR paused_until = 'infinity'),
    ADD COLUMN paused_at    timestamptz,
    ADD COLUMN paused_by    text,
    ADD COLUMN pause_reason text CONSTRAINT pause_reason_is_at_most_1000_characters CHECK (length(pause_reason) <= 1000);
COMMENT ON COLUMN onejob.schedules.paused_until IS 'Due times before this do not count; infinity means until somebody resumes the schedule. Write it with onejob.pause_schedule and onejob.resume_schedule.';
COMMENT ON COLUMN onejob.schedules.changed_at IS 'When cron, time_zone, enabled or paused_until last changed, by the clock of Postgres; what was due since belongs to the row as it is now.';

CREATE OR REPLACE FUNCTION onejob.check_schedule() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM now() AT TIME ZONE NEW.time_zone;
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
DROP TRIGGER check_schedule ON onejob.schedules;
CREATE TRIGGER check_schedule BEFORE INSERT OR UPDATE OF cron, time_zone, enabled, paused_until ON onejob.schedules
    FOR EACH ROW EXECUTE FUNCTION onejob.check_schedule();

-- What was paused owes nothing from before its end.
CREATE OR REPLACE FUNCTION onejob.keep_former_schedule() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO onejob.former_schedules (schedule_id, cron, time_zone, next_at, begun_at, until)
    VALUES (OLD.id, OLD.cron, OLD.time_zone, nullif(OLD.next_at, '-infinity'),
            coalesce(nullif(greatest(CASE WHEN OLD.changed_at   <= NEW.changed_at THEN OLD.changed_at END,
                                     CASE WHEN OLD.last_at      <= NEW.changed_at THEN OLD.last_at END,
                                     CASE WHEN OLD.paused_until <= NEW.changed_at THEN OLD.paused_until - interval '1 microsecond' END), '-infinity'), NEW.changed_at),
            NEW.changed_at);
    RETURN NULL;
END $$;
DROP TRIGGER keep_former_schedule ON onejob.schedules;
CREATE TRIGGER keep_former_schedule AFTER UPDATE OF cron, time_zone, enabled, paused_until ON onejob.schedules FOR EACH ROW
    WHEN ((NEW.cron, NEW.time_zone, NEW.enabled, NEW.paused_until) IS DISTINCT FROM (OLD.cron, OLD.time_zone, OLD.enabled, OLD.paused_until)
          AND OLD.enabled AND (OLD.paused_until IS NULL OR OLD.paused_until <= NEW.changed_at)
          AND (OLD.next_at IS NULL OR OLD.next_at <= NEW.changed_at))
    EXECUTE FUNCTION onejob.keep_former_schedule();

CREATE FUNCTION onejob.pause_schedule(name text, reason text DEFAULT NULL, until timestamptz DEFAULT 'infinity') RETURNS bool
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    IF coalesce(until, 'infinity'::timestamptz) <= clock_timestamp() THEN
        RAISE EXCEPTION 'until (%) is not in the future', until USING ERRCODE = 'invalid_parameter_value';
    END IF;
    UPDATE onejob.schedules s
       SET paused_at    = CASE WHEN s.paused_until > clock_timestamp() THEN s.paused_at ELSE clock_timestamp() END,
           paused_until = coalesce(until, 'infinity'::timestamptz),
           paused_by    = session_user::text || coalesce(' (' || nullif(left(current_setting('onejob.actor', true), 200), '') || ')', ''),
           pause_reason = pause_schedule.reason
     WHERE s.name = pause_schedule.name;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM onejob.record('pause schedule'::text, 'schedule ' || pause_schedule.name, 1::bigint, NULL::bigint,
                          nullif(concat_ws(', ', pause_schedule.reason, CASE WHEN isfinite(until) THEN 'until ' || to_char(until AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS UTC') END), ''));
    RETURN true;
END $$;
COMMENT ON FUNCTION onejob.pause_schedule IS 'Lets a schedule create no tasks, until then or until it is resumed; false if there is none with that name. Due times of before are still created.';

CREATE FUNCTION onejob.resume_schedule(name text) RETURNS bool
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    UPDATE onejob.schedules s
       SET paused_until = NULL, paused_at = NULL, paused_by = NULL, pause_reason = NULL
     WHERE s.name = resume_schedule.name
       AND s.paused_until > clock_timestamp();
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM onejob.record('resume schedule'::text, 'schedule ' || resume_schedule.name, 1::bigint, NULL::bigint, NULL::text);
    RETURN true;
END $$;
COMMENT ON FUNCTION onejob.resume_schedule IS 'Lets a paused schedule create tasks again, for due times from now on; false if it is not paused.';

REVOKE ALL ON FUNCTION onejob.pause_schedule(text, text, timestamptz), onejob.resume_schedule(text) FROM PUBLIC;

-- As before, but the record does not say how long it is until then.
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
