package servers

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/hashicorp/consul/api"
)

// ConsulConfig says how a private Consul differs from the usual one. The zero
// value is what most tests want.
type ConsulConfig struct {
	// Dir is where the server's own folder is made, /tmp when empty.
	Dir string

	// ManagementToken, if not empty, turns access control on: what no token
	// allows is denied, and this one allows everything.
	ManagementToken string

	// TLS, if not nil, is the server's: it then speaks HTTPS alone, and only with
	// clients that show a certificate of the same authority.
	TLS *TLS

	// Client is what the server's own client shows; with TLS only. ServerName is what
	// it expects in the server's certificate.
	Client     TLS
	ServerName string

	// DiskBytes is like that of [PostgresConfig].
	DiskBytes int64

	// Env is added to the environment of the process, as os/exec takes it.
	Env []string

	// Extra is agent configuration as JSON. It is merged over what the package
	// chooses.
	Extra string
}

// Consul is a private Consul server, a cluster of one or a member of a
// [ConsulCluster], or a client agent. Its methods may be called from several goroutines, one of
// which then waits for the other.
type Consul struct {
	config    ConsulConfig
	path      string
	folder    *folder
	host      string
	ports     consulPorts
	held      heldPorts // none if it is a server of a ConsulCluster, which has them
	members   []string  // all hosts of the cluster, if it has more than this one
	agentOf   []*Consul // the servers that it is a client agent of; empty if it is a server itself
	client    *api.Client
	closeIdle func() // closes the client's idle connections

	mu      sync.Mutex
	process *process // nil before the first start
}

type consulPorts struct{ http, server, serf int }

// StartConsul makes a new Consul server and returns when it has a leader and
// sessions can be made. Only the start obeys ctx: the server lives until Close.
func StartConsul(ctx context.Context, config ConsulConfig) (*Consul, error) {
	path, err := findConsul(ctx)
	if err != nil {
		return nil, err
	}
	return startConsul(ctx, &Consul{config: config, path: path, host: localhost})
}

// StartConsulAgent makes a client agent of the servers of one cluster, as there is
// one on each host, and returns when sessions can be made through it. It has the
// configuration of the first server. Stop and Kill keep its data: when it starts
// again it has the same name and node id, and so the sessions made through it
// live on.
func StartConsulAgent(ctx context.Context, servers ...*Consul) (*Consul, error) {
	return startConsulAgent(ctx, nil, servers...)
}

func startConsulAgent(ctx context.Context, change func(*ConsulConfig), servers ...*Consul) (*Consul, error) {
	if len(servers) == 0 {
		return nil, errors.New("start a Consul agent: it needs a server")
	}
	config := servers[0].config
	if change != nil {
		change(&config)
	}
	return startConsul(ctx, &Consul{config: config, path: servers[0].path, host: localhost, agentOf: servers})
}

