-- Besides deaths, what is counted are replicas that lived and did not get to their
-- heartbeats while they worked on a task: it may take all processors or all memory.
ALTER TABLE onejob.tasks
    ADD COLUMN stalls int NOT NULL DEFAULT 0,
    ADD COLUMN begun_at timestamptz,
    ADD CONSTRAINT stalls_are_between_0_and_a_million CHECK (stalls BETWEEN 0 AND 1000000) NOT VALID;
COMMENT ON COLUMN onejob.tasks.stalls IS 'How many replicas lost their leases while they worked on it because they did not run, and lived on.';

COMMENT ON COLUMN onejob.tasks.begun_at IS 'When the handler was about to begin; written only where a crash or a stall was counted before, and of that attempt only if it is not before started_at.';

CREATE OR REPLACE FUNCTION onejob.retry(task_id bigint) RETURNS bool LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    WITH retried AS (
        UPDATE onejob.tasks
           SET status = 'pending', run_at = now(), attempt = 0, crashes = 0, stalls = 0, finished_at = NULL,
               started_at = NULL, cancel_requested = false, result = NULL
         WHERE id = task_id
           AND status <> 'running'
     RETURNING id
    ), notified AS (
        SELECT pg_notify('onejob_due', '') FROM retried
    )
    SELECT EXISTS (SELECT FROM notified)
$$;

-- Which process a replica is: its death is certain to all who see the same processes.
ALTER TABLE onejob.replicas
    ADD COLUMN machine text   NOT NULL DEFAULT '',
    ADD COLUMN started bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN onejob.replicas.machine IS 'The machine since it was booted, and the namespace, in which pid and started are numbers of processes; empty if they are not.';
COMMENT ON COLUMN onejob.replicas.started IS 'When the process was started, in clock ticks since the machine was booted.';
