-- A task may belong to a trace of the one who enqueued it.

ALTER TABLE onejob.tasks
    ADD COLUMN traceparent text,
    ADD CONSTRAINT traceparent_is_as_w3c_trace_context_says
        CHECK (traceparent ~ '^(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$') NOT VALID; -- no row has one: nothing to read
COMMENT ON COLUMN onejob.tasks.traceparent IS 'The span that enqueued the task, as the HTTP header traceparent has it (W3C Trace Context). Spans of its attempts belong to that trace, and it is handed to what runs.';
