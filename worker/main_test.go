package worker_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/zap/zaptest/observer"

	"onejob/internal/testenv"
	"onejob/internal/testenv/lifecycle"
	"onejob/internal/testenv/processes"
	"onejob/lock/consul"
	"onejob/store"
	"onejob/tasks"
	"onejob/worker"
)

func TestMain(m *testing.M) {
	// Most of these tests wait most of the time.
	flag.Parse()
	if err := flag.Set("test.parallel", "6"); err != nil {
		panic(err)
	}
	testenv.Main(m)
}

// maxWait is for what should take no time at all, on a machine that is busy.
const maxWait = 2 * time.Minute

// A cluster is a database and a key prefix that the replicas of a test share.
type cluster struct {
	dsn  string
	kv   *testenv.KV
	pool *pgxpool.Pool

	listenDSN string // if it is another one
	patient   bool   // sessions of replicas in the test outlive stalls of a busy machine

	replicas *replicas
}

// replicas is what is known of those of a test, by which their steps are judged.
type replicas struct {
	mu     sync.Mutex
	names  map[string]bool
	config *lifecycle.Config
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	return migratedCluster(t, migrated.Postgres(t), testenv.Consul(t))
}

// migrated is a database after all migrations.
var migrated = testenv.NewTemplate(func(ctx context.Context, dsn string) error {
	return migrate(ctx, dsn+"&connect_timeout=60") // all tests fail if this does
})

func migrate(ctx context.Context, dsn string) error {
	s, err := store.Open(store.Config{DSN: dsn, Timeout: time.Minute})
	if err != nil {
		return err
	}
	defer s.Close()
	return s.Migrate(ctx, nil)
}

func clusterOn(t *testing.T, db *testenv.DB, kv *testenv.KV) *cluster {
	t.Helper()
	if err := migrate(t.Context(), db.DSN); err != nil {
		t.Fatal(err)
	}
	return migratedCluster(t, db, kv)
}

func migratedCluster(t *testing.T, db *testenv.DB, kv *testenv.KV) *cluster {
	t.Helper()
	c := &cluster{dsn: db.DSN, kv: kv, pool: db.Pool(t), replicas: &replicas{names: map[string]bool{}}}
	testenv.Lifecycle(t, c.dsn, func(cfg *lifecycle.Config) {
		c.replicas.config = cfg
		cfg.Replica, cfg.Named = func(by string) bool { return c.replicas.names[by] }, true
	})
	return c
}

// handlersDecide says that handlers of this test decide how a failure ends, or that there are payloads
// that no handler takes.
func (c *cluster) handlersDecide() {
	c.replicas.config.HandlersDecide = func(int64) bool { return true }
}

// configure notes how a replica is configured. A step does not say under which configuration it was
// made, so that in which two differ is not looked at.
func (c *cluster) configure(cfg worker.Config) {
	cfg = cfg.WithDefaults()
	r := c.replicas
	r.mu.Lock()
	defer r.mu.Unlock()
	first := len(r.names) == 0
	r.names[cfg.Replica] = true
	common(&r.config.MaxCrashes, cfg.MaxCrashes, first)
	common(&r.config.RetryBase, cfg.RetryBase, first)
	common(&r.config.RetryMax, cfg.RetryMax, first)
	common(&r.config.LockDelay, cfg.LockDelay, first)
}

// dsnOf is how a replica of this name connects to Postgres, which then knows it by that name.
func (c *cluster) dsnOf(name string) string {
	return c.dsn + "&application_name=" + url.QueryEscape(name)
}

func common[T comparable](all *T, one T, first bool) {
	var unknown T
	switch {
	case first:
		*all = one
	case *all != one:
		*all = unknown
	}
}

