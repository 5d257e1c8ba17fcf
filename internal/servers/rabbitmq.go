package servers

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	amqp "github.com/rabbitmq/amqp091-go"
)

// RabbitMQConfig says how a private RabbitMQ differs from the usual one. The
// zero value is what most tests want.
type RabbitMQConfig struct {
	// Dir is where the server's own folder is made, /tmp when empty.
	Dir string

	// TLS, if not nil, is the broker's: it listens for encrypted connections as well,
	// and lets in only clients that show a certificate of the same authority.
	TLS *TLS

	// Extra is added to rabbitmq.conf.
	Extra string
}

// RabbitMQ is a private RabbitMQ broker, a cluster of one, with its management
// API. It knows nothing of other Erlang nodes on the machine, nor they of it: its
// name, cookie and port mapper are its own; but see Join. Its methods may be called from
// several goroutines, one of which then waits for the other.
type RabbitMQ struct {
	config RabbitMQConfig
	path   string
	epmd   string
	folder *folder
	ports  rabbitMQPorts
	held   heldPorts
	http   *http.Client

	evaluating sync.Mutex // held while Eval looks for its evaluator, or starts it

	first *RabbitMQ // of the cluster that it is to join, whose port mapper and cookie it has; or nil

	mu      sync.Mutex
	mapper  *process // Erlang's port mapper, which a node must have; nil before the first start
	process *process // likewise nil
}

type rabbitMQPorts struct{ amqp, http, dist, epmd, tls int }

// StartRabbitMQ makes a new broker and returns when it accepts connections. Only
// the start obeys ctx: the broker lives until Close.
func StartRabbitMQ(ctx context.Context, config RabbitMQConfig) (*RabbitMQ, error) {
	return startRabbitMQ(ctx, config, nil)
}

