package servers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/jackc/pgx/v5"
)

// Pooler is a private pgbouncer in transaction mode. Its methods may be called from several
// goroutines.
type Pooler struct {
	folder *folder
	binary string
	target string
	pool   int
	port   int
	held   heldPorts

	mu      sync.Mutex
	process *process
}

// StartPooler starts a pgbouncer in front of the Postgres at target, a host and a port, with
// so many connections to each of its databases. Its own folder is made in dir, /tmp when empty.
// Only the start obeys ctx: the pooler lives until Close.
func StartPooler(ctx context.Context, dir, target string, connections int) (*Pooler, error) {
	binary, err := exec.LookPath("pgbouncer")
	if err != nil {
		if binary = "/usr/sbin/pgbouncer"; !isExecutable(binary) { // not everybody's PATH
			return nil, errors.New("there is no pgbouncer here: run scripts/postgres.sh, or install your distribution's package")
		}
	}
	folder, err := makeFolder(dir, "pgbouncer", 0)
	if err != nil {
		return nil, err
	}
	p := &Pooler{folder: folder, binary: binary, target: target, pool: connections}
	err = startOnFreePorts(ctx, &p.held, 1, func(ports []int) error {
		p.port = ports[0]
		if err := p.configure(); err != nil {
			return err
		}
		return p.Start(ctx)
	})
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

func isExecutable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}

func (p *Pooler) configure() error {
	host, port, err := net.SplitHostPort(p.target)
	if err != nil {
		return fmt.Errorf("configure pgbouncer: %w", err)
	}
	settings := fmt.Sprintf(`[databases]
* = host=%s port=%s user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = %d
`, host, port, p.port, p.pool)
	if err := os.WriteFile(p.file("pgbouncer.ini"), []byte(settings), 0o644); err != nil {
		return fmt.Errorf("configure pgbouncer: %w", err)
	}
	return nil
}

func (p *Pooler) file(name string) string { return filepath.Join(p.folder.path, name) }

// LogFile is where everything goes that the pooler prints.
func (p *Pooler) LogFile() string { return p.file("pgbouncer.log") }

// Addr is the host and the port at which the pooler listens.
func (p *Pooler) Addr() string { return address("127.0.0.1", p.port) }

// Start starts the pooler again. It returns when the pooler leads to a server. If it runs,
// Start does nothing.
func (p *Pooler) Start(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.process.running() {
		return nil
	}
	ctx, cancel := startContext(ctx, "pgbouncer")
	defer cancel()
	cmd := exec.Command(p.binary, p.file("pgbouncer.ini"))
	if os.Geteuid() == 0 { // which it refuses to run as
		cmd.Args = []string{p.binary, "--user", "nobody", p.file("pgbouncer.ini")}
	}
	process, err := startProcess("pgbouncer", cmd, p.LogFile(), syscall.SIGKILL)
	if err != nil {
		return err
	}
	p.process = process
	if err := process.await(ctx, p.ready); err != nil {
		process.kill()
		return err
	}
	return nil
}

func (p *Pooler) ready(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, fmt.Sprintf("postgres://postgres@%s/postgres?sslmode=disable", p.Addr()))
	if err != nil {
		return err
	}
	return conn.Close(ctx)
}

// Ended returns what the pooler printed last, if it has ended, by itself or by Kill.
func (p *Pooler) Ended() (log string, ended bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.process.running() {
		return "", false
	}
	return p.process.log.tail(), true
}

// Kill ends the pooler with kill -9: all connections through it end at once.
func (p *Pooler) Kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.process.kill()
}

// Close ends the pooler and removes all that it has written.
func (p *Pooler) Close() error {
	p.Kill()
	p.held.release()
	return p.folder.remove()
}
