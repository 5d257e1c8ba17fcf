// Package loops works on the table in loops side by side, as the simplest runners do.
package loops

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Pause is between looks at the table when nothing is due.
const Pause = 20 * time.Millisecond

// Run calls work in n loops, over as many connections, until ctx ends or work returns an
// error. work reports whether something was due.
func Run(ctx context.Context, dsn string, n int, work func(context.Context, *pgxpool.Pool) (some bool, err error)) error {
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return err
	}
	config.MaxConns = int32(n)
	// The planner keeps a generic plan; it must not be one for an empty table.
	config.ConnConfig.RuntimeParams["enable_seqscan"] = "off"
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	errs := make(chan error, n)
	var loops sync.WaitGroup
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	for range n {
		loops.Go(func() {
			for ctx.Err() == nil {
				switch some, err := work(ctx, pool); {
				case err != nil && ctx.Err() == nil:
					errs <- err
					stop()
				case !some:
					time.Sleep(Pause)
				}
			}
		})
	}
	loops.Wait()
	close(errs)
	return <-errs
}
