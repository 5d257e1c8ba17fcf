package store_test

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgtype"

	"onejob/internal/testenv"
	"onejob/store"
	"onejob/tasks"
)

// refusing plants a trigger that refuses some changes of rows of kind "other".
func (b *bench) refusing(condition string) {
	b.t.Helper()
	b.refusingBy(condition, `RAISE numeric_value_out_of_range USING MESSAGE = 'not this one'`)
}

// otherRefusals are what triggers do that says nothing of the data of a row: a table that is not
// on their search path, a right that the role lacks, an error code of their own, a mistake, a row
// that they change themselves.
var otherRefusals = map[string]string{
	"42P01": `INSERT INTO alerts VALUES (1)`,
	"42501": `RAISE insufficient_privilege`,
	"AB001": `RAISE 'on hold' USING ERRCODE = 'AB001'`,
	"21000": `NEW.priority := (SELECT n FROM pg_catalog.generate_series(1, 2) n)`,
	"42883": `PERFORM notify_somebody(NEW.id)`,
	"55P03": `RAISE lock_not_available`, // as FOR UPDATE NOWAIT
}

// relayedRefusals are errors that a trigger relays of another server that it writes to, or of the way
// there. They end with that server's trouble, so that an outcome is not given up.
var relayedRefusals = []string{"08001", "08006", "0A000", "25006", "28P01", "3D000", "40001", "57P01", "57P03", "58P01"}

// refusingBy is refusing with a trigger that does this.
func (b *bench) refusingBy(condition, statement string) {
	b.t.Helper()
	b.sql(`CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN ` + statement + `; RETURN NEW; END $$`)
	b.sql(`CREATE TRIGGER refuse BEFORE UPDATE ON onejob.tasks FOR EACH ROW WHEN (NEW.kind = 'other' AND ` + condition + `) EXECUTE FUNCTION public.refuse()`)
}

// A row that Postgres refuses to make running fails, and says why; those around it
// are claimed.
func TestOneRefusedRowStopsNoClaim(t *testing.T) {
	t.Parallel()
	for _, limit := range []string{"", "limit_name='l'"} {
		b := newBench(t)
		b.refusing(`NEW.status = 'running'`)
		columns := func(more ...string) []string {
			if limit != "" {
				more = append(more, limit)
			}
			return more
		}
		first := b.insert(columns("priority=9")...)
		bad := b.insert(columns("priority=5", "kind='other'")...)
		last := b.insert(columns()...)
		var got, refused []string
		for range 10 {
			c := tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop", "other"}, Max: 9}
			if limit != "" {
				c.Limit = "l"
			}
			claimed, err := b.Claim(t.Context(), c)
			if err != nil {
				t.Fatal(err)
			}
			if s := ids(claimed.Tasks); s != "" {
				got = append(got, s)
			}
			for _, r := range claimed.Refused {
				refused = append(refused, fmt.Sprint(r.ID, r.Failed, strings.Contains(r.Err.Error(), "not this one (SQLSTATE 22003)")))
			}
		}
		equal(t, "what was claimed", strings.Join(got, " "), first+" "+last)
		equal(t, "what was refused", strings.Join(refused, "; "), bad+" true true")
		equal(t, "the row", b.one(`SELECT status || ': ' || error FROM onejob.tasks WHERE id = $1::text::bigint`, bad),
			"failed: Postgres refuses to make this task running: not this one (SQLSTATE 22003)")
	}
}

// waits are what triggers do that keeps a statement waiting: for a lock of somebody who has forgotten
// it, or for themselves.
var waits = map[string]string{
	"55P03": `PERFORM 1 FROM public.mine FOR UPDATE`,
	"57014": `PERFORM pg_catalog.pg_sleep(3600)`,
}

// A trigger that fails for some rows, or keeps Postgres waiting, stops neither claims, nor
// completions, requeues and takeovers of others, whatever it says.
func TestATriggerStopsNoOthers(t *testing.T) {
	t.Parallel()
	for code, statement := range otherRefusals {
		t.Run(code, func(t *testing.T) {
			t.Parallel()
			stopsNoOthers(t, newBench(t), code, statement, code == "55P03")
		})
	}
	for _, code := range relayedRefusals {
		t.Run("relays "+code, func(t *testing.T) {
			t.Parallel()
			stopsNoOthers(t, newBench(t), code, `RAISE 'of another server' USING ERRCODE = '`+code+`'`, true)
		})
	}
	t.Run("writes to a server that is not there", func(t *testing.T) {
		t.Parallel()
		b := newBench(t)
		b.sql(`CREATE EXTENSION dblink SCHEMA public`)
		stopsNoOthers(t, b, "08001", `PERFORM public.dblink_exec('host=127.0.0.1 port=1', 'SELECT 1')`, true)
	})
	for code, statement := range waits {
		t.Run("waits "+code, func(t *testing.T) {
			bothWays(t, nil, func(t *testing.T, db *testenv.DB, cfg store.Config) {
				if code == "57014" { // only the time for a statement ends it
					cfg.Timeout = 4 * time.Second
				}
				b := onDatabase(t, db, cfg)
				b.sql(`CREATE TABLE public.mine AS SELECT 1 AS n`)
				openTransaction(t, db.DSN, `BEGIN`, `SELECT FROM public.mine FOR UPDATE`)
				stopsNoOthers(t, b, code, statement, true)
			})
		})
	}
	t.Run("leaves the row as it is", func(t *testing.T) {
		t.Parallel()
		stopsNoOthers(t, newBench(t), "leaves it as it is", `RETURN NULL`, true)
	})
}

