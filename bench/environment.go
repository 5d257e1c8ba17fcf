package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sys/unix"

	"onejob/internal/procfs"
	"onejob/internal/servers"
)

// environment is what all subjects stand on: a Postgres of their own with its
// defaults and its data on a disk, and the programs.
type environment struct {
	dir      string // for the servers' data
	scratch  string // for logs, configurations and the onejob binary
	onejob   string // the onejob binary
	self     string // this program
	postgres *servers.Postgres
	pgPID    int       // of its postmaster, since admin is connected
	admin    *pgx.Conn // to the database postgres
	names    int       // of databases, so far
}

// prepareEnvironment builds onejob and starts Postgres, with its own defaults but for
// the libraries that it is to load.
func prepareEnvironment(ctx context.Context, dir string, libraries ...string) (g *environment, err error) {
	if err := onDisk(dir); err != nil {
		return nil, err
	}
	g = &environment{dir: dir}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.close())
			g = nil
		}
	}()
	if g.self, err = os.Executable(); err != nil {
		return g, err
	}
	if g.scratch, err = os.MkdirTemp(dir, "bench-onejob-"); err != nil {
		return g, err
	}
	if err := g.build(ctx); err != nil {
		return g, err
	}
	g.postgres, err = servers.StartPostgres(ctx, servers.PostgresConfig{
		Dir:     dir,
		Durable: true,
		// Back to Postgres' own default.
		Settings: map[string]string{"dynamic_shared_memory_type": "posix", "shared_preload_libraries": strings.Join(libraries, ",")},
	})
	if err != nil {
		return g, err
	}
	return g, g.connect(ctx)
}

// connect connects to Postgres, and notes which process that is.
func (g *environment) connect(ctx context.Context) (err error) {
	if g.admin, err = pgx.Connect(ctx, g.postgres.DSN("postgres")); err != nil {
		return err
	}
	stat, err := readStat(int(g.admin.PgConn().PID()))
	g.pgPID = stat.parent
	return err
}

// close ends what was started and removes what was written.
func (g *environment) close() error {
	var errs []error
	if g.admin != nil {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = g.admin.Close(ctx)
	}
	if g.postgres != nil {
		errs = append(errs, g.postgres.Close())
	}
	if g.scratch != "" {
		errs = append(errs, os.RemoveAll(g.scratch))
	}
	return errors.Join(errs...)
}

// build builds onejob from the tree that this module belongs to, with the
// versions of its own go.mod.
func (g *environment) build(ctx context.Context) error {
	tree, err := treeDir(ctx)
	if err != nil {
		return err
	}
	g.onejob = filepath.Join(g.scratch, "onejob")
	cmd := exec.CommandContext(ctx, "go", "build", "-o", g.onejob, "./cmd/onejob")
	cmd.Dir = tree
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build onejob: %w\n%s", err, out)
	}
	return nil
}

// treeDir returns where the source of onejob is.
func treeDir(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "onejob").Output()
	if err != nil {
		return "", fmt.Errorf("find the source of onejob: %w; run this in the folder bench", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// onDisk refuses a folder in memory: commits there are too fast to be true.
func onDisk(dir string) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return fmt.Errorf("look at %s: %w", dir, err)
	}
	if fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC {
		return fmt.Errorf("%s is in memory: choose a folder on a disk with -dir", dir)
	}
	return nil
}

// template makes a database to copy, fills it, and leaves it vacuumed and
// analyzed.
func (g *environment) template(ctx context.Context, name string, fill func(ctx context.Context, dsn string) error) error {
	if _, err := g.admin.Exec(ctx, "CREATE DATABASE "+pgx.Identifier{name}.Sanitize()); err != nil {
		return fmt.Errorf("template %s: %w", name, err)
	}
	dsn := g.postgres.DSN(name)
	if err := fill(ctx, dsn); err != nil {
		return fmt.Errorf("template %s: %w", name, err)
	}
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return fmt.Errorf("template %s: %w", name, err)
	}
	defer conn.Close(ctx)
	if _, err := conn.Exec(ctx, `VACUUM ANALYZE`); err != nil {
		return fmt.Errorf("template %s: %w", name, err)
	}
	return nil
}

