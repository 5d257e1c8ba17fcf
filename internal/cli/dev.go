package cli

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/consul/api"
	"github.com/spf13/cobra"

	"onejob/internal/logging"
	"onejob/internal/plaintext"
	"onejob/internal/servers"
	"onejob/store"
)

// devConfig is what the replicas of "onejob dev" can run when no configuration
// is given.
const devConfig = `kinds:
  exec:
    commands:
      sleep: {path: /bin/sleep, allow_args: true}
      echo:  {path: /bin/echo,  allow_args: true}
`

func devCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "dev",
		Short: "Run a private Postgres, a private Consul and some replicas until Ctrl-C",
		Long: `Start a private Postgres, a private Consul and some replicas on this machine, and
show the logs of the replicas. All data is deleted at the end.

With --env FILE, the addresses are written to FILE as shell variables when everything
is ready: ". FILE; psql $ONEJOB_POSTGRES_DSN". FILE must not exist; it is removed at the end.`,
		Args: cobra.NoArgs,
	}
	path := configFlag(c)
	replicas := c.Flags().Int("replicas", 3, "`number` of replicas")
	envFile := c.Flags().String("env", "", "write the addresses to this `file`")
	c.RunE = func(c *cobra.Command, _ []string) error {
		logging.SurviveReaders() // there is much to clean up
		if *replicas < 0 || *replicas > 50 {
			return usage(fmt.Errorf("--replicas: %d is not between 0 and 50", *replicas))
		}
		if _, err := loadConfig(*path, privateEnviron(os.Environ())); err != nil {
			return err // now, rather than by each replica
		}
		if _, err := os.Lstat(*envFile); err == nil {
			return usage(fmt.Errorf("--env: %s exists, and would be replaced and then removed; name another file, or remove it", *envFile))
		}
		ctx := c.Context()
		if !signal.Ignored(syscall.SIGHUP) { // as below nohup
			var stop func()
			ctx, stop = signal.NotifyContext(ctx, syscall.SIGHUP) // of a terminal that is closed
			defer stop()
		}
		return dev(ctx, *path, *replicas, *envFile, stdoutOf(c), c.ErrOrStderr())
	}
	return c
}

func dev(ctx context.Context, config string, replicas int, envFile string, stdout, stderr io.Writer) (err error) {
	say := func(format string, a ...any) { fmt.Fprintf(stderr, format+"\n", a...) }
	dir, remove, err := servers.MakeFolder(os.TempDir(), "dev")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	if config != "" {
		if config, err = filepath.Abs(config); err != nil { // others read it from other directories
			return err
		}
	} else {
		config = filepath.Join(dir, "onejob.yaml")
		if err := os.WriteFile(config, []byte(devConfig), 0o600); err != nil {
			return err
		}
	}

	say("starting Postgres ...")
	pg, err := servers.StartPostgres(ctx, servers.PostgresConfig{Durable: true})
	if err != nil {
		return stopped(ctx, err)
	}
	defer func() { err = errors.Join(err, pg.Close()) }()
	say("starting Consul ...")
	consul, err := servers.StartConsul(ctx, servers.ConsulConfig{Env: []string{"GOGC=400", "GOMEMLIMIT=1GiB"}}) // see docs/operate/sizing.md
	if err != nil {
		return stopped(ctx, err)
	}
	defer func() { err = errors.Join(err, consul.Close()) }()

	addresses := []string{"ONEJOB_POSTGRES_DSN=" + pg.DSN("postgres"), "CONSUL_HTTP_ADDR=" + consul.Addr(), "ONEJOB_CONFIG=" + config}
	overrides := []string{"ONEJOB_POSTGRES_LISTEN_DSN=", "ONEJOB_LIMITS_BACKEND=consul"}
	for _, name := range consulAccess {
		overrides = append(overrides, name+"=")
	}
	overrides = append(overrides, "ONEJOB_CONSUL_ADDRESS="+consul.Addr())
	environ := slices.Concat(privateEnviron(os.Environ()), addresses, overrides)
	cfg, err := loadConfig(config, environ)
	if err != nil {
		return err
	}
	if err := migrateNow(ctx, cfg); err != nil {
		return stopped(ctx, err)
	}

	say("starting %d replicas ...", replicas)
	running, err := startReplicas(replicas, environ, stdout)
	defer func() { err = errors.Join(err, running.stop(cfg.Worker.ShutdownGrace+30*time.Second)) }()
	if err != nil {
		return err
	}
	ready := func(ctx context.Context) error {
		return present(ctx, consul.Client(), cfg.Consul.Prefix+"/replicas/", replicas)
	}
	if err := running.await(ctx, ready); err != nil {
		return stopped(ctx, err)
	}

	pages := running.pages()
	needed, err := neededOverrides(overrides, config, os.Environ())
	if err != nil {
		return err
	}
	vars := exports(slices.Concat(addresses, needed,
		[]string{"ONEJOB_DEV_PIDS=" + strings.Join(running.pids(), " "), "ONEJOB_DEV_PAGES=" + strings.Join(pages, " ")}))
	if envFile != "" {
		removeFile, err := writeWhole(envFile, vars)
		if err != nil {
			return fmt.Errorf("--env: %w", err)
		}
		defer removeFile()
	}
	say("\nready; in another terminal:\n\n%s\n  psql \"$ONEJOB_POSTGRES_DSN\" -c \"INSERT INTO onejob.tasks (kind) VALUES ('noop')\"\n  %s tasks list\n", vars, callable())
	if len(pages) > 0 {
		say("The web page: %s\n", pages[0])
	}
	say("Press Ctrl-C to stop.\n")
	<-ctx.Done()
	say("stopping; press Ctrl-C again to stop running tasks immediately")
	return nil
}

