-- A crash quarantines a suspect only if it was the only one. Takeovers take the tasks of a dead
-- replica in several statements where Postgres refuses one of them, somebody has some locked, or
-- there are more than 1,000: the last suspect must not look as if it had been alone.

ALTER TABLE onejob.replicas
    ADD COLUMN suspects int;
COMMENT ON COLUMN onejob.replicas.suspects IS 'Of a replica whose tasks are taken over: how many of those that it ran, and that the next crash would quarantine, had begun shortly before. NULL until the first of them is taken.';
