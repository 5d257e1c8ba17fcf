package store_test

import (
	"fmt"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/tasks"
)

// What is taken is announced before the commit, and only what has a lock of its own and
// has ended no replica.
func TestTakenIsToldBeforeTheCommit(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`CREATE FUNCTION public.hold() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS $$ BEGIN PERFORM pg_catalog.pg_advisory_xact_lock_shared(4712); RETURN NULL; END $$`)
	b.sql(`CREATE CONSTRAINT TRIGGER hold AFTER UPDATE ON onejob.tasks DEFERRABLE INITIALLY DEFERRED
	          FOR EACH ROW WHEN (NEW.status = 'running') EXECUTE FUNCTION public.hold()`)
	_, end := openTransaction(t, b.dsn, `BEGIN`, `SELECT pg_advisory_xact_lock(4712)`)
	id := b.insert()
	b.insert("lock_key='shared'")
	crashed := b.insert()
	b.sql(`UPDATE onejob.tasks SET crashes = 1 WHERE id = $1::text::bigint`, crashed)

	told, done := make(chan []tasks.Taken, 1), make(chan tasks.Claimed, 1)
	testenv.Go(t, func() {
		claimed, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Max: 9,
			Taken: func(rows []tasks.Taken) { told <- rows }})
		if err != nil {
			t.Error(err)
		}
		done <- claimed
	})
	var rows []tasks.Taken
	select {
	case rows = <-told:
	case <-done:
		t.Fatal("the claim has returned although it cannot commit")
	case <-time.After(time.Minute):
		t.Fatal("nothing is announced before the commit")
	}
	equal(t, "the rows that are pending meanwhile", b.one(`SELECT count(*) FROM onejob.tasks WHERE status = 'pending'`), "3")
	end()
	claimed := <-done
	if len(claimed.Tasks) != 3 {
		t.Fatalf("%d tasks are claimed, want 3", len(claimed.Tasks))
	}
	if len(rows) != 1 || fmt.Sprint(rows[0].ID) != id || rows[0].Fence != claimed.Tasks[0].Fence {
		t.Errorf("announced were %v; the tasks are %s", rows, ids(claimed.Tasks))
	}
}
