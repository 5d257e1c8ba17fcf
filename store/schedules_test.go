package store_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"onejob/internal/testenv"
	"onejob/store"
	"onejob/tasks"
	"onejob/tasks/schedule"
)

// schedule adds a schedule of every ten minutes with the columns given as
// "column = value, ..." whose next due time is at the time given.
func (b *bench) schedule(name string, next time.Time, columns ...string) {
	b.t.Helper()
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind) VALUES ($1, '*/10 * * * *', 'noop')`, name)
	b.sql(`UPDATE onejob.schedules SET `+strings.Join(append(columns, "next_at = $2"), ", ")+` WHERE name = $1`, name, next)
}

// due returns the schedule of that name among those that are due, and its plan.
func (b *bench) due(name string) (schedule.Due, schedule.Plan) {
	b.t.Helper()
	var now time.Time
	var list []schedule.Due
	b.eventually("Postgres answers", func() bool {
		var err error
		now, list, err = b.DueSchedules(b.t.Context(), nil)
		if err != nil && !late(err) {
			b.t.Fatal(err)
		}
		return err == nil
	})
	for _, d := range list {
		if d.Name == name {
			s, err := schedule.Parse(d.Cron, d.Zone)
			if err != nil {
				b.t.Fatal(err)
			}
			return d, d.Plan(s, now)
		}
	}
	b.t.Fatalf("schedule %s is not due", name)
	return schedule.Due{}, schedule.Plan{}
}

func (b *bench) make(d schedule.Due, p schedule.Plan) (current bool, made int) {
	b.t.Helper()
	current, made, err := b.MakeOccurrences(b.t.Context(), d, p)
	if err != nil {
		b.t.Error(err)
	}
	return current, made
}

// consistent fails the test unless each task of a schedule belongs to one due
// time, and each due time has its task or a reason.
func (b *bench) consistent() {
	b.t.Helper()
	equal(b.t, "the number of due times whose task is not there, or is another's", b.one(`
SELECT count(*)
  FROM (SELECT due_at, task_id, schedule_id FROM onejob.occurrences WHERE task_id IS NOT NULL) o
  FULL JOIN (SELECT * FROM onejob.tasks WHERE schedule_id IS NOT NULL) t ON t.id = o.task_id AND t.schedule_id = o.schedule_id AND t.run_at = o.due_at
 WHERE o.task_id IS NULL OR t.id IS NULL`), "0")
}

// hoursAgo is a full hour so many hours ago.
func hoursAgo(n int) time.Time {
	return time.Now().Truncate(time.Hour).Add(-time.Duration(n) * time.Hour)
}

func TestMakeOccurrences(t *testing.T) {
	t.Parallel()
	b := newBench(t)

	t.Run("TwoLeadersWithOnePlan", func(t *testing.T) {
		for i := range 20 {
			name := fmt.Sprint("both ", i)
			b.schedule(name, hoursAgo(2), "on_missed = 'all'")
			d, p := b.due(name)
			var wg sync.WaitGroup
			var current [2]bool
			var made [2]int
			for i := range 2 {
				wg.Go(func() { current[i], made[i] = b.make(d, p) })
			}
			wg.Wait()
			if current[0] == current[1] || made[0]+made[1] != len(p.Occurrences) {
				t.Errorf("they were told %v and made %v of %d", current, made, len(p.Occurrences))
			}
		}
		b.consistent()
	})

	t.Run("ChangedMeanwhile", func(t *testing.T) {
		for what, change := range map[string]string{
			"cron": "cron = '*/5 * * * *'", "zone": "time_zone = 'Asia/Tokyo'", "disabled": "enabled = false", "next": "next_at = next_at + interval '10 min'",
		} {
			b.schedule(what, hoursAgo(1))
			d, p := b.due(what)
			b.sql(`UPDATE onejob.schedules SET `+change+` WHERE name = $1`, what)
			before := b.one(`SELECT (next_at, last_at)::text FROM onejob.schedules WHERE name = $1`, what)
			current, made := b.make(d, p)
			equal(t, what+": current", current, false)
			equal(t, what+": tasks made", made, 0)
			equal(t, what+": the schedule", b.one(`SELECT (next_at, last_at)::text FROM onejob.schedules WHERE name = $1`, what), before)
			equal(t, what+": occurrences", b.one(`SELECT count(*) FROM onejob.occurrences WHERE schedule_id = $1`, d.ID), "0")
		}
	})

	t.Run("ADueTimeThatHasATask", func(t *testing.T) {
		b.schedule("again", hoursAgo(1), "on_missed = 'all'")
		d, p := b.due("again")
		_, made := b.make(d, p)
		equal(t, "tasks made", made, len(p.Occurrences))
		b.sql(`UPDATE onejob.schedules SET next_at = $2 WHERE id = $1`, d.ID, d.Next)
		current, made := b.make(d, p)
		equal(t, "current", current, true)
		equal(t, "tasks made again", made, 0)
		b.consistent()
	})

	t.Run("NothingIfATaskIsRefused", func(t *testing.T) {
		b.schedule("refused", hoursAgo(1))
		d, p := b.due("refused")
		b.sql(`ALTER TABLE onejob.tasks ADD CONSTRAINT no CHECK (schedule_id <> ` + fmt.Sprint(d.ID) + `)`)
		defer b.sql(`ALTER TABLE onejob.tasks DROP CONSTRAINT no`)
		if _, _, err := b.MakeOccurrences(t.Context(), d, p); err == nil {
			t.Error("it was made")
		}
		equal(t, "occurrences", b.one(`SELECT count(*) FROM onejob.occurrences WHERE schedule_id = $1`, d.ID), "0")
		equal(t, "next_at is as it was", b.one(`SELECT next_at = $2 FROM onejob.schedules WHERE id = $1`, d.ID, d.Next), "true")
	})

	t.Run("AnyNameCanQueue", func(t *testing.T) {
		b.schedule("two words/🕰", hoursAgo(1), "on_overlap = 'queue'", "on_missed = 'one'")
		d, p := b.due("two words/🕰")
		_, made := b.make(d, p)
		equal(t, "tasks made", made, 1)
		equal(t, "lock key", b.one(`SELECT lock_key FROM onejob.tasks WHERE schedule_id = $1`, d.ID), "schedule two words/🕰")
		_, err := b.try(`INSERT INTO onejob.schedules (name, cron, kind) VALUES (E'two\nlines', '@daily', 'noop')`)
		if err == nil || !strings.Contains(err.Error(), "name_has_no_control_characters") {
			t.Errorf("a name of two lines: %v", err)
		}
	})
}

func TestDueSchedules(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind, enabled)
           SELECT name, '* * * * *', 'noop', name <> 'disabled' FROM unnest(ARRAY['past', 'now', 'soon', 'never', 'always', 'unknown', 'disabled', 'marked']) AS name`) // 'marked' by another leader
	// By Postgres' clock alone: at the end of the transaction "now" is past and "soon" is not.
	b.sql(`UPDATE onejob.schedules s SET next_at = v.next_at, error = v.error
             FROM (VALUES ('past', now() - interval '1 h', NULL), ('now', now(), NULL), ('soon', now() + interval '1 min', NULL), ('never', 'infinity', NULL),
                          ('always', '-infinity', NULL), ('disabled', now(), NULL), ('marked', now(), 'wrong')) AS v(name, next_at, error)
            WHERE v.name = s.name`)
	now, list, err := b.DueSchedules(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	due := map[string]bool{}
	for _, d := range list {
		due[d.Name] = true
		equal(t, d.Name+": to be worked out", d.Next == nil, d.Name == "unknown" || d.Name == "always")
	}
	equal(t, "what is due", fmt.Sprint(due), "map[always:true marked:true now:true past:true unknown:true]")
	equal(t, "the clock is Postgres'", b.one(`SELECT now() - $1 BETWEEN interval '0' AND interval '1 min'`, now), "true")
	wait, err := b.UntilNextSchedule(t.Context(), time.Hour, nil)
	if err != nil || wait != 0 {
		t.Errorf("one that is overdue is %v away, %v", wait, err)
	}
	for _, name := range []string{"past", "now", "always", "unknown", "marked"} {
		if current, _ := b.make(b.due(name)); !current {
			t.Errorf("%s is not as it was", name)
		}
	}
	b.sql(`UPDATE onejob.schedules SET next_at = clock_timestamp() + interval '10 s' WHERE name = 'soon'`)
	if wait, err := b.UntilNextSchedule(t.Context(), time.Hour, nil); err != nil || wait > 10*time.Second {
		t.Errorf("the next one is %v away, %v", wait, err)
	}
}