// stopsNoOthers plants the trigger. mayPass says that it may let the row be changed soon, so that an
// outcome is not given up. Where statements have little time, those of a busy machine may use it up with
// other rows, too, and are repeated.
func stopsNoOthers(t *testing.T, b *bench, code, statement string, mayPass bool) {
	t.Helper()
	bad, good := b.claimed("kind='other'"), b.claimed()
	back, kept := b.claimed(), b.claimed("kind='other'")
	other := *b
	other.session = "6f1ed002-ab59-42fb-a0b4-0123456789ab"
	left, taken := other.claimed("kind='other'"), other.claimed()
	waits, first := b.insert("kind='other'", "priority=5"), b.insert()
	b.refusingBy(`true`, statement)

	hurried := code == "57014"
	claimed, refused := "", ""
	for n := range 60 {
		c, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop", "other"}, Max: 9})
		if err != nil && !(hurried && late(err)) {
			t.Fatal(err)
		}
		claimed += ids(c.Tasks)
		for _, r := range c.Refused {
			if !hurried || refused == "" && fmt.Sprint(r.ID) == waits {
				refused += fmt.Sprint(r.ID, r.Failed, strings.Contains(r.Err.Error(), code))
			}
		}
		if n >= 4 {
			if !hurried || claimed != "" && refused != "" {
				break
			}
			time.Sleep(time.Second)
		}
	}
	equal(t, "what was claimed", claimed, first)
	equal(t, "what was refused", refused, waits+" false true")

	var together sync.WaitGroup
	var errs [4]error
	together.Go(func() { errs[0] = b.Complete(t.Context(), succeeded(bad)) })
	together.Go(func() { errs[1] = b.Complete(t.Context(), succeeded(good)) })
	together.Go(func() { errs[2] = b.Requeue(t.Context(), back, 0) })
	together.Go(func() { errs[3] = b.Requeue(t.Context(), kept, 0) })
	together.Wait()
	for range testenv.Tries(time.Minute) {
		if !hurried || errs[1] == nil && errs[2] == nil {
			break
		}
		if errs[1] != nil {
			errs[1] = b.Complete(t.Context(), succeeded(good))
		}
		if errs[2] != nil {
			errs[2] = b.Requeue(t.Context(), back, 0)
		}
	}
	if errs[0] == nil || errors.Is(errs[0], tasks.ErrUnwritable) == mayPass {
		t.Errorf("the completion that is refused: %v", errs[0])
	}
	if errs[1] != nil || errs[2] != nil || errs[3] == nil {
		t.Errorf("errors %v", errs)
	}
	equal(t, "the row that is complete", b.row(good, "status"), "succeeded")

	var abandoned []tasks.Abandoned
	var rows []tasks.RowError
	var err error
	for range testenv.Tries(time.Minute) {
		var some []tasks.Abandoned
		var these []tasks.RowError
		some, these, err = b.TakeOver(t.Context(), []string{other.session}, 3)
		abandoned = append(abandoned, some...)
		for _, r := range these {
			if !hurried || r.ID == left.ID && len(rows) == 0 {
				rows = append(rows, r)
			}
		}
		if !hurried || err == nil && len(abandoned) > 0 && len(rows) > 0 {
			break
		}
	}
	if err != nil || len(abandoned) != 1 || abandoned[0].ID != taken.ID || len(rows) != 1 || rows[0].ID != left.ID {
		t.Errorf("taken over: %v, refused: %v, %v", abandoned, rows, err)
	}
	equal(t, "the rows that are left", b.row(bad, "status")+" "+b.row(kept, "status")+" "+b.row(left, "status"), "running running running")
}

// A success that a trigger refuses does not become a failure for the sake of its result: it is written
// when the trigger lets it pass.
func TestAResultThatIsNotToBlame(t *testing.T) {
	t.Parallel()
	for name, trigger := range map[string]string{
		"at once":   `CREATE TRIGGER refuse BEFORE UPDATE ON onejob.tasks FOR EACH ROW WHEN (NEW.status = 'succeeded') EXECUTE FUNCTION public.refuse()`,
		"at commit": `CREATE CONSTRAINT TRIGGER refuse AFTER UPDATE ON onejob.tasks INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.status = 'succeeded') EXECUTE FUNCTION public.refuse()`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			b.sql(`CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE numeric_value_out_of_range; END $$`)
			b.sql(trigger)
			task := b.claimed()
			done := succeeded(task)
			done.Result = jsonOf(`1`)
			if err := b.Complete(t.Context(), done); !errors.Is(err, tasks.ErrUnwritable) {
				t.Errorf("the completion: %v", err)
			}
			equal(t, "the row", b.row(task, "status"), "running")
			b.sql(`DROP TRIGGER refuse ON onejob.tasks`)
			if err := b.Complete(t.Context(), done); err != nil {
				t.Error(err)
			}
			equal(t, "the row", b.row(task, "status, result"), "succeeded 1")
		})
	}
}

