package store_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/internal/testenv"
	"onejob/internal/testenv/proxy"
	"onejob/store"
	"onejob/tasks"
)

func TestCompleteAccepted(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	code := 3
	for _, test := range []struct {
		name         string
		change       func(*tasks.Completion)
		cancel       bool
		row, history string
	}{
		{"Succeeded", func(e *tasks.Completion) { e.Result, e.Output = jsonOf(`{"n": 1}`), "hello" },
			false, `succeeded 1 t t {"n": 1}`, "succeeded hello"},
		{"Failed", func(e *tasks.Completion) {
			e.Outcome, e.Next, e.Error, e.ExitCode = tasks.Failed, tasks.StatusFailed, "no\x00pe\xff", &code
		}, false, `failed 1 t t no\x00pe\xff`, `failed no\x00pe\xff 3`},
		{"AgainLater", func(e *tasks.Completion) {
			e.Outcome, e.Next, e.Delay = tasks.Failed, tasks.StatusPending, time.Hour
		}, false, "pending 1 f f", "failed"},
		{"GivenBack", func(e *tasks.Completion) { e.Outcome, e.Next, e.Requeue = tasks.Shutdown, tasks.StatusPending, true },
			false, "pending 0 f t", "shutdown"},
		{"CancelledMeanwhile", func(e *tasks.Completion) { e.Outcome, e.Next = tasks.Failed, tasks.StatusPending },
			true, "cancelled 1 t t", "failed"},
		{"SucceededAlthoughCancelled", func(*tasks.Completion) {}, true, "succeeded 1 t t", "succeeded"},
	} {
		t.Run(test.name, func(t *testing.T) {
			task := b.claimed()
			e := succeeded(task)
			test.change(&e)
			if test.cancel {
				b.sql(`SELECT onejob.cancel($1)`, task.ID)
			}
			// The second time is that of a caller who never heard the answer.
			for range 2 {
				if err := b.Complete(t.Context(), e); err != nil {
					t.Fatal(err)
				}
				equal(t, "the row", b.row(task, "status, attempt, finished_at IS NOT NULL, run_at <= now(), session, replica, error, result"), test.row)
				equal(t, "the attempt", b.one(`SELECT concat_ws(' ', outcome, error, exit_code, output) FROM onejob.attempts WHERE fence = $1`, task.Fence), test.history)
			}
			b.sql(`UPDATE onejob.tasks SET run_at = 'infinity' WHERE id = $1`, task.ID)
		})
	}
}

func TestCompleteRefused(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	const known = "attempt, lock_key, replica, session IS NOT NULL, started_at IS NOT NULL, error"
	for _, test := range []struct {
		name, change, history string
	}{
		{"ClaimedAgain", `UPDATE onejob.tasks SET fence = fence + 1 WHERE id = $1`,
			"k f f it ended as succeeded, under a fence that was not the row's any more"},
		{"Deleted", `DELETE FROM onejob.tasks WHERE id = $1`, ""}, // nobody would delete it
		{"EndedByHand", `UPDATE onejob.tasks SET status = 'cancelled', session = NULL, finished_at = now() WHERE id = $1`,
			"1 k one f t it ended as succeeded, under a fence that was not the row's any more"},
	} {
		t.Run(test.name, func(t *testing.T) {
			task := b.claimed("lock_key='k'")
			b.sql(test.change, task.ID)
			before := b.sql(`SELECT t::text FROM onejob.tasks t`)
			e := succeeded(task)
			e.Output = "what it said"
			for range 2 {
				if err := b.Complete(t.Context(), e); err != tasks.ErrRefused {
					t.Fatalf("it was answered with %v", err)
				}
				equal(t, "the attempt", strings.Join(b.sql(`SELECT concat_ws(' ', `+known+`) FROM onejob.attempts WHERE outcome = 'refused' AND output = 'what it said' AND fence = $1`, task.Fence), "; "), test.history)
			}
			equal(t, "the table", fmt.Sprint(b.sql(`SELECT t::text FROM onejob.tasks t`)), fmt.Sprint(before))
			if _, attempts, err := b.Show(t.Context(), task.ID); test.name != "Deleted" && (err != nil || len(attempts) != 1) {
				t.Errorf("show: %v, %v", attempts, err)
			}
			b.sql(`DELETE FROM onejob.tasks`)
		})
	}
}

