package cli

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"onejob/internal/plaintext"
	"onejob/internal/tracing"
	"onejob/lock"
	"onejob/lock/consul"
	"onejob/lock/rabbitmq"
	"onejob/store"
	"onejob/tasks"
	"onejob/worker"
)

func checkCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "check",
		Short: "Check the configuration, the connections, the rights and the schema",
		Long: `Check the configuration, Postgres, Consul, RabbitMQ if it keeps limits, the rights in
Postgres and Consul, the schema, the statements of the sql kind, schedules, and foreign
keys to onejob.tasks. Every problem comes with what to do. The exit code is 1 if a check
fails; warnings do not count.

With --leases, ask every living replica for its metrics instead, and compare how long
its process stood still, and how long heartbeats and renewals of its session took, with
what its leases allow.`,
		Args: cobra.NoArgs,
	}
	path := configFlag(c)
	leases := c.Flags().Bool("leases", false, "compare stalls and heartbeats of all replicas with what leases allow")
	output := outputFlag(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		cfg, err := loadConfig(*path, os.Environ())
		if err != nil {
			return err
		}
		out := c.OutOrStdout()
		if *leases {
			if *output == formatJSON {
				return usage(errors.New("--leases has no JSON; leave out --output"))
			}
			return checkLeases(c.Context(), cfg, out)
		}
		var all findings
		if *output != formatJSON {
			all.print = func(f finding) {
				fmt.Fprintf(out, "%-4s  %s: %s\n", f.Status.label(), f.Check, strings.ReplaceAll(plaintext.Lines(f.Text), "\n", "\n      "))
			}
		}
		all.ok("configuration", "no problems")
		if wanted, err := tracing.Wanted(os.Getenv); wanted || err != nil {
			all.report("traces", err, "wanted by the OTEL_ variables; whether somebody takes them is not checked")
		}
		checkPostgres(c.Context(), cfg, checkTimeout, &all)
		if checkConsul(c.Context(), cfg, &all) {
			checkCluster(c.Context(), cfg, &all)
		}
		if cfg.Limits.Backend == "rabbitmq" {
			checkRabbitMQ(c.Context(), cfg, &all)
		}
		if *output == formatJSON {
			if err := printJSON(out, all.list); err != nil {
				return err
			}
		}
		if failed := all.count(checkFailed); failed > 0 {
			return fmt.Errorf("%s failed", plaintext.Plural(failed, "check"))
		}
		if *output != formatJSON {
			fmt.Fprintln(out, "ready to serve")
		}
		return nil
	}
	return c
}

// A finding is what came of one check.
type finding struct {
	Check  string      `json:"check"`
	Status checkStatus `json:"status"`
	Text   string      `json:"text"`
}

type checkStatus string

const (
	checkOK     checkStatus = "ok"
	checkWarns  checkStatus = "warn" // replicas can work
	checkFailed checkStatus = "fail"
)

// label makes failures stand out.
func (s checkStatus) label() string {
	if s == checkFailed {
		return "FAIL"
	}
	return string(s)
}

// findings is what was found so far.
type findings struct {
	list  []finding
	print func(finding) // may be nil
}

func (f *findings) add(check string, status checkStatus, text string) {
	f.list = append(f.list, finding{check, status, text})
	if f.print != nil {
		f.print(f.list[len(f.list)-1])
	}
}

func (f *findings) ok(check, text string)   { f.add(check, checkOK, text) }
func (f *findings) warn(check, text string) { f.add(check, checkWarns, text) }

// report adds a failure, or what is good if err is nil, and reports whether it is.
func (f *findings) report(check string, err error, good string) bool {
	if err != nil {
		f.add(check, checkFailed, strings.TrimPrefix(err.Error(), check+": "))
		return false
	}
	f.ok(check, good)
	return true
}

func (f *findings) count(status checkStatus) (n int) {
	for _, one := range f.list {
		if one.Status == status {
			n++
		}
	}
	return n
}

// snapshotAge is from when on a transaction that holds back vacuum is worth a
// warning. Ordinary ones take seconds.
const snapshotAge = 5 * time.Minute

// checkTimeout is how long a check may take. Each has its own, so that one that gets no answer does not
// make the others fail.
const checkTimeout = 10 * time.Second

