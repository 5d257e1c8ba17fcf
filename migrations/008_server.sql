-- Which Postgres server is the database is on record in Consul, with the fences that were
-- used (docs/decisions/fences.md). If there was a record once and there is none, it was
-- lost, and the fences must go on above all that may have been used.
ALTER TABLE onejob.cluster ADD COLUMN recorded_at timestamptz;
COMMENT ON COLUMN onejob.cluster.recorded_at IS 'When this database was first put on record in Consul, below the key PREFIX/database; NULL if it never was.';

-- After a failover a row may say what a replica said to the old primary, which it may
-- still do.
ALTER TABLE onejob.replicas ADD COLUMN server timestamptz;
COMMENT ON COLUMN onejob.replicas.server IS 'Which server took the last heartbeat: when that server was started (pg_postmaster_start_time).';
