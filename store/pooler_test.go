package store_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/internal/testenv"
	"onejob/store"
	"onejob/tasks"
)

func TestThroughATransactionPooler(t *testing.T) {
	t.Parallel()
	db := testenv.Postgres(t)
	b := &bench{t: t, pool: db.Pool(t), dsn: db.DSN, session: "6f1ed002-ab59-42fb-a0b4-0123456789ab"}
	b.Store = open(t, store.Config{DSN: testenv.Pooler(t, db, 1), ListenDSN: db.DSN})
	if err := b.Migrate(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	b.join()
	if err := b.CheckSchema(t.Context()); err != nil {
		t.Fatal(err)
	}

	ctx, stop := context.WithCancel(t.Context())
	signals, ended := make(chan tasks.Signal, 10), make(chan error, 1)
	go func() { ended <- b.Listen(ctx, func(s tasks.Signal, _ string) { signals <- s }) }()
	equal(t, "the first signal", <-signals, tasks.SignalListening)
	if _, err := b.Enqueue(t.Context(), store.NewTask{Kind: "noop", LockKey: "k", Payload: jsonOf(`{"a": 1}`)}); err != nil {
		t.Fatal(err)
	}
	equal(t, "the second", <-signals, tasks.SignalDue)
	stop()
	<-ended

	// All connections of the store share one of the server: whatever one of them
	// left behind in it, the next would find.
	keyed := b.claimOne()
	equal(t, "the payload", string(keyed.Payload), `{"a": 1}`)
	plain, back := b.claimed(), b.claimed("lock_key='other'")
	e := succeeded(plain)
	e.Result = jsonOf(`{"b": 2}`)
	e.ExitCode = new(int)
	for i, err := range b.gathered([]tasks.Completion{e, {ID: plain.ID, Fence: -1, Session: plain.Session, Outcome: tasks.Failed, Next: tasks.StatusFailed}}) {
		if want := []error{nil, tasks.ErrRefused}[i]; err != want {
			t.Errorf("ending %d was answered with %v", i, err)
		}
	}
	if err := b.Requeue(t.Context(), back, 0); err != nil {
		t.Error(err)
	}
	if err := b.CompleteWith(t.Context(), keyed, func(ctx context.Context, tx pgx.Tx) (json.RawMessage, error) {
		var fence string
		err := tx.QueryRow(ctx, `SELECT current_setting('onejob.fence')`).Scan(&fence)
		return jsonOf(fence), err
	}); err != nil {
		t.Error(err)
	}
	equal(t, "the rows", b.row(keyed, "status, result")+", "+b.row(plain, "status, result")+", "+b.row(back, "status, attempt"),
		fmt.Sprintf(`succeeded %d, succeeded {"b": 2}, pending 0`, keyed.Fence))
	var left string
	if err := b.Pool().QueryRow(t.Context(), `SELECT current_setting('enable_seqscan') || coalesce(current_setting('onejob.fence', true), '')`).Scan(&left); err != nil {
		t.Fatal(err)
	}
	equal(t, "what is left behind in the connection", left, "on")
}

func TestMigrateThroughAPooler(t *testing.T) {
	t.Parallel()
	db := testenv.Postgres(t)
	dsn := testenv.Pooler(t, db, 2)
	var wg sync.WaitGroup
	for range 5 { // at once
		s := open(t, store.Config{DSN: dsn})
		wg.Go(func() {
			for range 2 { // and again
				if err := s.Migrate(t.Context(), nil); err != nil {
					t.Error(err)
				}
			}
			if err := s.CheckSchema(t.Context()); err != nil {
				t.Error(err)
			}
			if !s.Pooled() {
				t.Error("the pooler was not detected")
			}
			if err := s.CheckPool(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	var left int
	if err := db.Pool(t).QueryRow(t.Context(), `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`).Scan(&left); err != nil {
		t.Fatal(err)
	}
	equal(t, "the number of locks left behind", left, 0)
}

// Prepared statements are worth having: a direct connection keeps them. A setting in
// the DSN wins.
func TestWhetherStatementsArePrepared(t *testing.T) {
	t.Parallel()
	db := testenv.Postgres(t)
	pooler := testenv.Pooler(t, db, 1)
	for _, test := range []struct {
		name, dsn        string
		pooled, prepared bool
	}{
		{"Direct", db.DSN, false, true},
		{"DirectAndExec", db.DSN + "&default_query_exec_mode=exec", false, false},
		{"Pooler", pooler, true, false},
		{"PoolerAndExec", pooler + "&default_query_exec_mode=exec", true, false},
		{"PoolerAndCache", pooler + "&default_query_exec_mode=cache_statement", true, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := open(t, store.Config{DSN: test.dsn, MaxConns: 1})
			for range 2 {
				if err := s.CheckPool(t.Context()); err != nil {
					t.Error(err)
				}
			}
			equal(t, "whether a pooler was found", s.Pooled(), test.pooled)
			n, err := store.Prepared(t.Context(), s)
			if err != nil {
				t.Fatal(err)
			}
			equal(t, "whether statements are prepared", n > 0, test.prepared)
		})
	}
}

func TestListenThroughAPoolerIsDeaf(t *testing.T) {
	t.Parallel()
	for _, connections := range []int{1, 3} {
		t.Run(fmt.Sprint(connections), func(t *testing.T) {
			t.Parallel()
			db := testenv.Postgres(t)
			dsn := testenv.Pooler(t, db, connections)
			b := &bench{t: t, pool: db.Pool(t), dsn: dsn, Store: open(t, store.Config{DSN: dsn})}
			if err := b.Migrate(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
			ctx, stop := context.WithCancel(t.Context())
			var busy sync.WaitGroup
			for range 3 {
				busy.Go(func() {
					for ctx.Err() == nil {
						if _, err := b.UnknownKinds(ctx, nil); err != nil && ctx.Err() == nil {
							t.Error(err)
						}
					}
				})
			}
			long, cancelLong := context.WithTimeout(ctx, time.Minute)
			defer cancelLong()
			err := b.Listen(long, func(tasks.Signal, string) { t.Error("it claims to hear"); cancelLong() })
			if !errors.Is(err, store.ErrDeaf) {
				t.Errorf("Listen returned %v", err)
			}
			// It is not tried again at once.
			soon, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			if err := b.Listen(soon, func(tasks.Signal, string) {}); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("the second Listen returned %v", err)
			}
			stop()
			busy.Wait()
			if connections == 1 { // where it can be seen without trying
				var left int
				if err := b.Pool().QueryRow(t.Context(), `SELECT pg_catalog.count(*) FROM pg_catalog.pg_listening_channels()`).Scan(&left); err != nil {
					t.Fatal(err)
				}
				equal(t, "the number of channels left behind", left, 0)
			}
		})
	}
}

func TestListenNoticesThatTheConnectionIsCutOff(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	u, err := url.Parse(b.dsn)
	if err != nil {
		t.Fatal(err)
	}
	way := testenv.NewProxy(t, u.Host)
	u.Host = way.Addr
	s := open(t, store.Config{DSN: b.dsn, ListenDSN: u.String()})
	signals, ended := make(chan tasks.Signal, 10), make(chan error, 1)
	go func() { ended <- s.Listen(t.Context(), func(s tasks.Signal, _ string) { signals <- s }) }()
	equal(t, "the first signal", <-signals, tasks.SignalListening)
	way.Cut()
	select {
	case err := <-ended:
		t.Log(err)
	case <-time.After(time.Minute):
		t.Fatal("Listen believes in a connection through which nothing comes")
	}
}

// A pooler that passes the server's key on looks like a direct connection. Statements
// then fail as these do.
func TestPoolHealsWhenPreparedStatementsDoNotWork(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := open(t, store.Config{DSN: b.dsn, MaxConns: 2})
	try := func() error { _, err := s.UnknownKinds(t.Context(), nil); return err }
	if err := try(); err != nil {
		t.Fatal(err)
	}

	// Gone: as after DEALLOCATE ALL by a statement of the sql kind, too.
	if _, err := s.Pool().Exec(t.Context(), `DEALLOCATE ALL`); err != nil {
		t.Fatal(err)
	}
	if err := try(); err == nil {
		t.Fatal("it did not fail")
	}
	if err := try(); err != nil {
		t.Errorf("after a statement was gone: %v", err)
	}
	equal(t, "whether a pooler is believed in", s.Pooled(), false)

	// There already.
	first, err := s.Pool().Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	rows, err := first.Query(t.Context(), `SELECT name FROM pg_catalog.pg_prepared_statements WHERE name <> ''`, pgx.QueryExecModeExec)
	if err != nil {
		t.Fatal(err)
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(names) == 0 {
		t.Fatal("statements are not prepared", err)
	}
	second, err := s.Pool().Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if _, err := second.Exec(t.Context(), `PREPARE `+pgx.Identifier{name}.Sanitize()+` AS SELECT 1`); err != nil {
			t.Fatal(err)
		}
	}
	second.Release() // the only one that is free
	if err := try(); err == nil {
		t.Fatal("it did not fail")
	}
	first.Release()
	for range 3 {
		if err := try(); err != nil {
			t.Errorf("after a statement was there already: %v", err)
		}
	}
	equal(t, "whether a pooler is believed in", s.Pooled(), true)
	n, err := store.Prepared(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "the number of prepared statements", n, 0)
}

// A road forwards connections to one server and later to another one, as a name does
// that a failover moves. The connections are cut then.
type road struct {
	listener net.Listener
	mu       sync.Mutex
	target   string
	conns    []net.Conn
}

func newRoad(t *testing.T, target string) *road {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &road{listener: l, target: target}
	t.Cleanup(func() { l.Close(); r.lead("") })
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			r.mu.Lock()
			out, err := net.Dial("tcp", r.target)
			r.mu.Unlock()
			if err != nil {
				in.Close()
				continue
			}
			r.mu.Lock()
			r.conns = append(r.conns, in, out)
			r.mu.Unlock()
			go func() { _, _ = io.Copy(out, in); out.Close() }()
			go func() { _, _ = io.Copy(in, out); in.Close() }()
		}
	}()
	return r
}

func (r *road) lead(target string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.target = target
	for _, c := range r.conns {
		c.Close()
	}
	r.conns = nil
}

func TestAPoolerAppearsAndDisappears(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	hostOf := func(dsn string) string {
		u, err := url.Parse(dsn)
		if err != nil {
			t.Fatal(err)
		}
		return u.Host
	}
	direct, pooler := hostOf(b.dsn), hostOf(testenv.Pooler(t, &testenv.DB{DSN: b.dsn}, 2))
	way := newRoad(t, direct)
	u, _ := url.Parse(b.dsn)
	u.Host = way.listener.Addr().String()
	s := open(t, store.Config{DSN: u.String(), MaxConns: 4})
	for _, target := range []string{direct, pooler, direct, pooler} {
		way.lead(target)
		testenv.Eventually(t, time.Minute, "it works", func() bool { return s.CheckPool(t.Context()) == nil })
		for range 5 {
			if err := s.CheckPool(t.Context()); err != nil {
				t.Error(err)
			}
		}
		equal(t, "whether there is a pooler", s.Pooled(), target == pooler)
	}
}

// Payloads that do not come along with a claim are read from whichever connection is free:
// behind a pooler one that has never claimed, or that has forgotten what.
func TestLargePayloadsThroughAPooler(t *testing.T) {
	t.Parallel()
	for _, connections := range []int{1, 3} {
		t.Run(strconv.Itoa(connections), func(t *testing.T) {
			t.Parallel()
			db := testenv.Postgres(t)
			b := &bench{t: t, pool: db.Pool(t), dsn: db.DSN, session: "6f1ed002-ab59-42fb-a0b4-0123456789ab"}
			b.Store = open(t, store.Config{DSN: testenv.Pooler(t, db, connections), ListenDSN: db.DSN})
			if err := b.Migrate(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
			b.join()
			const n = 8
			b.sql(`INSERT INTO onejob.tasks (kind, payload) SELECT 'noop', to_jsonb((SELECT string_agg(md5(random()::text), '') FROM generate_series(1, 6000 + i)))
                    FROM generate_series(1, $1) i`, n)
			var all sync.WaitGroup
			for range connections { // at once, so that all connections are there
				all.Go(func() {
					if _, err := b.CancelRequests(t.Context(), b.session); err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
			claimed, err := b.Claim(t.Context(), tasks.Claim{Session: b.session, Replica: "one", Kinds: []string{"noop"}, Max: n})
			if err != nil || len(claimed.Tasks) != n || len(claimed.Refused) > 0 {
				t.Fatalf("%d tasks of %d, %v, %v", len(claimed.Tasks), n, claimed.Refused, err)
			}
			for _, task := range claimed.Tasks {
				if len(task.Payload) < 6000*32 {
					t.Errorf("task %d has %d bytes of its payload", task.ID, len(task.Payload))
				}
			}
		})
	}
}
