package store

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

// Only an error of the statement itself says that it has ended: a pooler that gives up on a
// connection sends one as well, and the statement goes on in its backend.
func TestHasEnded(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		err   error
		ended bool
	}{
		{&pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "23505"}, true},
		{fmt.Errorf("run it: %w", &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "57014"}), true},
		{&pgconn.PgError{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "57P01"}, false},
		{&pgconn.PgError{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "08P01", Message: "query timeout"}, false},
		{&pgconn.PgError{Severity: "FATAL", Code: "08P01"}, false}, // poolers may leave out the field that no language changes
		{&pgconn.PgError{Severity: "ERROR", Code: "08006"}, false},
		{context.DeadlineExceeded, false},
		{errors.New("unexpected EOF"), false},
	} {
		if got := hasEnded(test.err); got != test.ended {
			t.Errorf("%#v: %t", test.err, got)
		}
	}
}
