package worker_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/tasks"
	"onejob/worker"
)

// unknownFor is a kind that no replica can run now.
type unknownFor struct{}

func (unknownFor) Prepare(json.RawMessage) (tasks.Handler, error) { return nil, tasks.ErrUnknown }

// Rows that keep a replica waiting, far more than it has room for, keep no others: neither those
// without a limit, nor those under the only slot of theirs.
func TestRowsThatKeepWaitingTakeNoRoom(t *testing.T) {
	t.Parallel()
	const trigger = `CREATE TRIGGER bad BEFORE UPDATE ON onejob.tasks FOR EACH ROW WHEN (OLD.status = 'running' AND NEW.priority = 7) EXECUTE FUNCTION public.bad()`
	for name, test := range map[string]struct{ kind, statement string }{
		"OutcomesWhoseTriggerWaits":            {"noop", `PERFORM 1 FROM public.mine FOR UPDATE; RETURN NEW`},
		"OutcomesThatATriggerLeavesAsTheyAre":  {"noop", `IF EXISTS (SELECT FROM public.mine) THEN RETURN NULL; END IF; RETURN NEW`},
		"RequeuesThatPostgresRefuses":          {"unknown", `IF EXISTS (SELECT FROM public.mine) THEN RAISE insufficient_privilege; END IF; RETURN NEW`},
		"OutcomesOfRowsThatSomebodyHasLocked":  {"locked", ""},
		"OutcomesThatPostgresRefusesForAWhile": {"noop", `IF EXISTS (SELECT FROM public.mine) THEN RAISE insufficient_privilege; END IF; RETURN NEW`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			c.exec(t, `CREATE TABLE public.mine AS SELECT 1 AS n`)
			if test.statement != "" {
				c.exec(t, `CREATE FUNCTION public.bad() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN `+test.statement+`; END $$`)
				c.exec(t, trigger)
			}
			somebody, err := c.pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer somebody.Rollback(context.WithoutCancel(t.Context()))
			if _, err := somebody.Exec(t.Context(), `DELETE FROM public.mine`); err != nil { // others see it until this ends
				t.Fatal(err)
			}
			k := kinds(nil)
			k["unknown"] = unknownFor{}
			locked := make(chan int64)
			next := make(chan bool)
			tasks.Handle(k, "locked", func(_ context.Context, a *tasks.Attempt, _ none) (none, error) {
				locked <- a.ID
				<-next
				return none{}, nil
			})
			c.limited(t, "a", k, func(w *worker.Config) {
				w.Concurrency = 2
				w.LimitSlots = map[string]int{"one": 1}
			})

			bad := []int64{c.insert(t, "kind, priority, limit_name", test.kind, 7, "one")}
			for range 5 {
				bad = append(bad, c.insert(t, "kind, priority", test.kind, 7))
			}
			if test.kind == "locked" {
				for range bad {
					if _, err := somebody.Exec(t.Context(), `SELECT FROM onejob.tasks WHERE id = $1 FOR UPDATE`, <-locked); err != nil {
						t.Fatal(err)
					}
					next <- true
				}
			}
			good := []int64{c.insert(t, "kind", "noop"), c.insert(t, "kind, limit_name", "noop", "one")}
			for _, id := range good {
				c.await(t, id, "succeeded")
			}
			if n := get[int](t, c, `SELECT count(*) FROM onejob.tasks WHERE priority = 7 AND status <> 'running'`); n > 0 {
				t.Errorf("%d of the rows do not keep anybody waiting", n)
			}
			if err := somebody.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			for _, id := range bad {
				status := "succeeded"
				if test.kind == "unknown" {
					status = "pending"
				}
				c.await(t, id, status)
			}
		})
	}
}

// What such rows have brought keeps no memory either: a handler that has returned needs its payload
// no more, and one that does not begin is to get it again.
func TestRowsThatKeepWaitingTakeNoMemory(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"locked", "unknown"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			c.exec(t, `CREATE FUNCTION public.bad() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE insufficient_privilege; END $$`)
			k := kinds(nil)
			k["unknown"] = unknownFor{}
			somebody, err := c.pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer somebody.Rollback(context.WithoutCancel(t.Context()))
			tasks.Handle(k, "locked", func(ctx context.Context, a *tasks.Attempt, _ string) (none, error) {
				_, err := somebody.Exec(ctx, `SELECT FROM onejob.tasks WHERE id = $1 FOR UPDATE`, a.ID)
				return none{}, err
			})
			if kind == "unknown" { // its row cannot be put back
				c.exec(t, `CREATE TRIGGER bad BEFORE UPDATE ON onejob.tasks FOR EACH ROW WHEN (OLD.status = 'running' AND NEW.kind = 'unknown') EXECUTE FUNCTION public.bad()`)
			}
			c.replica(t, "a", k, func(w *worker.Config) { w.PayloadMemory = worker.MaxPayload }) // room for the longest one, or for others

			bad := c.insert(t, "kind, payload", kind, []byte(`"`+strings.Repeat("a", 1<<20)+`"`))
			c.await(t, bad, "running")
			c.await(t, c.insert(t, "kind", "noop"), "succeeded")
			if kind == "unknown" {
				c.exec(t, `DROP TRIGGER bad ON onejob.tasks`)
				c.await(t, bad, "pending")
				return
			}
			if err := somebody.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			c.await(t, bad, "succeeded")
		})
	}
}

