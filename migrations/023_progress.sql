-- Handlers say how far they are. A heartbeat carries that to Postgres, so that it costs no
-- statement, and no version of the task's row.

ALTER TABLE onejob.replicas
    ADD COLUMN progress jsonb,
    ADD CONSTRAINT progress_is_an_object CHECK (jsonb_typeof(progress) = 'object');
COMMENT ON COLUMN onejob.replicas.progress IS 'What its handlers last said of how far they are, by fence. onejob.progress shows it.';

CREATE VIEW onejob.progress AS
SELECT t.id AS task_id,
       t.fence,
       t.replica,
       (p.said ->> 'percent')::real        AS percent,
       p.said ->> 'text'                   AS text,
       (p.said ->> 'said_at')::timestamptz AS said_at
  FROM onejob.tasks t
  JOIN onejob.replicas r ON r.session = t.session
 CROSS JOIN LATERAL (SELECT r.progress -> t.fence::text AS said) p
 WHERE t.status = 'running'
   AND p.said IS NOT NULL;
COMMENT ON VIEW onejob.progress IS 'How far running tasks are, of those that say so: up to a second old. percent is NULL if a task does not know.';
