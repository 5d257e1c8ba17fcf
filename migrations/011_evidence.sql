-- When the work of an attempt began and stopped, whatever became of its row.
ALTER TABLE onejob.attempts
    ADD COLUMN begun_at      timestamptz,
    ADD COLUMN stopped_at    timestamptz,
    ADD COLUMN stopped_fence bigint;
COMMENT ON COLUMN onejob.attempts.started_at  IS 'When the task was claimed.';
COMMENT ON COLUMN onejob.attempts.finished_at IS 'When the end was written, or the task taken over.';
COMMENT ON COLUMN onejob.attempts.begun_at    IS 'When the handler began, or shortly after; NULL if nobody has said so, as of a replica that died.';
COMMENT ON COLUMN onejob.attempts.stopped_at  IS 'When all that the handler had started was over, or shortly before; NULL if nobody has said so.';
COMMENT ON COLUMN onejob.attempts.stopped_fence IS 'Of an attempt whose end came when its row was no longer its own: the last fence that had been given out by then. NULL of all others: nobody could claim their lock key before they had ended.';

-- Attempts of the same lock_key, where tasks share one. Others have that of their task.
CREATE INDEX attempts_by_lock_key ON onejob.attempts (lock_key, fence) WHERE lock_key <> task_id::text;
CREATE INDEX attempts_late ON onejob.attempts (stopped_fence) WHERE stopped_fence IS NOT NULL;

-- Which of two was claimed first follows from their fences, not from a clock. An attempt whose
-- end was accepted held its row until then, and no other could be claimed. So only those that
-- ended late can have overlapped, with attempts whose fences were given out by then; and they
-- did if they stopped after the other one had begun. stopped_at is reckoned from the claim and
-- is too early if anything, begun_at from the end and too late if anything.
CREATE OR REPLACE VIEW onejob.overlaps AS
    SELECT a.lock_key,
           a.task_id AS task_id,       a.fence AS fence,       a.replica AS replica,
           b.task_id AS other_task_id, b.fence AS other_fence, b.replica AS other_replica,
           greatest(a.begun_at, b.begun_at)    AS overlap_began,
           least(a.stopped_at, b.stopped_at)   AS overlap_ended
      FROM onejob.attempts a
     CROSS JOIN LATERAL (
            SELECT *
              FROM onejob.attempts
             WHERE task_id = a.task_id
               AND fence > a.fence
               AND fence <= a.stopped_fence
               AND lock_key = a.lock_key
         UNION ALL
            SELECT *
              FROM onejob.attempts
             WHERE lock_key = a.lock_key
               AND lock_key <> task_id::text
               AND fence > a.fence
               AND fence <= a.stopped_fence
               AND task_id <> a.task_id
         UNION ALL
            SELECT *
              FROM onejob.attempts
             WHERE task_id = CASE WHEN a.lock_key <> a.task_id::text AND a.lock_key ~ '^[1-9][0-9]{0,17}$' THEN a.lock_key::bigint END
               AND fence > a.fence
               AND fence <= a.stopped_fence
               AND lock_key = a.lock_key) b
     WHERE a.stopped_fence IS NOT NULL
       AND a.stopped_at > b.begun_at;
COMMENT ON VIEW onejob.overlaps IS 'Pairs of attempts on one lock key that overlapped in time. It stays empty, but for handlers of a replica that was frozen with its leases.';
