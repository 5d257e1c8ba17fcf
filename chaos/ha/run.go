package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/chaos/checker"
	"onejob/chaos/harness"
)

// cluster is everything that runs.
type cluster struct {
	settings
	began   time.Time
	hosts   []*host
	writers *writers

	observer *harness.Observer
}

func (c *cluster) say(format string, a ...any) {
	fmt.Printf("%6.1f s  %s\n", time.Since(c.began).Seconds(), fmt.Sprintf(format, a...))
}

// run is the plot: start everything, enqueue, fail over again and again, wait until
// everything has finished, and check.
func run(ctx context.Context, s settings) (*report, error) {
	c := &cluster{settings: s, began: time.Now()}
	c.say("starting %d hosts with Consul, Postgres and Patroni; standbys follow: %s", hostCount, s.standby)
	if err := c.start(ctx); err != nil {
		return nil, err
	}
	enqueueing, stop := context.WithCancel(ctx)
	defer stop()
	var writing sync.WaitGroup
	writing.Go(func() { c.writers.run(enqueueing) })

	built, err := c.build(ctx)
	if err != nil {
		return nil, err
	}
	c.say("%s", built)
	r := &report{settings: s, build: built, began: c.began}
	for _, f := range s.faults {
		fig, err := c.failOver(ctx, f)
		if err != nil {
			return nil, err
		}
		r.figures = append(r.figures, fig)
	}

	c.say("waiting until everything has finished")
	stop()
	writing.Wait()
	if err := c.finished(ctx); err != nil {
		return nil, err
	}
	var errs []error
	for _, h := range c.hosts {
		errs = append(errs, h.stopReplica())
		if h.exits > 0 {
			errs = append(errs, fmt.Errorf("%s: onejob ended by itself %d times", h.name(), h.exits))
		}
	}
	if err := errors.Join(errs...); err != nil {
		r.violations = append(r.violations, err.Error())
	}

	e := checker.Evidence{Gentle: true, Forgetful: s.standby == async}
	for _, a := range c.writers.accepted {
		e.Enqueued = append(e.Enqueued, checker.Enqueued{Task: a.task, Kind: a.kind})
	}
	there, err := readEvidence(ctx, &e)
	if err != nil {
		return nil, err
	}
	if e.Seen, err = c.observer.Stop(); err != nil {
		return nil, err
	}
	if err := writeAll(s.dir, map[string]any{"evidence.json": e}); err != nil {
		return nil, err
	}
	return r, c.checkAll(r, e, there)
}

// build is what is run.
func (c *cluster) build(ctx context.Context) (harness.Build, error) {
	b := harness.NewBuild(ctx)
	versions, err := rows(ctx, `SHOW server_version`, pgx.RowTo[string])
	if err != nil {
		return b, fmt.Errorf("ask Postgres for its version: %w", err)
	}
	b.Postgres = versions[0]
	var self struct{ Config struct{ Version string } }
	if err := c.hosts[0].ask(ctx, "GET", "http://"+wire(1)+":8500/v1/agent/self", nil, &self); err != nil {
		return b, fmt.Errorf("ask Consul for its version: %w", err)
	}
	b.Consul = self.Config.Version
	patroni, err := exec.CommandContext(ctx, "patroni", "--version").Output()
	if err != nil {
		return b, fmt.Errorf("patroni --version: %w", err)
	}
	b.Patroni = strings.TrimSpace(strings.TrimPrefix(string(patroni), "patroni "))
	return b, nil
}

