package scale_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"onejob/internal/servers"
	"onejob/lock"
	"onejob/lock/consul"
	"onejob/store"
	"onejob/tasks"
	"onejob/tasks/schedule"
	"onejob/worker"
)

// The benchmarks measure what grows with something else than the rate of tasks:
// make figures runs them for docs/operate/sizing.md. Each has servers
// of its own, with their data on a disk, and ends within two minutes when the machine has
// nothing else to do:
//
//	go test ./scale -run xxx -bench NAME -benchtime 1x

// BenchmarkSchedules measures a leader's look at a table of schedules none of
// which is due, and what it takes to make one due time, one after the other.
func BenchmarkSchedules(b *testing.B) {
	for _, n := range []int{100, 1_000, 10_000, 100_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			db := database(b, nil)
			execute(b, db, `INSERT INTO onejob.schedules (name, cron, kind) SELECT 'schedule ' || i, '@every 8760h', 'noop' FROM generate_series(1, $1) i`, n)
			execute(b, db, `UPDATE onejob.schedules SET next_at = now() + interval '1 year'`)
			execute(b, db, `VACUUM ANALYZE onejob.schedules`)
			for b.Loop() {
				look := each(b, 20, func() error {
					if _, _, err := db.DueSchedules(b.Context(), nil); err != nil {
						return err
					}
					_, err := db.UntilNextSchedule(b.Context(), time.Second, nil)
					return err
				})
				execute(b, db, `UPDATE onejob.schedules SET next_at = now() - interval '1 second' WHERE id <= 1000`)
				now, due, err := db.DueSchedules(b.Context(), nil)
				check(b, err)
				at := 0
				made := each(b, len(due), func() error {
					d := due[at]
					at++
					s, err := schedule.Parse(d.Cron, d.Zone)
					if err != nil {
						return err
					}
					_, n, err := db.MakeOccurrences(b.Context(), d, d.Plan(s, now))
					if err == nil && n != 1 {
						err = fmt.Errorf("schedule %s made %d tasks", d.Name, n)
					}
					return err
				})
				b.ReportMetric(milliseconds(look), "ms/look")
				b.ReportMetric(milliseconds(made), "ms/due-time")
			}
		})
	}
}

// BenchmarkRunning measures what every replica asks about the tasks that run
// anywhere: every 10 s whose they are, and every 5 s which are its own. What it
// asks every second, which of its own shall be cancelled, reads none of them.
func BenchmarkRunning(b *testing.B) {
	for _, replicas := range []int{8, 80, 800} {
		b.Run(fmt.Sprint(replicas), func(b *testing.B) {
			db := database(b, nil)
			execute(b, db, `
INSERT INTO onejob.tasks (kind, status, attempt, fence, started_at, replica, session)
SELECT 'noop', 'running', 1, nextval('onejob.fences'), now(), 'replica', ('00000000-0000-0000-0000-' || lpad((i % $1)::text, 12, '0'))::uuid
  FROM generate_series(1, $1 * 32) i`, replicas)
			execute(b, db, `VACUUM ANALYZE onejob.tasks`)
			const mine = "00000000-0000-0000-0000-000000000001"
			for b.Loop() {
				sessions := each(b, 50, func() error { _, err := db.Sessions(b.Context(), mine); return err })
				cancels := each(b, 50, func() error { _, err := db.CancelRequests(b.Context(), mine); return err })
				held := each(b, 50, func() error { _, err := db.Held(b.Context(), "00000000-0000-0000-0000-ffffffffffff"); return err })
				b.ReportMetric(milliseconds(sessions), "ms/sessions")
				b.ReportMetric(milliseconds(held), "ms/held")
				b.ReportMetric(milliseconds(cancels), "ms/cancels")
			}
		})
	}
}

