package riverjobs

import (
	"context"
	"errors"
	"fmt"

	"github.com/hashicorp/consul/api"
	"github.com/jackc/pgx/v5/pgxpool"

	"onejob/bench/apilock"
)

// AdvisoryConns is the size of the pool for advisory locks. Each is held on a connection of
// its own while the job runs.
const AdvisoryConns = 32

// ConsulWorkers is how many jobs run at once under locks of Consul's Go client. Each has a
// session and two goroutines of its own.
const ConsulWorkers = 64

// Advisory returns a Lock that holds a session-level advisory lock of Postgres: one that
// outlives transactions, as the work may take hours.
func Advisory(ctx context.Context, dsn string) (lock func(context.Context, int64, func(context.Context) error) error, stop func(), err error) {
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, nil, fmt.Errorf("river: %w", err)
	}
	config.MaxConns = AdvisoryConns
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, nil, fmt.Errorf("river: %w", err)
	}
	return func(ctx context.Context, id int64, work func(context.Context) error) error {
		return pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
			if _, err := conn.Exec(ctx, `SELECT pg_advisory_lock($1)`, id); err != nil {
				return err
			}
			err := work(ctx)
			_, released := conn.Exec(context.WithoutCancel(ctx), `SELECT pg_advisory_unlock($1)`, id)
			return errors.Join(err, released)
		})
	}, pool.Close, nil
}

// ConsulLock returns a Lock that holds a lock of Consul's Go client, as its documentation
// says: a session and a key for each job.
func ConsulLock(consul *api.Client) func(context.Context, int64, func(context.Context) error) error {
	return func(ctx context.Context, id int64, work func(context.Context) error) error {
		mine, err := apilock.Hold(ctx, consul, fmt.Sprintf("service/river/%d", id), work)
		if err == nil && !mine {
			err = errors.New("somebody else holds the lock")
		}
		return err
	}
}
