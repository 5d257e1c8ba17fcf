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

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"

	"onejob/internal/testenv"
	"onejob/tasks"
)

func TestClaimOrder(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	due := func(minutes int) string { return fmt.Sprintf("run_at=now() - interval '%d min'", minutes) }
	late := b.insert("priority=-5", due(60))
	second := b.insert("kind='other'", due(30))
	third := b.insert(due(20))
	first := b.insert("priority=5", due(1))
	fourth := b.insert("lock_key='k'", due(10))
	b.insert("lock_key='k'", due(5))                           // behind the fourth
	b.insert("priority=9", "kind='mystery'", due(90))          // nobody knows it
	b.insert("priority=9", "run_at=now() + interval '1 hour'") // far away

	equal(t, "the order", ids(b.claimMax(2)), first+" "+second)
	equal(t, "the order", ids(b.claimMax(9)), strings.Join([]string{third, fourth, late}, " "))
	equal(t, "what is left", ids(b.claimMax(9)), "")

	kinds, err := b.UnknownKinds(t.Context(), []string{"noop", "other"})
	equal(t, "the unknown kinds", fmt.Sprint(kinds, err), "[mystery] <nil>")
}

func TestClaimReturnsAllOfATask(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.insert(`payload='{"a": 1}'`, "queue='q'", "priority=3", "lock_key='k'", "max_attempts=7", "timeout='1500 ms'", "crashes=1")
	got := *b.claimOne()
	equal(t, "the task", fmt.Sprint(got.Kind, string(got.Payload), got.Queue, got.Priority, got.LockKey, got.Attempt, got.MaxAttempts, got.Timeout, got.Crashes, got.Session == b.session, got.Replica),
		fmt.Sprint("noop", `{"a": 1}`, "q", 3, "k", 1, 7, 1500*time.Millisecond, 1, true, "one"))
	equal(t, "the row", b.row(&got, "status, attempt, fence, session, replica, started_at IS NOT NULL"), fmt.Sprint("running 1 ", got.Fence, " ", b.session, " one t"))
	held, err := b.Held(t.Context(), b.session)
	if err != nil || len(held) != 1 || held[0].ID != got.ID || held[0].Fence != got.Fence || held[0].LockKey != "k" {
		t.Errorf("held: %+v, %v", held, err)
	}
}

func TestClaimServesItsQueues(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.insert("queue='a'")
	want := b.insert("queue='b'")
	list, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Queues: []string{"b", "c"}, Max: 9})
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "what was claimed", ids(list.Tasks), want)
}

// Whether a task is due is for Postgres' clock alone to say, and a session's time
// zone changes nothing.
func TestDueByPostgresClock(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`ALTER DATABASE ` + b.one(`SELECT current_database()`) + ` SET TimeZone = 'Pacific/Kiritimati'`)
	b.Pool().Reset()
	b.insert("run_at=clock_timestamp() + interval '1 hour'")
	equal(t, "before it is due", ids(b.claimMax(1)), "")
	id := b.insert("run_at=now()") // due in the instant of its INSERT
	equal(t, "when it is due", ids(b.claimMax(1)), id)
}

func TestClaimSkipsWhatOthersHaveLocked(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	locked := b.insert()
	want := b.insert()
	tx, err := b.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	if _, err := tx.Exec(t.Context(), `SELECT FROM onejob.tasks WHERE id = $1::text::bigint FOR UPDATE`, locked); err != nil {
		t.Fatal(err)
	}
	equal(t, "what was claimed", ids(b.claimMax(9)), want)
}

