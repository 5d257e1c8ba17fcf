package store_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"onejob/internal/testenv"
	"onejob/internal/testenv/lifecycle"
	"onejob/store"
	"onejob/tasks"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// A bench is a migrated database of one test, a store on it and a session to
// claim under.
type bench struct {
	*store.Store
	t       testing.TB
	pool    *pgxpool.Pool // past the store
	dsn     string
	session string
}

// newBench is newBareBench, and every step of a task's row is judged when the test ends.
func newBench(t testing.TB) *bench {
	t.Helper()
	b := newBareBench(t)
	testenv.Lifecycle(t, b.dsn, func(c *lifecycle.Config) { c.NoWorker = true })
	return b
}

func newBareBench(t testing.TB) *bench {
	t.Helper()
	db := migrated.Postgres(t)
	return &bench{Store: open(t, store.Config{DSN: db.DSN}), t: t, pool: db.Pool(t), dsn: db.DSN, session: uuid.NewString()}
}

// migrated is a database after all migrations.
var migrated = testenv.NewTemplate(func(ctx context.Context, dsn string) error {
	s, err := store.Open(patient(store.Config{DSN: dsn}))
	if err != nil {
		return err
	}
	defer s.Close()
	return s.Migrate(ctx, nil)
})

// patient returns a configuration with which statements and connections may take longer than those of
// replicas, unless it says how long: a machine may stand still for seconds.
func patient(cfg store.Config) store.Config {
	if cfg.Timeout == 0 {
		cfg.Timeout = time.Minute
		if strings.Contains(cfg.DSN, "?") && !strings.Contains(cfg.DSN, "connect_timeout") {
			cfg.DSN += "&connect_timeout=60"
		}
	}
	return cfg
}

