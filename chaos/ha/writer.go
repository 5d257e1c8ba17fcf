package main

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/chaos/observer"
	"onejob/internal/retry"
)

// writers enqueue tasks on every server that takes them, each with a connection of its
// own, so that there is a due task as soon as a server takes a write.
type writers struct {
	where observer.Where

	mu       sync.Mutex
	n        int
	accepted []accepted
}

// accepted is an INSERT that a server has acknowledged.
type accepted struct {
	host     int
	token    string // its unique_key: an id that was forgotten may be given to another task
	task     int64
	kind     string
	timeline int
	at       time.Time
}

// pause is how long a writer waits between two INSERTs.
const pause = 100 * time.Millisecond

// run enqueues until ctx ends.
func (w *writers) run(ctx context.Context) {
	var all sync.WaitGroup
	for n := range hostCount {
		all.Go(func() {
			for ctx.Err() == nil {
				_ = w.write(ctx, n+1) // the next one may be taken
				retry.Pause(ctx, pause)
			}
		})
	}
	all.Wait()
}

// write enqueues on one server until that fails.
func (w *writers) write(ctx context.Context, host int) error {
	connecting, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	conn, err := pgx.Connect(connecting, fmt.Sprintf("host=%s user=postgres dbname=postgres sslmode=disable", network(host)))
	if err != nil {
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(closing)
	}()
	for ; ctx.Err() == nil; retry.Pause(ctx, pause) {
		if err := w.insert(ctx, conn, host); err != nil {
			return err
		}
	}
	return nil
}

func (w *writers) insert(ctx context.Context, conn *pgx.Conn, host int) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
	defer cancel()
	token, kind, key, payload := w.next()
	a := accepted{host: host, token: token, kind: kind}
	err := conn.QueryRow(ctx, `
INSERT INTO onejob.tasks (unique_key, kind, payload, lock_key, max_attempts)
VALUES ($1, $2, $3, $4, 30)
RETURNING id, ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int`, token, kind, payload, key).Scan(&a.task, &a.timeline)
	if err != nil {
		return err
	}
	a.at = time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.accepted = append(w.accepted, a)
	return nil
}

// next is another task. One in sixty takes so long that a fault can catch it in the
// middle; their lock keys are in use for a third of the time.
func (w *writers) next() (token, kind string, key *string, payload any) {
	w.mu.Lock()
	w.n++
	n := w.n
	w.mu.Unlock()
	token = fmt.Sprint("n", n)
	ms := 20 + n*37%180
	switch {
	case n%60 == 0:
		ms = 5000 + n*37%10000
		key = new(fmt.Sprint("long-", n/60%6))
	case n%3 == 0:
		key = new(fmt.Sprint("short-", n/3%8))
	}
	switch n / 3 % 4 {
	case 0, 1:
		return token, "exec", key, text(map[string]any{"command": "work", "data": work{MS: ms}})
	case 2:
		name := ""
		if key != nil {
			name = *key
		}
		return token, "http", key, text(map[string]any{"url": w.where.WorkURL(name, "", time.Duration(ms)*time.Millisecond, 0)})
	}
	return token, "sql", key, text(map[string]any{"statement": "effect", "params": map[string]any{"seconds": float64(ms) / 1000}})
}

func text(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // there is nothing in it that JSON cannot have
	}
	return string(b)
}

// first returns the first write after a moment that a server accepted which has a later
// timeline than the given one.
func (w *writers) first(after time.Time, timeline int) (first accepted, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, a := range w.accepted {
		if a.at.After(after) && a.timeline > timeline && (!ok || a.at.Before(first.at)) {
			first, ok = a, true
		}
	}
	return first, ok
}
