package worker_test

import (
	"testing"
	"time"

	"onejob/internal/servers"
	"onejob/internal/testenv"
	"onejob/tasks"
	"onejob/worker"
)

// Postgres' clock is an hour ahead for a while, and is set back. What was enqueued
// meanwhile runs at once, and no due time is left without a task or a reason.
func TestPostgresClockIsSet(t *testing.T) {
	t.Parallel()
	server, db := testenv.OwnPostgresWith(t, servers.PostgresConfig{Clock: true})
	c := clusterOn(t, db, testenv.Consul(t))
	c.exec(t, `INSERT INTO onejob.schedules (name, cron, kind, on_missed) VALUES ('often', '* * * * * *', 'noop', 'all'), ('rarely', '*/20 * * * *', 'noop', 'one')`)
	r := c.replica(t, "a", tasks.Kinds{"noop": tasks.Noop{}}, nil)
	made := func() int {
		return get[int](t, c, "SELECT count(*) FROM onejob.occurrences o JOIN onejob.schedules s ON s.id = o.schedule_id WHERE s.name = 'often' AND o.due_at <= clock_timestamp()")
	}
	set := func(ahead time.Duration, noticed int) {
		t.Helper()
		if err := server.SetClock(ahead); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, maxWait, "the step is noticed", func() bool { return r.events.FilterMessage("postgres_clock_set").Len() >= noticed })
	}
	// Seconds go by meanwhile: a step is noticed only after the clock was looked at before.
	testenv.Eventually(t, maxWait, "due times are made", func() bool { return made() > 5 })

	set(time.Hour, 1)
	if by := r.events.FilterMessage("postgres_clock_set").All()[0].ContextMap()["by"].(time.Duration); by < 50*time.Minute || by > 70*time.Minute {
		t.Errorf("the clock was set by %v, it says", by)
	}
	c.exec(t, "INSERT INTO onejob.tasks (kind, limit_name, lock_key) SELECT 'other', CASE WHEN i % 2 = 0 THEN 'l' END, CASE WHEN i % 3 = 0 THEN 'k' END FROM generate_series(1, 30) i")
	parked := c.insert(t, "kind, run_at", "other", time.Now().Add(48*time.Hour))
	testenv.Eventually(t, maxWait, "a time of the hour has been made", func() bool {
		return get[bool](t, c, "SELECT bool_and(last_at > now() - interval '25 min') FROM onejob.schedules")
	})

	set(0, 2)
	r.logged(t, "clock_set_back_repaired")
	back := get[time.Time](t, c, "SELECT clock_timestamp()")
	c.limited(t, "b", tasks.Kinds{"other": tasks.Noop{}}, func(w *worker.Config) { w.LimitSlots = map[string]int{"l": 3} })
	c.exec(t, "INSERT INTO onejob.tasks (kind) VALUES ('other')")
	testenv.Eventually(t, maxWait, "what was enqueued has run", func() bool {
		return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE kind = 'other' AND status = 'succeeded'") == 31
	})
	if got := get[string](t, c, "SELECT status FROM onejob.tasks WHERE id = $1", parked); got != "pending" {
		t.Errorf("the task of the day after tomorrow is %s", got)
	}
	testenv.Eventually(t, maxWait, "due times come as before", func() bool {
		return get[bool](t, c, "SELECT count(*) > 5 FROM onejob.occurrences o JOIN onejob.schedules s ON s.id = o.schedule_id WHERE s.name = 'often' AND due_at BETWEEN $1 AND clock_timestamp()", back)
	})
	c.wantNone(t, "due times have neither task nor reason", `
SELECT count(*)
  FROM generate_series(date_trunc('second', $1::timestamptz) + interval '1 s', (SELECT max(due_at) FROM onejob.occurrences WHERE due_at <= clock_timestamp()), interval '1 s') AS due
 WHERE NOT EXISTS (SELECT FROM onejob.occurrences o JOIN onejob.schedules s ON s.id = o.schedule_id WHERE s.name = 'often' AND o.due_at = due)`, back)
	if next := get[time.Duration](t, c, "SELECT next_at - clock_timestamp() FROM onejob.schedules WHERE name = 'rarely'"); next > 20*time.Minute {
		t.Errorf("the other schedule comes due in %v", next)
	}
	c.noOverlaps(t)
}

// Postgres is started anew, with a clock that is no longer an hour ahead: no step is seen, as it is not
// the same process.
func TestPostgresIsStartedWithItsClockSetBack(t *testing.T) {
	t.Parallel()
	server, db := testenv.OwnPostgresWith(t, servers.PostgresConfig{Clock: true})
	if err := server.SetClock(time.Hour); err != nil {
		t.Fatal(err)
	}
	c := clusterOn(t, db, testenv.Consul(t))
	c.exec(t, `INSERT INTO onejob.schedules (name, cron, kind) VALUES ('often', '* * * * * *', 'noop')`)
	r := c.replica(t, "a", tasks.Kinds{"noop": tasks.Noop{}}, nil)
	testenv.Eventually(t, maxWait, "due times are made", func() bool {
		return get[int](t, c, "SELECT count(*) FROM onejob.occurrences") > 3
	})
	id := c.insert(t, "kind", "other")
	if err := server.Stop(servers.Fast); err != nil {
		t.Fatal(err)
	}
	if err := server.SetClock(0); err != nil {
		t.Fatal(err)
	}
	if err := server.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.pool.Reset()
	r.logged(t, "clock_set_back_repaired")
	c.limited(t, "b", tasks.Kinds{"other": tasks.Noop{}}, nil)
	c.await(t, id, "succeeded")
	testenv.Eventually(t, maxWait, "due times come again", func() bool {
		return get[int](t, c, "SELECT count(*) FROM onejob.occurrences WHERE due_at <= clock_timestamp()") > 3
	})
}
