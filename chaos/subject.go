package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	"onejob/chaos/observer"
	"onejob/internal/servers"
	execkind "onejob/tasks/kinds/exec"
)

// A subject is a kind of replica that is put to the test.
type subject interface {
	// prepare does once what all replicas of the subject need.
	prepare(ctx context.Context, c *cluster) error
	// command is how a replica is started. What it prints goes to its log.
	command(p place) *exec.Cmd
	// kinds are the kinds of tasks that it can run.
	kinds() []string
}

// replicas are some of one subject.
type replicas struct {
	subject subject
	name    string // of each, before its number
	n       int
}

// place is what a replica has for its own: a name, and its own way to the
// servers.
type place struct {
	name   string
	consul string // host and port
	dsn    string // of Postgres

	token, tokenFile string // for Consul: one of them

	listenDSN string        // leads past a pooler; empty if dsn does
	tls       *servers.TLS  // what it shows Consul's agent; nil if that takes all
	ahead     time.Duration // of its boot-time clock, before that of the machine

	rabbitmq string // URL; empty unless limits are kept there

	old bool // it is of the other version, if it is a daemon

	queues   string // that it serves, separated by commas; all if empty
	liveness string // consul.liveness; the default if empty
}

func (p place) environ() []string {
	env := []string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME"),
		"ONEJOB_REPLICA=" + p.name, "ONEJOB_POSTGRES_DSN=" + p.dsn, "ONEJOB_CONSUL_ADDRESS=" + p.consul}
	if p.listenDSN != "" {
		env = append(env, "ONEJOB_POSTGRES_LISTEN_DSN="+p.listenDSN)
	}
	if p.tls != nil {
		env = append(env, "CONSUL_HTTP_SSL=true", "CONSUL_CACERT="+p.tls.CA, "CONSUL_CLIENT_CERT="+p.tls.Cert, "CONSUL_CLIENT_KEY="+p.tls.Key)
	}
	if p.token != "" {
		env = append(env, "CONSUL_HTTP_TOKEN="+p.token)
	}
	if p.tokenFile != "" {
		env = append(env, "CONSUL_HTTP_TOKEN_FILE="+p.tokenFile)
	}
	if p.rabbitmq != "" {
		env = append(env, "ONEJOB_LIMITS_BACKEND=rabbitmq", "ONEJOB_LIMITS_RABBITMQ_URL="+p.rabbitmq)
	}
	if p.queues != "" {
		env = append(env, "ONEJOB_WORKER_QUEUES="+p.queues)
	}
	if p.liveness != "" {
		env = append(env, "ONEJOB_CONSUL_LIVENESS="+p.liveness)
	}
	return env
}

// What all replicas are set to. Everything about leases is as it is by default.
const shutdownGrace = 5 * time.Second

// leaseLength is how long a lease lasts when nobody hears of the replica: the check's TTL
// less the margin, or the session's with liveness "ttl".
func leaseLength(liveness string) time.Duration {
	if liveness == "ttl" {
		return 14 * time.Second
	}
	return 9 * time.Second
}

// Limits. The slots of the elastic one are changed while it is used. Tasks of the kind capped
// name no limit, and have one by their kind.
const (
	elastic     = "elastic"
	elasticMost = 3
	capped      = "capped"
)

var limitSlots = map[string]int{"narrow": 2, "wide": 5, elastic: elasticMost, capped: 2}

// otherQueue is a queue that half of the replicas serve; they and the others serve the default
// one.
const otherQueue = "other"

// restricted are the queues of replicas that do not serve all.
var restricted = map[string][]string{"daemon-3": {"default"}, "daemon-4": {"default"}, "go-2": {"default"}}

// daemon is "onejob serve".
type daemon struct {
	binary, config string
	old            string // the binary of the other version; empty if there is none
}

func (d *daemon) kinds() []string { return []string{"exec", "http", "sql", "noop"} }

func (d *daemon) command(p place) *exec.Cmd {
	binary := d.binary
	if p.old {
		binary = d.old
	}
	cmd := exec.Command(binary, "serve", "--config", d.config)
	cmd.Env = p.environ()
	return withClock(cmd, p.ahead)
}

// prepare builds the binary, as this program was built, brings the schema up to
// date and writes the configuration. JSON is YAML.
func (d *daemon) prepare(ctx context.Context, c *cluster) error {
	d.binary, d.config = filepath.Join(c.dir, "onejob"), filepath.Join(c.dir, "onejob.yaml")
	build := exec.CommandContext(ctx, "go", "build", "-tags", builtWith("-tags"), "-ldflags", builtWith("-ldflags"), "-o", d.binary, "onejob/cmd/onejob")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build onejob: %w\n%s", err, out)
	}
	command := workCommand(c.self, c.observer.Where.Tasks)
	settings := map[string]any{
		"http":   map[string]any{"listen": "127.0.0.1:0"},
		"log":    map[string]any{"level": "debug", "format": "json"},
		"worker": map[string]any{"shutdown_grace": shutdownGrace.String()},
		"limits": map[string]any{"slots": limitSlots},
		"kinds": map[string]any{
			"exec": map[string]any{"commands": map[string]any{"work": map[string]any{
				"path": command.Path, "args": command.Args, "env": command.Env}}},
			"http": map[string]any{"allow": []string{c.observer.Where.Target}},
			"sql": map[string]any{"statements": map[string]any{"effect": map[string]any{
				"sql": effectSQL, "params": []string{"seconds"}}}},
		},
	}
	b, err := json.MarshalIndent(settings, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(d.config, b, 0o600); err != nil {
		return err
	}
	if c.old != "" {
		if err := d.prepareOld(ctx, c); err != nil {
			return err
		}
		if c.midway {
			return nil
		}
	}
	return d.migrate(ctx, c)
}

// migrate brings the schema up to date.
func (d *daemon) migrate(ctx context.Context, c *cluster) error {
	return migrateBy(ctx, c, d.binary)
}

// goReplica is a main of one's own with Go handlers: this program, as a replica.
type goReplica struct {
	self  string
	where observer.Where
}

func (g *goReplica) kinds() []string { return []string{"exec", "go", capped, "noop"} }

func (g *goReplica) prepare(_ context.Context, c *cluster) error {
	g.self, g.where = c.self, c.observer.Where
	return nil
}

func (g *goReplica) command(p place) *exec.Cmd {
	cmd := exec.Command(g.self, partReplica)
	cmd.Env = append(p.environ(), envObserver+"="+g.where.Tasks)
	return withClock(cmd, p.ahead)
}

// workCommand is what exec tasks may run: this program, as a task.
func workCommand(self, observerAddr string) execkind.Command {
	return execkind.Command{Path: self, Args: []string{partTask}, Env: map[string]string{envObserver: observerAddr}}
}

// builtWith returns the flag with which this program was built, so that what it
// builds is of the same kind.
func builtWith(flag string) string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, s := range info.Settings {
		if s.Key == flag {
			return strings.TrimSpace(s.Value)
		}
	}
	return ""
}
