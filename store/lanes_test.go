package store_test

import (
	"fmt"
	"testing"

	"onejob/tasks"
)

// Lanes whose rows cannot be had are in nobody's way, however many they are: one for each
// priority here, and the lock key of all of them is busy.
func TestManyBusyLanesHideNothing(t *testing.T) {
	t.Parallel()
	for _, limit := range []string{"", "l"} {
		for _, most := range []int{1, 16, 100} {
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
