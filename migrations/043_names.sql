-- Names by which each host has a zone of its own, or none, are no time zones of schedules. onejob.why does
-- not end with two full stops where an error ends with one. And no function takes a column that somebody
-- has added to onejob.tasks, such as task_id, for its argument or variable of that name.
DO $do$
DECLARE
    changed record;
BEGIN
    FOR changed IN
        SELECT *
          FROM (VALUES
               ('onejob.check_schedule()', $$zone ~ '[<,]'$$, $$zone IN ('Factory', 'localtime', 'posixrules') OR zone ~ '[<,]'$$),
               ('onejob.why(bigint)', $$rtrim(onejob.why_error(t.error), '.')$$, $$regexp_replace(onejob.why_error(t.error), '([^.])[.]$', '\1')$$),
               ('onejob.why_pending(onejob.tasks)', $$coalesce(onejob.why_error(a.error), $$, $$coalesce(regexp_replace(onejob.why_error(a.error), '([^.])[.]$', '\1'), $$),
               ('onejob.why_pending(onejob.tasks)', $$coalesce(onejob.why_error(t.error), $$, $$coalesce(regexp_replace(onejob.why_error(t.error), '([^.])[.]$', '\1'), $$),
               ('onejob.cancel(bigint)', $$WHERE id = task_id$$, $$WHERE id = cancel.task_id$$),
               ('onejob.retry(bigint)', $$WHERE id = task_id$$, $$WHERE id = retry.task_id$$)) c (function, was, is_now)
    LOOP
        IF position(changed.was IN pg_get_functiondef(changed.function::regprocedure)) = 0 THEN
            RAISE EXCEPTION 'the function % is not the one of the migrations before', changed.function
                  USING HINT = 'Somebody has changed it. Put back its definition from the folder migrations, and migrate again.';
        END IF;
        EXECUTE replace(pg_get_functiondef(changed.function::regprocedure), changed.was, changed.is_now);
    END LOOP;
END $do$;

DO $do$
DECLARE
    definition text;
BEGIN
    FOR definition IN
        SELECT pg_get_functiondef(p.oid)
          FROM pg_proc p
          JOIN pg_language l ON l.oid = p.prolang
         WHERE p.pronamespace = 'onejob'::regnamespace
           AND l.lanname = 'plpgsql'
           AND p.prosrc !~ '#variable_conflict'
    LOOP
        EXECUTE regexp_replace(definition, '(AS [$]function[$])', E'\\1\n#variable_conflict use_variable');
    END LOOP;
END $do$;
