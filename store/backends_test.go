package store_test

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/internal/testenv"
	"onejob/internal/testenv/proxy"
	"onejob/store"
	"onejob/tasks"
)

// sleeping returns how many statements of the test sleep in the database. A backend that was ended
// is there, as an active one, for a moment after it has given up its transaction and its locks.
func (b *bench) sleeping() string {
	b.t.Helper()
	return b.one(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep' AND query LIKE 'SELECT pg_sleep(600)%'`)
}

// sleep runs a statement for a task that sleeps, and returns when it does so.
func (b *bench) sleep(ctx context.Context, s *store.Store, task *tasks.Task) (ended <-chan error) {
	b.t.Helper()
	done := make(chan error, 1)
	go func() {
		done <- s.CompleteWith(ctx, task, func(ctx context.Context, tx pgx.Tx) (json.RawMessage, error) {
			_, err := tx.Exec(ctx, `SELECT pg_sleep(600)`)
			return nil, err
		})
	}()
	b.eventually("the statement runs", func() bool { return b.sleeping() == "1" })
	return done
}

func (b *bench) eventually(what string, f func() bool) {
	b.t.Helper()
	testenv.Eventually(b.t, time.Minute, what, f)
}

// throughProxy returns the bench's DSN by way of a proxy.
func (b *bench) throughProxy() (*proxy.Proxy, string) {
	b.t.Helper()
	u, err := url.Parse(b.dsn)
	if err != nil {
		b.t.Fatal(err)
	}
	q := u.Query()
	host, port := q.Get("host"), q.Get("port")
	if host == "" {
		host, port = u.Hostname(), u.Port()
	}
	p, err := proxy.New(net.JoinHostPort(host, port))
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = p.Close() })
	q.Del("host")
	q.Del("port")
	u.Host, u.RawQuery = p.Addr(), q.Encode()
	return p, u.String()
}

// A statement of a replica that has ended is ended before its task is taken over. That
// of a living one goes on, whatever the caller thinks.
func TestTakeOverEndsStatements(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	dead := b.joined("dead")
	task := b.claimedBy(dead, "lock_key='k'")
	ended := b.sleep(t.Context(), b.Store, task)
	abandoned, _, err := b.TakeOver(t.Context(), []string{dead.Session}, 3)
	if err != nil || len(abandoned) > 0 {
		t.Fatalf("taken from a living replica: %v, %v", abandoned, err)
	}
	equal(t, "statements of a living replica", b.sleeping(), "1")

	// Its end is on the list, and who put it there has died in the meantime.
	b.sql(`UPDATE onejob.replicas SET state = 'dead', ended_at = now() WHERE session = $1`, dead.Session)
	b.eventually("the task is taken over", func() bool { // the backend of a busy server may take longer to end than a takeover waits
		abandoned, _, err = b.TakeOver(t.Context(), []string{dead.Session}, 3)
		return err == nil
	})
	if len(abandoned) != 1 {
		t.Fatalf("taken over: %v", abandoned)
	}
	if n := b.sleeping(); n != "0" {
		t.Fatalf("statements after the takeover: %s", n)
	}
	if err := <-ended; err == nil {
		t.Error("the statement succeeded")
	}
	equal(t, "the row", b.row(task, "status, attempt, crashes"), "pending 1 1")
}