// startConsul starts c on free ports, in a folder of its own.
func startConsul(ctx context.Context, c *Consul) (*Consul, error) {
	var err error
	if c.folder, err = makeFolder(c.config.Dir, "consul", c.config.DiskBytes); err != nil {
		return nil, err
	}
	err = startOnFreePorts(ctx, &c.held, 3, func(ports []int) error {
		if err := c.prepare(ports); err != nil {
			return err
		}
		return c.Start(ctx)
	})
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// prepare makes the server ready for its first start, on the given ports.
func (c *Consul) prepare(ports []int) error {
	c.ports = consulPorts{http: ports[0], server: ports[1], serf: ports[2]}
	// What a try on other ports has left there names those ports.
	if err := os.RemoveAll(c.data()); err != nil {
		return fmt.Errorf("start Consul: %w", err)
	}
	settings, err := json.MarshalIndent(c.settings(), "", "  ")
	if err != nil {
		return fmt.Errorf("start Consul: %w", err)
	}
	if err := os.WriteFile(c.file("1-onejob.json"), settings, 0o600); err != nil {
		return fmt.Errorf("start Consul: %w", err)
	}
	extra := cmp.Or(c.config.Extra, "{}")
	if err := os.WriteFile(c.file("2-extra.json"), []byte(extra), 0o600); err != nil {
		return fmt.Errorf("start Consul: %w", err)
	}
	if err := c.connect(); err != nil {
		return fmt.Errorf("start Consul: %w", err)
	}
	return nil
}

func (c *Consul) settings() map[string]any {
	settings := map[string]any{
		"server":               true,
		"bootstrap_expect":     1,
		"node_name":            c.Node(),
		"data_dir":             c.data(),
		"bind_addr":            c.host,
		"client_addr":          c.host,
		"log_level":            "warn",
		"disable_update_check": true,
		"connect":              map[string]any{"enabled": false},
		// A server that leaves its cluster in good order on SIGTERM would forget
		// what a stop and a start are meant to keep.
		"leave_on_terminate":      false,
		"skip_leave_on_interrupt": true,
		// The shortest raft timings; by default a leader takes five times longer.
		"performance": map[string]any{"raft_multiplier": 1},
		"ports": map[string]any{
			"http": c.ports.http, "server": c.ports.server, "serf_lan": c.ports.serf,
			"serf_wan": -1, "dns": -1, "https": -1, "grpc": -1, "grpc_tls": -1,
		},
	}
	if f := c.config.TLS; f != nil {
		ports := settings["ports"].(map[string]any)
		ports["http"], ports["https"] = -1, c.ports.http
		settings["tls"] = map[string]any{"https": map[string]any{
			"ca_file": f.CA, "cert_file": f.Cert, "key_file": f.Key, "verify_incoming": true,
		}}
	}
	if len(c.agentOf) > 0 {
		settings["server"] = false
		delete(settings, "bootstrap_expect")
		var join []string
		for _, s := range c.agentOf {
			join = append(join, address(s.host, s.ports.serf))
		}
		settings["retry_join"] = join
		settings["retry_interval"] = "1s"
	}
	if len(c.members) > 0 {
		settings["bootstrap_expect"] = len(c.members)
		settings["retry_join"] = c.peers()
		settings["retry_interval"] = "1s"
		// A member that is killed comes back, and must be missed until then.
		settings["autopilot"] = map[string]any{"cleanup_dead_servers": false}
	}
	if token := c.config.ManagementToken; token != "" {
		settings["acl"] = map[string]any{
			"enabled":        true,
			"default_policy": "deny",
			"tokens":         map[string]any{"initial_management": token, "agent": token},
		}
	}
	return settings
}

// connect makes the client. It takes nothing from CONSUL_HTTP_ADDR and its like,
// which are about another server.
func (c *Consul) connect() error {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	scheme := "http"
	if c.config.TLS != nil {
		scheme = "https"
		f := c.config.Client
		secure, err := api.SetupTLSConfig(&api.TLSConfig{Address: c.config.ServerName, CAFile: f.CA, CertFile: f.Cert, KeyFile: f.Key})
		if err != nil {
			return err
		}
		transport.TLSClientConfig = secure
	}
	client, err := api.NewClient(&api.Config{
		Address:    c.Addr(),
		Scheme:     scheme,
		Token:      cmp.Or(c.config.ManagementToken, "anonymous"), // an empty one is read from the environment
		HttpClient: &http.Client{Transport: transport},
	})
	if err != nil {
		return err
	}
	c.client, c.closeIdle = client, transport.CloseIdleConnections
	return nil
}

// Start starts the server again, on the ports and with the data it had. It
// returns when there is a leader. If the server runs, Start does nothing.
func (c *Consul) Start(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.process.running() {
		return nil
	}
	ctx, cancel := startContext(ctx, "Consul")
	defer cancel()

	cmd := exec.Command(c.path, "agent",
		"-config-file="+c.file("1-onejob.json"), "-config-file="+c.file("2-extra.json"))
	cmd.Dir, cmd.Env = c.folder.path, append(os.Environ(), c.config.Env...)
	process, err := startProcess("Consul", cmd, c.LogFile(), syscall.SIGKILL)
	if err != nil {
		return err
	}
	c.process = process
	if err := process.await(ctx, c.ready); err != nil {
		process.kill()
		return err
	}
	return nil
}

// ready returns nil when the leader knows this server, by a name no other server
// has, to be in good health: from then on sessions can be made.
func (c *Consul) ready(ctx context.Context) error {
	// Without a leader the consistent query below would be put on hold, for
	// longer than an election takes.
	leader, err := c.client.Status().LeaderWithQueryOptions(new(api.QueryOptions).WithContext(ctx))
	if err != nil {
		return err
	}
	if leader == "" {
		return errors.New("the server has not become leader yet")
	}
	options := (&api.QueryOptions{RequireConsistent: true}).WithContext(ctx)
	checks, _, err := c.client.Health().Node(c.Node(), options)
	if err != nil {
		return err
	}
	for _, check := range checks {
		if check.CheckID == "serfHealth" && check.Status == api.HealthPassing {
			return nil
		}
	}
	return errors.New("the server is not in its own catalog yet")
}

// Stop ends the server with SIGTERM and keeps its data. If the server does not
// run, Stop does nothing.
func (c *Consul) Stop() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.process.stop(syscall.SIGTERM, c.process.kill)
}

// Kill ends the server with kill -9.
func (c *Consul) Kill() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.process.kill()
}

// Freeze halts the server, which keeps its connections and answers nothing until
// Thaw, Stop or Kill.
func (c *Consul) Freeze() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.process.running() {
		return errors.New("freeze Consul: it does not run")
	}
	if err := c.process.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		return fmt.Errorf("freeze Consul: %w", err)
	}
	awaitState(c.process.cmd.Process.Pid, 'T')
	return nil
}

// Thaw ends a Freeze.
func (c *Consul) Thaw() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.process.running() {
		return errors.New("thaw Consul: it does not run")
	}
	if err := c.process.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		return fmt.Errorf("thaw Consul: %w", err)
	}
	return nil
}

// Wipe ends the server with kill -9 and removes its data: the next Start makes another
// cluster at the same address.
func (c *Consul) Wipe() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.process.kill()
	return os.RemoveAll(c.data())
}

// Close stops the server and removes all it has written. The server cannot be
// started again.
func (c *Consul) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.process.kill() // nobody will read the data
	c.held.release()
	if c.closeIdle != nil {
		c.closeIdle()
	}
	return c.folder.remove()
}

// Binary returns the path of Consul's binary.
func (c *Consul) Binary() string { return c.path }

// Addr is the host and port of the HTTP API. It does not change when the server
// is stopped and started.
func (c *Consul) Addr() string { return address(c.host, c.ports.http) }

// Client returns a client of the server, the same on each call, that uses the
// management token if there is one.
func (c *Consul) Client() *api.Client { return c.client }

// LogFile is where the server writes its log, until Close.
func (c *Consul) LogFile() string { return c.file("consul.log") }

// Node is the server's or agent's name in Consul, unique among all that run on this
// machine.
func (c *Consul) Node() string { return filepath.Base(c.folder.path) }

func (c *Consul) data() string { return c.file("data") }

func (c *Consul) file(name string) string { return filepath.Join(c.folder.path, name) }