// A task whose outcome a trigger refuses has ended, and is not run again: its outcome is written when
// the trigger lets it pass. Until then its progress says why it is there.
func TestATaskWhoseOutcomeIsRefusedRunsOnce(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.exec(t, `CREATE FUNCTION public.alert() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.alerts VALUES (NEW.id); RETURN NEW; END $$`)
	c.exec(t, `CREATE TRIGGER alert AFTER UPDATE ON onejob.tasks FOR EACH ROW WHEN (NEW.status = 'failed' AND OLD.status <> 'failed') EXECUTE FUNCTION public.alert()`)
	k := kinds(nil)
	var runs atomic.Int32
	tasks.Handle(k, "charge", func(context.Context, *tasks.Attempt, none) (none, error) {
		runs.Add(1)
		return none{}, errors.New("declined")
	})
	r := c.replica(t, "a", k, nil)
	id := c.insert(t, "kind, max_attempts, lock_key", "charge", 1, "card")
	testenv.Eventually(t, maxWait, "its progress says why it is there", func() bool {
		return strings.Contains(get[string](t, c, `SELECT coalesce(max(text), '') FROM onejob.progress WHERE task_id = $1`, id),
			`it has ended as failed, which cannot be written: complete task`)
	})
	if n := r.events.FilterMessage("completion_unwritable").Len(); n != 1 {
		t.Errorf("that its outcome is refused was logged %d times", n)
	}
	c.await(t, c.insert(t, "kind", "noop"), "succeeded")
	if row := get[string](t, c, `SELECT concat_ws(' ', status, attempt) FROM onejob.tasks WHERE id = $1`, id); row != "running 1" {
		t.Errorf("the task is %q", row)
	}
	c.exec(t, `CREATE TABLE public.alerts (task bigint)`)
	c.await(t, id, "failed")
	if n := runs.Load(); n != 1 {
		t.Errorf("it ran %d times", n)
	}
	if n := get[int](t, c, `SELECT count(*) FROM public.alerts`); n != 1 {
		t.Errorf("%d alerts", n)
	}
}

// A replica that is stopped while an outcome is refused gives that outcome up at the end of its
// grace, and says so; the task is run again by another one, and nobody is blamed for the stop.
func TestAStopGivesARefusedOutcomeUp(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.exec(t, `CREATE FUNCTION public.alert() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.alerts VALUES (NEW.id); RETURN NEW; END $$`)
	c.exec(t, `CREATE TRIGGER alert AFTER UPDATE ON onejob.tasks FOR EACH ROW WHEN (NEW.status = 'succeeded') EXECUTE FUNCTION public.alert()`)
	k := kinds(nil)
	var runs atomic.Int32
	tasks.Handle(k, "charge", func(context.Context, *tasks.Attempt, none) (none, error) {
		runs.Add(1)
		return none{}, nil
	})
	a := c.replica(t, "a", k, func(w *worker.Config) { w.ShutdownGrace = 10 * time.Millisecond })
	id := c.insert(t, "kind, max_attempts, lock_key", "charge", 1, "card")
	testenv.Eventually(t, maxWait, "its outcome is refused", func() bool {
		return a.events.FilterMessage("completion_delayed").Len() > 0
	})
	if err := a.stop(); err != nil {
		t.Error(err)
	}
	if n := a.events.FilterMessage("completion_abandoned").Len(); n != 1 {
		t.Errorf("that its outcome is given up was logged %d times", n)
	}
	if row := get[string](t, c, `SELECT concat_ws(' ', status, attempt, crashes) FROM onejob.tasks WHERE id = $1`, id); row != "running 1 0" {
		t.Errorf("the task is %q", row)
	}
	c.exec(t, `CREATE TABLE public.alerts (task bigint)`)
	c.replica(t, "b", k, nil)
	c.await(t, id, "succeeded")
	if got := c.outcomes(t, id); got != "lease_lost succeeded" {
		t.Errorf("outcomes: %s", got)
	}
	if row := get[string](t, c, `SELECT concat_ws(' ', attempt, crashes, (SELECT count(*) FROM public.alerts)) FROM onejob.tasks WHERE id = $1`, id); row != "1 0 1" || runs.Load() != 2 {
		t.Errorf("the task is %q after %d runs", row, runs.Load())
	}
	c.noOverlaps(t)
}