// consulAccess are the variables that say how to reach Consul.
var consulAccess = []string{
	"ONEJOB_CONSUL_ADDRESS", "ONEJOB_CONSUL_TOKEN", "ONEJOB_CONSUL_TOKEN_FILE", "ONEJOB_CONSUL_CA_FILE", "ONEJOB_CONSUL_CA_PATH",
	"ONEJOB_CONSUL_CERT_FILE", "ONEJOB_CONSUL_KEY_FILE", "ONEJOB_CONSUL_TLS_SERVER_NAME",
}

// privateEnviron returns environ without what leads to another Postgres or
// Consul than the private ones.
func privateEnviron(environ []string) []string {
	return slices.DeleteFunc(slices.Clone(environ), func(entry string) bool {
		name, _, _ := strings.Cut(entry, "=")
		return strings.HasPrefix(name, "CONSUL_") || strings.HasPrefix(name, "PG") || name == "ONEJOB_REPLICA" ||
			name == "ONEJOB_POSTGRES_DSN" || name == "ONEJOB_POSTGRES_LISTEN_DSN" || slices.Contains(consulAccess, name)
	})
}

// neededOverrides returns those of the overrides, and of other variables made empty, without which a
// command in another terminal would be led elsewhere: by the configuration file, or by a variable that
// is set here, and so most likely there too.
func neededOverrides(overrides []string, config string, environ []string) ([]string, error) {
	content, err := os.ReadFile(config)
	if err != nil {
		return nil, err
	}
	_, lines, err := parseFile(content)
	if err != nil {
		return nil, err
	}
	needed := map[string]bool{}
	for _, s := range settings(reflect.TypeFor[Config](), nil) {
		needed[s.variable()] = lines[s.key()] > 0
	}
	var all []string
	for _, entry := range environ {
		name, _, _ := strings.Cut(entry, "=")
		needed[name] = true
		if strings.HasPrefix(name, "CONSUL_") && name != "CONSUL_HTTP_ADDR" {
			all = append(all, name+"=")
		}
	}
	value := map[string]string{}
	for _, entry := range overrides { // the last one of a name counts
		name, v, _ := strings.Cut(entry, "=")
		value[name] = v
	}
	for _, name := range slices.Sorted(maps.Keys(value)) {
		if needed[name] {
			all = append(all, name+"="+value[name])
		}
	}
	return all, nil
}

// exports returns lines of a shell that set variables.
func exports(entries []string) string {
	var lines strings.Builder
	for _, entry := range entries {
		name, value, _ := strings.Cut(entry, "=")
		fmt.Fprintf(&lines, "export %s=%s\n", name, plaintext.Quoted(value))
	}
	return lines.String()
}

func migrateNow(ctx context.Context, cfg Config) error {
	db, err := store.Open(cfg.storeConfig())
	if err != nil {
		return err
	}
	defer db.Close()
	return db.Migrate(ctx, nil)
}

// present returns nil once there are n keys below prefix: each replica has one
// while it has a session.
func present(ctx context.Context, client *api.Client, prefix string, n int) error {
	q := &api.QueryOptions{WaitTime: 10 * time.Second}
	for {
		keys, meta, err := client.KV().Keys(prefix, "", q.WithContext(ctx))
		if err != nil || len(keys) >= n {
			return err
		}
		q.WaitIndex = meta.LastIndex
	}
}

// replicas are processes of this binary that serve.
type replicas struct {
	cmds    []*exec.Cmd
	serving []chan string  // where each serves its web page
	printed sync.WaitGroup // their output, and thereby their lives
	ended   chan error     // the first that ended
}

