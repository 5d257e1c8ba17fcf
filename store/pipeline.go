package store

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"onejob/internal/pgerror"
	"onejob/tasks"
)

// A pipeline is a batch of which Postgres sends the first answers while it executes the
// rest. To the statements of a pgx.Batch it answers when it has executed all of them, as
// long as the answers fit its buffer.
//
// All statements are sent at once, as those of a batch are. So none waits for the client.
type pipeline struct {
	inner *pgconn.Pipeline
	conn  *pgx.Conn
}

// sendPipeline sends the statements of b, and asks for the answers to the first ones at
// once. Close must be called, also after an error of the other methods.
func sendPipeline(ctx context.Context, conn *pgx.Conn, b *pgx.Batch, first int) (*pipeline, error) {
	prepare := conn.Config().DefaultQueryExecMode == pgx.QueryExecModeCacheStatement
	type statement struct {
		sql       string
		arguments []any
		prepared  *pgconn.StatementDescription
	}
	statements := make([]statement, len(b.QueuedQueries))
	for i, q := range b.QueuedQueries {
		s := statement{sql: q.SQL, arguments: q.Arguments}
		var err error
		if len(s.arguments) == 1 {
			if named, is := s.arguments[0].(namedArgs); is {
				if s.sql, s.arguments, err = named.RewriteQuery(ctx, conn, s.sql, nil); err != nil {
					return nil, err
				}
			}
		}
		if prepare { // once for each connection
			if s.prepared, err = conn.Prepare(ctx, s.sql, s.sql); err != nil {
				return nil, err
			}
		}
		statements[i] = s
	}
	p := &pipeline{inner: conn.PgConn().StartPipeline(ctx), conn: conn}
	for i, s := range statements {
		var build pgx.ExtendedQueryBuilder // the pipeline keeps what it has built
		if err := build.Build(conn.TypeMap(), s.prepared, s.arguments); err != nil {
			_ = p.inner.Close() // what is queued already is never sent
			return nil, err
		}
		if s.prepared != nil {
			p.inner.SendQueryStatement(s.prepared, build.ParamValues, build.ParamFormats, build.ResultFormats)
		} else {
			p.inner.SendQueryParams(s.sql, build.ParamValues, nil, build.ParamFormats, build.ResultFormats)
		}
		if i+1 == first {
			p.inner.SendFlushRequest()
		}
	}
	if err := p.inner.Sync(); err != nil {
		_ = p.inner.Close()
		return nil, err
	}
	return p, nil
}

// Query returns the rows of the next statement. After an error all following ones fail.
func (p *pipeline) Query() (pgx.Rows, error) {
	results, err := p.inner.GetResults()
	if err != nil {
		return nil, err
	}
	reader, is := results.(*pgconn.ResultReader)
	if !is {
		return nil, errors.New("a statement before this one has failed")
	}
	return pgx.RowsFromResultReader(p.conn.TypeMap(), reader), nil
}

// QueryRow returns the only row of the next statement.
func (p *pipeline) QueryRow() pgx.Row {
	rows, err := p.Query()
	return oneRow{rows, err}
}

// Exec waits for the next statement.
func (p *pipeline) Exec() (pgconn.CommandTag, error) { return commandTag(p.Query()) }

// Close reads the answers that are left.
//
// A statement that Postgres planned for a table that has changed since is prepared anew:
// the connection is given up for that.
func (p *pipeline) Close() error {
	err := p.inner.Close()
	if pgerror.Is(err, cachedPlanChanged) {
		closeConn(p.conn)
	}
	return err
}

// announce calls c.Taken with the rows that were taken and have a lock of their own and no
// history, before the claim is known to be committed.
func announce(c tasks.Claim, rows []taken) {
	if c.Taken == nil {
		return
	}
	var list []tasks.Taken
	for _, r := range rows {
		if r.alone {
			list = append(list, tasks.Taken{ID: r.id, Fence: r.fence})
		}
	}
	if len(list) > 0 {
		c.Taken(list)
	}
}
