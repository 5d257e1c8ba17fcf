-- Schedules make tasks by cron. Each due time of each schedule is an occurrence:
-- it became a task, or was skipped for a reason that is written down.

CREATE TABLE onejob.schedules (
    id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name         text        NOT NULL UNIQUE,
    cron         text        NOT NULL,
    time_zone    text        NOT NULL DEFAULT 'UTC',
    kind         text        NOT NULL,
    payload      jsonb       NOT NULL DEFAULT '{}',
    queue        text        NOT NULL DEFAULT 'default',
    priority     smallint    NOT NULL DEFAULT 0,
    lock_key     text,
    limit_name   text,
    max_attempts int         NOT NULL DEFAULT 5,
    timeout      interval,
    enabled      bool        NOT NULL DEFAULT true,
    on_missed    text        NOT NULL DEFAULT 'one',
    missed_cap   int         NOT NULL DEFAULT 100,
    on_overlap   text        NOT NULL DEFAULT 'allow',
    next_at      timestamptz,
    last_at      timestamptz,
    error        text,
    created_at   timestamptz NOT NULL DEFAULT now(),

    CONSTRAINT name_is_1_to_100_characters
        CHECK (length(name) BETWEEN 1 AND 100),
    CONSTRAINT cron_has_five_or_six_fields_or_is_a_descriptor
        CHECK (cron ~ '^(@(yearly|annually|monthly|weekly|daily|midnight|hourly)|@every +[0-9][0-9a-z.]*|[^@=[:space:]]+( +[^=[:space:]]+){4,5})$'),
    CONSTRAINT kind_is_1_to_100_characters
        CHECK (length(kind) BETWEEN 1 AND 100),
    CONSTRAINT queue_is_1_to_100_characters
        CHECK (length(queue) BETWEEN 1 AND 100),
    CONSTRAINT priority_is_between_minus_1000_and_1000
        CHECK (priority BETWEEN -1000 AND 1000),
    CONSTRAINT lock_key_is_1_to_512_bytes_without_control_characters
        CHECK (octet_length(lock_key) BETWEEN 1 AND 512 AND lock_key !~ '[[:cntrl:]]'),
    CONSTRAINT limit_name_is_1_to_100_characters
        CHECK (length(limit_name) BETWEEN 1 AND 100),
    CONSTRAINT max_attempts_is_between_1_and_1000
        CHECK (max_attempts BETWEEN 1 AND 1000),
    CONSTRAINT timeout_is_above_zero
        CHECK (timeout > interval '0'),
    CONSTRAINT payload_is_at_most_4_mib
        CHECK (pg_column_size(payload) <= 4194304),
    CONSTRAINT on_missed_is_skip_one_or_all
        CHECK (on_missed IN ('skip', 'one', 'all')),
    CONSTRAINT missed_cap_is_between_1_and_10000
        CHECK (missed_cap BETWEEN 1 AND 10000),
    CONSTRAINT on_overlap_is_allow_skip_or_queue
        CHECK (on_overlap IN ('allow', 'skip', 'queue'))
);
COMMENT ON TABLE onejob.schedules IS 'INSERT, UPDATE and DELETE as you like; a change takes effect within a second and never for the past.';
COMMENT ON COLUMN onejob.schedules.next_at IS 'The next due time; NULL until the leader has worked it out, infinity when there is none.';
COMMENT ON COLUMN onejob.schedules.on_missed IS 'What becomes of due times that nobody made in time: skip all, make one task for all of them, or make all, the oldest first, at most missed_cap.';
COMMENT ON COLUMN onejob.schedules.on_overlap IS 'What happens at a due time while a task of the schedule is pending or running: allow another, skip it, or queue it (they run one after the other).';

-- A zone that Postgres does not know is refused. What Postgres knows and the
-- leader does not, it marks in the column error.
CREATE FUNCTION onejob.check_schedule() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM now() AT TIME ZONE NEW.time_zone;
    IF TG_OP = 'INSERT' OR (NEW.cron, NEW.time_zone, NEW.enabled) IS DISTINCT FROM (OLD.cron, OLD.time_zone, OLD.enabled) THEN
        NEW.next_at := NULL;  -- worked out anew, from now on
        NEW.error   := NULL;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER check_schedule BEFORE INSERT OR UPDATE OF cron, time_zone, enabled ON onejob.schedules
    FOR EACH ROW EXECUTE FUNCTION onejob.check_schedule();

CREATE TABLE onejob.occurrences (
    schedule_id bigint      NOT NULL REFERENCES onejob.schedules (id) ON DELETE CASCADE,
    due_at      timestamptz NOT NULL,
    task_id     bigint,
    skipped     text,
    made_at     timestamptz NOT NULL DEFAULT now(),

    PRIMARY KEY (schedule_id, due_at),
    CONSTRAINT an_occurrence_is_a_task_or_was_skipped_for_a_reason
        CHECK ((task_id IS NULL) <> (skipped IS NULL)),
    CONSTRAINT skipped_is_missed_overlap_or_capped
        CHECK (skipped IN ('missed', 'overlap', 'capped'))
);
COMMENT ON TABLE onejob.occurrences IS 'Every due time of every schedule: its task, or why there is none. The primary key is why no two leaders can make the same one.';
CREATE INDEX occurrences_made_at ON onejob.occurrences (made_at);

-- What on_overlap asks for.
CREATE INDEX tasks_of_schedule ON onejob.tasks (schedule_id) WHERE schedule_id IS NOT NULL AND status IN ('pending', 'running');

-- What retention looks for. A row may say itself how long it is kept.
ALTER TABLE onejob.tasks ADD COLUMN keep_for interval,
    ADD CONSTRAINT keep_for_is_not_negative CHECK (keep_for >= interval '0');
COMMENT ON COLUMN onejob.tasks.keep_for IS 'How long the finished task and its attempts are kept; NULL means as the configuration says.';
ALTER TABLE onejob.schedules ADD COLUMN keep_for interval,
    ADD CONSTRAINT keep_for_is_not_negative CHECK (keep_for >= interval '0');
CREATE INDEX tasks_finished ON onejob.tasks (status, finished_at) WHERE finished_at IS NOT NULL AND keep_for IS NULL;
CREATE INDEX tasks_finished_with_keep_for ON onejob.tasks (finished_at) WHERE finished_at IS NOT NULL AND keep_for IS NOT NULL;
