package scale_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"onejob/store"
	"onejob/tasks"
)

// claims claims until there is nothing more or enough, and returns how many tasks
// that gave and the longest of the claims.
func claims(b *testing.B, db *store.Store, c tasks.Claim) (got int, longest time.Duration) {
	b.Helper()
	c.Session, c.Replica, c.Kinds = "00000000-0000-0000-0000-000000000001", "replica-1", []string{"noop"}
	most := c.Max
	for more := true; more && got < most; {
		c.Max = most - got
		began := time.Now()
		claimed, err := db.Claim(b.Context(), c)
		longest = max(longest, time.Since(began))
		check(b, err)
		got += len(claimed.Tasks)
		more = claimed.More
	}
	return got, longest
}

func median(list []time.Duration) time.Duration {
	slices.Sort(list)
	return list[len(list)/2]
}

// BenchmarkClaimFromManyLanes measures a claim of 64 from 200,000 due rows that
// stand in so many priorities, or queues.
func BenchmarkClaimFromManyLanes(b *testing.B) {
	for _, spread := range []struct{ name, columns string }{
		{"OneLane", `0, 'default'`},
		{"Priorities100", `i % 100, 'default'`},
		{"Priorities2000", `i % 2000 - 1000, 'default'`},
		{"Queues100", `0, 'queue ' || i % 100`},
		{"Queues2000", `0, 'queue ' || i % 2000`},
		{"Queues2000InTurn", `0, 'queue ' || i / 100`}, // each queue's rows at once
	} {
		b.Run(spread.name, func(b *testing.B) {
			db := database(b, nil)
			claims(b, db, tasks.Claim{Max: 64}) // its plan is that of an empty table
			execute(b, db, `INSERT INTO onejob.tasks (kind, run_at, priority, queue)
SELECT 'noop', now() - interval '1 hour' + i * interval '1 ms', `+spread.columns+` FROM generate_series(1, 200000) i`)
			b.ReportMetric(milliseconds(claimsOf(b, db, 64, 50)), "ms/claim-of-64")
		})
	}
}

// claimsOf returns the median time of n claims of so many tasks each.
func claimsOf(b *testing.B, db *store.Store, size, n int) time.Duration {
	var took []time.Duration
	for b.Loop() {
		for range n {
			began := time.Now()
			got, _ := claims(b, db, tasks.Claim{Max: size})
			took = append(took, time.Since(began))
			if got != size {
				b.Fatalf("claimed %d", got)
			}
		}
	}
	return median(took)
}

// BenchmarkClaimSizes measures claims of so many from 200,000 due rows of one lane, and how many
// tasks a second that is if one claim follows the other. Nearly all of that time they hold the claim lock.
func BenchmarkClaimSizes(b *testing.B) {
	for _, size := range []int{1, 4, 16, 64, 128, 512} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			db := database(b, nil)
			claims(b, db, tasks.Claim{Max: size}) // its plan is that of an empty table
			execute(b, db, `INSERT INTO onejob.tasks (kind, run_at) SELECT 'noop', now() - interval '1 hour' + i * interval '1 ms' FROM generate_series(1, 200000) i`)
			took := claimsOf(b, db, size, 100)
			b.ReportMetric(milliseconds(took), "ms/claim")
			b.ReportMetric(float64(size)/took.Seconds(), "tasks/s")
		})
	}
}

// BenchmarkClaimBesideFutureLanes measures a claim of 64 from 20,000 due rows of one
// queue beside so many queues of the same priority, each with one row that is due
// tomorrow. A claim asks for the first row of each of them.
func BenchmarkClaimBesideFutureLanes(b *testing.B) {
	for _, queues := range []int{0, 1000, 10_000, 100_000} {
		b.Run(fmt.Sprint(queues), func(b *testing.B) {
			db := database(b, nil)
			claims(b, db, tasks.Claim{Max: 64}) // its plan is that of an empty table
			execute(b, db, fmt.Sprintf(`INSERT INTO onejob.tasks (kind, run_at, queue)
SELECT 'noop', now() + interval '1 day', 'queue ' || i FROM generate_series(1, %d) i`, queues))
			execute(b, db, `INSERT INTO onejob.tasks (kind, run_at) SELECT 'noop', now() - interval '1 hour' + i * interval '1 ms' FROM generate_series(1, 20000) i`)
			b.ReportMetric(milliseconds(claimsOf(b, db, 64, 10)), "ms/claim-of-64")
		})
	}
}

// BenchmarkDeepLockKey measures claims under a limit with 100,000 rows that wait for
// one lock key beside 3,000 rows of limits
// that nobody knows: the longest claim until a row behind them is found, and a look,
// which asks what is due and claims in vain, from then on.
func BenchmarkDeepLockKey(b *testing.B) {
	db := database(b, nil)
	c := tasks.Claim{Max: 1, Limit: "limit"}
	execute(b, db, `INSERT INTO onejob.tasks (kind, limit_name, lock_key, run_at)
SELECT 'noop', 'limit', 'deep', now() - interval '1 hour' FROM generate_series(1, 100001) i`)
	execute(b, db, `INSERT INTO onejob.tasks (kind, limit_name) SELECT 'noop', 'unknown-' || i FROM generate_series(1, 3000) i`)
	if got, _ := claims(b, db, c); got != 1 {
		b.Fatalf("claimed %d", got)
	}
	var looks, longest []time.Duration
	for b.Loop() {
		for range 20 {
			execute(b, db, `INSERT INTO onejob.tasks (kind, limit_name, lock_key) VALUES ('noop', 'limit', 'other')`)
			got, took := claims(b, db, c)
			if got != 1 {
				b.Fatalf("claimed %d", got)
			}
			execute(b, db, `UPDATE onejob.tasks SET status = 'succeeded', session = NULL, finished_at = now() WHERE status = 'running' AND lock_key = 'other'`)
			longest = append(longest, took)
			began := time.Now()
			_, err := db.DueLimits(b.Context(), tasks.Claim{Kinds: []string{"noop"}}, []string{"limit"})
			check(b, err)
			claims(b, db, c)
			looks = append(looks, time.Since(began))
		}
	}
	b.ReportMetric(milliseconds(slices.Max(longest)), "ms/longest-claim")
	b.ReportMetric(milliseconds(median(looks)), "ms/look")
}
