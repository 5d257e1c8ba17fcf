package store_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"onejob/internal/testenv"
	"onejob/tasks"
)

// Rows are found again by their place in the table, while others change them, delete them and
// insert new ones into the places that become free. No claim may get another row's.
func TestClaimsBesideRowsThatMove(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.join()
	b.sql(`ALTER TABLE onejob.tasks SET (fillfactor = 100, autovacuum_enabled = false)`)
	people, err := pgxpool.New(t.Context(), b.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer people.Close()
	ctx, stop := context.WithTimeout(t.Context(), 2*time.Minute)
	defer stop()
	var group sync.WaitGroup
	for _, sql := range []string{
		`UPDATE onejob.tasks SET payload = jsonb_build_object('changed', random()) WHERE id IN (SELECT id FROM onejob.tasks WHERE status = 'pending' ORDER BY random() LIMIT 20)`,
		`DELETE FROM onejob.tasks WHERE status IN ('succeeded', 'pending') AND id IN (SELECT id FROM onejob.tasks WHERE status IN ('succeeded', 'pending') ORDER BY random() LIMIT 20)`,
		`INSERT INTO onejob.tasks (kind, priority) SELECT 'noop', i % 3 FROM generate_series(1, 30) i`,
		`INSERT INTO onejob.tasks (kind) SELECT 'other' FROM generate_series(1, 10) i`,
		`VACUUM onejob.tasks`,
	} {
		group.Go(func() {
			for ctx.Err() == nil {
				var pg *pgconn.PgError
				if _, err := people.Exec(ctx, sql); err != nil && ctx.Err() == nil && !(errors.As(err, &pg) && pg.Code == "40P01") { // they deadlock with each other
					t.Errorf("%s: %v", sql, err)
					return
				}
			}
		})
	}
	t.Cleanup(group.Wait)
	claimed := map[int64]int64{} // fence by id
	const enough = 100
	for began := time.Now(); ctx.Err() == nil && (len(claimed) < enough || time.Since(began) < 5*time.Second); {
		c, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Max: 16})
		if err != nil {
			t.Fatal(err)
		}
		for _, task := range c.Tasks {
			if fence, again := claimed[task.ID]; again {
				t.Errorf("task %d was claimed under fence %d, and again under %d", task.ID, fence, task.Fence)
			}
			claimed[task.ID] = task.Fence
			var err error
			testenv.Eventually(t, time.Minute, "nobody has locked the row any more", func() bool { // a replica tries again too
				err = b.Complete(t.Context(), succeeded(task))
				return err == nil || errors.Is(err, tasks.ErrRefused)
			})
			if err != nil {
				t.Errorf("the completion of task %d is refused: %v", task.ID, err)
			}
		}
	}
	stop()
	group.Wait()
	if len(claimed) < enough {
		t.Errorf("only %d tasks were claimed", len(claimed))
	}
	equal(t, "rows that succeeded in another attempt than their first", b.one(`SELECT count(*) FROM onejob.tasks WHERE status = 'succeeded' AND attempt > 1`), "0")
	equal(t, "rows that run and nobody has claimed", b.one(`SELECT count(*) FROM onejob.tasks WHERE status = 'running'`), "0")
	t.Logf("%d tasks were claimed", len(claimed))
}
