package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"onejob/chaos/checker"
	"onejob/internal/retry"
)

// Faults that only somebody with a connection to Postgres is needed for. None of
// them takes a server away, so the work of all tasks that they do not touch must go
// on meanwhile; see history.starved in the checker.
var rowFaults = []*kind{
	{name: checker.HostileRows, what: "rows at the limits of what the table admits, among the others", weight: 2, least: 2 * time.Second, most: 20 * time.Second, gentle: true, run: insertHostile},
	{name: checker.ClaimFreeze, what: "SIGSTOP of a replica inside its claim, and SIGCONT", weight: 2, daemons: true, least: 3 * time.Second, most: 25 * time.Second, run: freezeClaim},
	{name: checker.OpenTransaction, what: "transactions that lock due rows, or refer to them, stay open", weight: 2, least: 3 * time.Second, most: 25 * time.Second, gentle: true, run: openTransactions},
	{name: checker.OutcomeRefused, what: "a trigger refuses the outcomes of some tasks, or of all", weight: 2, least: 3 * time.Second, most: 40 * time.Second, run: refuseOutcomes},
	{name: checker.RowTouched, what: "an operator edits, cancels, retries and deletes rows", weight: 2, least: 2 * time.Second, most: 15 * time.Second, gentle: true, run: touchRows},
}

// hostileRow returns the columns and values of an INSERT. The values lie on both
// sides of what the constraints admit, so Postgres refuses some rows. Values are
// literals without a type. The payloads make no task do any work that the observer
// can see.
func hostileRow(r *rand.Rand) (columns, values []string) {
	set := func(column string, value any) {
		columns, values = append(columns, column), append(values, fmt.Sprint(value))
	}
	one := func(column string, of ...any) { set(column, of[r.IntN(len(of))]) }
	seldom := func(column string, of ...any) {
		if r.IntN(8) == 0 {
			one(column, of...)
		}
	}
	letters := []rune("aé🕰'\"\\%/.: \u00a0\u202e")
	word := ""
	for range 1 + r.IntN(12) {
		word += string(letters[r.IntN(len(letters))])
	}
	long := strings.Repeat("x", 1+r.IntN(1_000_000))
	one("kind", "noop", "noop", "noop", "go", "exec", "http", "sql", "mystery", word)
	switch kind := values[0]; {
	case kind == "go": // the default would be work
		one("payload", `null`, `[]`, `"x"`, `{"ms": "soon"}`, `{"nonsense": 1}`, `{"MS": 1e400}`)
	default:
		seldom("payload", `null`, `[]`, `"x"`, `1e400`, `{"command": "no"}`, `{"statement": "no"}`, `{"url": "no"}`, `{"a": "\u202e"}`,
			strings.Repeat("[", 3000)+strings.Repeat("]", 3000), `"`+long+`"`)
	}
	seldom("queue", "default", "other", word, strings.Repeat("q", 100))
	seldom("priority", -1001, -1000, -1, 0, 1, 1000, 1000, math.MaxInt16)
	times := []any{"0001-01-01 UTC", "1970-01-01 UTC", "9999-12-31 UTC", "now", "tomorrow"}
	seldom("run_at", append(times, "infinity", "-infinity", "10000-01-01 UTC", "4713-01-01 BC")...)
	seldom("created_at", append(times, "infinity")...)
	seldom("lock_key", r.IntN(3000), fmt.Sprint("short-", r.IntN(12)), fmt.Sprint("long-", r.IntN(12)), "..", "../leader", word, strings.Repeat("🕰", 128))
	seldom("limit_name", "narrow", "wide", "none", ".lock", word, strings.Repeat("l", 100))
	seldom("unique_key", "hostile "+uuid.NewString(), strings.Repeat("u", 512))
	seldom("attempt", -1, 0, 4, 999_999, 1_000_000, math.MaxInt32)
	seldom("max_attempts", 0, 1, 2, 1000, math.MaxInt32)
	seldom("crashes", -1, 0, 2, 1_000_000, math.MaxInt32)
	intervals := []any{"0", "1 microsecond", "1 day", "100 years", "178000000 years", "1 year -1 day"}
	seldom("timeout", intervals...)
	seldom("keep_for", intervals...)
	seldom("cancel_requested", true, false)
	seldom("result", `{}`, `1e400`)
	seldom("error", word, long)
	seldom("schedule_id", -1, 1, math.MaxInt64)
	if r.IntN(4) == 0 { // what only onejob writes
		one("status", "running", "running", "running", "succeeded", "failed", "cancelled")
		one("fence", math.MinInt64, 0, 1, 1, math.MaxInt64)
		one("started_at", append(times, "now", "now", "now", "now")...)
		if status := values[slices.Index(columns, "status")]; status == "running" {
			one("session", uuid.NewString(), uuid.NewString(), uuid.Nil)
			one("replica", "nobody", "", word)
		} else {
			one("finished_at", append(times, "now", "now", "now", "now")...)
		}
	}
	return columns, values
}