// exec runs a statement.
func (c *cluster) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	if _, err := c.pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// get returns the single value that a query finds.
func get[T any](t *testing.T, c *cluster, sql string, args ...any) T {
	t.Helper()
	var v T
	if err := c.pool.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

// insert adds a task by a plain INSERT and returns its id.
func (c *cluster) insert(t *testing.T, columns string, values ...any) int64 {
	t.Helper()
	marks := make([]string, len(values))
	for i := range values {
		marks[i] = fmt.Sprintf("$%d", i+1)
	}
	return get[int64](t, c, fmt.Sprintf("INSERT INTO onejob.tasks (%s) VALUES (%s) RETURNING id", columns, strings.Join(marks, ", ")), values...)
}

// await waits until the task has the status.
func (c *cluster) await(t *testing.T, id int64, status string) {
	t.Helper()
	var now, message string
	for range testenv.Tries(maxWait) {
		if err := c.pool.QueryRow(t.Context(), "SELECT status, coalesce(error, '') FROM onejob.tasks WHERE id = $1", id).Scan(&now, &message); err != nil {
			t.Fatal(err)
		}
		if now == status {
			return
		}
	}
	t.Fatalf("task %d is %s after %v, not %s; error %q", id, now, maxWait, status, message)
}

// awaitAll waits until every task is finished.
func (c *cluster) awaitAll(t *testing.T, maxWait time.Duration) {
	t.Helper()
	testenv.Eventually(t, maxWait, "all tasks finished", func() bool {
		return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status IN ('pending', 'running')") == 0
	})
}

// noOverlaps is what must hold at the end of every test.
func (c *cluster) noOverlaps(t *testing.T) {
	t.Helper()
	if n := get[int](t, c, "SELECT count(*) FROM onejob.overlaps"); n != 0 {
		t.Errorf("onejob.overlaps has %d rows", n)
	}
}

// outcomes returns the outcomes of a task's attempts, in order.
func (c *cluster) outcomes(t *testing.T, id int64) string {
	t.Helper()
	return get[string](t, c, "SELECT coalesce(string_agg(outcome, ' ' ORDER BY fence), '') FROM onejob.attempts WHERE task_id = $1", id)
}

// A replica is one that runs inside the test.
type replica struct {
	*worker.Worker
	config worker.Config
	locks  *consul.Locker
	store  *store.Store
	events *observer.ObservedLogs
	cancel func()       // ends Run
	stop   func() error // and waits for it; twice is once
}

// lockConfig has short times, so that tests see sessions end.
func (c *cluster) lockConfig() consul.Config {
	client := api.DefaultConfig()
	client.Address = c.kv.Addr
	cfg := consul.Config{Client: client, Prefix: c.kv.Prefix, CheckTTL: 4 * time.Second, Heartbeat: 500 * time.Millisecond,
		Margin: 700 * time.Millisecond, LockDelay: time.Second, Verify: 300 * time.Millisecond}
	if c.patient {
		cfg.CheckTTL = 20 * time.Second
	}
	return cfg
}

// replica runs a replica until the test ends. change, if not nil, may change
// it before it starts.
func (c *cluster) replica(t *testing.T, name string, kinds tasks.Kinds, change func(*worker.Config)) *replica {
	t.Helper()
	r := c.begin(t, name, kinds, change)
	r.ready(t)
	return r
}

// begin is replica, and does not wait for the session.
func (c *cluster) begin(t *testing.T, name string, kinds tasks.Kinds, change func(*worker.Config)) *replica {
	t.Helper()
	log, events := testenv.Logger(t)
	cfg := c.lockConfig()
	cfg.Log, cfg.Replica.Name = log, name
	locks, err := consul.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	s, err := store.Open(store.Config{DSN: c.dsnOf(name), ListenDSN: c.listenDSN})
	if err != nil {
		t.Fatal(err)
	}
	r := &replica{locks: locks, store: s, events: events}
	r.config = worker.Config{Store: s, Locks: locks, Kinds: kinds, Replica: name, LockDelay: cfg.LockDelay, Log: log,
		RetryBase: 10 * time.Millisecond, ShutdownGrace: 10 * time.Second}
	if change != nil {
		change(&r.config)
	}
	c.configure(r.config)
	if r.Worker, err = worker.New(r.config); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	r.cancel = cancel
	r.stop = sync.OnceValue(func() error {
		cancel()
		err := <-done
		s.Close()
		return err
	})
	t.Cleanup(func() {
		if err := r.stop(); err != nil {
			t.Errorf("replica %s: %v", name, err)
		}
	})
	return r
}

// ready waits for the replica's session.
func (r *replica) ready(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), maxWait)
	defer cancel()
	if err := r.locks.Ready(ctx); err != nil {
		t.Fatal(err)
	}
}

// logged waits for an event and returns its fields.
func (r *replica) logged(t *testing.T, event string) map[string]any {
	t.Helper()
	testenv.Eventually(t, maxWait, "log event "+event, func() bool { return r.events.FilterMessage(event).Len() > 0 })
	return r.events.FilterMessage(event).All()[0].ContextMap()
}

