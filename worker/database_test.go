package worker_test

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"onejob/internal/servers"
	"onejob/internal/testenv"
	"onejob/tasks"
)

// A ledger is what handlers saw of fences: evidence outside of every database.
type ledger struct {
	mu      sync.Mutex
	entries []entry
}

type entry struct {
	key   string
	task  int64
	fence int64
}

func (l *ledger) kinds() tasks.Kinds {
	k := tasks.Kinds{}
	tasks.Handle(k, "note", func(_ context.Context, a *tasks.Attempt, _ struct{}) (struct{}, error) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.entries = append(l.entries, entry{a.LockKey, a.ID, a.Fence})
		return struct{}{}, nil
	})
	return k
}

func (l *ledger) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.entries)
}

// check looks whether a fence was used twice, or followed by a lower one of its key.
func (l *ledger) check(t *testing.T) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	last, used := map[string]entry{}, map[int64]entry{}
	for _, e := range l.entries {
		if before, is := used[e.fence]; is {
			t.Errorf("fence %d was used for task %d and for task %d", e.fence, before.task, e.task)
		}
		used[e.fence] = e
		if before, is := last[e.key]; is && before.fence >= e.fence {
			t.Errorf("key %s: fence %d of task %d after %d of task %d", e.key, e.fence, e.task, before.fence, before.task)
		}
		last[e.key] = e
	}
}

// notes adds tasks with a few lock keys.
func (c *cluster) notes(t *testing.T, n int) {
	t.Helper()
	c.exec(t, `INSERT INTO onejob.tasks (kind, lock_key) SELECT 'note', 'key ' || i % 7 FROM generate_series(1, $1::int) i`, n)
}

// at is the cluster as it is seen on another Postgres server, or on several.
func (c *cluster) at(t *testing.T, dbs ...*testenv.DB) *cluster {
	t.Helper()
	var hosts []string
	dsn, err := url.Parse(dbs[0].DSN)
	if err != nil {
		t.Fatal(err)
	}
	for _, db := range dbs {
		u, err := url.Parse(db.DSN)
		if err != nil {
			t.Fatal(err)
		}
		hosts = append(hosts, u.Host)
	}
	dsn.Host = strings.Join(hosts, ",")
	dsn.RawQuery += "&target_session_attrs=read-write"
	one := &testenv.DB{Name: dbs[0].Name, DSN: dsn.String()}
	return &cluster{dsn: one.DSN, kv: c.kv, pool: one.Pool(t), replicas: c.replicas}
}

func events(rs []*replica, event string) (n int) {
	for _, r := range rs {
		n += r.events.FilterMessage(event).Len()
	}
	return n
}