// startReplicas starts n replicas, whose output goes to stdout, a whole line at
// a time. What it returns must be stopped, also when there is an error.
func startReplicas(n int, environ []string, stdout io.Writer) (*replicas, error) {
	r := &replicas{ended: make(chan error, 1)}
	self, err := os.Executable()
	if err != nil {
		return r, err
	}
	var printing sync.Mutex
	for i := range n {
		name := fmt.Sprintf("dev-%d", i+1)
		cmd := exec.Command(self, "serve")
		cmd.Env = append(slices.Clone(environ), "ONEJOB_REPLICA="+name, "ONEJOB_HTTP_LISTEN=127.0.0.1:0", "ONEJOB_LOG_FORMAT=console")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for us; we tell them
		out, err := cmd.StdoutPipe()
		if err != nil {
			return r, err
		}
		cmd.Stderr = cmd.Stdout
		servers.DieWithParent(cmd.SysProcAttr, syscall.SIGTERM)
		serving, started := make(chan string, 1), make(chan error)
		r.printed.Go(func() {
			defer close(serving)
			runtime.LockOSThread() // for the kernel this thread is the parent
			err := cmd.Start()
			if started <- err; err != nil {
				return
			}
			lines := bufio.NewScanner(out)
			lines.Buffer(nil, 1<<20)
			for lines.Scan() {
				printing.Lock()
				fmt.Fprintf(stdout, "%s | %s\n", name, strings.TrimSuffix(lines.Text(), " replica="+name))
				printing.Unlock()
				if m := servesAt.FindStringSubmatch(lines.Text()); m != nil {
					select {
					case serving <- "http://" + m[1] + "/":
					default:
					}
				}
			}
			_, _ = io.Copy(io.Discard, out) // after a line that is too long
			err = cmd.Wait()
			printing.Lock()
			fmt.Fprintf(stdout, "%s has ended: %v\n", name, cmd.ProcessState)
			printing.Unlock()
			select {
			case r.ended <- fmt.Errorf("%s has ended: %w", name, cmp.Or(err, errors.New("it stopped without being asked to"))):
			default:
			}
		})
		if err := <-started; err != nil {
			return r, err
		}
		r.cmds, r.serving = append(r.cmds, cmd), append(r.serving, serving)
	}
	return r, nil
}

// servesAt finds in a line of a replica's log where it serves HTTP.
var servesAt = regexp.MustCompile(` replica_started .*\bhttp=([0-9.:]+)`)

// pages returns where the replicas serve their web pages. They have logged it when they are
// ready, unless the configuration wants only worse to be logged.
func (r *replicas) pages() (all []string) {
	silent := time.After(5 * time.Second)
	for _, serving := range r.serving {
		select {
		case page, ok := <-serving:
			if ok {
				all = append(all, page)
			}
		case <-silent:
			return all
		}
	}
	return all
}

func (r *replicas) pids() []string {
	var all []string
	for _, cmd := range r.cmds {
		all = append(all, strconv.Itoa(cmd.Process.Pid))
	}
	return all
}

// await returns nil when ready does, and an error if a replica ends before.
func (r *replicas) await(ctx context.Context, ready func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- ready(ctx) }()
	select {
	case err := <-done:
		return err
	case err := <-r.ended:
		cancel()
		<-done
		return err
	}
}

// stop ends the replicas as systemd would, and returns when they are gone. It kills them after maxWait.
func (r *replicas) stop(maxWait time.Duration) error {
	for _, cmd := range r.cmds {
		_ = cmd.Process.Signal(syscall.SIGTERM)
	}
	gone := make(chan struct{})
	go func() { defer close(gone); r.printed.Wait() }()
	forceStop := make(chan os.Signal, 1)
	signal.Notify(forceStop, syscall.SIGINT, syscall.SIGTERM)
	defer signal.Stop(forceStop)
	tooLong := time.After(maxWait)
	for {
		select {
		case <-gone:
			return nil
		case <-forceStop: // they know that a second signal means it
			for _, cmd := range r.cmds {
				_ = cmd.Process.Signal(syscall.SIGTERM)
			}
		case <-tooLong:
			for _, cmd := range r.cmds {
				_ = cmd.Process.Kill()
			}
			<-gone
			return fmt.Errorf("replicas did not stop within %v and were killed", maxWait)
		}
	}
}

// writeWhole makes a file that others may be waiting for: it is there whole or not at all. A file
// that is there already is an error, and stays. remove removes the file, unless another one has taken
// its place.
func writeWhole(path, text string) (remove func(), err error) {
	temporary, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".new-*") // only its owner may read it
	if err != nil {
		return nil, err
	}
	defer os.Remove(temporary.Name())
	_, err = temporary.WriteString(text)
	made, statErr := temporary.Stat()
	if err := errors.Join(err, statErr, temporary.Close()); err != nil {
		return nil, err
	}
	if err := os.Link(temporary.Name(), path); err != nil { // which replaces nothing
		return nil, err
	}
	return func() {
		if found, err := os.Lstat(path); err == nil && os.SameFile(found, made) {
			_ = os.Remove(path)
		}
	}, nil
}

// callable is how another terminal calls this program: by its name if it is on the PATH.
func callable() string {
	self, err := os.Executable()
	if err != nil {
		return os.Args[0]
	}
	name := filepath.Base(self)
	if found, err := exec.LookPath(name); err == nil {
		if found, err = filepath.EvalSymlinks(found); err == nil && found == self {
			return name
		}
	}
	return self
}
