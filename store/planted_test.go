package store_test

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"onejob/internal/testenv"
	"onejob/store"
	"onejob/tasks"
	"onejob/tasks/schedule"
)

// A role that may CREATE in a schema on the search_path plants functions, operators,
// types and relations there. Here that schema even precedes pg_catalog, so that
// whatever name a statement leaves to the path is the planted one. None may be run,
// by any method.
func TestNothingPlantedInPublicRuns(t *testing.T) {
	bothWays(t, []string{`search_path = public, pg_catalog`}, func(t *testing.T, db *testenv.DB, cfg store.Config) {
		config, err := pgxpool.ParseConfig(db.DSN)
		if err != nil {
			t.Fatal(err)
		}
		config.ConnConfig.RuntimeParams["search_path"] = "pg_catalog"
		safe, err := pgxpool.NewWithConfig(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(safe.Close)
		planted := plant(t, db, safe)
		t.Logf("%d planted", planted)
		if planted < 500 {
			t.Fatal("those are too few")
		}

		b := &bench{t: t, Store: open(t, cfg), pool: safe, dsn: db.DSN, session: "6f1ed002-ab59-42fb-a0b4-0123456789ab"}
		ran := runEveryMethod(t, b)
		methods := reflect.TypeFor[*store.Store]()
		for i := range methods.NumMethod() {
			if name := methods.Method(i).Name; !slices.Contains(ran, name) {
				t.Errorf("the method %s was not run", name)
			}
		}

		// The functions and triggers of the schema, called by somebody whose path is
		// the database's.
		user, err := pgx.Connect(t.Context(), db.DSN)
		if err != nil {
			t.Fatal(err)
		}
		defer user.Close(context.WithoutCancel(t.Context()))
		for _, sql := range callsOfFunctions {
			if _, err := user.Exec(t.Context(), sql); err != nil {
				t.Errorf("%s: %v", sql, err)
			}
		}
		equal(t, "how many of the planted ran", b.one(`SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM planted.ran`), "0")
	})
}

// callsOfFunctions call all functions and triggers of the schema that are for people and programs.
var callsOfFunctions = []string{
	`SELECT onejob.enqueue('noop', lock_key => 'x', unique_key => 'x')`, `SELECT onejob.reserve_lock_key('k')`, `SELECT onejob.lane(1::smallint, 'q', 'k', true)`,
	`INSERT INTO onejob.tasks (kind) VALUES ('noop')`, `UPDATE onejob.tasks SET cancel_requested = true`,
	`SELECT onejob.cancel(1)`, `SELECT onejob.retry(1)`, `SELECT onejob.why(id) FROM onejob.tasks`,
	`SELECT onejob.pause_queue('q', 'a reason', '2100-01-01')`, `SELECT onejob.resume_queue('q')`, `SELECT onejob.record('a', 'b', 1)`, `UPDATE onejob.schedules SET enabled = NOT enabled`,
	`SELECT onejob.bulk('cancel', '{"kind": "noop", "error": "x", "since": "2020-01-01"}')`, `SELECT onejob.bulk('retry', '{"status": "cancelled"}', spread => '1 s')`, `SELECT onejob.bulk('delete', '{"ids": [1, 2]}')`, `SELECT onejob.run_schedule('s')`,
	`INSERT INTO onejob.schedules (name, cron, kind) VALUES ('t', '@hourly', 'noop')`, `UPDATE onejob.schedules SET cron = '@daily'`,
	`DELETE FROM onejob.tasks`,
}

// Functions that later migrations make or replace lose these unless they say so.
// onejob.lane has neither: every INSERT computes it, as part of the statement. All in
// it is qualified.
func TestFunctionsHaveAFixedPathAndAreNotForEverybody(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for _, f := range b.sql(`SELECT oid::regprocedure::text FROM pg_proc WHERE pronamespace = 'onejob'::regnamespace AND proname <> 'lane' AND NOT coalesce('search_path=pg_catalog, pg_temp' = ANY (proconfig), false)`) {
		t.Errorf("%s has no SET search_path = pg_catalog, pg_temp", f)
	}
	for _, f := range b.sql(`SELECT oid::regprocedure::text FROM pg_proc WHERE pronamespace = 'onejob'::regnamespace AND proname <> 'lane' AND has_function_privilege('public', oid, 'EXECUTE')`) {
		t.Errorf("PUBLIC may EXECUTE %s", f)
	}
	equal(t, "the functions that run with their owner's rights", strings.Join(b.sql(`SELECT proname FROM pg_proc WHERE pronamespace = 'onejob'::regnamespace AND prosecdef ORDER BY 1`), " "), "bulk cancel delete_attempts forget_ended_pauses keep_former_schedule pause_queue pause_schedule record record_schedule resume_queue resume_schedule retry run_schedule")
}

// plant makes, as a role that may do nothing but CREATE in public, everything that
// statements of the store, and functions of the schema, may find there if they look.
// It returns how many there are.
func plant(t *testing.T, db *testenv.DB, safe *pgxpool.Pool) int {
	t.Helper()
	must := func(pool *pgxpool.Pool, sql string, args ...any) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	role := "planter_" + db.Name
	// A sequence counts even if the transaction is rolled back.
	must(safe, `CREATE ROLE `+role+` LOGIN`)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		_, _ = safe.Exec(ctx, `DROP OWNED BY `+role+` CASCADE`)
		_, _ = safe.Exec(ctx, `DROP ROLE `+role)
	})
	must(safe, `CREATE SCHEMA planted; CREATE SEQUENCE planted.ran; GRANT USAGE ON SCHEMA planted TO PUBLIC; GRANT ALL ON SEQUENCE planted.ran TO PUBLIC; GRANT CREATE ON SCHEMA public TO `+role)
	config, err := pgxpool.ParseConfig(as(t, db.DSN, role))
	if err != nil {
		t.Fatal(err)
	}
	config.ConnConfig.RuntimeParams["search_path"] = "pg_catalog"
	config.MaxConns = 1
	planter, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer planter.Close()

	// All words of the statements: their functions are among them.
	words := map[string]bool{}
	for _, pattern := range []string{"*.go", "../migrations/*.sql"} {
		paths, err := filepath.Glob(pattern)
		if err != nil || len(paths) == 0 {
			t.Fatal(pattern, err)
		}
		for _, path := range paths {
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			for _, w := range regexp.MustCompile(`[a-z_][a-z_0-9]+`).FindAllString(string(text), -1) {
				words[w] = true
			}
		}
	}
	var list []string
	for w := range words {
		list = append(list, w)
	}
	// Functions in PL/pgSQL cannot have pseudo-types as arguments; those are left out.
	must(planter, `
CREATE FUNCTION public.planted_here(what text) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
    PERFORM nextval('planted.ran');
    RAISE EXCEPTION 'planted: %', what;
END $$`)
	must(planter, `CREATE FUNCTION public.planted_bool(what text) RETURNS bool LANGUAGE plpgsql SET search_path = pg_catalog AS $$ BEGIN PERFORM public.planted_here(what); RETURN true; END $$`)
	const body = `LANGUAGE plpgsql SET search_path = pg_catalog AS $f$ BEGIN PERFORM public.planted_here(%L); RETURN NULL; END $f$`
	var planted int
	for _, sql := range []string{
		// The same signature.
		`SELECT format('CREATE FUNCTION public.%I(%s) RETURNS %s ` + body + `', proname, pg_get_function_identity_arguments(oid), pg_get_function_result(oid), proname)
		   FROM pg_proc
		  WHERE pronamespace = 'pg_catalog'::regnamespace AND proname = ANY ($1) AND prokind IN ('f', 'a', 'w') AND provariadic = 0`,
		// Signatures that fit literals, and the arguments of (VARIADIC "any"), better.
		`WITH types(t) AS (VALUES ('text'), ('int'), ('bigint')),
		      names AS (SELECT DISTINCT proname FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND proname = ANY ($1) AND prokind = 'f')
		 SELECT format('CREATE FUNCTION public.%I(%s) RETURNS text ` + body + `', proname, args, proname)
		   FROM names
		  CROSS JOIN (SELECT a.t FROM types a
		           UNION ALL SELECT concat_ws(',', a.t, b.t) FROM types a, types b
		           UNION ALL SELECT concat_ws(',', a.t, b.t, c.t) FROM types a, types b, types c
		           UNION ALL SELECT concat_ws(',', 'text', a.t, b.t, c.t) FROM types a, types b, types c
		           UNION ALL SELECT 'text,text,bool') AS signatures(args)`,
		// Operators.
		`WITH f AS (
		     SELECT o.*, 'operator_' || o.oid AS name
		       FROM pg_operator o
		      WHERE oprnamespace = 'pg_catalog'::regnamespace AND oprname IN ('=', '<>', '<', '<=', '>', '>=', '+', '-', '*', '||', '~', '!~', '|', '&', '<<', '>>', '#>', '->', '?') AND oprleft <> 0)
		 SELECT format('CREATE FUNCTION public.%I(%s, %s) RETURNS %s ` + body + `; CREATE OPERATOR public.%s (LEFTARG = %2$s, RIGHTARG = %3$s, FUNCTION = public.%1$I)',
		               name, oprleft::regtype, oprright::regtype, oprresult::regtype, format('%s %s %s', oprleft::regtype, oprname, oprright::regtype), oprname)
		   FROM f WHERE $1::text[] IS NOT NULL`,
		`SELECT format('CREATE FUNCTION public.operator_better(int, interval) RETURNS interval ` + body + `; CREATE OPERATOR public.* (LEFTARG = int, RIGHTARG = interval, FUNCTION = public.operator_better)', '*') WHERE $1::text[] IS NOT NULL`,
		// Types and relations.
		`SELECT format('CREATE DOMAIN public.%I AS pg_catalog.%1$I CHECK (public.planted_bool(%L))', typname, typname)
		   FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace AND typname = ANY ($1) AND typtype = 'b'
		    AND typname NOT IN ('any')`,
		`SELECT format('CREATE VIEW public.%I AS SELECT c.* FROM pg_catalog.%1$I c WHERE public.planted_bool(%L)', relname, relname)
		   FROM pg_class WHERE relnamespace = 'pg_catalog'::regnamespace AND relname = ANY ($1) AND relkind IN ('r', 'v')`,
	} {
		rows, err := safe.Query(t.Context(), sql, list)
		if err != nil {
			t.Fatal(err)
		}
		statements, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
		before := planted
		for _, statement := range statements {
			if _, err := planter.Exec(t.Context(), statement); err == nil { // pseudo-types cannot be had
				planted++
			}
		}
		if planted == before {
			t.Errorf("nothing was planted by %s; the first of %d is %v", sql, len(statements), statements[:min(1, len(statements))])
		}
	}

	// They work: a client with the database's path runs them.
	naive, err := pgx.Connect(t.Context(), db.DSN)
	if err != nil {
		t.Fatal(err)
	}
	defer naive.Close(context.WithoutCancel(t.Context()))
	for _, sql := range []string{`SELECT hashtextextended('k', 1)`, `SELECT nextval('planted.ran')`, `SELECT now()`, `SELECT 'a'::text`, `SELECT 1 + 1`, `SELECT format('%s', 'x'::varchar)`,
		`SELECT 1::bigint * interval '1 s'`, `SELECT 'a'::varchar = 'b'::varchar`, `SELECT set_config('a.b', '', true)`, `SELECT pid FROM pg_locks`} {
		if _, err := naive.Exec(t.Context(), sql); err == nil || !strings.Contains(err.Error(), "planted") {
			t.Errorf("%s: %v", sql, err)
		}
	}
	must(safe, `SELECT setval('planted.ran', 1, false)`)
	return planted
}

