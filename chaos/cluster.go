package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/consul/api"
	"github.com/jackc/pgx/v5/pgxpool"

	"onejob/chaos/checker"
	"onejob/chaos/harness"
	"onejob/chaos/observer"
	"onejob/internal/servers"
	"onejob/internal/testenv/proxy"
)

// consulPrefix is where onejob's keys are by default.
const consulPrefix = "service/onejob"

// cluster is everything that runs.
type cluster struct {
	dir  string // everything that is written
	self string // this program

	liveness string // consul.liveness of all replicas and outsiders; the default if empty
	ours     bool   // the replicas are onejob's
	old      string // a commit, which half of the daemons are of at first; none if empty
	unable   map[need]error

	midway   bool           // the schema of old is older, and is migrated in the middle of the run
	migrated atomic.Bool    // it has been
	waiting  []func() error // let those replicas start that need the new schema

	serverTLS, clientTLS servers.TLS

	say func(format string, a ...any)

	postgres *database
	consul   *servers.ConsulCluster
	hosts    []*host
	rabbitmq *servers.RabbitMQ // nil unless limits are kept there
	operator *pgxpool.Pool     // a way of one's own to Postgres
	replicas []*replica

	outsiders []*outsider
	wants     wants

	observer *harness.Observer

	marks  atomic.Int64
	helped atomic.Int64 // how often a person was called
	needed helpless     // when that was needed

	poolerExits atomic.Int64 // that no fault caused

	stopping sync.Mutex
	stops    []checker.Stop // of replicas

	clock      sync.Mutex
	clockSteps []checker.ClockStep // of Postgres

	// One fault at a time takes servers away. What else goes on is up to the
	// plan.
	consulBusy   sync.Mutex
	postgresBusy sync.Mutex
	rabbitmqBusy sync.Mutex
	clockBusy    sync.Mutex
	rolling      sync.Mutex
}

func (c *cluster) nextMark() int { return int(c.marks.Add(1)) }

// dsn is an address of the database under a name that the database can tell.
func (c *cluster) dsn(application string) string {
	return c.postgres.dsn(application)
}

// logs is the folder of logs that are on no host, and of all logs in the end if they are kept.
func (c *cluster) logs() string { return filepath.Join(c.dir, "logs") }

// keepLogs copies those that would go with the disks of hosts.
func (c *cluster) keepLogs() error {
	var errs []error
	for _, h := range c.hosts {
		if exists(h.logs()) {
			errs = append(errs, os.CopyFS(c.logs(), os.DirFS(h.logs())))
		}
	}
	return errors.Join(errs...)
}

// startCluster starts all but the replicas. What it returns must be closed, also
// when there is an error.
func startCluster(ctx context.Context, dir string, s settings, ours bool, say func(string, ...any)) (*cluster, error) {
	c := &cluster{dir: dir, say: say, liveness: s.Liveness, ours: ours, old: s.Old, unable: s.Unable}
	var err error
	if c.self, err = os.Executable(); err != nil {
		return c, err
	}
	if err := os.Mkdir(c.logs(), 0o755); err != nil {
		return c, err
	}
	if err := c.makeCertificates(); err != nil {
		return c, err
	}
	say("starting the observer, a Postgres, three Consul servers and a client agent on each of %d hosts", hostCount)
	if c.observer, err = harness.StartObserver(partObserver, dir); err != nil {
		return c, fmt.Errorf("start the observer: %w", err)
	}
	var all sync.WaitGroup
	var pgErr, consulErr, rabbitErr error
	all.Go(func() {
		c.postgres, pgErr = startDatabase(ctx, dir, &c.serverTLS, s)
	})
	all.Go(func() {
		config := servers.ConsulConfig{Dir: dir, DiskBytes: diskBytes(s.Kinds, consulDisk), ManagementToken: managementToken, Extra: consulSettings}
		if c.consul, consulErr = servers.StartConsulCluster(ctx, config); consulErr == nil {
			consulErr = c.startHosts(ctx)
		}
	})
	if s.RabbitMQ {
		all.Go(func() {
			c.rabbitmq, rabbitErr = servers.StartRabbitMQ(ctx, servers.RabbitMQConfig{Dir: dir, TLS: &c.serverTLS})
		})
	}
	all.Wait()
	if err := errors.Join(pgErr, consulErr, rabbitErr); err != nil {
		return c, err
	}
	if err := c.startPooler(ctx); err != nil {
		return c, err
	}
	config, err := pgxpool.ParseConfig(c.dsn(checker.Operator))
	if err != nil {
		return c, err
	}
	config.MaxConns = 8
	c.operator, err = pgxpool.NewWithConfig(ctx, config)
	return c, err
}

// addReplicas starts n replicas of s, spread over the hosts.
func (c *cluster) addReplicas(ctx context.Context, s subject, name string, n int) error {
	for i := range n {
		r := &replica{c: c, subject: s, host: c.hosts[len(c.replicas)%len(c.hosts)]}
		r.name = fmt.Sprintf("%s-%d", name, i+1)
		c.replicas = append(c.replicas, r)
		if err := c.authorize(ctx, r); err != nil {
			return err
		}
		_, secret := tokenOf(r.name, 0)
		r.place.tokenFile = filepath.Join(c.dir, r.name+".token")
		if err := replaceFile(r.place.tokenFile, secret); err != nil {
			return err
		}
		r.place.queues, r.place.liveness = strings.Join(restricted[r.name], ","), c.liveness
		var err error
		if r.consul, err = proxy.New(r.host.agent.Addr()); err != nil {
			return err
		}
		r.place.consul = r.consul.Addr()
		if err := r.addWaysToPostgres(); err != nil {
			return err
		}
		_, isDaemon := s.(*daemon)
		r.place.old = isDaemon && c.old != "" && (i%2 == 1 || c.midway)
		if !isDaemon && c.midway {
			c.waiting = append(c.waiting, r.hold())
		}
		if r.place.tls = r.host.tls; r.host.clocks {
			r.place.ahead = time.Duration(len(c.replicas)) * aYear
		}
		if c.rabbitmq != nil {
			if err := r.addWayToRabbitMQ(); err != nil {
				return err
			}
		}
		if err := r.start(); err != nil {
			return err
		}
	}
	return nil
}