// BenchmarkEmptyClaim measures claims that find nothing, by so many replicas at
// once, and the question for due limits that goes with them: what it costs to be
// woken by an INSERT whose task somebody else has claimed.
func BenchmarkEmptyClaim(b *testing.B) {
	for _, replicas := range []int{1, 8, 80} {
		b.Run(fmt.Sprint(replicas), func(b *testing.B) {
			db := database(b, map[string]string{"max_connections": "200"})
			claim := func() error {
				_, err := db.Claim(b.Context(), tasks.Claim{Session: "00000000-0000-0000-0000-000000000001", Kinds: []string{"noop"}, Max: 32})
				return err
			}
			limits := func() error {
				_, err := db.DueLimits(b.Context(), tasks.Claim{Kinds: []string{"noop"}}, []string{"limit"})
				return err
			}
			for b.Loop() {
				for name, question := range map[string]func() error{"claim": claim, "limits": limits} {
					together(b, replicas, 5, question) // connections and plans
					rounds := 8_000 / replicas
					before := used(b, "postgres")
					together(b, replicas, rounds, question)
					b.ReportMetric((used(b, "postgres")-before).Seconds()*1e6/float64(replicas*rounds), "us/"+name)
				}
			}
		})
	}
}

// BenchmarkInserts measures single INSERTs of 8 clients, each its own
// transaction, with the trigger that notifies and without.
func BenchmarkInserts(b *testing.B) {
	for _, trigger := range []string{"ENABLE", "DISABLE"} {
		b.Run(trigger, func(b *testing.B) {
			db := database(b, nil)
			execute(b, db, `ALTER TABLE onejob.tasks `+trigger+` TRIGGER notify_due`)
			insert := func() error {
				_, err := db.Pool().Exec(b.Context(), `INSERT INTO onejob.tasks (kind) VALUES ('noop')`)
				return err
			}
			together(b, 8, 20, insert)
			for b.Loop() {
				const rounds = 500
				began := time.Now()
				together(b, 8, rounds, insert)
				b.ReportMetric(8*rounds/time.Since(began).Seconds(), "inserts/s")
			}
		})
	}
}

// BenchmarkRows measures how much Postgres keeps and writes of a task, and how
// long it takes to delete a thousand.
func BenchmarkRows(b *testing.B) {
	const n = 100_000
	db := database(b, nil)
	size := func(table string) float64 {
		return number(b, db, `SELECT pg_total_relation_size('`+table+`')::float8`) / n
	}
	for b.Loop() {
		execute(b, db, `CHECKPOINT`)
		written := number(b, db, wal)
		execute(b, db, `INSERT INTO onejob.tasks (kind, payload) SELECT 'noop', '{"to": "somebody@example.com"}' FROM generate_series(1, $1)`, n)
		b.ReportMetric((number(b, db, wal)-written)/n, "wal-B/insert")
		execute(b, db, `VACUUM ANALYZE onejob.tasks`)
		b.ReportMetric(size("onejob.tasks"), "B/waiting")
		b.ReportMetric(number(b, db, `SELECT pg_relation_size('onejob.tasks_pending')::float8`)/n, "B/waiting-index")
		execute(b, db, `CHECKPOINT`)
		written = number(b, db, wal)
		for done := 0; done < n; {
			claimed, err := db.Claim(b.Context(), tasks.Claim{Session: "00000000-0000-0000-0000-000000000001", Replica: "replica-1", Kinds: []string{"noop"}, Max: 512})
			check(b, err)
			list := claimed.Tasks
			done += len(list)
			all(len(list), func(i int) {
				check(b, db.Complete(b.Context(), tasks.Completion{ID: list[i].ID, Fence: list[i].Fence, Session: list[i].Session, Outcome: tasks.Succeeded, Next: tasks.StatusSucceeded}))
			})
		}
		b.ReportMetric((number(b, db, wal)-written)/n, "wal-B/task")
		execute(b, db, `VACUUM FULL onejob.tasks`)
		b.ReportMetric(size("onejob.tasks")+size("onejob.attempts"), "B/finished")
		execute(b, db, `ANALYZE`)
		deleted := each(b, 20, func() error {
			got, _, _, err := db.Purge(b.Context(), tasks.StatusSucceeded, 0, 1000)
			if err == nil && got != 1000 {
				err = fmt.Errorf("%d rows were deleted", got)
			}
			return err
		})
		b.ReportMetric(milliseconds(deleted), "ms/1000-deleted")
	}
}

const wal = `SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::float8`

