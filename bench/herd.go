package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/internal/servers"
)

const (
	herdRate  = 100 // INSERTs a second
	herdSlots = 32  // worker.concurrency of each replica: the default

	// So many replicas need more connections than Postgres takes by default (100), and Consul's
	// agent from one address (200).
	herdConnections = 1_000
	herdConsul      = `{"log_level": "info", "limits": {"http_max_conns_per_client": 10000}}`
)

// A herdRound is what a task cost that was inserted alone, among so many replicas that all hear
// of it.
type herdRound struct {
	Replicas   int     `json:"replicas"`
	PostgresUS float64 `json:"postgres_us_per_task"` // idle replicas' part included
	ConsulUS   float64 `json:"consul_us_per_task"`
	P50        float64 `json:"pickup_p50_ms"`
	P99        float64 `json:"pickup_p99_ms"`
	Others     float64 `json:"others_share"` // of the machine, used by others meanwhile
}

// measureHerd starts n replicas in one process and inserts tasks one by one, herdRate a second.
// Postgres and Consul are other ones than those of the environment: they take more connections.
func (g *environment) measureHerd(ctx context.Context, n int, p *plan) (h herdRound, err error) {
	h.Replicas = n
	ctx, cancel := context.WithTimeoutCause(ctx, runTimeout, fmt.Errorf("a herd of %d did not end within %v", n, runTimeout))
	defer cancel()
	also := func(f func() error) {
		if e := f(); e != nil {
			err = errors.Join(err, fmt.Errorf("herd of %d: %w", n, e))
		}
	}
	own := *g
	own.postgres, err = servers.StartPostgres(ctx, servers.PostgresConfig{
		Dir: g.dir, Durable: true,
		Settings: map[string]string{"dynamic_shared_memory_type": "posix", "max_connections": strconv.Itoa(herdConnections)},
	})
	if err != nil {
		return h, err
	}
	defer also(own.postgres.Close)
	if err := own.connect(ctx); err != nil {
		return h, err
	}
	defer also(func() error { return own.admin.Close(context.WithoutCancel(ctx)) })
	at := place{environment: &own, dsn: own.postgres.DSN("postgres"), number: n}
	if err := migrateOnejob(ctx, at.dsn); err != nil {
		return h, err
	}
	m := &meter{environment: &own}
	if m.consul, err = own.startConsulWith(ctx, herdConsul); err != nil {
		return h, err
	}
	defer also(m.consul.Close)
	if m.progress, err = connectProgress(ctx, at.dsn, onejobTable); err != nil {
		return h, err
	}
	defer m.progress.close()
	feed, err := pgx.Connect(ctx, at.dsn) // counted: it wakes those who listen
	if err != nil {
		return h, err
	}
	defer also(func() error { return feed.Close(context.WithoutCancel(ctx)) })
	starts := at.file("herd-starts")
	herd, err := startProcess("herd", at.file("herd.log"), g.self, "stamp", "-subject", "onejob", "-dsn", at.dsn, "-consul", m.consul.Addr(),
		"-replicas", strconv.Itoa(n), "-slots", strconv.Itoa(herdSlots), "-out", starts)
	if err != nil {
		return h, err
	}
	m.processes = []*process{herd}
	if err := m.herd(ctx, &h, feed, p); err != nil {
		return h, errors.Join(err, herd.stop())
	}
	if err := herd.stop(); err != nil { // it writes the start times
		return h, err
	}
	delays, err := readStarts([]string{starts})
	if err != nil {
		return h, err
	}
	if len(delays) != p.HerdTasks {
		return h, fmt.Errorf("herd of %d: %d of %d tasks left a start time", n, len(delays), p.HerdTasks)
	}
	ms := each(delays, func(d delay) float64 { return d.ms })
	h.P50, h.P99 = percentile(ms, 50), percentile(ms, 99)
	return h, nil
}

// herd waits until all replicas are there and calm, and counts what tasks cost that come one by one.
func (m *meter) herd(ctx context.Context, h *herdRound, feed *pgx.Conn, p *plan) error {
	if err := m.consul.await(ctx, h.Replicas); err != nil {
		return err
	}
	insert := func(sent int64) error {
		m.progress.last++
		_, err := feed.Exec(ctx, pickups[0].insert, sent)
		return err
	}
	for range pickupWarm {
		if err := insert(0); err != nil {
			return err
		}
	}
	if _, err := m.progress.pass(ctx, m.progress.last, m.processes); err != nil {
		return err
	}
	if err := sleep(ctx, p.HerdSettle); err != nil { // they have all seen each other come
		return err
	}
	if err := calm(ctx, p.MaxWait); err != nil {
		return err
	}
	before, err := m.read(ctx)
	if err != nil {
		return err
	}
	next := time.Now()
	for range p.HerdTasks {
		next = next.Add(time.Second / herdRate)
		if err := sleep(ctx, time.Until(next)); err != nil {
			return err
		}
		if err := insert(next.UnixNano()); err != nil {
			return err
		}
	}
	if _, err := m.progress.pass(ctx, m.progress.last, m.processes); err != nil {
		return err
	}
	after, err := m.read(ctx)
	if err != nil {
		return err
	}
	cost := func(name string) float64 {
		return float64((after.cpu[name] - before.cpu[name]).Microseconds()) / float64(p.HerdTasks)
	}
	h.PostgresUS, h.ConsulUS, h.Others = cost("postgres"), cost("consul"), othersShare(before.machine, after.machine)
	return m.verify(ctx, benchCase{name: "herd"})
}