func checkPostgres(parent context.Context, cfg Config, timeout time.Duration, all *findings) {
	ctx, cancel := context.WithTimeout(parent, timeout)
	defer func() { cancel() }()
	next := func() {
		cancel()
		ctx, cancel = context.WithTimeout(parent, timeout)
	}
	db, err := store.Open(cfg.storeConfig())
	if err != nil {
		all.report("postgres", err, "")
		return
	}
	defer db.Close()
	version, err := db.Version(ctx)
	if err != nil {
		err = fmt.Errorf("%w; check postgres.dsn (ONEJOB_POSTGRES_DSN), and that the server is running and admits this user", err)
	}
	server := tasks.Server{}
	if err == nil {
		server, err = db.Which(ctx)
	}
	if err == nil && server.Standby {
		err = fmt.Errorf("the server at %s is a standby; add target_session_attrs=read-write to postgres.dsn", server.Address)
	}
	if !all.report("postgres", err, fmt.Sprintf("version %s, %s", version, server)) {
		return
	}
	next()
	checkHosts(ctx, db, server, all)
	next()
	if err := db.CheckPool(ctx); err != nil {
		if db.Pooled() {
			err = fmt.Errorf("a connection pooler is in the way, and statements fail through it: %w; remove default_query_exec_mode from postgres.dsn", err)
		}
		all.report("connections", err, "")
	} else if db.Pooled() {
		all.ok("connections", "statements work through a connection pooler, unprepared")
	}
	next()
	if err := db.CheckEncoding(ctx); err != nil {
		all.warn("encoding", err.Error())
	}
	next()
	err = db.CheckSchema(ctx)
	if errors.Is(err, store.ErrSchema) && cfg.Postgres.Migrate {
		if v, verr := db.SchemaVersion(ctx); verr == nil && v.Have < v.Want {
			all.ok("schema", fmt.Sprintf("at version %d of %d; onejob serve will migrate it", v.Have, v.Want))
			return
		}
	}
	next()
	warnings, pathErr := db.CheckPath(ctx)
	if pathErr != nil {
		all.report("search_path", pathErr, "")
	}
	for _, w := range warnings {
		all.warn("search_path", w+"; statements of the sql kind that call a function without its schema could run a planted one")
	}
	schema := all.report("schema", err, "up to date")
	if schema {
		next()
		all.report("rights in postgres", db.CheckRights(ctx), "sufficient")
	}
	if cfg.Postgres.Listen {
		next()
		listening, stop := context.WithCancel(ctx)
		defer stop()
		heard := false
		err := db.Listen(listening, func(tasks.Signal, string) { heard = true; stop() })
		switch {
		case heard:
			all.ok("listen", "notifications arrive")
		case errors.Is(err, store.ErrDeaf):
			all.warn("listen", fmt.Sprintf("%v; tasks wait for the next poll (%s): set postgres.listen_dsn to an address that bypasses the pooler, or postgres.listen to false", store.ErrDeaf, cfg.Worker.Poll))
		default:
			all.report("listen", err, "")
		}
	}
	next()
	checkSnapshots(ctx, db, snapshotAge, all)
	next()
	checkStatements(ctx, cfg, db, all)
	if !schema {
		return
	}
	next()
	checkSchedules(ctx, db, all)
	next()
	checkReferences(ctx, db, all)
	next()
	switch found, total, err := db.Overlaps(ctx, 1); {
	case err != nil:
		all.report("overlaps", err, "")
	case total > 0:
		o := found[0]
		all.warn("overlaps", fmt.Sprintf("%d pairs of attempts on the same lock key ran at the same time; the latest are tasks %d (on %s) and %d (on %s): see onejob.overlaps", total, o.Task, o.Replica, o.OtherTask, o.OtherReplica))
	default:
		all.ok("overlaps", "none in the history")
	}
}

// checkStatements lets Postgres parse the statements of the sql kind, and counts their parameters.
func checkStatements(ctx context.Context, cfg Config, db *store.Store, all *findings) {
	statements := cfg.Kinds.SQL.Statements
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(statements)) {
		if err := db.CheckStatement(ctx, statements[name].SQL, len(statements[name].Params)); err != nil {
			if pg := (*pgconn.PgError)(nil); errors.As(err, &pg) {
				err = errors.New(pg.Message)
			}
			errs = append(errs, fmt.Errorf("kinds.sql.statements: statement %q: %w", name, err))
		}
	}
	if len(statements) > 0 {
		all.report("statements", errors.Join(errs...), "Postgres accepts "+plaintext.Plural(len(statements), "statement")+" of kinds.sql")
	}
}