func startRabbitMQ(ctx context.Context, config RabbitMQConfig, first *RabbitMQ) (*RabbitMQ, error) {
	path, err := findRabbitMQ()
	if err != nil {
		return nil, err
	}
	epmd, err := findEpmd()
	if err != nil {
		return nil, err
	}
	folder, err := makeFolder(config.Dir, "rabbitmq", 0)
	if err != nil {
		return nil, err
	}
	r := &RabbitMQ{config: config, path: path, epmd: epmd, folder: folder, first: first}
	r.http = &http.Client{Transport: http.DefaultTransport.(*http.Transport).Clone()}
	err = startOnFreePorts(ctx, &r.held, 5, func(ports []int) error { return r.create(ctx, ports) })
	if err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// create starts the broker for the first time, on the given ports.
func (r *RabbitMQ) create(ctx context.Context, ports []int) error {
	r.ports = rabbitMQPorts{amqp: ports[0], http: ports[1], dist: ports[2], epmd: ports[3], tls: ports[4]}
	if r.first != nil {
		r.ports.epmd = r.first.ports.epmd
	}
	// What a try on other ports has left there names those ports.
	r.killAll()
	for _, name := range []string{"home", "data", "log"} {
		if err := os.RemoveAll(r.file(name)); err != nil {
			return fmt.Errorf("start RabbitMQ: %w", err)
		}
		if _, err := r.folder.sub(name, nil); err != nil {
			return fmt.Errorf("start RabbitMQ: %w", err)
		}
	}
	for name, text := range map[string]string{
		"rabbitmq.conf":   r.settings(),
		"environment":     "", // instead of /etc/rabbitmq/rabbitmq-env.conf
		"enabled_plugins": "[rabbitmq_management].\n",
	} {
		if err := os.WriteFile(r.file(name), []byte(text), 0o600); err != nil {
			return fmt.Errorf("start RabbitMQ: %w", err)
		}
	}
	return r.Start(ctx)
}

func (r *RabbitMQ) settings() string {
	encrypted := ""
	if f := r.config.TLS; f != nil {
		encrypted = fmt.Sprintf(`listeners.ssl.1 = 127.0.0.1:%d
ssl_options.cacertfile = %s
ssl_options.certfile = %s
ssl_options.keyfile = %s
ssl_options.verify = verify_peer
ssl_options.fail_if_no_peer_cert = true
`, r.ports.tls, f.CA, f.Cert, f.Key)
	}
	return fmt.Sprintf(`listeners.tcp.1 = 127.0.0.1:%d
management.tcp.ip = 127.0.0.1
management.tcp.port = %d
# A full disk or much memory in use elsewhere on the machine is no alarm.
disk_free_limit.absolute = 1MB
log.console = true
log.console.level = warning
log.file = false
%s%s
`, r.ports.amqp, r.ports.http, encrypted, r.config.Extra)
}

// environment is all that the broker and its tools see: what the caller's own
// says about RabbitMQ and Erlang is about another broker.
func (r *RabbitMQ) environment() []string {
	const local = "-kernel inet_dist_use_interface {127,0,0,1}"
	return []string{
		"PATH=" + os.Getenv("PATH") + ":/usr/sbin:/usr/bin:/sbin:/bin",
		"LANG=C.UTF-8",
		"HOME=" + r.home(),
		"ERL_EPMD_PORT=" + strconv.Itoa(r.ports.epmd),
		"RABBITMQ_NODENAME=" + r.node(),
		"RABBITMQ_DIST_PORT=" + strconv.Itoa(r.ports.dist),
		"RABBITMQ_CONF_ENV_FILE=" + r.file("environment"),
		"RABBITMQ_CONFIG_FILE=" + r.file("rabbitmq.conf"),
		"RABBITMQ_ENABLED_PLUGINS_FILE=" + r.file("enabled_plugins"),
		"RABBITMQ_MNESIA_BASE=" + r.file("data"),
		"RABBITMQ_LOG_BASE=" + r.file("log"),
		"RABBITMQ_PID_FILE=" + r.file("data/pid"),
		// The script then becomes the broker, instead of standing between it and
		// the death signal. Without input there is no shell to take any.
		"RABBITMQ_ALLOW_INPUT=1",
		"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=-noinput " + local + " +S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none",
		"RABBITMQ_CTL_ERL_ARGS=" + local,
	}
}

// Start starts the broker again, on the ports and with the data it had. It
// returns when it accepts connections. If the broker runs, Start does nothing.
func (r *RabbitMQ) Start(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.process.running() {
		return nil
	}
	ctx, cancel := startContext(ctx, "RabbitMQ")
	defer cancel()

	if err := r.startMapper(); err != nil {
		return err
	}
	cmd := exec.Command(r.path)
	cmd.Dir, cmd.Env = r.folder.path, r.environment()
	process, err := startProcess("RabbitMQ", cmd, r.LogFile(), syscall.SIGKILL)
	if err != nil {
		return err
	}
	r.process = process
	if err := process.await(ctx, r.ready); err != nil {
		process.kill()
		return err
	}
	return nil
}

// startMapper starts the port mapper, which otherwise the broker itself would
// start, as a daemon that outlives everybody.
func (r *RabbitMQ) startMapper() error {
	if r.mapper.running() || r.first != nil {
		return nil
	}
	cmd := exec.Command(r.epmd, "-port", strconv.Itoa(r.ports.epmd), "-address", "127.0.0.1")
	cmd.Dir, cmd.Env = r.folder.path, r.environment()
	mapper, err := startProcess("epmd", cmd, r.file("epmd.log"), syscall.SIGKILL)
	r.mapper = mapper
	return err
}

// ready returns nil when this broker, and not another one that was faster to take
// the port, accepts connections and answers questions of management.
func (r *RabbitMQ) ready(ctx context.Context) error {
	conn, err := amqp.Dial(r.URL(""))
	if err != nil {
		return err
	}
	defer conn.Close()
	if name, _ := conn.Properties["cluster_name"].(string); !strings.HasPrefix(name, strings.TrimSuffix(r.node(), "localhost")) {
		return fmt.Errorf("another RabbitMQ, named %q, has port %d", name, r.ports.amqp)
	}
	return r.Manage(ctx, http.MethodGet, "/overview", nil, nil)
}

// Manage calls the management API: path is what follows /api. The body and the
// answer are JSON, and nil when there is none.
func (r *RabbitMQ) Manage(ctx context.Context, method, path string, body, answer any) error {
	var text []byte // none is what 3.8 takes for nothing
	var err error
	if body != nil {
		if text, err = json.Marshal(body); err != nil {
			return fmt.Errorf("%s %s: %w", method, path, err)
		}
	}
	request, err := http.NewRequestWithContext(ctx, method, "http://"+localAddress(r.ports.http)+"/api"+path, bytes.NewReader(text))
	if err != nil {
		return err
	}
	request.SetBasicAuth("guest", "guest")
	request.Header.Set("Content-Type", "application/json")
	response, err := r.http.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, err = io.ReadAll(response.Body)
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	if response.StatusCode >= 300 {
		return fmt.Errorf("%s %s: %s: %s", method, path, response.Status, text)
	}
	if answer == nil {
		return nil
	}
	return json.Unmarshal(text, answer)
}

// Ctl runs rabbitmqctl, which takes a second or two of a processor, and returns what it printed. See Eval.
func (r *RabbitMQ) Ctl(ctx context.Context, arguments ...string) (string, error) {
	cmd := exec.CommandContext(ctx, rabbitMQCtl(r.path), arguments...)
	cmd.Dir, cmd.Env = r.folder.path, r.environment()
	output, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("rabbitmqctl %s: %w\n%s", strings.Join(arguments, " "), err, output)
	}
	return string(output), nil
}