// A schedule that is paused without an end is not due, whatever its next_at says. It must not
// keep the leader awake.
func TestPausedScheduleWithADueTime(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.schedule("paused", hoursAgo(1))
	b.sql(`UPDATE onejob.schedules SET paused_until = 'infinity'`)
	b.sql(`DELETE FROM onejob.former_schedules`)
	b.sql(`UPDATE onejob.schedules SET next_at = $1`, hoursAgo(1))
	equal(t, "it is due", b.isDue("paused"), false)
	if wait, err := b.UntilNextSchedule(t.Context(), time.Minute, nil); err != nil || wait != time.Minute {
		t.Errorf("the next one is %v away, %v", wait, err)
	}
}

// More schedules than are looked at together, which a transaction has locked, keep another one from
// nothing that comes due later.
func TestManyLockedSchedules(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.schedule("free", time.Now().Add(-time.Minute))
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind) SELECT 'locked ' || i, '* * * * *', 'noop' FROM generate_series(1, 1500) i`)
	b.sql(`UPDATE onejob.schedules SET next_at = now() - interval '1 hour' WHERE name <> 'free'`)
	_, end := openTransaction(t, b.dsn, `BEGIN`, `SELECT FROM onejob.schedules WHERE name <> 'free' FOR UPDATE`)
	defer end()
	for round := range 3 {
		_, list, err := b.DueSchedules(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range list {
			if d.Name == "free" {
				return
			}
			if current, _, err := b.MakeOccurrences(t.Context(), d, schedule.Plan{Next: time.Now()}); err != nil || current {
				t.Fatalf("round %d: the plan of %s is written: %v, %v", round, d.Name, current, err)
			}
		}
		store.NoMorePutOff(b.Store) // as on a slow machine
	}
	t.Error("the schedule that nobody has locked is not looked at")
}

// isDue reports whether DueSchedules returns the schedule of that name.
func (b *bench) isDue(name string) bool {
	b.t.Helper()
	_, list, err := b.DueSchedules(b.t.Context(), nil)
	if err != nil {
		b.t.Fatal(err)
	}
	return slices.ContainsFunc(list, func(d schedule.Due) bool { return d.Name == name })
}

// A schedule that has no next due time yet, as it is new or was edited, is looked at before those that are
// due, however many they are.
func TestNewScheduleBesideManyDueOnes(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind) SELECT i::text, '@daily', 'noop' FROM generate_series(1, 1000) i`)
	b.sql(`UPDATE onejob.schedules SET next_at = now() - interval '1 day'`)
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind) VALUES ('new', '@daily', 'noop')`)
	equal(t, "the new one is looked at", b.isDue("new"), true)
}

// What Postgres refuses for a while is made when it does not any more. Until then the
// schedule says why, and does not keep the leader from sleeping.
func TestRefusedSchedules(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	mark := func(d schedule.Due, message string) (news bool) {
		t.Helper()
		news, err := b.MarkSchedule(t.Context(), d, message)
		if err != nil {
			t.Error(err)
		}
		return news
	}
	says := func(name string) string {
		return b.one(`SELECT coalesce(error, '') FROM onejob.schedules WHERE name = $1`, name)
	}

	t.Run("ForAWhile", func(t *testing.T) {
		b.schedule("a", hoursAgo(2), "on_missed = 'all'")
		b.sql(`INSERT INTO onejob.tasks (id, kind, run_at) OVERRIDING SYSTEM VALUE SELECT i, 'noop', 'infinity' FROM generate_series(1, 9) i`) // as after a logical replication, which leaves sequences behind
		for i := range 2 {
			d, p := b.due("a")
			if _, _, err := b.MakeOccurrences(t.Context(), d, p); !errors.Is(err, tasks.ErrUnwritable) {
				t.Fatalf("a key that is there already: %v", err)
			}
			equal(t, fmt.Sprintf("mark %d is news", i+1), mark(d, "duplicate key"), i == 0)
			equal(t, "it is due just after", b.isDue("a"), false)
			if wait, err := b.UntilNextSchedule(t.Context(), time.Minute, nil); err != nil || wait != time.Minute {
				t.Errorf("the next one is %v away, %v", wait, err)
			}
			store.TryAgain(b.Store)
			equal(t, "it is due after a while", b.isDue("a"), true)
		}
		equal(t, "it says why", says("a"), "duplicate key")
		b.sql(`SELECT setval(pg_get_serial_sequence('onejob.tasks', 'id'), 9)`)
		d, p := b.due("a")
		_, made := b.make(d, p)
		equal(t, "tasks made", made, len(p.Occurrences))
		equal(t, "it says nothing any more", says("a"), "")
	})

	t.Run("WhateverATriggerRaises", func(t *testing.T) {
		for code, raise := range map[string]string{"MY001": `RAISE 'not now' USING ERRCODE = 'MY001'`, "42P01": `INSERT INTO public.no_such_table VALUES (1)`} {
			b.schedule(code, hoursAgo(1))
			d, p := b.due(code)
			b.sql(`CREATE OR REPLACE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN ` + raise + `; RETURN NEW; END $$`)
			b.sql(`CREATE TRIGGER refuse BEFORE INSERT ON onejob.tasks FOR EACH ROW EXECUTE FUNCTION public.refuse()`)
			if _, _, err := b.MakeOccurrences(t.Context(), d, p); !errors.Is(err, tasks.ErrUnwritable) {
				t.Errorf("%s: got %v", code, err)
			}
			b.sql(`DROP TRIGGER refuse ON onejob.tasks`)
		}
	})

	t.Run("NotIfNoScheduleHasTasks", func(t *testing.T) {
		b.schedule("as all", hoursAgo(1))
		d, p := b.due("as all")
		b.sql(`ALTER TABLE onejob.occurrences RENAME TO renamed`)
		defer b.sql(`ALTER TABLE onejob.renamed RENAME TO occurrences`)
		if _, _, err := b.MakeOccurrences(t.Context(), d, p); err == nil || errors.Is(err, tasks.ErrUnwritable) {
			t.Errorf("got %v, which is not this schedule's", err)
		}
	})

	// As a notification queue that is full does: it refuses whatever notifies.
	t.Run("NotForALimitOfTheServer", func(t *testing.T) {
		b.schedule("as any other", hoursAgo(1))
		d, p := b.due("as any other")
		b.sql(`CREATE FUNCTION public.full_queue() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'too many notifications in the NOTIFY queue' USING ERRCODE = 'program_limit_exceeded'; END $$`)
		b.sql(`CREATE TRIGGER full_queue AFTER INSERT ON onejob.tasks FOR EACH STATEMENT EXECUTE FUNCTION public.full_queue()`)
		defer b.sql(`DROP TRIGGER full_queue ON onejob.tasks`)
		if _, _, err := b.MakeOccurrences(t.Context(), d, p); err == nil || errors.Is(err, tasks.ErrUnwritable) {
			t.Errorf("got %v, which is not this schedule's", err)
		}
	})

	t.Run("UntilThereIsATask", func(t *testing.T) {
		b.schedule("skips", hoursAgo(3), "on_missed = 'skip'")
		d, _ := b.due("skips")
		mark(d, "refused")
		store.TryAgain(b.Store)
		d, p := b.due("skips") // all of them are missed, but for one of the last minute
		p.Occurrences = slices.DeleteFunc(p.Occurrences, func(o schedule.Occurrence) bool { return o.Skipped == schedule.NotSkipped })
		if _, made := b.make(d, p); made != 0 || len(p.Occurrences) == 0 {
			t.Fatalf("%d tasks were made of %v", made, p.Occurrences)
		}
		equal(t, "it says why", says("skips"), "refused")
	})

	t.Run("UntilTheRowIsRepaired", func(t *testing.T) {
		for _, repair := range []string{"payload = '[]'", "queue = 'other'", "error = NULL"} {
			b.schedule(repair, hoursAgo(1))
			d, _ := b.due(repair)
			mark(d, "refused")
			equal(t, repair+": it is due before", b.isDue(repair), false)
			b.sql(`UPDATE onejob.schedules SET `+repair+` WHERE name = $1`, repair)
			equal(t, repair+": it is due", b.isDue(repair), true)
		}
	})

	t.Run("EditedMeanwhile", func(t *testing.T) {
		b.schedule("edited", hoursAgo(1))
		d, _ := b.due("edited")
		b.sql(`UPDATE onejob.schedules SET enabled = false WHERE name = 'edited'`)
		b.sql(`UPDATE onejob.schedules SET enabled = true WHERE name = 'edited'`)
		equal(t, "it is news", mark(d, "wrong"), false)
		equal(t, "it says", says("edited"), "")
		store.TryAgain(b.Store)
		equal(t, "it is due after a while", b.isDue("edited"), true)
	})

	t.Run("OfADisabledOne", func(t *testing.T) {
		b.schedule("off", hoursAgo(1))
		b.sql(`UPDATE onejob.schedules SET enabled = false WHERE name = 'off'`)
		d, _ := b.due("off")
		equal(t, "it is news", mark(d, "refused"), true)
		store.TryAgain(b.Store)
		d, p := b.due("off")
		b.make(d, p)
		equal(t, "it says", says("off"), "")
	})
}

// A transaction that has locked the row of a schedule makes no statement about schedules
// wait.
func TestLockedSchedules(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.schedule("locked", hoursAgo(2), "on_missed = 'all'")
	d, p := b.due("locked")
	tx, err := b.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	if _, err := tx.Exec(t.Context(), `UPDATE onejob.schedules SET payload = '{}' WHERE name = 'locked'`); err != nil {
		t.Fatal(err)
	}
	current, made := b.make(d, p)
	equal(t, "current", current, false)
	equal(t, "tasks made", made, 0)
	store.PutOffForLonger(b.Store) // half a second may be over by now
	equal(t, "it is due just after", b.isDue("locked"), false)
	store.TryAgain(b.Store)
	equal(t, "it is due after a while", b.isDue("locked"), true)
	store.ForgetPutOff(b.Store)
	if news, err := b.MarkSchedule(t.Context(), d, "wrong"); err != nil || news {
		t.Errorf("a mark is %v, %v", news, err)
	}
	store.PutOffForLonger(b.Store)
	equal(t, "it is due just after a mark", b.isDue("locked"), false)
	if wait, err := b.UntilNextSchedule(t.Context(), time.Minute, nil); err != nil || wait != time.Minute {
		t.Errorf("the next one is %v away, %v", wait, err)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	store.TryAgain(b.Store)
	equal(t, "it is due after a while", b.isDue("locked"), true)
	current, made = b.make(d, p)
	equal(t, "current", current, true)
	equal(t, "tasks made", made, len(p.Occurrences))
	b.consistent()
}

// A task that Postgres cannot insert yet, because of a lock that another transaction has, does
// not use up the time for a statement, and is not tried again at once.
func TestTaskThatWaitsForALock(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`CREATE TABLE public.queues (name text PRIMARY KEY)`)
	b.sql(`INSERT INTO public.queues VALUES ('default'), ('held')`)
	b.sql(`ALTER TABLE onejob.tasks ADD FOREIGN KEY (queue) REFERENCES public.queues`)
	b.schedule("held", hoursAgo(1), "queue = 'held'")
	tx, err := b.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	if _, err := tx.Exec(t.Context(), `SELECT FROM public.queues WHERE name = 'held' FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		d, p := b.due("held")
		_, _, err := b.MakeOccurrences(t.Context(), d, p)
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.Code != "55P03" || errors.Is(err, tasks.ErrUnwritable) {
			t.Fatalf("got %v", err)
		}
		store.PutOffForLonger(b.Store) // half a second may be over by now
		equal(t, "it is due just after", b.isDue("held"), false)
		if wait, err := b.UntilNextSchedule(t.Context(), time.Minute, nil); err != nil || wait != time.Minute {
			t.Errorf("the next one is %v away, %v", wait, err)
		}
		store.TryAgain(b.Store)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	d, p := b.due("held")
	current, made := b.make(d, p)
	equal(t, "current", current, true)
	equal(t, "tasks were made", made > 0, true)
	b.consistent()
}

