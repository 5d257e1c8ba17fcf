package store_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/store"
	"onejob/tasks"
)

// why returns what is said of a task.
func (b *bench) why(id string) string {
	b.t.Helper()
	why, err := b.Why(b.t.Context(), idOf(b.t.(*testing.T), id))
	if err != nil {
		b.t.Fatal(err)
	}
	return why
}

// serves adds a replica that lives for the next minute, however slow the machine is,
// that serves some queues and knows some kinds, and returns its
// session.
func (b *bench) serves(name, queues, kinds, names string, running, concurrency int) string {
	b.t.Helper()
	return b.one(`
INSERT INTO onejob.replicas (session, process, name, host, pid, version, kinds, queues, names, concurrency, running, state, heartbeat_at)
VALUES (gen_random_uuid(), gen_random_uuid(), $1, 'h', 1, 'v', $2::text[], $3::text[], nullif($4, '')::jsonb, $5, $6, 'working', now() + interval '1 minute')
RETURNING session::text`, name, kinds, queues, names, concurrency, running)
}

// Each reason why a task waits has a sentence of its own, which names the cause, who is the
// cause, and since when.
func TestWhy(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	const moment = `\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC \((in )?\d+ (s|min|h|days)( ago)?\)`
	past := strings.NewReplacer("(in )?", "", "( ago)?", " ago").Replace(moment)
	// live is a replica that serves all queues and knows noop and other.
	live := func() { b.session = b.serves("one", "{}", "{noop,other}", "", 0, 5) }
	claim := func(columns ...string) *tasks.Task {
		b.t.Helper()
		return b.claimed(columns...)
	}
	for _, c := range []struct {
		name string
		make func() (id string)
		want string // a pattern: ID, MOMENT and PAST stand for those
	}{
		{"NotDue", func() string { live(); return b.insert("run_at=now() + interval '3 hours 1 second'") },
			`Task ID is not due until MOMENT.`},
		{"NotDueAndUnserved", func() string { return b.insert("run_at=now() + interval '3 days'") },
			`Task ID is not due until MOMENT; and no replica is alive, and none is known that was.`},
		{"Parked", func() string { live(); return b.insert("run_at='infinity'") },
			`Task ID is parked: its run_at is infinity, so it comes due only when somebody sets run_at, or retries it \(onejob tasks retry ID\).`},
		{"NoReplica", func() string { return b.insert() },
			`Task ID has waited since MOMENT, because no replica is alive, and none is known that was.`},
		{"NoReplicaAnyMore", func() string {
			live()
			b.sql(`UPDATE onejob.replicas SET state = 'dead', ended_at = now() - interval '5 minutes', heartbeat_at = now() - interval '6 minutes'`)
			return b.insert()
		}, `Task ID has waited since MOMENT, because no replica is alive: the last heartbeat was that of one at MOMENT.`},
		{"AllReplicasSilent", func() string {
			live()
			b.sql(`UPDATE onejob.replicas SET heartbeat_at = now() - interval '8 seconds'`)
			return b.insert()
		}, `Task ID has waited since MOMENT, because no replica is alive: the last heartbeat was that of one at MOMENT.`},
		{"AllReplicasStopping", func() string { live(); b.sql(`UPDATE onejob.replicas SET state = 'stopping'`); return b.insert() },
			`Task ID has waited since MOMENT, because no replica is alive: the last heartbeat was that of one at MOMENT.`},
		{"NoReplicaHasASession", func() string {
			live()
			b.sql(`UPDATE onejob.replicas SET state = 'lost', ended_at = now() - interval '20 seconds', heartbeat_at = now() - interval '29 seconds'`)
			b.serves("two", "{}", "{noop}", "", 0, 5)
			b.sql(`UPDATE onejob.replicas SET state = 'dead', ended_at = now() - interval '5 minutes', heartbeat_at = now() - interval '6 minutes' WHERE name = 'two'`)
			return b.insert()
		}, `Task ID has waited since MOMENT, because no replica has a session in Consul: one lost its own at MOMENT \(consul_unavailable in its log says why\).`},
		{"QueueUnserved", func() string { b.serves("one", "{mail,slow}", "{noop}", "", 0, 5); return b.insert("queue='nightly'") },
			`Task ID has waited since MOMENT, because no live replica serves its queue, "nightly" \(worker.queues\).`},
		{"KindUnknown", func() string { live(); return b.insert("kind='pdf'") },
			`Task ID has waited since MOMENT, because no live replica knows its kind, "pdf".`},
		{"KindUnknownInItsQueue", func() string {
			b.serves("one", "{mail}", "{pdf}", "", 0, 5)
			b.serves("two", "{default}", "{noop}", "", 0, 5)
			return b.insert("kind='pdf'")
		}, `Task ID has waited since MOMENT, because no live replica that serves its queue, "default", knows its kind, "pdf".`},
		{"CommandUnknown", func() string {
			b.serves("one", "{}", "{exec}", `{"exec": {"command": ["backup", "report"]}}`, 0, 5)
			return b.insert("kind='exec'", `payload='{"command": "vacuum"}'`)
		}, `Task ID has waited since MOMENT, because no live replica that serves its queue has its command, "vacuum", in its configuration.`},
		{"StatementUnknown", func() string {
			b.serves("one", "{}", "{sql}", `{"sql": {"statement": []}, "exec": {"command": ["close"]}}`, 0, 5)
			return b.insert("kind='sql'", `payload='{"statement": "close"}'`)
		}, `Task ID has waited since MOMENT, because no live replica that serves its queue has its statement, "close", in its configuration.`},
		{"CommandKnown", func() string {
			b.serves("one", "{}", "{exec}", `{"exec": {"command": ["backup"]}}`, 0, 5)
			return b.insert("kind='exec'", `payload='{"command": "backup"}'`)
		}, `Task ID is due since MOMENT, nothing is in its way, and a replica is about to claim it.`},
		{"PayloadOfAnotherForm", func() string {
			b.serves("one", "{}", "{exec}", `{"exec": {"command": ["backup"]}}`, 0, 5)
			return b.insert("kind='exec'", `payload='["backup"]'`)
		}, `Task ID is due since MOMENT, nothing is in its way, and a replica is about to claim it.`},
		{"LockKeyHeld", func() string {
			live()
			holder := claim("lock_key='db1'")
			return b.insert("lock_key='db1'") + fmt.Sprintf(" %d", holder.ID)
		}, `Task ID waits for its lock key, "db1", which task OTHER has held since MOMENT, in attempt 1 on replica one.`},
		{"LockKeyHeldThatIsItsID", func() string {
			live()
			id := b.insert("kind='other'", "run_at=now() + interval '1 hour'")
			holder := claim("lock_key=" + "'" + id + "'")
			b.sql(`UPDATE onejob.tasks SET run_at = now() WHERE id = $1`, id)
			return id + fmt.Sprintf(" %d", holder.ID)
		}, `Task ID waits for its lock key, "ID", which task OTHER has held since MOMENT, in attempt 1 on replica one.`},
		{"LockKeyHeldByTheDead", func() string {
			live()
			holder := claim("lock_key='db1'")
			b.sql(`UPDATE onejob.replicas SET state = 'dead', ended_at = now()`)
			b.serves("two", "{}", "{noop}", "", 0, 5)
			return b.insert("lock_key='db1'") + fmt.Sprintf(" %d", holder.ID)
		}, `Task ID waits for its lock key, "db1", which task OTHER has held since MOMENT, in attempt 1 on replica one, which died at MOMENT; another replica is about to take the task over.`},
		{"GivenBack", func() string {
			live()
			task := claim("lock_key='db1'")
			if err := b.Requeue(t.Context(), task, 5*time.Second); err != nil {
				t.Fatal(err)
			}
			return fmt.Sprint(task.ID)
		}, `Task ID was claimed and given back, and is tried again at MOMENT: its lock key, "db1", is held in Consul by something that is no task \(onejob lock, consul lock\), or was until a moment ago \(lock-delay\); or Consul does not answer. onejob tasks explain ID asks Consul.`},
		{"GivenBackAndDueAgain", func() string {
			live()
			task := claim()
			if err := b.Requeue(t.Context(), task, 0); err != nil {
				t.Fatal(err)
			}
			return fmt.Sprint(task.ID)
		}, `Task ID was claimed and given back, and is tried again now: its lock key, "ID", is held in Consul .*`},
		// It is due for so long that what it waits for is not the lock key of then.
		{"GivenBackLongAgo", func() string {
			live()
			id := fmt.Sprint(claim("lock_key='db1'").ID)
			b.sql(`UPDATE onejob.tasks SET status = 'pending', session = NULL, replica = NULL, started_at = NULL, attempt = 0, run_at = now() - interval '1 hour', created_at = now() - interval '2 hours' WHERE id = $1`, id)
			b.sql(`UPDATE onejob.replicas SET running = 5`)
			return id
		}, `Task ID has waited since MOMENT for a free place: the replica that can run it runs 5 of 5 tasks at once \(worker.concurrency\).`},
		{"GivenBackForItsName", func() string {
			b.session = b.serves("one", "{}", "{noop}", `{"noop": {"command": ["backup"]}}`, 0, 5)
			task := claim(`payload='{"command": "vacuum"}'`)
			if err := b.Requeue(t.Context(), task, 5*time.Second); err != nil {
				t.Fatal(err)
			}
			return fmt.Sprint(task.ID)
		}, `Task ID has waited since PAST, because no live replica that serves its queue has its command, "vacuum", in its configuration; it was claimed and given back, and is tried again at MOMENT.`},
		{"GivenBackByThoseWithoutItsCommand", func() string {
			b.session = b.serves("one", "{}", "{noop}", `{"noop": {"command": ["backup"]}}`, 0, 5)
			b.serves("two", "{default}", "{other}", "", 0, 5)
			b.serves("three", "{}", "{noop}", `{"noop": {"command": ["vacuum"]}}`, 0, 5)
			b.serves("mail", "{mail}", "{noop}", `{"noop": {"command": []}}`, 0, 5)
			task := claim(`payload='{"command": "vacuum"}'`)
			if err := b.Requeue(t.Context(), task, 5*time.Second); err != nil {
				t.Fatal(err)
			}
			return fmt.Sprint(task.ID)
		}, `Task ID has waited since PAST, because 2 of 3 live replicas that serve its queue do not have its command, "vacuum": it is given back until one that has it claims it, and is tried again at MOMENT.`},
		{"GivenBackByTheOneWithoutItsStatement", func() string {
			b.session = b.serves("one", "{}", "{noop}", `{"noop": {"statement": []}}`, 0, 5)
			b.serves("two", "{}", "{noop}", `{"noop": {"statement": ["close"]}}`, 0, 5)
			task := claim(`payload='{"statement": "close"}'`)
			if err := b.Requeue(t.Context(), task, 0); err != nil {
				t.Fatal(err)
			}
			return fmt.Sprint(task.ID)
		}, `Task ID has waited since PAST, because 1 of 2 live replicas that serve its queue does not have its statement, "close": it is given back until one that has it claims it, and is tried again now.`},
		{"LockKeyHeldAndGivenBackByTheOneWithoutItsCommand", func() string {
			b.session = b.serves("one", "{}", "{noop}", `{"noop": {"command": []}}`, 0, 5)
			b.serves("two", "{}", "{noop}", `{"noop": {"command": ["vacuum"]}}`, 0, 5)
			task := claim("lock_key='db1'", `payload='{"command": "vacuum"}'`)
			if err := b.Requeue(t.Context(), task, time.Minute); err != nil {
				t.Fatal(err)
			}
			return fmt.Sprintf("%d %d", task.ID, claim("lock_key='db1'").ID)
		}, `Task ID waits for its lock key, "db1", which task OTHER has held since MOMENT, in attempt 1 on replica one.`},
		{"GivenBackAfterAnAttempt", func() string {
			b.session = b.serves("one", "{}", "{noop}", `{"noop": {"command": []}}`, 0, 5)
			id := b.insert(`payload='{"command": "vacuum"}'`, "created_at=now() - interval '1 day'", "fence=1000000", "run_at=now() + interval '1 minute'")
			b.sql(`INSERT INTO onejob.attempts (task_id, fence, attempt, lock_key, replica, session, started_at, finished_at, outcome)
			       VALUES ($1, 999999, 1, 'k', 'one', gen_random_uuid(), now() - interval '3 hours', now() - interval '2 hours 10 minutes', 'failed')`, id)
			return id
		}, `Task ID has waited since \S+ \S+ UTC \(2 h ago\), because no live replica that serves its queue has its command, "vacuum", .*`},
		{"Retry", func() string {
			live()
			task := claim("max_attempts=3")
			e := failed(task, tasks.StatusPending)
			e.Delay, e.Error = time.Hour, "exit status 3:\n\tno space left"
			if err := b.Complete(t.Context(), e); err != nil {
				t.Fatal(err)
			}
			return fmt.Sprint(task.ID)
		}, `Task ID waits for its retry until MOMENT, after attempt 1 of 3 failed on replica one: exit status 3: no space left.`},
		{"TriedAgainLater", func() string {
			live()
			task := claim()
			e := failed(task, tasks.StatusPending)
			e.Outcome, e.Requeue, e.Delay, e.Error = tasks.LeaseLost, true, time.Hour, "the session is lost"
			if err := b.Complete(t.Context(), e); err != nil {
				t.Fatal(err)
			}
			return fmt.Sprint(task.ID)
		}, `Task ID waits until MOMENT to be tried again, after attempt 1 of 5 on replica one ended as lease_lost: the session is lost.`},
		{"LimitHeld", func() string {
			live()
			var holders []string
			for range 2 {
				id := b.insert("limit_name='calls'")
				c, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Limit: "calls", Max: 1})
				if err != nil || len(c.Tasks) != 1 {
					t.Fatal(c, err)
				}
				holders = append(holders, id)
			}
			b.insert("limit_name='calls'")
			return b.insert("limit_name='calls'") + " " + holders[0]
		}, `Task ID has waited since MOMENT for a slot of limit "calls", behind 1 task of its queue that is more urgent: task OTHER on replica one since MOMENT, task \d+ on replica one since MOMENT run under it; onejob limits show calls has its slots.`},
		{"QueuePaused", func() string {
			live()
			b.sql(`SELECT onejob.pause_queue('mail', E'the provider\nis down')`)
			return b.insert("queue='mail'")
		},
			`Task ID has waited since MOMENT, because its queue, "mail", was paused at MOMENT by \w+, until somebody resumes it \(onejob queues resume mail\): the provider is down.`},
		{"QueuePausedForAWhile", func() string {
			live()
			b.sql(`SELECT onejob.pause_queue('mail', until => now() + interval '1 hour')`)
			return b.insert("queue='mail'", "limit_name='calls'")
		}, `Task ID has waited since MOMENT, because its queue, "mail", was paused at MOMENT by \w+, until MOMENT.`},
		{"QueuePausedAndNotDue", func() string {
			live()
			b.sql(`SELECT onejob.pause_queue('mail')`)
			return b.insert("queue='mail'", "run_at=now() + interval '1 hour'")
		}, `Task ID is not due until MOMENT; and its queue, "mail", was paused at MOMENT by \w+, until somebody resumes it \(onejob queues resume mail\).`},
		{"LimitHeldByNoTask", func() string { live(); return b.insert("limit_name='calls'") },
			`Task ID has waited since MOMENT for a slot of limit "calls": no task that names the limit runs, so the limit may not exist or have 0 slots, or its slots are held by tasks of a kind that has it in the configuration \(limits.kinds\), or by something that is no task \(onejob lock -n, consul lock\); or it has a free slot, and a replica is about to claim the task; onejob limits show calls has its slots.`},
		{"LimitHeldByNoTaskForLong", func() string {
			live()
			return b.insert("limit_name='calls'", "run_at=now() - interval '1 minute'", "created_at=now() - interval '1 minute'")
		}, `Task ID has waited since MOMENT for a slot of limit "calls": no task that names the limit runs, so the limit may not exist or have 0 slots, or its slots are held by tasks of a kind that has it in the configuration \(limits.kinds\), or by something that is no task \(onejob lock -n, consul lock\); or it has a free slot, and a transaction holds the row of the task locked, or claims fail \(claim_failed, .* in the log of the replicas\); onejob limits show calls has its slots.`},
		{"LimitWhileAllPlacesAreTaken", func() string { b.serves("one", "{}", "{noop}", "", 5, 5); return b.insert("limit_name='calls'") },
			`Task ID has waited since MOMENT for a slot of limit "calls" or for a free place \(the replica that can run it runs 5 of 5 tasks at once\): no task that names the limit runs, so the limit may not exist or have 0 slots, or its slots are held by tasks of a kind that has it in the configuration \(limits.kinds\), or by something that is no task \(onejob lock -n, consul lock\); onejob limits show calls has its slots.`},
		{"LimitWithAShellInItsName", func() string { live(); return b.insert("limit_name='it''s;$(id)#'") },
			`Task ID has waited since MOMENT for a slot of limit "it's;\$\(id\)#": no task that names the limit runs, .*; onejob limits show 'it'\\''s;\$\(id\)#' has its slots.`},
		{"LimitThatLooksLikeAFlag", func() string { live(); return b.insert("limit_name='-n'") },
			`Task ID has waited since MOMENT for a slot of limit "-n": no task that names the limit runs, .*; onejob limits show -- '-n' has its slots.`},
		{"QueueWithAShellInItsName", func() string {
			live()
			b.sql(`SELECT onejob.pause_queue('$(touch owned)')`)
			return b.insert("queue='$(touch owned)'")
		}, `Task ID has waited since MOMENT, because its queue, "\$\(touch owned\)", was paused at MOMENT by \w+, until somebody resumes it \(onejob queues resume '\$\(touch owned\)'\).`},
		{"BehindOthers", func() string {
			live()
			b.sql(`INSERT INTO onejob.tasks (kind, priority) SELECT 'noop', 5 FROM generate_series(1, 30)`)
			b.sql(`INSERT INTO onejob.tasks (kind, lock_key) SELECT 'other', 'k' FROM generate_series(1, 3)`)
			b.sql(`INSERT INTO onejob.tasks (kind, priority, run_at) VALUES ('noop', 7, now() + interval '1 hour')`)
			b.sql(`INSERT INTO onejob.tasks (kind, priority, queue) VALUES ('noop', 7, 'mail')`)
			b.sql(`INSERT INTO onejob.tasks (kind, priority) VALUES ('noop', -7)`)
			b.sql(`INSERT INTO onejob.tasks (kind, priority) SELECT 'unknown', 5 FROM generate_series(1, 50)`)
			return b.insert("run_at=now() + interval '1 microsecond'")
		}, `Task ID has waited since MOMENT behind 33 tasks of its queue, "default", that are more urgent, 3 of them with a lock_key \(none of that queue has succeeded within the last minute\); the replica that can run it runs 0 of 5 tasks at once.`},
		{"BehindTasksThatNoReplicaOfItsQueueKnows", func() string {
			b.serves("one", "{default}", "{noop}", "", 5, 5)
			b.serves("two", "{mail}", "{other}", "", 0, 5)
			b.sql(`INSERT INTO onejob.tasks (kind, priority) SELECT 'unknown', 5 FROM generate_series(1, 50)`)
			b.sql(`INSERT INTO onejob.tasks (kind, priority) SELECT 'other', 5 FROM generate_series(1, 50)`)
			return b.insert()
		}, `Task ID has waited since MOMENT for a free place: the replica that can run it runs 5 of 5 tasks at once \(worker.concurrency\).`},
		{"BehindOneWithALockKey", func() string {
			live()
			b.insert("priority=1", "lock_key='k'")
			b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at) SELECT 'noop', 'succeeded', clock_timestamp() FROM generate_series(1, 100)`)
			return b.insert()
		}, `Task ID has waited since MOMENT behind 1 task of its queue, "default", that is more urgent, with a lock_key \(at the rate of the last minute that takes up to 1 s\); the replica that can run it runs 0 of 5 tasks at once.`},
		{"BehindManyWithLockKeys", func() string {
			live()
			b.sql(`INSERT INTO onejob.tasks (kind, lock_key, priority) SELECT 'noop', 'k', 1 FROM generate_series(1, 12000)`)
			return b.insert()
		}, `Task ID has waited since MOMENT behind 10,000\+ tasks of its queue, "default", that are more urgent, all of those that were counted with a lock_key; the replica that can run it runs 0 of 5 tasks at once.`},
		{"BehindMany", func() string {
			b.serves("one", "{}", "{noop}", "", 3, 5)
			b.serves("two", "{default}", "{noop}", "", 5, 5)
			b.sql(`INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, 12000)`)
			b.sql(`INSERT INTO onejob.tasks (kind, queue, status, finished_at) SELECT 'noop', CASE WHEN i % 2 = 0 THEN 'default' ELSE 'mail' END, 'succeeded', clock_timestamp() FROM generate_series(1, 4000) i`)
			return b.insert("priority=-1")
		}, `Task ID has waited since MOMENT behind 10,000\+ tasks of its queue, "default", that are more urgent \(at the rate of the last minute that takes more than 5 min\); the 2 replicas that can run it run 8 of 10 tasks at once.`},
		{"BehindOneOfAFastQueue", func() string {
			live()
			b.insert("priority=1")
			b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at) SELECT 'noop', 'succeeded', clock_timestamp() FROM generate_series(1, 12000)`)
			return b.insert()
		}, `Task ID has waited since MOMENT behind 1 task of its queue, "default", that is more urgent \(at the rate of the last minute that takes about 1 s\); the replica that can run it runs 0 of 5 tasks at once.`},
		{"NoFreePlace", func() string { b.serves("one", "{}", "{noop}", "", 5, 5); return b.insert() },
			`Task ID has waited since MOMENT for a free place: the replica that can run it runs 5 of 5 tasks at once \(worker.concurrency\).`},
		{"AboutToBeClaimed", func() string { live(); return b.insert() },
			`Task ID is due since MOMENT, nothing is in its way, and a replica is about to claim it.`},
		{"NobodyClaims", func() string {
			live()
			b.serves("two", "{}", "{noop}", "", 0, 5)
			return b.insert("run_at=now() - interval '1 minute'", "created_at=now() - interval '1 minute'")
		}, `Task ID is due since MOMENT and nothing in Postgres is in its way, but none of the 2 live replicas that can run it has claimed it: .*claims fail \(claim_failed, .* in the log of the replicas\).`},
		{"Running", func() string { live(); return fmt.Sprint(claim("max_attempts=4").ID) },
			`Task ID has run since MOMENT, in attempt 1 of 4, on replica one.`},
		{"RunningAndCancelled", func() string {
			live()
			task := claim()
			if _, err := b.Cancel(t.Context(), task.ID); err != nil {
				t.Fatal(err)
			}
			return fmt.Sprint(task.ID)
		}, `Task ID has run since MOMENT, in attempt 1 of 5, on replica one; \w+ asked at MOMENT to cancel it, and its replica stops it within seconds.`},
		{"RunningOnTheDead", func() string {
			live()
			task := claim()
			b.sql(`UPDATE onejob.replicas SET state = 'dead', ended_at = now()`)
			return fmt.Sprint(task.ID)
		}, `Task ID has run since MOMENT, in attempt 1 of 5, on replica one, which died at MOMENT; another replica is about to take the task over.`},
		{"RunningOnTheSilent", func() string {
			live()
			task := claim()
			b.sql(`UPDATE onejob.replicas SET heartbeat_at = now() - interval '8 seconds'`)
			return fmt.Sprint(task.ID)
		}, `Task ID has run since MOMENT, in attempt 1 of 5, on replica one, whose last heartbeat was at MOMENT; if it is dead, another replica is about to take the task over.`},
		{"RunningNobodyKnowsWhere", func() string {
			live()
			task := claim()
			b.sql(`DELETE FROM onejob.replicas`)
			return fmt.Sprint(task.ID)
		}, `Task ID has run since MOMENT, in attempt 1 of 5, on replica one, which is not in onejob.replicas; another replica takes the task over when Consul says that it is dead.`},
		{"Succeeded", func() string {
			live()
			task := claim()
			if err := b.Complete(t.Context(), succeeded(task)); err != nil {
				t.Fatal(err)
			}
			return fmt.Sprint(task.ID)
		}, `Task ID succeeded at MOMENT, in attempt 1 of 5 on replica one.`},
		{"Failed", func() string {
			live()
			task := claim("max_attempts=1")
			if err := b.Complete(t.Context(), failed(task, tasks.StatusFailed)); err != nil {
				t.Fatal(err)
			}
			return fmt.Sprint(task.ID)
		}, `Task ID failed at MOMENT, after attempt 1 of 1 on replica one: it broke.`},
		{"FailedWithoutAnAttempt", func() string { return b.insert("status='failed'", "finished_at=now()") },
			`Task ID failed at MOMENT: there is no error.`},
		{"CancelledBeforeItRan", func() string {
			id := b.insert()
			if _, err := b.Cancel(t.Context(), idOf(t, id)); err != nil {
				t.Fatal(err)
			}
			return id
		}, `Task ID was cancelled at MOMENT by \w+, before it ran.`},
		// Of a bulk cancel, and of an UPDATE, no action names the task: an earlier cancel is not taken for it.
		{"CancelledOnceMore", func() string {
			id := b.insert("run_at='infinity'")
			b.sql(`SELECT onejob.cancel($1)`, id)
			b.sql(`SELECT onejob.retry($1)`, id)
			b.sql(`UPDATE onejob.tasks SET cancel_requested = true WHERE id = $1`, id)
			return id
		}, `Task ID was cancelled at MOMENT, before it ran.`},
		{"CancelledOnceMoreByName", func() string {
			id := b.insert("run_at='infinity'")
			b.sql(`SELECT onejob.cancel($1)`, id)
			b.sql(`UPDATE onejob.actions SET who = 'alice' WHERE task_id = $1`, id)
			b.sql(`SELECT onejob.retry($1)`, id)
			b.sql(`SELECT onejob.cancel($1)`, id)
			b.sql(`UPDATE onejob.actions SET who = 'carol' WHERE task_id = $1 AND who <> 'alice'`, id)
			return id
		}, `Task ID was cancelled at MOMENT by carol, before it ran.`},
		{"RunningAndCancelledOnceMore", func() string {
			live()
			id := b.insert()
			b.sql(`SELECT onejob.cancel($1)`, id)
			b.sql(`SELECT onejob.retry($1)`, id)
			equal(t, "the number of claimed tasks", len(b.claimMax(1)), 1)
			b.sql(`UPDATE onejob.tasks SET cancel_requested = true WHERE id = $1`, id)
			return id
		}, `Task ID has run since MOMENT, in attempt 1 of 5, on replica one; somebody has asked to cancel it, and its replica stops it within seconds.`},
		{"CancelledByNameWhileItRan", func() string {
			live()
			task := claim()
			if _, err := b.Cancel(t.Context(), task.ID); err != nil {
				t.Fatal(err)
			}
			e := failed(task, tasks.StatusCancelled)
			e.Outcome = tasks.Cancelled
			if err := b.Complete(t.Context(), e); err != nil {
				t.Fatal(err)
			}
			return fmt.Sprint(task.ID)
		}, `Task ID was cancelled at MOMENT by \w+, during attempt 1 of 5 on replica one.`},
		{"CancelledByNameBeforeTheAttemptBegan", func() string {
			live()
			task := claim()
			if _, err := b.Cancel(t.Context(), task.ID); err != nil {
				t.Fatal(err)
			}
			if err := b.Requeue(t.Context(), task, time.Second); err != nil {
				t.Fatal(err)
			}
			return fmt.Sprint(task.ID)
		}, `Task ID was cancelled at MOMENT by \w+, before it ran.`},
		{"CancelledWhileItRan", func() string {
			live()
			task := claim()
			e := failed(task, tasks.StatusCancelled)
			e.Outcome = tasks.Cancelled
			if err := b.Complete(t.Context(), e); err != nil {
				t.Fatal(err)
			}
			return fmt.Sprint(task.ID)
		}, `Task ID was cancelled at MOMENT, during attempt 1 of 5 on replica one.`},
	} {
		t.Run(c.name, func(t *testing.T) {
			b.t = t
			b.sql(`DELETE FROM onejob.tasks`)
			b.sql(`DELETE FROM onejob.replicas`)
			b.sql(`DELETE FROM onejob.queues`)
			id, other, _ := strings.Cut(c.make(), " ")
			why := b.why(id)
			want := strings.NewReplacer("ID", id, "OTHER", other, "MOMENT", moment, "PAST", past).Replace(c.want)
			if !regexp.MustCompile("^" + want + "$").MatchString(why) {
				t.Errorf("got  %s\nwant %s", why, want)
			}
		})
	}
	b.t = t
	if _, err := b.Why(t.Context(), 1<<60); !errors.Is(err, store.ErrNoTask) {
		t.Errorf("of a task that does not exist: %v", err)
	}
	equal(t, "what SQL says of a task that does not exist", b.one(`SELECT onejob.why(99999999)`), "Task 99999999 does not exist: no task ever had this ID, or it was deleted.")
}

