-- The tables, and what people call from SQL. Every check has a sentence for a
-- name, because that name is the error message of whoever inserts nonsense.

CREATE SEQUENCE onejob.fences AS bigint;
COMMENT ON SEQUENCE onejob.fences IS 'One number for every claim; it only rises.';

CREATE TABLE onejob.tasks (
    id               bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind             text        NOT NULL,
    payload          jsonb       NOT NULL DEFAULT '{}',
    status           text        NOT NULL DEFAULT 'pending',
    queue            text        NOT NULL DEFAULT 'default',
    priority         smallint    NOT NULL DEFAULT 0,
    run_at           timestamptz NOT NULL DEFAULT now(),
    lock_key         text,
    limit_name       text,
    unique_key       text,
    attempt          int         NOT NULL DEFAULT 0,
    max_attempts     int         NOT NULL DEFAULT 5,
    crashes          int         NOT NULL DEFAULT 0,
    timeout          interval,
    fence            bigint,
    session          uuid,
    replica          text,
    started_at       timestamptz,
    finished_at      timestamptz,
    result           jsonb,
    error            text,
    cancel_requested bool        NOT NULL DEFAULT false,
    schedule_id      bigint,
    created_at       timestamptz NOT NULL DEFAULT now(),

    CONSTRAINT status_is_pending_running_succeeded_failed_or_cancelled
        CHECK (status IN ('pending', 'running', 'succeeded', 'failed', 'cancelled')),
    CONSTRAINT kind_is_1_to_100_characters
        CHECK (length(kind) BETWEEN 1 AND 100),
    CONSTRAINT queue_is_1_to_100_characters
        CHECK (length(queue) BETWEEN 1 AND 100),
    CONSTRAINT priority_is_between_minus_1000_and_1000
        CHECK (priority BETWEEN -1000 AND 1000),
    CONSTRAINT max_attempts_is_between_1_and_1000
        CHECK (max_attempts BETWEEN 1 AND 1000),
    CONSTRAINT attempt_and_crashes_are_not_negative
        CHECK (attempt >= 0 AND crashes >= 0),
    CONSTRAINT timeout_is_above_zero
        CHECK (timeout > interval '0'),
    CONSTRAINT lock_key_is_1_to_512_bytes_without_control_characters
        CHECK (octet_length(lock_key) BETWEEN 1 AND 512 AND lock_key !~ '[[:cntrl:]]'),
    CONSTRAINT limit_name_is_1_to_100_characters
        CHECK (length(limit_name) BETWEEN 1 AND 100),
    CONSTRAINT unique_key_is_1_to_512_bytes
        CHECK (octet_length(unique_key) BETWEEN 1 AND 512),
    CONSTRAINT payload_is_at_most_4_mib
        CHECK (pg_column_size(payload) <= 4194304),
    CONSTRAINT only_a_running_task_has_a_session
        CHECK ((status = 'running') = (session IS NOT NULL)),
    CONSTRAINT only_a_finished_task_has_finished_at
        CHECK ((status IN ('succeeded', 'failed', 'cancelled')) = (finished_at IS NOT NULL))
);
COMMENT ON TABLE onejob.tasks IS 'One row for one thing to be done once. Enqueue: INSERT INTO onejob.tasks (kind, payload) VALUES (...)';

-- Due rows are found lane by lane: a lane is what shares queue, priority and
-- kind, and whether there is a lock_key; within it rows stand in the order in
-- which they are due. So neither rows of the far future, nor rows of a kind that
-- nobody runs, nor rows behind a busy lock_key stand in the others' way.
CREATE INDEX tasks_pending ON onejob.tasks (queue, priority, kind, (lock_key IS NULL), run_at, id)
    WHERE status = 'pending' AND limit_name IS NULL;

-- A lane may begin with thousands of rows that wait for one busy lock_key. This
-- leads past them, from key to key.
CREATE INDEX tasks_pending_by_lock_key ON onejob.tasks (queue, priority, kind, lock_key, run_at, id)
    WHERE status = 'pending' AND limit_name IS NULL AND lock_key IS NOT NULL;

-- Rows with a limit stand apart, so that none of them is in the others' way. They
-- are looked at when there is a slot for them.
CREATE INDEX tasks_pending_by_limit ON onejob.tasks (limit_name, priority DESC, run_at, id)
    WHERE status = 'pending' AND limit_name IS NOT NULL;

-- At most one running row per lock key, whatever Consul does. It is also how
-- the running rows, which are few, are found.
CREATE UNIQUE INDEX one_running_task_per_lock_key ON onejob.tasks ((coalesce(lock_key, id::text))) WHERE status = 'running';

-- Every replica looks once a second which of its own tasks shall be cancelled,
-- and should not read all that are running for that.
CREATE INDEX tasks_to_cancel ON onejob.tasks (session) WHERE status = 'running' AND cancel_requested;

CREATE UNIQUE INDEX unique_key_is_taken_by_a_pending_or_running_task ON onejob.tasks (unique_key)
    WHERE unique_key IS NOT NULL AND status IN ('pending', 'running');

CREATE TABLE onejob.attempts (
    task_id     bigint      NOT NULL,
    fence       bigint      NOT NULL,
    attempt     int,
    lock_key    text,
    replica     text,
    session     uuid,
    started_at  timestamptz,
    finished_at timestamptz NOT NULL,
    outcome     text        NOT NULL,
    error       text,
    exit_code   int,
    output      text,

    PRIMARY KEY (task_id, fence),
    CONSTRAINT outcome_is_known
        CHECK (outcome IN ('succeeded', 'failed', 'timeout', 'lease_lost', 'crashed', 'cancelled', 'shutdown', 'refused')),
    CONSTRAINT only_a_refused_attempt_may_be_known_in_part
        CHECK (outcome = 'refused' OR num_nulls(attempt, lock_key, replica, session, started_at) = 0)
);
COMMENT ON TABLE onejob.attempts IS 'One row for every attempt that began, written when it ended. There is no foreign key to tasks: it would cost every attempt a row lock.';