// A trigger of the user's that takes longer than a statement may is wrong with this schedule,
// unless Postgres does not answer in time anyway.
func TestTaskThatTakesTooLong(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.Store = open(t, store.Config{DSN: b.dsn, Timeout: 3 * time.Second})
	b.sql(`CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(60); RETURN NEW; END $$`)
	for _, of := range []string{"ROW", "STATEMENT"} { // also if there is no row
		b.sql(`CREATE TRIGGER slow BEFORE INSERT ON onejob.tasks FOR EACH ` + of + ` EXECUTE FUNCTION public.slow()`)
		b.schedule(of, hoursAgo(1), "on_missed = 'all'")
		for try := range 2 { // the due times may be too many; then it is one
			d, p := b.due(of)
			if _, _, err := b.MakeOccurrences(t.Context(), d, p); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, tasks.ErrUnwritable) != (of == "ROW" && try == 1) {
				t.Errorf("of each %s, %d due times: %v", of, len(p.Occurrences), err)
			}
			store.TryAgain(b.Store)
		}
		b.sql(`DROP TRIGGER slow ON onejob.tasks`)
	}
}

// Due times that take too long in one statement are made in several. They are the same as if one
// statement had made them all.
func TestMoreDueTimesThanFitIntoAStatement(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.Store = open(t, store.Config{DSN: b.dsn, Timeout: time.Second})
	b.sql(`CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.02); RETURN NEW; END $$`)
	b.sql(`CREATE TRIGGER slow BEFORE INSERT ON onejob.tasks FOR EACH ROW EXECUTE FUNCTION public.slow()`)
	first := time.Now().Truncate(time.Second).Add(-10 * time.Minute)
	b.schedule("often", first, "cron = '* * * * * *'", "on_missed = 'all'", "missed_cap = 100")
	b.sql(`UPDATE onejob.schedules SET changed_at = $1, next_at = $2`, first.Add(-time.Second), first)
	tooLong := 0
	for range testenv.Tries(3 * time.Minute) {
		now, list, err := b.DueSchedules(t.Context(), nil)
		if late(err) { // as it is on a busy machine
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if len(list) == 0 {
			t.Fatal("the schedule is put off for good")
		}
		d := list[0]
		s, err := schedule.Parse(d.Cron, d.Zone)
		if err != nil {
			t.Fatal(err)
		}
		p := d.Plan(s, now)
		_, _, err = b.MakeOccurrences(t.Context(), d, p)
		switch {
		case errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, tasks.ErrUnwritable):
			tooLong++
		case err != nil:
			t.Fatal(err)
		}
		store.TryAgain(b.Store)
		if err == nil && !p.More {
			break
		}
	}
	if tooLong == 0 {
		t.Error("no statement took too long")
	}
	b.consistent()
	equal(t, "due times without a row, or with two", b.one(`
SELECT count(*)
  FROM onejob.schedules, generate_series($1, last_at, '1 s') due
 WHERE (SELECT count(*) FROM onejob.occurrences WHERE due_at = due) <> 1`, first), "0")
	equal(t, "the end is reached", b.one(`SELECT last_at > now() - interval '1 min' AND next_at > last_at FROM onejob.schedules`), "true")
	equal(t, "tasks of those that were missed", b.one(`SELECT count(*) FROM onejob.occurrences WHERE task_id IS NOT NULL AND due_at < $1`, first.Add(9*time.Minute)), "100")
	equal(t, "the last of them", b.one(`SELECT max(due_at) FROM onejob.occurrences WHERE task_id IS NOT NULL AND due_at < $1`, first.Add(9*time.Minute)),
		b.one(`SELECT $1::timestamptz`, first.Add(99*time.Second)))
}