func TestConcurrentClaimersTakeEachTaskOnce(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	const total = 3000
	b.sql(`INSERT INTO onejob.tasks (kind, priority) SELECT 'noop', i % 3 FROM generate_series(1, $1) i`, total)
	var mu sync.Mutex
	var all []int64
	var wg sync.WaitGroup
	deadline := time.Now().Add(5 * time.Minute) // for when one is never claimed
	for range 8 {
		wg.Go(func() {
			for {
				mu.Lock()
				done := len(all) >= total || time.Now().After(deadline)
				mu.Unlock()
				if done {
					return
				}
				list, err := b.Claim(t.Context(), tasks.Claim{Session: uuid.NewString(), Replica: "r", Kinds: []string{"noop"}, Max: 50})
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				for _, task := range list.Tasks {
					all = append(all, task.ID)
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	equal(t, "the number of claimed tasks", len(all), total)
	slices.Sort(all)
	equal(t, "the number of different tasks", len(slices.Compact(all)), total)
	equal(t, "the highest attempt", b.one(`SELECT max(attempt) FROM onejob.tasks`), "1")
}

func TestSharedLockKeysUnderSixteenClaimers(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	const total, keys = 2000, 7
	b.sql(`INSERT INTO onejob.tasks (kind, lock_key, priority) SELECT 'noop', 'key ' || i % $2, i % 2 FROM generate_series(1, $1) i`, total, keys)
	var mu sync.Mutex
	running := map[string]int64{} // lock key to fence
	highest := map[string]int64{}
	done := 0
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for !t.Failed() {
				mu.Lock()
				finished := done == total
				mu.Unlock()
				if finished {
					return
				}
				claimed, err := b.Claim(t.Context(), tasks.Claim{Session: uuid.NewString(), Replica: "r", Kinds: []string{"noop"}, Max: 5})
				if err != nil {
					t.Error(err)
					return
				}
				list := claimed.Tasks
				mu.Lock()
				for _, task := range list {
					if running[task.LockKey] != 0 {
						t.Errorf("%s is claimed twice: %d and %d", task.LockKey, running[task.LockKey], task.Fence)
					}
					if task.Fence <= highest[task.LockKey] {
						t.Errorf("the fence of %s fell from %d to %d", task.LockKey, highest[task.LockKey], task.Fence)
					}
					running[task.LockKey], highest[task.LockKey] = task.Fence, task.Fence
				}
				mu.Unlock()
				for _, task := range list {
					mu.Lock()
					delete(running, task.LockKey)
					done++
					mu.Unlock()
					if err := b.Complete(t.Context(), succeeded(task)); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	equal(t, "the number of successes", b.one(`SELECT count(*) FROM onejob.tasks WHERE status = 'succeeded'`), fmt.Sprint(total))
	equal(t, "the number of overlaps", b.one(`SELECT count(*) FROM onejob.overlaps`), "0")
}

// A task's own key is its id, and somebody may use the same number as a lock_key.
func TestALockKeyThatIsAnotherTasksID(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	plain := b.insert("run_at=now() + interval '1 hour'")
	holder := b.claimed("lock_key='" + plain + "'")
	b.sql(`UPDATE onejob.tasks SET run_at = now() WHERE id = $1::text::bigint`, plain)
	want := b.insert()
	equal(t, "what was claimed beside the holder", ids(b.claimMax(9)), want)
	if err := b.Complete(t.Context(), succeeded(holder)); err != nil {
		t.Fatal(err)
	}
	equal(t, "what was claimed after it", ids(b.claimMax(9)), plain)
	b.insert("lock_key='" + plain + "'")
	equal(t, "what was claimed beside the plain one", ids(b.claimMax(9)), "")
}

// Both are due at once: they, and what else is due, are still claimed.
func TestALockKeyThatIsADueTasksID(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, 7)`)
	b.sql(`UPDATE onejob.tasks SET lock_key = '1' WHERE id = 4`)
	b.sql(`UPDATE onejob.tasks SET lock_key = '6' WHERE id = 2`)
	for left := 7; left > 0; {
		list := b.claimMax(32)
		if len(list) == 0 {
			t.Fatalf("nothing is claimed of %d", left)
		}
		running := b.one(`SELECT count(*) = count(DISTINCT coalesce(lock_key, id::text)) FROM onejob.tasks WHERE status = 'running'`)
		equal(t, "lock keys are running once", running, "true")
		for _, task := range list {
			if err := b.Complete(t.Context(), succeeded(task)); err != nil {
				t.Fatal(err)
			}
			left--
		}
	}
}

// The reservation of a lock key must look at what is running now, not at what was
// when the claim began: here the holder commits after the claim's snapshot.
func TestALockKeyIsSeenBusyThatBecameSoDuringTheClaim(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.insert("lock_key='k'")
	b.insert("lock_key='k'")
	tx, err := b.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	// A cursor has its snapshot from here on, and reserves when it is fetched from.
	if _, err := tx.Exec(t.Context(), `DECLARE late CURSOR FOR SELECT onejob.reserve_lock_key(lock_key) FROM onejob.tasks WHERE status = 'pending' LIMIT 1`); err != nil {
		t.Fatal(err)
	}
	equal(t, "the number claimed meanwhile", len(b.claimMax(1)), 1)
	var free bool
	if err := tx.QueryRow(t.Context(), `FETCH late`).Scan(&free); err != nil {
		t.Fatal(err)
	}
	equal(t, "whether the key is free", free, false)

	// And who has reserved it has it until its transaction ends.
	b.insert("lock_key='other'")
	if err := tx.QueryRow(t.Context(), `SELECT onejob.reserve_lock_key('other')`).Scan(&free); err != nil || !free {
		t.Fatal(free, err)
	}
	equal(t, "the number claimed of a reserved key", len(b.claimMax(9)), 0)
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	equal(t, "the number claimed after it", len(b.claimMax(9)), 1)
}

// I1: whatever Consul and the claims do, Postgres refuses a second running row of a lock key, and one
// whose lock key is the id of a running task.
func TestPostgresRefusesASecondRunningRow(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.claimed("lock_key='k'")
	running := fmt.Sprint(b.claimed().ID)
	for _, key := range []string{"k", running} {
		id := b.insert("lock_key='" + key + "'")
		_, err := b.pool.Exec(t.Context(), `UPDATE onejob.tasks SET status = 'running', fence = 1000000, session = gen_random_uuid(), replica = 'another', started_at = now() WHERE id = $1`, id)
		if refused := (*pgconn.PgError)(nil); !errors.As(err, &refused) || refused.ConstraintName != "one_running_task_per_lock_key" {
			t.Errorf("a second running row of %q: %v", key, err)
		}
	}
}

// A lane that shows nothing, because one before it has as many rows as are wanted, is not
// passed over when those cannot be had.
func TestALaneThatIsNotShownKeepsItsPlace(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`INSERT INTO onejob.tasks (kind, lock_key, run_at) SELECT 'noop', 'hot', now() - interval '9 hours' FROM generate_series(1, 61) i`)
	late := b.insert("lock_key='late'", "run_at=now() - interval '1 hour'")
	middle := b.insert("kind='other'", "lock_key='middle'", "run_at=now() - interval '4 hours'")
	equal(t, "the first", ids(b.claimMax(1)), "1")
	equal(t, "the second", ids(b.claimMax(1)), middle)
	equal(t, "the third", ids(b.claimMax(1)), late)
}

// A lane that begins with more rows behind a busy key than a claim looks at.
func TestRowsBehindABusyKeyHideNoOthers(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.claimed("lock_key='busy'", "run_at=now() - interval '1 day'")
	b.sql(`INSERT INTO onejob.tasks (kind, run_at, lock_key) SELECT 'noop', now() - interval '1 hour', 'busy' FROM generate_series(1, 2000)`)
	keyed := b.insert("lock_key='other'")
	b.insert("lock_key='other'", "priority=-1")
	b.insert("lock_key='later'", "run_at=now() + interval '1 hour'")
	plain := b.insert()
	equal(t, "what was claimed", ids(b.claimMax(4)), keyed+" "+plain)
}

// One lock key with many due rows, and many lock keys whose rows are due tomorrow, stand
// before the one row that is due and free. It comes before rows of a lower priority, and
// is found when there are none.
func TestNeitherLessUrgentNorFutureRowsHideAFreeOne(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name    string
		further int // rows of a lower priority
		want    int // tasks of one claim of ten
	}{
		{"BesideLessUrgentOnes", 500, 10},
		{"Alone", 0, 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			b.sql(`INSERT INTO onejob.tasks (kind, priority, lock_key, run_at) SELECT 'noop', 10, 'hot', now() - interval '1 hour' + i * interval '1 ms' FROM generate_series(1, 70) i`)
			b.sql(`INSERT INTO onejob.tasks (kind, priority, lock_key, run_at) SELECT 'noop', 10, 'customer-' || i, now() + interval '1 day' FROM generate_series(1, 600) i`)
			zoe := b.insert("priority=10", "lock_key='zoe'", "run_at=now() - interval '30 min'")
			b.sql(`INSERT INTO onejob.tasks (kind, lock_key, run_at) SELECT 'noop', 'other-' || i, now() - interval '2 hours' FROM generate_series(1, $1) i`, test.further)
			list := b.claimMax(10)
			equal(t, "the number of tasks claimed", len(list), test.want)
			if len(list) >= 2 {
				equal(t, "the first two", ids(list[:2]), "1 "+zoe)
			}
		})
	}
}

func TestTakeOver(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name         string
		columns      []string
		cancel       bool
		next, reason string
	}{
		{"Again", nil, false, "pending 1 1", "replica one died during attempt 1 of 5"},
		{"AttemptsUsedUp", []string{"max_attempts=1"}, false, "failed 1 1", "replica one died during attempt 1 of 1"},
		{"Quarantined", []string{"crashes=2", "begun_at=now() + interval '1 hour'"}, false, "failed 1 3", "quarantined: 3 replicas died while they worked on it"},
		{"Cancelled", nil, true, "cancelled 1 1", "replica one died"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			task := b.claimed(test.columns...)
			alive := *b
			alive.session = uuid.NewString()
			untouched := alive.claimed()
			if test.cancel {
				b.sql(`SELECT onejob.cancel($1)`, task.ID)
			}
			sessions, err := b.Sessions(t.Context(), alive.session)
			equal(t, "the others' sessions", fmt.Sprint(sessions, err), fmt.Sprint([]string{b.session}, nil))

			abandoned, _, err := b.TakeOver(t.Context(), []string{b.session}, 3)
			if err != nil || len(abandoned) != 1 || abandoned[0].ID != task.ID || abandoned[0].Fence != task.Fence || abandoned[0].Replica != "one" {
				t.Fatalf("abandoned tasks %+v, %v", abandoned, err)
			}
			equal(t, "the row", b.row(task, "status, attempt, crashes"), test.next)
			if reason := b.row(task, "error"); !strings.Contains(reason, test.reason) {
				t.Errorf("the error is %q, want %q", reason, test.reason)
			}
			equal(t, "the history", b.history(task), "crashed")
			equal(t, "the row of the living", b.row(untouched, "status"), "running")
			if again, _, err := b.TakeOver(t.Context(), []string{b.session}, 3); err != nil || len(again) != 0 {
				t.Errorf("taken over again: %v, %v", again, err)
			}

			// The dead one comes back, see TestWhoIsRefusedHasLived: nothing else changes.
			const rest = "status, run_at, error, result, finished_at, fence, session"
			before := b.row(task, rest)
			if err := b.Complete(t.Context(), succeeded(task)); err != tasks.ErrRefused {
				t.Errorf("its ending was answered with %v", err)
			}
			equal(t, "the row", b.row(task, rest), before)
			equal(t, "the history", b.history(task), "lease_lost")
		})
	}
}

func TestTenReplicasTakeOverAtOnce(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, 200)`)
	b.claimMax(200)
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			if _, _, err := b.TakeOver(t.Context(), []string{b.session}, 3); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	equal(t, "crashes", b.one(`SELECT concat_ws(' ', min(crashes), max(crashes), count(*)) FROM onejob.tasks WHERE status = 'pending'`), "1 1 200")
	equal(t, "the history", b.one(`SELECT count(*) FROM onejob.attempts WHERE outcome = 'crashed'`), "200")
}

// A task without a lock_key shares its lock key, its id, with a lock_key of that number. Whichever of the
// two ends later has begun under the higher fence (I10), also if its claim was held up in between.
func TestALockKeyThatIsAnID(t *testing.T) {
	t.Parallel()
	// held lets a claim of all tasks with a lock_key go on, up to where its rows have their fences, until
	// release is called. It returns what they claimed.
	held := func(t *testing.T, b *bench) (release func() []*tasks.Task) {
		gate, err := b.pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = gate.Rollback(context.Background()) })
		b.sql(`
CREATE FUNCTION public.wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF OLD.lock_key IS NOT NULL AND NEW.status = 'running' THEN PERFORM pg_advisory_xact_lock_shared(1); END IF;
    RETURN NEW;
END $$`)
		b.sql(`CREATE TRIGGER wait BEFORE UPDATE ON onejob.tasks FOR EACH ROW EXECUTE FUNCTION public.wait()`)
		if _, err := gate.Exec(t.Context(), `SELECT pg_advisory_xact_lock(1)`); err != nil {
			t.Fatal(err)
		}
		claimed := make(chan []*tasks.Task, 1)
		testenv.Go(t, func() {
			c, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Queues: []string{"keyed"}, Max: 1})
			if err != nil {
				t.Error(err)
			}
			claimed <- c.Tasks
		})
		testenv.Eventually(t, time.Minute, "the claim waits", func() bool {
			return b.one(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'`) == "1"
		})
		return func() []*tasks.Task {
			_ = gate.Rollback(context.Background())
			return <-claimed
		}
	}
	plain := func(b *bench) []*tasks.Task {
		c, err := b.Claim(b.t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Queues: []string{"default"}, Max: 1})
		if err != nil {
			b.t.Fatal(err)
		}
		return c.Tasks
	}
	one := func(b *bench) (task *tasks.Task) {
		testenv.Eventually(b.t, time.Minute, "one without a lock_key is claimed", func() bool {
			if list := plain(b); len(list) > 0 {
				task = list[0]
			}
			return task != nil
		})
		return task
	}
	succeed := func(b *bench, task *tasks.Task) {
		if err := b.Complete(b.t.Context(), succeeded(task)); err != nil {
			b.t.Fatal(err)
		}
	}
	t.Run("of a task that is there", func(t *testing.T) {
		t.Parallel()
		b := newBench(t)
		id := b.insert()
		b.insert("lock_key='"+id+"'", "queue='keyed'")
		release := held(t, b)
		equal(t, "the number claimed meanwhile", len(plain(b)), 0)
		keyed := release()
		if len(keyed) != 1 {
			t.Fatalf("%d tasks were claimed of the lock_key, want 1", len(keyed))
		}
		equal(t, "the number claimed beside it", len(plain(b)), 0)
		succeed(b, keyed[0])
		equal(t, "whether the next fence is above it", one(b).Fence > keyed[0].Fence, true)
	})
	t.Run("of a task that is enqueued meanwhile", func(t *testing.T) {
		t.Parallel()
		b := newBench(t)
		next := b.insert("lock_key='2'", "queue='keyed'")
		equal(t, "the id", next, "1")
		release := held(t, b)
		equal(t, "the id of the other", b.insert(), "2")
		first := one(b)
		succeed(b, first)
		for _, late := range release() {
			if late.Fence < first.Fence {
				t.Errorf("fence %d begins after fence %d of the same lock key", late.Fence, first.Fence)
			}
		}
	})
	t.Run("of a task that somebody has locked", func(t *testing.T) {
		t.Parallel()
		b := newBench(t)
		id := b.insert()
		b.insert("lock_key='"+id+"'", "queue='keyed'")
		other := b.insert("lock_key='other'", "queue='keyed'")
		tx, err := b.pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback(t.Context())
		if _, err := tx.Exec(t.Context(), `SELECT FROM onejob.tasks WHERE id = $1 FOR UPDATE`, id); err != nil {
			t.Fatal(err)
		}
		equal(t, "what is claimed", ids(b.claimMax(9)), other)
	})
	t.Run("of a task with a higher fence of long ago", func(t *testing.T) { // replicas see that fences have gone back
		t.Parallel()
		b := newBench(t)
		old := b.claimed()
		succeed(b, old)
		b.sql(`UPDATE onejob.tasks SET fence = fence + 1000000 WHERE id = $1`, old.ID)
		late := b.insert(fmt.Sprintf("lock_key='%d'", old.ID))
		equal(t, "what is claimed", ids(b.claimMax(9)), late)
	})
	t.Run("that is no ID", func(t *testing.T) {
		t.Parallel()
		b := newBench(t)
		for _, key := range []string{"01", "-0", "+1", "1.0", " 1", "9223372036854775808", "99999999999999999999", "-9223372036854775809", "0", "-1", "9223372036854775807"} {
			b.insert("lock_key='" + key + "'")
		}
		equal(t, "the number claimed", len(b.claimMax(99)), 11)
	})
}
