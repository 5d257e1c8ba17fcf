-- onejob.why names a cause as the only one where Postgres knows that, and several where it does not: it
-- does not know whether a limit has free slots, or whether a lock key is still held in Consul. Tasks of a
-- kind that no replica of the queue knows are not ahead of others, since nobody claims them.

CREATE OR REPLACE FUNCTION onejob.why_pending(t onejob.tasks) RETURNS text LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    most_counted CONSTANT bigint := 10000;
    most_lanes   CONSTANT int    := 1000;
    task       text := format('Task %s ', t.id);
    due        bool := t.run_at <= statement_timestamp();
    since      timestamptz;
    a          record;   -- the last attempt
    given_back bool;     -- the last claim was given back before an attempt began
    r          record;   -- what the replicas serve
    field      text;     -- of the payload, whose value the replicas may not know
    unserved   text;     -- why no replica can run it
    runs       text;     -- how many tasks those that can run it run
    known      text[];   -- the kinds that replicas of its queue know
    holder     record;
    holders    text;
    held       bigint;
    urgency    bigint := onejob.lane(t.priority, t.queue, t.kind, t.lock_key IS NULL) >> 52;
    l          record;
    last_lane  bigint := -1;
    lanes      int    := 0;
    before     bigint := 0;
    keyed      bigint := 0;  -- of these, those with a lock_key: they wait for it, and may not run before this one
    n          bigint;
    ahead      text;