// What refuses a completion may be over at any moment. Then its result is not to blame either.
func TestAResultThatWasRefusedForAMoment(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`CREATE SEQUENCE public.refusals`) // which no transaction takes back
	b.sql(`CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		IF nextval('public.refusals') <= TG_ARGV[0]::int THEN RAISE 'not now'; END IF;
		RETURN NEW;
	END $$`)
	for refusals := range 9 {
		task := b.claimed()
		b.sql(`ALTER SEQUENCE public.refusals RESTART`)
		b.sql(fmt.Sprintf(`CREATE TRIGGER refuse BEFORE UPDATE ON onejob.tasks FOR EACH ROW WHEN (NEW.status = 'succeeded') EXECUTE FUNCTION public.refuse(%d)`, refusals))
		done := succeeded(task)
		done.Result = jsonOf(`1`)
		err := b.Complete(t.Context(), done)
		for errors.Is(err, tasks.ErrUnwritable) {
			err = b.Complete(t.Context(), done)
		}
		if err != nil {
			t.Errorf("after %d refusals: %v", refusals, err)
		}
		equal(t, fmt.Sprintf("the row after %d refusals", refusals), b.row(task, "status, result"), "succeeded 1")
		b.sql(`DROP TRIGGER refuse ON onejob.tasks`)
	}
}

// What is about no row blames none, whatever it says.
func TestWhatIsAboutNoRow(t *testing.T) {
	t.Parallel()
	for _, raise := range []string{`insufficient_privilege`, `'closed for today'`, `numeric_value_out_of_range`, `sqlclient_unable_to_establish_sqlconnection`, `read_only_sql_transaction`} {
		t.Run(raise, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			task := b.claimed()
			b.sql(`CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE ` + raise + `; END $$`)
			b.sql(`CREATE TRIGGER refuse BEFORE UPDATE ON onejob.tasks FOR EACH STATEMENT EXECUTE FUNCTION public.refuse()`)
			done := succeeded(task)
			done.Result = jsonOf(`1`)
			if err := b.Complete(t.Context(), done); err == nil || errors.Is(err, tasks.ErrUnwritable) || errors.As(err, new(*tasks.ResultError)) {
				t.Errorf("a completion: %v", err)
			}
			if _, rows, err := b.TakeOver(t.Context(), []string{b.session}, 3); err == nil || len(rows) > 0 {
				t.Errorf("a takeover refused %v: %v", rows, err)
			}
			b.insert()
			b.wantNothingClaimed()
		})
	}
}

func (b *bench) wantNothingClaimed() {
	b.t.Helper()
	c, err := b.Claim(b.t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Max: 9})
	if err == nil || len(c.Refused) > 0 {
		b.t.Errorf("a claim refused %v: %v", c.Refused, err)
	}
	equal(b.t, "failed rows", b.one(`SELECT count(*) FROM onejob.tasks WHERE status = 'failed'`), "0")
}

// Without fences there are no claims, and no row is to blame.
func TestNoMoreFences(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.insert()
	b.sql(`SELECT setval('onejob.fences', 9223372036854775807)`)
	b.wantNothingClaimed()
	b.sql(`UPDATE onejob.cluster SET fences_from = 1000`)
	b.sql(`SELECT setval('onejob.fences', 9223372036854775000)`)
	c, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Max: 9, FencesFrom: 1000})
	if err == nil || len(c.Refused) > 0 {
		t.Errorf("a claim refused %v: %v", c.Refused, err)
	}
}

// Several who claim side by side meet a row that is refused, and one of them fails it: the
// others do not blame the next one.
func TestOnlyTheRefusedRowIsBlamed(t *testing.T) {
	t.Parallel()
	for _, statement := range []string{`RAISE 'not this one'`, otherRefusals["42P01"]} {
		t.Run(statement, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			b.refusingBy(`NEW.status = 'running'`, statement)
			b.sql(`INSERT INTO onejob.tasks (kind, limit_name, priority) SELECT CASE WHEN i % 2 = 0 THEN 'other' ELSE 'noop' END, 'l', -i FROM generate_series(1, 200) i`)
			var claimers sync.WaitGroup
			var mu sync.Mutex
			claimed, blamed := map[int64]bool{}, map[int64]bool{}
			for range 6 {
				claimers.Go(func() {
					for done := false; !done; {
						c, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop", "other"}, Limit: "l", Max: 1})
						if err != nil {
							t.Error(err)
							return
						}
						mu.Lock()
						for _, task := range c.Tasks {
							claimed[task.ID] = true
						}
						for _, r := range c.Refused {
							blamed[r.ID] = true
						}
						done = len(claimed) == 100 || !c.More && len(c.Tasks) == 0
						mu.Unlock()
					}
				})
			}
			claimers.Wait()
			for id := range blamed {
				if id%2 != 0 {
					t.Errorf("task %d is blamed: %s", id, b.one(`SELECT coalesce(error, 'no error') FROM onejob.tasks WHERE id = $1`, id))
				}
			}
			equal(t, "how many were claimed", len(claimed), 100)
			equal(t, "healthy rows that are not running", b.one(`SELECT count(*) FROM onejob.tasks WHERE kind = 'noop' AND status <> 'running'`), "0")
		})
	}
}