// addWayToRabbitMQ gives a replica its own.
func (r *replica) addWayToRabbitMQ() error {
	broker := r.c.rabbitmq.URL("")
	if tls := r.host.tls; tls != nil {
		broker = r.c.rabbitmq.TLSURL("", *tls)
	}
	at, err := url.Parse(broker)
	if err != nil {
		return err
	}
	if r.rabbitmq, err = proxy.New(at.Host); err != nil {
		return err
	}
	r.place.rabbitmq = strings.Replace(broker, at.Host, r.rabbitmq.Addr(), 1)
	return nil
}

// awaitReplicas returns when every replica has a session.
func (c *cluster) awaitReplicas(ctx context.Context) error {
	started := len(c.replicas) - len(c.waiting)
	return harness.Eventually(ctx, time.Minute, "every replica has a session", func() error {
		n, err := c.inSession(ctx)
		if err == nil && n < started {
			err = fmt.Errorf("%d of %d have one", n, started)
		}
		return err
	})
}

// inSession returns how many replicas have a session.
func (c *cluster) inSession(ctx context.Context) (int, error) {
	pairs, _, err := c.consul.Servers[0].Client().KV().List(consulPrefix+"/replicas/", new(api.QueryOptions).WithContext(ctx))
	pairs = slices.DeleteFunc(pairs, func(p *api.KVPair) bool { return isOutsider(p.Value) })
	return len(pairs), err
}

// leader returns the replica that leads, or nil if that cannot be told.
func (c *cluster) leader(ctx context.Context) *replica {
	ctx, cancel := context.WithTimeout(ctx, operatorMaxWait)
	defer cancel()
	pair, _, err := c.consul.Servers[0].Client().KV().Get(consulPrefix+"/leader", new(api.QueryOptions).WithContext(ctx))
	var is struct{ Name string }
	if err != nil || pair == nil || pair.Session == "" || json.Unmarshal(pair.Value, &is) != nil {
		return nil
	}
	i := slices.IndexFunc(c.replicas, func(r *replica) bool { return r.name == is.Name })
	if i < 0 {
		return nil
	}
	return c.replicas[i]
}

// heal makes whole what faults may have left, though each heals itself.
func (c *cluster) heal(ctx context.Context) error {
	for _, r := range c.replicas {
		for _, p := range r.ways() {
			p.Heal(proxy.Both)
		}
		r.thaw()
	}
	for _, o := range c.outsiders {
		o.link.Heal(proxy.Both)
	}
	err := errors.Join(c.consul.Start(ctx), c.postgres.heal(ctx))
	if err == nil {
		err = errors.Join(c.startAgents(ctx), c.authorizeAll(ctx))
	}
	for _, h := range c.hosts {
		if err == nil && h.pooler != nil {
			err = h.pooler.Start(ctx)
		}
	}
	if c.rabbitmq != nil {
		err = errors.Join(err, c.rabbitmq.Start(ctx))
	}
	return err
}

// stopReplicas ends all replicas in good order, and returns the names of those that did
// not stop in time.
func (c *cluster) stopReplicas() (unstopped []string, err error) {
	stopped, errs := make([]bool, len(c.replicas)), make([]error, len(c.replicas))
	var all sync.WaitGroup
	for i, r := range c.replicas {
		all.Go(func() { stopped[i], errs[i] = r.end() })
	}
	all.Wait()
	for i, r := range c.replicas {
		if !stopped[i] {
			unstopped = append(unstopped, r.name)
		}
	}
	return unstopped, errors.Join(errs...)
}

// close ends whatever still runs. It may be called at any time.
func (c *cluster) close() {
	for _, r := range c.replicas {
		r.mu.Lock()
		r.ended = true
		proc := r.proc
		r.mu.Unlock()
		proc.Kill()
		for _, p := range r.ways() {
			_ = p.Close()
		}
	}
	c.closeOutsiders()
	c.awaitCommands()
	if c.operator != nil {
		c.operator.Close()
	}
	c.observer.Close()
	if c.postgres != nil {
		c.postgres.close()
	}
	for _, h := range c.hosts {
		_ = h.agent.Close()
		if h.pooler != nil {
			_ = h.pooler.Close()
		}
	}
	if c.consul != nil {
		_ = c.consul.Close()
	}
	if c.rabbitmq != nil {
		_ = c.rabbitmq.Close()
	}
}

// awaitCommands waits until the guards of dead replicas have ended the commands
// that still ran.
func (c *cluster) awaitCommands() {
	if len(c.replicas) == 0 || !c.observer.Running() {
		return
	}
	_ = harness.Eventually(context.Background(), 15*time.Second, "all commands have ended", func() error {
		stays, err := c.observer.Inside()
		if err == nil && slices.ContainsFunc(stays, func(s observer.Stay) bool { return s.PID != 0 }) {
			err = errors.New("some run")
		}
		return err
	})
}
