-- A lock_key may be the id of another task, whose own key that is. Of two claims side by side, one of each,
-- the unique index on running rows lets one through. But one that waits there has its fence already: if the
-- other task had ended by then, it went on, with a fence below that of the task before it. So a claim of
-- such a lock_key locks that task's row, which the other claim needs, and looks once more when its own row
-- is in the index, because the other task may have been enqueued since.

-- reserve_task locks the task whose id a lock_key is, if there is one without a lock_key of its own. It
-- returns false if another transaction has locked it. With the fence of a row with that lock_key that has
-- just become running it fails instead, as the index does, and also if that task has got a higher one
-- meanwhile. (A higher one of long ago means that fences have gone back, which replicas see to.)
CREATE FUNCTION onejob.reserve_task(key text, below bigint DEFAULT NULL) RETURNS bool LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    task bigint := CASE WHEN key ~ '^(0|-?[1-9][0-9]{0,18})$' THEN
                   CASE WHEN key::numeric BETWEEN -9223372036854775808 AND 9223372036854775807 THEN key::bigint END END;
    last bigint;
    since timestamptz;
    free bool;
BEGIN
    IF task IS NULL OR NOT EXISTS (SELECT FROM onejob.tasks WHERE id = task AND lock_key IS NULL) THEN
        RETURN true;
    END IF;
    SELECT fence, started_at INTO last, since FROM onejob.tasks WHERE id = task AND lock_key IS NULL FOR NO KEY UPDATE SKIP LOCKED;
    free := FOUND;
    IF below IS NOT NULL AND (NOT free OR last > below AND since >= transaction_timestamp()) THEN
        RAISE unique_violation USING CONSTRAINT = 'one_running_task_per_lock_key', MESSAGE = format('task %s has this lock key, and is being claimed or was meanwhile', task);
    END IF;
    RETURN free;
END $$;

CREATE OR REPLACE FUNCTION onejob.reserve_lock_key(key text) RETURNS bool LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended(key, 20180913::bigint)) OR NOT onejob.reserve_task(key) THEN
        RETURN false;
    END IF;
    RETURN NOT EXISTS (SELECT FROM onejob.tasks WHERE status = 'running' AND coalesce(lock_key, id::text) = key);
END $$;

-- Roles that may claim may do so with such lock keys too, before their grants are made anew.
REVOKE ALL ON FUNCTION onejob.reserve_task(text, bigint) FROM PUBLIC;
DO $$
DECLARE
    r record;
BEGIN
    FOR r IN SELECT pg_get_userbyid(a.grantee) AS name
               FROM pg_proc p, aclexplode(p.proacl) a
              WHERE p.oid = 'onejob.reserve_lock_key(text)'::regprocedure
                AND a.privilege_type = 'EXECUTE'
                AND a.grantee NOT IN (0, p.proowner) LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION onejob.reserve_task(text, bigint) TO %I', r.name);
    END LOOP;
END $$;