// Many rows of one kind that a trigger keeps, for whatever reason, do not keep claims from those
// behind them.
func TestManyRefusedRowsStopNoClaim(t *testing.T) {
	t.Parallel()
	for code, statement := range map[string]string{"P0001": `RAISE 'on hold'`, "42P01": otherRefusals["42P01"], "waits 55P03": waits["55P03"], "leaves it as it is": `RETURN NULL`} {
		t.Run(code, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			b.sql(`CREATE TABLE public.mine AS SELECT 1 AS n`)
			openTransaction(t, b.dsn, `BEGIN`, `SELECT FROM public.mine FOR UPDATE`)
			b.sql(`INSERT INTO onejob.tasks (kind, priority) SELECT 'other', 5 FROM generate_series(1, 150)`)
			good := b.insert()
			b.refusingBy(`NEW.status = 'running'`, statement)
			for {
				c, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop", "other"}, Max: 9})
				if err != nil {
					t.Fatal(err)
				}
				if len(c.Tasks) > 0 {
					equal(t, "what was claimed", ids(c.Tasks), good)
					return
				}
				switch {
				case c.More:
				case code == "waits 55P03": // it is passed over for a moment, beside others
					time.Sleep(100 * time.Millisecond)
				default:
					t.Fatal("a claim says that there is no more")
				}
			}
		})
	}
}

// A row that Postgres refuses to make running is not the first of its lock key: the others that have
// it are claimed.
func TestARefusedRowKeepsNoneOfItsLockKey(t *testing.T) {
	t.Parallel()
	for name, statement := range map[string]string{"leaves it as it is": `RETURN NULL`, "42501": otherRefusals["42501"], "P0001": `RAISE 'on hold'`} {
		for _, limit := range []string{"", "l"} {
			for lane, priority := range map[string]string{"another lane": "2", "its lane": "1"} {
				t.Run(fmt.Sprintf("%s, in %s, limit %q", name, lane, limit), func(t *testing.T) {
					t.Parallel()
					b := newBench(t)
					b.refusingBy(`NEW.payload ? 'hold' AND NEW.status <> 'pending'`, statement)
					columns := []string{"kind='other'", "lock_key='k'"}
					if limit != "" {
						columns = append(columns, "limit_name='"+limit+"'")
					}
					bad := b.insert(append(columns, `payload='{"hold": true}'`, "priority="+priority)...)
					want := []string{b.insert(append(columns, "priority=1")...), b.insert(append(columns, "priority=1")...)}
					var got []string
					for range 30 {
						c, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop", "other"}, Max: 9, Limit: limit})
						if err != nil {
							t.Fatal(err)
						}
						for _, task := range c.Tasks {
							got = append(got, fmt.Sprint(task.ID))
							if err := b.Complete(t.Context(), succeeded(task)); err != nil {
								t.Fatal(err)
							}
						}
					}
					equal(t, "what was claimed", strings.Join(got, " "), strings.Join(want, " "))
					equal(t, "the refused row", b.one(`SELECT status FROM onejob.tasks WHERE id = $1::text::bigint`, bad), "pending")
				})
			}
		}
	}
}

// Nor does one whose queue was paused after claims had passed it.
func TestARowOfAPausedQueueKeepsNoneOfItsLockKey(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	holder := b.claimed("lock_key='k'")
	b.insert("queue='slow'", "lock_key='k'", "priority=5")
	next := b.insert("lock_key='k'", "priority=4")
	c := tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Max: 9}
	claim := func() string {
		t.Helper()
		claimed, err := b.Claim(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		return ids(claimed.Tasks)
	}
	b.Forget()
	equal(t, "what is claimed while the lock key is busy", claim(), "")
	store.KeepMarks(b.Store, c)
	b.sql(`SELECT onejob.pause_queue('slow')`)
	if err := b.Complete(t.Context(), succeeded(holder)); err != nil {
		t.Fatal(err)
	}
	equal(t, "what is claimed", claim(), next)
}

// More rows that a trigger leaves as they are than are remembered do not make claims, and lines of the log, without
// an end.
func TestManyRowsThatATriggerLeavesAreNotTriedWithoutEnd(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`CREATE FUNCTION public.leave() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$`)
	b.sql(`CREATE TRIGGER leave BEFORE UPDATE ON onejob.tasks FOR EACH ROW WHEN (NEW.kind = 'other') EXECUTE FUNCTION public.leave()`)
	b.sql(`INSERT INTO onejob.tasks (kind) SELECT 'other' FROM generate_series(1, 10000)`)
	began, tries := time.Now(), 0
	for time.Since(began) < 4*time.Second {
		c, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop", "other"}, Max: 512})
		if err != nil {
			t.Fatal(err)
		}
		if len(c.Refused) == 0 {
			time.Sleep(10 * time.Millisecond) // sooner than any replica would ask again
		}
		tries += len(c.Refused)
	}
	if most := 600 + int(time.Since(began)/time.Millisecond); tries > most { // a thousand a second, and the first
		t.Errorf("%d rows were tried in %v", tries, time.Since(began))
	}
}

// Nor do urgent ones that keep Postgres waiting: what is behind them is claimed long before it is
// known which they are.
func TestManyRowsThatWaitStopNoClaim(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`CREATE TABLE public.mine AS SELECT 1 AS n`)
	openTransaction(t, b.dsn, `BEGIN`, `SELECT FROM public.mine FOR UPDATE`)
	b.sql(`INSERT INTO onejob.tasks (kind, priority) SELECT 'other', 5 FROM generate_series(1, 200)`)
	b.sql(`INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, 2000)`)
	b.refusingBy(`NEW.status = 'running'`, waits["55P03"])
	claimed, refused := 0, 0
	for claimed < 1000 {
		c, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop", "other"}, Max: 32})
		if err != nil {
			t.Fatal(err)
		}
		claimed += len(c.Tasks)
		refused += len(c.Refused)
	}
	t.Logf("%d rows were refused before", refused)
	if refused >= 200 {
		t.Errorf("%d rows were refused before 1,000 others were claimed", refused)
	}
}

