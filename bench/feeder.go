package main

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

// A feeder enqueues tasks over a connection of its own, which it opens again when it was lost.
// A task says when it was due to be enqueued, not when that was possible: what Postgres makes a
// client wait for is part of the pick-up.
type feeder struct {
	dsn      string
	subject  pressedSubject
	restarts bool      // connections may break
	front    *progress // where pressureWaiting tasks always wait; else nil
	conn     *pgx.Conn
	inserted atomic.Int64

	commit sync.Mutex // held while many tasks are inserted that a look would miscount

	mu      sync.Mutex
	clock   ticks
	counted bool // tasks say when they were due; those of the warm-up do not
}

// ticks say when tasks are due: some at a time, every feedEvery.
type ticks struct {
	next time.Time
	rate float64 // tasks a second
	part float64 // of a task, left over from the ticks before
}

// due returns, for each task that is due by now and was not before, when that was, in Unix
// nanoseconds.
func (t *ticks) due(now time.Time) (sent []int64) {
	for ; !t.next.After(now); t.next = t.next.Add(feedEvery) {
		for t.part += t.rate * feedEvery.Seconds(); t.part >= 1; t.part-- {
			sent = append(sent, t.next.UnixNano())
		}
	}
	return sent
}

func startFeeder(ctx context.Context, r *pressedRun) (f *feeder, err error) {
	f = &feeder{dsn: r.at.dsn, subject: r.subject, restarts: r.pressure.restarts}
	if r.pressure.full {
		if f.front, err = connectProgress(ctx, f.dsn, r.subject.jobs); err != nil {
			return nil, err
		}
	}
	if f.conn, err = pgx.Connect(ctx, f.dsn); err != nil {
		f.close()
		return nil, err
	}
	return f, nil
}

// backends returns the processes that serve it.
func (f *feeder) backends() []int {
	pids := []int{int(f.conn.PgConn().PID())}
	if f.front != nil {
		pids = append(pids, int(f.front.conn.PgConn().PID()))
	}
	return pids
}

// pace sets how many tasks a second are due from now on, and whether they count.
func (f *feeder) pace(rate float64, counted bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.clock.next.IsZero() {
		f.clock.next = time.Now()
	}
	f.clock.rate, f.counted = rate, counted
}

// run enqueues until stop is closed.
func (f *feeder) run(ctx context.Context, stop <-chan struct{}) error {
	var owed []int64
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-stop:
			return nil
		case <-time.After(f.wait()):
		}
		more, err := f.more(ctx)
		if err != nil {
			return err
		}
		if owed = append(owed, more...); len(owed) == 0 {
			continue
		}
		if err := f.add(ctx, owed); err == nil {
			owed = owed[:0]
		} else if !f.restarts || ctx.Err() != nil {
			return err
		}
	}
}

// wait returns how long it is until the next tick.
func (f *feeder) wait() time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.front != nil {
		return feedEvery
	}
	return max(time.Until(f.clock.next), time.Millisecond)
}

// more returns when each of the tasks was due that are to be enqueued now.
func (f *feeder) more(ctx context.Context) (sent []int64, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	if f.front == nil {
		sent = f.clock.due(now)
	} else {
		f.front.last = f.inserted.Load()
		if err := f.front.look(ctx); err != nil {
			return nil, err
		}
		if n := pressureWaiting - int(f.front.last-f.front.at); n >= 1_000 {
			for range n {
				sent = append(sent, now.UnixNano())
			}
		}
	}
	if !f.counted {
		clear(sent)
	}
	return sent, nil
}

// add enqueues a task for each element.
func (f *feeder) add(ctx context.Context, sent []int64) error {
	if f.conn.IsClosed() {
		conn, err := pgx.Connect(ctx, f.dsn)
		if err != nil {
			return fmt.Errorf("enqueue: %w", err)
		}
		f.conn = conn
	}
	if f.front != nil {
		f.commit.Lock()
		defer f.commit.Unlock()
	}
	if _, err := f.conn.Exec(ctx, f.subject.enqueue, sent); err != nil {
		return fmt.Errorf("enqueue: %w", err)
	}
	f.inserted.Add(int64(len(sent)))
	return nil
}

// burst enqueues many tasks in one statement over another connection, beside all others.
func (f *feeder) burst(ctx context.Context, sent []int64) error {
	conn, err := pgx.Connect(ctx, f.dsn)
	if err != nil {
		return fmt.Errorf("enqueue: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	tx, err := conn.Begin(ctx)
	if err != nil {
		return fmt.Errorf("enqueue: %w", err)
	}
	if _, err := tx.Exec(ctx, f.subject.enqueue, sent); err != nil {
		return fmt.Errorf("enqueue: %w", err)
	}
	f.commit.Lock()
	defer f.commit.Unlock()
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("enqueue: %w", err)
	}
	f.inserted.Add(int64(len(sent)))
	return nil
}

// done returns how many tasks are done, and when that was, and notes how many are not. At a rate
// it may miss what is being inserted just then, which no look shall delay.
func (f *feeder) done(ctx context.Context, conn *pgx.Conn, waiting *int64) (n float64, at time.Time, err error) {
	f.commit.Lock()
	defer f.commit.Unlock()
	inserted, at := f.inserted.Load(), time.Now()
	err = conn.QueryRow(ctx, f.subject.unfinished).Scan(waiting)
	return float64(inserted - *waiting), at, err
}

func (f *feeder) close() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if f.front != nil {
		f.front.close()
	}
	if f.conn != nil {
		_ = f.conn.Close(ctx)
	}
}
