-- An index that Postgres 13 made for extract() is one for date_part() after an upgrade to 14 or
-- newer, where extract() is another function. Retention did not find it there, and read all rows
-- with a keep_for each time. date_part() is the same in all versions.

DROP INDEX onejob.tasks_finished_kept_until;
CREATE INDEX tasks_finished_kept_until ON onejob.tasks
    (status, ((date_part('epoch', finished_at - timestamptz '1970-01-01 UTC' + least(keep_for, interval '1000 years')) * 1000000)::bigint))
    WHERE finished_at IS NOT NULL AND keep_for IS NOT NULL;
