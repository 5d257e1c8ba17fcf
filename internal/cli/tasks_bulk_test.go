package cli

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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

// What comes while somebody thinks about the question is not part of the answer.
func TestTheAnswerIsAboutTheTasksOfTheQuestion(t *testing.T) {
	db := testenv.Postgres(t)
	t.Setenv("ONEJOB_POSTGRES_DSN", db.DSN)
	if code := run(t.Context(), Program{}, []string{"migrate", "up"}, nil, io.Discard, os.Stderr); code != 0 {
		t.Fatalf("onejob migrate up: %d", code)
	}
	pool := db.Pool(t)
	for _, test := range []struct{ status, args, want string }{
		{"pending", "tasks cancel --kind noop", "cancelled 3 tasks"},
		{"failed", "tasks retry --kind noop", "retried 3 tasks"},
		{"failed", "tasks delete --kind noop --status failed", "deleted 3 tasks"},
		{"pending", "tasks cancel --kind noop --since 2h", "cancelled 3 tasks"},
	} {
		add := func(n int) {
			if _, err := pool.Exec(t.Context(), `
INSERT INTO onejob.tasks (kind, status, finished_at) SELECT 'noop', $1, CASE WHEN $1 = 'failed' THEN clock_timestamp() END FROM generate_series(1, $2)`, test.status, n); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := pool.Exec(t.Context(), `TRUNCATE onejob.tasks`); err != nil {
			t.Fatal(err)
		}
		add(3)
		person, keyboard := terminal(t)
		var stdout bytes.Buffer
		stderr := onWrite(func(said []byte) {
			if bytes.HasSuffix(said, []byte(" 3 tasks? [y/N] ")) {
				add(1)
				fmt.Fprintln(person, "y")
			} else {
				t.Errorf("%s: %s", test.args, said)
			}
		})
		if code := run(t.Context(), Program{}, strings.Fields(test.args), keyboard, &stdout, stderr); code != 0 || stdout.String() != test.want+"\n" {
			t.Errorf("%s: %d, %q, want %q", test.args, code, stdout.String(), test.want)
		}
		var left int
		if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM onejob.tasks WHERE status = $1`, test.status).Scan(&left); err != nil || left != 1 {
			t.Errorf("%s: %d tasks are left, %v; want the one that came meanwhile", test.args, left, err)
		}
	}
}

// onWrite is called with what is written.
type onWrite func([]byte)

func (f onWrite) Write(b []byte) (int, error) { f(b); return len(b), nil }

// terminal returns both ends of a terminal: that of the person who types, and that of a program.
func terminal(t *testing.T) (person, program *os.File) {
	t.Helper()
	person, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { person.Close() })
	fd := int(person.Fd())
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetUint32(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if program, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { program.Close() })
	return person, program
}
