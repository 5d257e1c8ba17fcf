package servers

import (
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// A server's clock is set at once, for connections that were there before as well. Timeouts,
// whose signal handlers look at the clock, do it no harm.
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
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			conn, err := pgx.Connect(t.Context(), p.DSN("postgres"))
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close(t.Context())
			if _, err := conn.Exec(t.Context(), "SET statement_timeout = '1ms'"); err != nil {
				t.Error(err)
			}
			for range 1500 {
				_, _ = conn.Exec(t.Context(), "SELECT count(clock_timestamp()::text || i) FROM generate_series(1, 5000) i")
				if conn.IsClosed() {
					t.Error("a connection was lost")
					return
				}
			}
		})
	}
	all.Wait()
}