// gathered completes completions at once, so that most of them go in one batch, and
// returns each one's answer.
func (b *bench) gathered(completions []tasks.Completion) []error {
	answers := make([]error, len(completions))
	var wg sync.WaitGroup
	for i, e := range completions {
		wg.Go(func() { answers[i] = b.Complete(b.t.Context(), e) })
	}
	wg.Wait()
	return answers
}

// A replica that was frozen, and has claimed its own row again, may end both attempts at once.
func TestTwoFencesOfATaskInOneBatch(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	again := func() (stale, task *tasks.Task) {
		stale = b.claimed()
		if err := b.Requeue(t.Context(), stale, 0); err != nil {
			t.Fatal(err)
		}
		return stale, b.claimOne()
	}
	for _, staleFirst := range []bool{true, false} {
		stale, task := again()
		both := []tasks.Completion{failed(stale, tasks.StatusFailed), succeeded(task)}
		if !staleFirst {
			both[0], both[1] = both[1], both[0]
		}
		for i, err := range store.CompleteTogether(t.Context(), b.Store, both...) {
			if isStale := both[i].Fence == stale.Fence; isStale != errors.Is(err, tasks.ErrRefused) || !isStale && err != nil {
				t.Errorf("completion %d, the stale one being first %v, was answered with %v", i, staleFirst, err)
			}
		}
		equal(t, "the row", b.row(task, "status, error IS NULL"), "succeeded t")

		stale, task = again()
		delays := map[bool][]time.Duration{true: {time.Hour, 0}, false: {0, time.Hour}}[staleFirst]
		first, second := stale, task
		if !staleFirst {
			first, second = task, stale
		}
		for i, err := range store.RequeueTogether(t.Context(), b.Store, first, second, delays[0], delays[1]) {
			if err != nil {
				t.Errorf("requeue %d: %v", i, err)
			}
		}
		equal(t, "the row", b.row(task, "status, run_at <= now()"), "pending t")
		b.sql(`TRUNCATE onejob.tasks, onejob.attempts`)
	}
}

func TestOneBadCompletionTakesNoneAlong(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for name, result := range map[string]string{
		"NoJSON":     `{"a": `,
		"NUL":        `"\u0000"`,
		"RawNUL":     "\"\x00\"",
		"NoUTF8":     "\"\xff\"",
		"TooDeep":    strings.Repeat("[", 1<<20) + strings.Repeat("]", 1<<20),
		"HugeNumber": "1e999999",
		"TooLong":    `"` + strings.Repeat("x", 4<<20) + `"`,
	} {
		t.Run(name, func(t *testing.T) {
			b.sql(`INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, 30)`)
			var completions []tasks.Completion
			for _, task := range b.claimMax(30) {
				completions = append(completions, succeeded(task))
			}
			if len(completions) != 30 {
				t.Fatalf("%d tasks are claimed, want 30", len(completions))
			}
			bad, stale := &completions[7], &completions[9]
			bad.Result, bad.Output = jsonOf(result), "what it säid"
			stale.Fence = -stale.Fence
			for i, err := range b.gathered(completions) {
				var withoutResult *tasks.ResultError
				switch {
				case i == 7 && errors.As(err, &withoutResult) && withoutResult.Written.Outcome == tasks.Failed:
				case i == 9 && err == tasks.ErrRefused:
				case i != 7 && i != 9 && err == nil:
				default:
					t.Errorf("ending %d was answered with %v", i, err)
				}
			}
			equal(t, "the number of successes", b.one(`SELECT count(*) FROM onejob.attempts WHERE outcome = 'succeeded'`), "28")
			task := &tasks.Task{ID: bad.ID}
			equal(t, "the bad one", b.row(task, "status, left(error, 27)"), "failed the result cannot be stored")
			equal(t, "its attempt", b.one(`SELECT concat_ws(' ', outcome, output) FROM onejob.attempts WHERE task_id = $1`, bad.ID), "failed what it säid")
			b.sql(`TRUNCATE onejob.tasks, onejob.attempts`)
		})
	}
}