// I10: a standby that lacks the last claims takes over. The old primary comes back.
func TestFencesRiseThroughAFailover(t *testing.T) {
	t.Parallel()
	primary, db := testenv.OwnPostgres(t)
	c := clusterOn(t, db, testenv.Consul(t))
	standby, copied := db.Standby(t, primary)
	both := c.at(t, db, copied)
	var l ledger
	rs := []*replica{both.replica(t, "a", l.kinds(), nil), both.replica(t, "b", l.kinds(), nil)}
	c.notes(t, 100)
	c.awaitAll(t, maxWait)
	caughtUp(t, c, copied)
	if err := standby.Detach(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.notes(t, 500) // the standby never hears of them
	c.awaitAll(t, maxWait)

	primary.Kill()
	if err := standby.Promote(t.Context()); err != nil {
		t.Fatal(err)
	}
	now := c.at(t, copied)
	now.notes(t, 300)
	now.awaitAll(t, maxWait)
	if n := events(rs, "postgres_failed_over"); n != 1 {
		t.Errorf("the failover was announced %d times", n)
	}

	if err := primary.Start(t.Context()); err != nil { // as a primary of its own
		t.Fatal(err)
	}
	late := both.replica(t, "late", l.kinds(), nil)
	late.logged(t, "postgres_server")
	now.notes(t, 100)
	now.awaitAll(t, maxWait)
	if server, err := late.Database(); err != nil || server.Timeline != 2 {
		t.Errorf("the late replica works with %v (%v)", server, err)
	}
	if l.count() != 1000 {
		t.Errorf("%d tasks ran, not 1000", l.count())
	}
	l.check(t)
	now.noOverlaps(t)
}

func caughtUp(t *testing.T, c *cluster, copied *testenv.DB) {
	t.Helper()
	want := get[string](t, c, "SELECT pg_current_wal_lsn()::text")
	pool := copied.Pool(t)
	testenv.Eventually(t, maxWait, "the standby has caught up", func() bool {
		var there bool
		err := pool.QueryRow(t.Context(), "SELECT pg_last_wal_replay_lsn() >= $1::pg_lsn", want).Scan(&there)
		return err == nil && there
	})
}

// I10: the old primary lives on beside the new one. A replica that knows both moves by
// itself; one that follows the old one stops.
func TestSplitBrain(t *testing.T) {
	t.Parallel()
	primary, db := testenv.OwnPostgres(t)
	c := clusterOn(t, db, testenv.Consul(t))
	standby, copied := db.Standby(t, primary)
	var l ledger
	old := c.replica(t, "old", l.kinds(), nil) // it knows the old primary only
	both := c.at(t, db, copied).replica(t, "both", l.kinds(), nil)
	c.notes(t, 100)
	c.awaitAll(t, maxWait)
	caughtUp(t, c, copied)
	if err := standby.Promote(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.notes(t, 200) // for nothing
	testenv.Eventually(t, maxWait, "the replica that knows both has moved", func() bool {
		server, err := both.Database()
		return err == nil && server.Timeline == 2
	})
	if n := events([]*replica{old, both}, "postgres_failed_over"); n != 1 {
		t.Errorf("the failover was announced %d times", n)
	}
	now := c.at(t, copied)
	now.notes(t, 200)
	c.notes(t, 50)
	now.awaitAll(t, maxWait)
	old.logged(t, "postgres_stale")
	if _, err := old.Database(); err == nil {
		t.Error("the replica of the old primary still believes in it")
	}
	before := l.count()
	now.notes(t, 100)
	now.awaitAll(t, maxWait)
	if n := l.count() - before; n != 100 {
		t.Errorf("%d tasks ran where 100 are new: the old primary's were claimed", n)
	}
	l.check(t)
}

// I6: a completion that the new primary never received. There the task is running, by a
// replica that lives; it must not wait for the next look at all running rows, which comes
// late after one that took long.
func TestForgottenCompletionsAreDoneAgainAtOnce(t *testing.T) {
	t.Parallel()
	primary, db := testenv.OwnPostgres(t)
	c := clusterOn(t, db, testenv.Consul(t))
	standby, copied := db.Standby(t, primary)
	begun, end := make(chan int64, 2), make(chan struct{})
	k := tasks.Kinds{}
	tasks.Handle(k, "hold", func(_ context.Context, a *tasks.Attempt, _ struct{}) (struct{}, error) {
		begun <- a.Fence
		<-end
		return struct{}{}, nil
	})
	r := c.at(t, db, copied).replica(t, "a", k, nil)
	id := c.insert(t, "kind", "hold")
	first := <-begun
	caughtUp(t, c, copied)
	if err := standby.Detach(t.Context()); err != nil {
		t.Fatal(err)
	}
	close(end)
	c.await(t, id, "succeeded")

	tx, err := c.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), "LOCK TABLE onejob.tasks IN ACCESS EXCLUSIVE MODE"); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, maxWait, "a look at running rows has waited for a while", func() bool {
		return get[bool](t, c, `
SELECT EXISTS (SELECT FROM pg_stat_activity
                WHERE wait_event_type = 'Lock' AND query LIKE '%SELECT id, kind, coalesce(lock_key, id::text), attempt, fence%'
                  AND query_start < clock_timestamp() - interval '6 seconds')`) // so the next one is two minutes away
	})
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := standby.Promote(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.logged(t, "postgres_failed_over")
	moved := time.Now()
	c.at(t, copied).await(t, id, "succeeded") // which waits for half of that
	t.Logf("the task was done again after %v", time.Since(moved).Round(time.Millisecond))
	if second := <-begun; second <= first {
		t.Errorf("fence %d after %d", second, first)
	}
}