// A process is a replica of its own, the real binary.
type process struct {
	cmd    *exec.Cmd
	name   string
	exited chan struct{}
	stderr bytes.Buffer // read it after exited

	mu     sync.Mutex
	events []map[string]any
}

// process starts onejob serve with a configuration file and settings over it.
func (c *cluster) process(t *testing.T, name, config string, settings ...string) *process {
	t.Helper()
	file := filepath.Join(t.TempDir(), "onejob.yaml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return c.run(t, name, exec.Command(testenv.Binary(t), "serve", "--config", file), settings...)
}

// run starts a replica with settings in its environment, and waits until it works.
func (c *cluster) run(t *testing.T, name string, cmd *exec.Cmd, settings ...string) *process {
	t.Helper()
	c.configure(worker.Config{Replica: name, LockDelay: -1}) // which the settings may change
	c.configure(worker.Config{Replica: name})
	p := &process{cmd: cmd, name: name, exited: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), append([]string{"ONEJOB_POSTGRES_DSN=" + c.dsnOf(name), "CONSUL_HTTP_ADDR=" + c.kv.Addr, "ONEJOB_CONSUL_PREFIX=" + c.kv.Prefix,
		"ONEJOB_REPLICA=" + name, "ONEJOB_HTTP_LISTEN=", "ONEJOB_LOG_LEVEL=debug", "ONEJOB_LOG_FORMAT=json"}, settings...)...)
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.cmd.Stderr = &p.stderr
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.exited)
		lines := bufio.NewScanner(out)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			var event map[string]any
			if json.Unmarshal(lines.Bytes(), &event) != nil {
				event = map[string]any{"event": "no_json", "line": lines.Text()}
			}
			p.mu.Lock()
			p.events = append(p.events, event)
			p.mu.Unlock()
		}
		_ = p.cmd.Wait()
	}()
	t.Cleanup(func() {
		p.signal(t, syscall.SIGCONT)
		p.signal(t, syscall.SIGKILL)
		<-p.exited
		if t.Failed() {
			for _, e := range p.events {
				t.Log(name, e)
			}
			t.Log(name, "wrote to stderr:", p.stderr.String())
		}
	})
	p.logged(t, "session_started")
	return p
}

// signal sends a signal to the replica: to its supervisor, which passes it on. With
// SIGKILL the kernel kills the working process too. SIGSTOP and SIGCONT are sent to
// both.
func (p *process) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	select {
	case <-p.exited:
	default:
		switch s {
		case syscall.SIGSTOP:
			testenv.Freeze(t, p.worker())
			testenv.Freeze(t, p.cmd.Process.Pid)
			return
		case syscall.SIGCONT:
			if err := syscall.Kill(p.worker(), s); err != nil && err != syscall.ESRCH {
				t.Errorf("signal %v to the working process of %s: %v", s, p.name, err)
			}
		}
		if err := p.cmd.Process.Signal(s); err != nil && err != os.ErrProcessDone {
			t.Errorf("signal %v to %s: %v", s, p.name, err)
		}
	}
}

// worker returns the pid of the working process.
func (p *process) worker() int { return processes.Find(p.cmd.Process.Pid) }

// count returns how often an event was logged.
func (p *process) count(event string) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.events {
		if e["event"] == event {
			n++
		}
	}
	return n
}

func (p *process) logged(t *testing.T, event string) {
	t.Helper()
	testenv.Eventually(t, maxWait, p.name+" logs "+event, func() bool { return p.count(event) > 0 })
}

// A recorder is a file that commands append to, outside of everything that is
// being tested. A line is: word, lock key, task, attempt, fence, pid.
type recorder struct{ path string }

func newRecorder(t *testing.T) recorder {
	t.Helper()
	return recorder{filepath.Join(t.TempDir(), "recorder")}
}

type testimony struct {
	word, key          string
	task, attempt, pid int
	fence              int64
}

func (w recorder) read(t *testing.T) []testimony {
	t.Helper()
	b, err := os.ReadFile(w.path)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	var all []testimony
	for line := range strings.Lines(string(b)) {
		var l testimony
		if _, err := fmt.Sscan(line, &l.word, &l.key, &l.task, &l.attempt, &l.fence, &l.pid); err != nil {
			t.Fatalf("recorder: %q: %v", line, err)
		}
		all = append(all, l)
	}
	return all
}

