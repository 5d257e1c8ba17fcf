package store_test

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/google/uuid"
	"pgregory.net/rapid"

	"onejob/store"
	"onejob/tasks"
)

// modelRow is a row of a random table, as the oracle sees it.
type modelRow struct {
	id       int64
	kind     string
	queue    string
	priority int
	key      string
	limit    string
	age      int // seconds since it is due; below zero it is of the future
	running  bool
}

func (r modelRow) lockKey() string {
	if r.key != "" {
		return r.key
	}
	return fmt.Sprint(r.id)
}

// oracle returns what a claim takes: the most urgent rows that are due, served and
// whose lock key is free, of each key the first.
func oracle(table []modelRow, c tasks.Claim) (ids []int64) {
	busy := map[string]bool{}
	for _, r := range table {
		if r.running {
			busy[r.lockKey()] = true
		}
	}
	waiting := slices.Clone(table)
	slices.SortFunc(waiting, func(a, b modelRow) int {
		return cmp.Or(cmp.Compare(b.priority, a.priority), cmp.Compare(b.age, a.age), cmp.Compare(a.id, b.id))
	})
	for _, r := range waiting {
		served := slices.Contains(c.Kinds, r.kind) && (len(c.Queues) == 0 || slices.Contains(c.Queues, r.queue))
		if r.running || r.age < 0 || !served || r.limit != c.Limit || busy[r.lockKey()] || len(ids) == c.Max {
			continue
		}
		busy[r.lockKey()] = true
		ids = append(ids, r.id)
	}
	return ids
}

// A claim takes what the oracle says, in its order, whatever the table looks like:
// priorities, queues, kinds, limits, busy and free lock keys, rows of the future and
// of kinds that nobody runs.
func TestClaimsAgreeWithTheOracle(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	rapid.Check(t, func(r *rapid.T) {
		b.sql(`TRUNCATE onejob.tasks`)
		b.Forget()
		row := rapid.Custom(func(r *rapid.T) modelRow {
			return modelRow{
				kind:     rapid.SampledFrom([]string{"noop", "noop", "other", "mystery"}).Draw(r, "kind"),
				queue:    rapid.SampledFrom([]string{"a", "b", "c"}).Draw(r, "queue"),
				priority: rapid.SampledFrom([]int{-1000, 0, 0, 0, 1, 1000}).Draw(r, "priority"),
				key:      rapid.SampledFrom([]string{"", "", "k1", "k1", "k2", "k3", "k4", "1", "2"}).Draw(r, "key"),
				limit:    rapid.SampledFrom([]string{"", "", "", "l"}).Draw(r, "limit"),
				age:      rapid.IntRange(-3, 40).Draw(r, "age") * rapid.SampledFrom([]int{1, 3600}).Draw(r, "scale"),
				running:  rapid.IntRange(0, 9).Draw(r, "running") == 0,
			}
		})
		// Some rows come by the hundred: they stand in the way of the others.
		table := rapid.SliceOfN(row, 0, 30).Draw(r, "rows")
		if crowd := rapid.IntRange(0, 3).Draw(r, "crowd"); crowd > 0 && len(table) > 0 {
			for i := range crowd * 60 {
				again := table[i%crowd%len(table)]
				again.running = false
				table = append(table, again)
			}
		}
		busy := map[string]bool{}
		for i := range table {
			m := &table[i]
			if m.running && m.key != "" && busy[m.key] || m.age < 0 {
				m.running = false
			}
			busy[m.key] = busy[m.key] || m.running
			m.id = int64(1000 + i)
		}
		insert(t, b, table)

		c := tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop", "other"}}
		if rapid.Bool().Draw(r, "some queues") {
			c.Queues = []string{"a", "c"}
		}
		for range rapid.IntRange(1, 4).Draw(r, "claims") {
			c.Limit = rapid.SampledFrom([]string{"", "", "l"}).Draw(r, "limit")
			c.Max = rapid.IntRange(1, 70).Draw(r, "max")
			if rapid.Bool().Draw(r, "after idleness") {
				store.Idle(b.Store, c)
			}
			want := oracle(table, c)
			var got []int64
			var held []*tasks.Task
			for more := true; more && len(got) < c.Max; {
				rest := c
				rest.Max -= len(got)
				claimed, err := b.Claim(t.Context(), rest)
				if err != nil {
					r.Fatal(err)
				}
				for _, task := range claimed.Tasks {
					got, held = append(got, task.ID), append(held, task)
				}
				more = claimed.More
			}
			if !slices.Equal(got, want) {
				r.Fatalf("of %d rows, a claim of %d took %v, not %v", len(table), c.Max, got, want)
			}
			for i := range table {
				table[i].running = table[i].running || slices.Contains(got, table[i].id)
			}
			// Some end, and their keys are free.
			for _, task := range held {
				if rapid.Bool().Draw(r, "ends") {
					if err := b.Complete(t.Context(), succeeded(task)); err != nil {
						r.Fatal(err)
					}
					table = slices.DeleteFunc(table, func(m modelRow) bool { return m.id == task.ID })
				}
			}
		}
	})
}

func insert(t *testing.T, b *bench, table []modelRow) {
	t.Helper()
	for _, m := range table {
		status, session, fence := "pending", any(nil), any(nil)
		if m.running {
			status, session, fence = "running", uuid.NewString(), m.id
		}
		if _, err := b.pool.Exec(context.WithoutCancel(t.Context()), `
INSERT INTO onejob.tasks (id, kind, queue, priority, lock_key, limit_name, run_at, status, session, replica, fence, started_at)
OVERRIDING SYSTEM VALUE VALUES ($1, $2, $3, $4, nullif($5, ''), nullif($6, ''), date_trunc('day', now()) - $7 * interval '1 second', $8::text, $9::uuid,
       CASE WHEN $8 = 'running' THEN 'r' END, $10::bigint, CASE WHEN $8 = 'running' THEN now() END)`,
			m.id, m.kind, m.queue, m.priority, m.key, m.limit, future(m.age), status, session, fence); err != nil {
			t.Fatal(err)
		}
	}
}

// future keeps ages as they are, and moves what is due in seconds to a day from now.
func future(age int) int {
	if age < 0 {
		return age - 2*24*3600
	}
	return age
}
