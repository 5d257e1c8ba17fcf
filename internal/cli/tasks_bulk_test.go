package cli

import (
	"bytes"
	"io"
	"os"
	"testing"
	"time"

	"onejob/internal/servers"
	"onejob/internal/testenv"
)

// --since 2h is two hours before Postgres' time, which the rows have, and not before that of
// the machine on which somebody types it.
func TestAgoIsByPostgresClock(t *testing.T) {
	server, db := testenv.OwnPostgresWith(t, servers.PostgresConfig{Clock: true})
	t.Setenv("ONEJOB_POSTGRES_DSN", db.DSN)
	if code := run(t.Context(), Program{}, []string{"migrate", "up"}, nil, io.Discard, os.Stderr); code != 0 {
		t.Fatalf("onejob migrate up: %d", code)
	}
	pool := db.Pool(t)
	for _, ahead := range []time.Duration{0, 6 * time.Hour, -6 * time.Hour} {
		if err := server.SetClock(ahead); err != nil {
			t.Fatal(err)
		}
		onejob := func(want string, args ...string) {
			t.Helper()
			var stdout, stderr bytes.Buffer
			if code := run(t.Context(), Program{}, args, nil, &stdout, &stderr); code != 0 || stdout.String() != want+"\n" {
				t.Errorf("with a clock that is %v ahead, %q: %d, %q %q; want %q", ahead, args, code, stdout.String(), stderr.String(), want)
			}
		}
		if _, err := pool.Exec(t.Context(), `
TRUNCATE onejob.tasks;
INSERT INTO onejob.tasks (kind, status, finished_at, error) SELECT 'noop', 'failed', clock_timestamp() - interval '1 hour' * age, 'no' FROM unnest('{1, 3, 3, 5, 5, 5}'::int[]) age`); err != nil {
			t.Fatal(err)
		}
		onejob("1 task would be retried", "tasks", "retry", "--since", "2h", "--dry-run")
		onejob("5 tasks would be retried", "tasks", "retry", "--until", "2h", "--dry-run")
		onejob("2 tasks would be deleted", "tasks", "delete", "--status", "failed", "--since", "4h", "--until", "2h", "--dry-run")
	}
}
