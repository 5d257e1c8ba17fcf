-- An edit of a schedule loses no due time, whether or not anybody leads at that moment.
-- The due times of the new line begin after the edit. Those of the old line end with it;
-- the ones that were not made yet are noted, and the leader makes them.

-- Rows from before begin with this migration, if they have to begin at all.
ALTER TABLE onejob.schedules ADD COLUMN changed_at timestamptz DEFAULT now();
COMMENT ON COLUMN onejob.schedules.changed_at IS 'When cron, time_zone or enabled last changed, by the clock of Postgres; what was due since belongs to the row as it is now.';
COMMENT ON TABLE onejob.schedules IS 'INSERT, UPDATE and DELETE as you like; a change takes effect within a second, and loses no due time before or after it.';

CREATE TABLE onejob.former_schedules (
    id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    schedule_id bigint      NOT NULL REFERENCES onejob.schedules (id) ON DELETE CASCADE,
    cron        text        NOT NULL,
    time_zone   text        NOT NULL,
    next_at     timestamptz,
    begun_at    timestamptz NOT NULL,
    until       timestamptz NOT NULL
);
CREATE INDEX former_schedules_schedule_id ON onejob.former_schedules (schedule_id);
COMMENT ON TABLE onejob.former_schedules IS 'What schedules were before an edit, where due times of then have not been made yet. The leader makes them and deletes the row.';
COMMENT ON COLUMN onejob.former_schedules.next_at IS 'The first due time that was not made; NULL if it had not been worked out: then it is the first one after begun_at.';
COMMENT ON COLUMN onejob.former_schedules.until IS 'When the edit was; changed_at of the schedule after it.';

CREATE OR REPLACE FUNCTION onejob.check_schedule() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM now() AT TIME ZONE NEW.time_zone;
    IF TG_OP = 'INSERT' OR (NEW.cron, NEW.time_zone, NEW.enabled) IS DISTINCT FROM (OLD.cron, OLD.time_zone, OLD.enabled) THEN
        NEW.next_at    := NULL;  -- worked out anew, from changed_at on
        NEW.error      := NULL;
        NEW.changed_at := clock_timestamp();  -- the row is locked: edits follow one another, and the leader's statements too
    END IF;
    RETURN NEW;
END $$;

-- It runs with its owner's rights: who may edit a schedule needs none on this table.
-- Times after the edit are from a clock that was set back, and count for nothing.
CREATE FUNCTION onejob.keep_former_schedule() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO onejob.former_schedules (schedule_id, cron, time_zone, next_at, begun_at, until)
    VALUES (OLD.id, OLD.cron, OLD.time_zone, nullif(OLD.next_at, '-infinity'),
            coalesce(nullif(greatest(CASE WHEN OLD.changed_at <= NEW.changed_at THEN OLD.changed_at END,
                                     CASE WHEN OLD.last_at    <= NEW.changed_at THEN OLD.last_at END), '-infinity'), NEW.changed_at),
            NEW.changed_at);
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION onejob.keep_former_schedule() FROM PUBLIC;
CREATE TRIGGER keep_former_schedule AFTER UPDATE OF cron, time_zone, enabled ON onejob.schedules FOR EACH ROW
    WHEN ((NEW.cron, NEW.time_zone, NEW.enabled) IS DISTINCT FROM (OLD.cron, OLD.time_zone, OLD.enabled)
          AND OLD.enabled AND (OLD.next_at IS NULL OR OLD.next_at <= NEW.changed_at))
    EXECUTE FUNCTION onejob.keep_former_schedule();

-- Tasks of a schedule wait for one another with on_overlap = 'queue'. One that is stuck
-- must not gather others without end.
ALTER TABLE onejob.schedules ADD COLUMN queue_cap int NOT NULL DEFAULT 100
    CONSTRAINT queue_cap_is_between_1_and_10000 CHECK (queue_cap BETWEEN 1 AND 10000);
COMMENT ON COLUMN onejob.schedules.queue_cap IS 'With on_overlap = queue: how many tasks of the schedule may be pending at once; due times beyond that are skipped as overlap.';

-- A zone that one leader did not know disabled the schedule for all.
UPDATE onejob.schedules SET error = NULL WHERE error LIKE 'time_zone "%';
