package servers

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// A server's clock is set at once, for connections that were there before as well.
func TestClock(t *testing.T) {
	t.Parallel()
	p, err := StartPostgres(t.Context(), PostgresConfig{Clock: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	conn, err := pgx.Connect(t.Context(), p.DSN("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	for _, ahead := range []time.Duration{0, time.Hour, -90 * time.Second, 1500 * time.Millisecond, 0} {
		if err := p.SetClock(ahead); err != nil {
			t.Fatal(err)
		}
		before := time.Now()
		var got time.Time
		if err := conn.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&got); err != nil {
			t.Fatal(err)
		}
		if from, to := before.Add(ahead-time.Millisecond), time.Now().Add(ahead+time.Millisecond); got.Before(from) || got.After(to) {
			t.Errorf("%v ahead: it says %v, want %v to %v", ahead, got, from, to)
		}
	}
}

// The user that PostgreSQL runs as reads the clock, though root's umask lets nobody else read
// new files. A process has one umask, so the test runs in a process of its own.
func TestClockUnderAStrictUmask(t *testing.T) {
	t.Parallel()
	cmd := exec.Command("/bin/sh", "-c", `umask 077 && exec "$0" -test.run='^TestClock$' -test.v`, os.Args[0])
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: TestClock ") {
		t.Errorf("%v\n%s", err, out)
	}
}
