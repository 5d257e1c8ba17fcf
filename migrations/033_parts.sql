-- Values that are short as a whole, or as they are stored, and long in a part of them, or as text.

-- An interval has years, days and hours of their own, each with its sign: one that is four months long
-- may consist of -6,000,000 years and as many days, and no time can be added to it. Such a keep_for
-- passed, and then the task could not end: the index of what is kept adds the two. Rows from before
-- keep theirs.
CREATE TRIGGER keep_for_has_no_part_below_minus_1000_years BEFORE INSERT OR UPDATE OF keep_for ON onejob.tasks
    FOR EACH ROW WHEN (NEW.keep_for IS NOT NULL AND least(date_part('year', NEW.keep_for), date_part('day', NEW.keep_for) / 366, date_part('hour', NEW.keep_for) / 8784) < -1000)
    EXECUTE FUNCTION onejob.refuse();
CREATE TRIGGER timeout_has_no_part_below_minus_1000_years BEFORE INSERT OR UPDATE OF timeout ON onejob.tasks
    FOR EACH ROW WHEN (NEW.timeout IS NOT NULL AND least(date_part('year', NEW.timeout), date_part('day', NEW.timeout) / 366, date_part('hour', NEW.timeout) / 8784) < -1000)
    EXECUTE FUNCTION onejob.refuse();
CREATE TRIGGER keep_for_has_no_part_below_minus_1000_years BEFORE INSERT OR UPDATE OF keep_for ON onejob.schedules
    FOR EACH ROW WHEN (NEW.keep_for IS NOT NULL AND least(date_part('year', NEW.keep_for), date_part('day', NEW.keep_for) / 366, date_part('hour', NEW.keep_for) / 8784) < -1000)
    EXECUTE FUNCTION onejob.refuse();
CREATE TRIGGER timeout_has_no_part_below_minus_1000_years BEFORE INSERT OR UPDATE OF timeout ON onejob.schedules
    FOR EACH ROW WHEN (NEW.timeout IS NOT NULL AND least(date_part('year', NEW.timeout), date_part('day', NEW.timeout) / 366, date_part('hour', NEW.timeout) / 8784) < -1000)
    EXECUTE FUNCTION onejob.refuse();

-- jsonb keeps the number 1e131071 in ten bytes, and its text has as many digits as that says: 500 bytes
-- that were stored came to a replica as 4 MB, and a claim of 500 such rows as 2 GB, because a claim
-- looks at what is stored. JSON that people write is not eight times as long as text, even if all of
-- it are escapes. Rows from before keep theirs.
CREATE FUNCTION onejob.refuse_long_payload() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    broken text;
BEGIN
    -- What comes from another table may be compressed. What is concatenated is not.
    broken := CASE WHEN octet_length(NEW.payload::text) > 4194304 THEN 'payload_is_at_most_4_mib'
                   WHEN octet_length(NEW.payload::text) > 65536 + 8 * pg_column_size(NEW.payload || '{}'::jsonb) THEN 'payload_is_at_most_8_times_as_long_as_text' END;
    IF broken IS NOT NULL THEN
        RAISE EXCEPTION 'new row for relation "%" violates check constraint "%"', TG_TABLE_NAME, broken
              USING ERRCODE = 'check_violation', CONSTRAINT = broken, SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME;
    END IF;
    RETURN NEW;
END $$;
REVOKE ALL ON FUNCTION onejob.refuse_long_payload() FROM PUBLIC;
DROP TRIGGER payload_is_at_most_4_mib ON onejob.tasks;
CREATE TRIGGER payload_is_at_most_4_mib BEFORE INSERT OR UPDATE OF payload ON onejob.tasks
    FOR EACH ROW WHEN (octet_length(NEW.payload::text) > 65536) EXECUTE FUNCTION onejob.refuse_long_payload();
DROP TRIGGER payload_is_at_most_4_mib ON onejob.schedules;
CREATE TRIGGER payload_is_at_most_4_mib BEFORE INSERT OR UPDATE OF payload ON onejob.schedules
    FOR EACH ROW WHEN (octet_length(NEW.payload::text) > 65536) EXECUTE FUNCTION onejob.refuse_long_payload();