// Nor do as many of a dead session as one statement takes keep takeovers from those behind them.
func TestManyRefusedRowsStopNoTakeover(t *testing.T) {
	t.Parallel()
	for code, statement := range map[string]string{"P0001": `RAISE 'on hold'`, "leaves it as it is": `RETURN NULL`} {
		t.Run(code, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			b.sql(`INSERT INTO onejob.tasks (kind) SELECT CASE WHEN i <= 1000 THEN 'other' ELSE 'noop' END FROM generate_series(1, 1003) i`)
			for claimed := 0; claimed < 1003; {
				c, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop", "other"}, Max: 512})
				if err != nil {
					t.Fatal(err)
				}
				claimed += len(c.Tasks)
			}
			b.refusingBy(`NEW.status = 'pending'`, statement)
			taken, refused := 0, 0
			for range 3 {
				abandoned, rows, err := b.TakeOver(t.Context(), []string{b.session}, 3)
				if err != nil {
					t.Fatal(err)
				}
				taken, refused = taken+len(abandoned), refused+len(rows)
			}
			equal(t, "how many were taken over", taken, 3)
			equal(t, "how many were refused", refused, 1000)
		})
	}
}

// A row that cannot even be failed is left alone.
func TestARowThatCannotBeChangedIsLeftAlone(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.refusing(`true`)
	bad := b.insert("priority=5", "kind='other'")
	good := b.insert()
	var got []string
	refused := 0
	for range 10 {
		claimed, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop", "other"}, Max: 9})
		if err != nil {
			t.Fatal(err)
		}
		refused += len(claimed.Refused)
		if s := ids(claimed.Tasks); s != "" {
			got = append(got, s)
		}
	}
	equal(t, "what was claimed", strings.Join(got, " "), good)
	equal(t, "how often it was refused", refused, 1)
	equal(t, "the row", b.one(`SELECT status FROM onejob.tasks WHERE id = $1::text::bigint`, bad), "pending")
}

// A row that Postgres refuses to take over keeps no others of its session, nor those
// of other dead sessions.
func TestOneRefusedRowStopsNoTakeover(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	other := *b
	other.session = "6f1ed002-ab59-42fb-a0b4-0123456789ab"
	bad, mine, theirs := b.claimed("kind='other'"), b.claimed(), other.claimed()
	b.refusing(`NEW.status <> 'running'`)
	taken := map[int64]bool{}
	refusals := 0
	for range 3 {
		abandoned, refused, err := b.TakeOver(t.Context(), []string{b.session, other.session}, 3)
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range abandoned {
			taken[o.ID] = true
		}
		for _, r := range refused {
			refusals++
			equal(t, "the refused row", r.ID, bad.ID)
		}
	}
	equal(t, "what was taken over", fmt.Sprint(taken), fmt.Sprint(map[int64]bool{mine.ID: true, theirs.ID: true}))
	equal(t, "how often it was refused", refusals, 1)
}

// withoutRules makes the table take what it took once.
func (b *bench) withoutRules() {
	b.t.Helper()
	for _, constraint := range []string{"run_at_is_from_year_1_to_9999_or_infinity", "created_started_and_finished_at_are_from_year_1_to_9999",
		"timeout_is_at_most_100_years", "attempt_and_crashes_are_at_most_a_million", "a_running_task_has_session_replica_fence_and_started_at"} {
		b.sql(`ALTER TABLE onejob.tasks DROP CONSTRAINT ` + constraint)
	}
	b.sql(`DROP TRIGGER payload_is_at_most_4_mib ON onejob.tasks`)
}

// Rows from before the table refused them.
func TestRowsFromBefore(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.withoutRules()
	for _, columns := range []string{"run_at='-infinity'", "created_at='infinity'", "created_at='-infinity'", "timeout='178000000 years'",
		"timeout='213503 days 23:34:34.709552'", "attempt=1000000", "crashes=2147483647", "run_at='4713-01-01 BC'"} {
		b.Forget() // or else it may look behind the last one only later
		task := b.claimed(columns)
		if task.Timeout < 0 {
			t.Errorf("%s: the timeout is %v", columns, task.Timeout)
		}
		if err := b.Complete(t.Context(), succeeded(task)); err != nil {
			t.Errorf("%s: %v", columns, err)
		}
	}
	large := b.insert(`payload=to_jsonb(repeat('x', 5 << 20))`)
	claimed, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Max: 9})
	if err != nil || len(claimed.Refused) != 1 || fmt.Sprint(claimed.Refused[0].ID) != large {
		t.Fatalf("a claim of a payload that is too long: %+v, %v", claimed, err)
	}
	equal(t, "its row", b.one(`SELECT status || ': ' || error FROM onejob.tasks WHERE id = $1::text::bigint`, large),
		"failed: the payload has 5242882 bytes, of at most 4194304")
	b.sql(`INSERT INTO onejob.tasks (kind, status, session, replica, fence, started_at, crashes) VALUES ('noop', 'running', $1, 'r', 1, now(), 2147483647)`, "6f1ed002-ab59-42fb-a0b4-0123456789ab")
	b.sql(`INSERT INTO onejob.tasks (kind, status, session, replica, fence, started_at) VALUES ('noop', 'running', $1, 'r', 2, 'infinity')`, "6f1ed002-ab59-42fb-a0b4-0123456789ab")
	mine := *b
	mine.session = "6f1ed002-ab59-42fb-a0b4-0123456789ab"
	healthy := mine.claimed()
	if _, _, err := b.TakeOver(t.Context(), []string{mine.session}, 3); err != nil {
		t.Error(err)
	}
	equal(t, "a healthy row of the same session", b.row(healthy, "status"), "pending")
}

