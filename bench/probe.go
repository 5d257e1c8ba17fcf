package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// probeEvery is the mean time between two tasks whose pick-up is measured. They
// are few beside the others, which are no-ops.
const probeEvery = 100 * time.Millisecond

// probes measures pick-up under load: from just before an INSERT is sent until the
// target of the http task hears of it. That is a little later than the start of the
// handler, by a request on this machine.
type probes struct {
	url    string
	server *http.Server
	done   chan error
	next   time.Time

	mu     sync.Mutex
	delays []delay
}

// A delay is one pick-up.
type delay struct {
	sent time.Time
	ms   float64
}

// startProbes starts the target.
func startProbes() (*probes, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &probes{url: "http://" + l.Addr().String(), done: make(chan error, 1)}
	p.server = &http.Server{Handler: http.HandlerFunc(p.heard)}
	go func() { p.done <- p.server.Serve(l) }()
	return p, nil
}

func (p *probes) close() error {
	err := p.server.Close()
	if served := <-p.done; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}

func (p *probes) heard(_ http.ResponseWriter, r *http.Request) {
	now := time.Now()
	nanos, err := strconv.ParseInt(r.URL.Query().Get("sent"), 10, 64)
	if err != nil {
		return
	}
	sent := time.Unix(0, nanos)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delays = append(p.delays, delay{sent, float64(now.Sub(sent).Nanoseconds()) / 1e6})
}

// insert inserts a task if it is time for one, and reports whether it did.
func (p *probes) insert(ctx context.Context, conn *pgx.Conn) (bool, error) {
	if time.Now().Before(p.next) {
		return false, nil
	}
	p.next = time.Now().Add(rand.N(2 * probeEvery))
	_, err := conn.Exec(ctx, `INSERT INTO onejob.tasks (kind, payload) VALUES ('http', jsonb_build_object('url', $1::text))`,
		fmt.Sprintf("%s/?sent=%d", p.url, time.Now().UnixNano()))
	if err != nil {
		return false, fmt.Errorf("enqueue a probe: %w", err)
	}
	return true, nil
}

// between returns the delays in ms of what was sent between two moments.
func (p *probes) between(from, to time.Time) (ms []float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, d := range p.delays {
		if !d.sent.Before(from) && d.sent.Before(to) {
			ms = append(ms, d.ms)
		}
	}
	return ms
}

// A heldSnapshot is a transaction that keeps Postgres from removing any row that has died since
// it began, as a forgotten psql or a long dump does.
type heldSnapshot struct {
	conn *pgx.Conn
	xmin string // the oldest transaction whose rows it keeps
}

// holdSnapshot opens one.
func holdSnapshot(ctx context.Context, dsn string) (*heldSnapshot, error) {
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	cfg.RuntimeParams["application_name"] = "bench-hold-xmin"
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	h := &heldSnapshot{conn: conn}
	if _, err = conn.Exec(ctx, `BEGIN ISOLATION LEVEL REPEATABLE READ`); err == nil {
		err = conn.QueryRow(ctx, `SELECT backend_xmin::text FROM pg_stat_activity WHERE pid = pg_backend_pid()`).Scan(&h.xmin)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("hold a snapshot: %w", err), conn.Close(ctx))
	}
	return h, nil
}

// still returns an error if the snapshot was lost meanwhile: the run would have measured
// something else. It asks over another connection, since a backend that runs a statement has
// a snapshot in any case.
func (h *heldSnapshot) still(ctx context.Context, other *pgx.Conn) error {
	var xmin string
	err := other.QueryRow(ctx, `SELECT coalesce(min(backend_xmin::text), 'none') FROM pg_stat_activity WHERE pid = $1`, h.conn.PgConn().PID()).Scan(&xmin)
	if err == nil && xmin != h.xmin {
		err = fmt.Errorf("its transaction kept rows from %s on, and now from %s", h.xmin, xmin)
	}
	if err != nil {
		return fmt.Errorf("the snapshot was not held until the end: %w", err)
	}
	return nil
}

// close ends the transaction.
func (h *heldSnapshot) close(ctx context.Context) error { return h.conn.Close(ctx) }