// start returns when all hosts are in order and all replicas have a session.
func (c *cluster) start(ctx context.Context) error {
	var err error
	if c.observer, err = harness.StartObserver(partObserver, c.dir); err != nil {
		return fmt.Errorf("start the observer: %w", err)
	}
	c.writers = &writers{where: c.observer.Where}
	for n := range hostCount {
		h := &host{settings: c.settings, n: n + 1, dir: filepath.Join(c.dir, fmt.Sprint("host", n+1))}
		c.hosts = append(c.hosts, h)
		if err := h.make(); err != nil {
			return err
		}
		if err := h.startConsul(); err != nil {
			return err
		}
	}
	for _, h := range c.hosts {
		if err := h.startPatroni(); err != nil {
			return err
		}
	}
	if _, _, err := c.settled(ctx); err != nil {
		return err
	}
	if err := c.configure(ctx); err != nil {
		return err
	}
	for _, h := range c.hosts {
		if err := h.startReplica(); err != nil {
			return err
		}
	}
	c.say("starting a replica on each host")
	return harness.Eventually(ctx, time.Minute, "every replica has a session", func() error {
		var keys []string
		err := c.hosts[0].ask(ctx, "GET", "http://"+wire(1)+":8500/v1/kv/service/onejob/replicas/?keys", nil, &keys)
		if err == nil && len(keys) < hostCount {
			err = fmt.Errorf("%d have one", len(keys))
		}
		return err
	})
}

// configure writes the configuration of all replicas, and makes the schema.
func (c *cluster) configure(ctx context.Context) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	config := map[string]any{
		"postgres": map[string]any{"dsn": dsn()},
		"log":      map[string]any{"format": "json"},
		"kinds": map[string]any{
			"exec": map[string]any{"commands": map[string]any{"work": map[string]any{
				"path": self, "args": []string{partTask}, "env": map[string]string{envObserver: c.observer.Where.Tasks}}}},
			"http": map[string]any{"allow": []string{c.observer.Where.Target}},
			"sql": map[string]any{"statements": map[string]any{"effect": map[string]any{
				"sql": effectSQL, "params": []string{"seconds"}}}},
		},
	}
	if err := writeAll(c.dir, map[string]any{"onejob.yaml": config}); err != nil {
		return err
	}
	migrate := exec.CommandContext(ctx, filepath.Join(c.dir, "onejob"), "migrate", "up", "--config", filepath.Join(c.dir, "onejob.yaml"))
	if out, err := migrate.CombinedOutput(); err != nil {
		return fmt.Errorf("onejob migrate up: %w\n%s", err, out)
	}
	conn, err := pgx.Connect(ctx, dsn())
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	if _, err := conn.Exec(ctx, schemaSQL); err != nil {
		return fmt.Errorf("make the schema ha: %w", err)
	}
	return nil
}

// settled returns the primary and its timeline when both standbys follow it.
func (c *cluster) settled(ctx context.Context) (p *host, timeline int, err error) {
	name := ""
	err = harness.Eventually(ctx, repairing, "Postgres is in order", func() error {
		for _, h := range c.hosts {
			members, err := h.members(ctx)
			if err != nil {
				return err
			}
			if name, err = primary(members); err != nil {
				return err
			}
			if c.standby == synchronous && !slices.ContainsFunc(members, func(m member) bool { return m.Role == "sync_standby" }) {
				return errors.New("no standby is synchronous")
			}
		}
		type state struct{ Timeline, Standbys int }
		now, err := rows(ctx, `
SELECT ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int, count(*)
  FROM pg_stat_replication
 WHERE state = 'streaming'`, pgx.RowToStructByPos[state])
		if err != nil {
			return err
		}
		if now[0].Standbys < hostCount-1 {
			return fmt.Errorf("%d standbys follow", now[0].Standbys)
		}
		timeline = now[0].Timeline // Patroni may know an earlier one for some seconds
		return nil
	})
	for _, h := range c.hosts {
		if h.name() == name {
			p = h
		}
	}
	return p, timeline, err
}

// finished returns when every task that is in the table now has finished.
func (c *cluster) finished(ctx context.Context) error {
	last, err := rows(ctx, `SELECT coalesce(max(id), 0) FROM onejob.tasks`, pgx.RowTo[int64])
	if err != nil {
		return err
	}
	return harness.Eventually(ctx, finishing, "all tasks have finished", func() error {
		left, err := rows(ctx, `SELECT count(*) FROM onejob.tasks WHERE id <= $1 AND status IN ('pending', 'running')`, pgx.RowTo[int], last[0])
		if err == nil && left[0] > 0 {
			err = fmt.Errorf("%d have not", left[0])
		}
		return err
	})
}
