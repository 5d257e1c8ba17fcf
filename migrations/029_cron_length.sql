-- The leader reads the line of a schedule each time that it is due, quotes it in the log and in
-- the column error, and the page shows it. A line of many megabytes would take memory from all
-- replicas. Rows from before keep theirs.
CREATE TRIGGER cron_is_at_most_1000_characters BEFORE INSERT OR UPDATE OF cron ON onejob.schedules
    FOR EACH ROW WHEN (length(NEW.cron) > 1000) EXECUTE FUNCTION onejob.refuse();