// I4: a replica talks to an old primary, and loses Consul just when others move to the new
// one. To them it is silent; its leases hold until its health check ends.
func TestSilenceBesideASplitBrainIsNoDeath(t *testing.T) {
	t.Parallel()
	const tries = 5
	for range tries {
		if silenceBesideASplitBrain(t) {
			return
		}
		t.Log("the replica heard of the new primary first")
	}
	t.Errorf("the replica heard of the new primary before Consul was cut off, %d times of %d", tries, tries)
}

// silenceBesideASplitBrain reports whether Consul was cut off first.
func silenceBesideASplitBrain(t *testing.T) (first bool) {
	t.Helper()
	primary, db := testenv.OwnPostgres(t)
	c := clusterOn(t, db, testenv.Consul(t))
	standby, copied := db.Standby(t, primary)
	w := newRecorder(t)
	behind, _, toConsul := c.behind(t)
	old := behind.process(t, "old", w.config())
	id := c.stuck(t, w)
	caughtUp(t, c, copied)
	promoted := make(chan error, 1)
	go func() { promoted <- standby.Promote(t.Context()) }()
	now := c.at(t, copied)
	cut := make(chan struct{})
	go func() { // as soon as the new one is known in Consul, which is before it puts its primary on record
		defer close(cut)
		defer toConsul.Cut()
		index := uint64(0)
		for began := time.Now(); time.Since(began) < maxWait; {
			keys, meta, err := c.kv.Client.KV().Keys(c.kv.Prefix+"/replicas/", "", &api.QueryOptions{WaitIndex: index, WaitTime: time.Second})
			if err != nil || len(keys) > 1 {
				return
			}
			index = meta.LastIndex
		}
	}()
	fresh := now.process(t, "new", w.config())
	<-cut
	if err := <-promoted; err != nil {
		t.Fatal(err)
	}
	fresh.logged(t, "postgres_failed_over")
	now.await(t, id, "succeeded")
	w.check(t)
	return old.count("postgres_stale") == 0
}