// insertHostile inserts such rows in bursts. They are noted in chaos.added: the
// checker asks nothing of them.
func insertHostile(ctx context.Context, h *fault) error {
	if err := h.begins("bursts of rows"); err != nil {
		return err
	}
	accepted, refused := 0, 0
	for end := time.Now().Add(h.For); time.Now().Before(end) && ctx.Err() == nil; {
		for range 20 + h.rand.IntN(60) {
			switch err := h.insertOneHostile(ctx); {
			case err == nil:
				accepted++
			case refusesRow(err):
				refused++
			}
		}
		retry.Pause(ctx, time.Duration(h.rand.IntN(2000))*time.Millisecond)
	}
	h.c.say("%s: %d rows were accepted, %d refused", h.Kind.name, accepted, refused)
	if accepted == 0 {
		return errNothing
	}
	return nil
}

func (h *fault) insertOneHostile(ctx context.Context) error {
	columns, values := hostileRow(h.rand)
	marks, args := make([]string, len(values)), []any{pgx.QueryExecModeSimpleProtocol} // literals: each type reads itself
	for i, v := range values {
		marks[i], args = fmt.Sprintf("$%d", i+1), append(args, v)
	}
	return h.operate(ctx, fmt.Sprintf(`
WITH made AS (INSERT INTO onejob.tasks (%s) VALUES (%s) RETURNING id, kind)
INSERT INTO chaos.added (task, kind, hostile) SELECT id, kind, true FROM made`, strings.Join(columns, ", "), strings.Join(marks, ", ")), args...)
}

// refusesRow reports whether Postgres refused the values of a row.
func refusesRow(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && (strings.HasPrefix(pg.Code, "22") || strings.HasPrefix(pg.Code, "23"))
}

// endHostile cancels the hostile tasks that wait for something that never comes.
func (c *cluster) endHostile(ctx context.Context) error {
	_, err := c.operator.Exec(ctx, `
UPDATE onejob.tasks
   SET cancel_requested = true
 WHERE status IN ('pending', 'running')
   AND id IN (SELECT task FROM chaos.added WHERE hostile)`)
	if err != nil {
		return fmt.Errorf("cancel hostile tasks: %w", err)
	}
	return nil
}

const onProcessor = "on the processor"

// claimingSQL finds replicas with a connection inside a claim: it waits for its
// turn, chooses, takes, or sends what was claimed. Each statement of a claim says so in
// its first line.
const claimingSQL = `
SELECT application_name, state || ' ' || coalesce(wait_event, '` + onProcessor + `')
  FROM pg_stat_activity
 WHERE application_name = ANY ($1)
   AND state <> 'idle'
   AND (wait_event = 'ClientWrite' OR query ~ 'octet_length\(body\)' OR NOT $2)
   AND query LIKE '-- onejob claims%'
 ORDER BY random()
 LIMIT 1`

