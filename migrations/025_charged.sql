-- A replica that comes back gives its tasks back the crash that they were charged. Not every
-- crash is charged, and the count alone does not tell whose it was.

ALTER TABLE onejob.attempts
    ADD COLUMN charged boolean;
COMMENT ON COLUMN onejob.attempts.charged IS 'Of a crashed attempt: whether it counts as a crash of the task. It does not if the handler had not begun, or if other replicas that had nothing of the task died at the same time.';