// Who declares a replica dead ends its statements, of whatever rows: those of others go on, and
// nobody looks for that of a row that a person has made pending or deleted.
func TestDeathEndsStatements(t *testing.T) {
	t.Parallel()
	for what, change := range map[string]string{
		"running": `SELECT 1 WHERE $1::bigint > 0`,
		"pending": `UPDATE onejob.tasks SET status = 'pending', session = NULL, replica = NULL WHERE id = $1`,
		"deleted": `DELETE FROM onejob.tasks WHERE id = $1`,
	} {
		for how, declare := range map[string]func(*bench, tasks.Replica) error{
			"by others": func(b *bench, r tasks.Replica) error {
				_, err := b.DeclareDead(t.Context(), r, false)
				return err
			},
			"by its supervisor": func(b *bench, r tasks.Replica) error {
				_, err := b.DeclareProcessDead(t.Context(), r.Process)
				return err
			},
			"by a person": func(b *bench, r tasks.Replica) error {
				list, err := b.Replicas(t.Context())
				if err != nil {
					return err
				}
				var known []string
				for _, other := range list {
					if other.Session != r.Session {
						known = append(known, other.Session)
					}
				}
				_, err = b.ForgetReplicas(t.Context(), known)
				return err
			},
		} {
			t.Run(what+" "+how, func(t *testing.T) {
				t.Parallel()
				b := newBench(t)
				dead, living := b.joined("dead"), b.joined("living")
				task := b.claimedBy(dead)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				ended := b.sleep(ctx, b.Store, task)
				b.sql(change, task.ID)
				if err := declare(b, living); err != nil {
					t.Fatal(err)
				}
				equal(t, "statements of another replica", b.sleeping(), "1")
				// It waits two seconds for the backend. One of a busy server may take longer to end.
				began, err := time.Now(), declare(b, dead)
				if n := b.sleeping(); n != "0" && err == nil && time.Since(began) < time.Second {
					t.Fatalf("statements after the death: %s", n)
				}
				b.eventually("no statement is left", func() bool { return b.sleeping() == "0" })
				b.eventually("nobody says that one is", func() bool {
					err = declare(b, dead)
					return err == nil
				})
				if err := <-ended; err == nil {
					t.Error("the statement succeeded")
				}
			})
		}
	}
}

