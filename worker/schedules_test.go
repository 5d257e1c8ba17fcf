package worker_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"
	"github.com/jackc/pgx/v5"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"onejob/internal/testenv"
	"onejob/store"
	"onejob/worker"
)

// schedule adds a schedule by a plain INSERT and returns its id.
func (c *cluster) schedule(t *testing.T, columns string, values ...any) int64 {
	t.Helper()
	marks := ""
	for i := range values {
		marks += fmt.Sprintf(", $%d", i+1)
	}
	return get[int64](t, c, fmt.Sprintf("INSERT INTO onejob.schedules (%s) VALUES (%s) RETURNING id", columns, marks[2:]), values...)
}

// A due time that was worked out by older rules of the zone comes as the rules of now say, also if that is
// earlier: nobody was away, so it is not missed.
func TestADueTimeThatHasBecomeEarlier(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	due := time.Now().Add(20 * time.Second).Truncate(time.Second)
	berlin, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		t.Fatal(err)
	}
	at := due.In(berlin)
	id := c.schedule(t, "name, cron, time_zone, kind, on_missed", "s", fmt.Sprintf("%d %d %d * * *", at.Second(), at.Minute(), at.Hour()), "Europe/Berlin", "noop", "skip")
	c.exec(t, `UPDATE onejob.schedules SET next_at = $1, changed_at = now() - interval '1 day' WHERE id = $2`, due.Add(time.Hour), id)
	r := c.replica(t, "a", kinds(nil), nil)
	r.logged(t, "schedule_zone_changed")
	testenv.Eventually(t, maxWait, "the due time comes", func() bool {
		return get[bool](t, c, "SELECT EXISTS (SELECT FROM onejob.occurrences WHERE schedule_id = $1 AND due_at = $2)", id, due)
	})
	if late := get[bool](t, c, "SELECT bool_or(skipped IS NOT NULL) FROM onejob.occurrences WHERE schedule_id = $1", id); late && time.Since(due) < time.Minute {
		t.Error("it counts as missed")
	}
}

