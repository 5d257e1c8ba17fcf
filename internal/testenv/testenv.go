// Package testenv gives tests real servers: one PostgreSQL, one Consul and one
// RabbitMQ for a test binary, started when the first test asks and stopped after the last.
//
// A package that uses it has
//
//	func TestMain(m *testing.M) { testenv.Main(m) }
//
// Tests share the servers and nothing on them, so they can run in parallel: each
// has a database and a key prefix of its own. A test that stops a server asks for
// one of its own.
//
// A server that cannot be started fails the test. Nothing is ever skipped: a
// green run has seen the real thing.
package testenv

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"onejob/internal/servers"
)

// shared are the servers of this test binary.
var (
	sharedPostgres = &shared[*servers.Postgres]{start: func() (*servers.Postgres, error) {
		return servers.StartPostgres(context.Background(), servers.PostgresConfig{
			Dir: memory(),
			// Many tests at once have a pool each.
			Settings: map[string]string{"max_connections": "300"},
		})
	}}
	sharedConsul = &shared[*servers.Consul]{start: func() (*servers.Consul, error) {
		return servers.StartConsul(context.Background(), servers.ConsulConfig{Dir: memory(), Extra: consulExtra})
	}}
)

// Main runs the tests, stops the shared servers, looks for goroutines that were
// left behind and exits. The options say which goroutines to put up with.
func Main(m *testing.M, options ...goleak.Option) {
	os.Exit(run(m, options...))
}

func run(m *testing.M, options ...goleak.Option) int {
	inMain = true
	code := m.Run()
	if err := errors.Join(sharedPostgres.close(), sharedConsul.close(), sharedRabbitMQ.close(), sharedBinary.close()); err != nil {
		fmt.Fprintln(os.Stderr, "testenv:", err)
		code = max(code, 1)
	}
	http.DefaultClient.CloseIdleConnections()
	// After a failure, leaks are a consequence and would hide the cause.
	if code != 0 {
		return code
	}
	if err := goleak.Find(options...); err != nil {
		fmt.Fprintln(os.Stderr, "testenv: the tests left goroutines behind:", err)
		return 1
	}
	return 0
}

var inMain bool // set before any test runs

// shared is a server that starts on first use. A failed start is not repeated.
type shared[S interface{ Close() error }] struct {
	start func() (S, error)

	once    sync.Once
	server  S
	err     error
	running bool
}

func (s *shared[S]) get(t testing.TB) S {
	t.Helper()
	if !inMain {
		t.Fatal("testenv: nobody would stop the servers: add func TestMain(m *testing.M) { testenv.Main(m) } to this package")
	}
	s.once.Do(func() {
		s.server, s.err = s.start()
		s.running = s.err == nil
	})
	if s.err != nil {
		t.Fatalf("testenv: %v", s.err)
	}
	return s.server
}

func (s *shared[S]) close() error {
	if !s.running {
		return nil
	}
	return s.server.Close()
}

// random returns a word that no other test has.
func random() string { return strings.ToLower(rand.Text()[:12]) }

// memory returns a folder that lies in memory, where there is room for servers, or
// "" for the usual one. What the tests stop and kill are processes, never the
// machine, so nothing is lost there that a disk would keep; and a disk that others
// use too makes a server silent for seconds, which is a fault of its own.
func memory() string {
	const shm, room, tmpfs = "/dev/shm", 4 << 30, 0x01021994 // TMPFS_MAGIC, which unix has on Linux only
	var fs unix.Statfs_t
	if err := unix.Statfs(shm, &fs); err != nil || fs.Type != tmpfs || fs.Bavail*uint64(fs.Bsize) < room {
		return ""
	}
	return shm
}

// closeAtEnd closes a server of one test when the test ends.
func closeAtEnd(t testing.TB, server interface{ Close() error }) {
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Errorf("testenv: %v", err)
		}
	})
}