// claiming returns one of the replicas that are inside a claim, and what the
// claim does just now; empty if there is none. To those that are receiving Postgres
// sends payloads, or waits until the client takes them.
func (c *cluster) claiming(ctx context.Context, names []string, receiving bool) (name, doing string) {
	ctx, cancel := context.WithTimeout(ctx, operatorMaxWait)
	defer cancel()
	_ = c.operator.QueryRow(ctx, claimingSQL, names, receiving).Scan(&name, &doing)
	return name, doing
}

// addLarge adds rows whose payloads, of a megabyte each, are about what a claim reads at once.
// A busy machine takes seconds for them.
func (h *fault) addLarge(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 4*operatorMaxWait)
	defer cancel()
	_, err := h.c.operator.Exec(ctx, `
WITH made AS (
    INSERT INTO onejob.tasks (kind, priority, payload)
    SELECT 'noop', 1, payload FROM chaos.large, generate_series(1, 24)
 RETURNING id, kind
)
INSERT INTO chaos.added (task, kind, hostile) SELECT id, kind, false FROM made`)
	return err
}

// freezeClaim stops a replica that is inside its claim. Everything up to the answer
// takes Postgres a millisecond, with or without the client, so it is stopped while
// it receives, and large payloads make that long. SIGSTOP may come too late: a
// replica whose connections are all idle afterwards is continued, and the next claim
// is waited for. For a while only replicas count whose work it has still to meet.
func freezeClaim(ctx context.Context, h *fault) error {
	names := []string{}
	for _, r := range h.c.replicas {
		names = append(names, r.name)
	}
	var enqueued, asked time.Time
	some := names
	end := time.Now().Add(45 * time.Second)
	for anyone := end.Add(-20 * time.Second); time.Now().Before(end) && ctx.Err() == nil; {
		if time.Since(asked) > 200*time.Millisecond {
			asked = time.Now()
			if some = h.unmet(); len(some) == 0 || asked.After(anyone) {
				some = names
			}
		}
		if time.Since(enqueued) > 2*time.Second {
			enqueued = time.Now()
			if err := h.addLarge(ctx); err != nil {
				retry.Pause(ctx, time.Second) // another fault has Postgres
				continue
			}
		}
		name, _ := h.c.claiming(ctx, some, true)
		i := slices.IndexFunc(h.c.replicas, func(r *replica) bool { return r.name == name })
		if i < 0 {
			retry.Pause(ctx, time.Millisecond)
			continue
		}
		r := h.c.replicas[i]
		if !r.freeze() { // somebody else has
			retry.Pause(ctx, time.Millisecond)
			continue
		}
		// Postgres goes on for as long as it can without the client.
		var doing string
		for i := 0; i < 20 && (i < 5 || strings.HasSuffix(doing, onProcessor)); i++ {
			retry.Pause(ctx, 100*time.Millisecond)
			_, doing = h.c.claiming(ctx, []string{name}, false)
		}
		if doing == "" {
			r.thaw()
			continue
		}
		defer r.thaw()
		h.about = ", whose claim is " + doing
		if err := h.begins(name); err != nil {
			return err
		}
		h.lasts(ctx)
		return nil
	}
	return errNothing
}