func TestSchedules(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	began := make(chan string, 1000)
	r := c.replica(t, "a", kinds(began), nil)
	r.logged(t, "leadership_acquired")

	t.Run("EverySecond", func(t *testing.T) {
		id := c.schedule(t, "name, cron, kind, payload, queue, priority, max_attempts", "tick", "* * * * * *", "greet", `{"Name": "you"}`, "q", 7, 2)
		testenv.Eventually(t, maxWait, "three tasks are done", func() bool {
			return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE schedule_id = $1 AND status = 'succeeded'", id) >= 3
		})
		c.exec(t, "UPDATE onejob.schedules SET enabled = false WHERE id = $1", id)
		testenv.Eventually(t, maxWait, "what was due before is made", func() bool {
			return get[bool](t, c, "SELECT NOT EXISTS (SELECT FROM onejob.former_schedules)")
		})
		if n := get[int](t, c, `SELECT count(*) FROM onejob.tasks t JOIN onejob.occurrences o ON o.task_id = t.id AND o.due_at = t.run_at
                                 WHERE t.schedule_id = $1 AND t.queue = 'q' AND t.priority = 7 AND t.max_attempts = 2`, id); n < 3 {
			t.Errorf("%d tasks are as the schedule says", n)
		}
		if n := get[int](t, c, `SELECT count(*) FROM (SELECT due_at - lag(due_at) OVER (ORDER BY due_at) AS gap FROM onejob.occurrences WHERE schedule_id = $1) g
                                 WHERE gap <> interval '1 second'`, id); n != 0 {
			t.Errorf("%d due times are missing", n)
		}
		last := get[time.Time](t, c, "SELECT max(due_at) FROM onejob.occurrences WHERE schedule_id = $1", id)
		now := get[time.Time](t, c, "UPDATE onejob.schedules SET enabled = true, cron = '*/2 * * * * *' WHERE id = $1 RETURNING changed_at", id)
		testenv.Eventually(t, maxWait, "it goes on", func() bool {
			return get[bool](t, c, "SELECT EXISTS (SELECT FROM onejob.occurrences WHERE schedule_id = $1 AND due_at > $2)", id, now)
		})
		if n := get[int](t, c, "SELECT count(*) FROM onejob.occurrences WHERE schedule_id = $1 AND due_at > $2 AND due_at <= $3", id, last, now); n != 0 {
			t.Errorf("%d due times of the past were made after the change", n)
		}
		c.exec(t, "DELETE FROM onejob.schedules WHERE id = $1", id)
	})

	t.Run("TasksThatPostgresRefuses", func(t *testing.T) {
		c.exec(t, `CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not these'; END $$`)
		c.exec(t, `CREATE TRIGGER refuse BEFORE INSERT ON onejob.tasks FOR EACH ROW WHEN (NEW.payload = '"refused"') EXECUTE FUNCTION public.refuse()`)
		bad := c.schedule(t, "name, cron, kind, payload", "refused", "* * * * * *", "noop", `"refused"`)
		good := c.schedule(t, "name, cron, kind", "beside it", "* * * * * *", "noop")
		testenv.Eventually(t, maxWait, "the schedule says why", func() bool {
			return get[bool](t, c, "SELECT coalesce(error LIKE '%not these%', false) FROM onejob.schedules WHERE id = $1", bad)
		})
		testenv.Eventually(t, maxWait, "the other goes on", func() bool {
			return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE schedule_id = $1 AND status = 'succeeded'", good) >= 2
		})
		if n := r.events.FilterMessage("schedule_invalid").Len(); n != 1 {
			t.Errorf("schedule_invalid was logged %d times, want once", n)
		}
		c.exec(t, `UPDATE onejob.schedules SET payload = '"repaired"' WHERE id = $1`, bad)
		testenv.Eventually(t, maxWait, "the repaired one creates tasks and has no error", func() bool {
			return get[bool](t, c, "SELECT error IS NULL AND EXISTS (SELECT FROM onejob.tasks t WHERE t.schedule_id = s.id) FROM onejob.schedules s WHERE id = $1", bad)
		})
		c.exec(t, "DELETE FROM onejob.schedules WHERE id IN ($1, $2)", bad, good)
	})

	t.Run("Missed", func(t *testing.T) {
		// The last due time was handled two hours ago, and then nobody lived.
		behind := func(name, missed string, limit int) int64 {
			id := c.schedule(t, "name, cron, kind, on_missed, missed_cap", name, "*/10 * * * *", "noop", missed, limit)
			c.exec(t, "UPDATE onejob.schedules SET next_at = date_trunc('hour', now()) - interval '2 hours' WHERE id = $1", id)
			return id
		}
		skip, one, all, capped := behind("skip", "skip", 100), behind("one", "one", 100), behind("all", "all", 100), behind("capped", "all", 5)
		for _, id := range []int64{skip, one, all, capped} {
			testenv.Eventually(t, maxWait, "it has caught up", func() bool {
				return get[bool](t, c, "SELECT next_at > now() FROM onejob.schedules WHERE id = $1", id)
			})
		}
		count := func(id int64, what string) int {
			return get[int](t, c, "SELECT count(*) FROM onejob.occurrences WHERE schedule_id = $1 AND "+what, id)
		}
		for _, id := range []int64{skip, one, all, capped} {
			if n := count(id, "true"); n < 12 || n > 19 {
				t.Errorf("schedule %d has %d occurrences, want those of 2 to 3 hours", id, n)
			}
			if n, tasks := count(id, "task_id IS NOT NULL"), get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE schedule_id = $1", id); n != tasks {
				t.Errorf("schedule %d has %d occurrences with a task, and %d tasks", id, n, tasks)
			}
		}
		// The last one may have come due less than a minute ago: that is in time.
		if n := count(skip, "task_id IS NOT NULL"); n > 1 {
			t.Errorf("skip made %d tasks", n)
		}
		if n := count(one, "task_id IS NOT NULL"); n != 1 {
			t.Errorf("one made %d tasks", n)
		}
		if n := count(all, "skipped IS NOT NULL"); n != 0 {
			t.Errorf("all skipped %d", n)
		}
		if n := count(capped, "task_id IS NOT NULL"); n < 5 || n > 6 {
			t.Errorf("all with a cap of 5 made %d tasks", n)
		}
		if n := get[int](t, c, "SELECT count(*) FROM (SELECT due_at FROM onejob.occurrences WHERE schedule_id = $1 ORDER BY due_at LIMIT 5) o NATURAL JOIN onejob.occurrences x WHERE x.schedule_id = $1 AND task_id IS NOT NULL", capped); n != 5 {
			t.Errorf("only %d of the oldest five were made", n)
		}
	})

	t.Run("MissedForYears", func(t *testing.T) {
		// As a clock that was years behind left it.
		behind := c.schedule(t, "name, cron, kind, on_missed", "behind", "* * * * * *", "noop", "one")
		c.exec(t, "UPDATE onejob.schedules SET last_at = NULL, changed_at = '1990-01-01Z', next_at = '1990-01-01 00:00:01Z' WHERE id = $1", behind)
		// 100,000 due times are recorded before that.
		testenv.Eventually(t, 5*maxWait, "it passes over", func() bool { return r.events.FilterMessage("schedule_passed_over").Len() > 0 })
		log := r.logged(t, "schedule_passed_over")
		from, to := time.Unix(631152001+100_000, 0), log["to"].(time.Time)
		if log["schedule"] != "behind" || !log["from"].(time.Time).Equal(from) || time.Since(to) > 5*maxWait {
			t.Errorf("the log says %v", log)
		}
		testenv.Eventually(t, maxWait, "it has caught up", func() bool {
			return get[bool](t, c, "SELECT next_at > now() - interval '5 s' AND EXISTS (SELECT FROM onejob.tasks WHERE schedule_id = s.id) FROM onejob.schedules s WHERE id = $1", behind)
		})
		if n := get[int](t, c, "SELECT count(*) FROM onejob.occurrences WHERE schedule_id = $1 AND due_at < $2", behind, to); n != 100_000 {
			t.Errorf("%d due times are recorded before %v", n, to)
		}
		c.exec(t, "DELETE FROM onejob.schedules WHERE id = $1", behind)

		// As a person left it: this is before all that the schedule has had.
		by := c.schedule(t, "name, cron, kind, on_missed", "by hand", "* * * * * *", "noop", "all")
		c.exec(t, "UPDATE onejob.schedules SET next_at = '1990-01-01' WHERE id = $1", by)
		testenv.Eventually(t, maxWait, "it goes on", func() bool {
			return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE schedule_id = $1", by) >= 2
		})
		if n := get[int](t, c, "SELECT count(*) FROM onejob.occurrences o JOIN onejob.schedules s ON s.id = o.schedule_id WHERE s.id = $1 AND due_at <= created_at", by); n != 0 {
			t.Errorf("%d due times are from before the schedule", n)
		}
		c.exec(t, "DELETE FROM onejob.schedules WHERE id = $1", by)
		if n := r.events.FilterMessage("schedule_passed_over").Len(); n != 1 {
			t.Errorf("schedule_passed_over was logged %d times", n)
		}
	})

	t.Run("Overlap", func(t *testing.T) {
		skip := c.schedule(t, "name, cron, kind, on_overlap", "o-skip", "* * * * * *", "wait", "skip")
		queue := c.schedule(t, "name, cron, kind, on_overlap", "o-queue", "* * * * * *", "wait", "queue")
		allow := c.schedule(t, "name, cron, kind, on_overlap", "o-allow", "* * * * * *", "wait", "allow")
		testenv.Eventually(t, maxWait, "several due times each", func() bool {
			return get[int](t, c, "SELECT count(*) FROM onejob.occurrences WHERE schedule_id = $1", skip) >= 4 &&
				get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE schedule_id = $1", queue) >= 3 &&
				get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE schedule_id = $1 AND status = 'running'", allow) >= 2 &&
				get[int](t, c, "SELECT count(*) FROM onejob.occurrences WHERE schedule_id = $1 AND skipped = 'overlap'", skip) >= 1
		})
		c.exec(t, "UPDATE onejob.schedules SET enabled = false WHERE name LIKE 'o-%'")
		if n := get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE schedule_id = $1", skip); n != 1 {
			t.Errorf("skip made %d tasks while one runs", n)
		}
		// A leader that was late may have missed a due time.
		if n := get[int](t, c, "SELECT count(*) FROM onejob.occurrences WHERE schedule_id = $1 AND skipped NOT IN ('overlap', 'missed')", skip); n != 0 {
			t.Errorf("%d were skipped for another reason", n)
		}
		if n := get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE schedule_id = $1 AND status = 'running'", queue); n > 1 {
			t.Errorf("%d queued tasks run at once", n)
		}
		c.exec(t, "UPDATE onejob.tasks SET cancel_requested = true WHERE kind = 'wait'")
	})

	t.Run("BadOnesDoNotStopTheOthers", func(t *testing.T) {
		// Postgres knows this zone and Go does not, as may be with a new one; this
		// line has the right form.
		c.exec(t, "ALTER TABLE onejob.schedules DISABLE TRIGGER check_schedule")
		zone := c.schedule(t, "name, cron, kind, time_zone", "bad zone", "* * * * * *", "noop", "UTC+3")
		c.exec(t, "ALTER TABLE onejob.schedules ENABLE TRIGGER check_schedule")
		line := c.schedule(t, "name, cron, kind", "bad line", "99 * * * *", "noop")
		never := c.schedule(t, "name, cron, kind", "never", "0 0 30 2 *", "noop")
		good := c.schedule(t, "name, cron, kind", "good", "* * * * * *", "noop")
		testenv.Eventually(t, maxWait, "the good one is made", func() bool {
			return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE schedule_id = $1", good) >= 2
		})
		if get[string](t, c, "SELECT coalesce(error, '') FROM onejob.schedules WHERE id = $1", line) == "" {
			t.Error("the bad line is not marked")
		}
		if !get[bool](t, c, "SELECT error IS NULL AND next_at IS NULL FROM onejob.schedules WHERE id = $1", zone) {
			t.Error("the schedule in an unknown zone was changed: another leader may know that zone")
		}
		if said := r.logged(t, "schedule_zone_unknown"); said["time_zone"] != "UTC+3" || said["schedule"] != "bad zone" {
			t.Errorf("schedule_zone_unknown says %v", said)
		}
		if n := r.events.FilterMessage("schedule_zone_unknown").Len(); n != 1 {
			t.Errorf("schedule_zone_unknown was logged %d times", n)
		}
		if !get[bool](t, c, "SELECT next_at = 'infinity' FROM onejob.schedules WHERE id = $1", never) {
			t.Error("30 February has a due time")
		}
		r.logged(t, "schedule_never_due")
		if n := r.events.FilterMessage("schedule_invalid").FilterField(zap.String("schedule", "bad line")).Len(); n != 1 {
			t.Errorf("schedule_invalid was logged %d times, want once", n)
		}
		c.exec(t, "UPDATE onejob.schedules SET cron = '* * * * * *' WHERE id = $1", line)
		testenv.Eventually(t, maxWait, "the mended one is made", func() bool {
			return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE schedule_id = $1", line) >= 1
		})
	})

	t.Run("NonsenseIsRefusedAtTheInsert", func(t *testing.T) {
		for _, bad := range []string{
			"('x', 'whenever', 'UTC', 'noop')", "('x', '* * *', 'UTC', 'noop')", "('x', '@reboot', 'UTC', 'noop')", "('x', '* * * * *', 'Europe/Nowhere', 'noop')",
			"('x', '* * * * *', 'CEST', 'noop')", "('x', '* * * * *', 'UTC+3', 'noop')",
			"('x', '* * * * *', 'UTC', '')", "('good', '* * * * *', 'UTC', 'noop')", "('x', 'CRON_TZ=UTC * * * * *', 'UTC', 'noop')",
		} {
			if _, err := c.pool.Exec(t.Context(), "INSERT INTO onejob.schedules (name, cron, time_zone, kind) VALUES "+bad); err == nil {
				t.Errorf("%s was accepted", bad)
			}
		}
	})
}