// I10: the database is restored from a backup of a while ago, at the same timeline.
func TestFencesRiseThroughARestore(t *testing.T) {
	t.Parallel()
	server, db := testenv.OwnPostgres(t)
	c := clusterOn(t, db, testenv.Consul(t))
	var l ledger
	rs := []*replica{c.replica(t, "a", l.kinds(), nil), c.replica(t, "b", l.kinds(), nil)}
	c.notes(t, 50)
	c.awaitAll(t, maxWait)
	restore, err := server.Backup(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c.notes(t, 300)
	c.awaitAll(t, maxWait)
	if err := restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.pool.Reset()
	c.notes(t, 300)
	c.awaitAll(t, maxWait)
	testenv.Eventually(t, maxWait, "the restart is announced", func() bool { return events(rs, "postgres_restarted") == 1 })
	l.check(t)
}

// I10: a dump, or a copy, is loaded into the server that it was made of, while no replica runs. The
// server is the same; the sequence is another one, and has forgotten numbers.
func TestFencesRiseThroughADump(t *testing.T) {
	t.Parallel()
	for name, save := range map[string]func(*testing.T, *servers.Postgres) (load func(context.Context) error){
		"a dump": func(t *testing.T, p *servers.Postgres) func(context.Context) error {
			load, err := p.Dump(t.Context(), "test")
			if err != nil {
				t.Fatal(err)
			}
			return load
		},
		"a copy": func(t *testing.T, p *servers.Postgres) func(context.Context) error {
			if err := p.Exec(t.Context(), `CREATE DATABASE kept TEMPLATE test`); err != nil {
				t.Fatal(err)
			}
			return func(ctx context.Context) error {
				return p.Exec(ctx, `DROP DATABASE test WITH (FORCE)`, `ALTER DATABASE kept RENAME TO test`)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server, db := testenv.OwnPostgres(t)
			c := clusterOn(t, db, testenv.Consul(t))
			var l ledger
			work := func(n int) *replica {
				r := c.replica(t, "a", l.kinds(), nil)
				c.notes(t, n)
				c.awaitAll(t, maxWait)
				if err := r.stop(); err != nil {
					t.Fatal(err)
				}
				c.pool.Reset()
				return r
			}
			work(50)
			testenv.Eventually(t, maxWait, "nobody is connected", func() bool {
				return get[int](t, c, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`) == 0
			})
			c.pool.Reset()
			load := save(t, server)
			work(300)
			if err := load(t.Context()); err != nil {
				t.Fatal(err)
			}
			c.pool.Reset()
			work(300).logged(t, "postgres_reloaded")
			if r := work(100); r.events.FilterMessage("postgres_reloaded").Len() > 0 || r.events.FilterMessage("postgres_server").Len() == 0 {
				t.Error("it is put on record once more")
			}
			l.check(t)
		})
	}
}

// I10: somebody sets the sequence back, loses or spoils the record in Consul.
func TestHandsOnFences(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	var l ledger
	r := c.replica(t, "a", l.kinds(), nil)
	more := func() {
		t.Helper()
		c.notes(t, 100)
		c.awaitAll(t, maxWait)
	}
	more()
	c.exec(t, "ALTER SEQUENCE onejob.fences RESTART 1")
	more()
	r.logged(t, "fences_went_back")

	key := c.kv.Prefix + "/database"
	if _, err := c.kv.Client.KV().Delete(key, nil); err != nil {
		t.Fatal(err)
	}
	more()
	l.check(t)
	t.Run("an old record is put back", func(t *testing.T) {
		pair, _, err := c.kv.Client.KV().Get(key, nil)
		if err != nil || pair == nil {
			t.Fatal(pair, err)
		}
		if _, err := c.kv.Client.KV().Delete(key, nil); err != nil {
			t.Fatal(err)
		}
		more() // under a new one
		if _, err := c.kv.Client.KV().Put(pair, nil); err != nil {
			t.Fatal(err)
		}
		more()
		l.check(t)
	})
	for what, value := range map[string]string{"no JSON": "{", "nothing": "", "of another": `{"system":"1","timeline":1,"fences_to":5}`} {
		t.Run(what, func(t *testing.T) {
			pair, _, err := c.kv.Client.KV().Get(key, nil)
			if err != nil || pair == nil {
				t.Fatal(pair, err)
			}
			good := pair.Value
			pair.Value = []byte(value)
			if _, err := c.kv.Client.KV().Put(pair, nil); err != nil {
				t.Fatal(err)
			}
			before := r.events.FilterMessage("postgres_is_another").Len()
			id := c.insert(t, "kind", "note")
			testenv.Eventually(t, maxWait, "the replica says so", func() bool { return r.events.FilterMessage("postgres_is_another").Len() > before })
			if got := get[string](t, c, "SELECT status FROM onejob.tasks WHERE id = $1", id); got == "succeeded" {
				t.Error("the task ran")
			}
			pair.Value = good
			if _, err := c.kv.Client.KV().Put(pair, nil); err != nil {
				t.Fatal(err)
			}
			c.await(t, id, "succeeded")
		})
	}
	l.check(t)
}

// A person has set the sequence back, and a claim gets the fence of an attempt that this replica works on. The claim
// is put back, and the attempt stays what it is.
func TestAFenceThatIsGivenOutTwice(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	began := make(chan string, 2)
	r := c.replica(t, "a", kinds(began), nil)
	works := c.insert(t, "kind", "wait")
	<-began
	fence := get[int64](t, c, "SELECT fence FROM onejob.tasks WHERE id = $1", works)
	c.exec(t, "SELECT setval('onejob.fences', $1, false)", fence)
	c.await(t, c.insert(t, "kind", "noop"), "succeeded")
	time.Sleep(7 * time.Second) // every 5 s the replica looks for rows of its own that it does not know
	if n := r.events.FilterMessage("claim_reply_lost").Len(); n != 0 {
		t.Errorf("%d claims are taken for lost", n)
	}
	if got := get[string](t, c, "SELECT status || ' ' || fence FROM onejob.tasks WHERE id = $1", works); got != fmt.Sprint("running ", fence) {
		t.Errorf("the attempt that works is %s", got)
	}
}
