package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/hashicorp/consul/api"
	"github.com/jackc/pgx/v5"

	"onejob/chaos/checker"
	"onejob/chaos/harness"
	"onejob/internal/procfs"
	"onejob/internal/retry"
	"onejob/internal/testenv/processes"
)

// Whether anything leaks is seen from outside as well: by what the kernel, the
// database and Consul say of each replica while it works, and by what is left of
// its work when that is over.

// Uses are figures of what a process uses; what each is stands in useNames.
type uses [len(useNames)]float64

var useNames = [...]string{"rss_mb", "threads", "files", "children", "connections"}

// mayGrow is by how much each may be more at the end than near the beginning,
// for what comes and goes by chance. A leak of anything that is used for each
// task, or each second, is far above it after half an hour.
var mayGrow = uses{10, 8, 12, 6, 4}

// longEnough is for how long a run must go on for growth to mean something:
// before that, heaps and pools still find their size.
const longEnough = 10 * time.Minute

// look is what a replica's process used at one moment.
type look struct {
	at   time.Time
	pid  int
	uses uses
}

// growth is what one process used near the beginning, at the end, and at most.
type growth struct {
	Replica string             `json:"replica"` // its working process, or, as its name says, its supervisor
	First   map[string]float64 `json:"first"`   // medians of the second sixth of the run
	Last    map[string]float64 `json:"last"`    // medians of its last sixth
	Most    map[string]float64 `json:"most"`
}

// leaks looks for what grows and for what is left over.
type leaks struct {
	c        *cluster
	looks    map[string][]look // by the name of the replica, or that of its supervisor
	sessions int               // in Consul, before there was any work

	// Goroutines of an idle replica by its name, before there was any work and
	// after it. Who is asked for them dies of it, so they are only asked for when
	// there are no faults, in a run that is long enough.
	goroutines map[string][2]int
	found      []string
}

// startLeaks notes how things are before there is any work.
func startLeaks(ctx context.Context, c *cluster, countGoroutines bool) (*leaks, error) {
	l := &leaks{c: c, looks: map[string][]look{}}
	var err error
	if countGoroutines {
		l.goroutines = map[string][2]int{}
		retry.Pause(ctx, idleness)
		for _, r := range c.oneOfEach() {
			n, countErr := r.countGoroutines(ctx)
			l.goroutines[r.name] = [2]int{n}
			err = errors.Join(err, countErr)
		}
		if err := errors.Join(err, c.awaitReplicas(ctx)); err != nil {
			return nil, err
		}
		retry.Pause(ctx, idleness) // the dead ones' sessions end
	}
	l.sessions, err = c.countSessions(ctx)
	l.sessions += len(c.waiting) // each will have one
	return l, err
}

// idleness is how long nothing happens before goroutines and sessions are
// counted: longer than a session outlives its replica.
const idleness = 15 * time.Second

func supervisorOf(r *replica) string { return "the supervisor of " + r.name }

// watch looks at every replica every few seconds, until ctx ends.
func (l *leaks) watch(ctx context.Context) {
	for ctx.Err() == nil {
		connections := l.c.countConnections(ctx)
		for _, r := range l.c.replicas {
			proc := r.process()
			if !proc.Running() {
				continue
			}
			pid := proc.Worker()
			if u, err := usesOf(pid); err == nil {
				if r.pooler == nil { // or else they are the pooler's, under the name of who used them last
					u[4] = connections[r.name]
				}
				l.looks[r.name] = append(l.looks[r.name], look{time.Now(), pid, u})
			}
			supervisor := proc.Cmd.Process.Pid
			if u, err := usesOf(supervisor); err == nil && supervisor != pid {
				l.looks[supervisorOf(r)] = append(l.looks[supervisorOf(r)], look{time.Now(), supervisor, u})
			}
		}
		retry.Pause(ctx, 5*time.Second)
	}
}