// A transaction that has locked the row of one schedule, and stays open for longer than a
// statement may take, delays no other schedule. When it ends, all is made that was due.
func TestLockedScheduleDelaysNoOther(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	locked := c.schedule(t, "name, cron, kind, on_missed, missed_cap", "locked", "* * * * * *", "noop", "all", 10000)
	invalid := c.schedule(t, "name, cron, kind", "invalid", "99 * * * *", "noop")
	other := c.schedule(t, "name, cron, kind", "other", "* * * * * *", "noop")
	made := func(id int64) int {
		return get[int](t, c, "SELECT count(*) FROM onejob.occurrences WHERE schedule_id = $1", id)
	}
	tx, err := c.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	if _, err := tx.Exec(t.Context(), "UPDATE onejob.schedules SET payload = '{}' WHERE id IN ($1, $2)", locked, invalid); err != nil {
		t.Fatal(err)
	}
	r := c.replica(t, "a", kinds(nil), nil)
	r.logged(t, "leadership_acquired")
	leads := time.Now()
	testenv.Eventually(t, maxWait, "the other goes on", func() bool { return time.Since(leads) > store.DefaultTimeout+2*time.Second && made(other) > 5 })
	if n := r.events.FilterMessage("schedules_failed").Len(); n != 0 {
		t.Error("the leader waited for the lock:", r.logged(t, "schedules_failed"))
	}
	if n := made(locked); n != 0 {
		t.Errorf("%d due times of the locked one were made", n)
	}
	if n := r.events.FilterMessage("schedule_invalid").Len(); n != 0 {
		t.Errorf("schedule_invalid was logged %d times before the row could be marked", n)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.logged(t, "schedule_invalid")
	testenv.Eventually(t, maxWait, "it has caught up", func() bool { return made(locked) > 5 })
	if n := get[int](t, c, `SELECT count(*) FROM (SELECT due_at - lag(due_at) OVER (ORDER BY due_at) AS gap FROM onejob.occurrences WHERE schedule_id = $1) g
                             WHERE gap <> interval '1 second'`, locked); n != 0 {
		t.Errorf("%d due times are missing", n)
	}
}

// holdQueue lets a transaction lock the row of the queue "held", to which tasks refer, so that none can
// be inserted there until it ends.
func holdQueue(t *testing.T, c *cluster) pgx.Tx {
	t.Helper()
	c.exec(t, "CREATE TABLE public.queues (name text PRIMARY KEY)")
	c.exec(t, "INSERT INTO public.queues VALUES ('default'), ('held')")
	c.exec(t, "ALTER TABLE onejob.tasks ADD FOREIGN KEY (queue) REFERENCES public.queues")
	tx, err := c.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	if _, err := tx.Exec(t.Context(), "SELECT FROM public.queues WHERE name = 'held' FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	return tx
}

// A table of the user's to which tasks refer has a row that another transaction has locked, for
// longer than a statement may take. That delays only the schedules whose tasks refer to it.
func TestTaskThatCannotBeInsertedDelaysNoOther(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	tx := holdQueue(t, c)
	held := c.schedule(t, "name, cron, kind, queue, on_missed, missed_cap", "held", "* * * * * *", "noop", "held", "all", 10000)
	other := c.schedule(t, "name, cron, kind", "other", "* * * * * *", "noop")
	r := c.replica(t, "a", kinds(nil), nil)
	r.logged(t, "schedules_failed")
	failed := get[time.Time](t, c, "SELECT clock_timestamp()")
	testenv.Eventually(t, maxWait, "the other goes on for longer than a statement may take", func() bool {
		return get[bool](t, c, "SELECT EXISTS (SELECT FROM onejob.occurrences WHERE schedule_id = $1 AND due_at > $2::timestamptz + $3::interval)", other, failed, store.DefaultTimeout+5*time.Second)
	})
	if late := get[time.Duration](t, c, "SELECT max(made_at - due_at) FROM onejob.occurrences WHERE schedule_id = $1 AND due_at > $2", other, failed); late > store.DefaultTimeout/2 {
		t.Errorf("a due time of the other was made %v late", late)
	}
	if n := get[int](t, c, "SELECT count(*) FROM onejob.occurrences WHERE schedule_id = $1", held); n != 0 {
		t.Errorf("%d due times of the held one were made", n)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, maxWait, "it has caught up", func() bool {
		return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE schedule_id = $1", held) > 5
	})
}

// Nor do many of them.
func TestManyTasksThatCannotBeInsertedDelayNoOther(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	tx := holdQueue(t, c)
	const many = 200
	c.exec(t, "INSERT INTO onejob.schedules (name, cron, kind, queue) SELECT 'held ' || i, '* * * * * *', 'noop', 'held' FROM generate_series(1, $1) i", many)
	r := c.replica(t, "a", kinds(nil), nil)
	r.logged(t, "schedules_failed")
	other := c.schedule(t, "name, cron, kind", "other", "* * * * * *", "noop")
	testenv.Eventually(t, maxWait, "the other goes on for longer than it took to try all", func() bool {
		return get[int](t, c, "SELECT count(*) FROM onejob.occurrences WHERE schedule_id = $1", other) > 30
	})
	// All of them waited half a second each, one after the other, so that it took 100 s until the
	// other had its turn.
	if late := get[time.Duration](t, c, "SELECT max(made_at - due_at) FROM onejob.occurrences WHERE schedule_id = $1", other); late > many*500*time.Millisecond/4 {
		t.Errorf("a due time of the other was made %v late", late)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, maxWait, "all have had their turn", func() bool {
		return get[int](t, c, "SELECT count(DISTINCT schedule_id) FROM onejob.tasks WHERE schedule_id <> $1", other) == many
	})
}

// A schedule is edited at random moments. Each second from the first edit to the end
// belongs to the line that was there then, by Postgres' clock, and has a task or a
// reason if that line names it, and neither if it does not.
func TestEditsLoseNoDueTime(t *testing.T) {
	t.Parallel()
	type line struct {
		cron    string
		enabled bool
		names   func(second int) bool
		pause   string // an expression for its end
	}
	every := func(int) bool { return true }
	const none = "NULL"
	same := []line{{"* * * * * *", true, every, none}, {"*/1 * * * * *", true, every, none}, {"0-29,30-59 * * * * *", true, every, none}}
	others := append(same[:2:2], line{"*/2 * * * * *", true, func(s int) bool { return s%2 == 0 }, none}, line{"1-59/3 * * * * *", true, func(s int) bool { return s%3 == 1 }, none},
		line{"* * * * * *", false, func(int) bool { return false }, none})
	paused := append(others[1:3:3], line{"* * * * * *", true, every, "'infinity'"}, line{"* * * * * *", true, every, "date_trunc('second', clock_timestamp()) + interval '1 second'"},
		line{"*/2 * * * * *", true, func(s int) bool { return s%2 == 0 }, "clock_timestamp() + interval '20 ms'"}, line{"* * * * * *", true, every, "'-infinity'"})
	const edits = 200
	for _, test := range []struct {
		name   string
		lines  []line
		before bool // replicas are there from the beginning
		lose   bool // the leader's session is destroyed now and then
	}{
		{"WithALeader", same, true, false},
		{"WithALeaderThatComesAndGoes", same, true, true},
		{"WithoutAnyReplica", same, false, false},
		{"OtherDueTimesAndDisabled", others, true, true},
		{"Paused", paused, true, true},
		{"PausedWithoutAnyReplica", paused, false, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			start := func() {
				for _, name := range []string{"a", "b"} {
					c.replica(t, name, kinds(nil), nil)
				}
			}
			if test.before {
				start()
			}
			id := c.schedule(t, "name, cron, kind, on_missed, missed_cap", "edited", "59 59 23 31 12 *", "noop", "all", 10000)
			type edit struct {
				at  time.Time
				end time.Time // of the pause
				line
			}
			var made []edit
			for i := range edits {
				if i > 0 {
					time.Sleep(rand.N(100 * time.Millisecond))
				}
				l := test.lines[i%len(test.lines)]
				if i > 3 {
					l = test.lines[rand.IntN(len(test.lines))]
				}
				var at, end time.Time
				if err := c.pool.QueryRow(t.Context(), `UPDATE onejob.schedules SET cron = $2, enabled = $3, paused_until = `+l.pause+` WHERE id = $1
				                                        RETURNING changed_at, least(greatest(coalesce(paused_until, '2000-01-01'), '2000-01-01'), '3000-01-01')`, id, l.cron, l.enabled).Scan(&at, &end); err != nil {
					t.Fatal(err)
				}
				made = append(made, edit{at, end, l})
				if test.lose && i%50 == 25 {
					if pair, _, err := c.kv.Client.KV().Get(c.kv.Prefix+"/leader", nil); err == nil && pair != nil && pair.Session != "" {
						if _, err := c.kv.Client.Session().Destroy(pair.Session, nil); err != nil {
							t.Fatal(err)
						}
					}
				}
			}
			c.exec(t, "UPDATE onejob.schedules SET payload = '{}' WHERE id = $1", id)
			time.Sleep(time.Second) // something comes due after the last edit, too
			first, last := made[0].at, get[time.Time](t, c, "SELECT clock_timestamp()")
			if !test.before {
				start()
			}
			testenv.Eventually(t, maxWait, "all is made that was due", func() bool {
				return get[bool](t, c, "SELECT (coalesce(next_at > $2, false) OR NOT enabled OR coalesce(paused_until = 'infinity', false)) AND NOT EXISTS (SELECT FROM onejob.former_schedules) FROM onejob.schedules WHERE id = $1", id, last)
			})
			var want []string
			for at := first.Truncate(time.Second).Add(time.Second); !at.After(last); at = at.Add(time.Second) {
				now := made[0]
				for _, e := range made {
					if e.at.Before(at) {
						now = e
					}
				}
				if now.enabled && now.names(at.Second()) && !at.Before(now.end) {
					want = append(want, at.UTC().Format(time.TimeOnly))
				}
			}
			rows, err := c.pool.Query(t.Context(), "SELECT to_char(due_at AT TIME ZONE 'UTC', 'HH24:MI:SS') FROM onejob.occurrences WHERE schedule_id = $1 AND due_at > $2 AND due_at <= $3 ORDER BY due_at", id, first, last)
			if err != nil {
				t.Fatal(err)
			}
			got, err := pgx.CollectRows(rows, pgx.RowTo[string])
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(got, want) {
				t.Errorf("of the due times from %v to %v\nthere are %v\nwant      %v", first, last, got, want)
			}
			if len(want) == 0 {
				t.Error("nothing was due")
			}
			// A task that was claimed when its session ended is due again later.
			if n := get[int](t, c, `SELECT count(*) FROM onejob.tasks t FULL JOIN (SELECT * FROM onejob.occurrences WHERE task_id IS NOT NULL) o ON o.task_id = t.id AND o.due_at <= t.run_at
			                         WHERE t.id IS NULL OR o.task_id IS NULL`); n != 0 {
				t.Errorf("%d due times have no task, or tasks no due time", n)
			}
			t.Logf("%d due times in %v", len(want), last.Sub(first))
		})
	}
}

func TestRetention(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.exec(t, `INSERT INTO onejob.tasks (kind, status, finished_at, keep_for)
               SELECT 'noop', s, now() - age, keep
                 FROM (VALUES ('succeeded', interval '2 hours', NULL::interval), ('failed', interval '2 hours', NULL), ('failed', interval '5 hours', NULL),
                              ('cancelled', interval '5 hours', NULL), ('succeeded', interval '2 hours', interval '1 day'), ('succeeded', interval '10 min', interval '1 min')) AS v(s, age, keep),
                      generate_series(1, 700)`)
	c.exec(t, `INSERT INTO onejob.attempts (fence, task_id, attempt, lock_key, replica, session, started_at, finished_at, outcome)
               SELECT nextval('onejob.fences'), id, 1, id::text, 'a', gen_random_uuid(), finished_at, finished_at, 'succeeded' FROM onejob.tasks`)
	waiting := c.insert(t, "kind, run_at", "noop", time.Now().Add(-time.Hour*1000).Add(time.Hour*2000))
	r := c.replica(t, "a", kinds(nil), func(w *worker.Config) {
		w.KeepSucceeded, w.KeepFailed, w.RetentionEvery = time.Hour, 3*time.Hour, 100*time.Millisecond
	})
	testenv.Eventually(t, maxWait, "what is old is gone", func() bool {
		return get[int](t, c, "SELECT count(*) FROM onejob.tasks") == 2*700+1
	})
	if n := get[int](t, c, "SELECT count(*) FROM onejob.attempts"); n != 2*700 {
		t.Errorf("%d attempts are left, want those of the tasks that are", n)
	}
	if got := get[string](t, c, "SELECT string_agg(DISTINCT status || coalesce(' ' || keep_for, ''), ', ' ORDER BY status || coalesce(' ' || keep_for, '')) FROM onejob.tasks WHERE id <> $1", waiting); got != "failed, succeeded 1 day" {
		t.Errorf("left are: %s", got)
	}
	r.logged(t, "retention_deleted")
}

// Of many tasks that cannot be deleted some are named, and all counted.
func TestRetentionSaysWhatIsLeft(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.exec(t, `CREATE TABLE public.mine (task bigint REFERENCES onejob.tasks)`)
	c.exec(t, `INSERT INTO onejob.tasks (kind, status, finished_at) SELECT 'noop', 'failed', now() - interval '2 hours' FROM generate_series(1, 30)`)
	c.exec(t, `INSERT INTO public.mine SELECT id FROM onejob.tasks ORDER BY id LIMIT 25`)
	r := c.replica(t, "a", kinds(nil), func(w *worker.Config) { w.KeepFailed, w.RetentionEvery = time.Hour, time.Hour })
	if said := r.logged(t, "retention_refused"); said["what"] != "failed" || fmt.Sprint(said["rows"]) != "25" {
		t.Errorf("retention_refused says %v", said)
	}
	if n := r.events.FilterMessage("row_refused").Len(); n != 10 {
		t.Errorf("%d rows were named, want 10", n)
	}
	if n := get[int](t, c, "SELECT count(*) FROM onejob.tasks"); n != 25 {
		t.Errorf("%d rows are left, want 25", n)
	}
}

// I8: a leader that is cut off from Postgres alone keeps its session, for it gives signs of life to Consul,
// but another one leads.
func TestLeaderWithoutPostgresResigns(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b, toPostgres, _ := c.behind(t)
	a := b.replica(t, "a", kinds(nil), nil)
	a.logged(t, "leadership_acquired")
	next := c.replica(t, "b", kinds(nil), nil)
	c.exec(t, "INSERT INTO onejob.schedules (name, cron, kind) VALUES ('s', '* * * * * *', 'noop')")
	toPostgres.Cut()
	next.logged(t, "leadership_acquired")
	if f := a.logged(t, "leadership_lost"); !strings.Contains(fmt.Sprint(f["error"]), "database") {
		t.Errorf("leadership_lost: %v", f)
	}
	if n := a.events.FilterMessage("session_lost").Len(); n > 0 {
		t.Error("it lost its session, so this test shows nothing")
	}
	made := func() int { return get[int](t, c, "SELECT count(*) FROM onejob.occurrences") }
	before := made()
	testenv.Eventually(t, maxWait, "due times are made again", func() bool { return made() > before })
	if err := next.stop(); err != nil {
		t.Error(err)
	}
	toPostgres.Heal()
	testenv.Eventually(t, maxWait, "the first one leads again", func() bool { return a.events.FilterMessage("leadership_acquired").Len() == 2 })
}

// I8: a transaction that keeps heartbeats off the list keeps nobody from leading, nor schedules from
// their tasks.
func TestSchedulesWithoutTheList(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	r := c.replica(t, "a", kinds(nil), nil)
	r.logged(t, "leadership_acquired")
	c.exec(t, "INSERT INTO onejob.schedules (name, cron, kind) VALUES ('s', '* * * * * *', 'noop')")
	tx, err := c.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := tx.Exec(t.Context(), "LOCK TABLE onejob.replicas IN SHARE MODE"); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, maxWait, "due times of 15 s are made", func() bool {
		return get[int](t, c, "SELECT count(*) FROM onejob.occurrences") >= 15
	})
	if n := r.events.FilterMessage("leadership_lost").Len(); n > 0 {
		t.Errorf("it lost the leadership %d times", n)
	}
}

