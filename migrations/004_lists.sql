-- Failed and cancelled tasks, the newest first, for people who look for them
-- among millions of others. Only rows that end so pay for it: no task has an
-- entry on its way from INSERT to succeeded.
--
-- It stands by -id, in ascending order, because no other index has that order:
-- by id Postgres might choose the primary key, by statistics that are old, and
-- read all that succeeded since.
CREATE INDEX tasks_failed_or_cancelled ON onejob.tasks (status, (-id)) WHERE status IN ('failed', 'cancelled');
