package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	prefix   = "service/onejob/tasks" // of the keys: onejob's own, so that who deletes some hits these as well
	workers  = 32                     // tasks at once, as onejob by default
	maxConns = 20                     // to Postgres

	pause     = time.Second              // between two looks at the table, half of it more or less: nobody looks in step
	maxWait   = 10 * time.Second         // for a look at the table
	again     = api.DefaultLockRetryTime // after which a key that somebody else had is tried again
	grace     = 5 * time.Second          // for what runs when it is told to end
	afterward = 10 * time.Second         // for giving up locks
)

// runner is one replica: it looks at the table again and again, and works on
// what is due and not under somebody else's lock.
type runner struct {
	place
	way
	pool   *pgxpool.Pool
	consul *api.Client
	http   httpClient

	going sync.WaitGroup
	slots chan struct{} // one for each that is in hand

	mu     sync.Mutex
	inHand map[int64]bool
	busy   map[int64]time.Time // when a task may be tried again that could not be had
}

func newRunner(p place, w way, pool *pgxpool.Pool, consul *api.Client) *runner {
	return &runner{place: p, way: w, pool: pool, consul: consul, http: newHTTPClient(),
		slots: make(chan struct{}, workers), inHand: map[int64]bool{}, busy: map[int64]time.Time{}}
}

// run works until ctx ends, and some time longer on what it has in hand. Errors
// of the servers are written down, and it goes on.
func (r *runner) run(ctx context.Context) {
	working, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	defer stop(nil)
	for ctx.Err() == nil {
		if err := r.look(ctx, working); err != nil && ctx.Err() == nil {
			log.Print("list tasks: ", err)
		}
		sleep(ctx, pause/2+rand.N(pause))
	}
	over := make(chan struct{})
	go func() { defer close(over); r.going.Wait() }()
	await(over, grace)
	stop(errors.New("the replica is told to end"))
	await(over, afterward)
}

type candidate struct {
	ID  int64
	Key string
}

// look lists what is due and begins with all of it that it can. What there is no
// room for is left to the next look: no list gets old.
func (r *runner) look(ctx, working context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, maxWait)
	defer cancel()
	rows, err := r.pool.Query(ctx, `
SELECT id, coalesce(lock_key, id::text)
  FROM onejob.tasks
 WHERE status = 'pending'
   AND run_at <= now()
 ORDER BY priority DESC, run_at, id`)
	if err != nil {
		return err
	}
	due, err := pgx.CollectRows(rows, pgx.RowToStructByPos[candidate])
	if err != nil {
		return err
	}
	for _, c := range due {
		if !r.take(c.ID) {
			continue
		}
		select {
		case r.slots <- struct{}{}:
		default:
			r.put(c.ID, 0)
			return nil
		}
		r.going.Go(func() {
			defer func() { <-r.slots }()
			mine, err := r.hold(working, r.consul, prefix+"/"+c.Key, func(ctx context.Context) error { return r.task(ctx, c) })
			if err != nil {
				log.Printf("task %d: %v", c.ID, err)
			}
			if mine && err == nil {
				r.put(c.ID, 0)
			} else {
				r.put(c.ID, again)
			}
		})
	}
	return nil
}

// take reports whether a task is not in hand and may be tried, and then has it
// in hand.
func (r *runner) take(id int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.inHand[id] || time.Now().Before(r.busy[id]) {
		return false
	}
	delete(r.busy, id)
	r.inHand[id] = true
	return true
}

// put puts a task down that was in hand, for so long at least.
func (r *runner) put(id int64, long time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.inHand, id)
	if long > 0 {
		r.busy[id] = time.Now().Add(long)
	}
}

// attempt is one try at a task, with what the row says.
type attempt struct {
	candidate
	Kind    string
	Payload []byte
	Attempt int
	Most    int     // attempts
	Fence   int64   // only a name for the attempt: nobody checks it
	Timeout float64 // seconds; zero for none
}

// task is one attempt under the lock: mark it in the row, work, write the
// status. A failed attempt leaves the row as it is, for the next one, unless it
// was the last.
func (r *runner) task(ctx context.Context, c candidate) error {
	a, err := r.begin(ctx, c)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil // somebody did it meanwhile
	}
	if err != nil {
		return fmt.Errorf("mark the attempt: %w", err)
	}
	if a.Attempt > a.Most {
		return r.write(ctx, a, "failed", "the last attempt did not end")
	}
	if err := r.perform(ctx, a); err != nil {
		err = fmt.Errorf("attempt %d: %w", a.Attempt, err)
		if a.Attempt == a.Most && ctx.Err() == nil {
			return errors.Join(err, r.write(ctx, a, "failed", err.Error()))
		}
		return err
	}
	return r.write(ctx, a, "succeeded", "")
}

// begin marks in the row that an attempt begins. The row stays pending: who
// dies leaves it to whoever gets the lock.
func (r *runner) begin(ctx context.Context, c candidate) (*attempt, error) {
	a := &attempt{candidate: c}
	return a, r.pool.QueryRow(ctx, `
UPDATE onejob.tasks
   SET attempt    = attempt + 1,
       fence      = nextval('onejob.fences'),
       replica    = $2,
       started_at = now()
 WHERE id = $1
   AND (status = 'pending' OR NOT $3)
RETURNING kind, payload, attempt, max_attempts, fence, coalesce(extract(epoch FROM timeout), 0)::float8`, c.ID, r.replica, r.looks).
		Scan(&a.Kind, &a.Payload, &a.Attempt, &a.Most, &a.Fence, &a.Timeout)
}

// write writes the task's status, whatever it is by now. The fence and the
// replica say whose write it is.
func (r *runner) write(ctx context.Context, a *attempt, status, problem string) error {
	_, err := r.pool.Exec(ctx, `
UPDATE onejob.tasks
   SET status      = $2,
       fence       = $3,
       replica     = $4,
       error       = nullif($5, ''),
       finished_at = now()
 WHERE id = $1`, a.ID, status, a.Fence, r.replica, problem)
	if err != nil {
		return fmt.Errorf("write the status: %w", err)
	}
	return nil
}

func await(over <-chan struct{}, long time.Duration) {
	select {
	case <-over:
	case <-time.After(long):
	}
}

func sleep(ctx context.Context, long time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(long):
	}
}