// Over a network that is too slow for one completion the others of the batch are done; that one is,
// when it is quicker.
func TestACompletionThatIsTooLargeTakesNoneAlong(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	way, dsn := b.throughProxy()
	s := open(t, store.Config{DSN: dsn, Timeout: 3 * time.Second})
	var completions []tasks.Completion
	testenv.Eventually(t, 3*time.Minute, "all but the large one are written", func() bool { // at once, unless the machine stands still for longer than 3 s
		b.sql(`INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, 10)`)
		completions = nil
		for _, task := range b.claimMax(10) {
			completions = append(completions, succeeded(task))
		}
		if len(completions) != 10 {
			t.Fatalf("%d tasks are claimed, want 10", len(completions))
		}
		completions[3].Output = strings.Repeat("x", 6<<20)
		way.Delay(proxy.Up, 60*time.Millisecond) // for each 32 KiB: that one alone takes longer than its 9 s
		defer way.Delay(proxy.Up, 0)
		divided := true
		for i, err := range store.CompleteTogether(t.Context(), s, completions...) {
			if large := i == 3; large != (err != nil) {
				t.Logf("completion %d: %v", i, err)
				divided = false
			}
		}
		return divided
	})
	var err error
	testenv.Eventually(t, 3*time.Minute, "the large one is written", func() bool {
		err = s.Complete(t.Context(), completions[3])
		return !late(err) && !errors.Is(err, store.ErrLocked)
	})
	if err != nil {
		t.Error(err)
	}
	equal(t, "the output", b.one(`SELECT length(output) FROM onejob.attempts WHERE task_id = $1`, completions[3].ID), fmt.Sprint(6<<20))
}

// Somebody's open transaction has a row: the others of the batch are done at
// once, and the one waits until it is over, or is told so.
func TestALockedRowHoldsUpNoOthers(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	locked, other := b.claimed(), b.claimed()
	requeue, requeuedClaims := b.claimed(), b.claimed()
	tx, err := b.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	if _, err := tx.Exec(t.Context(), `UPDATE onejob.tasks SET cancel_requested = true WHERE id IN ($1, $2)`, locked.ID, requeue.ID); err != nil {
		t.Fatal(err)
	}
	answers := b.gathered([]tasks.Completion{failed(locked, tasks.StatusPending), succeeded(other)})
	if answers[1] != nil || answers[0] == nil || errors.Is(answers[0], tasks.ErrRefused) {
		t.Errorf("answers: %v", answers)
	}
	if err := b.Requeue(t.Context(), requeuedClaims, 0); err != nil {
		t.Error(err)
	}
	if err := b.Requeue(t.Context(), requeue, 0); err == nil {
		t.Error("a locked row was given back")
	}
	equal(t, "attempts refused", b.one(`SELECT count(*) FROM onejob.attempts WHERE outcome = 'refused'`), "0")

	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := b.Complete(t.Context(), failed(locked, tasks.StatusPending)); err != nil {
		t.Error(err)
	}
	if err := b.Requeue(t.Context(), requeue, 0); err != nil {
		t.Error(err)
	}
	equal(t, "the rows", b.row(locked, "status")+" "+b.row(requeue, "status"), "cancelled cancelled")
}

