package store_test

import (
	"context"
	"net/url"
	"testing"
	"time"

	"github.com/google/uuid"

	"onejob/internal/testenv"
	"onejob/internal/testenv/proxy"
	"onejob/store"
	"onejob/tasks"
)

// A replica that is frozen, or cut off, while it receives the payloads of what it has
// claimed holds nothing that others wait for: no turn, no row, no transaction.
func TestAStuckClaimHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	address, err := url.Parse(b.dsn)
	if err != nil {
		t.Fatal(err)
	}
	way, err := proxy.New(address.Host)
	if err != nil {
		t.Fatal(err)
	}
	defer way.Close()
	address.Host = way.Addr()
	query := address.Query()
	query.Set("application_name", "stuck")
	address.RawQuery = query.Encode()
	stuck := *b
	stuck.Store = open(t, store.Config{DSN: address.String(), MaxConns: 1, Timeout: 10 * time.Minute})
	equal(t, "tasks before there are any", len(stuck.claimMax(1)), 0) // its statements are prepared
	// Compressed a payload has some 12 KB, so that all of them come with the claim.
	b.sql(`INSERT INTO onejob.tasks (kind, priority, payload)
SELECT 'noop', 1, jsonb_build_object('a', repeat('a', 1000000)) FROM generate_series(1, 20)`)
	b.sql(`INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, 4)`)
	if _, err := stuck.Sessions(t.Context(), b.session); err != nil { // the pool need not look whether the connection is alive
		t.Fatal(err)
	}
	way.Cut(proxy.Down)
	answered := make(chan int, 1)
	testenv.Go(t, func() {
		claimed, err := stuck.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "stuck", Kinds: []string{"noop"}, Max: 20})
		if err != nil {
			t.Errorf("the stuck claim: %v", err)
		}
		answered <- len(claimed.Tasks)
	})
	testenv.Eventually(t, time.Minute, "the answer does not come through", func() bool {
		return b.one(`SELECT count(*) FROM pg_stat_activity WHERE application_name = 'stuck' AND wait_event = 'ClientWrite'`) == "1"
	})
	equal(t, "locks on rows, keys and turns", b.one(`
SELECT count(*)
  FROM pg_locks
 WHERE database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND (locktype = 'advisory' OR mode NOT IN ('AccessShareLock', 'ExclusiveLock'))
   AND pid = (SELECT pid FROM pg_stat_activity WHERE application_name = 'stuck')`), "0")
	equal(t, "rows that are claimed", b.one(`SELECT count(*) FROM onejob.tasks WHERE status = 'running'`), "20")
	equal(t, "tasks that another claim gets", len(b.claimMax(9)), 4)
	if b.TurnStuck() {
		t.Error("the turn is held to be stuck")
	}
	way.Heal(proxy.Both)
	equal(t, "tasks that the stuck claim gets in the end", <-answered, 20)
}

// Anybody who may connect can take the lock that stands for the turn. Claims wait for
// it once for long, and then for a moment each time until they have had it again.
func TestATurnThatNeverComes(t *testing.T) {
	t.Parallel()
	t.Run("ByItsOwnTimeout", func(t *testing.T) { t.Parallel(); testStuckTurn(t, newBench(t)) })
	t.Run("ByThatOfTheRole", func(t *testing.T) {
		t.Parallel()
		db := migrated.Postgres(t)
		own := testenv.DB{Name: db.Name, DSN: db.DSN + "&statement_timeout=0"} // what the test does may take longer
		b := &bench{Store: open(t, store.Config{DSN: db.DSN}), t: t, pool: own.Pool(t), dsn: db.DSN, session: uuid.NewString()}
		b.sql(`ALTER DATABASE ` + db.Name + ` SET statement_timeout = '1s'`)
		testStuckTurn(t, b)
	})
}

func testStuckTurn(t *testing.T, b *bench) {
	b.sql(`INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, 16)`)
	conn, err := b.pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	exec := func(sql string) {
		if _, err := conn.Exec(context.WithoutCancel(t.Context()), sql); err != nil {
			t.Fatal(err)
		}
	}
	exec(`SELECT pg_advisory_lock(hashtextextended('onejob claims ', 20180914))`)
	for n := range 3 {
		equal(t, "tasks that a claim gets", len(b.claimMax(4)), 4)
		if !b.TurnStuck() {
			t.Errorf("after claim %d the turn is not held to be stuck", n)
		}
	}
	exec(`SELECT pg_advisory_unlock_all()`)
	left := 0
	b.eventually("a claim has its turn", func() bool { // at once, unless the machine stands still for longer than it waits
		left += len(b.claimMax(8))
		return !b.TurnStuck()
	})
	equal(t, "tasks that are left", left, 4)
}
