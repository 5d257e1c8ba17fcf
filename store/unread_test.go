package store_test

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"testing"
	"time"

	"onejob/internal/testenv/proxy"
	"onejob/store"
	"onejob/tasks"
)

// incompressible returns n characters that Postgres cannot compress to less than half.
func incompressible(n int) string {
	random := make([]byte, n/2)
	_, _ = rand.Read(random)
	return hex.EncodeToString(random)
}

// Postgres becomes unreachable while a claim reads payloads. The claim does not wait for it once for
// each row: a replica that stops waits for the claim. All rows stay the session's own, where Held
// finds those that the claim did not return.
func TestAClaimThatCannotReadReturns(t *testing.T) {
	t.Parallel()
	const rows, timeout = 40, 2 * time.Second
	b := newBench(t)
	way, dsn := b.throughProxy()
	far := *b
	far.Store = open(t, store.Config{DSN: dsn, Timeout: timeout})
	equal(t, "tasks before there are any", len(far.claimMax(1)), 0) // its statements are prepared
	b.sql(`INSERT INTO onejob.tasks (kind, payload) SELECT 'noop', to_jsonb($1::text) FROM generate_series(1, $2)`, incompressible(1<<20), rows)
	way.Delay(proxy.Down, 3*time.Millisecond) // for each 32 KiB: to read all rows would take seconds
	type answer struct {
		tasks.Claimed
		err error
	}
	answered := make(chan answer, 1)
	go func() {
		claimed, err := far.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "far", Kinds: []string{"noop"}, Max: rows})
		answered <- answer{claimed, err}
	}()
	b.eventually("the answer to the claim was there, and payloads are read", func() bool {
		return b.one(`
SELECT count(*)
  FROM pg_stat_activity
 WHERE datname = current_database()
   AND query LIKE '%octet_length(b.body)%'
   AND query NOT LIKE '%onejob.claimed%'
   AND pid <> pg_backend_pid()`) != "0"
	})
	equal(t, "the rows that are claimed", b.one(`SELECT count(*) FROM onejob.tasks WHERE status = 'running'`), fmt.Sprint(rows))
	way.Cut(proxy.Both)
	var claimed answer
	select {
	case claimed = <-answered:
	case <-time.After(15 * timeout):
		t.Fatal("the claim waits for Postgres again and again")
	}
	if claimed.err == nil {
		t.Fatalf("the claim has read %d payloads, and no error", len(claimed.Tasks))
	}
	way.Heal(proxy.Both)
	var held []*tasks.Task
	b.eventually("Postgres answers again", func() bool {
		var err error
		held, err = far.Held(t.Context(), b.session)
		return err == nil
	})
	equal(t, "the rows of the session", len(held), rows)
	for _, task := range claimed.Tasks {
		if len(task.Payload) < 1<<20 {
			t.Errorf("task %d has %d bytes of its payload", task.ID, len(task.Payload))
		}
	}
}

// Rows that a claim has no room for are pending again when it returns, all by one statement, whose
// transaction is the last one of each row. One that another transaction has locked keeps no other
// row from it, and stays the session's own.
func TestRowsWithoutRoomAreRequeuedTogether(t *testing.T) {
	t.Parallel()
	for _, locked := range []int{0, 1} {
		t.Run(fmt.Sprintf("%d locked", locked), func(t *testing.T) {
			t.Parallel()
			const rows = 30
			b := newBench(t)
			b.sql(`INSERT INTO onejob.tasks (kind, priority, payload) SELECT 'noop', -i, to_jsonb($1::text) FROM generate_series(1, $2) i`, incompressible(1<<20), rows)
			var last int64 // by id, and of the least priority
			claimed, err := b.Claim(t.Context(), tasks.Claim{
				Session: b.session, Replica: "one", Kinds: []string{"noop"}, Max: rows, MaxBytes: 1 << 20,
				Taken: func(list []tasks.Taken) {
					for _, r := range list {
						last = max(last, r.ID)
					}
					if locked == 0 {
						return
					}
					// The commit, which Postgres has been sent, lets go of the row.
					tx, err := b.pool.Begin(t.Context())
					if err != nil {
						t.Fatal(err)
					}
					t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
					if _, err := tx.Exec(t.Context(), `SELECT FROM onejob.tasks WHERE id = $1 FOR UPDATE`, last); err != nil {
						t.Fatal(err)
					}
				},
			})
			if (err != nil) != (locked > 0) {
				t.Errorf("with %d rows locked: %v", locked, err)
			}
			if len(claimed.Tasks) != 1 {
				t.Fatalf("%d rows were read, want 1 (%v)", len(claimed.Tasks), err)
			}
			equal(t, "whether there may be more", claimed.More, true)
			equal(t, "the rows that are pending", b.one(`SELECT count(*) FROM onejob.tasks WHERE status = 'pending' AND attempt = 0`), fmt.Sprint(rows-1-locked))
			equal(t, "the transactions that they were requeued by", b.one(`SELECT count(DISTINCT xmin::text) FROM onejob.tasks WHERE status = 'pending'`), "1")
			held, err := b.Held(t.Context(), b.session)
			if err != nil {
				t.Fatal(err)
			}
			equal(t, "the rows of the session", len(held), 1+locked)
			for _, task := range held {
				if task.ID != claimed.Tasks[0].ID && task.ID != last {
					t.Errorf("task %d is the session's own, and was neither read nor locked", task.ID)
				}
			}
		})
	}
}
