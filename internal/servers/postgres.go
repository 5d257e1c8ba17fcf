package servers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// PostgresConfig says how a private PostgreSQL differs from the usual one. The
// zero value is what most tests want.
type PostgresConfig struct {
	// Dir is where the server's own folder is made, /tmp when empty. When this
	// program runs as root, others must be able to enter it, as the server
	// runs as another user. The path must be short: PostgreSQL makes a unix
	// socket below it, and those end at 107 characters.
	Dir string

	// Settings are those of postgresql.conf. They take precedence over the
	// ones that the package chooses.
	Settings map[string]string

	// TLS, if not nil, is the server's: it accepts encrypted connections as well, and
	// asks clients for no certificate.
	TLS *TLS

	// Clock gives the server a clock of its own, which SetClock sets. It needs a C
	// compiler.
	Clock bool

	// DiskBytes, if not zero, gives the server a file system of its own of that size, which
	// FillDisk makes full; see CanFillDisks.
	DiskBytes int64

	// Durable makes commits wait for the disk, as they do by default in
	// PostgreSQL itself. Without it they do not, and tests are quicker.
	Durable bool
}

// Postgres is a private PostgreSQL server. Its methods may be called from
// several goroutines, one of which then waits for the other.
type Postgres struct {
	config  PostgresConfig
	bin     string
	account *account
	folder  *folder
	data    string
	port    int
	held    heldPorts
	tls     TLS // the server's own copy

	mu      sync.Mutex
	process *process // nil before the first start
}

// StopMode is how a PostgreSQL server treats its clients when it stops.
type StopMode int

const (
	// Fast ends the connections, rolls their transactions back and shuts down
	// in good order.
	Fast StopMode = iota
	// Immediate lets everything fall, and leaves recovery to the next start.
	Immediate
)

func (m StopMode) signal() syscall.Signal {
	if m == Immediate {
		return syscall.SIGQUIT
	}
	return syscall.SIGINT
}

// StartPostgres makes a new PostgreSQL server and returns when it accepts
// connections. Only the start obeys ctx: the server lives until Close.
func StartPostgres(ctx context.Context, config PostgresConfig) (*Postgres, error) {
	bin, err := findPostgres()
	if err != nil {
		return nil, err
	}
	account, err := unprivileged()
	if err != nil {
		return nil, err
	}
	folder, err := makeFolder(config.Dir, "postgres", config.DiskBytes)
	if err != nil {
		return nil, err
	}
	p := &Postgres{config: config, bin: bin, account: account, folder: folder}
	if err := p.create(ctx); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// StartStandby makes a server that follows p, and returns when it answers.
func (p *Postgres) StartStandby(ctx context.Context) (*Postgres, error) {
	folder, err := makeFolder(p.config.Dir, "postgres", p.config.DiskBytes)
	if err != nil {
		return nil, err
	}
	s := &Postgres{config: p.config, bin: p.bin, account: p.account, folder: folder}
	if err := s.createFrom(ctx, func(ctx context.Context) error {
		var err error
		s.data, err = p.copyTo(ctx, s.folder, "data", "--write-recovery-conf")
		return err
	}); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// copyTo copies p's data into a new folder of that name.
func (p *Postgres) copyTo(ctx context.Context, in *folder, name string, more ...string) (data string, err error) {
	if data, err = in.sub(name, p.account); err != nil {
		return "", fmt.Errorf("pg_basebackup: %w", err)
	}
	arguments := append([]string{"--pgdata=" + data, "--host=127.0.0.1", "--port=" + strconv.Itoa(p.port), "--username=postgres",
		"--checkpoint=fast", "--wal-method=stream", "--no-sync"}, more...)
	for tries := 1; ; tries++ {
		cmd := exec.CommandContext(ctx, filepath.Join(p.bin, "pg_basebackup"), arguments...)
		cmd.Dir = in.path
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: p.account.credential()}
		output, err := cmd.CombinedOutput()
		if err == nil {
			return data, nil
		}
		if tries == 5 || ctx.Err() != nil { // it cleans up, and somebody may just have ended the server's processes
			return "", fmt.Errorf("pg_basebackup: %w\n%s", err, output)
		}
		time.Sleep(time.Second)
	}
}

// Follow kills p, gives it a copy of the data of another server, which it follows from
// then on, and returns when it answers. Its address does not change.
func (p *Postgres) Follow(ctx context.Context, primary *Postgres) error {
	p.Kill()
	if err := os.RemoveAll(p.data); err != nil {
		return err
	}
	data, err := primary.copyTo(ctx, p.folder, "data", "--write-recovery-conf")
	if err != nil {
		return err
	}
	p.data = data
	return p.Start(ctx)
}

// PID is that of the server's first process, also when it has ended.
func (p *Postgres) PID() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.process.cmd.Process.Pid
}