// BenchmarkRequests measures the processor time of requests that carry one item
// each, one after the other: a claim or a completion in Postgres, a lock or a release
// in Consul, and what this process does for it.
func BenchmarkRequests(b *testing.B) {
	const n = 2_000
	db := database(b, nil)
	l, stop := runLocker(b, startConsul(b, 200))
	defer stop()
	for b.Loop() {
		execute(b, db, `INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, $1)`, n)
		execute(b, db, `VACUUM ANALYZE onejob.tasks`)
		measure := func(server string, two func(i int)) {
			there, here := used(b, server), own(b)
			for i := range n {
				two(i)
			}
			b.ReportMetric((used(b, server)-there).Seconds()*1e6/(2*n), server+"-us")
			b.ReportMetric((own(b)-here).Seconds()*1e6/(2*n), "for-"+server+"-us")
		}
		measure("postgres", func(int) {
			claimed, err := db.Claim(b.Context(), tasks.Claim{Session: "00000000-0000-0000-0000-000000000001", Replica: "replica-1", Kinds: []string{"noop"}, Max: 1})
			check(b, err)
			task := claimed.Tasks[0]
			check(b, db.Complete(b.Context(), tasks.Completion{ID: task.ID, Fence: task.Fence, Session: task.Session, Outcome: tasks.Succeeded, Next: tasks.StatusSucceeded}))
		})
		measure("consul", func(i int) { check(b, acquire(b, l, i).Release(b.Context())) })
	}
}

// BenchmarkTombstones measures how much memory Consul keeps of a key that was
// locked and deleted.
func BenchmarkTombstones(b *testing.B) {
	const keys, callers = 400_000, 512
	server := startConsul(b, 200)
	l, stop := runLocker(b, server)
	defer stop()
	for b.Loop() {
		half := func(from int) {
			all(callers, func(c int) {
				for i := from + c; i < from+keys/2; i += callers {
					check(b, acquire(b, l, i).Release(b.Context()))
				}
			})
		}
		half(0) // the log's buffers and the collector's slack are there after that
		before := resident(b, "consul")
		half(keys / 2)
		b.ReportMetric(float64(resident(b, "consul")-before)/(keys/2), "B/key")
		b.ReportMetric(float64(resident(b, "consul"))/1e6, "MB")
	}
}

// BenchmarkIdle measures what so many replicas with nothing to do cost the
// servers. They share this process, and one agent, which is the server.
func BenchmarkIdle(b *testing.B) {
	for _, replicas := range []int{1, 20, 80} {
		b.Run(fmt.Sprint(replicas), func(b *testing.B) {
			db := database(b, map[string]string{"max_connections": "1000"})
			server := startConsul(b, 10_000)
			stop := startReplicas(b, db, server, replicas)
			defer stop()
			time.Sleep(15 * time.Second) // they have all seen each other come
			for b.Loop() {
				const watch = 20 * time.Second
				pg, kv := used(b, "postgres"), used(b, "consul")
				time.Sleep(watch)
				b.ReportMetric(100*(used(b, "postgres")-pg).Seconds()/watch.Seconds(), "postgres-%")
				b.ReportMetric(100*(used(b, "consul")-kv).Seconds()/watch.Seconds(), "consul-%")
				b.ReportMetric(float64(connections(b, server.Addr()))/float64(replicas), "http-connections/replica")
				b.ReportMetric(number(b, db, `SELECT count(*)::float8 FROM pg_stat_activity WHERE backend_type = 'client backend'`)/float64(replicas), "connections/replica")
			}
		})
	}
}

// BenchmarkHerd measures what a task costs Postgres that is inserted alone, 100 a second, among
// so many replicas: all of them hear of it.
func BenchmarkHerd(b *testing.B) {
	for _, replicas := range []int{1, 8, 80} {
		b.Run(fmt.Sprint(replicas), func(b *testing.B) {
			db := database(b, map[string]string{"max_connections": "1000"})
			server := startConsul(b, 10_000)
			stop := startReplicas(b, db, server, replicas)
			defer stop()
			time.Sleep(15 * time.Second) // they have all seen each other come
			for b.Loop() {
				const inserts = 2000
				pg, began := used(b, "postgres"), time.Now()
				for i := range inserts {
					time.Sleep(time.Until(began.Add(time.Duration(i) * 10 * time.Millisecond)))
					execute(b, db, `INSERT INTO onejob.tasks (kind) VALUES ('noop')`)
				}
				took := time.Since(began)
				b.ReportMetric((used(b, "postgres")-pg).Seconds()*1e6/inserts, "postgres-us/task")
				b.ReportMetric(inserts/took.Seconds(), "tasks/s")
				b.ReportMetric(number(b, db, `SELECT 1000 * percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM started_at - created_at))::float8 FROM onejob.tasks WHERE started_at IS NOT NULL`), "pickup-p50-ms")
				b.ReportMetric(number(b, db, `SELECT 1000 * percentile_cont(0.99) WITHIN GROUP (ORDER BY extract(epoch FROM started_at - created_at))::float8 FROM onejob.tasks WHERE started_at IS NOT NULL`), "pickup-p99-ms")
			}
		})
	}
}

