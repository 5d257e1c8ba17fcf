package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/jackc/pgx/v5"
)

// profilePlan is what to profile.
type profilePlan struct {
	Dir, Out string
	Tasks    int
	Replicas int
}

func (p *profilePlan) flags(flags *flag.FlagSet) {
	flags.StringVar(&p.Dir, "dir", "/var/tmp", "folder on a disk for the servers' data")
	flags.StringVar(&p.Out, "out", "results/onejob.pprof", "file for the profile; go tool pprof reads it")
	flags.IntVar(&p.Replicas, "replicas", 1, "replicas that do them; the first one's profile is kept")
	flags.IntVar(&p.Tasks, "tasks", 400_000, "tasks that are done meanwhile; Consul tells of intervals of 10 s")
}

// runProfile lets a replica of onejob, built from its packages and not from its
// command, do tasks, and keeps a profile of where its processor time goes. It
// prints what Postgres and Consul count of their own work meanwhile.
func runProfile(ctx context.Context, p profilePlan) (err error) {
	out, err := filepath.Abs(p.Out)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return err
	}
	g, err := prepareEnvironment(ctx, p.Dir, "pg_stat_statements")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.close()) }()
	if err := g.template(ctx, onejobTable.template, migrateOnejob); err != nil {
		return err
	}
	if _, err := g.admin.Exec(ctx, `CREATE EXTENSION pg_stat_statements`); err != nil {
		return fmt.Errorf("%w; Debian has it in the package of the server", err)
	}
	profiled := subject{onejobTable, true, func(at place) (*process, error) {
		args := []string{"stamp", "-subject", "onejob", "-dsn", at.dsn, "-consul", at.consul, "-out", at.file("starts")}
		if at.number == 1 {
			args = append(args, "-profile", out)
		}
		return startProcess("profiled", at.file("profiled.log"), g.self, args...)
	}}
	const warm = 2_000
	o, err := g.measure(ctx, benchCase{name: "profiled", subject: profiled, replicas: p.Replicas, warm: warm, tasks: p.Tasks, meanwhile: func(m *meter) error {
		return errors.Join(m.printStatements(ctx, warm+p.Tasks), m.consul.printTelemetry())
	}}, nil)
	if err != nil {
		return err
	}
	fmt.Printf("%.0f tasks/s; us of CPU per task: onejob %.0f, Postgres %.0f, Consul %.0f; others used %.0f %% of the machine\n",
		o.Rate, o.CPU["subject"], o.CPU["postgres"], o.CPU["consul"], 100*o.Others)
	fmt.Println("go tool pprof -top", out)
	fmt.Println("go tool pprof -top -sample_index=alloc_objects", allocationsOf(out))
	return nil
}

// printStatements prints what Postgres counted of the statements of so many
// tasks.
func (m *meter) printStatements(ctx context.Context, tasks int) error {
	rows, err := m.environment.admin.Query(ctx, `
SELECT CASE WHEN query ~ 'pg_advisory_xact_lock'                   THEN 'claim: its turn'
            WHEN query ~ 'onejob claims' AND query ~ 'nextval'     THEN 'claim: take'
            WHEN query ~ 'onejob claims' AND query ~ 'SKIP LOCKED' THEN 'claim: choose'
            WHEN query ~ 'onejob claims'                           THEN 'claim: read'
            WHEN query ~ 'history AS'                              THEN 'completions'
            WHEN query ~ 'DISTINCT session'                        THEN 'whose tasks run'
            WHEN query ~ 'AND session = '                          THEN 'own running tasks'
            ELSE 'all others' END AS statement,
       sum(calls)::float8, sum(total_exec_time)::float8, sum(shared_blks_hit + shared_blks_read)::float8,
       sum(shared_blks_dirtied)::float8, sum(wal_records)::float8, sum(wal_bytes)::float8
  FROM pg_stat_statements
 WHERE dbid = (SELECT oid FROM pg_database WHERE datname = $1)
   AND query !~* '^(vacuum|analyze|insert|checkpoint)'
 GROUP BY 1
 ORDER BY 3 DESC`, m.progress.conn.Config().Database)
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "statement\ttasks a call\tms a call\tof a task: us\tpages read\tmade dirty\tWAL records\tWAL bytes")
	var name string
	var calls, ms, pages, dirtied, records, bytes float64
	n := float64(tasks)
	_, err = pgx.ForEachRow(rows, []any{&name, &calls, &ms, &pages, &dirtied, &records, &bytes}, func() error {
		fmt.Fprintf(w, "%s\t%.0f\t%.2f\t%.1f\t%.1f\t%.2f\t%.1f\t%.0f\n", name, n/calls, ms/calls, 1000*ms/n, pages/n, dirtied/n, records/n, bytes/n)
		return nil
	})
	return errors.Join(err, w.Flush())
}

// printTelemetry prints what Consul tells of its last 10 s, if it does.
func (c *consul) printTelemetry() error {
	metrics, err := c.Client().Agent().Metrics()
	if err != nil { // as when its first 10 s are not over
		fmt.Println("Consul's telemetry cannot be had:", err)
		return nil
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "Consul's telemetry, the 10 s before %s\tcount\tms each\tat most\n", metrics.Timestamp)
	for _, s := range metrics.Samples {
		if slices.Contains([]string{"consul.txn.apply", "consul.raft.commitTime", "consul.raft.leader.dispatchLog", "consul.fsm.txn"}, s.Name) {
			fmt.Fprintf(w, "%s\t%d\t%.2f\t%.2f\n", s.Name, s.Count, s.Mean, s.Max)
		}
	}
	return w.Flush()
}

// profiling writes a CPU profile of this program to a file until stop is called, and then a
// profile of its allocations to another one. No file, no profiles.
func profiling(path string) (stop func() error, err error) {
	if path == "" {
		return func() error { return nil }, nil
	}
	file, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(file); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return func() error {
		pprof.StopCPUProfile()
		return errors.Join(file.Close(), writeAllocations(allocationsOf(path)))
	}, nil
}

// allocationsOf returns the file for the allocations that belong to a CPU profile.
func allocationsOf(profile string) string {
	return strings.TrimSuffix(profile, ".pprof") + "-allocs.pprof"
}

func writeAllocations(path string) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(pprof.Lookup("allocs").WriteTo(file, 0), file.Close())
}
