package testenv

import (
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

	"github.com/jackc/pgx/v5"

	"onejob/internal/servers"
)

// Pooler starts a pgbouncer in transaction mode in front of a database, with so many
// connections to it, and returns the DSN that leads through it. It runs until the
// test ends.
func Pooler(t testing.TB, db *DB, connections int) string {
	t.Helper()
	binary, err := exec.LookPath("pgbouncer")
	if err != nil {
		if binary = "/usr/sbin/pgbouncer"; !isFile(binary) { // not everybody's PATH
			t.Fatal("testenv: there is no pgbouncer here: run scripts/postgres.sh, or install your distribution's package")
		}
	}
	server, err := url.Parse(db.DSN)
	if err != nil {
		t.Fatalf("testenv: %v", err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("testenv: %v", err)
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
		t.Fatalf("testenv: %v", err)
	}
	cmd := exec.Command(binary, config)
	if os.Geteuid() == 0 { // which it refuses to run as
		cmd.Args = []string{binary, "--user", "nobody", config}
		for dir := filepath.Dir(config); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
			if err := os.Chmod(dir, 0o755); err != nil {
				t.Fatalf("testenv: %v", err)
			}
		}
	}
	cmd.SysProcAttr = new(syscall.SysProcAttr)
	servers.DieWithParent(cmd.SysProcAttr, syscall.SIGKILL)
	var log strings.Builder
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatalf("testenv: %v", err)
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
	Eventually(t, cleanupTimeout, "pgbouncer answers", func() bool {
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