// Schedules in a zone that the leader does not know are left out, and do not keep it
// from sleeping.
func TestDueSchedulesOfUnknownZones(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind, time_zone) VALUES ('here', '@daily', 'noop', 'Europe/Berlin'), ('there', '@daily', 'noop', 'Asia/Tokyo')`)
	names := func(unknown []string) string {
		_, list, err := b.DueSchedules(t.Context(), unknown)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, d := range list {
			names = append(names, d.Name)
		}
		return strings.Join(names, " ")
	}
	equal(t, "all are known", names(nil), "here there")
	equal(t, "one is unknown", names([]string{"Asia/Tokyo"}), "here")
	equal(t, "both are unknown", names([]string{"Asia/Tokyo", "Europe/Berlin"}), "")
	b.sql(`UPDATE onejob.schedules SET next_at = CASE name WHEN 'there' THEN now() - interval '1 h' ELSE now() + interval '1 h' END`)
	if wait, err := b.UntilNextSchedule(t.Context(), time.Minute, []string{"Asia/Tokyo"}); err != nil || wait != time.Minute {
		t.Errorf("the next one is %v away, %v", wait, err)
	}
}

// The number of tasks that wait is known up to the cap of the schedule, where it matters.
func TestQueueCap(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for _, queued := range []string{"queue", "allow"} {
		b.schedule(queued, hoursAgo(1), "on_missed = 'all'", "queue_cap = 3", "on_overlap = '"+queued+"'")
		for i, test := range []struct {
			status  string
			waiting string
		}{{"pending", "1"}, {"running", "1"}, {"succeeded", "1"}, {"pending", "2"}, {"pending", "3"}, {"pending", "3"}} {
			columns, values := "", ""
			switch test.status {
			case "running":
				columns, values = ", session, replica, fence, started_at", ", gen_random_uuid(), 'r', "+fmt.Sprint(len(queued)*100+i)+", now()"
			case "succeeded":
				columns, values = ", finished_at", ", now()"
			}
			b.sql(`INSERT INTO onejob.tasks (kind, status, schedule_id`+columns+`) SELECT 'noop', $2, id`+values+` FROM onejob.schedules WHERE name = $1`, queued, test.status)
			d, _ := b.due(queued)
			equal(t, "the cap", d.QueueCap, 3)
			if queued == "allow" {
				test.waiting = "0"
			}
			equal(t, fmt.Sprintf("%s: what waits after task %d", queued, i+1), fmt.Sprint(d.Waiting), test.waiting)
		}
	}
	d, p := b.due("queue")
	b.make(d, p)
	equal(t, "what is made while three wait", b.one(`SELECT count(*) FROM onejob.occurrences WHERE schedule_id = $1 AND skipped IS NULL`, d.ID), "0")
	for _, limit := range []string{"0", "10001", "NULL"} {
		if _, err := b.try(`UPDATE onejob.schedules SET queue_cap = ` + limit); err == nil {
			t.Errorf("a queue_cap of %s is accepted", limit)
		}
	}
}

// What an edit notes, and what is made of it.
func TestEditedSchedules(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	// former is what is noted of a schedule: the line, the next due time and until when.
	former := func(name string) string {
		b.t.Helper()
		return strings.Join(b.sql(`SELECT concat_ws(' ', f.cron, f.time_zone, CASE WHEN f.next_at IS NULL THEN 'unknown' ELSE 'known' END, f.until = s.changed_at)
		                             FROM onejob.former_schedules f JOIN onejob.schedules s ON s.id = f.schedule_id WHERE s.name = $1 ORDER BY f.id`, name), ", ")
	}

	t.Run("WhatIsNoted", func(t *testing.T) {
		for _, test := range []struct {
			name, before, edit, want string
			changed                  bool
		}{
			{"cron", "next_at = now() - interval '1 h'", "cron = '@hourly'", "*/10 * * * * UTC known t", true},
			{"zone", "next_at = now() - interval '1 h'", "time_zone = 'Asia/Tokyo'", "*/10 * * * * UTC known t", true},
			{"disable", "next_at = now() - interval '1 h'", "enabled = false", "*/10 * * * * UTC known t", true},
			{"not worked out", "next_at = NULL", "cron = '@hourly'", "*/10 * * * * UTC unknown t", true},
			{"minus infinity", "next_at = '-infinity', last_at = '-infinity', changed_at = '-infinity'", "cron = '@hourly'", "*/10 * * * * UTC unknown t", true},
			{"clock set back", "next_at = NULL, last_at = now() + interval '1 y', changed_at = 'infinity'", "cron = '@hourly'", "*/10 * * * * UTC unknown t", true},
			{"not due", "next_at = now() + interval '1 h'", "cron = '@hourly'", "", true},
			{"never due", "next_at = 'infinity'", "cron = '@hourly'", "", true},
			{"payload", "next_at = now() - interval '1 h'", "payload = '{}', on_missed = 'all', next_at = now()", "", false},
			{"the same", "next_at = now() - interval '1 h'", "cron = cron, time_zone = 'UTC', enabled = true", "", false},
		} {
			b.schedule(test.name, hoursAgo(1))
			b.sql(`UPDATE onejob.schedules SET `+test.before+` WHERE name = $1`, test.name)
			at := b.one(`SELECT changed_at::text FROM onejob.schedules WHERE name = $1`, test.name)
			b.sql(`UPDATE onejob.schedules SET `+test.edit+` WHERE name = $1`, test.name)
			equal(t, test.name+": what is noted", former(test.name), test.want)
			equal(t, test.name+": changed_at changes", b.one(`SELECT changed_at::text FROM onejob.schedules WHERE name = $1`, test.name) != at, test.changed)
			equal(t, test.name+": next_at is known", b.one(`SELECT next_at IS NOT NULL FROM onejob.schedules WHERE name = $1`, test.name), fmt.Sprint(!test.changed))
		}
		b.schedule("disabled", hoursAgo(1))
		b.sql(`UPDATE onejob.schedules SET next_at = now() + interval '1 h' WHERE name = 'disabled'`)
		b.sql(`UPDATE onejob.schedules SET enabled = false WHERE name = 'disabled'`)
		b.sql(`UPDATE onejob.schedules SET cron = '@hourly' WHERE name = 'disabled'`)
		b.sql(`UPDATE onejob.schedules SET enabled = true WHERE name = 'disabled'`)
		equal(t, "what is noted of a disabled one", former("disabled"), "")
		// None of these keeps the leader from its work.
		if _, _, err := b.DueSchedules(t.Context(), nil); err != nil {
			t.Error(err)
		}
		b.sql(`DELETE FROM onejob.schedules`)
		equal(t, "what is noted of those that are gone", b.one(`SELECT count(*) FROM onejob.former_schedules`), "0")
	})

	// dues is what became of a schedule, in its zone's hours and minutes.
	dues := func(id int64) string {
		return strings.Join(b.sql(`SELECT to_char(due_at - $2::timestamptz, 'HH24:MI') || coalesce('!' || skipped, '') FROM onejob.occurrences WHERE schedule_id = $1 ORDER BY due_at`, id, hoursAgo(3)), " ")
	}
	// edited plants that the line was edited so long after three hours ago.
	edited := func(name, after string) {
		b.sql(`UPDATE onejob.schedules SET cron = '0 * * * *' WHERE name = $1`, name)
		b.sql(`UPDATE onejob.schedules SET changed_at = $2::timestamptz + $3::text::interval WHERE name = $1`, name, hoursAgo(3), after)
		b.sql(`UPDATE onejob.former_schedules f SET until = s.changed_at FROM onejob.schedules s WHERE s.id = f.schedule_id AND s.name = $1`, name)
	}

	t.Run("BothLinesAreMadeOnce", func(t *testing.T) {
		b.schedule("both", hoursAgo(3), "on_missed = 'all'")
		edited("both", "25 min")
		d, p := b.due("both")
		current, _ := b.make(d, p)
		equal(t, "current", current, true)
		equal(t, "due times", dues(d.ID), "00:00 00:10 00:20 01:00 02:00 03:00")
		equal(t, "what is noted", former("both"), "")
		equal(t, "next_at is the hour", b.one(`SELECT next_at = date_trunc('hour', now()) + interval '1 hour' FROM onejob.schedules WHERE id = $1`, d.ID), "true")
		b.make(d, p) // by another leader
		b.consistent()
	})

	// No leader has seen the end of the pause, before the line is edited or not.
	for _, edit := range []bool{false, true} {
		t.Run(fmt.Sprint("IntervalAfterAPause/edited=", edit), func(t *testing.T) {
			name := fmt.Sprint("interval ", edit)
			b.schedule(name, hoursAgo(3), "on_missed = 'all'")
			b.sql(`UPDATE onejob.schedules SET cron = '@every 25m', paused_until = $2 WHERE name = $1`, name, hoursAgo(2))
			b.sql(`DELETE FROM onejob.former_schedules`)
			b.sql(`UPDATE onejob.schedules SET changed_at = $2::timestamptz + interval '50 min' WHERE name = $1`, name, hoursAgo(3))
			if edit {
				b.sql(`UPDATE onejob.schedules SET cron = '0 0 1 1 *' WHERE name = $1`, name)
			}
			d, p := b.due(name)
			b.make(d, p)
			if got := dues(d.ID); !strings.HasPrefix(got, "01:25 01:50 02:15 02:40") {
				t.Errorf("an interval of 25 min after a pause until 01:00 has the due times %s", got)
			}
		})
	}

	t.Run("TwoLeadersWithOnePlan", func(t *testing.T) {
		for i := range 10 {
			name := fmt.Sprint("both ", i)
			b.schedule(name, hoursAgo(3), "on_missed = 'all'")
			edited(name, "25 min")
			b.sql(`UPDATE onejob.schedules SET enabled = $2 WHERE name = $1`, name, i%2 == 0)
			d, p := b.due(name)
			var wg sync.WaitGroup
			var made [2]int
			for i := range 2 {
				wg.Go(func() { _, made[i] = b.make(d, p) })
			}
			wg.Wait()
			if made[0]+made[1] != len(p.Occurrences) || len(p.Occurrences) < 3 {
				t.Errorf("%v were made of %d", made, len(p.Occurrences))
			}
			equal(t, "what is noted", former(name), "")
		}
		b.consistent()
	})

	t.Run("DisabledIsMadeUpToThen", func(t *testing.T) {
		b.schedule("off", hoursAgo(3), "on_missed = 'all'")
		b.sql(`UPDATE onejob.schedules SET enabled = false WHERE name = 'off'`)
		b.sql(`UPDATE onejob.former_schedules SET until = $1::timestamptz + interval '25 min'`, hoursAgo(3))
		d, p := b.due("off")
		b.make(d, p)
		equal(t, "due times", dues(d.ID), "00:00 00:10 00:20")
		equal(t, "next_at is unknown", b.one(`SELECT next_at IS NULL FROM onejob.schedules WHERE id = $1`, d.ID), "true")
		_, list, err := b.DueSchedules(t.Context(), nil)
		for _, d := range list {
			if d.Name == "off" {
				t.Error("it is due when all is made", err)
			}
		}
	})

	// A plan is void after an edit, also if the line is the same again.
	t.Run("EditedThereAndBack", func(t *testing.T) {
		b.schedule("back", hoursAgo(3), "on_missed = 'all'")
		b.sql(`UPDATE onejob.schedules SET next_at = NULL WHERE name = 'back'`)
		d, p := b.due("back")
		b.sql(`UPDATE onejob.schedules SET enabled = false WHERE name = 'back'`)
		b.sql(`UPDATE onejob.schedules SET enabled = true WHERE name = 'back'`)
		current, made := b.make(d, p)
		equal(t, "current", current, false)
		equal(t, "tasks made", made, 0)
	})

	t.Run("NothingIfATaskIsRefused", func(t *testing.T) {
		b.schedule("refused", hoursAgo(3), "on_missed = 'all'")
		edited("refused", "25 min")
		d, p := b.due("refused")
		b.sql(`ALTER TABLE onejob.tasks ADD CONSTRAINT no CHECK (schedule_id <> ` + fmt.Sprint(d.ID) + `)`)
		defer b.sql(`ALTER TABLE onejob.tasks DROP CONSTRAINT no`)
		if _, _, err := b.MakeOccurrences(t.Context(), d, p); err == nil {
			t.Error("it was made")
		}
		equal(t, "what is noted", former("refused"), "*/10 * * * * UTC known t")
	})

	t.Run("MoreThanOnePlan", func(t *testing.T) {
		b.schedule("much", hoursAgo(3), "on_missed = 'skip'")
		edited("much", "25 min")
		d, _ := b.due("much")
		next := hoursAgo(3).Add(10 * time.Minute)
		b.make(d, schedule.Plan{Occurrences: []schedule.Occurrence{{Due: hoursAgo(3), Skipped: schedule.SkippedMissed}}, Keep: true, Cut: d.Former[0].ID, CutNext: next})
		d, p := b.due("much")
		if d.Next != nil || len(d.Former) != 1 || !d.Former[0].Next.Equal(next) {
			t.Errorf("it is %+v", d)
		}
		b.make(d, p)
		equal(t, "due times before the last", strings.Join(strings.Fields(dues(d.ID))[:5], " "), "00:00!missed 00:10!missed 00:20!missed 01:00!missed 02:00!missed")
		equal(t, "what is noted", former("much"), "")
	})
}

func TestBackfill(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	row := func(name string) store.ScheduleRow {
		_, r, err := b.Schedule(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}

	t.Run("BesideTheLeader", func(t *testing.T) {
		for i := range 30 {
			name := fmt.Sprint("race ", i)
			b.schedule(name, hoursAgo(3), "on_missed = 'skip'")
			r := row(name)
			d, p := b.due(name)
			var dues []time.Time
			for _, o := range p.Occurrences {
				dues = append(dues, o.Due)
			}
			var wg sync.WaitGroup
			makers := 0
			wg.Go(func() {
				for current := false; !current && !t.Failed(); { // a backfill may have the row
					current, makers = b.make(d, p)
				}
			})
			fills := make([][]store.MadeTask, 2)
			for i := range fills {
				wg.Go(func() {
					var err error
					if fills[i], err = b.Backfill(t.Context(), r, dues); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			equal(t, "tasks made by all together", makers+len(fills[0])+len(fills[1]), len(dues))
			equal(t, "skipped ones that are left", b.one(`SELECT count(*) FROM onejob.occurrences WHERE schedule_id = $1 AND skipped IS NOT NULL`, r.ID), "0")
			equal(t, "next_at is the leader's", b.one(`SELECT next_at = $2 FROM onejob.schedules WHERE id = $1`, r.ID, p.Next), "true")
		}
		b.consistent()
	})

	t.Run("ChangedMeanwhile", func(t *testing.T) {
		b.schedule("changed", hoursAgo(1))
		r := row("changed")
		b.sql(`UPDATE onejob.schedules SET cron = '@hourly' WHERE id = $1`, r.ID)
		if _, err := b.Backfill(t.Context(), r, []time.Time{hoursAgo(5)}); !errors.Is(err, store.ErrScheduleChanged) {
			t.Errorf("got %v", err)
		}
		b.sql(`DELETE FROM onejob.schedules WHERE id = $1`, r.ID)
		if _, err := b.Backfill(t.Context(), r, []time.Time{hoursAgo(5)}); !errors.Is(err, store.ErrScheduleChanged) {
			t.Errorf("got %v", err)
		}
	})

	t.Run("NothingOfTheFuture", func(t *testing.T) {
		b.schedule("future", hoursAgo(1))
		made, err := b.Backfill(t.Context(), row("future"), []time.Time{hoursAgo(5), hoursAgo(-5)})
		if err != nil || len(made) != 1 || !made[0].DueAt.Equal(hoursAgo(5)) {
			t.Errorf("made %v, %v", made, err)
		}
	})

	t.Run("NothingIfATaskIsRefused", func(t *testing.T) {
		b.schedule("refused", hoursAgo(1))
		r := row("refused")
		b.sql(`ALTER TABLE onejob.tasks ADD CONSTRAINT no CHECK (run_at <> '2020-01-02Z')`)
		if _, err := b.Backfill(t.Context(), r, []time.Time{day(1), day(2), day(3)}); err == nil {
			t.Error("it was made")
		}
		equal(t, "occurrences", b.one(`SELECT count(*) FROM onejob.occurrences WHERE schedule_id = $1`, r.ID), "0")
	})
}

func day(n int) time.Time { return time.Date(2020, 1, n, 0, 0, 0, 0, time.UTC) }

func TestPurge(t *testing.T) {
	t.Parallel()
	// finished adds n tasks that finished so many hours ago.
	finished := func(b *bench, n, hours int, keepFor any) {
		b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at, keep_for)
               SELECT 'noop', 'succeeded', now() - $2 * interval '1 hour', $3::text::interval FROM generate_series(1, $1) i`, n, hours, keepFor)
	}
	purge := func(b *bench, n int) int {
		b.t.Helper()
		deleted, _, _, err := b.Purge(b.t.Context(), tasks.StatusSucceeded, 24*time.Hour, n)
		if err != nil {
			b.t.Fatal(err)
		}
		return deleted
	}

	t.Run("ARowsOwnTimeGoesBefore", func(t *testing.T) {
		t.Parallel()
		b := newBench(t)
		finished(b, 3, 23, nil)
		finished(b, 4, 25, nil)
		finished(b, 5, 25, "2 days")
		finished(b, 6, 2, "1 hour")
		finished(b, 7, 1, "0")
		finished(b, 8, 100000, "170000000 years") // no such time is representable
		equal(t, "deleted", purge(b, 1000), 4+6+7)
		equal(t, "left", b.one(`SELECT count(*) FROM onejob.tasks`), fmt.Sprint(3+5+8))
	})

	t.Run("WhatIsPlannedForASmallTableDoesForALargeOne", func(t *testing.T) {
		t.Parallel()
		b := newBench(t)
		b.Store = open(t, store.Config{DSN: b.dsn, MaxConns: 1}) // so that each statement has one plan
		finished(b, 100, 1, nil)
		b.sql(`ALTER TABLE onejob.tasks SET (autovacuum_enabled = false)`)
		b.sql(`VACUUM ANALYZE onejob.tasks`)
		for range 8 { // five times Postgres plans anew, before it keeps a plan
			equal(t, "deleted of what is new", purge(b, 1000), 0)
		}
		finished(b, 300_000, 2, nil)
		finished(b, 2_000, 48, nil)
		for _, statistics := range []string{"none", "analyzed"} {
			if statistics == "analyzed" {
				b.sql(`ANALYZE onejob.tasks`)
				b.Store = open(t, store.Config{DSN: b.dsn, MaxConns: 1})
			}
			purge(b, 1) // meets what was left to clean up
			before := b.read()
			equal(t, "deleted of what is old", purge(b, 500), 500)
			if rows := b.read() - before; rows > 10_000 {
				t.Errorf("statistics %s: %d rows were read to delete 500 of 302000", statistics, rows)
			}
		}
	})
}