// runEveryMethod calls every method of a store, each so that it has something to do,
// and returns their names.
func runEveryMethod(t *testing.T, b *bench) (ran []string) {
	t.Helper()
	ctx := t.Context()
	ok := func(name string, err error) {
		t.Helper()
		ran = append(ran, name)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	ok("Ping", b.Ping(ctx))
	v, err := b.SchemaVersion(ctx)
	ok("SchemaVersion", err)
	if v.Have < v.Want {
		ok("Migrate", b.Migrate(ctx, nil))
	}
	ok("Migrate", b.Migrate(ctx, nil))
	ok("CheckSchema", b.CheckSchema(ctx))
	ok("CheckRights", b.CheckRights(ctx))
	ok("CheckEncoding", b.CheckEncoding(ctx))
	ok("CheckPool", b.CheckPool(ctx))
	_, err = b.CheckPath(ctx)
	ok("CheckPath", err)
	ok("CheckStatement", b.CheckStatement(ctx, "SELECT 1", 0))
	_, err = b.References(ctx)
	ok("References", err)
	_, err = b.Version(ctx)
	ok("Version", err)
	_, err = b.HeldSnapshots(ctx, 0)
	ok("HeldSnapshots", err)
	_, _, err = b.Clock(ctx)
	ok("Clock", err)
	_, err = b.AfterSetBack(ctx)
	ok("AfterSetBack", err)
	_, err = b.SchedulesAhead(ctx)
	ok("SchedulesAhead", err)
	_, err = b.SchedulesInZones(ctx, 0)
	ok("SchedulesInZones", err)
	_, _, err = b.SetNext(ctx, schedule.Ahead{}, time.Now())
	ok("SetNext", err)
	err = nil
	if b.Follow(ctx, tasks.Server{}) {
		err = errors.New("there is a successor")
	}
	ok("Follow", err)
	for _, h := range b.Hosts(ctx) {
		ok("Hosts", h.Err)
	}
	_, _, err = b.Overlaps(ctx, 1)
	ok("Overlaps", err)
	o, err := b.Overview(ctx)
	ok("Overview", errors.Join(err, o.Replicas.Err, o.Waiting.Err, o.Nameless.Err, o.Running.Err, o.Schedules.Err, o.Failures.Err, o.Overlaps.Err, o.Held.Err))
	_, err = b.SeesAllBackends(ctx)
	ok("SeesAllBackends", err)

	id, err := b.ClusterID(ctx)
	ok("ClusterID", err)
	ok("AdoptConsul", b.AdoptConsul(ctx, id, nil, true, "one", func(context.Context, string) error { return nil }))
	if id, err = b.ClusterID(ctx); id == "" {
		t.Errorf("no id (%v)", err)
	}
	replica := tasks.Replica{Session: uuid.NewString(), Process: uuid.NewString(), Name: "two", State: tasks.ReplicaWorking}
	ok("Join", b.Join(ctx, id, replica))
	answer, err := b.Beat(ctx, replica, tasks.Known{})
	ok("Beat", err)
	if len(answer.Replicas) != 1 {
		t.Fatalf("the answer is %+v", answer)
	}
	_, err = b.DeclareDead(ctx, answer.Replicas[0], false)
	ok("DeclareDead", err)
	_, err = b.Replicas(ctx)
	ok("Replicas", err)
	_, err = b.Names(ctx)
	ok("Names", err)
	ok("EndReplica", b.EndReplica(ctx, replica.Session, tasks.ReplicaStopped))
	_, err = b.DeclareProcessDead(ctx, replica.Process)
	ok("DeclareProcessDead", err)
	_, err = b.ForgetReplicas(ctx, nil)
	ok("ForgetReplicas", err)

	var ids []int64
	for _, n := range []store.NewTask{
		{Kind: "noop"}, {Kind: "noop", LockKey: "k", UniqueKey: "u", Delay: time.Microsecond}, {Kind: "noop", Timeout: time.Minute, RunAt: time.Now().Add(-time.Hour)},
		{Kind: "noop", LimitName: "l", LockKey: "m"}, {Kind: "other", Payload: jsonOf(`{"a": 1}`)}, {Kind: "other"}, {Kind: "other", Priority: 1, Queue: "q"}, {Kind: "unknown"},
	} {
		id, err := b.Enqueue(ctx, n)
		ok("Enqueue", err)
		ids = append(ids, id)
	}
	claim := tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop", "other"}, Max: 100}
	_, err = b.DueKinds(ctx, claim)
	ok("DueKinds", err)
	_, err = b.DueLimits(ctx, claim, []string{"l"})
	ok("DueLimits", err)
	_, err = b.Backlog(ctx)
	ok("Backlog", err)
	_, err = b.Limited(ctx)
	ok("Limited", err)
	_, err = b.UnknownLimits(ctx, nil, 10)
	ok("UnknownLimits", err)
	_, err = b.UnknownKinds(ctx, claim.Kinds)
	ok("UnknownKinds", err)
	_, err = b.Cancel(ctx, ids[7])
	ok("Cancel", err)
	_, err = b.Retry(ctx, ids[7])
	ok("Retry", err)
	var claimed, limited []*tasks.Task
	b.join()
	claim.Session = b.session
	for len(claimed) < 6 && !t.Failed() {
		c, err := b.Claim(ctx, claim)
		ok("Claim", err)
		claimed = append(claimed, c.Tasks...)
	}
	b.Expensive() // or else it does not look
	_, err = b.LookBehind(ctx, claim)
	ok("LookBehind", err)
	claim.Limit = "l"
	for len(limited) < 1 && !t.Failed() {
		c, err := b.Claim(ctx, claim)
		ok("Claim", err)
		limited = append(limited, c.Tasks...)
	}
	if t.Failed() {
		t.FailNow()
	}
	_, err = b.Cancel(ctx, claimed[0].ID)
	ok("Cancel", err)
	_, err = b.CancelRequests(ctx, b.session)
	ok("CancelRequests", err)
	_, err = b.Held(ctx, b.session)
	ok("Held", err)
	server, err := b.Which(ctx)
	ok("Which", err)
	_, err = b.Server(ctx)
	ok("Server", err)
	ok("Recorded", b.Recorded(ctx, 0))
	b.Refuse(server)
	ok("Refuse", nil)
	_, err = b.Sessions(ctx, "another")
	ok("Sessions", err)
	e := succeeded(claimed[0])
	e.Result, e.ExitCode = jsonOf(`{"b": 2}`), new(int)
	ok("Complete", b.Complete(ctx, e))
	e.Fence = -1
	if err := b.Complete(ctx, e); !errors.Is(err, tasks.ErrRefused) {
		t.Errorf("a wrong fence: %v", err)
	}
	ok("Complete", b.Complete(ctx, tasks.Completion{ID: claimed[1].ID, Fence: claimed[1].Fence, Session: claimed[1].Session, Outcome: tasks.Failed, Next: tasks.StatusPending, Delay: time.Hour, Error: "it broke"}))
	ok("Begin", b.Begin(ctx, claimed[2]))
	ok("Requeue", b.Requeue(ctx, claimed[2], time.Second))
	ok("CompleteWith", b.CompleteWith(ctx, claimed[3], func(ctx context.Context, tx pgx.Tx) (json.RawMessage, error) {
		_, err := tx.Exec(ctx, `SELECT pg_catalog.current_setting('onejob.fence')`)
		return jsonOf(`{}`), err
	}))
	ok("EndReplica", b.EndReplica(ctx, b.session, tasks.ReplicaLost))
	_, _, err = b.TakeOver(ctx, []string{b.session}, 1)
	ok("TakeOver", err)
	_, err = b.List(ctx, store.Filter{Status: "failed", Limit: 10})
	ok("List", err)
	_, attempts, err := b.Show(ctx, claimed[1].ID)
	ok("Show", err)
	equal(t, "the number of attempts", len(attempts), 1)
	_, err = b.Row(ctx, claimed[1].ID)
	ok("Row", err)
	_, err = b.Attempts(ctx, claimed[1].ID, 1)
	ok("Attempts", err)

	b.sql(`INSERT INTO onejob.schedules (name, cron, kind, on_overlap) VALUES ('s', '@hourly', 'noop', 'queue'), ('x', '@daily', 'noop', 'skip')`)
	now, due, err := b.DueSchedules(ctx, nil)
	ok("DueSchedules", err)
	if len(due) != 2 {
		t.Fatalf("%d schedules are due", len(due))
	}
	_, made, err := b.MakeOccurrences(ctx, due[0], schedule.Plan{
		Occurrences: []schedule.Occurrence{{Due: now.Add(-time.Hour)}, {Due: now.Add(-time.Minute), Skipped: "missed"}}, Next: now.Add(time.Hour)})
	ok("MakeOccurrences", err)
	equal(t, "the number of tasks made", made, 1)
	_, err = b.MarkSchedule(ctx, due[1], "it is odd")
	ok("MarkSchedule", err)
	b.sql(`UPDATE onejob.schedules SET cron = '@weekly' WHERE name = $1`, due[1].Name)
	_, edited, err := b.DueSchedules(ctx, nil)
	ok("DueSchedules", err)
	if len(edited) != 1 || len(edited[0].Former) != 1 {
		t.Fatalf("after an edit %v are due", edited)
	}
	_, _, err = b.MakeOccurrences(ctx, edited[0], schedule.Plan{Keep: true, Done: []int64{edited[0].Former[0].ID}})
	ok("MakeOccurrences", err)
	_, err = b.UntilNextSchedule(ctx, time.Minute, nil)
	ok("UntilNextSchedule", err)
	_, err = b.Schedules(ctx)
	ok("Schedules", err)
	_, row, err := b.Schedule(ctx, due[0].Name)
	ok("Schedule", err)
	_, err = b.Occurrences(ctx, row.ID, 10)
	ok("Occurrences", err)
	skipped, err := b.SkippedDueTimes(ctx, row.ID, now.Add(-2*time.Hour), now, 10)
	ok("SkippedDueTimes", err)
	_, err = b.WithoutTask(ctx, row.ID, skipped)
	ok("WithoutTask", err)
	_, err = b.Backfill(ctx, row, skipped)
	ok("Backfill", err)
	_, err = b.Story(ctx, ids[1])
	ok("Story", err)
	_, err = b.Unended(ctx, "u")
	ok("Unended", err)
	_, _, err = b.Status(ctx, ids[1])
	ok("Status", err)
	_, err = b.Find(ctx, "k")
	ok("Find", err)
	for _, id := range ids { // some wait, one runs, some have ended
		_, err = b.Why(ctx, id)
		ok("Why", err)
	}
	ok("PauseQueue", b.PauseQueue(ctx, "q", "a test", time.Time{}, time.Hour))
	_, err = b.PausedQueues(ctx)
	ok("PausedQueues", err)
	_, err = b.Why(ctx, ids[6])
	ok("Why", err)
	_, err = b.ResumeQueue(ctx, "q")
	ok("ResumeQueue", err)
	ok("Record", b.Record(ctx, "an action", "a target"))
	_, err = b.Bulk(ctx, store.Bulk{Action: store.ActionRetry, Filter: store.TaskFilter{Queue: "nowhere", Error: "x"}, Spread: time.Second}, nil)
	ok("Bulk", err)
	_, err = b.Now(ctx)
	ok("Now", err)
	_, err = b.Delete(ctx, math.MaxInt64)
	ok("Delete", err)
	_, err = b.RunSchedule(ctx, "none")
	ok("RunSchedule", err)
	_, err = b.UnservedQueues(ctx, 10)
	ok("UnservedQueues", err)
	_, err = b.PurgeActions(ctx, 0, 10)
	ok("PurgeActions", err)
	_, err = b.PauseSchedule(ctx, "none", "a test", time.Time{}, time.Hour)
	ok("PauseSchedule", err)
	ok("WakeAll", b.WakeAll(ctx))
	_, err = b.ResumeSchedule(ctx, "none")
	ok("ResumeSchedule", err)
	_, err = b.EnableSchedule(ctx, "x", true)
	ok("EnableSchedule", err)
	_, _, _, err = b.Purge(ctx, tasks.StatusSucceeded, 0, 10)
	ok("Purge", err)
	_, err = b.PurgeOccurrences(ctx, 0, 10)
	ok("PurgeOccurrences", err)

	listening, stop := context.WithCancel(ctx)
	defer stop()
	if err := b.Listen(listening, func(tasks.Signal, string) { stop() }); listening.Err() == nil && !(b.Pooled() && errors.Is(err, store.ErrDeaf)) {
		t.Errorf("Listen: %v", err)
	}
	return append(ran, "Listen", "Pool", "Pooled", "Close", "TurnStuck", "Forget", "Expensive", "StatementRoom") // the last seven run no statement
}