// Five replicas, twenty schedules of every second, and the leader suffers: each
// due time has exactly one task or one recorded reason.
func TestNoDueTimeIsLostOrMadeTwice(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	const schedules = 20
	c.exec(t, `INSERT INTO onejob.schedules (name, cron, kind, on_missed)
               SELECT 'every second ' || i, '* * * * * *', 'noop', (ARRAY['skip', 'one', 'all'])[1 + i % 3] FROM generate_series(1, $1) i`, schedules)
	started := 0
	ways := map[string]*testenv.Proxy{} // each one's own way to Consul
	start := func() *process {
		started++
		name := fmt.Sprint("r", started)
		ways[name] = testenv.NewProxy(t, c.kv.Addr)
		return c.process(t, name, "", append([]string{"CONSUL_HTTP_ADDR=" + ways[name].Addr}, quickly...)...)
	}
	alive := map[string]*process{}
	for range 5 {
		p := start()
		alive[p.name] = p
	}
	leader := func() (p *process, pair *api.KVPair) {
		testenv.Eventually(t, maxWait, "somebody leads", func() bool {
			var err error
			pair, _, err = c.kv.Client.KV().Get(c.kv.Prefix+"/leader", nil)
			if err != nil || pair == nil || pair.Session == "" {
				return false
			}
			for name, candidate := range alive {
				if jsonField(pair.Value, "name") == name {
					p = candidate
				}
			}
			return p != nil
		})
		return p, pair
	}
	begun := get[time.Time](t, c, "SELECT clock_timestamp()")
	faults := []string{"kill", "freeze", "resign", "cut", "session", "key", "kill", "freeze", "cut", "session", "resign", "key"}
	rand.Shuffle(len(faults), func(i, j int) { faults[i], faults[j] = faults[j], faults[i] })
	for _, fault := range faults {
		p, led := leader()
		made := func() int { return get[int](t, c, "SELECT count(*) FROM onejob.occurrences") }
		switch fault {
		case "kill":
			p.signal(t, syscall.SIGKILL)
			delete(alive, p.name)
			q := start()
			alive[q.name] = q
		case "freeze":
			p.signal(t, syscall.SIGSTOP)
		case "resign":
			p.signal(t, syscall.SIGTERM)
			<-p.exited
			delete(alive, p.name)
			q := start()
			alive[q.name] = q
		case "cut":
			ways[p.name].Cut()
		case "session": // by an operator, as the next
			if _, err := c.kv.Client.Session().Destroy(led.Session, nil); err != nil {
				t.Fatal(err)
			}
		case "key":
			if _, err := c.kv.Client.KV().Delete(led.Key, nil); err != nil {
				t.Fatal(err)
			}
		}
		// Or the old one, which still has Postgres, could make what is waited for. Without the key
		// its session lives, and it may lead again.
		testenv.Eventually(t, maxWait, "somebody leads anew after "+fault, func() bool {
			pair, _, err := c.kv.Client.KV().Get(led.Key, nil)
			return err == nil && pair != nil && pair.Session != "" && (pair.Session != led.Session || fault == "key" && pair.CreateIndex != led.CreateIndex)
		})
		before := made()
		testenv.Eventually(t, maxWait, "due times are made again after "+fault, func() bool { return made() >= before+schedules })
		switch fault {
		case "freeze":
			p.signal(t, syscall.SIGCONT)
		case "cut":
			ways[p.name].Heal()
		}
	}
	testenv.Eventually(t, maxWait, "300 due times", func() bool { return get[int](t, c, "SELECT count(*) FROM onejob.occurrences") >= 300 })
	c.exec(t, "UPDATE onejob.schedules SET enabled = false")
	testenv.Eventually(t, maxWait, "what was due before that is made", func() bool {
		return get[bool](t, c, "SELECT NOT EXISTS (SELECT FROM onejob.former_schedules)")
	})
	c.awaitAll(t, maxWait)

	if n := get[int](t, c, `SELECT count(*) FROM (SELECT due_at - lag(due_at) OVER (PARTITION BY schedule_id ORDER BY due_at) AS gap FROM onejob.occurrences) g WHERE gap <> interval '1 second'`); n != 0 {
		t.Errorf("%d due times are missing", n)
	}
	// Equal run_at would be no sign of it: tasks that are requeued together share one.
	if n := get[int](t, c, "SELECT count(task_id) - count(DISTINCT task_id) FROM onejob.occurrences"); n != 0 {
		t.Errorf("%d due times share a task with another", n)
	}
	if n := get[int](t, c, `SELECT count(*) FROM onejob.occurrences o LEFT JOIN onejob.tasks t ON t.id = o.task_id AND t.status = 'succeeded'
                             WHERE (o.skipped IS NULL) = (t.id IS NULL)`); n != 0 {
		t.Errorf("%d due times have neither a task that succeeded nor a reason", n)
	}
	if n := get[int](t, c, "SELECT count(*) FROM onejob.tasks t WHERE schedule_id IS NOT NULL AND NOT EXISTS (SELECT FROM onejob.occurrences o WHERE o.task_id = t.id)"); n != 0 {
		t.Errorf("%d tasks belong to no due time: theirs were made twice", n)
	}
	t.Logf("%d due times in %.0f s, %d of them skipped for a reason, after %d faults", get[int](t, c, "SELECT count(*) FROM onejob.occurrences"),
		time.Since(begun).Seconds(), get[int](t, c, "SELECT count(*) FROM onejob.occurrences WHERE skipped IS NOT NULL"), len(faults))
}