// database copies a template and returns the copy's name. Nothing that others
// have left is in it.
func (g *environment) database(ctx context.Context, template string) (string, error) {
	g.names++
	name := fmt.Sprintf("run_%d", g.names)
	sql := fmt.Sprintf("CREATE DATABASE %s TEMPLATE %s", name, pgx.Identifier{template}.Sanitize())
	if major(g.admin) >= 15 {
		sql += " STRATEGY FILE_COPY" // without a byte of WAL for each byte
	}
	if _, err := g.admin.Exec(ctx, sql); err != nil {
		return "", fmt.Errorf("copy %s: %w", template, err)
	}
	if _, err := g.admin.Exec(ctx, `CHECKPOINT`); err != nil {
		return "", fmt.Errorf("copy %s: %w", template, err)
	}
	return name, nil
}

func (g *environment) drop(name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if _, err := g.admin.Exec(ctx, "DROP DATABASE "+pgx.Identifier{name}.Sanitize()+" WITH (FORCE)"); err != nil {
		return fmt.Errorf("drop %s: %w", name, err)
	}
	return nil
}

// major returns the server's major version.
func major(conn *pgx.Conn) int {
	var n int
	_, _ = fmt.Sscanf(conn.PgConn().ParameterStatus("server_version"), "%d", &n)
	return n
}

// consul is a Consul server of one run.
type consul struct {
	*servers.Consul
	pid int
}

// consulSettings put back to Consul's own default what package servers chooses
// for tests. One thing is left as Consul recommends it for production and not as
// its default has it, raft_multiplier: a lone server elects itself in a second
// then instead of in eight, and nothing else changes for it.
const consulSettings = `{"log_level": "info"}`

// consulGOGC is how far Consul's heap may grow before it is collected. docs/operate/sizing.md
// recommends 400; with CONSUL_GOGC=100 in the environment it is Go's default, for
// comparisons.
func consulGOGC() string { return cmp.Or(os.Getenv("CONSUL_GOGC"), "400") }

// startConsul starts a Consul that nobody has used: what was deleted stays in
// Consul's memory for 15 minutes, and no run should carry the others'.
func (g *environment) startConsul(ctx context.Context) (*consul, error) {
	return g.startConsulWith(ctx, consulSettings)
}

// startConsulWith starts one with these settings.
func (g *environment) startConsulWith(ctx context.Context, settings string) (*consul, error) {
	before := procfs.Children(os.Getpid())
	server, err := servers.StartConsul(ctx, servers.ConsulConfig{Dir: g.dir, Extra: settings, Env: []string{"GOGC=" + consulGOGC()}})
	if err != nil {
		return nil, err
	}
	for _, pid := range procfs.Children(os.Getpid()) {
		command, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if !slices.Contains(before, pid) && strings.Contains(string(command), filepath.Dir(server.LogFile())) {
			return &consul{server, pid}, nil
		}
	}
	return nil, errors.Join(errors.New("the process of Consul was not found among our children"), server.Close())
}

// writes returns how many entries Consul's log has.
func (c *consul) writes() (float64, error) {
	self, err := c.Client().Agent().Self()
	if err != nil {
		return 0, fmt.Errorf("ask Consul about itself: %w", err)
	}
	raft, _ := self["Stats"]["raft"].(map[string]any)
	var n float64
	if _, err := fmt.Sscan(fmt.Sprint(raft["last_log_index"]), &n); err != nil {
		return 0, fmt.Errorf("last_log_index of Consul: %w", err)
	}
	return n, nil
}

// await waits until n replicas have a session.
func (c *consul) await(ctx context.Context, n int) error {
	for {
		keys, _, err := c.Client().KV().Keys("service/onejob/replicas/", "", nil)
		if err == nil && len(keys) == n {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d of %d replicas have a session: %w (%w)", len(keys), n, context.Cause(ctx), err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}
