// Package riverjobs works on jobs of River (github.com/riverqueue/river), the
// queue for Go and Postgres that is nearest to onejob and takes no locks.
package riverjobs

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

// Config says where the jobs are and how to work on them.
type Config struct {
	DSN     string // of Postgres
	Default bool   // River's default settings instead of Bulk's

	// Lock is called around the work of each job of kind "noop", to keep others from the same
	// job: what a team adds that wants onejob's promise of River. Nil for none.
	Lock func(ctx context.Context, id int64, work func(context.Context) error) error

	// Workers is how many jobs run at once; zero means BulkMaxWorkers.
	Workers int

	// Started is called when a job of kind "stamp" starts, with what the job
	// was inserted with.
	Started func(sent int64)
}

// The settings with which River's own benchmark (river bench) runs, which its
// authors found to be much faster than the defaults. Everything else is River's
// default, the batch completer and the logger included.
const (
	BulkMaxWorkers        = 2_000
	BulkFetchCooldown     = 2 * time.Millisecond
	BulkFetchPollInterval = 20 * time.Millisecond

	// MaxConns is the size of the pool. River holds one connection to listen
	// and one or two as a leader, and uses one to fetch and two to complete.
	MaxConns = 10
)

// NoopArgs is a job that does nothing.
type NoopArgs struct{}

// Kind implements river.JobArgs.
func (NoopArgs) Kind() string { return "noop" }

type noopWorker struct {
	river.WorkerDefaults[NoopArgs]
	lock func(ctx context.Context, id int64, work func(context.Context) error) error
}

func (w noopWorker) Work(ctx context.Context, job *river.Job[NoopArgs]) error {
	nothing := func(context.Context) error { return nil }
	if w.lock == nil {
		return nothing(ctx)
	}
	return w.lock(ctx, job.ID, nothing)
}

// StampArgs is a job that tells when it starts.
type StampArgs struct {
	Sent int64 `json:"sent"` // when it was inserted, as Unix nanoseconds
}

// Kind implements river.JobArgs.
func (StampArgs) Kind() string { return "stamp" }

type stampWorker struct {
	river.WorkerDefaults[StampArgs]
	started func(sent int64)
}

func (w stampWorker) Work(_ context.Context, job *river.Job[StampArgs]) error {
	w.started(job.Args.Sent)
	return nil
}

// Run works on jobs until ctx ends.
func Run(ctx context.Context, c Config) error {
	pool, err := open(ctx, c.DSN)
	if err != nil {
		return err
	}
	defer pool.Close()
	workers := river.NewWorkers()
	river.AddWorker(workers, noopWorker{lock: c.Lock})
	if c.Started != nil {
		river.AddWorker(workers, stampWorker{started: c.Started})
	}
	config := &river.Config{
		Queues:  map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: cmp.Or(c.Workers, BulkMaxWorkers)}},
		Workers: workers,
	}
	if !c.Default {
		config.FetchCooldown = BulkFetchCooldown
		config.FetchPollInterval = BulkFetchPollInterval
	}
	client, err := river.NewClient(riverpgxv5.New(pool), config)
	if err != nil {
		return fmt.Errorf("river: %w", err)
	}
	if err := client.Start(context.WithoutCancel(ctx)); err != nil {
		return fmt.Errorf("river: start: %w", err)
	}
	<-ctx.Done()
	stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	if err := client.Stop(stopping); err != nil {
		return fmt.Errorf("river: stop: %w", err)
	}
	return nil
}

// Migrate makes River's tables.
func Migrate(ctx context.Context, dsn string) error {
	pool, err := open(ctx, dsn)
	if err != nil {
		return err
	}
	defer pool.Close()
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), nil)
	if err != nil {
		return fmt.Errorf("river: %w", err)
	}
	if _, err := migrator.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
		return fmt.Errorf("river: migrate: %w", err)
	}
	return nil
}

func open(ctx context.Context, dsn string) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, fmt.Errorf("river: %w", err)
	}
	config.MaxConns = MaxConns
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("river: %w", err)
	}
	return pool, nil
}
