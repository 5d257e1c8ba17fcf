-- Which Consul belongs to this database. Both hold the same id; a replica that finds
-- another one claims nothing and takes nothing over.
CREATE TABLE onejob.cluster (
    only_row   bool PRIMARY KEY DEFAULT true,
    id         uuid,
    adopted_at timestamptz,
    adopted_by text,
    CONSTRAINT there_is_one_cluster CHECK (only_row)
);
COMMENT ON COLUMN onejob.cluster.id IS 'The value of the key PREFIX/cluster in the Consul that belongs to this database; NULL until the first replica starts.';
INSERT INTO onejob.cluster DEFAULT VALUES;

-- A row for each session of each replica. The heartbeat is one of the two witnesses of
-- a replica's death; the other is Consul.
CREATE TABLE onejob.replicas (
    session      uuid        PRIMARY KEY,
    process      uuid        NOT NULL,
    name         text        NOT NULL,
    host         text        NOT NULL,
    pid          int         NOT NULL,
    version      text        NOT NULL,
    kinds        text[]      NOT NULL,
    queues       text[]      NOT NULL,
    concurrency  int         NOT NULL,
    running      int         NOT NULL,
    state        text        NOT NULL,
    began_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    heartbeat_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at     timestamptz,
    CONSTRAINT state_is_known CHECK (state IN ('working', 'stopping', 'stopped', 'lost', 'dead')),
    CONSTRAINT what_has_ended_says_when CHECK ((ended_at IS NOT NULL) = (state IN ('stopped', 'lost', 'dead')))
) WITH (fillfactor = 50);
CREATE INDEX replicas_began_at ON onejob.replicas (began_at, session);
COMMENT ON COLUMN onejob.replicas.session IS 'The replica''s session in Consul. A replica that loses it begins another, with a row of its own.';
COMMENT ON COLUMN onejob.replicas.process IS 'The working process: the same for all sessions of its life.';
COMMENT ON COLUMN onejob.replicas.queues IS 'The queues that it claims from; empty means all.';
COMMENT ON COLUMN onejob.replicas.state IS 'working; stopping: it claims nothing more; stopped: it has ended in order; lost: the session ended and the process lived on; dead: the process ended, or all signs of life did.';
COMMENT ON COLUMN onejob.replicas.heartbeat_at IS 'Written about once a second while the session''s leases are valid.';
COMMENT ON COLUMN onejob.replicas.ended_at IS 'When the state became final.';
