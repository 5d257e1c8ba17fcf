package page

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"onejob/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// A cluster is a database, a Consul, and replicas that a test starts.
type cluster struct {
	t    *testing.T
	pool *pgxpool.Pool
	env  []string
}

// configuration has commands that take their time, and one that fails.
const configuration = `
worker: {retry_base: 1s, shutdown_grace: 1s, concurrency: 8}
limits: {slots: {crm-api: 2}}
kinds:
  exec:
    commands:
      import-orders: {path: /bin/sh, args: [-c, "echo ::progress 400/1000 orders; sleep 600", import-orders], allow_args: true}
      backup:        {path: /bin/sh, args: [-c, "echo ::progress 88%; sleep 600", backup], allow_args: true}
      sync-crm:      {path: /bin/sh, args: [-c, "echo ::progress waits for the CRM; sleep 600", sync-crm], allow_args: true}
      close-books:   {path: /bin/sh, args: [-c, "echo closing 2026-11; echo booking 1042 rows", close-books], allow_args: true}
      report:
        path: /bin/sh
        args: [-c, "echo reading /srv/ledger; echo 17 rows do not add up >&2; echo 'ledger differs by 12.40 EUR' >&2; exit 3", report]
        allow_args: true
`

func newCluster(t *testing.T) *cluster {
	t.Helper()
	db, kv := testenv.Postgres(t), testenv.Consul(t)
	config := filepath.Join(t.TempDir(), "onejob.yaml")
	if err := os.WriteFile(config, []byte(configuration), 0o600); err != nil {
		t.Fatal(err)
	}
	c := &cluster{t: t, pool: db.Pool(t), env: append(os.Environ(), "ONEJOB_CONFIG="+config, "ONEJOB_POSTGRES_DSN="+db.DSN, "CONSUL_HTTP_ADDR="+kv.Addr, "ONEJOB_CONSUL_PREFIX="+kv.Prefix)}
	migrate := c.command("migrate", "up")
	if out, err := migrate.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return c
}

func (c *cluster) command(args ...string) *exec.Cmd {
	c.t.Helper()
	binary := os.Getenv("TEST_ONEJOB")
	if binary == "" {
		c.t.Fatal("TEST_ONEJOB is not set: make page-test")
	}
	command := exec.Command(binary, args...)
	command.Env = c.env
	return command
}

// serve starts a replica, and returns the port of its page.
func (c *cluster) serve(name string, env ...string) (port string) {
	c.t.Helper()
	path := filepath.Join(c.t.TempDir(), "log")
	out, err := os.Create(path)
	if err != nil {
		c.t.Fatal(err)
	}
	defer out.Close()
	replica := c.command("serve")
	replica.Env = append(replica.Env, "ONEJOB_REPLICA="+name, "ONEJOB_LOG_FORMAT=json", "ONEJOB_HTTP_LISTEN=127.0.0.1:0")
	replica.Env = append(replica.Env, env...)
	replica.Stdout, replica.Stderr = out, out
	if err := replica.Start(); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		_ = replica.Process.Signal(syscall.SIGTERM)
		_ = replica.Wait()
	})
	started := regexp.MustCompile(`"http":"[^"]*:(\d+)"`)
	testenv.Eventually(c.t, time.Minute, "replica "+name+" has a session", func() bool {
		text, err := os.ReadFile(path)
		if err != nil {
			c.t.Fatal(err)
		}
		if m := started.FindSubmatch(text); m != nil {
			port = string(m[1])
		}
		return port != "" && regexp.MustCompile(`session_started`).Match(text)
	})
	return port
}

// sql runs a statement, and returns the first column of its first row, if there is one.
func (c *cluster) sql(statement string, args ...any) (id int64) {
	c.t.Helper()
	rows, err := c.pool.Query(context.WithoutCancel(c.t.Context()), statement, args...)
	if err != nil {
		c.t.Fatalf("%s: %v", statement, err)
	}
	defer rows.Close()
	if rows.Next() {
		if err := rows.Scan(&id); err != nil {
			c.t.Fatalf("%s: %v", statement, err)
		}
	}
	rows.Close()
	if err := rows.Err(); err != nil {
		c.t.Fatalf("%s: %v", statement, err)
	}
	return id
}

// until waits until a condition on a task holds.
func (c *cluster) until(id int64, condition string) {
	c.t.Helper()
	testenv.Eventually(c.t, time.Minute, condition, func() bool {
		return c.sql(`SELECT count(*) FROM onejob.tasks WHERE id = $1 AND `+condition, id) == 1
	})
}

