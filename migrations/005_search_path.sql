-- What the functions of this schema call is resolved in pg_catalog alone, whatever
-- the caller's search_path is: a role that may CREATE in a schema on that path could
-- otherwise plant a function or an operator, and the replicas would run it.
-- EXECUTE is granted to roles that need it, not to everybody. onejob.lane is left as
-- it is: all in it is qualified, every INSERT computes it, and with settings
-- of its own it could not become part of the statements that call it.
DO $$
DECLARE
    f regprocedure;
BEGIN
    FOR f IN SELECT oid FROM pg_catalog.pg_proc WHERE pronamespace = 'onejob'::regnamespace AND proname <> 'lane' LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = pg_catalog, pg_temp', f);
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', f);
    END LOOP;
END $$;

-- A role that may execute these needs no UPDATE on the table, with which it could do
-- anything.
ALTER FUNCTION onejob.cancel(bigint) SECURITY DEFINER;
ALTER FUNCTION onejob.retry(bigint)  SECURITY DEFINER;

-- As before, with the exact type, so that no other function fits better.
CREATE OR REPLACE FUNCTION onejob.reserve_lock_key(key text) RETURNS bool LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended(key, 20180913::bigint)) THEN
        RETURN false;
    END IF;
    RETURN NOT EXISTS (SELECT FROM onejob.tasks WHERE status = 'running' AND coalesce(lock_key, id::text) = key);
END $$;