// Payloads are read in portions, and rows for which there is no room are requeued.
func TestPayloadsInPortions(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	random := make([]byte, 250_000)
	_, _ = rand.Read(random)
	payload := `"` + hex.EncodeToString(random) + `"` // half a megabyte that cannot be compressed to less than half
	for i := range 20 {
		b.sql(`INSERT INTO onejob.tasks (kind, payload, priority) VALUES ('noop', $1, $2)`, payload, -i)
	}
	claim := func(bytes int) []*tasks.Task {
		t.Helper()
		b.Forget() // what is requeued may be behind the last one
		claimed, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Max: 20, MaxBytes: bytes})
		if err != nil {
			t.Fatal(err)
		}
		return claimed.Tasks
	}
	few := claim(1 << 20)
	if n := len(few); n < 2 || n > 6 {
		t.Errorf("a megabyte has room for %d", n)
	}
	equal(t, "the rows that are running", b.one(`SELECT count(*) FROM onejob.tasks WHERE status = 'running'`), fmt.Sprint(len(few)))
	equal(t, "attempts used up by the rest", b.one(`SELECT max(attempt) FROM onejob.tasks WHERE status = 'pending'`), "0")
	for i, task := range append(few, claim(0)...) {
		equal(t, "the place in the order", int(task.Priority), -i)
		equal(t, "the length of a payload", len(task.Payload), len(payload))
	}
	equal(t, "the rows that are running", b.one(`SELECT count(*) FROM onejob.tasks WHERE status = 'running'`), "20")
}

// A transaction that locks rows, or references them, does not block the others.
func TestAnOpenTransactionHidesNothing(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`INSERT INTO onejob.tasks (kind, run_at) SELECT 'noop', now() - interval '1 hour' + i * interval '1 ms' FROM generate_series(1, 3000) i`)
	b.sql(`CREATE TABLE public.mine (task bigint REFERENCES onejob.tasks)`)
	tx, err := b.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	if _, err := tx.Exec(t.Context(), `INSERT INTO public.mine SELECT id FROM onejob.tasks ORDER BY id LIMIT 100`); err != nil {
		t.Fatal(err)
	}
	if list := ids(b.claimNext(4)); list != "1 2 3 4" {
		t.Fatalf("beside foreign keys %q are claimed, want the first four", list)
	}
	if _, err := tx.Exec(t.Context(), `UPDATE onejob.tasks SET payload = '1' WHERE id BETWEEN 5 AND 2900`); err != nil {
		t.Fatal(err)
	}
	got := 0
	for range 40 {
		for _, task := range b.claimNext(32) {
			if task.ID < 2901 {
				t.Fatalf("task %d was claimed, which is locked", task.ID)
			}
			got++
		}
	}
	equal(t, "tasks claimed behind 2,896 locked ones", got, 100)
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, "what was locked is claimed", func() bool {
		if _, err := b.LookBehind(t.Context(), tasks.Claim{Kinds: []string{"noop", "other"}}); err != nil {
			t.Fatal(err)
		}
		got += len(b.claimNext(512))
		return got == 2996
	})
}

// Rows that become due, or free, behind where claims go on. Nobody calls LookBehind for kinds that
// have a limit: claims of them find such rows themselves, however much looking costs.
func TestLookBehind(t *testing.T) {
	t.Parallel()
	c := tasks.Claim{Kinds: []string{"noop", "other"}}
	for name, called := range map[string]bool{"called": true, "not called": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			b.claimed("lock_key='busy'", "run_at=now() - interval '1 day'")
			b.sql(`INSERT INTO onejob.tasks (kind, run_at, lock_key) SELECT 'noop', now() - interval '1 hour' + i * interval '1 ms', 'busy' FROM generate_series(1, 60000) i`)
			last := b.insert("lock_key='other'")
			testenv.Eventually(t, time.Minute, "the row behind 60,000 is claimed", func() bool { return ids(b.claimNext(9)) == last })
			late := b.insert("lock_key='late'", "run_at=now() - interval '2 hours'")
			if kinds, err := b.DueKinds(t.Context(), c); !called {
				equal(t, "the kinds that are due", fmt.Sprint(kinds, err), "[noop] <nil>")
			}
			testenv.Eventually(t, time.Minute, "the row before them is claimed", func() bool {
				if called {
					if _, err := b.LookBehind(t.Context(), c); err != nil {
						t.Fatal(err)
					}
				}
				return ids(b.claimNext(9)) == late
			})
			urgent := b.insert("priority=1", "lock_key='urgent'")
			equal(t, "an urgent row", ids(b.claimNext(9)), urgent)
		})
	}
}

