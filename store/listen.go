package store

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/tasks"
)

// Listen waits for Postgres' notifications over a connection of its own, and
// calls wake for each, until ctx ends or the connection breaks. It always
// returns an error. Notifications only save waiting: who does not listen finds
// everything at the next poll.
func (s *Store) Listen(ctx context.Context, wake func(tasks.Signal)) error {
	conn, err := s.connect(ctx)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	defer closeConn(conn)
	if _, err := conn.Exec(ctx, `LISTEN onejob_due; LISTEN onejob_cancel`); err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	wake(tasks.SignalListening)
	for {
		n, err := conn.WaitForNotification(ctx)
		if err != nil {
			return fmt.Errorf("listen: %w", err)
		}
		switch n.Channel {
		case "onejob_due":
			wake(tasks.SignalDue)
		case "onejob_cancel":
			wake(tasks.SignalCancel)
		}
	}
}

// connect opens a connection past the pool.
func (s *Store) connect(ctx context.Context) (*pgx.Conn, error) {
	conn, err := pgx.ConnectConfig(ctx, s.listen.Copy())
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
func closeConn(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx)
}
