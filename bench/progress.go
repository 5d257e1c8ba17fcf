package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// lookEvery is how often the table is looked at: it bounds the error of a time.
const lookEvery = 10 * time.Millisecond

// progress follows how far a subject has come: up to which id all tasks are final,
// as others see it in the table. A look reads only the few rows that the front
// has passed since the last one.
type progress struct {
	conn *pgx.Conn
	jobs table
	at   int64 // all tasks up to this id are final
	last int64 // the highest id there is
}

// connectProgress opens the connection that looks. Its backend is not counted among
// what Postgres costs.
func connectProgress(ctx context.Context, dsn string, jobs table) (*progress, error) {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return nil, err
	}
	if _, err := conn.Exec(ctx, `SET enable_seqscan = off`); err != nil {
		_ = conn.Close(ctx)
		return nil, err
	}
	return &progress{conn: conn, jobs: jobs}, nil
}

func (f *progress) close() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = f.conn.Close(ctx)
}

// look moves the front to where it is now.
func (f *progress) look(ctx context.Context) error {
	for {
		before := f.at
		if err := f.conn.QueryRow(ctx, f.jobs.progress, f.at, f.last).Scan(&f.at); err != nil {
			return fmt.Errorf("look at the tasks: %w", err)
		}
		if f.at < before+1000 || f.at >= f.last {
			return nil
		}
	}
}

// pass waits until the front has passed an id, and returns when that was seen.
// It fails when a process ends meanwhile.
func (f *progress) pass(ctx context.Context, id int64, processes []*process) (time.Time, error) {
	for {
		if err := f.look(ctx); err != nil {
			return time.Time{}, err
		}
		if f.at >= id {
			return time.Now(), nil
		}
		for _, p := range processes {
			if err := p.alive(); err != nil {
				return time.Time{}, err
			}
		}
		select {
		case <-ctx.Done():
			return time.Time{}, fmt.Errorf("tasks up to %d of %d were final: %w", f.at, id, context.Cause(ctx))
		case <-time.After(lookEvery):
		}
	}
}

// stage adds n tasks, which nobody sees before the transaction is committed.
func (f *progress) stage(ctx context.Context, n int) (pgx.Tx, error) {
	tx, err := f.conn.Begin(ctx)
	if err != nil {
		return nil, err
	}
	statements := []string{f.jobs.notify, f.jobs.analyze} // the planner of whoever has to find these rows knows of them
	_, err = tx.Exec(ctx, f.jobs.enqueue, n)
	for _, sql := range statements {
		if err == nil && sql != "" {
			_, err = tx.Exec(ctx, sql)
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("enqueue: %w", err), tx.Rollback(context.WithoutCancel(ctx)))
	}
	f.last += int64(n)
	return tx, nil
}

// enqueue adds n tasks.
func (f *progress) enqueue(ctx context.Context, n int) error {
	tx, err := f.stage(ctx, n)
	if err != nil {
		return err
	}
	return tx.Commit(ctx)
}
