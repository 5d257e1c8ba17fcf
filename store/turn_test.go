package store_test

import (
	"net/url"
	"testing"
	"time"

	"onejob/internal/proxy"
	"onejob/internal/testenv"
	"onejob/store"
	"onejob/tasks"
)

// A replica that is frozen, or cut off, in the middle of receiving what it has
// claimed keeps its turn and its rows. The others get what is left, after they
// have waited for their turn: once for long, and then for a moment each time.
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
	stuck.Store = open(t, store.Config{DSN: address.String(), MaxConns: 1, Timeout: time.Minute})
	equal(t, "tasks before there are any", len(stuck.claimMax(1)), 0) // its statements are prepared
	b.sql(`INSERT INTO onejob.tasks (kind, priority, payload)
SELECT 'noop', 1, jsonb_build_object('a', repeat('a', 1000000)) FROM generate_series(1, 32)`)
	b.sql(`INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, 12)`)
	if _, err := stuck.Sessions(t.Context(), b.session); err != nil { // the pool need not look whether the connection is alive
		t.Fatal(err)
	}
	way.Cut(proxy.Down)
	answered := make(chan error, 1)
	go func() {
		_, err := stuck.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "stuck", Kinds: []string{"noop"}, Max: 32})
		answered <- err
	}()
	testenv.Eventually(t, 10*time.Second, "the answer does not come through", func() bool {
		return b.one(`SELECT count(*) FROM pg_stat_activity WHERE application_name = 'stuck' AND wait_event = 'ClientWrite'`) == "1"
	})
	const turns = `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`
	equal(t, "turns that are taken", b.one(turns), "1")

	claim := func() time.Duration {
		began := time.Now()
		if n := len(b.claimMax(4)); n != 4 {
			t.Fatalf("another claim got %d tasks, not 4", n)
		}
		return time.Since(began)
	}
	if took := claim(); took > 10*time.Second {
		t.Errorf("another claim took %v", took)
	}
	if !b.TurnStuck() {
		t.Error("the turn is not held to be stuck")
	}
	for range 2 { // it need not wait that long again
		if took := claim(); took > 2*time.Second {
			t.Errorf("a claim after that took %v", took)
		}
	}
	way.Heal(proxy.Both)
	if err := <-answered; err != nil {
		t.Errorf("the stuck claim: %v", err)
	}
	testenv.Eventually(t, 10*time.Second, "the turn is over", func() bool {
		return b.one(turns) == "0"
	})
	equal(t, "tasks that are left", len(b.claimMax(4)), 0) // and this one had its turn
	if b.TurnStuck() {
		t.Error("the turn is still held to be stuck")
	}
}