// Addr is where the server listens: host and port.
func (p *Postgres) Addr() string { return localAddress(p.port) }

// Detach makes a standby hear nothing more of its primary. It returns when the
// connection between them is gone.
func (p *Postgres) Detach(ctx context.Context) error {
	if err := p.Exec(ctx, "ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()"); err != nil {
		return err
	}
	for {
		conn, err := pgx.Connect(ctx, p.DSN("postgres"))
		if err != nil {
			return err
		}
		var deaf bool
		err = conn.QueryRow(ctx, "SELECT current_setting('primary_conninfo') = '' AND NOT EXISTS (SELECT FROM pg_stat_wal_receiver)").Scan(&deaf)
		_ = conn.Close(ctx)
		if deaf || err != nil {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// Promote makes a standby a primary, and returns when it takes writes.
func (p *Postgres) Promote(ctx context.Context) error {
	return p.Exec(ctx, "SELECT pg_promote(true, 600)")
}

// Exec runs statements as the superuser, each in a transaction of its own.
func (p *Postgres) Exec(ctx context.Context, statements ...string) error {
	conn, err := pgx.Connect(ctx, p.DSN("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	for _, s := range statements {
		if _, err := conn.Exec(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// Dump returns the database as pg_dump writes it. load drops it, ends its connections, and makes it anew
// from that, in the server that has run all the time.
func (p *Postgres) Dump(ctx context.Context, database string) (load func(context.Context) error, err error) {
	dump, err := exec.CommandContext(ctx, filepath.Join(p.bin, "pg_dump"), "--dbname", p.DSN(database)).Output()
	if err != nil {
		return nil, fmt.Errorf("pg_dump: %w", err)
	}
	name := pgx.Identifier{database}.Sanitize()
	return func(ctx context.Context) error {
		if err := p.Exec(ctx, "DROP DATABASE "+name+" WITH (FORCE)", "CREATE DATABASE "+name+" TEMPLATE template0"); err != nil {
			return err
		}
		cmd := exec.CommandContext(ctx, filepath.Join(p.bin, "psql"), "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--dbname", p.DSN(database))
		cmd.Stdin = bytes.NewReader(dump)
		if output, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("psql: %w\n%s", err, output)
		}
		return nil
	}, nil
}

// Backup copies the data of the server. restore kills the server, and starts it again
// with that copy, at the same address; it can be called once.
func (p *Postgres) Backup(ctx context.Context) (restore func(context.Context) error, err error) {
	data, err := p.copyTo(ctx, p.folder, "backup")
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		p.Kill()
		if err := os.RemoveAll(p.data); err != nil {
			return err
		}
		if err := os.Rename(data, p.data); err != nil {
			return err
		}
		return p.Start(ctx)
	}, nil
}

// create makes the data folder and starts the server for the first time.
func (p *Postgres) create(ctx context.Context) error { return p.createFrom(ctx, p.initdb) }

func (p *Postgres) createFrom(ctx context.Context, fill func(context.Context) error) error {
	ctx, cancel := startContext(ctx, "PostgreSQL")
	defer cancel()
	if err := fill(ctx); err != nil {
		return err
	}
	if _, err := p.folder.sub("socket", p.account); err != nil {
		return fmt.Errorf("start PostgreSQL: %w", err)
	}
	if f := p.config.TLS; f != nil {
		var err error
		if p.tls, err = f.copyTo(p.folder, p.account); err != nil {
			return fmt.Errorf("start PostgreSQL: %w", err)
		}
	}
	return startOnFreePorts(ctx, &p.held, 1, func(ports []int) error {
		p.port = ports[0]
		return p.Start(ctx)
	})
}

func (p *Postgres) initdb(ctx context.Context) error {
	var err error
	if p.data, err = p.folder.sub("data", p.account); err != nil {
		return fmt.Errorf("initdb: %w", err)
	}
	cmd := exec.CommandContext(ctx, filepath.Join(p.bin, "initdb"),
		"--pgdata="+p.data, "--username=postgres", "--auth=trust",
		"--encoding=UTF8", "--locale=C", "--no-sync")
	cmd.Dir = p.folder.path
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: p.account.credential()}
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("initdb in %s: %w (can the user that PostgreSQL runs as enter this folder?)\n%s", p.folder.path, err, output)
	}
	return nil
}

// Start starts the server again, on the port and with the data it had. It
// returns when the server accepts connections. If the server runs, Start does
// nothing. If its first process has ended and others have not, they are killed, as PostgreSQL asks
// its operator to do: it does not start beside them, and they may wait for each other for ever.
func (p *Postgres) Start(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.process.running() {
		return nil
	}
	killIn(p.data)
	ctx, cancel := startContext(ctx, "PostgreSQL")
	defer cancel()

	cmd := exec.Command(filepath.Join(p.bin, "postgres"), p.arguments()...)
	cmd.Dir = p.folder.path
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: p.account.credential()}
	// As packages set it up: who protects the first process from the kernel's OOM killer, by
	// its oom_score_adj, does not protect the others.
	cmd.Env = append(os.Environ(), "PG_OOM_ADJUST_FILE=/proc/self/oom_score_adj", "PG_OOM_ADJUST_VALUE=0")
	if p.config.Clock {
		environment, err := makeClock(p.folder.path)
		if err != nil {
			return fmt.Errorf("start PostgreSQL: %w", err)
		}
		cmd.Env = append(cmd.Env, environment...)
	}
	process, err := startProcess("PostgreSQL", cmd, p.LogFile(), syscall.SIGQUIT)
	if err != nil {
		return err
	}
	p.process = process
	if err := process.await(ctx, p.ready); err != nil {
		p.killAll()
		return err
	}
	return nil
}

// SetClock sets the server's clock to so much ahead of the machine's, for all its processes at
// once.
func (p *Postgres) SetClock(ahead time.Duration) error {
	return setClock(p.folder.path, ahead)
}

func exists(path string) bool { _, err := os.Stat(path); return err == nil }

func (p *Postgres) arguments() []string {
	settings := map[string]string{
		"listen_addresses":        "127.0.0.1",
		"port":                    strconv.Itoa(p.port),
		"unix_socket_directories": filepath.Join(p.folder.path, "socket"),
		// In the data folder, not in /dev/shm, where kill -9 would leave it.
		"dynamic_shared_memory_type": "mmap",
	}
	if !p.config.Durable {
		settings["fsync"] = "off"
	}
	if p.config.TLS != nil {
		settings["ssl"], settings["ssl_cert_file"], settings["ssl_key_file"] = "on", p.tls.Cert, p.tls.Key
	}
	maps.Copy(settings, p.config.Settings)

	arguments := []string{"-D", p.data}
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		arguments = append(arguments, "-c", name+"="+settings[name])
	}
	return arguments
}

// ready returns nil when this server, and not another one that was faster to
// take the port, answers.
func (p *Postgres) ready(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, p.DSN("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	var data string
	if err := conn.QueryRow(ctx, "SHOW data_directory").Scan(&data); err != nil {
		return err
	}
	if data != p.data {
		return fmt.Errorf("another PostgreSQL, with its data in %s, has port %d", data, p.port)
	}
	return nil
}

// Stop ends the server and keeps its data. If the server does not run, Stop
// does nothing.
func (p *Postgres) Stop(mode StopMode) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stop(mode)
}

// Kill ends the server and all its children with kill -9, and returns when they
// are gone. Their clients find their connections closed.
func (p *Postgres) Kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.killAll()
}