// openTransactions opens two transactions and leaves them alone for a while. One
// locks due rows, and now and then some running ones; the other inserts rows that
// refer to due tasks, which does not keep anybody from claiming those. So that
// there are due rows, some are made, that become due when they are locked.
func openTransactions(ctx context.Context, h *fault) error {
	const n = 150 // of each: more than a claim looks at first
	locked, err := h.addNoops(ctx, n, false)
	if err != nil {
		return err
	}
	referred, err := h.addNoops(ctx, n, true)
	if err != nil {
		return err
	}
	update, commit, more := h.rand.IntN(2) == 0, h.rand.IntN(2) == 0, []string{"pending"}
	if h.rand.IntN(2) == 0 {
		more = append(more, "running")
	}
	locker, err := h.begin(ctx)
	if err != nil {
		return err
	}
	defer closeSoon(locker)
	referrer, err := h.begin(ctx)
	if err != nil {
		return err
	}
	defer closeSoon(referrer)

	starting, cancel := context.WithTimeout(ctx, operatorMaxWait)
	defer cancel()
	found, err := locker.Query(starting, `
SELECT id
  FROM onejob.tasks
 WHERE id = ANY ($1)
    OR id IN (SELECT id FROM onejob.tasks WHERE status = ANY ($2) AND run_at < now() + interval '1 second' AND id <> ALL ($3) ORDER BY random() LIMIT 20)
   FOR UPDATE SKIP LOCKED`, locked, more, referred)
	if err != nil {
		return errNothing
	}
	if locked, err = pgx.CollectRows(found, pgx.RowTo[int64]); err != nil {
		return errNothing
	}
	if h.sql(ctx, `INSERT INTO chaos.touched (task, what) SELECT unnest($1::bigint[]), $2`, locked, checker.Locked) != nil {
		return errNothing
	}
	how := "SELECT FOR UPDATE"
	if update {
		how = "UPDATE"
		_, err = locker.Exec(starting, `UPDATE onejob.tasks SET priority = priority WHERE id = ANY ($1)`, locked)
	}
	if err == nil {
		_, err = referrer.Exec(starting, `INSERT INTO chaos.referring (task) SELECT id FROM onejob.tasks WHERE id = ANY ($1)`, referred)
	}
	if err != nil {
		return errNothing
	}
	h.about = fmt.Sprintf(" by %s, and %d referred to", how, len(referred))
	if err := h.begins(fmt.Sprintf("%d rows locked", len(locked))); err != nil {
		return err
	}
	h.lasts(ctx)
	completion, cancel := context.WithTimeout(context.WithoutCancel(ctx), operatorMaxWait)
	defer cancel()
	for _, conn := range []*pgx.Conn{locker, referrer} {
		end := "ROLLBACK"
		if commit {
			end = "COMMIT"
		}
		_, _ = conn.Exec(completion, end) // Postgres may have fallen meanwhile, which ends it as well
	}
	return nil
}

// addNoops adds n tasks that are due in a second. Free ones must be claimed soon
// after that.
func (h *fault) addNoops(ctx context.Context, n int, free bool) (ids []int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, operatorMaxWait)
	defer cancel()
	found, err := h.c.operator.Query(ctx, `
WITH made AS (
    INSERT INTO onejob.tasks (kind, priority, run_at)
    SELECT 'noop', i % 2, now() + interval '1 second' FROM generate_series(1, $1) i
 RETURNING id, kind, run_at
)
INSERT INTO chaos.added (task, kind, hostile, due) SELECT id, kind, false, CASE WHEN $2 THEN chaos.clock() + interval '1 second' END FROM made RETURNING task`, n, free)
	if err == nil {
		ids, err = pgx.CollectRows(found, pgx.RowTo[int64])
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNothing, err)
	}
	return ids, nil
}

// begin opens a connection of its own, for the pool is small, and a transaction.
func (h *fault) begin(ctx context.Context) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, operatorMaxWait)
	defer cancel()
	conn, err := pgx.Connect(ctx, h.c.dsn(checker.Locker))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNothing, err)
	}
	if _, err := conn.Exec(ctx, `BEGIN`); err != nil {
		closeSoon(conn)
		return nil, fmt.Errorf("%w: %w", errNothing, err)
	}
	return conn, nil
}

func closeSoon(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx)
}

// refuseOutcomes makes a trigger refuse the outcomes of all tasks, or of a third or a fifth of them, as
// one with a mistake in it does. Claims and requeues are let through.
func refuseOutcomes(ctx context.Context, h *fault) error {
	modulus := []int{1, 3, 5}[h.rand.IntN(3)]
	h.about = fmt.Sprintf(", one task in %d", modulus)
	if err := h.begins("all"); err != nil {
		return err
	}
	if err := h.sql(ctx, `INSERT INTO chaos.refusing (fault, modulus, remainder) VALUES ($1, $2, $3)`, h.mark.ID, modulus, h.rand.IntN(modulus)); err != nil {
		return err
	}
	h.lasts(ctx)
	for ctx.Err() == nil && h.operate(ctx, `DELETE FROM chaos.refusing WHERE fault = $1`, h.mark.ID) != nil {
		retry.Pause(ctx, time.Second) // another fault has Postgres
	}
	return nil // see acceptOutcomes
}

