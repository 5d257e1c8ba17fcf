package store_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"

	"onejob/internal/servers"
	"onejob/internal/testenv"
	"onejob/store"
	"onejob/tasks"
)

// Rows that somebody has locked cost no lock of ours: Postgres' table of locks is for all
// sessions together, and none gets any more when it is full (SQLSTATE 53200).
func TestClaimsBesideAnUpdateOfManyKeys(t *testing.T) {
	t.Parallel()
	_, db := testenv.OwnPostgresWith(t, servers.PostgresConfig{Settings: map[string]string{"max_locks_per_transaction": "10", "max_connections": "20"}})
	b := &bench{t: t, Store: open(t, store.Config{DSN: db.DSN, MaxConns: 2}), pool: db.Pool(t), dsn: db.DSN, session: uuid.NewString()}
	if err := b.Migrate(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	b.join()
	const locked = 20_000
	b.sql(`INSERT INTO onejob.tasks (kind, priority, lock_key) SELECT 'noop', i % 4, 'key ' || i FROM generate_series(1, $1) i`, locked)
	tx, err := b.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	if _, err := tx.Exec(t.Context(), `UPDATE onejob.tasks SET payload = '1'`); err != nil {
		t.Fatal(err)
	}
	free := b.insert("lock_key='free'")
	began := time.Now()
	for tries := 1; ; tries++ {
		claimed, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Max: 64})
		if err != nil {
			t.Fatalf("claim %d: %v", tries, err)
		}
		if len(claimed.Tasks) > 0 {
			equal(t, "what was claimed", ids(claimed.Tasks), free)
			t.Logf("by claim %d, after %v", tries, time.Since(began))
			break
		}
		if time.Since(began) > time.Minute {
			t.Fatal("nothing was claimed")
		}
	}
}