// No pending row, whatever is in it, is without an answer, and none costs much. None has waited
// since a moment in the future, and none blames Consul where a replica lacks what the row names.
func TestWhyOfRandomRows(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	seed := rand.N(1_000_000)
	t.Logf("seed %d", seed)
	random := func(sql string) string {
		return regexp.MustCompile(`r\((\d+)\)`).ReplaceAllString(sql, `floor(random() * $1)::int`)
	}
	err := pgx.BeginFunc(t.Context(), b.pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), `SELECT setseed($1)`, float64(seed)/1_000_000)
		if err == nil {
			_, err = tx.Exec(t.Context(), random(`
INSERT INTO onejob.tasks (kind, queue, priority, payload, run_at, created_at, lock_key, limit_name, attempt, crashes, fence, status, session, replica, started_at, finished_at, error)
SELECT (ARRAY['noop', 'exec', 'sql', 'http', 'pdf'])[1 + r(5)], (ARRAY['default', 'mail', 'slow', 'a "b" %s'])[1 + r(4)], r(3) - 1,
       (ARRAY['{}', '{"command": "backup"}', '{"command": "%s"}', '{"command": 7}', '[]', '"command"', 'null', '{"statement": "x"}'])[1 + r(8)]::jsonb,
       (ARRAY['0001-01-01 UTC', '9999-12-31 UTC', 'infinity', now()::text, (now() - interval '1 day')::text, (now() + interval '1 day')::text])[1 + r(6)]::timestamptz,
       (ARRAY['0001-01-01 UTC', '9999-12-31 UTC', now()::text])[1 + r(3)]::timestamptz,
       CASE WHEN r(2) = 0 THEN 'k' || r(5000) || U&'\202E%s' END, CASE WHEN r(3) = 0 THEN 'l' || r(20) END, r(7), r(3), CASE WHEN s = 'running' OR r(3) = 0 THEN i END,
       s, CASE WHEN s = 'running' THEN gen_random_uuid() END, CASE WHEN s = 'running' THEN 'r%s' END, CASE WHEN s = 'running' OR r(2) = 0 THEN now() END,
       CASE WHEN s = 'failed' THEN now() END, CASE WHEN r(2) = 0 THEN repeat(E'it broke %s\n\t', r(100)) END
  FROM generate_series(1, 6000) i
 CROSS JOIN LATERAL (SELECT CASE WHEN i % 300 = 0 THEN 'running' WHEN i % 50 = 0 THEN 'failed' ELSE 'pending' END AS s) statuses
    ON CONFLICT DO NOTHING`))
		}
		if err == nil {
			_, err = tx.Exec(t.Context(), random(`
INSERT INTO onejob.attempts (task_id, fence, attempt, lock_key, replica, session, started_at, finished_at, outcome, error)
SELECT id, coalesce(fence, r(1000000)), r(9), id::text, 'r%s', gen_random_uuid(), now(), now(),
       (ARRAY['succeeded', 'failed', 'timeout', 'lease_lost', 'crashed', 'cancelled', 'shutdown', 'refused'])[1 + r(8)], CASE WHEN r(2) = 0 THEN 'it broke' END
  FROM onejob.tasks WHERE r(2) = 0`))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	b.sql(`VACUUM ANALYZE onejob.tasks`)
	b.serves("one", "{default,mail}", "{noop,exec,sql}", `{"exec": {"command": ["backup"]}}`, 1, 5)
	b.serves("two", "{}", "{noop,http}", "", 5, 5)
	b.serves("odd", "{}", "{}", `[1, "a"]`, 0, 0)
	b.serves("odder", "{}", "{noop,exec}", `{"exec": {}, "noop": "x", "sql": {"statement": 7, "b": []}}`, 0, 0)
	const moment = `\d{4,5}-\d\d-\d\d \d\d:\d\d:\d\d UTC \((in )?\d+ (s|min|h|days)( ago)?\)`
	began := time.Now()
	counted := 0
	for _, row := range b.sql(`SELECT id || ' ' || status || ' ' || onejob.why(id) FROM (SELECT * FROM onejob.tasks ORDER BY random() LIMIT 300) chosen`) {
		counted++
		id, rest, _ := strings.Cut(row, " ")
		status, why, _ := strings.Cut(rest, " ")
		says := map[string]string{"pending": `(waits|has waited|is (not )?due|is parked|was claimed)`, "running": `has run since ` + moment, "failed": `failed at ` + moment}[status]
		if !regexp.MustCompile(`^Task `+id+` `+says+`[^\n\t]*\.$`).MatchString(why) || strings.Contains(why, "unknown") {
			t.Errorf("of a task that is %s: %q", status, why)
		}
		if regexp.MustCompile(`(has waited|is due|has run) since \S+ \S+ UTC \(in `).MatchString(why) {
			t.Errorf("since a moment in the future: %q", why)
		}
	}
	equal(t, "the number of answers", counted, 300)
	t.Logf("%v for each", time.Since(began)/300)

	// Only odder has these commands: one has others, and two and odd have none.
	some := 0
	for _, why := range b.sql(`
SELECT onejob.why(id) FROM onejob.tasks t
 WHERE kind = 'exec' AND status = 'pending' AND queue IN ('default', 'mail') AND run_at < 'infinity' AND payload ->> 'command' IN ('%s', '7')
   AND fence IS NOT NULL AND started_at IS NULL AND NOT EXISTS (SELECT FROM onejob.attempts WHERE task_id = t.id AND outcome <> 'refused')`) {
		if strings.Contains(why, "waits for its lock key") {
			continue
		}
		some++
		if !strings.Contains(why, `because 3 of 4 live replicas that serve its queue do not have its command, "`) || strings.Contains(why, "Consul") {
			t.Errorf("of a task that was given back: %q", why)
		}
	}
	t.Logf("%d rows were given back by replicas without their command", some)
}