BEGIN
    IF t.run_at = 'infinity'::timestamptz THEN
        RETURN task || format('is parked: its run_at is infinity, so it comes due only when somebody sets run_at, or retries it (onejob tasks retry %s).', t.id);
    END IF;

    SELECT attempt, replica, outcome, error, finished_at, fence
      INTO a
      FROM onejob.attempts
     WHERE task_id = t.id
       AND outcome <> 'refused'
     ORDER BY fence DESC
     LIMIT 1;
    given_back := t.fence IS NOT NULL AND t.started_at IS NULL AND a.fence IS DISTINCT FROM t.fence;

    -- Giving it back has moved run_at. Both times may lie in the future in a row that somebody wrote.
    since := least(CASE WHEN given_back THEN greatest(t.created_at, a.finished_at) ELSE greatest(t.run_at, t.created_at) END, statement_timestamp());

    -- Who can run it?
    SELECT count(*) AS live,
           count(*) FILTER (WHERE queue) AS serve_queue,
           count(*) FILTER (WHERE kind) AS know_kind,
           count(*) FILTER (WHERE queue AND kind) AS serve_both,
           count(*) FILTER (WHERE queue AND kind AND name) AS can_run,
           coalesce(sum(running)     FILTER (WHERE queue AND kind AND name), 0) AS running,
           coalesce(sum(concurrency) FILTER (WHERE queue AND kind AND name), 0) AS places,
           max(field) AS field
      INTO r
      FROM (SELECT running, concurrency,
                   cardinality(queues) = 0 OR t.queue = ANY (queues) AS queue,
                   t.kind = ANY (kinds) AS kind,
                   n.field,
                   coalesce(n.names ? (t.payload ->> n.field), true) AS name
              FROM onejob.replicas
              LEFT JOIN LATERAL (
                   SELECT key AS field, value AS names
                     FROM jsonb_each(CASE WHEN jsonb_typeof(replicas.names -> t.kind) = 'object' THEN replicas.names -> t.kind END)
                    LIMIT 1) n ON true
             WHERE ended_at IS NULL
               AND state = 'working'
               AND heartbeat_at > statement_timestamp() - interval '7 seconds') live;
    field := r.field;
    unserved := CASE
        WHEN r.live = 0 THEN coalesce((
             SELECT CASE state
                    WHEN 'lost' THEN format('no replica has a session in Consul: %s lost its own at %s (consul_unavailable in its log says why)', name, onejob.why_time(ended_at))
                    ELSE format('no replica is alive: the last heartbeat was that of %s at %s', name, onejob.why_time(heartbeat_at)) END
               FROM onejob.replicas
              ORDER BY heartbeat_at DESC
              LIMIT 1), 'no replica is alive, and none is known that was')
        WHEN r.serve_queue = 0 THEN format('no live replica serves its queue, "%s" (worker.queues)', t.queue)
        WHEN r.know_kind   = 0 THEN format('no live replica knows its kind, "%s"', t.kind)
        WHEN r.serve_both  = 0 THEN format('no live replica that serves its queue, "%s", knows its kind, "%s"', t.queue, t.kind)
        WHEN r.can_run     = 0 THEN format('no live replica that serves its queue has its %s, "%s", in its configuration', field, onejob.why_error(t.payload ->> field))
    END;

    -- Who has its lock key?
    SELECT id, session, replica, started_at, attempt
      INTO holder
      FROM onejob.tasks
     WHERE status = 'running'
       AND coalesce(lock_key, id::text) = coalesce(t.lock_key, t.id::text);

    IF NOT due AND NOT given_back THEN
        RETURN task
            || CASE WHEN a.fence = t.fence AND a.outcome IN ('failed', 'timeout')
                    THEN format('waits for its retry until %s, after attempt %s of %s %s on replica %s: %s', onejob.why_time(t.run_at), a.attempt, t.max_attempts,
                                CASE a.outcome WHEN 'failed' THEN 'failed' ELSE 'timed out' END, a.replica, coalesce(onejob.why_error(a.error), 'there is no error'))
                    WHEN a.fence = t.fence
                    THEN format('waits until %s to be tried again, after attempt %s of %s on replica %s ended as %s: %s', onejob.why_time(t.run_at), a.attempt, t.max_attempts,
                                a.replica, a.outcome, coalesce(onejob.why_error(t.error), 'there is no error'))
                    ELSE format('is not due until %s', onejob.why_time(t.run_at)) END
            || coalesce('; and ' || unserved, '') || '.';
    END IF;
    IF unserved IS NOT NULL THEN
        RETURN task || format('has waited since %s, because %s%s.', onejob.why_time(since), unserved,
                              CASE WHEN NOT due THEN format('; it was claimed and given back, and is tried again at %s', onejob.why_time(t.run_at)) END);
    END IF;
    IF holder.id IS NOT NULL THEN
        RETURN task || format('waits for its lock key, "%s", which task %s has held since %s, in attempt %s on %s.', coalesce(t.lock_key, t.id::text),
                              holder.id, onejob.why_time(holder.started_at), holder.attempt, onejob.why_replica(holder.session, holder.replica));
    END IF;
    IF given_back AND r.can_run < r.serve_both THEN
        RETURN task || format('has waited since %s, because %s of %s live replicas that serve its queue %s not have its %s, "%s": it is given back until one that has it claims it, and is tried again %s.',
                              onejob.why_time(since), r.serve_queue - r.can_run, r.serve_queue, CASE WHEN r.serve_queue - r.can_run = 1 THEN 'does' ELSE 'do' END,
                              field, onejob.why_error(t.payload ->> field), CASE WHEN due THEN 'now' ELSE 'at ' || onejob.why_time(t.run_at) END);
    END IF;
    -- Replicas claim it again within a second or so. If they do not, Consul is not what it waits for.
    IF given_back AND t.run_at > statement_timestamp() - interval '10 seconds' THEN
        RETURN task || format('was claimed and given back, and is tried again %s: its lock key, "%s", is held in Consul by something that is no task (onejob lock, consul lock), or was until a moment ago (lock-delay)%s%s; or Consul does not answer. onejob tasks explain %s asks Consul.',
                              CASE WHEN due THEN 'now' ELSE 'at ' || onejob.why_time(t.run_at) END, coalesce(t.lock_key, t.id::text),
                              CASE WHEN t.kind = 'http' THEN '; or no replica may send requests to its url (kinds.http.allow)' END,
                              CASE WHEN t.crashes + t.stalls > 0 THEN '; or another task that may have ended replicas runs there' END, t.id);
    END IF;

    -- Which tasks of its queue come first?
    known := ARRAY(
        SELECT DISTINCT unnest(kinds)
          FROM onejob.replicas
         WHERE ended_at IS NULL
           AND state = 'working'
           AND heartbeat_at > statement_timestamp() - interval '7 seconds'
           AND (cardinality(queues) = 0 OR t.queue = ANY (queues)));
    LOOP
        IF t.limit_name IS NULL THEN
            SELECT onejob.lane(priority, queue, kind, lock_key IS NULL) AS lane, queue, kind, lock_key IS NOT NULL AS keyed
              INTO l
              FROM onejob.tasks
             WHERE status = 'pending'
               AND limit_name IS NULL
               AND onejob.lane(priority, queue, kind, lock_key IS NULL) > last_lane
             ORDER BY onejob.lane(priority, queue, kind, lock_key IS NULL), run_at, id
             LIMIT 1;
        ELSE
            SELECT onejob.lane(priority, queue, kind, lock_key IS NULL) AS lane, queue, kind, lock_key IS NOT NULL AS keyed
              INTO l
              FROM onejob.tasks
             WHERE status = 'pending'
               AND limit_name = t.limit_name
               AND onejob.lane(priority, queue, kind, lock_key IS NULL) > last_lane
             ORDER BY onejob.lane(priority, queue, kind, lock_key IS NULL), run_at, id
             LIMIT 1;
        END IF;
        EXIT WHEN l.lane IS NULL OR l.lane >> 52 > urgency OR lanes >= most_lanes OR before > most_counted;
        last_lane := l.lane;
        lanes := lanes + 1;
        CONTINUE WHEN l.queue <> t.queue OR l.kind <> ALL (known);
        IF t.limit_name IS NULL THEN
            SELECT count(*)
              INTO n
              FROM (SELECT
                      FROM onejob.tasks
                     WHERE status = 'pending'
                       AND limit_name IS NULL
                       AND onejob.lane(priority, queue, kind, lock_key IS NULL) = l.lane
                       AND (run_at, id) < (CASE WHEN l.lane >> 52 = urgency THEN t.run_at ELSE statement_timestamp() END, t.id)
                     LIMIT most_counted + 1 - before) first;
        ELSE
            SELECT count(*)
              INTO n
              FROM (SELECT
                      FROM onejob.tasks
                     WHERE status = 'pending'
                       AND limit_name = t.limit_name
                       AND onejob.lane(priority, queue, kind, lock_key IS NULL) = l.lane
                       AND (run_at, id) < (CASE WHEN l.lane >> 52 = urgency THEN t.run_at ELSE statement_timestamp() END, t.id)
                     LIMIT most_counted + 1 - before) first;
        END IF;
        before := before + n;
        keyed  := keyed + CASE WHEN l.keyed THEN n ELSE 0 END;
    END LOOP;
    ahead := CASE WHEN before > most_counted THEN '10,000+ tasks'
                  WHEN before = 1 THEN '1 task'
                  ELSE before || ' tasks' END;
    runs  := format('the %s that can run it %s %s of %s tasks at once', CASE WHEN r.can_run = 1 THEN 'replica' ELSE r.can_run || ' replicas' END,
                    CASE WHEN r.can_run = 1 THEN 'runs' ELSE 'run' END, r.running, r.places);

    IF t.limit_name IS NOT NULL THEN
        SELECT count(*), string_agg(CASE WHEN place <= 3 THEN format('task %s on replica %s since %s', id, replica, onejob.why_time(started_at)) END, ', ' ORDER BY started_at, id)
          INTO held, holders
          FROM (SELECT id, replica, started_at, row_number() OVER (ORDER BY started_at, id) AS place
                  FROM (SELECT id, replica, started_at, limit_name FROM onejob.tasks WHERE status = 'running' LIMIT most_counted) running
                 WHERE limit_name = t.limit_name) holding;
        RETURN task || format('has waited since %s for a slot of limit "%s"%s%s: %s; onejob limits show %s has its slots.', onejob.why_time(since), t.limit_name,
                              CASE WHEN r.running >= r.places THEN format(' or for a free place (%s)', runs) END,
                              CASE WHEN before > 0 THEN format(', behind %s of its queue that %s more urgent', ahead, CASE WHEN before = 1 THEN 'is' ELSE 'are' END) END,
                              CASE WHEN held = 0 THEN 'no task that names the limit runs, so the limit may not exist or have 0 slots, or its slots are held by tasks of a kind that has it in the configuration (limits.kinds), or by something that is no task (onejob lock -n, consul lock)'
                                                      || CASE WHEN r.running >= r.places THEN ''
                                                              WHEN since > statement_timestamp() - interval '5 seconds' THEN '; or it has a free slot, and a replica is about to claim the task'
                                                              ELSE '; or it has a free slot, and a transaction holds the row of the task locked, or claims fail (claim_failed, lock_failed or postgres_... in the log of the replicas)' END
                                   WHEN held = 1 THEN format('%s runs under it', holders)
                                   WHEN held <= 3 THEN format('%s run under it', holders)
                                   ELSE format('%s tasks run under it, such as %s', held, holders) END,
                              CASE WHEN t.limit_name LIKE '-%' THEN '-- ' ELSE '' END || CASE WHEN t.limit_name ~ '^[A-Za-z0-9_./:@%+,][-A-Za-z0-9_./:@%+,]*$' THEN t.limit_name ELSE '''' || replace(t.limit_name, '''', '''\''''') || '''' END);
    END IF;
    IF before > 0 THEN
        RETURN task || format('has waited since %s behind %s of its queue, "%s", that %s more urgent%s%s; %s.', onejob.why_time(since), ahead, t.queue,
                              CASE WHEN before = 1 THEN 'is' ELSE 'are' END,
                              CASE WHEN keyed = 0            THEN ''
                                   WHEN before = 1           THEN ', with a lock_key'
                                   WHEN keyed > most_counted THEN ', all of those that were counted with a lock_key'
                                   ELSE format(', %s of them with a lock_key', keyed) END,
                              CASE WHEN keyed = 0              THEN format(' (%s)', onejob.why_wait(t.queue, least(before, most_counted), before > most_counted))
                                   WHEN before <= most_counted THEN format(' (%s)', replace(onejob.why_wait(t.queue, before, false), 'takes about', 'takes up to')) END,
                              runs);
    END IF;
    IF r.running >= r.places THEN
        RETURN task || format('has waited since %s for a free place: %s (worker.concurrency).', onejob.why_time(since), runs);
    END IF;
    IF since > statement_timestamp() - interval '5 seconds' THEN
        RETURN task || format('is due since %s, nothing is in its way, and a replica is about to claim it.', onejob.why_time(since));
    END IF;
    RETURN task || format('is due since %s and nothing in Postgres is in its way, but %s: a transaction may hold its row locked, the kind may have a limit in the configuration (limits.kinds), or claims fail (claim_failed, lock_failed or postgres_... in the log of the replicas).', onejob.why_time(since),
                          CASE WHEN r.can_run = 1 THEN 'the live replica that can run it has not claimed it' ELSE format('none of the %s live replicas that can run it has claimed it', r.can_run) END);
END $$;

-- Why any task is where it is.
CREATE OR REPLACE FUNCTION onejob.why(id bigint) RETURNS text LANGUAGE plpgsql STABLE STRICT SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    t      onejob.tasks;
    a      record;  -- the last attempt
    c      record;  -- who asked last to cancel it, of those that named the task alone
    q      onejob.queues;
    paused text;
    answer text;
BEGIN
    SELECT * INTO t FROM onejob.tasks WHERE tasks.id = why.id;
    IF NOT FOUND THEN
        RETURN format('Task %s does not exist: no task ever had this ID, or it was deleted.', why.id);
    END IF;
    IF t.status = 'pending' THEN
        SELECT * INTO q FROM onejob.queues WHERE name = t.queue AND paused_until > statement_timestamp();
        IF NOT FOUND THEN
            RETURN onejob.why_pending(t);
        END IF;
        paused := format('its queue, "%s", was paused at %s by %s, until %s%s', q.name, onejob.why_time(q.paused_at), q.paused_by,
                         CASE WHEN isfinite(q.paused_until) THEN onejob.why_time(q.paused_until) ELSE format('somebody resumes it (onejob queues resume %s)', CASE WHEN q.name LIKE '-%' THEN '-- ' ELSE '' END || CASE WHEN q.name ~ '^[A-Za-z0-9_./:@%+,][-A-Za-z0-9_./:@%+,]*$' THEN q.name ELSE '''' || replace(q.name, '''', '''\''''') || '''' END) END,
                         ': ' || onejob.why_error(q.reason));
        IF t.run_at <= statement_timestamp() THEN
            RETURN format('Task %s has waited since %s, because %s.', t.id, onejob.why_time(greatest(t.run_at, t.created_at)), paused);
        END IF;
        RETURN rtrim(onejob.why_pending(t), '.') || '; and ' || paused || '.';
    END IF;
    SELECT who, at
      INTO c
      FROM onejob.actions
     WHERE task_id = t.id
       AND action = 'cancel'
     ORDER BY id DESC
     LIMIT 1;
    -- The action of a bulk cancel names no task, and an UPDATE of cancel_requested leaves no action. Then the
    -- last action is that of an earlier cancel, after which the task was retried. The cancel of now came after
    -- the task had started, or, if it waited, in the transaction that ended it: its action is noted after
    -- finished_at, which is when the transaction began.
    IF t.status = 'running' THEN
        IF c.at < t.started_at THEN
            c.who := NULL;
        END IF;
        RETURN format('Task %s has run since %s, in attempt %s of %s, on %s%s.', t.id, onejob.why_time(t.started_at), t.attempt, t.max_attempts, onejob.why_replica(t.session, t.replica),
                      CASE WHEN t.cancel_requested AND c.who IS NULL THEN '; somebody has asked to cancel it, and its replica stops it within seconds'
                           WHEN t.cancel_requested THEN format('; %s asked at %s to cancel it, and its replica stops it within seconds', c.who, onejob.why_time(c.at)) END);
    END IF;
    SELECT attempt, replica, outcome, started_at, finished_at, fence
      INTO a
      FROM onejob.attempts
     WHERE task_id = t.id
       AND outcome <> 'refused'
     ORDER BY fence DESC
     LIMIT 1;
    IF c.at < (CASE WHEN a.finished_at >= t.finished_at THEN coalesce(a.started_at, a.finished_at)
                    WHEN a.fence IS DISTINCT FROM t.fence AND t.fence IS NOT NULL THEN t.finished_at - interval '1 minute' -- it ended a claim before the attempt began
                    ELSE t.finished_at END) THEN
        c.who := NULL;
    END IF;
    RETURN CASE t.status
        WHEN 'succeeded' THEN format('Task %s succeeded at %s%s.', t.id, onejob.why_time(t.finished_at),
                                     CASE WHEN a.attempt IS NOT NULL THEN format(', in attempt %s of %s on replica %s', a.attempt, t.max_attempts, a.replica) END)
        WHEN 'failed'    THEN format('Task %s failed at %s%s: %s.', t.id, onejob.why_time(t.finished_at),
                                     CASE WHEN a.attempt IS NOT NULL THEN format(', after attempt %s of %s on replica %s', a.attempt, t.max_attempts, a.replica) END,
                                     coalesce(rtrim(onejob.why_error(t.error), '.'), 'there is no error'))
                         ELSE format('Task %s was cancelled at %s%s, %s.', t.id, onejob.why_time(t.finished_at),
                                     CASE WHEN t.cancel_requested THEN ' by ' || c.who END,
                                     CASE WHEN a.outcome = 'cancelled' THEN format('during attempt %s of %s on replica %s', a.attempt, t.max_attempts, a.replica)
                                          WHEN a.attempt IS NOT NULL   THEN format('while it waited after attempt %s of %s', a.attempt, t.max_attempts)
                                          ELSE 'before it ran' END) END;
END $$;
