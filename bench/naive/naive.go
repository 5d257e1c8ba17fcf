// Package naive runs tasks the way the post about mutually exclusive workers
// does: for every task it makes a session in Consul, acquires the task's key,
// works, writes the status and destroys the session.
//
// It works on the same table as onejob. It has no fence, and like the post it
// does not look again whether a task is still to be done once it has the lock:
// it shows what that way costs, and what it does under faults. It is kinder to
// itself than the post in two things: it works on many tasks at once, and its
// HTTP client keeps a connection for each of them.
package naive

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"onejob/bench/loops"
)

const (
	sessionTTL = "15s"
	listed     = 10_000 // tasks taken from the table in one look
)

// Config says where the tasks are and how to work on them.
type Config struct {
	DSN     string        // of Postgres
	Consul  string        // host and port of the agent
	Prefix  string        // of the keys; a task's is PREFIX/ID/leader
	Workers int           // tasks at once
	Work    time.Duration // how long a task takes
}

type runner struct {
	Config
	pool   *pgxpool.Pool
	consul *api.Client
}

// Run works until ctx ends. It returns an error if Postgres or Consul does.
func Run(ctx context.Context, c Config) error {
	pc, err := pgxpool.ParseConfig(c.DSN)
	if err != nil {
		return fmt.Errorf("naive: %w", err)
	}
	pc.MaxConns = 8
	pool, err := pgxpool.NewWithConfig(ctx, pc)
	if err != nil {
		return fmt.Errorf("naive: %w", err)
	}
	defer pool.Close()
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.Proxy = nil
	transport.MaxIdleConnsPerHost = 2 * c.Workers
	transport.MaxIdleConns = 2 * c.Workers
	client, err := api.NewClient(&api.Config{Address: c.Consul, Transport: transport})
	if err != nil {
		return fmt.Errorf("naive: %w", err)
	}
	r := &runner{Config: c, pool: pool, consul: client}
	for ctx.Err() == nil {
		n, err := r.round(ctx)
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("naive: %w", err)
		}
		if n == 0 {
			time.Sleep(loops.Pause)
		}
	}
	return nil
}

// round gets a list of tasks and works through it. It returns how many there
// were.
func (r *runner) round(ctx context.Context) (int, error) {
	rows, err := r.pool.Query(ctx, `
SELECT id
  FROM onejob.tasks
 WHERE status = 'pending'
   AND limit_name IS NULL
   AND run_at <= now()
 ORDER BY priority DESC, run_at, id
 LIMIT $1`, listed)
	if err != nil {
		return 0, fmt.Errorf("list tasks: %w", err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return 0, fmt.Errorf("list tasks: %w", err)
	}
	todo := make(chan int64)
	errs := make(chan error, r.Workers)
	var workers sync.WaitGroup
	for range min(r.Workers, len(ids)) {
		workers.Go(func() {
			for id := range todo {
				if err := r.task(ctx, id); err != nil && len(errs) == 0 {
					errs <- err
				}
			}
		})
	}
	for _, id := range ids {
		if ctx.Err() != nil || len(errs) > 0 {
			break
		}
		todo <- id
	}
	close(todo)
	workers.Wait()
	close(errs)
	return len(ids), <-errs
}

// task works on one task if nobody else does.
func (r *runner) task(ctx context.Context, id int64) error {
	key := r.Prefix + "/" + strconv.FormatInt(id, 10) + "/leader"
	_, err := Hold(ctx, r.consul, key, func(ctx context.Context) error {
		began := time.Now()
		time.Sleep(r.Work)
		_, err := r.pool.Exec(ctx, `
UPDATE onejob.tasks
   SET status      = 'succeeded',
       attempt     = attempt + 1,
       started_at  = $2,
       finished_at = now()
 WHERE id = $1`, id, began)
		if err != nil {
			return fmt.Errorf("write the status of task %d: %w", id, err)
		}
		return nil
	})
	return err
}

// Hold calls work while it holds key, with a session of its own, and reports
// whether it got the key; who does not get it at once does not wait. As in the
// post nobody tells work when the session ends before it does: ctx is handed on
// as it is. The error is Consul's or work's.
func Hold(ctx context.Context, consul *api.Client, key string, work func(context.Context) error) (mine bool, err error) {
	session, _, err := consul.Session().Create(&api.SessionEntry{TTL: sessionTTL, Behavior: api.SessionBehaviorDelete}, nil)
	if err != nil {
		return false, fmt.Errorf("make a session: %w", err)
	}
	// RenewPeriodic destroys the session when it is told to end.
	done := make(chan struct{})
	var renewal sync.WaitGroup
	renewal.Go(func() { _ = consul.Session().RenewPeriodic(sessionTTL, session, nil, done) })
	defer renewal.Wait()
	defer close(done)

	mine, _, err = consul.KV().Acquire(&api.KVPair{Key: key, Value: []byte(session), Session: session}, nil)
	if err != nil {
		return false, fmt.Errorf("acquire %s: %w", key, err)
	}
	if !mine {
		return false, nil
	}
	return true, work(ctx)
}