CREATE VIEW onejob.overlaps AS
    WITH spans AS (
        SELECT lock_key, fence, task_id, replica, started_at, finished_at
          FROM onejob.attempts
     UNION ALL
        SELECT coalesce(lock_key, id::text), fence, id, replica, started_at, 'infinity'
          FROM onejob.tasks
         WHERE status = 'running'
    )
    SELECT a.lock_key,
           a.task_id AS task_id,       a.fence AS fence,       a.replica AS replica,
           b.task_id AS other_task_id, b.fence AS other_fence, b.replica AS other_replica,
           greatest(a.started_at, b.started_at) AS overlap_began,
           least(a.finished_at, b.finished_at)  AS overlap_ended
      FROM spans a
      JOIN spans b ON b.lock_key = a.lock_key
                  AND b.fence > a.fence
                  AND b.started_at < a.finished_at
                  AND a.started_at < b.finished_at;
COMMENT ON VIEW onejob.overlaps IS 'Pairs of attempts on one lock key that overlapped in time. It stays empty.';

-- Whoever inserts wakes the replicas, once a statement however many its rows.
CREATE FUNCTION onejob.notify_due() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('onejob_due', '');
    RETURN NULL;
END $$;
CREATE TRIGGER notify_due AFTER INSERT ON onejob.tasks
    FOR EACH STATEMENT EXECUTE FUNCTION onejob.notify_due();

-- UPDATE onejob.tasks SET cancel_requested = true cancels: a waiting task at
-- once, a running one as soon as its replica hears of it.
CREATE FUNCTION onejob.cancel_waiting() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.status      := 'cancelled';
    NEW.finished_at := now();
    RETURN NEW;
END $$;
CREATE TRIGGER cancel_waiting BEFORE UPDATE OF cancel_requested ON onejob.tasks
    FOR EACH ROW WHEN (NEW.cancel_requested AND NEW.status = 'pending')
    EXECUTE FUNCTION onejob.cancel_waiting();

CREATE FUNCTION onejob.notify_cancel() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('onejob_cancel', '');
    RETURN NULL;
END $$;
CREATE TRIGGER notify_cancel AFTER UPDATE OF cancel_requested ON onejob.tasks
    FOR EACH STATEMENT EXECUTE FUNCTION onejob.notify_cancel();

-- Who wants to make a task with this lock_key running reserves the key first, and
-- has it until the end of its transaction. The two steps see two snapshots: what
-- the holder before committed is seen by the second, so that true means that
-- nobody holds the key and that whoever held it has finished.
CREATE FUNCTION onejob.reserve_lock_key(key text) RETURNS bool LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended(key, 20180913)) THEN
        RETURN false;
    END IF;
    RETURN NOT EXISTS (SELECT FROM onejob.tasks WHERE status = 'running' AND coalesce(lock_key, id::text) = key);
END $$;

CREATE FUNCTION onejob.enqueue(
    kind         text,
    payload      jsonb       DEFAULT '{}',
    queue        text        DEFAULT 'default',
    priority     int         DEFAULT 0,
    run_at       timestamptz DEFAULT now(),
    lock_key     text        DEFAULT NULL,
    limit_name   text        DEFAULT NULL,
    unique_key   text        DEFAULT NULL,
    max_attempts int         DEFAULT 5,
    timeout      interval    DEFAULT NULL
) RETURNS bigint LANGUAGE sql AS $$
    INSERT INTO onejob.tasks (kind, payload, queue, priority, run_at, lock_key, limit_name, unique_key, max_attempts, timeout)
    VALUES (kind, payload, queue, priority, run_at, lock_key, limit_name, unique_key, max_attempts, timeout)
    ON CONFLICT (unique_key) WHERE unique_key IS NOT NULL AND status IN ('pending', 'running') DO NOTHING
    RETURNING id
$$;
COMMENT ON FUNCTION onejob.enqueue IS 'Adds a task and returns its id; NULL if a pending or running task has the same unique_key.';

CREATE FUNCTION onejob.cancel(task_id bigint) RETURNS bool LANGUAGE sql AS $$
    WITH cancelled AS (
        UPDATE onejob.tasks
           SET cancel_requested = true
         WHERE id = task_id
           AND status IN ('pending', 'running')
     RETURNING id
    )
    SELECT EXISTS (SELECT FROM cancelled)
$$;
COMMENT ON FUNCTION onejob.cancel IS 'Cancels a waiting task now and a running one soon; false if there is none such.';

CREATE FUNCTION onejob.retry(task_id bigint) RETURNS bool LANGUAGE sql AS $$
    WITH retried AS (
        UPDATE onejob.tasks
           SET status = 'pending', run_at = now(), attempt = 0, crashes = 0, finished_at = NULL,
               started_at = NULL, cancel_requested = false, result = NULL
         WHERE id = task_id
           AND status <> 'running'
     RETURNING id
    ), notified AS (
        SELECT pg_notify('onejob_due', '') FROM retried
    )
    SELECT EXISTS (SELECT FROM notified)
$$;
COMMENT ON FUNCTION onejob.retry IS 'Makes a task that is not running due now, with all its attempts; false if there is none such.';