// Stop ends the broker with SIGTERM and keeps its data. If the broker does not
// run, Stop does nothing.
func (r *RabbitMQ) Stop() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.process.stop(syscall.SIGTERM, r.process.kill)
}

// Kill ends the broker with kill -9.
func (r *RabbitMQ) Kill() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.process.kill()
}

// Close stops the broker and removes all it has written. The broker cannot be
// started again.
func (r *RabbitMQ) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.killAll() // nobody will read the data
	r.held.release()
	r.http.CloseIdleConnections()
	return r.folder.remove()
}

func (r *RabbitMQ) killAll() {
	r.process.kill()
	r.mapper.kill()
}

// Addr is the host and port of AMQP. It does not change when the broker is
// stopped and started.
func (r *RabbitMQ) Addr() string { return localAddress(r.ports.amqp) }

// URL is the address of a virtual host, the default one if its name is empty, for
// the user guest, who may do everything.
func (r *RabbitMQ) URL(vhost string) string {
	address := "amqp://guest:guest@" + r.Addr() + "/"
	if vhost == "" {
		return address
	}
	return address + url.PathEscape(vhost)
}

// TLSURL is URL for an encrypted connection, with the client's files; with TLS only.
func (r *RabbitMQ) TLSURL(vhost string, client TLS) string {
	files := url.Values{"cacertfile": {client.CA}, "certfile": {client.Cert}, "keyfile": {client.Key}}
	return "amqps://guest:guest@" + localAddress(r.ports.tls) + "/" + url.PathEscape(vhost) + "?" + files.Encode()
}

// LogFile is where the broker writes its log, until Close.
func (r *RabbitMQ) LogFile() string { return r.file("rabbitmq.log") }

// node is the broker's name, unique among all that run on this machine.
func (r *RabbitMQ) node() string { return filepath.Base(r.folder.path) + "@localhost" }

// home is where the cookie is.
func (r *RabbitMQ) home() string {
	if r.first != nil {
		return r.first.home()
	}
	return r.file("home")
}

func (r *RabbitMQ) file(name string) string { return filepath.Join(r.folder.path, name) }
