-- Tasks that somebody wants cancelled are found by this index alone: no other one can
-- serve a query that hides the status from the planner. The index of running rows could
-- serve the query before; beside an old snapshot it has an entry of every task that ran
-- since, and it was preferred.
DROP INDEX onejob.tasks_to_cancel;
CREATE INDEX tasks_to_cancel ON onejob.tasks (session) WHERE cancel_requested AND session IS NOT NULL;
