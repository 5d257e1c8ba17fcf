package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"onejob/chaos/harness"
	"onejob/internal/servers"
	"onejob/internal/testenv/proxy"
)

// How a standby follows: with commits that wait for it, or not.
const (
	async       = "async"
	synchronous = "sync"
)

// database is the Postgres of a run: one server, or a primary and a standby, which
// change places.
type database struct {
	servers []*servers.Postgres
	waits   bool         // commits wait for the standby
	front   *proxy.Proxy // leads the operator to the primary; nil without a standby
	meant   atomic.Int64 // how many processes ended by a signal because of a fault

	mu    sync.Mutex
	first int // which one is the primary
}

func startDatabase(ctx context.Context, dir string, tls *servers.TLS, s settings) (*database, error) {
	d := &database{waits: s.Standby == synchronous}
	p, err := servers.StartPostgres(ctx, servers.PostgresConfig{Dir: dir, Durable: true, TLS: tls, Clock: slices.Contains(s.Kinds, clockJump), DiskBytes: diskBytes(s.Kinds, postgresDisk),
		Settings: map[string]string{"max_connections": "200", "log_min_messages": "log", "wal_keep_size": "512MB"}})
	if err != nil {
		return d, err
	}
	d.servers = append(d.servers, p)
	if s.Standby == "" {
		return d, nil
	}
	follower, err := p.StartStandby(ctx)
	if err != nil {
		return d, err
	}
	d.servers = append(d.servers, follower)
	if d.front, err = proxy.New(p.Addr()); err != nil {
		return d, err
	}
	return d, d.wait(ctx)
}

// crashes returns how many processes of the servers were ended by a signal that no fault
// caused.
func (d *database) crashes() (int, error) {
	n, err := d.logged()
	return n - int(d.meant.Load()), err
}

// logged returns how many were ended by a signal, as the postmasters say. One that is killed
// says nothing.
func (d *database) logged() (n int, err error) {
	for _, s := range d.servers {
		log, err := os.ReadFile(s.LogFile())
		if err != nil {
			return 0, err
		}
		n += bytes.Count(log, []byte("was terminated by signal"))
	}
	return n, nil
}

// primary is the server that is the database.
func (d *database) primary() *servers.Postgres {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.servers[d.first]
}

// primaryIndex is its place among the servers.
func (d *database) primaryIndex() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.first
}

// other is the one that follows it, or is to.
func (d *database) other() *servers.Postgres {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.servers[1-d.first]
}

// dsn is the address for the operator, under a name that the database can tell.
func (d *database) dsn(application string) string {
	p := d.primary()
	dsn := p.DSN("postgres") + "&application_name=" + application
	if d.front != nil {
		dsn = strings.Replace(dsn, p.Addr(), d.front.Addr(), 1)
	}
	return dsn
}

// addWaysToPostgres gives a replica its own to each server, and to its host's pooler, and the
// addresses that they make.
func (r *replica) addWaysToPostgres() error {
	d := r.c.postgres
	dsn := func(hosts ...string) string {
		s := d.servers[0].DSN("postgres") + "&application_name=" + r.name
		return strings.Replace(s, d.servers[0].Addr(), strings.Join(hosts, ","), 1)
	}
	var hosts []string
	for _, s := range d.servers {
		p, err := proxy.New(s.Addr())
		if err != nil {
			return err
		}
		r.postgres, hosts = append(r.postgres, p), append(hosts, p.Addr())
	}
	r.place.dsn = dsn(hosts...)
	if len(hosts) > 1 {
		r.place.dsn += "&target_session_attrs=read-write"
	}
	if tls := r.host.tls; tls != nil {
		r.place.dsn = strings.Replace(r.place.dsn, "sslmode=disable", "sslmode=verify-full&sslrootcert="+tls.CA, 1)
	}
	if r.host.pooler != nil {
		p, err := proxy.New(r.host.pooler.Addr())
		if err != nil {
			return err
		}
		r.pooler, r.place.listenDSN, r.place.dsn = p, r.place.dsn, dsn(p.Addr())
	}
	return nil
}

// promote makes the standby the primary. The operator is led there.
func (d *database) promote(ctx context.Context) error {
	s := d.other()
	if d.waits { // it has no standby of its own yet
		if err := s.Exec(ctx, "ALTER SYSTEM SET synchronous_standby_names = ''", "SELECT pg_reload_conf()"); err != nil {
			return err
		}
	}
	if err := s.Promote(ctx); err != nil {
		return fmt.Errorf("promote the standby: %w", err)
	}
	d.mu.Lock()
	d.first = 1 - d.first
	d.mu.Unlock()
	d.front.Lead(s.Addr())
	return nil
}

// rebuild makes the other server a standby, with none of its own data.
func (d *database) rebuild(ctx context.Context) error {
	if err := d.other().Follow(ctx, d.primary()); err != nil {
		return fmt.Errorf("rebuild the standby: %w", err)
	}
	return d.wait(ctx)
}

// wait makes commits wait for the standby from now on, if they are to.
func (d *database) wait(ctx context.Context) error {
	if !d.waits {
		return nil
	}
	p := d.primary()
	err := harness.Eventually(ctx, 3*time.Minute, "the standby follows", func() error {
		return p.Exec(ctx, "DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_stat_replication WHERE state = 'streaming') THEN RAISE 'it does not'; END IF; END $$")
	})
	if err != nil {
		return err
	}
	return p.Exec(ctx, "ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
}

// setClock sets the clocks of all servers to so much ahead of the machine's.
func (d *database) setClock(ahead time.Duration) error {
	var errs []error
	for _, s := range d.servers {
		errs = append(errs, s.SetClock(ahead))
	}
	return errors.Join(errs...)
}

// heal starts what does not run.
func (d *database) heal(ctx context.Context) error {
	var errs []error
	for _, s := range d.servers {
		errs = append(errs, s.Start(ctx))
	}
	return errors.Join(errs...)
}

func (d *database) close() {
	if d.front != nil {
		_ = d.front.Close()
	}
	for _, s := range d.servers {
		_ = s.Close()
	}
}
