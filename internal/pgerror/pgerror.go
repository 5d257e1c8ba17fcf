// Package pgerror says what kind of error Postgres, or the way to it, has given.
package pgerror

import (
	"errors"
	"io"
	"net"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// Unavailable reports whether the cause of an error is the database or the way to
// it, and not the statement.
func Unavailable(err error) bool {
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok {
		switch {
		case strings.HasPrefix(pg.Code, "08"), // connection exception
			strings.HasPrefix(pg.Code, "53"),  // insufficient resources
			strings.HasPrefix(pg.Code, "57P"), // shutdown, crash, starting up
			pg.Code == "25006",                // read-only, as after a failover
			pg.Code == "25P03",                // the transaction was idle, as when this process was frozen
			pg.Code == "25P04":                // the transaction took too long
			return true
		}
		return PreparedStatement(err)
	}
	return errors.As(err, new(*pgconn.ConnectError)) || errors.As(err, new(net.Error)) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, net.ErrClosed) || pgconn.Timeout(err) || pgconn.SafeToRetry(err)
}

// PreparedStatement reports whether a prepared statement of ours is gone, or was
// there already, as happens through a transaction pooler.
func PreparedStatement(err error) bool {
	return Is(err, "42P05", "26000")
}

// Is reports whether Postgres gave an error, with one of these SQLSTATEs.
func Is(err error, codes ...string) bool {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	return ok && slices.Contains(codes, pg.Code)
}
