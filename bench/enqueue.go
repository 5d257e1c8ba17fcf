package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// enqueueBatch is how many rows one INSERT adds.
const enqueueBatch = 1_000

// measureEnqueue returns how many rows a second one client adds with INSERTs of
// many rows, each its own durable transaction, while nobody works on them.
func (g *environment) measureEnqueue(ctx context.Context, rows int, maxWait time.Duration) (perSecond figure, err error) {
	database, err := g.database(ctx, onejobTable.template)
	if err != nil {
		return perSecond, err
	}
	defer func() { err = errors.Join(err, g.drop(database)) }()
	conn, err := pgx.Connect(ctx, g.postgres.DSN(database))
	if err != nil {
		return perSecond, err
	}
	defer conn.Close(ctx)
	insert := `INSERT INTO onejob.tasks (kind) VALUES ('noop')` + strings.Repeat(`, ('noop')`, enqueueBatch-1)
	done := 0
	perSecond.others, err = calmly(ctx, maxWait, func() error {
		began := time.Now()
		for ; done < rows; done += enqueueBatch {
			if _, err := conn.Exec(ctx, insert, pgx.QueryExecModeSimpleProtocol); err != nil {
				return err
			}
		}
		perSecond.value = float64(done) / time.Since(began).Seconds()
		return nil
	})
	if err != nil {
		return perSecond, err
	}
	var there int
	if err := conn.QueryRow(ctx, `SELECT count(*) FROM onejob.tasks`).Scan(&there); err != nil {
		return perSecond, err
	}
	if there != done {
		return perSecond, fmt.Errorf("%d rows were enqueued and %d are there", done, there)
	}
	return perSecond, nil
}