// hold keeps second attempts inside until resume is called.
func (w recorder) hold(t *testing.T) (resume func()) {
	t.Helper()
	if err := os.WriteFile(w.path+".hold", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return func() { _ = os.Remove(w.path + ".hold") }
}

// count returns how many testimonies have the word.
func (w recorder) count(t *testing.T, word string) (n int) {
	for _, l := range w.read(t) {
		if l.word == word {
			n++
		}
	}
	return n
}

// began reports whether a command has begun for the task.
func (w recorder) began(t *testing.T, task int64) bool {
	return slices.ContainsFunc(w.read(t), func(l testimony) bool { return l.word == "begin" && int64(l.task) == task })
}

// check finds two tasks inside of one lock key at once, by the order of the
// lines alone. A task that was killed never says end: its begin is void as soon
// as a later line of the same key says that its process is dead.
func (w recorder) check(t *testing.T) (ended map[int]int) {
	t.Helper()
	inside := map[string]testimony{}
	highest := map[string]int64{}
	ended = map[int]int{}
	for _, l := range w.read(t) {
		switch l.word {
		case "begin":
			if other, ok := inside[l.key]; ok {
				t.Errorf("task %d (fence %d) began while task %d (fence %d) was inside of lock key %s", l.task, l.fence, other.task, other.fence, l.key)
			}
			if l.fence <= highest[l.key] {
				t.Errorf("lock key %s: fence %d came after %d", l.key, l.fence, highest[l.key])
			}
			inside[l.key], highest[l.key] = l, l.fence
		case "end":
			delete(inside, l.key)
			ended[l.task]++
		case "dead": // the predecessor, as its successor found it
			delete(inside, l.key)
		case "alive":
			t.Errorf("task %d, attempt %d (fence %d) found the process of its predecessor alive", l.task, l.attempt, l.fence)
		default:
			t.Errorf("recorder: what is %q?", l.word)
		}
	}
	return ended
}

// config is a configuration whose commands testify. "quick" begins and ends.
// "stuck" never ends in its first attempt, ignores SIGTERM, and keeps a child
// in a session of its own that ignores it too; in its second it looks whether
// those of the first are dead, and stays inside while the recorder is on hold.
// "escape" is like "stuck", but its child is an abandoned task with an empty environment.
func (w recorder) config() string {
	const say = `say() { echo "$1 $ONEJOB_LOCK_KEY $ONEJOB_TASK_ID $ONEJOB_ATTEMPT $ONEJOB_FENCE $$" >> "$W"; }; `
	quick := say + `say begin; say end`
	const child = `setsid sh -c 'trap "" TERM; while :; do sleep 1; done' & C=$!`
	const abandoned = `setsid env -i /bin/sh -c '/bin/sh -c "trap \"\" TERM; echo \$\$ > $0; while :; do sleep 1; done" &' "$P.child"
while [ ! -s "$P.child" ]; do sleep 0.05; done; C=$(cat "$P.child")`
	stuck := say + `trap "" TERM
P="$W.$ONEJOB_TASK_ID"
if [ -f "$P.pids" ]; then
  for p in $(cat "$P.pids"); do
    if kill -0 "$p" 2>/dev/null; then say alive; else say dead; fi
  done
  say begin
  while [ -f "$W.hold" ]; do sleep 0.05; done
  say end
  exit 0
fi
CHILD
echo "$$ $C" > "$P.new"; mv "$P.new" "$P.pids"
say begin
while :; do sleep 1; done`
	command := func(name, script string) string {
		quoted, err := json.Marshal(script)
		if err != nil {
			panic(err)
		}
		return fmt.Sprintf("      %s: {path: /bin/sh, args: [\"-c\", %s], env: {W: %q}, grace: 1s}\n", name, quoted, w.path)
	}
	return "kinds:\n  exec:\n    commands:\n" + command("quick", quick) + command("stuck", strings.Replace(stuck, "CHILD", child, 1)) +
		command("escape", strings.Replace(stuck, "CHILD", abandoned, 1))
}

// jsonField returns a text of a JSON object, "" if it is not there.
func jsonField(raw []byte, name string) string {
	var m map[string]any
	if json.Unmarshal(raw, &m) != nil {
		return ""
	}
	s, _ := m[name].(string)
	return s
}
