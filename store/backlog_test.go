package store_test

import (
	"cmp"
	"fmt"
	"slices"
	"testing"
	"time"

	"onejob/store"
)

func TestBacklog(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	backlog := func() (list []store.Backlog) {
		t.Helper()
		list, err := b.Backlog(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		slices.SortFunc(list, func(x, y store.Backlog) int {
			return cmp.Or(cmp.Compare(x.Queue, y.Queue), cmp.Compare(x.Kind, y.Kind))
		})
		return list
	}
	if list := backlog(); len(list) != 0 {
		t.Errorf("an empty table has a backlog of %v", list)
	}

	b.sql(`INSERT INTO onejob.tasks (kind, queue, priority, created_at, run_at, lock_key, limit_name)
	       SELECT kind, queue, priority, now() - interval '1 day', run_at, lock_key, limit_name
	         FROM (VALUES ('mail', 'a',  0, now() - interval '1 hour',   NULL, NULL),
	                      ('mail', 'a', 10, now() - interval '1 minute', 'k',  NULL),
	                      ('mail', 'a',  0, now() - interval '2 hours',  'k',  'l'),
	                      ('mail', 'a',  0, now() - interval '1 minute', NULL, 'm'),
	                      ('mail', 'b',  0, now() - interval '1 minute', NULL, NULL),
	                      ('call', 'a',  0, now() + interval '1 hour',   NULL, NULL),
	                      ('call', 'a',  0, 'infinity',                  NULL, 'l'),
	                      ('wait', 'a',  0, now() - interval '1 minute', NULL, NULL)) v(kind, queue, priority, run_at, lock_key, limit_name)`)
	b.sql(`UPDATE onejob.tasks SET cancel_requested = true WHERE kind = 'wait'`)
	list := backlog()
	if len(list) != 2 || list[0].Queue != "a" || list[0].Kind != "mail" || list[0].Due != 4 || list[1].Queue != "b" || list[1].Due != 1 {
		t.Fatalf("the backlog is %+v, want 4 of mail in a, and 1 in b", list)
	}
	if age := list[0].Age; age < 2*time.Hour || age > 3*time.Hour {
		t.Errorf("the first due task of mail in a waits for %v, want 2 h", age)
	}

	b.sql(`SELECT onejob.pause_queue('a')`)
	if list := backlog(); len(list) != 2 || list[0].Due != 4 || list[0].Age != 0 || list[1].Age < time.Minute {
		t.Errorf("with queue a paused the backlog is %+v, want the 4 of a without an age", list)
	}
	b.sql(`SELECT onejob.resume_queue('a')`)

	b.sql(fmt.Sprintf(`INSERT INTO onejob.tasks (kind, queue) SELECT 'mail', 'b' FROM generate_series(1, %d)`, store.MaxBacklog+10))
	if list := backlog(); len(list) != 2 || list[1].Due != store.MaxBacklog {
		t.Errorf("the backlog is %+v, want %d rows of mail in b at most", list, store.MaxBacklog)
	}

	b.sql(`INSERT INTO onejob.tasks (kind, queue, limit_name) SELECT 'mail', 'q' || i, CASE WHEN i % 2 = 0 THEN 'l' || i END FROM generate_series(1, 500) i`)
	list, sum := backlog(), 0
	for _, l := range list {
		if sum += l.Due; l.Queue == "other" && l.Due < 300 {
			t.Errorf("%d rows are summed up as other, want those of the queues that are not shown", l.Due)
		}
	}
	if len(list) != 201 || sum != store.MaxBacklog+4+500 {
		t.Errorf("500 queues are shown as %d rows with %d tasks, want 201 with %d", len(list), sum, store.MaxBacklog+4+500)
	}
}

// What is enqueued for a time that has passed, as by a backfill, has waited since it was enqueued.
func TestBacklogCountsFromWhenATaskWasEnqueued(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	b.sql(`INSERT INTO onejob.tasks (kind, queue, run_at, created_at, limit_name)
	       SELECT 'mail', queue, run_at, created_at, limit_name
	         FROM (VALUES ('new', now() - interval '50 days',  now()),
	                      ('old', now() - interval '1 hour',   now() - interval '2 hours'),
	                      ('odd', now() - interval '50 days',  '9999-12-31 UTC')) v(queue, run_at, created_at)
	        CROSS JOIN unnest('{NULL,calls}'::text[]) limit_name`)
	list, err := b.Backlog(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ages := map[string]time.Duration{}
	for _, l := range list {
		ages[l.Queue] = l.Age
	}
	if len(list) != 3 || ages["new"] > 10*time.Minute || ages["old"] < time.Hour || ages["old"] > 70*time.Minute || ages["odd"] != 0 {
		t.Errorf("the backlog is %+v", list)
	}
}

// Anybody who may enqueue can name a queue as the rest is named. Prometheus refuses two values
// with the same labels.
func TestBacklogOfAQueueThatIsNamedOther(t *testing.T) {
	t.Parallel()
	b := newBareBench(t)
	b.sql(`INSERT INTO onejob.tasks (kind, queue) SELECT 'mail', 'q' || i FROM generate_series(1, 300) i
	       UNION ALL SELECT 'other', 'other' FROM generate_series(1, 5)`)
	list, err := b.Backlog(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	seen, sum := map[[2]string]int{}, 0
	for _, l := range list {
		seen[[2]string{l.Queue, l.Kind}]++
		sum += l.Due
		if l.Queue == "other" && l.Due != 5+101 {
			t.Errorf("%d tasks are in other, want the 5 of the queue, and 101 of the queues that are not shown", l.Due)
		}
	}
	if len(seen) != len(list) || len(list) != 200 || sum != 305 {
		t.Errorf("%d rows of %d pairs with %d tasks, want 200 of as many with 305", len(list), len(seen), sum)
	}
}
