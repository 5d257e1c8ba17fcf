package store_test

import (
	"fmt"
	"testing"

	"onejob/store"
	"onejob/tasks"
)

// Lanes whose rows cannot be had are in nobody's way, however many they are: one for each
// priority here, and the lock key of all of them is busy.
func TestManyBusyLanesHideNothing(t *testing.T) {
	t.Parallel()
	for _, limit := range []string{"", "l"} {
		for _, most := range []int{1, 100} {
			t.Run(fmt.Sprintf("%d at once, limit %q", most, limit), func(t *testing.T) {
				t.Parallel()
				b := newBench(t)
				b.claimed("lock_key='hot'")
				b.sql(`INSERT INTO onejob.tasks (kind, lock_key, priority, limit_name) SELECT 'noop', 'hot', i, nullif($1, '') FROM generate_series(1, 500) i`, limit)
				b.sql(`INSERT INTO onejob.tasks (kind, limit_name) VALUES ('noop', nullif($1, ''))`, limit)
				for range 1000 {
					c, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Max: most, Limit: limit})
					if err != nil {
						t.Fatal(err)
					}
					if len(c.Tasks) > 0 {
						return
					}
					if !c.More {
						t.Fatal("a claim says that there is no more")
					}
				}
				t.Error("it is not claimed")
			})
		}
	}
}

// More busy lock keys than are remembered of a lane hide nothing behind them, and do not make claims that follow one
// another without an end.
func TestMoreBusyKeysThanAreRemembered(t *testing.T) {
	t.Parallel()
	for _, limit := range []string{"", "l"} {
		t.Run(fmt.Sprintf("limit %q", limit), func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			b.sql(`INSERT INTO onejob.tasks (kind, status, session, replica, fence, started_at, attempt, lock_key)
			       SELECT 'noop', 'running', $1, 'other', nextval('onejob.fences'), now(), 1, 'key ' || i FROM generate_series(1, 300) i`, b.session)
			b.sql(`INSERT INTO onejob.tasks (kind, lock_key, limit_name) SELECT 'noop', 'key ' || 1 + i % 300, nullif($1, '') FROM generate_series(1, 20000) i`, limit)
			free := b.one(`INSERT INTO onejob.tasks (kind, lock_key, limit_name) VALUES ('noop', 'free', nullif($1, '')) RETURNING id`, limit)
			found := false
			for range 500 {
				c, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Max: 64, Limit: limit})
				if err != nil {
					t.Fatal(err)
				}
				if len(c.Tasks) > 0 {
					equal(t, "what is claimed", ids(c.Tasks), free)
					found = true
				}
				if !c.More {
					if !found {
						t.Error("a claim says that there is no more, and the free one was not claimed")
					}
					return
				}
			}
			t.Errorf("500 claims say that there is more; the free one was claimed: %v", found)
		})
	}
}

// Busy rows in more lanes than are remembered do not make claims that follow one another without a
// pause: a claim says some time that there is no more.
func TestMoreBusyLanesThanAreRemembered(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.claimed("lock_key='hot'")
	b.sql(`INSERT INTO onejob.tasks (kind, lock_key, queue) SELECT 'noop', 'hot', 'q' || i FROM generate_series(1, 2000) i`)
	for range 1000 {
		c, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Max: 10})
		if err != nil {
			t.Fatal(err)
		}
		if len(c.Tasks) > 0 {
			t.Fatal("a row was claimed whose lock key is busy")
		}
		if !c.More {
			return
		}
	}
	t.Error("no claim says that there is no more")
}

// While there may be more to claim, a claim says so: nobody wakes the replica for what is left.
func TestClaimsSayThatThereIsMore(t *testing.T) {
	t.Parallel()
	for name, rows := range map[string]func(b *bench){
		"a refused row among others": func(b *bench) {
			b.refusing(`NEW.status = 'running'`)
			b.sql(`INSERT INTO onejob.tasks (kind, priority) VALUES ('noop', 2), ('other', 1)`)
			b.sql(`INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, 8)`)
		},
		"behind a busy lock key": func(b *bench) {
			b.claimed("lock_key='hot'")
			b.sql(`INSERT INTO onejob.tasks (kind, lock_key, priority) SELECT 'noop', 'hot', 5 FROM generate_series(1, 40)`)
			b.sql(`INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, 9)`)
		},
	} {
		for _, most := range []int{1, 64} {
			t.Run(fmt.Sprintf("%s, %d at once", name, most), func(t *testing.T) {
				t.Parallel()
				b := newBench(t)
				rows(b)
				got := 0
				for more := true; more && got < 9; {
					c, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop", "other"}, Max: most})
					if err != nil {
						t.Fatal(err)
					}
					got += len(c.Tasks)
					more = c.More
				}
				equal(t, "how many were claimed before there was no more", got, 9)
			})
		}
	}
}

// The lowest ID that there is stands in nobody's way.
func TestLowestID(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for _, priority := range []int{1000, 0, -1000} {
		b.sql(`INSERT INTO onejob.tasks (kind, priority) VALUES ('noop', $1)`, priority)
	}
	b.sql(`INSERT INTO onejob.tasks (id, kind, priority) OVERRIDING SYSTEM VALUE VALUES (-9223372036854775808, 'noop', 5)`)
	for i := range 4 {
		c, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Max: 1})
		if err != nil || len(c.Tasks) != 1 {
			t.Fatalf("claim %d: %d tasks, %v", i, len(c.Tasks), err)
		}
	}
}

// With more limits in use than are remembered, those used longest ago are forgotten, and not where
// claims without one go on.
func TestManyLimitsForgetNoOthers(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	sort := func(limit string) tasks.Claim { return tasks.Claim{Kinds: []string{"noop"}, Limit: limit} }
	store.Remember(b.Store, sort(""))
	for i := range 300 { // and no claim without a limit meanwhile
		store.Remember(b.Store, sort(fmt.Sprint("limit ", i)))
	}
	n, is := store.Remembered(b.Store, sort(""))
	equal(t, "sorts", n, 256)
	equal(t, "whether that without a limit is one", is, true)
	for i, want := range map[int]bool{299: true, 250: true, 10: false} {
		n, is := store.Remembered(b.Store, sort(fmt.Sprint("limit ", i)))
		equal(t, fmt.Sprintf("whether limit %d is one of %d", i, n), is, want)
	}
}
