package main

import (
	"context"
	"fmt"
	"time"

	"onejob/chaos/harness"
	"onejob/internal/servers"
	"onejob/internal/testenv/proxy"
)

// Faults of Postgres.
var postgresFaults = []*kind{
	{name: "postgres-kill", what: "Postgres falls (immediate) and comes back", weight: 1, least: 0, most: 10 * time.Second, run: onPostgres(killPostgres)},
	{name: "postgres-terminate", what: "an operator terminates a replica's connections", weight: 2, run: terminatePostgres},
	{name: "postgres-slow", what: "Postgres' disk is slow: every commit waits", weight: 2, least: 2 * time.Second, most: 20 * time.Second, run: onPostgres(slowPostgres)},
	{name: "postgres-blackhole", what: "all replicas black-holed from Postgres", weight: 1, least: time.Second, most: 20 * time.Second, run: blackhole},
	{name: "row-reset", what: "an operator makes running rows pending, by hand", weight: 1, run: resetRows},
}

// onPostgres makes a fault one that takes Postgres away: only one does at a time.
func onPostgres(run func(context.Context, *fault) error) func(context.Context, *fault) error {
	return func(ctx context.Context, h *fault) error {
		if !h.c.postgresBusy.TryLock() {
			return errNothing
		}
		defer h.c.postgresBusy.Unlock()
		return run(ctx, h)
	}
}

// apart is for how long a fault in which Postgres forgets a claim, and one in which Consul
// forgets a lock, are kept from each other: a running task has these two guards, and one
// of them is enough (docs: what is not guaranteed).
const apart = 15 * time.Second

// forgetting makes a fault one in which a guard of running tasks may be forgotten: no
// other begins until it has been over for a while, and Postgres is there meanwhile.
func forgetting(run func(context.Context, *fault) error) func(context.Context, *fault) error {
	return func(ctx context.Context, h *fault) error {
		if !h.c.postgresBusy.TryLock() {
			return errNothing
		}
		defer time.AfterFunc(apart, h.c.postgresBusy.Unlock)
		return run(ctx, h)
	}
}

func killPostgres(ctx context.Context, h *fault) error {
	if err := h.begins("the server"); err != nil {
		return err
	}
	if h.rand.IntN(2) == 0 {
		h.c.postgres.primary().Kill()
	} else if err := h.stopped(h.c.postgres.primary().Stop(servers.Immediate)); err != nil {
		return err
	}
	h.lasts(ctx)
	return h.c.postgres.primary().Start(context.WithoutCancel(ctx))
}

func blackhole(ctx context.Context, h *fault) error {
	return h.cutAll(ctx, func(r *replica) []*proxy.Proxy { return r.toPostgres() })
}

func terminatePostgres(ctx context.Context, h *fault) error {
	r := h.replica()
	if err := h.begins(r.name); err != nil {
		return err
	}
	return h.sql(ctx, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1`, r.name)
}

// slowPostgres lets every flush of the log wait, as long as Postgres allows, as
// if the disk took so long.
func slowPostgres(ctx context.Context, h *fault) error {
	if err := h.begins("the server"); err != nil {
		return err
	}
	for _, s := range []string{`ALTER SYSTEM SET commit_siblings = 0`, fmt.Sprintf(`ALTER SYSTEM SET commit_delay = %d`, 20000+h.rand.IntN(80000)), `SELECT pg_reload_conf()`} {
		_ = h.sql(ctx, s)
	}
	h.lasts(ctx)
	return harness.Eventually(context.WithoutCancel(ctx), 3*time.Minute, "Postgres' disk is quick again", func() error {
		for _, s := range []string{`ALTER SYSTEM RESET commit_delay`, `ALTER SYSTEM RESET commit_siblings`, `SELECT pg_reload_conf()`} {
			if err := h.operate(context.WithoutCancel(ctx), s); err != nil {
				return err
			}
		}
		return nil
	})
}

// resetRows does what somebody might who thinks that a task hangs. Whoever works
// on it goes on, and holds the lock: nobody else may begin.
func resetRows(ctx context.Context, h *fault) error {
	if err := h.begins("some rows"); err != nil {
		return err
	}
	return h.sql(ctx, `
UPDATE onejob.tasks
   SET status = 'pending', session = NULL, replica = NULL
 WHERE id IN (SELECT id FROM onejob.tasks WHERE status = 'running' ORDER BY started_at LIMIT 5)`)
}

// sql does something as the operator. A Postgres that is gone has been harmed
// already.
func (h *fault) sql(ctx context.Context, statement string, args ...any) error {
	if err := h.operate(ctx, statement, args...); err != nil {
		return fmt.Errorf("%w: %w", errNothing, err)
	}
	return nil
}

// operatorMaxWait is how long an operator waits for Postgres.
const operatorMaxWait = 5 * time.Second

func (h *fault) operate(ctx context.Context, statement string, args ...any) error {
	ctx, cancel := context.WithTimeout(ctx, operatorMaxWait)
	defer cancel()
	_, err := h.c.operator.Exec(ctx, statement, args...)
	return err
}