// Rows of one time are looked at in parts, by their IDs. No row is left out between two.
func TestLookBehindPartOfAMoment(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`INSERT INTO onejob.tasks (kind, run_at) SELECT 'noop', '2026-05-01 12:00 UTC' FROM generate_series(1, 20)`)
	lane, err := strconv.ParseInt(b.one(`SELECT DISTINCT onejob.lane(priority, queue, kind, lock_key IS NULL) FROM onejob.tasks`), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	for from := range int64(23) {
		for to := range int64(23) {
			want := max(1, from)
			if want >= to || want > 20 {
				want = 0
			}
			got, err := store.FirstBehind(t.Context(), b.Store, lane, time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC), from, to)
			if err != nil || got != want {
				t.Fatalf("from %d to %d the first row is %d (%v), want %d", from, to, got, err, want)
			}
		}
	}
}

// A look that takes longer than a statement may is not made again as it was.
func TestLookBehindThatTakesTooLong(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.Store = open(t, store.Config{DSN: b.dsn, Timeout: 5 * time.Second})
	b.insert()
	c := tasks.Claim{Kinds: []string{"noop", "other"}}
	b.claimNext(9)
	b.Expensive()
	_, end := openTransaction(t, b.dsn, `BEGIN`, `LOCK TABLE onejob.tasks IN ACCESS EXCLUSIVE MODE`)
	if _, err := b.LookBehind(t.Context(), c); err == nil {
		t.Fatal("it looked at a table that is locked")
	}
	end()
	if n := store.Portions(b.Store); n < 10 {
		t.Errorf("there are %d portions", n)
	}
}

// One lock key under a limit, with more rows than anybody would look at.
func TestADeepLockKeyUnderALimit(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	c := tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Limit: "l", Max: 1}
	claim := func() string {
		for range 100 {
			claimed, err := b.Claim(t.Context(), c)
			if err != nil {
				t.Fatal(err)
			}
			if len(claimed.Tasks) > 0 || !claimed.More {
				return ids(claimed.Tasks)
			}
		}
		t.Fatal("there is always more")
		return ""
	}
	first := b.insert("limit_name='l'", "lock_key='deep'", "run_at=now() - interval '1 day'")
	equal(t, "the first of the key", claim(), first)
	b.sql(`INSERT INTO onejob.tasks (kind, limit_name, lock_key, run_at) SELECT 'noop', 'l', 'deep', now() - interval '1 hour' FROM generate_series(1, 20000)`)
	equal(t, "what there is while the key is busy", claim(), "")
	behind := b.insert("limit_name='l'", "lock_key='other'")
	equal(t, "what is behind it", claim(), behind)

	b.sql(`INSERT INTO onejob.tasks (kind, limit_name) SELECT 'noop', 'unknown-' || i FROM generate_series(1, 3000) i`)
	due, err := b.DueLimits(t.Context(), c, []string{"l", "none"})
	equal(t, "the limits that are due", fmt.Sprint(due, err), "[l] <nil>")
	unknown, err := b.UnknownLimits(t.Context(), []string{"l", "unknown-1"}, 3)
	equal(t, "some that nobody knows", fmt.Sprint(unknown, err), "[unknown-10 unknown-100 unknown-1000] <nil>")
	none, err := b.UnknownLimits(t.Context(), append(b.sql(`SELECT DISTINCT limit_name FROM onejob.tasks WHERE limit_name IS NOT NULL`), "x"), 3)
	equal(t, "none that nobody knows", fmt.Sprint(none, err), "[] <nil>")
}

// Each unknown name has its turn, whatever the others are.
func TestUnknownLimitsComeInTurn(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`INSERT INTO onejob.tasks (kind, limit_name) SELECT 'noop', 'name-' || to_char(i % 50, 'FM00') FROM generate_series(0, 499) i`)
	var names []string
	for range 4 {
		some, err := b.UnknownLimits(t.Context(), []string{"name-07", "other"}, 20)
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, some...)
	}
	var want []string
	for i := range 50 + 20 {
		if i %= 50; i != 7 {
			want = append(want, fmt.Sprintf("name-%02d", i))
		}
	}
	want = append(want, "name-20")
	equal(t, "the names", strings.Join(names, " "), strings.Join(want, " "))
}

// A finished task to which a table of the user's refers cannot be deleted, nor one that a trigger
// keeps.
func TestOneReferencedRowStopsNoRetention(t *testing.T) {
	t.Parallel()
	for _, why := range []string{"a foreign key", "a trigger"} {
		t.Run(why, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			b.sql(`CREATE TABLE public.mine (task bigint)`)
			if why == "a trigger" {
				b.sql(`CREATE FUNCTION public.hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF EXISTS (SELECT FROM public.mine WHERE task = OLD.id) THEN RAISE insufficient_privilege; END IF;
    RETURN OLD;
END $$`)
				b.sql(`CREATE TRIGGER hold BEFORE DELETE ON onejob.tasks FOR EACH ROW EXECUTE FUNCTION public.hold()`)
			} else {
				b.sql(`ALTER TABLE public.mine ADD FOREIGN KEY (task) REFERENCES onejob.tasks`)
			}
			retainsTheOthers(t, b, "1 hour")
			b.sql(`TRUNCATE onejob.tasks, public.mine RESTART IDENTITY CASCADE`)
			b.Store = open(t, store.Config{DSN: b.dsn}) // which has passed over no row yet
			retainsTheOthers(t, b, "0")                 // as of tasks whose outcomes were written together
		})
	}
}