// The leader names a transaction that stays open, once, and a second one as well.
func TestHeldSnapshotsAreLogged(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	open := func() (pid int) {
		tx, err := c.pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
		if _, err := tx.Exec(t.Context(), "SELECT count(*) FROM onejob.tasks"); err != nil {
			t.Fatal(err)
		}
		return int(tx.Conn().PgConn().PID())
	}
	pid := open()
	r := c.replica(t, "a", kinds(nil), func(w *worker.Config) { w.SnapshotAge = 50 * time.Millisecond })
	said := func(pid int) (n int) {
		for _, e := range r.events.FilterMessage("snapshot_held").All() {
			fields := e.ContextMap()
			if fields["pid"] == int64(pid) && fields["what"] == "transaction" && e.Level == zap.WarnLevel {
				n++
			}
		}
		return n
	}
	testenv.Eventually(t, maxWait, "the first is named", func() bool { return said(pid) > 0 })
	second := open()
	testenv.Eventually(t, maxWait, "the second is named", func() bool { return said(second) > 0 })
	if n := said(pid); n != 1 {
		t.Errorf("the first was named %d times", n)
	}
}

// The leader logs attempts that overlapped: each pair once, with what tells one attempt
// from the other.
func TestOverlapsAreLogged(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	overlap := func(key string, fence int, ago string) {
		t.Helper()
		c.exec(t, `
INSERT INTO onejob.attempts (fence, task_id, attempt, lock_key, replica, session, started_at, begun_at, stopped_at, stopped_fence, finished_at, outcome)
SELECT $2::int + i, $2::int + i, 1, $1, 'r' || i, gen_random_uuid(), at, at - interval '1 min' * (2 - i), at, CASE i WHEN 0 THEN $2::int + 1 END, at, 'refused'
  FROM generate_series(0, 1) i, (SELECT now() - $3::interval AS at) moment`, key, fence, ago)
	}
	overlap("k", 1000, "59 min")
	var counted atomic.Int64
	r := c.replica(t, "a", kinds(nil), func(w *worker.Config) {
		w.OverlapsEvery = 50 * time.Millisecond
		w.Measure = func(m worker.Measurement) {
			if m.What == worker.MeasureOverlap {
				counted.Add(int64(m.Count))
			}
		}
	})
	found := func() *observer.ObservedLogs { return r.events.FilterMessage("overlap_found") }
	testenv.Eventually(t, maxWait, "the overlap is found", func() bool { return found().Len() > 0 })
	if f := found().All()[0].ContextMap(); f["lock_key"] != "k" || f["fence"] != int64(1000) || f["by"] != "r0" || f["other_fence"] != int64(1001) || f["other_by"] != "r1" || f["total"] != int64(1) {
		t.Errorf("the fields are %v", f)
	}
	overlap("l", 2000, "1 day") // as a new leader finds them
	testenv.Eventually(t, maxWait, "the second is found", func() bool { return found().Len() > 1 })
	if n := found().Len(); n != 2 {
		t.Errorf("two overlaps were logged %d times", n)
	}
	if n := counted.Load(); n != 1 {
		t.Errorf("%d new overlaps were counted, want 1", n)
	}
}
