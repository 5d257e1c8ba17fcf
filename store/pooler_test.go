package store_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/internal/testenv"
	"onejob/store"
	"onejob/tasks"
)

// pooled starts a pgbouncer in transaction mode in front of a database, with a
// single connection to it, and returns its DSN for the database.
func pooled(t *testing.T, dsn string) string {
	t.Helper()
	return pooledBy(t, dsn, 1)
}

func pooledBy(t *testing.T, dsn string, connections int) string {
	t.Helper()
	binary, err := exec.LookPath("pgbouncer")
	if err != nil {
		if binary = "/usr/sbin/pgbouncer"; !isFile(binary) { // not everybody's PATH
			t.Fatal("there is no pgbouncer here: run scripts/postgres.sh, or install your distribution's package")
		}
	}
	server, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := listener.Addr().(*net.TCPAddr).Port
	listener.Close()

	config := filepath.Join(t.TempDir(), "pgbouncer.ini")
	if err := os.WriteFile(config, []byte(fmt.Sprintf(`
[databases]
* = host=%s port=%s user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = %d
`, server.Hostname(), server.Port(), port, connections)), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(binary, config)
	if os.Geteuid() == 0 { // which it refuses to run as
		cmd.Args = []string{binary, "--user", "nobody", config}
		for dir := filepath.Dir(config); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
			if err := os.Chmod(dir, 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var log strings.Builder
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Log(log.String())
		}
	})
	u := *server
	u.Host = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	testenv.Eventually(t, 10*time.Second, "pgbouncer answers", func() bool {
		conn, err := pgx.Connect(t.Context(), u.String())
		if err == nil {
			conn.Close(t.Context())
		}
		return err == nil
	})
	return u.String()
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

func TestThroughATransactionPooler(t *testing.T) {
	t.Parallel()
	db := testenv.Postgres(t)
	b := &bench{t: t, pool: db.Pool(t), dsn: db.DSN, session: "6f1ed002-ab59-42fb-a0b4-0123456789ab"}
	b.Store = open(t, store.Config{DSN: pooled(t, db.DSN), ListenDSN: db.DSN})
	if err := b.Migrate(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if err := b.CheckSchema(t.Context()); err != nil {
		t.Fatal(err)
	}

	ctx, stop := context.WithCancel(t.Context())
	signals, ended := make(chan tasks.Signal, 10), make(chan error, 1)
	go func() { ended <- b.Listen(ctx, func(s tasks.Signal) { signals <- s }) }()
	equal(t, "the first signal", <-signals, tasks.SignalListening)
	if _, err := b.Enqueue(t.Context(), store.NewTask{Kind: "noop", LockKey: "k", Payload: jsonOf(`{"a": 1}`)}); err != nil {
		t.Fatal(err)
	}
	equal(t, "the second", <-signals, tasks.SignalDue)
	stop()
	<-ended

	// All connections of the store share one of the server: whatever one of them
	// left behind in it, the next would find.
	keyed := b.claimMax(10)[0]
	equal(t, "the payload", string(keyed.Payload), `{"a": 1}`)
	plain, back := b.claimed(), b.claimed("lock_key='other'")
	e := succeeded(plain)
	e.Result = jsonOf(`{"b": 2}`)
	e.ExitCode = new(int)
	for i, err := range b.gathered([]tasks.Ending{e, {ID: plain.ID, Fence: -1, Outcome: tasks.Failed, Next: tasks.StatusFailed}}) {
		if want := []error{nil, tasks.ErrRefused}[i]; err != want {
			t.Errorf("ending %d was answered with %v", i, err)
		}
	}
	if err := b.Unclaim(t.Context(), back, 0); err != nil {
		t.Error(err)
	}
	if err := b.CompleteWith(t.Context(), keyed, func(ctx context.Context, tx pgx.Tx) (json.RawMessage, error) {
		var fence string
		err := tx.QueryRow(ctx, `SELECT current_setting('onejob.fence')`).Scan(&fence)
		return jsonOf(fence), err
	}); err != nil {
		t.Error(err)
	}
	equal(t, "the rows", b.row(keyed, "status, result")+", "+b.row(plain, "status, result")+", "+b.row(back, "status, attempt"),
		fmt.Sprintf(`succeeded %d, succeeded {"b": 2}, pending 0`, keyed.Fence))
	var left string
	if err := b.Pool().QueryRow(t.Context(), `SELECT current_setting('enable_seqscan') || coalesce(current_setting('onejob.fence', true), '')`).Scan(&left); err != nil {
		t.Fatal(err)
	}
	equal(t, "what is left behind in the connection", left, "on")
}
