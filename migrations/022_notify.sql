-- An INSERT wakes the replicas, and the notification says in which transaction. That is once a transaction
-- however many its statements; and the replicas choose by it who claims first.
CREATE OR REPLACE FUNCTION onejob.notify_due() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pg_notify('onejob_due', pg_current_xact_id()::text);
    RETURN NULL;
END $$;