// Rows of which fewer can be deleted within the time for a statement than retention asks for
// are deleted, but one that takes longer alone.
func TestSlowRowsStopNoRetention(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.Store = open(t, store.Config{DSN: b.dsn, Timeout: 4 * time.Second})
	b.sql(`CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    PERFORM pg_sleep(CASE WHEN OLD.kind = 'slowest' THEN 60 ELSE 0.1 END);
    RETURN OLD;
END $$`)
	b.sql(`CREATE TRIGGER slow BEFORE DELETE ON onejob.tasks FOR EACH ROW EXECUTE FUNCTION public.slow()`)
	b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at)
SELECT CASE WHEN i = 30 THEN 'slowest' ELSE 'noop' END, 'succeeded', now() - i * interval '1 hour' FROM generate_series(1, 60) i`)
	var refused []string
	for more := true; more; {
		_, again, rows, err := b.Purge(t.Context(), tasks.StatusSucceeded, time.Minute, 1000)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range rows {
			refused = append(refused, fmt.Sprint(r.ID))
		}
		more = again
	}
	equal(t, "what is left", strings.Join(b.sql(`SELECT id FROM onejob.tasks ORDER BY id`), " "), "30")
	equal(t, "what was refused", strings.Join(refused, " "), "30")
}

// Rows that say how long they are kept cost retention nothing before their time is over.
func TestRowsThatAreKeptForLongAreNotRead(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.Store = open(t, store.Config{DSN: b.dsn, MaxConns: 1})
	b.sql(`ALTER TABLE onejob.tasks SET (autovacuum_enabled = false)`)
	b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at, keep_for)
SELECT 'noop', 'succeeded', now() - interval '2 days' + i * interval '1 s', interval '1 year' + i * interval '1 s' FROM generate_series(1, 20000) i`)
	b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at, keep_for) SELECT 'noop', 'succeeded', now() - interval '1 hour', interval '1 min' FROM generate_series(1, 10)`)
	for _, statistics := range []string{"none", "analyzed"} {
		for _, want := range []int{10, 0} {
			before := b.read()
			deleted, _, _, err := b.Purge(t.Context(), tasks.StatusSucceeded, time.Hour, 1000)
			if err != nil {
				t.Fatal(err)
			}
			equal(t, "deleted", deleted, want)
			if rows := b.read() - before; rows > 500 {
				t.Errorf("statistics %s: %d rows were read to delete %d of 20010", statistics, rows, want)
			}
		}
		b.sql(`ANALYZE onejob.tasks`)
		b.Store = open(t, store.Config{DSN: b.dsn, MaxConns: 1})
		b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at, keep_for) SELECT 'noop', 'succeeded', now() - interval '1 hour', interval '1 min' FROM generate_series(1, 10)`)
	}
}

