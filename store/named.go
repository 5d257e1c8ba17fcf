package store

import (
	"context"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5"
)

// namedArgs are the arguments of a statement with names (@name), as pgx.NamedArgs are.
// Each name must have one.
//
// The statement that Postgres gets ($1) is kept, because finding the names in that of a
// claim takes a tenth of a millisecond. So statements must be constants, or one of a few
// texts.
type namedArgs map[string]any

// A numbered statement has $1, $2 and so on for names.
type numbered struct {
	sql   string
	names []string
}

var numberedStatements sync.Map // of numbered, by the statement with names

// RewriteQuery implements pgx.QueryRewriter.
func (a namedArgs) RewriteQuery(ctx context.Context, conn *pgx.Conn, sql string, _ []any) (string, []any, error) {
	known, ok := numberedStatements.Load(sql)
	if !ok {
		names := make(pgx.NamedArgs, len(a))
		for name := range a {
			names[name] = name
		}
		text, order, err := names.RewriteQuery(ctx, conn, sql, nil)
		if err != nil {
			return "", nil, err
		}
		n := numbered{sql: text, names: make([]string, len(order))}
		for i, name := range order {
			if n.names[i], ok = name.(string); !ok {
				return "", nil, fmt.Errorf("a name in a statement has no argument: %.60q", sql)
			}
		}
		known, _ = numberedStatements.LoadOrStore(sql, n)
	}
	n := known.(numbered)
	args := make([]any, len(n.names))
	for i, name := range n.names {
		args[i] = a[name]
	}
	return n.sql, args, nil
}
