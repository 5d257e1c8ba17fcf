package main

import (
	"context"
	"errors"
	"time"
)

// idleness is what a replica with default settings costs that has nothing to do.
type idleness struct {
	CPUPercent      float64 // of one core
	PostgresPercent float64 // the same for what it makes Postgres do, Postgres' own background work included
	ConsulPercent   float64
	RequestsPerS    float64 // to Consul; one that waits for a change counts once
	RSS             float64 // MB
	Others          float64 // share of the machine that others used meanwhile
}

// measureIdle watches an idle replica for a while.
func (g *environment) measureIdle(ctx context.Context, settle, watch, maxWait time.Duration) (i idleness, err error) {
	also := func(f func() error) { err = errors.Join(err, f()) }
	database, err := g.database(ctx, onejobTable.template)
	if err != nil {
		return i, err
	}
	defer also(func() error { return g.drop(database) })
	c, err := g.startConsul(ctx)
	if err != nil {
		return i, err
	}
	defer also(c.Close)
	proxy, err := startProxy(c.Addr(), nil)
	if err != nil {
		return i, err
	}
	defer proxy.close()
	m := &meter{environment: g, consul: c}
	at := place{environment: g, dsn: g.postgres.DSN(database), consul: proxy.address}
	if m.progress, err = connectProgress(ctx, at.dsn, onejobTable); err != nil {
		return i, err
	}
	defer m.progress.close()
	replica, err := startOnejob(at, 0)
	if err != nil {
		return i, err
	}
	defer also(replica.stop)
	m.processes = []*process{replica}
	if err := c.await(ctx, 1); err != nil {
		return i, err
	}
	if err := sleep(ctx, settle); err != nil {
		return i, err
	}
	if err := calm(ctx, maxWait); err != nil {
		return i, err
	}
	before, err := m.read(ctx)
	if err != nil {
		return i, err
	}
	requests, began := proxy.requests.Load(), time.Now()
	if err := sleep(ctx, watch); err != nil {
		return i, err
	}
	took := time.Since(began).Seconds()
	i.RequestsPerS = float64(proxy.requests.Load()-requests) / took
	after, err := m.read(ctx)
	if err != nil {
		return i, err
	}
	i.Others = othersShare(before.machine, after.machine)
	percent := func(name string) float64 { return 100 * (after.cpu[name] - before.cpu[name]).Seconds() / took }
	i.CPUPercent, i.PostgresPercent, i.ConsulPercent = percent("subject"), percent("postgres"), percent("consul")
	if i.RSS, err = replica.memory("VmRSS"); err != nil {
		return i, err
	}
	return i, replica.alive()
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}