// Whoever deletes tasks deletes their attempts with them, and no others.
func TestAttemptsGoWithTheirTask(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, 6)`)
	for _, task := range b.claimMax(6) {
		if err := b.Complete(t.Context(), succeeded(task)); err != nil {
			t.Fatal(err)
		}
	}
	left := func(want string) {
		t.Helper()
		equal(t, "the tasks whose attempts are left", strings.Join(b.sql(`SELECT task_id FROM onejob.attempts ORDER BY task_id`), " "), want)
	}
	b.sql(`DELETE FROM onejob.tasks WHERE id IN (2, 5)`)
	left("1 3 4 6")
	b.sql(`UPDATE onejob.tasks SET finished_at = now() - interval '1 hour' WHERE id IN (1, 3)`)
	if deleted, _, _, err := b.Purge(t.Context(), tasks.StatusSucceeded, time.Minute, 10); err != nil || deleted != 2 {
		t.Errorf("deleted %d, %v", deleted, err)
	}
	left("4 6")

	// Somebody who may delete tasks, and may not touch the history.
	role := "deleter_" + b.one(`SELECT current_database()`)
	b.sql(`CREATE ROLE ` + role + ` LOGIN`)
	t.Cleanup(func() { b.sql(`DROP OWNED BY ` + role); b.sql(`DROP ROLE ` + role) })
	b.sql(`GRANT USAGE ON SCHEMA onejob TO ` + role)
	b.sql(`GRANT SELECT, DELETE ON onejob.tasks TO ` + role)
	conn, err := pgx.Connect(t.Context(), as(t, b.dsn, role))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	if _, err := conn.Exec(t.Context(), `DELETE FROM onejob.tasks WHERE id = 4`); err != nil {
		t.Error(err)
	}
	left("6")
}

func TestPurgeOccurrences(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.schedule("s", hoursAgo(0))
	id, task := b.one(`SELECT id FROM onejob.schedules`), b.insert()
	for _, o := range []struct {
		due, age string
		task     any
		skipped  any
	}{
		{"2020-01-01", "2 days", nil, "missed"},
		{"2020-01-02", "1 hour", nil, "missed"},
		{"2020-01-03", "2 days", task, nil},
		{"2020-01-04", "2 days", "1000", nil}, // its task is gone
		{"2020-01-05", "1 hour", "1001", nil},
	} {
		b.sql(`INSERT INTO onejob.occurrences (schedule_id, due_at, task_id, skipped, made_at)
               VALUES ($1::text::bigint, $2::text::timestamptz, $3::text::bigint, $4, now() - $5::text::interval)`, id, o.due, o.task, o.skipped, o.age)
	}
	for _, want := range []int{1, 1, 0} {
		n, err := b.PurgeOccurrences(t.Context(), 24*time.Hour, 1)
		if err != nil || n != want {
			t.Errorf("deleted %d, %v, want %d", n, err, want)
		}
	}
	equal(t, "left", strings.Join(b.sql(`SELECT extract(day FROM due_at AT TIME ZONE 'UTC')::int::text FROM onejob.occurrences ORDER BY due_at`), " "), "2 3 5")
}

// I8: a row that somebody has locked keeps no others from being deleted.
func TestPurgePassesOverLockedRows(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.schedule("s", hoursAgo(0))
	b.sql(`INSERT INTO onejob.occurrences (schedule_id, due_at, skipped, made_at)