// end looks at what is left when every task is over, and asks the same replicas
// as in the beginning for their goroutines.
func (l *leaks) end(ctx context.Context) error {
	// A session that nobody keeps alive any more goes with its keys, in time, and one for
	// slots is kept for a minute after the last slot.
	if err := harness.Eventually(ctx, 3*time.Minute, "nothing is left over", func() error { return l.leftOver(ctx) }); err != nil {
		l.found = append(l.found, err.Error())
	}
	if l.goroutines == nil {
		return ctx.Err()
	}
	retry.Pause(ctx, idleness)
	var err error
	for _, r := range l.c.oneOfEach() {
		n, countErr := r.countGoroutines(ctx)
		err = errors.Join(err, countErr)
		before := l.goroutines[r.name][0]
		l.goroutines[r.name] = [2]int{before, n}
		if n > before+10 {
			l.found = append(l.found, fmt.Sprintf("%s: %d goroutines before, %d after", r.name, before, n))
		}
	}
	return err
}

// leftOver returns an error for everything that is there though no task is.
func (l *leaks) leftOver(ctx context.Context) error {
	var errs []error
	q := new(api.QueryOptions).WithContext(ctx)
	kv := l.c.consul.Servers[0].Client().KV()
	for _, folder := range []string{"/tasks/", "/limits/", "/overflow/"} {
		keys, _, err := kv.Keys(consulPrefix+folder, "", q)
		keys = slices.DeleteFunc(keys, func(k string) bool { return strings.HasSuffix(k, "/.lock") })
		if err == nil && len(keys) > 0 {
			err = fmt.Errorf("%d keys in Consul, %s among them", len(keys), keys[0])
		}
		errs = append(errs, err)
	}
	names, _, err := kv.List(consulPrefix+"/running/", q) // they stay, unlocked
	names = slices.DeleteFunc(names, func(p *api.KVPair) bool { return p.Session == "" })
	if err == nil && len(names) > 0 {
		err = fmt.Errorf("%d names of tasks are locked in Consul, %s among them", len(names), names[0].Key)
	}
	errs = append(errs, err)
	sessions, err := l.c.countSessions(ctx)
	if err == nil && sessions > l.sessions {
		err = fmt.Errorf("%d sessions in Consul, %d before there was any work", sessions, l.sessions)
	}
	errs = append(errs, err)
	for _, r := range l.c.replicas {
		if proc := r.process(); proc.Running() {
			root, worker := proc.Cmd.Process.Pid, proc.Worker()
			below := slices.DeleteFunc(harness.Below(root), func(p procfs.Process) bool { return p.PID == root || p.PID == worker })
			if len(below) > 0 {
				errs = append(errs, fmt.Errorf("%s has %d processes below it, pid %d among them", r.name, len(below), below[0].PID))
			}
		}
	}
	if left := l.c.commands(); len(left) > 0 {
		errs = append(errs, fmt.Errorf("%d commands of tasks are there, pid %d among them", len(left), left[0]))
	}
	var transactions, locks int
	err = l.c.operator.QueryRow(ctx, `
SELECT (SELECT count(*) FROM pg_stat_activity
         WHERE application_name <> $1 AND backend_type = 'client backend' AND xact_start < now() - interval '2 seconds'),
       (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory')`, "chaos-operator").Scan(&transactions, &locks)
	if err == nil && transactions+locks > 0 {
		err = fmt.Errorf("%d transactions and %d advisory locks in Postgres", transactions, locks)
	}
	return errors.Join(append(errs, err)...)
}

// commands returns the commands of tasks that live, wherever they have got to.
func (c *cluster) commands() (pids []int) {
	all, _ := procfs.Processes()
	for _, p := range all {
		if p.Dead || exe(p.PID) != c.self {
			continue
		}
		args, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.PID))
		if words := strings.Split(string(args), "\x00"); len(words) > 1 && words[1] == partTask {
			pids = append(pids, p.PID)
		}
	}
	return pids
}

