package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5"

	"onejob/internal/testenv"
	"onejob/lock"
)

const patience = 60 * time.Second

// limitView is what "onejob limits show -o json" prints, as far as it is needed here.
type limitView struct {
	Slots, Held int
	Holders     []struct{ Value json.RawMessage }
}

// A door counts who is inside. Visitors are processes: tasks, and commands under
// onejob lock. They connect, and leave when they are told to.
type door struct {
	listener net.Listener
	wg       sync.WaitGroup

	mu      sync.Mutex
	limit   int
	inside  map[net.Conn]string // the task that a visitor works on, or "command"
	visits  int
	most    int
	over    []string
	held    bool // nobody leaves
	changed sync.Cond
}

func newDoor(t *testing.T) *door {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d := &door{listener: listener, inside: map[net.Conn]string{}}
	d.changed.L = &d.mu
	d.wg.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			d.wg.Go(func() { d.serve(conn) })
		}
	})
	t.Cleanup(func() {
		listener.Close()
		d.set(func() {
			d.held = false
			for conn := range d.inside {
				conn.Close()
			}
		})
		d.wg.Wait()
	})
	return d
}

func (d *door) serve(conn net.Conn) {
	defer conn.Close()
	visitor, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return
	}
	d.mu.Lock()
	d.inside[conn] = strings.TrimSpace(visitor)
	d.visits++
	d.most = max(d.most, len(d.inside))
	if len(d.inside) > d.limit {
		d.over = append(d.over, fmt.Sprintf("visit %d: %d inside where %d may be", d.visits, len(d.inside), d.limit))
	}
	d.mu.Unlock()
	var watching sync.WaitGroup
	watching.Go(func() {
		_, _ = conn.Read(make([]byte, 1)) // until it is gone
		d.set(func() { delete(d.inside, conn) })
	})
	time.Sleep(20 * time.Millisecond)
	d.mu.Lock()
	for d.held && d.inside[conn] != "" {
		d.changed.Wait()
	}
	delete(d.inside, conn)
	d.mu.Unlock()
	fmt.Fprintln(conn, "leave")
	watching.Wait()
}

// set changes the door.
func (d *door) set(change func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	change()
	d.changed.Broadcast()
}

// await waits until exactly so many are inside.
func (d *door) await(t *testing.T, n int) {
	t.Helper()
	testenv.Eventually(t, patience, fmt.Sprintf("%d are inside", n), func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.inside) == n
	})
}

// TestReader is the body of the visitors: this test binary, with the door's
// address for an argument. They ignore SIGTERM.
func TestReader(t *testing.T) {
	if flag.NArg() != 1 {
		return // not such a process
	}
	signal.Ignore(syscall.SIGTERM)
	conn, err := net.Dial("tcp", flag.Arg(0))
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintln(conn, cmp.Or(os.Getenv("ONEJOB_TASK_ID"), "command"))
	_, _ = bufio.NewReader(conn).ReadString('\n')
}

// program is an onejob that runs.
type program struct {
	*exec.Cmd
	output bytes.Buffer // to be read when it has ended
	ended  chan struct{}
}

func (p *program) await(t *testing.T) {
	t.Helper()
	select {
	case <-p.ended:
	case <-time.After(patience):
		t.Fatalf("onejob %q did not end within %v", p.Args[1:], patience)
	}
}