// A replica that was frozen while others called it dead does not send its statement.
func TestNoStatementAfterTheEnd(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for what, end := range map[string]func(tasks.Replica){
		"declared dead": func(r tasks.Replica) {
			if _, err := b.DeclareDead(t.Context(), r, false); err != nil {
				t.Fatal(err)
			}
		},
		"not on the list": func(r tasks.Replica) { b.sql(`DELETE FROM onejob.replicas WHERE session = $1`, r.Session) },
		"taken over": func(r tasks.Replica) {
			b.sql(`UPDATE onejob.tasks SET status = 'pending', session = NULL, replica = NULL WHERE session = $1`, r.Session)
		},
	} {
		r := b.joined("frozen")
		task := b.claimedBy(r)
		end(r)
		err := b.CompleteWith(t.Context(), task, func(context.Context, pgx.Tx) (json.RawMessage, error) {
			t.Errorf("%s: the statement was sent", what)
			return nil, nil
		})
		if !errors.Is(err, tasks.ErrRefused) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// A person makes a row pending, and its replica dies, so that its lock is free. Nobody looks for its
// statement: the row is not running. The next attempt ends it before its own begins.
func TestOneStatementOfALockKey(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	first := b.joined("first")
	task := b.claimedBy(first, "lock_key='k'")
	ended := b.sleep(t.Context(), b.Store, task)
	b.sql(`UPDATE onejob.tasks SET status = 'pending', session = NULL, replica = NULL WHERE id = $1`, task.ID)
	other := *b
	other.session = b.joined("second").Session
	list := other.claimNext(1)
	if len(list) != 1 || list[0].ID != task.ID {
		t.Fatalf("claimed %v, want task %d", list, task.ID)
	}
	again := list[0]
	err := b.CompleteWith(t.Context(), again, func(context.Context, pgx.Tx) (json.RawMessage, error) {
		if n := b.sleeping(); n != "0" {
			t.Errorf("a statement begins beside %s of the attempt before", n)
		}
		return nil, nil
	})
	if err != nil {
		t.Error(err)
	}
	select {
	case err := <-ended:
		if err == nil {
			t.Error("the first statement succeeded")
		}
	case <-time.After(time.Minute):
		t.Fatal("the first statement goes on")
	}
	equal(t, "the row", b.row(again, "status, attempt"), "succeeded 2")
}

// An attempt that was frozen while it made room, and was taken over, ends nothing of its successor.
func TestNoRoomForAnOldAttempt(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	first := b.joined("first")
	old := b.claimedBy(first, "lock_key='k'")
	b.sql(`UPDATE onejob.tasks SET status = 'pending', session = NULL, replica = NULL WHERE id = $1`, old.ID)
	other := *b
	other.session = b.joined("second").Session
	again := other.claimOne()
	ctx, cancel := context.WithCancel(t.Context())
	ended := b.sleep(ctx, b.Store, again)
	if err := store.MakeRoom(t.Context(), b.Store, old); err != nil {
		t.Error(err)
	}
	equal(t, "statements of the successor", b.sleeping(), "1")
	cancel()
	if err := <-ended; err == nil {
		t.Error("the statement succeeded")
	}
}

// A statement that was cut off may go on, if the request to cancel it did not arrive.
// Its attempt is not completed before it has ended: another one would begin.
func TestCompleteEndsItsOwnStatement(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.join()
	p, dsn := b.throughProxy()
	far := open(t, store.Config{DSN: dsn, Timeout: time.Minute})
	task := b.claimed()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := b.sleep(ctx, far, task)
	p.Cut(proxy.Both)
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Fatalf("cut off: %v", err)
	}
	equal(t, "statements of the one that was cut off", b.sleeping(), "1")
	completed := make(chan error, 1)
	go func() {
		for {
			err := far.Complete(t.Context(), failed(task, tasks.StatusPending))
			if err == nil || t.Context().Err() != nil {
				completed <- err
				return
			}
		}
	}()
	// What the request was, it is lost: the proxy drops it.
	p.Reset()
	p.Heal(proxy.Both)
	if err := <-completed; err != nil {
		t.Fatal(err)
	}
	equal(t, "statements after the completion", b.sleeping(), "0")
	equal(t, "the row", b.row(task, "status, attempt"), "pending 1")
}

// Anybody who may connect can hold any advisory lock. That of somebody who may not
// change tasks keeps none from being taken over, and its backend is left alone.
func TestForeignMarksAreIgnored(t *testing.T) {
	t.Parallel()
	db := testenv.Postgres(t)
	b := &bench{Store: open(t, store.Config{DSN: db.DSN}), t: t, pool: db.Pool(t), dsn: db.DSN}
	if err := b.Migrate(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	stranger := "stranger_" + db.Name
	b.sql(`CREATE ROLE ` + stranger + ` LOGIN`)
	t.Cleanup(func() { b.sql(`DROP ROLE ` + stranger) })
	r := b.joined("dead")
	task := b.claimedBy(r)

	conn, err := pgx.Connect(t.Context(), as(t, db.DSN, stranger))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	if _, err := conn.Exec(t.Context(), `SELECT pg_advisory_lock(hashtextextended(concat('onejob statement ', $1::uuid, ' ', $2::bigint), 0))`, r.Session, task.Fence); err != nil {
		t.Fatal(err)
	}
	err = b.CompleteWith(t.Context(), task, func(context.Context, pgx.Tx) (json.RawMessage, error) {
		t.Error("the statement was sent")
		return nil, nil
	})
	if d, requeue := tasks.RequeueDelay(err); !requeue || d != 0 || !strings.Contains(err.Error(), "advisory lock") {
		t.Errorf("with the lock in other hands: %v", err)
	}
	if _, err := conn.Exec(t.Context(), `SELECT pg_advisory_unlock_all(), pg_advisory_lock(hashtextextended(concat('onejob statement of lock key ', $1::text), 0))`, task.LockKey); err != nil {
		t.Fatal(err)
	}
	stopped := errors.New("stopped")
	if err := b.CompleteWith(t.Context(), task, func(context.Context, pgx.Tx) (json.RawMessage, error) { return nil, stopped }); !errors.Is(err, stopped) {
		t.Errorf("with the mark of the lock key in other hands: %v", err)
	}
	_ = b.EndReplica(t.Context(), r.Session, tasks.ReplicaLost)
	if abandoned, _, err := b.TakeOver(t.Context(), []string{r.Session}, 3); err != nil || len(abandoned) != 1 {
		t.Errorf("taken over: %v, %v", abandoned, err)
	}
	if err := conn.Ping(t.Context()); err != nil {
		t.Errorf("the stranger's backend: %v", err)
	}
}