// checkSchedules warns of schedules that have an error.
func checkSchedules(ctx context.Context, db *store.Store, all *findings) {
	list, err := db.Schedules(ctx)
	if err != nil {
		all.report("schedules", err, "")
		return
	}
	wrong := 0
	for _, s := range list {
		if s.Enabled && s.Error != nil {
			wrong++
			all.warn("schedules", fmt.Sprintf("schedule %q: %s", s.Name, *s.Error))
		}
	}
	if len(list) > 0 && wrong == 0 {
		all.ok("schedules", plaintext.Plural(len(list), "schedule")+", none with an error")
	}
}

// checkReferences warns of foreign keys that keep tasks from being deleted, or let Postgres
// read a whole table for each of them.
func checkReferences(ctx context.Context, db *store.Store, all *findings) {
	list, err := db.References(ctx)
	if err != nil {
		all.report("foreign keys", err, "")
		return
	}
	for _, r := range list {
		if r.Keeps {
			all.warn("foreign keys", fmt.Sprintf("%s refers to onejob.tasks without ON DELETE, so tasks that it refers to are never deleted: add ON DELETE SET NULL or ON DELETE CASCADE", r))
		}
		if !r.Indexed {
			all.warn("foreign keys", fmt.Sprintf("no index begins with %s, so Postgres reads the whole table for each task that is deleted: add one", r))
		}
	}
	if len(list) > 0 && !slices.ContainsFunc(list, func(r store.Reference) bool { return r.Keeps || !r.Indexed }) {
		all.ok("foreign keys", plaintext.Plural(len(list), "foreign key")+" to onejob.tasks, each with ON DELETE and an index")
	}
}

// checkHosts reports each host of a DSN that names several: after a failover the one in
// use should be the only primary, and the others should be its standbys.
func checkHosts(ctx context.Context, db *store.Store, used tasks.Server, all *findings) {
	hosts := db.Hosts(ctx)
	if len(hosts) < 2 {
		return
	}
	for _, h := range hosts {
		what := "host " + h.Name
		switch {
		case h.Err != nil:
			all.warn(what, h.Err.Error())
		case h.Server.System != used.System && used.System != tasks.UnknownSystem && h.Server.System != tasks.UnknownSystem:
			all.warn(what, fmt.Sprintf("a different database: its system identifier is %s, that of the one in use is %s", h.Server.System, used.System))
		case h.Server.Started.Equal(used.Started):
			all.ok(what, "in use: "+h.Server.String())
		case h.Server.Standby:
			all.ok(what, "a standby")
		case h.Server.Timeline < used.Timeline:
			all.warn(what, fmt.Sprintf("an old primary that is still running, %s: stop it and rebuild it as a standby; writes to it are lost", h.Server))
		default:
			all.warn(what, fmt.Sprintf("also a primary, %s: stop one of the two", h.Server))
		}
	}
}

// checkSnapshots warns of transactions that hold back vacuum. They are no failure:
// replicas continue, but get slower.
func checkSnapshots(ctx context.Context, db *store.Store, longerThan time.Duration, all *findings) {
	held, err := db.HeldSnapshots(ctx, longerThan)
	if err != nil {
		all.warn("vacuum", err.Error())
		return
	}
	seen, err := db.SeesAllBackends(ctx)
	others := ""
	if err == nil && !seen {
		others = "; this role cannot see other users' transactions: GRANT pg_read_all_stats to it"
	}
	if len(held) == 0 {
		all.ok("vacuum", fmt.Sprintf("nothing older than %v holds it back%s", longerThan, others))
		return
	}
	text := held[0].String() + ", holds back vacuum, so claims get slower"
	if len(held) > 1 {
		text += fmt.Sprintf("; so do %d more", len(held)-1)
	}
	all.warn("vacuum", text+"; end it if it is not needed"+others)
}