// work fills the tables with what a page shows on an ordinary day. It returns a task that
// failed, with others before and after it on its lock key.
func (c *cluster) work() (failed int64) {
	exec := func(command, args, columns string) int64 {
		return c.sql(`INSERT INTO onejob.tasks (kind, payload, queue, lock_key, limit_name, timeout, max_attempts)
		              SELECT 'exec', jsonb_build_object('command', $1::text, 'args', $2::jsonb), queue, lock_key, limit_name, timeout, 2
		                FROM jsonb_to_record($3::jsonb) AS r(queue text, lock_key text, limit_name text, timeout interval) RETURNING id`, command, args, columns)
	}
	succeed := func(id int64) { c.until(id, `status = 'succeeded'`) }
	succeed(exec("close-books", `["2026-10"]`, `{"queue": "reports", "lock_key": "ledger"}`))
	failed = exec("report", `["--month", "2026-10"]`, `{"queue": "reports", "lock_key": "ledger", "timeout": "1 hour"}`)
	c.until(failed, `status = 'failed'`)
	succeed(exec("close-books", `["2026-11"]`, `{"queue": "reports", "lock_key": "ledger"}`))

	for _, id := range []int64{
		exec("import-orders", `["--day", "2026-11-23"]`, `{"queue": "default", "timeout": "2 hours"}`),
		exec("backup", `["nightly"]`, `{"queue": "default", "lock_key": "backup"}`),
		exec("sync-crm", `["--since", "2026-11-01"]`, `{"queue": "default", "limit_name": "crm-api"}`),
		exec("sync-crm", `["--since", "2026-11-08"]`, `{"queue": "default", "limit_name": "crm-api", "timeout": "10 minutes"}`),
	} {
		c.until(id, `EXISTS (SELECT FROM onejob.progress WHERE task_id = id)`)
	}
	exec("sync-crm", `["--since", "2026-11-15"]`, `{"queue": "default", "limit_name": "crm-api"}`) // waits for a slot
	exec("backup", `["weekly"]`, `{"queue": "default", "lock_key": "backup"}`)                     // waits for the lock key
	c.sql(`INSERT INTO onejob.tasks (kind, queue, payload, run_at) SELECT 'http', 'mail', '{"url": "https://mail.example.com/send"}', now() + i * interval '5 minutes' FROM generate_series(1, 1340) i`)
	c.sql(`INSERT INTO onejob.tasks (kind, queue, payload, status, error, finished_at)
	       SELECT 'http', 'mail', '{"url": "https://mail.example.com/send"}', 'failed', 'Post "https://mail.example.com/send": dial tcp 10.0.4.' || i % 9 || ':443: connect: connection refused', now() - i * interval '4 minutes' FROM generate_series(1, 312) i`)
	c.sql(`INSERT INTO onejob.tasks (kind, payload, status, error, finished_at)
	       SELECT 'exec', '{"command": "report"}', 'failed', 'exit status 3: ledger differs by ' || i || '.40 EUR', now() - i * interval '1 hour' FROM generate_series(1, 4) i`)
	c.sql(`INSERT INTO onejob.tasks (kind, payload) VALUES ('thumbnail', '{"image": 7}')`)
	c.sql(`INSERT INTO onejob.schedules (name, cron, time_zone, kind, payload) VALUES
	       ('nightly-backup', '0 2 * * *',  'Europe/Berlin', 'exec', '{"command": "backup"}'),
	       ('sync-crm',       '*/15 * * * *', 'UTC',         'exec', '{"command": "sync-crm"}'),
	       ('month-end',      '0 6 1 * *',  'Europe/Berlin', 'exec', '{"command": "close-books"}')`)
	c.sql(`UPDATE onejob.schedules SET enabled = false WHERE name = 'month-end'`)
	c.sql(`INSERT INTO onejob.occurrences (schedule_id, due_at, task_id, skipped)
	       SELECT s.id, date_trunc('hour', now()) - i * CASE s.name WHEN 'sync-crm' THEN interval '15 minutes' ELSE interval '1 day' END,
	              CASE WHEN i NOT IN (4, 9, 10) THEN CASE WHEN i IN (6, 13) THEN $1::bigint ELSE $1::bigint - 1 END END, CASE WHEN i = 4 THEN 'overlap' WHEN i IN (9, 10) THEN 'missed' END
	         FROM onejob.schedules s CROSS JOIN generate_series(1, 24) i WHERE s.name <> 'month-end'`, failed)
	c.until(failed, `NOT EXISTS (SELECT FROM onejob.schedules WHERE enabled AND next_at IS NULL)`)
	return failed
}
