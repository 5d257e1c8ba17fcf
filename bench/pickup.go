package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	pickupRate = 20 // INSERTs a second, on average
	pickupWarm = 20 // uncounted
)

// A pickup is a subject whose time from INSERT to the start of the handler is
// measured.
type pickup struct {
	name   string
	jobs   table
	consul bool
	insert string // one statement that adds one task, sent at $1

	// claimed selects how many ms after it was sent each task was claimed, just
	// before that is committed; empty if the table does not tell.
	claimed string
}

var (
	riverInsert = `
WITH job AS (
    INSERT INTO river_job (kind, args, max_attempts)
    VALUES ('stamp', jsonb_build_object('sent', $1::bigint), 25)
 RETURNING queue
)
SELECT pg_notify(concat(current_schema(), '.river_insert'), json_build_object('queue', queue)::text)
  FROM job`

	pickups = []pickup{
		{"onejob", onejobTable, true, `INSERT INTO onejob.tasks (kind, payload) VALUES ('stamp', jsonb_build_object('sent', $1::bigint))`,
			`SELECT (extract(epoch FROM started_at) * 1000 - (payload ->> 'sent')::bigint / 1e6)::float8 FROM onejob.tasks WHERE (payload ->> 'sent')::bigint > 0`},
		{"river", riverTable, false, riverInsert, ""},
		{"river-default", riverTable, false, riverInsert, ""},
	}
)

// A pickupRound is how many milliseconds after its INSERT each task of a round was claimed,
// where that can be known, and started.
type pickupRound struct {
	claimed, delays []float64
	others          float64 // share of the machine that others used meanwhile
}

// measurePickup measures the pick-up of n tasks on an idle system. A clock starts just
// before each INSERT is sent.
func (g *environment) measurePickup(ctx context.Context, p pickup, n int, maxWait time.Duration) (round pickupRound, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, runTimeout, fmt.Errorf("pick-up of %s did not end within %v", p.name, runTimeout))
	defer cancel()
	also := func(f func() error) {
		if e := f(); e != nil {
			err = errors.Join(err, fmt.Errorf("pick-up of %s: %w", p.name, e))
		}
	}
	database, err := g.database(ctx, p.jobs.template)
	if err != nil {
		return round, err
	}
	defer also(func() error { return g.drop(database) })
	at := place{environment: g, dsn: g.postgres.DSN(database)}
	arguments := []string{"stamp", "-subject", p.name, "-dsn", at.dsn, "-out", at.file("starts")}
	if p.consul {
		c, err := g.startConsul(ctx)
		if err != nil {
			return round, err
		}
		defer also(c.Close)
		arguments = append(arguments, "-consul", c.Addr())
	}
	f, err := connectProgress(ctx, at.dsn, p.jobs)
	if err != nil {
		return round, err
	}
	defer f.close()
	replica, err := startProcess(p.name, at.file("stamp.log"), g.self, arguments...)
	if err != nil {
		return round, err
	}
	if err = warmUpSingly(ctx, f, p.insert, replica); err == nil {
		round.others, err = calmly(ctx, maxWait, func() error {
			return insertSingly(ctx, f, p.insert, n, replica)
		})
	}
	if err != nil {
		return round, errors.Join(err, replica.stop())
	}
	if err := replica.stop(); err != nil { // it writes the start times
		return round, err
	}
	if p.claimed != "" {
		rows, err := f.conn.Query(ctx, p.claimed)
		if err != nil {
			return round, err
		}
		if round.claimed, err = pgx.CollectRows(rows, pgx.RowTo[float64]); err != nil {
			return round, err
		}
	}
	starts, err := readStarts([]string{at.file("starts")})
	if err != nil {
		return round, err
	}
	round.delays = each(starts, func(d delay) float64 { return d.ms })
	if len(round.delays) != n {
		return round, fmt.Errorf("pick-up of %s: %d of %d tasks left a start time", p.name, len(round.delays), n)
	}
	return round, nil
}

// insertSingly inserts tasks one by one at random moments, and waits for the
// last one's end.
func insertSingly(ctx context.Context, f *progress, insert string, n int, replica *process) error {
	_, err := insertSinglyWhile(ctx, f, insert, n, func() bool { return false }, replica)
	return err
}

// warmUpSingly inserts tasks one by one that are not counted.
func warmUpSingly(ctx context.Context, f *progress, insert string, replica *process) error {
	for i := range pickupWarm {
		if err := insertOne(ctx, f, insert, 0); err != nil {
			return err
		}
		if i == 0 { // it tells when the replica has come up
			if _, err := f.pass(ctx, f.last, []*process{replica}); err != nil {
				return err
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil
}

// insertSinglyWhile inserts at least n tasks, and goes on while more says so. It returns how
// many.
func insertSinglyWhile(ctx context.Context, f *progress, insert string, n int, more func() bool, replica *process) (inserted int, err error) {
	for ; inserted < n || more(); inserted++ {
		time.Sleep(rand.N(2 * time.Second / pickupRate))
		if err := insertOne(ctx, f, insert, time.Now().UnixNano()); err != nil {
			return inserted, err
		}
	}
	_, err = f.pass(ctx, f.last, []*process{replica})
	return inserted, err
}

// insertOne inserts a task that is sent at this time, in Unix nanoseconds.
func insertOne(ctx context.Context, f *progress, insert string, sent int64) error {
	f.last++
	_, err := f.conn.Exec(ctx, insert, sent)
	return err
}
