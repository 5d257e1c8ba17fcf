package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"onejob/chaos/checker"
	"onejob/internal/testenv"
	"onejob/store"
	"onejob/tasks"
)

// tables are those of onejob and of the harness, in a database of the test's own,
// which the operator of the cluster looks at.
func tables(t *testing.T) *cluster {
	t.Helper()
	db := testenv.Postgres(t)
	s, err := store.Open(store.Config{DSN: db.DSN})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.Migrate(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	cfg, err := pgxpool.ParseConfig(db.DSN)
	if err != nil {
		t.Fatal(err)
	}
	cfg.ConnConfig.RuntimeParams["application_name"] = checker.Operator
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if _, err := pool.Exec(t.Context(), schema()); err != nil {
		t.Fatal(err)
	}
	return &cluster{operator: pool, say: t.Logf}
}

func value[T any](t *testing.T, c *cluster, sql string, args ...any) (v T) {
	t.Helper()
	if err := c.operator.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

// The rows lie on both sides of what the table admits, and every one that it
// admits is noted.
func TestHostileRows(t *testing.T) {
	t.Parallel()
	c := tables(t)
	h := &fault{c: c, rand: rand.New(rand.NewPCG(1, 1))}
	accepted, refused := 0, map[string]bool{}
	for range 600 {
		switch err := h.insertOneHostile(t.Context()); {
		case err == nil:
			accepted++
		case refusesRow(err):
			_, constraint, _ := strings.Cut(err.Error(), "constraint ")
			refused[constraint] = true
		default:
			t.Fatal(err)
		}
	}
	if accepted < 200 || len(refused) < 8 {
		t.Errorf("%d rows were accepted, and %d rules broken: %v", accepted, len(refused), refused)
	}
	if n := value[int](t, c, `SELECT count(*) FROM chaos.added JOIN onejob.tasks ON id = task WHERE hostile`); n != accepted {
		t.Errorf("%d rows were noted of %d", n, accepted)
	}
	for _, status := range anyStatus {
		if value[int](t, c, `SELECT count(*) FROM onejob.tasks WHERE status = $1`, status) == 0 {
			t.Errorf("no row is %s", status)
		}
	}
	if err := c.endHostile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := value[int](t, c, `SELECT count(*) FROM onejob.tasks WHERE status = 'pending'`); n != 0 {
		t.Errorf("%d are pending after all", n)
	}
}

// Every change of a row by hand can be made in every status that it is for, is noted
// with it, and reaches the checker.
func TestTouches(t *testing.T) {
	t.Parallel()
	c := tables(t)
	for _, touch := range touches {
		for _, status := range touch.statuses {
			columns, values := "kind, status", "'noop', $1"
			switch status {
			case "running":
				columns, values = columns+", session, replica, fence, started_at", values+", gen_random_uuid(), 'r', 1, now()"
			case "succeeded", "failed", "cancelled":
				columns, values = columns+", finished_at", values+", now()"
			}
			id := value[int64](t, c, fmt.Sprintf(`INSERT INTO onejob.tasks (%s) VALUES (%s) RETURNING id`, columns, values), status)
			if _, err := c.operator.Exec(t.Context(), touch.statement(), id, touch.what); err != nil {
				t.Fatalf("%s, %s: %v", touch.what, status, err)
			}
			var e checker.Evidence
			if err := c.readEvidence(t.Context(), &e); err != nil {
				t.Fatal(err)
			}
			noted := slices.Contains(e.Touched, checker.Touched{Task: id, What: touch.what})
			if want := touch.what != checker.Retried || status != "running"; noted != want {
				t.Errorf("%s, %s: noted %v, want %v", touch.what, status, noted, want)
			}
			deleted := slices.ContainsFunc(e.Transitions, func(tr checker.Transition) bool {
				return tr.Task == id && tr.From == status && tr.To == checker.Deleted && tr.By == checker.Operator
			})
			if want := touch.what == checker.Deleted; deleted != want {
				t.Errorf("%s, %s: a deletion was noted: %v, want %v", touch.what, status, deleted, want)
			}
		}
	}
}

// A claim is known by the statements that are in it: if those change, no claim is
// ever frozen.
func TestClaimsAreSeen(t *testing.T) {
	t.Parallel()
	c := tables(t)
	cfg := c.operator.Config().ConnConfig.Copy()
	cfg.RuntimeParams["application_name"] = "locker"
	const insert = `INSERT INTO onejob.tasks (kind, payload) SELECT 'noop', payload FROM chaos.large, generate_series(1, 32)`
	// Each lock keeps another statement of a claim waiting.
	for name, lock := range map[string]string{
		"the turn":     `SELECT pg_advisory_xact_lock(hashtextextended('onejob claims ', 20180914::bigint))`,
		"the choice":   `LOCK TABLE onejob.tasks`,
		"to take":      `LOCK TABLE onejob.tasks IN SHARE ROW EXCLUSIVE MODE`,
		"the payloads": ``,
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := pgx.ConnectConfig(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close(t.Context())
			if lock != "" {
				for _, sql := range []string{insert, `BEGIN`, lock} {
					if _, err := conn.Exec(t.Context(), sql); err != nil {
						t.Fatal(err)
					}
				}
			}
			s, err := store.Open(store.Config{DSN: c.operator.Config().ConnString() + "&application_name=claimer"})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			claiming, stop := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() { // claims until one was seen
				defer close(done)
				for claiming.Err() == nil {
					if lock == "" {
						_, _ = c.operator.Exec(claiming, insert)
					}
					_, _ = s.Claim(claiming, tasks.Claim{Session: uuid.NewString(), Replica: "r", Kinds: []string{"noop"}, Max: 32})
				}
			}()
			testenv.Eventually(t, time.Minute, "the claim is seen", func() bool {
				name, _ := c.claiming(t.Context(), []string{"claimer"}, lock == "")
				return name == "claimer"
			})
			stop()
			<-done
		})
	}
}