// stop kills the children as well when it has to kill: the next start would fail for as long as
// one of them has the shared memory.
func (p *Postgres) stop(mode StopMode) error { return p.process.stop(mode.signal(), p.killAll) }

func (p *Postgres) killAll() {
	if p.process.running() {
		killChildren(p.process.cmd.Process)
		p.process.kill()
	}
	killIn(p.data)
}

// Restart is a Stop and a Start.
func (p *Postgres) Restart(ctx context.Context, mode StopMode) error {
	if err := p.Stop(mode); err != nil {
		return err
	}
	return p.Start(ctx)
}

// Close stops the server and removes all it has written. The server cannot be
// started again.
func (p *Postgres) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	// Nobody will read the data, so it needs no orderly shutdown.
	err := p.stop(Immediate)
	removeSharedMemory(p.data, p.account)
	p.held.release()
	return errors.Join(err, p.folder.remove())
}

// DSN is the address of a database for the superuser. It does not change when
// the server is stopped and started. The database postgres always exists.
func (p *Postgres) DSN(database string) string {
	dsn := url.URL{
		Scheme:   "postgres",
		User:     url.User("postgres"),
		Host:     localAddress(p.port),
		Path:     "/" + database,
		RawQuery: "sslmode=disable",
	}
	return dsn.String()
}

// LogFile is where the server writes its log, until Close.
func (p *Postgres) LogFile() string { return filepath.Join(p.folder.path, "postgres.log") }