SELECT id, timestamptz '2021-01-01Z' + i * interval '1 s', 'missed', now() - interval '2 days' FROM onejob.schedules, generate_series(1, 3) i`)
	openTransaction(t, b.dsn, `BEGIN`, `SELECT FROM onejob.occurrences ORDER BY due_at LIMIT 1 FOR UPDATE`)
	if n, err := b.PurgeOccurrences(t.Context(), 24*time.Hour, 10); n != 2 || err != nil {
		t.Errorf("%d occurrences were deleted, %v", n, err)
	}
}

// Old occurrences whose tasks are kept are looked at once, and keep no others, not even if
// more than one statement looks at were made at one time.
func TestOccurrencesWithTasksKeepNoOthers(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.Store = open(t, store.Config{DSN: b.dsn, MaxConns: 1})
	b.schedule("s", hoursAgo(0))
	b.sql(`INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, 25000)`)
	b.sql(`INSERT INTO onejob.occurrences (schedule_id, due_at, task_id, made_at)
SELECT s.id, timestamptz '2020-01-01Z' + t.id * interval '1 s', t.id, now() - interval '5 days' + CASE WHEN t.id > 12000 THEN t.id ELSE 0 END * interval '1 s'
  FROM onejob.schedules s, onejob.tasks t`)
	b.sql(`INSERT INTO onejob.occurrences (schedule_id, due_at, skipped, made_at)
