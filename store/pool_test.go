package store_test

import (
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"onejob/internal/testenv"
	"onejob/store"
)

// bothWays runs a test on a store that is connected directly, and on one whose
// connections all lead through a transaction pooler. The database has the settings.
func bothWays(t *testing.T, settings []string, test func(t *testing.T, db *testenv.DB, cfg store.Config)) {
	t.Parallel()
	database := func(t *testing.T) *testenv.DB {
		db := testenv.Postgres(t)
		for _, setting := range settings {
			if _, err := db.Pool(t).Exec(t.Context(), `ALTER DATABASE `+db.Name+` SET `+setting); err != nil {
				t.Fatal(err)
			}
		}
		return db
	}
	t.Run("Direct", func(t *testing.T) {
		t.Parallel()
		db := database(t)
		test(t, db, store.Config{DSN: db.DSN})
	})
	t.Run("ThroughAPooler", func(t *testing.T) {
		t.Parallel()
		db := database(t)
		test(t, db, store.Config{DSN: testenv.Pooler(t, db, 3)})
	})
}

func TestSettingsDoNotDependOnTheDatabase(t *testing.T) {
	settings := []string{`default_transaction_isolation = serializable`, `search_path = public, pg_catalog`, `synchronous_commit = off`,
		`DateStyle = 'SQL, DMY'`, `IntervalStyle = iso_8601`, `standard_conforming_strings = off`, `client_encoding = LATIN1`}
	bothWays(t, settings, func(t *testing.T, db *testenv.DB, cfg store.Config) {
		s := open(t, cfg)
		for range 3 { // a pooler's connections, too
			for setting, want := range map[string]string{
				"transaction_isolation": "read committed",
				"search_path":           "pg_catalog, pg_temp",
				"tcp_user_timeout":      "5000",

				"synchronous_commit":          "on",
				"DateStyle":                   "ISO, DMY",
				"IntervalStyle":               "postgres",
				"standard_conforming_strings": "on",
				"client_encoding":             "UTF8",
			} {
				values, err := store.SettingsOf(t.Context(), s, setting)
				if err != nil {
					t.Fatal(err)
				}
				for way, got := range values {
					equal(t, setting+" by "+way, got, want)
				}
			}
		}
		ms, err := store.OurTimeouts(t.Context(), s)
		if err != nil || !slices.Equal(ms, []int{5_000, 5_000}) {
			t.Errorf("TCP_USER_TIMEOUT of our side is %v ms: %v", ms, err)
		}

		// Strangers who share the pooler find what the database says.
		others := db.Pool(t)
		if cfg.DSN != db.DSN {
			pool, err := pgxpool.New(t.Context(), cfg.DSN+"&default_query_exec_mode=exec")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(pool.Close)
			others = pool
		}
		for range 10 {
			var left string
			if err := others.QueryRow(t.Context(), `
SELECT concat_ws(' ', current_setting('default_transaction_isolation'), current_setting('search_path'), current_setting('synchronous_commit'),
                      current_setting('DateStyle'), current_setting('IntervalStyle'), current_setting('standard_conforming_strings'), current_setting('client_encoding'))`).Scan(&left); err != nil {
				t.Fatal(err)
			}
			equal(t, "what others find", left, "serializable public, pg_catalog off SQL, DMY iso_8601 off LATIN1")
		}
	})
}

// A client that is frozen while the server sends it an answer would keep the row
// locks of its transaction for as long as it is frozen.
func TestTheServerEndsAFrozenClient(t *testing.T) {
	t.Parallel()
	db := testenv.Postgres(t)
	s := open(t, store.Config{DSN: db.DSN})
	conn, err := s.Pool().Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	pid := conn.Conn().PgConn().PID()
	rows, err := conn.Query(t.Context(), `SELECT pg_catalog.pg_advisory_xact_lock(1), pg_catalog.repeat('x', 100000) FROM pg_catalog.generate_series(1, 10000)`)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	defer rows.Close()
	// Nobody reads.
	watch := db.Pool(t)
	testenv.Eventually(t, 2*time.Minute, "the server ends the connection", func() bool {
		var n int
		err := watch.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = $1`, pid).Scan(&n)
		return err == nil && n == 0
	})
}