func retainsTheOthers(t *testing.T, b *bench, apart string) {
	t.Helper()
	b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at, keep_for)
SELECT 'noop', 'succeeded', now() - interval '1 hour' - i * $1::text::interval, CASE WHEN i % 3 = 0 THEN interval '1 minute' END FROM generate_series(1, 30) i`, apart)
	b.sql(`INSERT INTO public.mine SELECT id FROM onejob.tasks WHERE id IN (3, 10, 30)`)
	var refused []string
	for more := true; more; {
		_, again, rows, err := b.Purge(t.Context(), tasks.StatusSucceeded, time.Minute, 8)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range rows {
			refused = append(refused, fmt.Sprint(r.ID))
		}
		more = again
	}
	equal(t, "what is left", strings.Join(b.sql(`SELECT id FROM onejob.tasks ORDER BY id`), " "), "3 10 30")
	slices.Sort(refused)
	equal(t, "what was refused", strings.Join(refused, " "), "10 3 30")
}

// A table of the user's that refers to nearly all finished tasks costs some deletions for each of
// them, and not as many as a statement has rows.
func TestManyReferencedRowsCostLittle(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.sql(`CREATE SEQUENCE public.tries`) // which no rollback takes back
	b.sql(`CREATE FUNCTION public.try() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM nextval('public.tries'); RETURN OLD; END $$`)
	b.sql(`CREATE TRIGGER try BEFORE DELETE ON onejob.tasks FOR EACH ROW EXECUTE FUNCTION public.try()`)
	b.sql(`CREATE TABLE public.mine (task bigint REFERENCES onejob.tasks)`)
	b.sql(`INSERT INTO onejob.tasks (kind, status, finished_at) SELECT 'noop', 'succeeded', now() - i * interval '1 hour' FROM generate_series(1, 600) i`)
	b.sql(`INSERT INTO public.mine SELECT id FROM onejob.tasks WHERE id % 100 <> 0 AND id > 100`)
	deleted, refused := 0, map[int64]bool{}
	for more := true; more; {
		n, again, rows, err := b.Purge(t.Context(), tasks.StatusSucceeded, time.Minute, 1000)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range rows {
			if refused[r.ID] {
				t.Errorf("task %d was refused twice", r.ID)
			}
			refused[r.ID] = true
		}
		deleted, more = deleted+n, again
	}
	equal(t, "how many were deleted", deleted, 105)
	equal(t, "how many were refused", len(refused), 495)
	if tries := b.one(`SELECT last_value FROM public.tries`); len(tries) > 4 || len(tries) == 4 && tries > "5000" {
		t.Errorf("%s rows were deleted, and most of them put back", tries)
	}
}

// An outcome that a row does not take, whatever is in it, keeps nobody's waiting.
func TestARowThatTakesNoOutcome(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	bad, good, back := b.claimed("kind='other'"), b.claimed(), b.claimed()
	b.refusing(`NEW.status <> 'running'`)
	e := succeeded(bad)
	e.Result = jsonOf(`1`)
	errs := b.gathered([]tasks.Completion{e, succeeded(good)})
	if !errors.Is(errs[0], tasks.ErrUnwritable) || errs[1] != nil {
		t.Errorf("the outcomes were answered with %v", errs)
	}
	if err := b.Requeue(t.Context(), bad, 0); err == nil {
		t.Error("it was requeued")
	}
	if err := b.Requeue(t.Context(), back, 0); err != nil {
		t.Error(err)
	}
}

func TestDurations(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for _, text := range []string{"1 microsecond", "1 year", "13 months 5 days 00:00:01.5", "100 years", "290 years"} {
		var i pgtype.Interval
		if err := b.pool.QueryRow(t.Context(), `SELECT $1::text::interval`, text).Scan(&i); err != nil {
			t.Fatal(err)
		}
		equal(t, text, fmt.Sprint(store.Duration(i).Microseconds()), b.one(`SELECT (extract(epoch FROM $1::text::interval) * 1000000)::bigint`, text))
	}
	// What Go cannot hold must not wrap round to a short or negative time.
	for _, text := range []string{"1000 years", "178000000 years", "213503 days 23:34:34.709552"} {
		var i pgtype.Interval
		if err := b.pool.QueryRow(t.Context(), `SELECT $1::text::interval`, text).Scan(&i); err != nil {
			t.Fatal(err)
		}
		equal(t, text, store.Duration(i), math.MaxInt64)
	}
}

// What claims leave alone for a while, another replica may run by now, and a takeover does not leave it
// alone.
func TestTakeoversDoNotAvoidWhatClaimsAvoid(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.refusingBy(`NEW.status = 'running'`, `RETURN NULL`)
	id := b.insert("kind='other'")
	claimed, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"other"}, Max: 1})
	if err != nil || len(claimed.Refused) != 1 {
		t.Fatalf("%d refused, %v", len(claimed.Refused), err)
	}
	b.sql(`DROP TRIGGER refuse ON onejob.tasks`)
	other := *b
	other.Store, other.session = open(t, store.Config{DSN: b.dsn}), uuid.NewString()
	equal(t, "what another replica claims", ids(other.claimMax(1)), id)
	abandoned, refused, err := b.TakeOver(t.Context(), []string{other.session}, 3)
	if err != nil || len(refused) > 0 || len(abandoned) != 1 {
		t.Errorf("taken over: %v, refused: %v, %v", abandoned, refused, err)
	}
}
