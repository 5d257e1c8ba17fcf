package store_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"onejob/store"
	"onejob/tasks"
	"onejob/tasks/schedule"
)

// leavesOut plants a trigger that leaves out what is inserted of a kind, without an error.
func leavesOut(t *testing.T, b *bench) {
	t.Helper()
	b.sql(`CREATE FUNCTION public.leave_out() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.kind = 'other' THEN RETURN NULL; END IF; RETURN NEW; END $$`)
	b.sql(`CREATE TRIGGER leave_out BEFORE INSERT ON onejob.tasks FOR EACH ROW EXECUTE FUNCTION public.leave_out()`)
}

// A task that a trigger leaves out is not taken for one that was added, nor for one whose unique key
// is taken; and of a batch none is added then.
func TestEnqueueOfWhatIsLeftOut(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	leavesOut(t, b)
	const want = "leaves out the row"
	if id, err := b.Enqueue(t.Context(), store.NewTask{Kind: "other"}); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("task %d, %v", id, err)
	}
	if ids, err := store.Enqueue(t.Context(), b.pool, store.NewTask{Kind: "noop"}, store.NewTask{Kind: "other"}); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("tasks %v, %v", ids, err)
	}
	equal(t, "what is there", b.one(`SELECT count(*) FROM onejob.tasks`), "0")
	if id, err := b.Enqueue(t.Context(), store.NewTask{Kind: "noop", UniqueKey: "u"}); err != nil || id == 0 {
		t.Errorf("task %d, %v", id, err)
	}
	if id, err := b.Enqueue(t.Context(), store.NewTask{Kind: "noop", UniqueKey: "u"}); err != nil || id != 0 {
		t.Errorf("of a key that is taken: task %d, %v", id, err)
	}
}

// A task of a schedule that a trigger leaves out is no schedule that is not there.
func TestRunScheduleOfWhatIsLeftOut(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	leavesOut(t, b)
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind) VALUES ('s', '@yearly', 'other'), ('good', '@yearly', 'noop')`)
	if id, err := b.RunSchedule(t.Context(), "s"); err == nil || !strings.Contains(err.Error(), "leaves out the row") {
		t.Errorf("task %d, %v", id, err)
	}
	if id, err := b.RunSchedule(t.Context(), "none"); err != nil || id != 0 {
		t.Errorf("of no schedule: task %d, %v", id, err)
	}
	if id, err := b.RunSchedule(t.Context(), "good"); err != nil || id == 0 {
		t.Errorf("task %d, %v", id, err)
	}
	equal(t, "what is on record", b.one(`SELECT string_agg(target, ' ') FROM onejob.actions`), "schedule good")
}

// No due time has a task that is not there.
func TestDueTimesOfTasksThatAreLeftOut(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	leavesOut(t, b)
	b.sql(`INSERT INTO onejob.schedules (name, cron, kind) VALUES ('s', '* * * * * *', 'other')`)
	b.sql(`UPDATE onejob.schedules SET next_at = now() - interval '1 second'`)
	_, due, err := b.DueSchedules(t.Context(), nil)
	if err != nil || len(due) != 1 {
		t.Fatalf("%d schedules are due, %v", len(due), err)
	}
	at := due[0].Next.UTC()
	_, made, err := b.MakeOccurrences(t.Context(), due[0], schedule.Plan{Occurrences: []schedule.Occurrence{{Due: at}}, Next: at.Add(time.Hour)})
	if made != 0 || !errors.Is(err, tasks.ErrUnwritable) || !strings.Contains(err.Error(), "leaves out the row") {
		t.Errorf("%d were made, %v", made, err)
	}
	list, err := b.Schedules(t.Context())
	if err != nil || len(list) != 1 {
		t.Fatalf("%d schedules, %v", len(list), err)
	}
	if tasks, err := b.Backfill(t.Context(), list[0], []time.Time{at}); err == nil || !strings.Contains(err.Error(), "leaves out the row") {
		t.Errorf("a backfill made %v, %v", tasks, err)
	}
	equal(t, "due times", b.one(`SELECT count(*) FROM onejob.occurrences`), "0")
}

// Finished rows that a trigger keeps do not keep retention from those behind them, and one is named.
func TestKeptRowsStopNoRetention(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at)
SELECT CASE WHEN i <= 30 OR i % 10 = 0 THEN 'other' ELSE 'noop' END, 'succeeded', now() - interval '2 days' + i * interval '1 s' FROM generate_series(1, 100) i`)
	b.sql(`CREATE FUNCTION public.keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF OLD.kind = 'other' THEN RETURN NULL; END IF; RETURN OLD; END $$`)
	b.sql(`CREATE TRIGGER keep BEFORE DELETE ON onejob.tasks FOR EACH ROW EXECUTE FUNCTION public.keep()`)
	deleted, named := 0, 0
	for more, tries := true, 0; more && tries < 100; tries++ {
		n, again, refused, err := b.Purge(t.Context(), tasks.StatusSucceeded, time.Hour, 10)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range refused {
			if !strings.Contains(r.Err.Error(), "a trigger leaves it as it is") {
				t.Error(r.Err)
			}
		}
		deleted, named, more = deleted+n, named+len(refused), again
	}
	equal(t, "how many were deleted", deleted, 63)
	equal(t, "those that are left", b.one(`SELECT string_agg(DISTINCT kind, ' ') FROM onejob.tasks`), "other")
	if named == 0 {
		t.Error("no row is named that is kept")
	}
}
