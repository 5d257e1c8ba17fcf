-- A pause of a queue that has ended by itself left its row for ever, and claims read this table. What
-- ended an hour ago goes with the next pause of any queue.
CREATE FUNCTION onejob.forget_ended_pauses() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM onejob.queues
     WHERE name = ANY (ARRAY(SELECT name FROM onejob.queues WHERE paused_until < clock_timestamp() - interval '1 hour' FOR UPDATE SKIP LOCKED));
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION onejob.forget_ended_pauses() FROM PUBLIC;
CREATE TRIGGER forget_ended_pauses AFTER INSERT ON onejob.queues
    FOR EACH STATEMENT EXECUTE FUNCTION onejob.forget_ended_pauses();