// BenchmarkFullLimits measures how many connections a replica has to Consul
// while rows wait for so many limits that are full.
func BenchmarkFullLimits(b *testing.B) {
	for _, limits := range []int{3, 30, 300} {
		b.Run(fmt.Sprint(limits), func(b *testing.B) {
			db := database(b, nil)
			server := startConsul(b, 10_000)
			semaphores := newLocker(b, server, 0).Semaphores()
			for i := range limits {
				check(b, semaphores.Create(b.Context(), fmt.Sprint("limit-", i), 0))
			}
			execute(b, db, `INSERT INTO onejob.tasks (kind, limit_name) SELECT 'noop', 'limit-' || i FROM generate_series(0, $1 - 1) i`, limits)
			stop := startReplicas(b, db, server, 1)
			defer stop()
			time.Sleep(5 * time.Second)
			for b.Loop() {
				const watch = 15 * time.Second
				pg, kv := used(b, "postgres"), used(b, "consul")
				time.Sleep(watch)
				b.ReportMetric(100*(used(b, "postgres")-pg).Seconds()/watch.Seconds(), "postgres-%")
				b.ReportMetric(100*(used(b, "consul")-kv).Seconds()/watch.Seconds(), "consul-%")
				b.ReportMetric(float64(connections(b, server.Addr())), "connections")
			}
		})
	}
}

// database starts a Postgres whose commits wait for the disk, with onejob's tables.
func database(b *testing.B, settings map[string]string) *store.Store {
	b.Helper()
	server, err := servers.StartPostgres(b.Context(), servers.PostgresConfig{Dir: "/var/tmp", Durable: true, Settings: settings})
	check(b, err)
	b.Cleanup(func() { check(b, server.Close()) })
	db, err := store.Open(store.Config{DSN: server.DSN("postgres"), MaxConns: 80})
	check(b, err)
	b.Cleanup(db.Close)
	check(b, db.Migrate(b.Context(), nil))
	return db
}

// startConsul starts a Consul that lets one address have so many connections; its
// own default is 200.
func startConsul(b *testing.B, conns int) *servers.Consul {
	b.Helper()
	server, err := servers.StartConsul(b.Context(), servers.ConsulConfig{
		Dir: "/var/tmp", Extra: fmt.Sprintf(`{"limits": {"http_max_conns_per_client": %d}}`, conns),
	})
	check(b, err)
	b.Cleanup(func() { check(b, server.Close()) })
	return server
}

func newLocker(b *testing.B, server *servers.Consul, number int) *consul.Locker {
	b.Helper()
	client := api.DefaultConfig()
	client.Address = server.Addr()
	l, err := consul.New(consul.Config{Client: client, Replica: consul.Replica{Name: fmt.Sprint("replica-", number)}, Log: zap.NewNop()})
	check(b, err)
	return l
}

// runLocker runs the locker of one replica until stop is called.
func runLocker(b *testing.B, server *servers.Consul) (l *consul.Locker, stop func()) {
	b.Helper()
	l = newLocker(b, server, 1)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { check(b, l.Run(ctx, nil)) })
	check(b, l.Ready(b.Context()))
	return l, func() { cancel(); running.Wait() }
}

// acquire locks a key as a worker does.
func acquire(b *testing.B, l *consul.Locker, number int) lock.Lease {
	lease, err := l.Acquire(b.Context(), lock.Request{Session: l.Session(), Key: strconv.Itoa(1_000_000 + number),
		Value: []byte(`{"replica":"replica-1","task_id":1000000,"kind":"noop","fence":1000000,"started":"2026-01-02T03:04:05.678901234Z"}`)})
	if err != nil {
		panic(err)
	}
	return lease
}

