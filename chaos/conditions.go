package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"onejob/chaos/checker"
	"onejob/chaos/observer"
	"onejob/internal/retry"
	"onejob/internal/servers"
)

// Hosts are not alike, and every run of onejob has these three:
//
//   - On the first one each replica has a boot-time clock of its own, years ahead of the others',
//     as machines have.
//   - The replicas of the second one reach Postgres through a pgbouncer in transaction mode.
//   - On the third one Consul's agent takes TLS alone, and only with a certificate, and the
//     replicas speak TLS to Postgres and RabbitMQ too.
const (
	hostWithClocks = iota
	hostWithPooler
	hostWithTLS
)

// poolerConnections are those of the pooler, for two replicas.
const poolerConnections = 20

// differ makes a host one of the three kinds, but for its pooler, and returns what is so of
// its agent.
func (c *cluster) differ(h *host, i int) (change func(*servers.ConsulConfig)) {
	switch {
	case !c.ours:
	case i == hostWithClocks:
		h.clocks = clocksCanDiffer()
	case i == hostWithTLS:
		h.tls = &c.clientTLS
		return func(config *servers.ConsulConfig) {
			config.TLS, config.Client, config.ServerName = &c.serverTLS, c.clientTLS, "127.0.0.1"
		}
	}
	return nil
}

// startPooler starts the pooler of its host, in front of the server that is the primary.
func (c *cluster) startPooler(ctx context.Context) (err error) {
	if !c.ours {
		return nil
	}
	target := c.postgres.primary().Addr()
	if c.postgres.front != nil {
		target = c.postgres.front.Addr()
	}
	c.hosts[hostWithPooler].pooler, err = servers.StartPooler(ctx, c.dir, target, poolerConnections)
	return err
}

// mindPooler starts the pooler again when it has ended and no fault meant it to, as a service
// manager would, until ctx ends.
func (c *cluster) mindPooler(ctx context.Context) {
	h := c.hosts[hostWithPooler]
	for ; h.pooler != nil && ctx.Err() == nil; retry.Pause(ctx, time.Second) {
		if !h.busy.TryLock() { // a fault has it
			continue
		}
		if log, ended := h.pooler.Ended(); ended {
			c.poolerExits.Add(1)
			c.say("the pooler of %s has ended by itself: %s", h.name, log)
			m := observer.Mark{ID: c.nextMark(), Kind: checker.PoolerKill, Target: h.name} // it harms as much
			err := errors.Join(c.observer.Begin(m), h.pooler.Start(ctx), c.observer.End(m))
			if err != nil && ctx.Err() == nil {
				c.say("%v", err)
			}
		}
		h.busy.Unlock()
	}
}

// makeCertificates makes those of the servers and of the replicas.
func (c *cluster) makeCertificates() error {
	dir := filepath.Join(c.dir, "tls")
	err := os.Mkdir(dir, 0o755)
	if err == nil {
		c.serverTLS, c.clientTLS, err = servers.Certificates(dir, "127.0.0.1")
	}
	return err
}

// aYear is the unit by which boot-time clocks differ.
const aYear = 365 * 24 * time.Hour

// withClock is a command whose boot-time clock is so far ahead of the machine's.
func withClock(cmd *exec.Cmd, ahead time.Duration) *exec.Cmd {
	if ahead == 0 {
		return cmd
	}
	seconds := strconv.Itoa(int(ahead.Seconds()))
	moved := exec.Command("unshare", append([]string{"--time", "--boottime", seconds, "--monotonic", seconds, "--", cmd.Path}, cmd.Args[1:]...)...)
	moved.Env, moved.Stdin = cmd.Env, cmd.Stdin
	return moved
}

// clocksCanDiffer reports whether programs can have a boot-time clock of their own: that needs
// root, and a kernel that gives it to a program, and not only to its children.
var clocksCanDiffer = sync.OnceValue(func() bool {
	out, err := withClock(exec.Command("cat", "/proc/uptime"), aYear).Output()
	if err != nil {
		return false
	}
	seconds, err := strconv.ParseFloat(string(bytes.Fields(out)[0]), 64)
	return err == nil && seconds > aYear.Seconds()
})

// conditions says how the hosts are unlike, for who reads along and for the report.
func (c *cluster) conditions() (all []string) {
	for _, h := range c.hosts {
		what := ""
		switch {
		case h.clocks:
			what = "boot-time clocks years apart"
		case h.pooler != nil:
			what = "Postgres through pgbouncer"
		case h.tls != nil:
			what = "TLS to Consul and Postgres"
			if c.rabbitmq != nil {
				what = "TLS to Consul, Postgres and RabbitMQ"
			}
		default:
			continue
		}
		var names []string
		for _, r := range c.on(h) {
			names = append(names, r.name)
		}
		all = append(all, fmt.Sprintf("%s: %s", strings.Join(names, ", "), what))
	}
	switch {
	case c.midway:
		all = append(all, "all daemons: at first of commit "+c.old+", with its schema; the others begin when that is migrated, after a third of the time")
	case c.old != "":
		all = append(all, "daemon-2, daemon-4: at first of commit "+c.old)
	}
	for _, n := range []need{partitions, disks, memory} {
		if why := c.unable[n]; why != nil {
			all = append(all, string(n)+": "+why.Error())
		}
	}
	if c.ours && !clocksCanDiffer() {
		all = append(all, "all have the machine's boot-time clock: unshare --time does not work here")
	}
	return all
}