// checkConsul starts a session, locks a key and releases it, as a replica does.
func checkConsul(ctx context.Context, cfg Config, all *findings) (usable bool) {
	lockConfig := cfg.consulConfig()
	lockConfig.Replica.Name += " (check)"
	locks, err := consul.New(lockConfig)
	if err != nil {
		all.report("consul", err, "")
		return false
	}
	defer background(ctx, func(ctx context.Context) error { return locks.Run(ctx, nil) })()

	ready, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	if !all.report("consul", locks.Ready(ready), "sessions work at "+lockConfig.Client.Address) {
		return false
	}
	lease, err := locks.Acquire(ctx, lock.Request{Session: locks.Session(), Key: fmt.Sprintf(".check-%d-%d", os.Getpid(), time.Now().UnixNano()), Value: []byte(`{"check":true}`)})
	if err == nil {
		err = lease.Release(ctx)
	}
	all.report("lock", err, "keys below "+cfg.Consul.Prefix+" can be locked and released")
	return true
}

// checkRabbitMQ connects to RabbitMQ, as a replica does that keeps its limits there.
func checkRabbitMQ(ctx context.Context, cfg Config, all *findings) {
	limits, err := rabbitmq.New(cfg.rabbitmqConfig())
	if err != nil {
		all.report("rabbitmq", err, "")
		return
	}
	defer background(ctx, limits.Run)()
	ready, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	if err := limits.Ready(ready); err != nil {
		all.report("rabbitmq", fmt.Errorf("%w; check limits.rabbitmq_url (ONEJOB_LIMITS_RABBITMQ_URL), and that the server is running", err), "")
		return
	}
	all.ok("rabbitmq", "connected")
}

// checkCluster checks that this Consul and this database belong to the same cluster.
func checkCluster(ctx context.Context, cfg Config, all *findings) {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	db, err := store.Open(cfg.storeConfig())
	if err != nil {
		return // reported before
	}
	defer db.Close()
	if db.CheckSchema(ctx) != nil {
		return // the same
	}
	ours, err := db.ClusterID(ctx)
	if err != nil {
		all.report("cluster", err, "")
		return
	}
	locks, err := consul.New(cfg.consulConfig())
	if err != nil {
		return
	}
	theirs, err := locks.ClusterID(ctx)
	if err == nil && theirs == "" {
		err = checkElsewhere(ctx, db, locks)
	}
	switch {
	case err != nil:
		all.report("cluster", err, "")
	case ours == "" || theirs == "":
		all.ok("cluster", "this Consul has not been used with this database yet; the first replica decides whether it can be")
	case ours != theirs:
		all.report("cluster", fmt.Errorf("this Consul belongs to cluster %.64q, the database to cluster %q; replicas will claim no tasks; check consul.address and consul.prefix", theirs, ours), "")
	default:
		all.ok("cluster", "Consul and Postgres belong to the same cluster ("+ours+")")
		all.report("database", worker.CheckDatabase(ctx, db, locks), "the one recorded in Consul, or its legitimate successor")
		checkBackend(ctx, cfg, db, all)
	}
}

// checkBackend warns of a replica that keeps limits elsewhere than the configuration says.
func checkBackend(ctx context.Context, cfg Config, db *store.Store, all *findings) {
	replicas, err := db.Replicas(ctx)
	if err != nil {
		all.report("limits", err, "")
		return
	}
	for _, r := range replicas {
		if !r.State.Final() && r.LimitsBackend != "" && r.LimitsBackend != cfg.Limits.Backend {
			all.warn("limits", fmt.Sprintf("replica %s keeps limits in %s, and limits.backend is %s; a replica takes no slots while one with another backend is alive that began before it", r.Name, r.LimitsBackend, cfg.Limits.Backend))
			return
		}
	}
}

// checkElsewhere returns an error if a replica of this database may be at work with
// another Consul: replicas adopt no Consul that does not know all of them.
func checkElsewhere(ctx context.Context, db *store.Store, locks *consul.Locker) error {
	replicas, err := db.Replicas(ctx)
	if err != nil {
		return err
	}
	present, err := locks.Present(ctx)
	if err != nil {
		return err
	}
	for _, r := range replicas {
		if !r.State.Final() && !slices.Contains(present, r.Session) {
			return fmt.Errorf("replica %s may be running and has no session in this Consul (%s); replicas will claim no tasks; "+
				"check consul.address and consul.prefix; if this Consul was wiped or rebuilt, and that replica is dead, run onejob adopt-consul", r.Name, r.Session)
		}
	}
	return nil
}