// The first try hangs in its commit when the caller, who heard nothing, asks
// again: it must not be refused for what it did itself.
func TestAskedAgainWhileTheFirstTryCommits(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	task := b.claimed()
	tx, err := b.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	for _, statement := range []string{
		`INSERT INTO onejob.attempts SELECT fence, id, attempt, 'k', replica, session, started_at, now(), 'succeeded' FROM onejob.tasks`,
		`UPDATE onejob.tasks SET status = 'succeeded', session = NULL, finished_at = now()`,
	} {
		if _, err := tx.Exec(t.Context(), statement); err != nil {
			t.Fatal(err)
		}
	}
	answer := make(chan error, 1)
	go func() {
		err := store.ErrLocked
		for errors.Is(err, store.ErrLocked) { // it is patient for half a second; the test may take longer
			err = b.Complete(t.Context(), succeeded(task))
		}
		answer <- err
	}()
	testenv.Eventually(t, time.Minute, "the row was found locked", func() bool { // the view has the beginnings of queries
		return b.one(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%AS last_fence%' AND pid <> pg_backend_pid()`) != "0"
	})
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-answer; err != nil {
		t.Errorf("it was answered with %v", err)
	}
}

// A person cancels everything, again and again, while batches end and are given
// back: nothing deadlocks, nothing is lost.
func TestCancelOfManyRowsAgainstBatches(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`INSERT INTO onejob.tasks (kind, priority) SELECT 'noop', (random() * 10)::int FROM generate_series(1, 1000)`)
	ctx, stop := context.WithCancel(t.Context())
	person := make(chan error, 1)
	go func() {
		for ctx.Err() == nil {
			// It locks in an order of its own.
			if _, err := b.pool.Exec(context.Background(), `UPDATE onejob.tasks SET cancel_requested = true WHERE status = 'running' AND id IN (SELECT id FROM onejob.tasks ORDER BY random())`); err != nil {
				person <- err
				return
			}
		}
		person <- nil
	}()
	for list := b.claimMax(100); len(list) > 0; list = b.claimMax(100) {
		var wg sync.WaitGroup
		for _, task := range list {
			wg.Go(func() {
				for {
					var err error
					if task.ID%2 == 0 {
						err = b.Complete(t.Context(), succeeded(task))
					} else {
						err = b.Requeue(t.Context(), task, time.Hour)
					}
					if err == nil {
						return
					}
					if !strings.Contains(err.Error(), "locked by another transaction") {
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
	}
	stop()
	if err := <-person; err != nil {
		t.Errorf("the person's UPDATE: %v", err)
	}
	equal(t, "what still runs", b.one(`SELECT count(*) FROM onejob.tasks WHERE status = 'running'`), "0")
	equal(t, "the number of successes", b.one(`SELECT count(*) FROM onejob.tasks WHERE status = 'succeeded'`), "500")
}

func TestRequeue(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	task := b.claimed()
	stale := *task
	for range 2 { // the second time is that of a caller who never heard the answer
		if err := b.Requeue(t.Context(), task, 0); err != nil {
			t.Fatal(err)
		}
		equal(t, "the row", b.row(task, "status, attempt, session, replica, started_at, run_at <= now()"), "pending 0 t")
	}
	task = b.claimOne()
	if err := b.Requeue(t.Context(), &stale, 0); err != nil {
		t.Error(err)
	}
	equal(t, "the row after a stale one", b.row(task, "status"), "running")
	if err := b.Requeue(t.Context(), task, time.Hour); err != nil {
		t.Fatal(err)
	}
	equal(t, "the row", b.row(task, "status, attempt, run_at > now() + interval '59 min'"), "pending 0 t")
	equal(t, "the history", b.history(task), "")

	task = b.claimed()
	b.sql(`SELECT onejob.cancel($1)`, task.ID)
	if err := b.Requeue(t.Context(), task, 0); err != nil {
		t.Fatal(err)
	}
	equal(t, "the row of a cancelled one", b.row(task, "status, finished_at IS NOT NULL"), "cancelled t")
}

func TestCompleteWith(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.join()
	b.sql(`CREATE TABLE effect (what text)`)
	effect := func(what string) func(context.Context, pgx.Tx) (json.RawMessage, error) {
		return func(ctx context.Context, tx pgx.Tx) (json.RawMessage, error) {
			_, err := tx.Exec(ctx, `INSERT INTO effect VALUES ($1)`, what)
			return jsonOf(`1`), err
		}
	}

	task := b.claimed("lock_key='k'")
	if err := b.CompleteWith(t.Context(), task, func(ctx context.Context, tx pgx.Tx) (json.RawMessage, error) {
		_, err := tx.Exec(ctx, `INSERT INTO effect SELECT concat_ws(' ', current_setting('onejob.task_id'), current_setting('onejob.attempt'), current_setting('onejob.fence'), current_setting('onejob.lock_key'))`)
		return jsonOf(`{"rows": 1}`), err
	}); err != nil {
		t.Fatal(err)
	}
	equal(t, "the row", b.row(task, "status, result"), `succeeded {"rows": 1}`)
	equal(t, "the effect", b.one(`SELECT what FROM effect`), fmt.Sprint(task.ID, " 1 ", task.Fence, " k"))

	refused := b.claimed()
	b.sql(`UPDATE onejob.tasks SET fence = nextval('onejob.fences') WHERE id = $1`, refused.ID)
	if err := b.CompleteWith(t.Context(), refused, effect("refused")); !errors.Is(err, tasks.ErrRefused) {
		t.Errorf("a superseded fence was answered with %v", err)
	}
	equal(t, "the row", b.row(refused, "status"), "running")
	equal(t, "the history", b.history(refused), "refused")

	wrong := errors.New("wrong")
	broken := b.claimed()
	if err := b.CompleteWith(t.Context(), broken, func(ctx context.Context, tx pgx.Tx) (json.RawMessage, error) {
		_, _ = effect("broken")(ctx, tx)
		return nil, wrong
	}); !errors.Is(err, wrong) {
		t.Errorf("fn's error became %v", err)
	}
	if err := b.CompleteWith(t.Context(), broken, func(ctx context.Context, tx pgx.Tx) (json.RawMessage, error) {
		_, _ = effect("no JSON")(ctx, tx)
		return jsonOf(`{`), nil
	}); err == nil {
		t.Error("a result that is no JSON was kept")
	}
	equal(t, "the row", b.row(broken, "status"), "running")
	if err := b.CompleteWith(t.Context(), broken, effect("mended")); err != nil {
		t.Error(err)
	}

	// Its commit went through and nobody heard: a failure told later is refused.
	if err := b.Complete(t.Context(), failed(broken, tasks.StatusPending)); err != tasks.ErrRefused {
		t.Errorf("a later failure was answered with %v", err)
	}
	equal(t, "the row", b.row(broken, "status"), "succeeded")
	equal(t, "the effects", strings.Join(b.sql(`SELECT what FROM effect OFFSET 1`), " "), "mended")
}

// An edit of the row that is committed while a statement's completion waits for it moves the
// row to another place, and changes nothing about whose it is.
func TestCompleteWithBesideAnEdit(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.join()
	task := b.claimed()
	tx, err := b.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	done := make(chan error, 1)
	edited := make(chan struct{})
	go func() {
		done <- b.CompleteWith(t.Context(), task, func(context.Context, pgx.Tx) (json.RawMessage, error) {
			_, err := tx.Exec(t.Context(), `UPDATE onejob.tasks SET keep_for = '1 year' WHERE id = $1`, task.ID)
			close(edited)
			return jsonOf(`1`), err
		})
	}()
	<-edited
	b.eventually("the completion waits for the row", func() bool {
		return b.one(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) == "1"
	})
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	equal(t, "the row", b.row(task, "status, result, keep_for"), "succeeded 1 1 year")
	equal(t, "the history", b.history(task), "succeeded")
}

// The history has an attempt from when its completion was accepted on, and not before, also
// while others edit the row.
func TestHistoryBesideEdits(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	var list []tasks.Completion
	for range 300 {
		list = append(list, succeeded(b.claimed()))
	}
	editing, stop := context.WithCancel(t.Context())
	var editors sync.WaitGroup
	for i := range 4 {
		editors.Go(func() {
			for editing.Err() == nil {
				_, _ = b.pool.Exec(t.Context(), `UPDATE onejob.tasks SET keep_for = '1 year' WHERE id IN (SELECT id FROM onejob.tasks WHERE status = 'running' AND id % 4 = $1 ORDER BY random() LIMIT 3)`, i)
			}
		})
	}
	for i, err := range b.gathered(list) {
		if err != nil && !strings.Contains(err.Error(), "locked by another transaction") {
			t.Errorf("completion %d: %v", i, err)
		}
	}
	stop()
	editors.Wait()
	equal(t, "attempts that the history has, and the row does not or at another moment",
		b.one(`SELECT count(*) FROM onejob.attempts a JOIN onejob.tasks t ON t.id = a.task_id WHERE t.finished_at IS DISTINCT FROM a.finished_at`), "0")
}

// A replica that others called dead comes back: that its completion is refused proves that it
// lived, and the task does not pay for it. What has failed stays failed.
func TestWhoIsRefusedHasLived(t *testing.T) {
	t.Parallel()
	for what, test := range map[string]struct {
		since       string // what became of the row since the takeover
		stalled     bool
		row, before string // status, attempt, crashes, stalls
	}{
		"waiting":                      {"SELECT 1", false, "pending 0 0 0", "pending 1 1 0"},
		"waiting after a stall":        {"SELECT 1", true, "pending 0 0 1", "pending 1 1 0"},
		"blamed by another, too":       {"UPDATE onejob.tasks SET crashes = 2", false, "pending 0 1 0", "pending 1 2 0"},
		"not charged, but another was": {"UPDATE onejob.attempts SET charged = false", false, "pending 1 1 0", "pending 1 1 0"},
		"charged by an older version":  {"UPDATE onejob.attempts SET charged = NULL", false, "pending 0 0 0", "pending 1 1 0"},
		"retried by hand":              {"SELECT onejob.retry(id) FROM onejob.tasks", false, "pending 0 0 0", "pending 0 0 0"},
		"failed":                       {"UPDATE onejob.tasks SET status = 'failed', finished_at = now()", true, "failed 1 1 0", "failed 1 1 0"},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			r := b.joined("silent")
			task := b.claimedBy(r)
			if _, err := b.DeclareDead(t.Context(), r, false); err != nil {
				t.Fatal(err)
			}
			if _, _, err := b.TakeOver(t.Context(), []string{r.Session}, 3); err != nil {
				t.Fatal(err)
			}
			b.sql(test.since)
			const columns = "status, attempt, crashes, stalls"
			equal(t, "the row before", b.row(task, columns), test.before)
			e := tasks.Completion{ID: task.ID, Fence: task.Fence, Session: task.Session, Outcome: tasks.LeaseLost, Next: tasks.StatusPending, Requeue: true, Stalled: test.stalled}
			for range 2 { // the answer may be lost
				if err := b.Complete(t.Context(), e); err != nil && !errors.Is(err, tasks.ErrRefused) {
					t.Errorf("it was answered with %v", err)
				}
			}
			equal(t, "the row", b.row(task, columns), test.row)
			equal(t, "the history", b.history(task), "lease_lost")
		})
	}
}

// I11: a claim that was on its way while its replica lost the lease begins nothing, and uses up no
// attempt, also if the others call the replica dead before it can say that it lives.
func TestAClaimAfterTheLeaseUsesUpNoAttempt(t *testing.T) {
	t.Parallel()
	for silence, want := range map[string]string{"8 seconds": "pending 0 0 0 crashed", "6 seconds": "pending 1 1 0 crashed"} {
		t.Run(silence, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			r := b.joined("silent")
			b.sql(`UPDATE onejob.replicas SET heartbeat_at = now() - $1::interval`, silence)
			task := b.claimedBy(r)
			b.sql(`UPDATE onejob.replicas SET ended_at = now(), state = 'dead'`)
			if _, _, err := b.TakeOver(t.Context(), []string{r.Session}, 3); err != nil {
				t.Fatal(err)
			}
			equal(t, "the row and the history", b.row(task, "status, attempt, crashes, stalls")+" "+b.history(task), want)
		})
	}
}

// Stalls are held against a task together with crashes.
func TestStallsCount(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	r := b.joined("one")
	task := b.claimedBy(r)
	e := tasks.Completion{ID: task.ID, Fence: task.Fence, Session: task.Session, Outcome: tasks.LeaseLost, Next: tasks.StatusPending, Requeue: true, Stalled: true}
	if err := b.Complete(t.Context(), e); err != nil {
		t.Fatal(err)
	}
	equal(t, "the row", b.row(task, "status, attempt, crashes, stalls"), "pending 0 0 1")
	other := *b
	other.session = r.Session
	again := other.claimOne()
	equal(t, "stalls of the one that is claimed", again.Stalls, 1)
	if err := b.Begin(t.Context(), again); err != nil {
		t.Fatal(err)
	}
	if _, err := b.DeclareDead(t.Context(), b.listed(r.Session), false); err != nil {
		t.Fatal(err)
	}
	abandoned, _, err := b.TakeOver(t.Context(), []string{r.Session}, 2)
	if err != nil || len(abandoned) != 1 || abandoned[0].Next != tasks.StatusFailed {
		t.Fatalf("taken over: %+v, %v", abandoned, err)
	}
	if text := b.row(again, "error"); !strings.HasPrefix(text, "quarantined: 2 replicas died or stalled while they worked on it") {
		t.Errorf("the error is %q", text)
	}
}

// I5, I6: while the synchronous standby has not got an outcome, no caller hears that it is written,
// though the primary shows it once a statement that waits for the standby has been cancelled.
func TestNoOutcomeIsAcceptedBeforeTheStandbyHasIt(t *testing.T) {
	t.Parallel()
	_, db := testenv.OwnPostgres(t)
	b := onDatabase(t, db, store.Config{DSN: db.DSN, Timeout: time.Second})
	task := b.claimed()
	set := func(standbys string) {
		b.sql(`ALTER SYSTEM SET synchronous_standby_names = '` + standbys + `'`)
		b.sql(`SELECT pg_reload_conf()`)
		testenv.Eventually(t, time.Minute, "the setting has changed", func() bool { return b.one(`SHOW synchronous_standby_names`) == standbys })
	}
	set("nobody")
	testenv.Eventually(t, time.Minute, "commits wait", func() bool { // the checkpointer makes the setting known
		return b.PauseQueue(t.Context(), "elsewhere", "", time.Time{}, 0) != nil
	})
	for range 3 {
		if err := b.Complete(t.Context(), succeeded(task)); err == nil || errors.Is(err, tasks.ErrRefused) {
			t.Errorf("the outcome is said to be written, or refused: %v", err)
		}
	}
	testenv.Eventually(t, time.Minute, "the primary shows the outcome", func() bool { return b.row(task, "status") == "succeeded" })
	if err := b.Complete(t.Context(), succeeded(task)); err == nil {
		t.Error("the outcome is said to be written as soon as it can be read")
	}
	set("")
	var err error
	testenv.Eventually(t, time.Minute, "commits wait no more", func() bool {
		err = b.Complete(t.Context(), succeeded(task))
		return !errors.Is(err, context.DeadlineExceeded)
	})
	if err != nil {
		t.Error(err)
	}
}

// A result that is short as it is sent and long as people would read it fails its task, and can be looked
// at: Postgres writes numbers out.
func TestAResultThatIsLongAsText(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	task := b.claimed()
	e := succeeded(task)
	e.Result = json.RawMessage(`{"body": [` + strings.Repeat("1e131071,", 9_000) + `1]}`)
	var refused *tasks.ResultError
	if err := b.Complete(t.Context(), e); !errors.As(err, &refused) {
		t.Errorf("Complete returned %v", err)
	}
	equal(t, "the task", b.row(task, "status, error"), "failed the result cannot be stored: it has 1179720013 bytes when its numbers are written out, of at most 4194304")
	if _, err := b.List(t.Context(), store.Filter{Limit: 10}); err != nil {
		t.Error(err)
	}
}