// startReplicas runs replicas with default settings until stop is called.
func startReplicas(b *testing.B, db *store.Store, server *servers.Consul, n int) (stop func()) {
	b.Helper()
	kinds := tasks.Kinds{}
	tasks.Handle(kinds, "noop", func(context.Context, *tasks.Attempt, struct{}) (any, error) { return nil, nil })
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	for i := range n {
		own, err := store.Open(store.Config{DSN: db.Pool().Config().ConnString()})
		check(b, err)
		l := newLocker(b, server, i+1)
		w, err := worker.New(worker.Config{Store: own, Locks: l, Kinds: kinds, Limits: l.Semaphores(), Log: zap.NewNop()})
		check(b, err)
		running.Go(func() {
			defer own.Close()
			check(b, w.Run(ctx))
		})
	}
	return func() { cancel(); running.Wait() }
}

func check(b *testing.B, err error) {
	b.Helper()
	if err != nil {
		b.Error(err)
	}
}

func execute(b *testing.B, db *store.Store, sql string, args ...any) {
	b.Helper()
	_, err := db.Pool().Exec(b.Context(), sql, args...)
	check(b, err)
}

func number(b *testing.B, db *store.Store, sql string) (n float64) {
	b.Helper()
	check(b, db.Pool().QueryRow(b.Context(), sql).Scan(&n))
	return n
}

// each calls f so many times and returns how long one call took on average.
func each(b *testing.B, n int, f func() error) time.Duration {
	b.Helper()
	began := time.Now()
	for range n {
		check(b, f())
	}
	return time.Since(began) / time.Duration(max(1, n))
}

// all calls f with 0 to n-1 at once.
func all(n int, f func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { f(i) })
	}
	wg.Wait()
}

// together lets so many callers call f so many times each.
func together(b *testing.B, callers, times int, f func() error) {
	all(callers, func(int) { each(b, times, f) })
}

func milliseconds(d time.Duration) float64 { return d.Seconds() * 1000 }

// processes calls f with the folder in /proc, and the fields of stat after the
// name, of every process with this name that descends from this one.
func processes(b *testing.B, name string, f func(dir string, fields []string)) {
	b.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	check(b, err)
	parents, found := map[string]string{}, map[string][]string{}
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		pid := filepath.Base(filepath.Dir(path))
		head, tail, _ := strings.Cut(string(text), ") ")
		fields := strings.Fields(tail)
		parents[pid] = fields[1]
		if _, comm, _ := strings.Cut(head, "("); strings.HasPrefix(comm, name) {
			found[pid] = fields
		}
	}
	for pid, fields := range found {
		for p := pid; p != "" && p != "0"; p = parents[p] {
			if p == strconv.Itoa(os.Getpid()) {
				f("/proc/"+pid, fields)
			}
		}
	}
}

// used returns the processor time of our servers of this name, and of those of
// their children that have ended.
func used(b *testing.B, name string) (sum time.Duration) {
	processes(b, name, func(_ string, fields []string) {
		for _, ticks := range fields[11:15] { // utime, stime, cutime, cstime
			n, err := strconv.Atoi(ticks)
			check(b, err)
			sum += time.Duration(n) * 10 * time.Millisecond
		}
	})
	return sum
}

// own returns the processor time of this process.
func own(b *testing.B) time.Duration {
	var u unix.Rusage
	check(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// resident returns the bytes in memory of our servers of this name, without the
// files that they have mapped.
func resident(b *testing.B, name string) (sum int) {
	processes(b, name, func(dir string, _ []string) {
		text, err := os.ReadFile(dir + "/status")
		check(b, err)
		var kB int
		_, after, _ := strings.Cut(string(text), "RssAnon:")
		_, err = fmt.Sscan(after, &kB)
		check(b, err)
		sum += kB << 10
	})
	return sum
}

// connections returns how many TCP connections a server of this machine has.
func connections(b *testing.B, addr string) (n int) {
	b.Helper()
	_, port, err := net.SplitHostPort(addr)
	check(b, err)
	p, err := strconv.Atoi(port)
	check(b, err)
	text, err := os.ReadFile("/proc/net/tcp")
	check(b, err)
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) > 3 && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", p)) && f[3] == "01" { // established
			n++
		}
	}
	return n
}
