package store_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"onejob/boottime"
	"onejob/store"
	"onejob/tasks"
)

// overlaps are those that onejob.overlaps shows, and those that Overlaps returns.
func (b *bench) overlaps() string {
	b.t.Helper()
	list, total, err := b.Overlaps(b.t.Context(), 100)
	if err != nil || total != len(list) {
		b.t.Fatal(total, list, err)
	}
	seen := strings.Join(b.sql(`SELECT concat_ws(' ', lock_key, task_id, other_task_id) FROM onejob.overlaps ORDER BY fence`), "; ")
	if got := fmt.Sprint(strings.Count(seen, ";") + min(len(seen), 1)); got != fmt.Sprint(total) {
		b.t.Errorf("%s were returned, and %q seen", fmt.Sprint(list), seen)
	}
	return seen
}

// victim claims a task and, when it was taken over, another one or the same again. The
// columns are those of insert.
func (b *bench) victim(died bool, first, second []string) (victim, robber *tasks.Task) {
	b.t.Helper()
	r := b.joined("victim")
	victim = b.claimedBy(r, first...)
	if !died { // it has another session
		again := r
		again.Session = uuid.NewString()
		id, err := b.ClusterID(b.t.Context())
		if err == nil {
			err = b.Join(b.t.Context(), id, again)
		}
		if err != nil {
			b.t.Fatal(err)
		}
	}
	if _, err := b.DeclareDead(b.t.Context(), r, false); err != nil {
		b.t.Fatal(err)
	}
	if _, _, err := b.TakeOver(b.t.Context(), []string{r.Session}, 3); err != nil {
		b.t.Fatal(err)
	}
	if second == nil {
		var list []*tasks.Task
		for end := time.Now().Add(30 * time.Second); len(list) == 0 && time.Now().Before(end); { // a claim may wait in vain for its turn
			list = b.claimMax(1)
		}
		if len(list) != 1 || list[0].ID != victim.ID {
			b.t.Fatal(list)
		}
		return victim, list[0]
	}
	b.sql(`UPDATE onejob.tasks SET run_at = 'infinity' WHERE id = $1`, victim.ID)
	return victim, b.claimed(second...)
}

// ended writes the end of an attempt that worked from the one moment to the other, reckoned
// from when the other one was claimed.
func (b *bench) ended(t, other *tasks.Task, outcome tasks.Outcome, from, to time.Duration) {
	b.t.Helper()
	e := tasks.Completion{ID: t.ID, Fence: t.Fence, Session: t.Session, Outcome: outcome, Next: tasks.StatusSucceeded,
		StoppedAt: other.StartedAt.Add(to), Begun: boottime.Now().Add(-time.Since(other.StartedAt.Add(from)))}
	if outcome == tasks.LeaseLost {
		e.Next, e.Requeue = tasks.StatusPending, true
	}
	if err := b.Complete(b.t.Context(), e); err != nil && !errors.Is(err, tasks.ErrRefused) {
		b.t.Fatal(err)
	}
}

// What overlaps is found, however the tasks come to share a lock key and whatever is written
// first; what does not is not.
func TestOverlapsAreFound(t *testing.T) {
	t.Parallel()
	for what, test := range map[string]struct {
		first, second []string // columns; nil: the same task again
		died          bool
		outcome       tasks.Outcome // of the first
	}{
		"the same task":                   {nil, nil, false, tasks.LeaseLost},
		"the same task of a dead replica": {nil, nil, true, tasks.Succeeded},
		"another task of the lock key":    {[]string{"lock_key='k'"}, []string{"lock_key='k'"}, true, tasks.Succeeded},
		"a task whose id is the lock key": {[]string{"lock_key='2'"}, []string{}, false, tasks.Succeeded},
		"a lock key that is a task's id":  {nil, []string{"lock_key='1'"}, true, tasks.LeaseLost},
	} {
		for _, late := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, it ended first: %v", what, !late), func(t *testing.T) {
				t.Parallel()
				for _, overlap := range []bool{true, false} {
					b := newBench(t)
					victim, robber := b.victim(test.died, test.first, test.second)
					stopped := -time.Millisecond
					if overlap {
						stopped = time.Hour
					}
					ends := []func(){
						func() { b.ended(victim, robber, test.outcome, -time.Second, stopped) },
						func() { b.ended(robber, robber, tasks.Succeeded, 0, time.Hour) },
					}
					if late {
						ends[0], ends[1] = ends[1], ends[0]
					}
					ends[0]()
					ends[1]()
					want := ""
					if overlap {
						want = fmt.Sprintf("%s %d %d", victim.LockKey, victim.ID, robber.ID)
					}
					equal(t, "the overlaps", b.overlaps(), want)
				}
			})
		}
	}
}

// Attempts whose ends were accepted cannot have overlapped, whatever Postgres' clock did
// meanwhile.
func TestAClockThatStepsMakesNoOverlaps(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	var last *tasks.Task
	for range 3 {
		last = b.claimed("lock_key='k'")
		b.ended(last, last, tasks.Succeeded, 0, time.Millisecond)
	}
	b.sql(`UPDATE onejob.attempts SET begun_at = now() - interval '1 hour', started_at = now() - interval '1 hour', stopped_at = now() + interval '1 hour', finished_at = now() + interval '1 hour'`)
	equal(t, "the overlaps", b.overlaps(), "")
}

// To look for overlaps does not take reading the history.
func TestOverlapsReadFewRows(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.Store = open(t, store.Config{DSN: b.dsn, MaxConns: 1})
	victim, robber := b.victim(false, []string{"lock_key='k'"}, []string{"lock_key='k'"})
	b.sql(`INSERT INTO onejob.attempts (fence, task_id, attempt, lock_key, replica, session, started_at, finished_at, outcome)
		SELECT i, i, 1, CASE WHEN i % 2 = 0 THEN 'key ' || i % 100 ELSE i::text END, 'r', gen_random_uuid(), now(), now(), 'succeeded' FROM generate_series(100000, 200000) i`)
	b.ended(victim, robber, tasks.LeaseLost, -time.Second, time.Hour)
	b.ended(robber, robber, tasks.Succeeded, 0, time.Millisecond)
	b.sql(`ANALYZE onejob.attempts`)
	before := b.readOf("onejob.attempts")
	if b.overlaps() == "" {
		t.Error("nothing is found")
	}
	if n := b.readOf("onejob.attempts") - before; n > 1000 {
		t.Errorf("%d rows were read", n)
	}
}
