-- Limit names with white space of any script, or with characters that nobody sees or
-- that turn the direction of text, are refused: lock.CheckSemaphore refuses them for
-- limits. Rows from before keep theirs, and wait; limit_failed in the log names them.

DROP TRIGGER limit_name_begins_with_no_dot_and_has_no_slash_space_or_control ON onejob.tasks;
CREATE TRIGGER limit_name_begins_with_no_dot_and_has_no_slash_space_or_control BEFORE INSERT OR UPDATE OF limit_name ON onejob.tasks
    FOR EACH ROW WHEN (NEW.limit_name ~ '^\.|[/\u0001-\u0020\u007f-\u00a0\u00ad\u061c\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]') EXECUTE FUNCTION onejob.refuse();

DROP TRIGGER limit_name_begins_with_no_dot_and_has_no_slash_space_or_control ON onejob.schedules;
CREATE TRIGGER limit_name_begins_with_no_dot_and_has_no_slash_space_or_control BEFORE INSERT OR UPDATE OF limit_name ON onejob.schedules
    FOR EACH ROW WHEN (NEW.limit_name ~ '^\.|[/\u0001-\u0020\u007f-\u00a0\u00ad\u061c\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]') EXECUTE FUNCTION onejob.refuse();
