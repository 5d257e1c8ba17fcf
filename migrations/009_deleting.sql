-- What is deleted, and what is left of it.

-- A task's attempts go with it, no matter who deletes it. There is no foreign key, which would
-- cost every attempt a row lock. Nothing but a DELETE pays for this.
CREATE FUNCTION onejob.delete_attempts() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
BEGIN
    DELETE FROM onejob.attempts WHERE task_id = ANY (ARRAY(SELECT id FROM deleted));
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION onejob.delete_attempts() FROM PUBLIC;
CREATE TRIGGER delete_attempts AFTER DELETE ON onejob.tasks
    REFERENCING OLD TABLE AS deleted FOR EACH STATEMENT EXECUTE FUNCTION onejob.delete_attempts();

-- Retention finds rows with a keep_for by the time until which they are kept, in
-- microseconds since 1970. By when they had finished it would read all of them each
-- time. An index can hold only what depends on no time zone: so a month of keep_for is
-- 30 days, and a year 365.25. No time is so long that it could not be added.
CREATE INDEX tasks_finished_kept_until ON onejob.tasks
    (status, ((extract(epoch FROM finished_at - timestamptz '1970-01-01 UTC' + least(keep_for, interval '1000 years')) * 1000000)::bigint))
    WHERE finished_at IS NOT NULL AND keep_for IS NOT NULL;
DROP INDEX onejob.tasks_finished_with_keep_for;
COMMENT ON COLUMN onejob.tasks.keep_for IS 'How long the finished task and its attempts are kept, a month being 30 days and a year 365.25; NULL means as the configuration says.';