// acceptOutcomes ends what refuseOutcomes has begun, when Postgres could not be reached or was restored.
func (c *cluster) acceptOutcomes(ctx context.Context) error {
	if _, err := c.operator.Exec(ctx, `DELETE FROM chaos.refusing`); err != nil {
		return fmt.Errorf("let outcomes through again: %w", err)
	}
	return nil
}

// A touch is something that an operator does to one row, $1. Its statement notes
// in chaos.touched what it did, in the same transaction.
type touch struct {
	what     string
	statuses []string // of the rows it is done to
	sql      string
}

var anyStatus = []string{"pending", "running", "succeeded", "failed", "cancelled"}

// touches are all of them. None makes a row wait for long, or the run would not end.
var touches = []touch{
	{checker.Edited, anyStatus, `UPDATE onejob.tasks SET priority = (random() * 2000 - 1000)::int WHERE id = $1`},
	{checker.Edited, anyStatus, `UPDATE onejob.tasks SET run_at = now() + (random() * 20 - 10) * interval '1 second' WHERE id = $1`},
	{checker.Edited, anyStatus, `UPDATE onejob.tasks SET queue = CASE queue WHEN 'default' THEN 'another' ELSE 'default' END WHERE id = $1`},
	{checker.Edited, anyStatus, `UPDATE onejob.tasks SET timeout = CASE WHEN random() < 0.5 THEN interval '1 minute' END WHERE id = $1`},
	{checker.Edited, anyStatus, `UPDATE onejob.tasks SET timeout = interval '1 second', max_attempts = 2 WHERE id = $1`},
	{checker.Edited, anyStatus, `UPDATE onejob.tasks SET max_attempts = 1 + (random() * 9)::int WHERE id = $1`},
	{checker.CancelRequested, []string{"pending", "running"}, `UPDATE onejob.tasks SET cancel_requested = true WHERE id = $1 AND status IN ('pending', 'running')`},
	{checker.Deleted, anyStatus, `DELETE FROM onejob.tasks WHERE id = $1`},
	{checker.Retried, anyStatus, ``}, // see statement
}

func (t touch) statement() string {
	if t.what == checker.Retried {
		return `INSERT INTO chaos.touched (task, what) SELECT $1, $2 WHERE onejob.retry($1)`
	}
	return fmt.Sprintf(`WITH touched AS (%s RETURNING id) INSERT INTO chaos.touched (task, what) SELECT id, $2 FROM touched`, t.sql)
}

// touchRows edits, cancels, retries and deletes rows, one at a time, among those
// that were enqueued last.
func touchRows(ctx context.Context, h *fault) error {
	if err := h.begins("rows"); err != nil {
		return err
	}
	for end := time.Now().Add(h.For); time.Now().Before(end) && ctx.Err() == nil; {
		t := touches[h.rand.IntN(len(touches))]
		// A row that is running, or failed, is rare among many that succeeded.
		status := t.statuses[h.rand.IntN(len(t.statuses))]
		finding, cancel := context.WithTimeout(ctx, operatorMaxWait)
		var id int64
		err := h.c.operator.QueryRow(finding, `
SELECT id
  FROM onejob.tasks
 WHERE id > (SELECT max(id) - 2000 FROM onejob.tasks)
   AND status = $1
 ORDER BY random()
 LIMIT 1`, status).Scan(&id)
		cancel()
		if err == nil {
			_ = h.operate(ctx, t.statement(), id, t.what) // a row that is locked, or a Postgres that is gone, is left alone
		}
		retry.Pause(ctx, time.Duration(20+h.rand.IntN(300))*time.Millisecond)
	}
	return nil
}