// checkAll returns what each process used that was not restarted, says what grew and what was left
// over, and of how many processes it was judged whether anything grew.
func (l *leaks) checkAll(long time.Duration) (all []growth, judged int, found []string) {
	found = append([]string{}, l.found...) // empty, and not null, in the report
	var names []string
	for _, r := range l.c.replicas {
		names = append(names, r.name, supervisorOf(r))
	}
	for _, name := range names {
		looks := l.looks[name]
		if len(looks) == 0 || looks[0].pid != looks[len(looks)-1].pid || looks[len(looks)-1].at.Sub(looks[0].at) < long*9/10 {
			continue
		}
		g := growth{name, map[string]float64{}, map[string]float64{}, map[string]float64{}}
		for i, use := range useNames {
			var values []float64
			for _, look := range looks {
				values = append(values, look.uses[i])
			}
			n := len(values)
			first, last := median(values[n/6:max(n/3, n/6+1)]), median(values[n*5/6:])
			g.First[use], g.Last[use], g.Most[use] = first, last, slices.Max(values)
			if long >= longEnough && last > first+mayGrow[i] {
				found = append(found, fmt.Sprintf("%s: %s grew from %.0f to %.0f", name, use, first, last))
			}
		}
		all = append(all, g)
	}
	if long >= longEnough {
		judged = len(all)
	}
	return all, judged, found
}

func median(values []float64) float64 {
	values = slices.Sorted(slices.Values(values))
	return values[len(values)/2]
}

// oneOfEach returns the first replica of each subject.
func (c *cluster) oneOfEach() (some []*replica) {
	for _, r := range c.replicas {
		if !slices.ContainsFunc(some, func(o *replica) bool { return o.subject == r.subject }) {
			some = append(some, r)
		}
	}
	return some
}

// countSessions counts all sessions in Consul.
func (c *cluster) countSessions(ctx context.Context) (int, error) {
	sessions, _, err := c.consul.Servers[0].Client().Session().List(new(api.QueryOptions).WithContext(ctx))
	return len(sessions), err
}

// countConnections counts the connections to Postgres by replica. When Postgres
// is away there are none.
func (c *cluster) countConnections(ctx context.Context) map[string]float64 {
	counts := map[string]float64{}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	var name string
	var n float64
	found, err := c.operator.Query(ctx, `SELECT application_name, count(*)::float8 FROM pg_stat_activity GROUP BY 1`)
	if err == nil {
		_, _ = pgx.ForEachRow(found, []any{&name, &n}, func() error { counts[name] = n; return nil })
	}
	return counts
}

// usesOf reads what the kernel tells of a process.
func usesOf(pid int) (u uses, err error) {
	var errs [2]error
	u[0], errs[0] = processes.Status(pid, "VmRSS")
	u[1], errs[1] = processes.Status(pid, "Threads")
	if err := errors.Join(errs[:]...); err != nil {
		return u, err
	}
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	u[2] = float64(len(files))
	u[3] = float64(len(procfs.Children(pid)))
	return u, err
}

// countGoroutines asks the replica, which is idle, for the stacks of all its
// goroutines, which ends it, and counts them. It is started again.
func (r *replica) countGoroutines(ctx context.Context) (int, error) {
	before, err := os.Stat(r.log())
	if err != nil {
		return 0, err
	}
	over, err := r.c.also(checker.Stacks, r.name)
	if err != nil {
		return 0, err
	}
	up := r.hold()
	letGo := func() error { return errors.Join(up(), over()) }
	proc := r.process()
	proc.Signal(syscall.SIGQUIT)
	select {
	case <-proc.Exited:
	case <-time.After(10 * time.Second):
		return 0, errors.Join(fmt.Errorf("%s does not end by SIGQUIT", r.name), letGo())
	case <-ctx.Done():
		return 0, errors.Join(ctx.Err(), letGo())
	}
	log, err := os.ReadFile(r.log())
	if err := errors.Join(err, letGo()); err != nil {
		return 0, err
	}
	n := strings.Count(string(log[before.Size():]), "\ngoroutine ")
	if n == 0 {
		return 0, fmt.Errorf("%s did not write its stacks", r.name)
	}
	return n, nil
}
