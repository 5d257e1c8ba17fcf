package store

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"onejob/internal/retry"
	"onejob/tasks"
)

// ErrDeaf says that notifications do not reach the listening connection. Most often
// a transaction pooler is in the way: it gives the connection that LISTENs to the
// next client. Tasks are then found by polling.
var ErrDeaf = errors.New("notifications are not heard; a connection that listens must lead past a transaction pooler")

const (
	// hearTimeout is how long a notification of our own may take to come back.
	hearTimeout = 5 * time.Second

	// A connection that was silent for listenPing is asked whether it is alive, and
	// given up if it does not answer within pingTimeout.
	listenPing  = 2 * time.Second
	pingTimeout = 3 * time.Second

	// deafPause is how long Listen waits before it tries again after ErrDeaf. Each
	// try through a pooler may leave a LISTEN behind in a connection of others.
	deafPause = time.Minute
)

// Listen waits for Postgres' notifications over a connection of its own, and calls
// wake for each, until ctx ends or the connection breaks. It always returns an
// error. The first call of wake, with SignalListening, comes when a notification
// that was sent over the pool has been heard; Listen returns ErrDeaf if it was not.
// Notifications only save waiting: without them the next poll finds everything.
//
// When Refuse or Follow leads connections to another server, Listen calls wake with
// SignalDeaf, opens a new one too, and calls wake with SignalListening again.
//
// With SignalDue comes the notification's word: that of the transaction that enqueued tasks,
// or "" if all replicas are asked to claim.
func (s *Store) Listen(ctx context.Context, wake func(tasks.Signal, string)) error {
	for {
		server := s.server.Load() // before the connection, which may be on its way to the server that is left
		listening, cancel := context.WithCancel(ctx)
		stop := context.AfterFunc(server.ctx, cancel)
		err := s.listenOn(listening, wake)
		stop()
		cancel()
		if server.ctx.Err() == nil || ctx.Err() != nil {
			return fmt.Errorf("listen: %w", err)
		}
		wake(tasks.SignalDeaf, "")
	}
}

// serverTerm is for how long connections lead to one server.
type serverTerm struct {
	ctx context.Context
	end context.CancelFunc
}

func newServerTerm() *serverTerm {
	ctx, end := context.WithCancel(context.Background())
	return &serverTerm{ctx, end}
}

// listenOn listens over one connection.
func (s *Store) listenOn(ctx context.Context, wake func(tasks.Signal, string)) error {
	if at := s.deafAt.Load(); at != nil {
		if retry.Pause(ctx, deafPause-time.Since(*at)); ctx.Err() != nil {
			return ctx.Err()
		}
	}
	conn, err := s.connect(ctx, nil)
	if err != nil {
		return err
	}
	defer closeConn(conn)
	if err := s.hear(ctx, conn); err != nil {
		if errors.Is(err, ErrDeaf) {
			s.deafAt.Store(new(time.Now()))
		}
		return err
	}
	s.deafAt.Store(nil)
	wake(tasks.SignalListening, "")
	for {
		n, err := nextNotification(ctx, conn)
		if err != nil {
			return err
		}
		switch n.Channel {
		case "onejob_due":
			wake(tasks.SignalDue, n.Payload)
		case "onejob_cancel":
			wake(tasks.SignalCancel, "")
		}
	}
}

// hear makes the connection listen, and proves that it hears: a notification with a
// word of its own goes out over the pool and must come back here.
func (s *Store) hear(ctx context.Context, conn *pgx.Conn) error {
	if linkOf(conn).pooled && s.shared(ctx, conn) {
		return ErrDeaf
	}
	if _, err := conn.Exec(ctx, `LISTEN onejob_due; LISTEN onejob_cancel; LISTEN onejob_hear`); err != nil {
		return err
	}
	word := rand.Text()
	if _, err := s.pool.Exec(ctx, `SELECT pg_notify('onejob_hear', $1)`, word); err != nil {
		return err
	}
	// Nothing is sent over conn meanwhile. A pooler may deliver notifications to the
	// client that sends something next, and the proof would prove nothing.
	waiting, cancel := context.WithTimeout(ctx, hearTimeout)
	defer cancel()
	for {
		n, err := conn.WaitForNotification(waiting)
		switch {
		case err == nil && n.Channel == "onejob_hear" && n.Payload == word:
			return nil
		case err == nil: // SignalListening makes the caller look for everything
		case waiting.Err() != nil && ctx.Err() == nil:
			return ErrDeaf
		default:
			return err
		}
	}
}

// shared reports whether a pooler gives the server's connection of conn to others
// between transactions, as far as that can be seen without leaving a LISTEN behind.
func (s *Store) shared(ctx context.Context, conn *pgx.Conn) bool {
	ctx, cancel := context.WithTimeout(ctx, hearTimeout)
	defer cancel()
	const backend = `SELECT pg_catalog.pg_backend_pid()`
	var first, others, second uint32
	if err := conn.QueryRow(ctx, backend).Scan(&first); err != nil {
		return false
	}
	other, err := s.connect(ctx, nil)
	if err != nil {
		return false
	}
	defer closeConn(other)
	err = pgx.BeginFunc(ctx, other, func(tx pgx.Tx) error {
		if err := tx.QueryRow(ctx, backend).Scan(&others); err != nil || others == first {
			return err
		}
		return conn.QueryRow(ctx, backend).Scan(&second)
	})
	return err == nil && (others == first || second != first)
}

// nextNotification waits for a notification. It returns an error if the connection
// breaks, or does not answer: TCP alone may not notice for a long time that the
// other side is gone, as long as nothing is sent.
func nextNotification(ctx context.Context, conn *pgx.Conn) (*pgconn.Notification, error) {
	for {
		waiting, cancel := context.WithTimeout(ctx, listenPing)
		n, err := conn.WaitForNotification(waiting)
		silent := waiting.Err() != nil && ctx.Err() == nil
		cancel()
		if err == nil {
			return n, nil
		}
		if !silent || conn.IsClosed() {
			return nil, err
		}
		ping, cancel := context.WithTimeout(ctx, pingTimeout)
		err = conn.Ping(ping)
		cancel()
		if err != nil {
			return nil, fmt.Errorf("the connection is silent: %w", err)
		}
	}
}

// connect opens a connection past the pool. If no pooler is in the way, it has the
// settings of the pool's connections.
func (s *Store) connect(ctx context.Context, notice pgconn.NoticeHandler) (*pgx.Conn, error) {
	cfg := s.listen.Copy()
	cfg.OnNotice = notice
	s.hosts.prepare(&cfg.Config)
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, sanitized(err)
	}
	if _, err := prepareConn(ctx, conn, false); err != nil {
		closeConn(conn)
		return nil, err
	}
	return conn, nil
}

// closeConn ends a connection although the caller's context may have ended.
func closeConn(conn interface{ Close(context.Context) error }) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx)
}

// WakeAll asks all replicas to claim.
func (s *Store) WakeAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	if _, err := s.pool.Exec(ctx, `SELECT pg_notify('onejob_due', '')`); err != nil {
		return fmt.Errorf("wake replicas: %w", err)
	}
	return nil
}