func open(t testing.TB, cfg store.Config) *store.Store {
	t.Helper()
	s, err := store.Open(patient(cfg))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// sql runs a statement and returns the first column of all its rows, as text.
func (b *bench) sql(statement string, args ...any) []string {
	b.t.Helper()
	list, err := b.try(statement, args...)
	if err != nil {
		b.t.Fatalf("%s: %v", statement, err)
	}
	return list
}

func (b *bench) try(statement string, args ...any) ([]string, error) {
	rows, err := b.pool.Query(context.WithoutCancel(b.t.Context()), statement, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	list := []string{}
	for rows.Next() {
		values, err := rows.Values()
		if err != nil {
			return nil, err
		}
		list = append(list, fmt.Sprint(values[0]))
	}
	return list, rows.Err()
}

// one is sql for a statement that returns one row.
func (b *bench) one(statement string, args ...any) string {
	b.t.Helper()
	list := b.sql(statement, args...)
	if len(list) != 1 {
		b.t.Fatalf("%s: %d rows, want one", statement, len(list))
	}
	return list[0]
}

// insert adds a task with the columns given as "column = value, ..." and returns
// its id.
func (b *bench) insert(columns ...string) string {
	b.t.Helper()
	names, values := []string{"kind"}, []string{"'noop'"}
	for _, c := range columns {
		name, value, _ := strings.Cut(c, "=")
		if name == "kind" {
			values[0] = value
			continue
		}
		names, values = append(names, name), append(values, value)
	}
	return b.one(fmt.Sprintf(`INSERT INTO onejob.tasks (%s) VALUES (%s) RETURNING id`, strings.Join(names, ", "), strings.Join(values, ", ")))
}

// claimMax claims up to so many tasks of all that there are. It remembers nothing of the
// claims before it, because what they remember depends on how long they took.
func (b *bench) claimMax(most int) []*tasks.Task {
	b.t.Helper()
	b.Forget()
	return b.claimNext(most)
}

// claimNext claims up to so many tasks from where the claims before it ended, as a
// replica does, and asks again while there may be more.
func (b *bench) claimNext(most int) (list []*tasks.Task) {
	b.t.Helper()
	for more := true; more && len(list) < most; {
		var claimed tasks.Claimed
		testenv.Eventually(b.t, time.Minute, "Postgres answers a claim", func() bool {
			var err error
			claimed, err = b.Claim(b.t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop", "other"}, Max: most - len(list)})
			if err != nil && !late(err) {
				b.t.Fatal(err)
			}
			return err == nil || len(claimed.Tasks) > 0
		})
		list, more = append(list, claimed.Tasks...), claimed.More
	}
	return list
}

// late reports whether Postgres has not answered in time, as one that stands still for a while.
func late(err error) bool {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pg.Code == "57014" || errors.Is(err, context.DeadlineExceeded)
}

// claimOne claims one task, and waits until there is one: a row whose statement has taken seconds is
// left alone for a time.
func (b *bench) claimOne() (task *tasks.Task) {
	b.t.Helper()
	testenv.Eventually(b.t, time.Minute, "a task is claimed", func() bool {
		if list := b.claimMax(1); len(list) > 0 {
			task = list[0]
		}
		return task != nil
	})
	return task
}

// claimed inserts a task and claims it.
func (b *bench) claimed(columns ...string) (task *tasks.Task) {
	b.t.Helper()
	id := b.insert(columns...)
	testenv.Eventually(b.t, time.Minute, "task "+id+" is claimed", func() bool {
		for _, t := range b.claimMax(100) {
			if fmt.Sprint(t.ID) == id {
				task = t
			}
		}
		return task != nil
	})
	return task
}

// row returns columns of a task, as one line of text.
func (b *bench) row(t *tasks.Task, columns string) string {
	b.t.Helper()
	return b.one(`SELECT concat_ws(' ', `+columns+`) FROM onejob.tasks t WHERE id = $1`, t.ID)
}

// history returns the outcomes of a task's attempts.
func (b *bench) history(t *tasks.Task) string {
	b.t.Helper()
	return strings.Join(b.sql(`SELECT outcome FROM onejob.attempts WHERE task_id = $1 ORDER BY fence`, t.ID), " ")
}

func succeeded(t *tasks.Task) tasks.Completion {
	return tasks.Completion{ID: t.ID, Fence: t.Fence, Session: t.Session, Outcome: tasks.Succeeded, Next: tasks.StatusSucceeded}
}

func failed(t *tasks.Task, next tasks.Status) tasks.Completion {
	return tasks.Completion{ID: t.ID, Fence: t.Fence, Session: t.Session, Outcome: tasks.Failed, Next: next, Error: "it broke"}
}

func equal[T comparable](t testing.TB, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s is %v, want %v", what, got, want)
	}
}

func ids(list []*tasks.Task) string {
	var out []string
	for _, t := range list {
		out = append(out, fmt.Sprint(t.ID))
	}
	return strings.Join(out, " ")
}

func TestErrorsNeverShowThePassword(t *testing.T) {
	t.Parallel()
	for _, dsn := range []string{
		"postgres://me:sEcReT@127.0.0.1:1/db?sslmode=disable", // nobody listens
		"postgres://me:sEcReT@127.0.0.1:notaport/db",
		"postgres://me:sEcReT@[::1/db",
		"postgres://me:sEc%ReT@host/db",
		"postgres://me:sEcReT/more@host/db", // the slash ends the host: this is a bad port
		"postgres://me:x@host/db?password=sEcReT&sslmode=perhaps",
		"host=127.0.0.1 port=notaport password=sEcReT",
		"host=127.0.0.1 password='sEcReT",
		"host=127.0.0.1 password=sEcReT sslmode=perhaps",
		"host=127.0.0.1 password=sEcReT pool_max_conns=many",
		"password=sEcReT host",
	} {
		s, err := store.Open(store.Config{DSN: dsn})
		if err == nil {
			err = s.Ping(t.Context())
			s.Close()
		}
		if err == nil {
			t.Errorf("%s was no error", dsn)
			continue
		}
		if strings.Contains(err.Error(), "sEcReT") || strings.Contains(err.Error(), "ReT@") {
			t.Errorf("%s: the error shows the password: %v", dsn, err)
		}
	}
	if _, err := store.Open(store.Config{DSN: "host=x", ListenDSN: "postgres://me:sEcReT@host:notaport/db"}); err == nil || !strings.Contains(err.Error(), "postgres.listen_dsn") || strings.Contains(err.Error(), "sEcReT") {
		t.Errorf("a bad listen_dsn gives: %v", err)
	}
}

func TestListenReturnsAnErrorWhenItsConnectionEnds(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	signals := make(chan tasks.Signal, 100)
	ended := make(chan error, 1)
	go func() { ended <- b.Listen(t.Context(), func(s tasks.Signal, _ string) { signals <- s }) }()
	heard := func(want tasks.Signal) {
		t.Helper()
		select {
		case got := <-signals:
			equal(t, "the signal", got, want)
		case <-time.After(time.Minute):
			t.Fatal("no signal")
		}
	}
	heard(tasks.SignalListening)

	// Once a statement, however many its rows. (Postgres folds what one transaction
	// says twice, so that a trigger for each row would be heard as often, and cost.)
	equal(t, "the number of triggers for each row that notify", b.one(`SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'notify%' AND tgtype & 1 = 1`), "0")
	b.sql(`INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, 1000)`)
	heard(tasks.SignalDue)
	b.sql(`UPDATE onejob.tasks SET cancel_requested = true`)
	heard(tasks.SignalCancel)
	id := b.insert()
	heard(tasks.SignalDue)
	b.sql(`SELECT onejob.cancel($1)`, id)
	heard(tasks.SignalCancel)
	b.sql(`SELECT onejob.retry($1)`, id)
	again := map[tasks.Signal]bool{<-signals: true, <-signals: true} // the flag is reset, too
	if !again[tasks.SignalDue] {
		t.Error("a retry wakes nobody")
	}

	b.sql(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database() AND pid <> pg_backend_pid()`)
	select {
	case err := <-ended:
		if err == nil {
			t.Error("Listen returned nil")
		}
	case <-time.After(time.Minute):
		t.Fatal("Listen did not return")
	}
	equal(t, "the number of further signals", len(signals), 0)
}

// as returns the DSN for another user.
func as(t testing.TB, dsn, user string) string {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.User(user)
	return u.String()
}

func jsonOf(s string) json.RawMessage { return json.RawMessage(s) }