// TestLimitOnRabbitMQ: two replicas and a command share a limit that is kept in
// RabbitMQ, while it is changed, looked at and drained from the command line, and
// one replica is killed with its slots.
func TestLimitOnRabbitMQ(t *testing.T) {
	t.Parallel()
	db, kv, vhost, d := testenv.Postgres(t), testenv.Consul(t), testenv.RabbitMQ(t), newDoor(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	bin := filepath.Join(dir, "onejob")
	install(t, bin)
	config := filepath.Join(dir, "onejob.yaml")
	visitor := []string{self, "-test.run=^TestReader$", d.listener.Addr().String()}
	text := fmt.Sprintf(`
limits: {backend: rabbitmq, rabbitmq_url: %q, slots: {door: 9, other: 1}}
consul: {check_ttl: 4s, heartbeat: 500ms, lock_delay: 1s}
kinds: {exec: {commands: {visit: {path: %q, args: [%q, %q]}}}}
`, vhost.URL, visitor[0], visitor[1], visitor[2])
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	command := func(args ...string) *exec.Cmd {
		c := exec.Command(bin, args...)
		c.Env = append(os.Environ(), "ONEJOB_CONFIG="+config, "ONEJOB_POSTGRES_DSN="+db.DSN, "CONSUL_HTTP_ADDR="+kv.Addr,
			"ONEJOB_CONSUL_PREFIX="+kv.Prefix, "ONEJOB_HTTP_LISTEN=127.0.0.1:0")
		return c
	}
	onejob := func(args ...string) string {
		t.Helper()
		out, err := command(args...).CombinedOutput()
		if err != nil {
			t.Fatalf("onejob %q: %v: %s", args, err, out)
		}
		return string(out)
	}
	begin := func(env string, args ...string) *program {
		t.Helper()
		p := &program{Cmd: command(args...), ended: make(chan struct{})}
		p.Env = append(p.Env, env)
		p.Stdout, p.Stderr = &p.output, &p.output
		if err := p.Start(); err != nil {
			t.Fatal(err)
		}
		go func() { defer close(p.ended); _ = p.Wait() }()
		t.Cleanup(func() {
			_ = p.Process.Kill()
			<-p.ended
			if t.Failed() {
				t.Logf("onejob %q:\n%s", args, &p.output)
			}
		})
		return p
	}
	limit := func() (v limitView) {
		t.Helper()
		if err := json.Unmarshal([]byte(onejob("limits", "show", "door", "-o", "json")), &v); err != nil {
			t.Fatal(err)
		}
		return v
	}
	conn, err := pgx.Connect(t.Context(), db.DSN)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	count := func(where string, args ...any) (n int) {
		t.Helper()
		if err := conn.QueryRow(t.Context(), "SELECT count(*) FROM onejob.tasks WHERE "+where, args...).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}

	onejob("migrate", "up")
	if out := onejob("limits", "list"); strings.Contains(out, "door") {
		t.Errorf("before there is any, limits list prints %q", out)
	}
	onejob("limits", "set", "door", "3")
	if out := onejob("limits", "list"); !strings.Contains(out, "door  3      0     ?") {
		t.Errorf("limits list prints %q", out)
	}
	d.set(func() { d.limit, d.held = 3, true })

	// A command takes one of the slots, and tasks the others.
	first := begin("", append([]string{"lock", "-n", "3", "door", "--"}, visitor...)...)
	d.await(t, 1)
	const tasks = 24
	if _, err := conn.Exec(t.Context(), `INSERT INTO onejob.tasks (kind, payload, limit_name)
		SELECT 'exec', '{"command": "visit"}', 'door' FROM generate_series(1, $1)`, tasks); err != nil {
		t.Fatal(err)
	}
	replicas := map[string]*program{}
	for _, name := range []string{"a", "b"} {
		replicas[name] = begin("ONEJOB_REPLICA="+name, "serve")
	}
	d.await(t, 3)
	v := limit()
	var who []string
	for _, h := range v.Holders {
		who = append(who, string(h.Value))
	}
	if v.Slots != 3 || v.Held != 3 || !strings.Contains(strings.Join(who, " "), "onejob lock on") {
		t.Errorf("limits show says %+v, held by %q", v, who)
	}
	another := begin("", "lock", "--no-wait", "-n", "3", "door", "--", "true")
	another.await(t)
	if !strings.Contains(another.output.String(), "all 3 slots of limit door are held") {
		t.Errorf("another command says %q", &another.output)
	}

	// The limit falls under them. Nobody enters before they are out.
	onejob("limits", "set", "door", "1")
	drain := begin("", "limits", "drain", "door")
	d.set(func() { d.limit = 1 })
	select {
	case <-drain.ended:
		t.Errorf("drained, with 3 of 1 slots held: %s", &drain.output)
	case <-time.After(2 * time.Second): // long enough for all who wait to look again
	}
	d.set(func() { d.held = false })
	drain.await(t)
	first.await(t)
	testenv.Eventually(t, patience, "some tasks are done", func() bool { return count("status = 'succeeded'") >= 5 })

	// It rises. Who has slots then is killed, and the other replica goes on.
	d.set(func() { d.limit, d.held = 3, true })
	onejob("limits", "set", "door", "3")
	d.await(t, 3)
	victim := "a"
	if count("status = 'running' AND replica = 'b'") > count("status = 'running' AND replica = 'a'") {
		victim = "b"
	}
	rows, err := conn.Query(t.Context(), "SELECT id::text FROM onejob.tasks WHERE status = 'running' AND replica = $1", victim)
	if err != nil {
		t.Fatal(err)
	}
	lost, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	visits := func() (n int) { d.set(func() { n = d.visits }); return n }
	before := visits()
	_ = replicas[victim].Process.Kill()
	t.Logf("replica %s was killed with %d of 3 slots", victim, len(lost))
	testenv.Eventually(t, patience, "others are inside in their place", func() bool { return visits() >= before+len(lost) })
	d.set(func() { d.held = false })
	testenv.Eventually(t, 2*patience, "all tasks are done", func() bool { return count("status = 'succeeded'") == tasks })
	if n := count("crashes > 0"); n != len(lost) {
		t.Errorf("%d tasks lost a replica, want %d", n, len(lost))
	}

	// Nothing has leaked.
	testenv.Eventually(t, patience, "no slot is held", func() bool { return limit().Held == 0 })
	onejob("limits", "delete", "door")
	for name, r := range replicas {
		if name != victim {
			_ = r.Process.Signal(syscall.SIGTERM)
			r.await(t)
		}
	}
	if queues := vhost.Queues(t); len(queues) != 0 {
		t.Errorf("the queues %q are left", queues)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	t.Logf("%d visits, at most %d at once", d.visits, d.most)
	for _, over := range d.over {
		t.Error(over)
	}
	if d.visits < tasks+1+len(lost) || d.most != 3 {
		t.Errorf("%d visits, at most %d at once", d.visits, d.most)
	}
}

// TestLockWithSlotsOnRabbitMQ: a command that ignores SIGTERM outlives onejob lock for
// as long as its lease lasts. The next one does not begin before it is dead.
func TestLockWithSlotsOnRabbitMQ(t *testing.T) {
	t.Parallel()
	vhost, d := testenv.RabbitMQ(t), newDoor(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(t.TempDir(), "onejob")
	install(t, bin)
	d.set(func() { d.limit, d.held = 1, true })
	began := time.Now()
	begin := func() *exec.Cmd {
		c := exec.Command(bin, "lock", "-n", "1", "door", "--", self, "-test.run=^TestReader$", d.listener.Addr().String())
		c.Env = append(os.Environ(), "ONEJOB_LIMITS_BACKEND=rabbitmq", "ONEJOB_LIMITS_RABBITMQ_URL="+vhost.URL)
		c.Stderr = os.Stderr
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
		return c
	}
	first := begin()
	d.await(t, 1)
	t.Logf("the first command began after %v", time.Since(began).Round(time.Millisecond))
	begin()
	begin()
	testenv.Eventually(t, patience, "others wait", func() bool { return slices.Contains(vhost.Queues(t), "onejob/door/bell") })
	began = time.Now()
	if err := first.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, patience, "another one is inside", func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return d.visits == 2
	})
	t.Logf("the next command began %v after the first one's onejob lock was killed", time.Since(began).Round(time.Millisecond))
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, over := range d.over {
		t.Error(over)
	}
}

// TestLimitNamesAreTheSameForAll: a row is accepted if and only if a limit can have
// the name.
func TestLimitNamesAreTheSameForAll(t *testing.T) {
	t.Parallel()
	db := testenv.Postgres(t)
	bin := filepath.Join(t.TempDir(), "onejob")
	install(t, bin)
	migrate := exec.Command(bin, "migrate", "up")
	migrate.Env = append(os.Environ(), "ONEJOB_POSTGRES_DSN="+db.DSN)
	if out, err := migrate.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	conn, err := pgx.Connect(t.Context(), db.DSN)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())

	names := []string{"", ".x", "x.", "a/b", "a b", "reports", "Zoë✓", "a?b#c%2F", "👩", strings.Repeat("x", 100), strings.Repeat("x", 101),
		strings.Repeat("✓", 33), strings.Repeat("✓", 34)}
	for r := rune(1); r <= unicode.MaxRune; r++ {
		if unicode.IsControl(r) || unicode.IsSpace(r) || unicode.In(r, unicode.Z, unicode.Cf) || r <= 0x3000 || 0xe0000 <= r && r <= 0xe00ff {
			names = append(names, "a"+string(r)+"b")
		}
	}
	refused := 0
	for _, table := range []string{"onejob.tasks (kind, limit_name) VALUES ('noop', $1)", "onejob.schedules (name, cron, kind, limit_name) VALUES (gen_random_uuid()::text, '@daily', 'noop', $1)"} {
		for _, name := range names {
			_, err := conn.Exec(t.Context(), "INSERT INTO "+table, name)
			if err != nil {
				refused++
			}
			if limit := lock.CheckSemaphore(name, 0); (err == nil) != (limit == nil) {
				t.Errorf("%q: INSERT INTO %.12s: %v; as the name of a limit: %v", name, table, err, limit)
			}
		}
	}
	t.Logf("%d names, %d refused by one of the two tables", len(names), refused)
	for _, bad := range []string{"a\u2003b", "a\u0085b", "a\u202eb", "a\u200bb"} {
		if lock.CheckSemaphore(bad, 0) == nil {
			t.Errorf("a limit can be called %q", bad)
		}
	}
}