SELECT id, timestamptz '2021-01-01Z' + i * interval '1 s', 'missed', now() - interval '2 days' FROM onejob.schedules, generate_series(1, 10) i`)
	for round := range 3 {
		before := b.read()
		deleted, err := b.PurgeOccurrences(t.Context(), 24*time.Hour, 5)
		want := 5
		if round == 2 {
			want = 0
		}
		if err != nil || deleted != want {
			t.Fatalf("round %d deleted %d, %v, want %d", round, deleted, err, want)
		}
		if rows := b.read() - before; round > 0 && rows > 1000 {
			t.Errorf("round %d read %d rows of tasks", round, rows)
		}
	}
	equal(t, "left", b.one(`SELECT count(*) FROM onejob.occurrences`), "25000")
}

// Postgres takes names of zones in any case, and zones that have none. A schedule gets the name
// that Go knows, or is refused.
func TestZoneNames(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind, time_zone) SELECT name, '* * * * *', 'noop', lower(name) FROM pg_timezone_names WHERE name !~ '^(posix|right)/' AND name NOT IN ('Factory', 'localtime', 'posixrules') AND length(name) > 1`)
	if wrong := b.sql(`SELECT concat_ws(' ', name, time_zone) FROM onejob.schedules WHERE name <> time_zone`); len(wrong) > 0 {
		t.Errorf("names and zones of rows: %v", wrong)
	}
	zones := b.sql(`SELECT time_zone FROM onejob.schedules`)
	if len(zones) < 300 {
		t.Errorf("%d zones", len(zones))
	}
	for _, zone := range zones {
		if _, err := time.LoadLocation(zone); err != nil {
			t.Error(err)
		}
	}

	b.sql(`INSERT INTO onejob.schedules (name, cron, kind) VALUES ('edited', '* * * * *', 'noop')`)
	for _, zone := range []string{"", "Local", "localtime", "Posixrules", "Factory", "CEST", "UTC+3", "utc-1", "2", "+02", "<+02>-02", "CET-1CEST,M3.5.0,M10.5.0/3", "Europe/Nowhere", "Etc/UTC+2", "Etc/GMT+13", "Etc/GMT-15", "Europe/Berlin1", "America/New_York5", " UTC", strings.Repeat("x", 1000)} {
		for _, sql := range []string{`INSERT INTO onejob.schedules (name, cron, kind, time_zone) VALUES ('refused', '* * * * *', 'noop', $1)`, `UPDATE onejob.schedules SET time_zone = $1 WHERE name = 'edited'`} {
			_, err := b.try(sql, zone)
			var pg *pgconn.PgError
			if !errors.As(err, &pg) || pg.Code != "22023" || !strings.Contains(pg.Message, "is not the name of a time zone") || len(pg.Message) > 200 || !strings.Contains(pg.Hint, "Europe/Berlin") {
				t.Errorf("%.20s: %q: %v", sql, zone, err)
			}
		}
	}
	if _, err := b.try(`UPDATE onejob.schedules SET time_zone = NULL WHERE name = 'edited'`); err == nil || !strings.Contains(err.Error(), "not-null") {
		t.Errorf("no zone: %v", err)
	}
	equal(t, "the zone of the session", b.one(`WITH z AS (UPDATE onejob.schedules SET time_zone = 'asia/tokyo' WHERE name = 'edited' RETURNING time_zone) SELECT time_zone || ' ' || current_setting('TimeZone') = 'Asia/Tokyo ' || (SELECT reset_val FROM pg_settings WHERE name = 'TimeZone') FROM z`), "true")

	// What was there before is not looked at again.
	b.sql(`ALTER TABLE onejob.schedules DISABLE TRIGGER check_schedule`)
	b.sql(`UPDATE onejob.schedules SET time_zone = 'UTC+3' WHERE name = 'edited'`)
	b.sql(`ALTER TABLE onejob.schedules ENABLE TRIGGER check_schedule`)
	b.sql(`UPDATE onejob.schedules SET enabled = false, time_zone = 'UTC+3', cron = '@daily' WHERE name = 'edited'`)
}
