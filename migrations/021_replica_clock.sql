-- Whose clock is wrong? Nothing depends on it, but times in logs do.

ALTER TABLE onejob.replicas ADD COLUMN clock_ahead interval;
COMMENT ON COLUMN onejob.replicas.clock_ahead IS 'How far the replica''s wall clock was ahead of that of Postgres at the last heartbeat, less the time that the heartbeat took to get there.';
