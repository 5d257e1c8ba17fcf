-- Which Postgres server is the database is on record in Consul, with the fences that were
-- used (docs/decisions/fences.md). A record that is lower than this one is an old one, and
-- if there is none it was lost: the fences must go on above all that may have been used.
ALTER TABLE onejob.cluster ADD COLUMN fences_from bigint;
COMMENT ON COLUMN onejob.cluster.fences_from IS 'What is added to the numbers of onejob.fences, as Consul has it on record below the key PREFIX/database; NULL if this database was never on record.';

-- After a failover a row may say what a replica said to the old primary, which it may
-- still do.
ALTER TABLE onejob.replicas ADD COLUMN server timestamptz;
COMMENT ON COLUMN onejob.replicas.server IS 'Which server took the last heartbeat: when that server was started (pg_postmaster_start_time).';
