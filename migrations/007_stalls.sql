-- Which process a replica is: its death is certain to whoever sees the same processes.
ALTER TABLE onejob.replicas
    ADD COLUMN machine text   NOT NULL DEFAULT '',
    ADD COLUMN started bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN onejob.replicas.machine IS 'The machine since it was booted, and the namespace, in which pid and started are numbers of processes; empty if they are not.';
COMMENT ON COLUMN onejob.replicas.started IS 'When the process was started, in clock ticks since the machine was booted.';
