package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"
	"time"

	"onejob/bench/riverjobs"
)

// plan is how much is measured.
type plan struct {
	Dir          string        `json:"-"`
	Out          string        `json:"-"`
	Subjects     string        `json:"contests,omitempty"`
	Rounds       int           `json:"rounds"`
	Warm         int           `json:"warm_up_tasks"`
	Tasks        int           `json:"tasks"`
	NaiveTasks   int           `json:"naive_tasks"`
	Shallow      int           `json:"waiting_rows_shallow"`
	Deep         int           `json:"waiting_rows_deep"`
	Vast         int           `json:"waiting_rows_vast"`
	Finished     int           `json:"finished_rows"`
	PickupTasks  int           `json:"pickup_tasks_per_round"`
	HerdFew      int           `json:"herd_few"`
	HerdMany     int           `json:"herd_many"`
	HerdTasks    int           `json:"herd_tasks_per_round"`
	HerdSettle   time.Duration `json:"herd_settle_ns"`
	EnqueueRows  int           `json:"enqueue_rows"`
	IdleSettle   time.Duration `json:"idle_settle_ns"`
	IdleWatch    time.Duration `json:"idle_watch_ns"`
	EnqueueTimes int           `json:"enqueue_rounds"`
	MaxWait      time.Duration `json:"patience_ns"`
}

func (p *plan) flags(flags *flag.FlagSet) {
	flags.StringVar(&p.Dir, "dir", "/var/tmp", "folder on a disk for the servers' data")
	flags.StringVar(&p.Out, "out", "results/latest.json", "file for the results")
	flags.StringVar(&p.Subjects, "only", "", "only these contests, such as onejob,river,pickup; idleness and enqueueing are left out then")
	flags.IntVar(&onejobConcurrency, "concurrency", onejobConcurrency, "worker.concurrency of onejob")
	flags.IntVar(&p.Rounds, "rounds", 5, "how often everything is measured")
	flags.IntVar(&p.Warm, "warm", 2_000, "tasks that warm a subject up, uncounted")
	flags.IntVar(&p.Tasks, "tasks", 120_000, "tasks that are counted in a round")
	flags.IntVar(&p.NaiveTasks, "naive-tasks", 3_000, "the same for the naive way")
	flags.IntVar(&p.Shallow, "shallow", 10_000, "waiting rows that many are compared with")
	flags.IntVar(&p.Deep, "deep", 1_000_000, "many waiting rows")
	flags.IntVar(&p.Vast, "vast", 10_000_000, "very many waiting rows")
	flags.IntVar(&p.Finished, "finished", 1_000_000, "finished rows beside")
	flags.IntVar(&p.PickupTasks, "pickup", 100, "tasks inserted one by one in a round")
	flags.IntVar(&p.HerdFew, "herd-few", 8, "replicas that many are compared with")
	flags.IntVar(&p.HerdMany, "herd-many", 80, "many replicas")
	flags.IntVar(&p.HerdTasks, "herd", 1_000, "tasks inserted one by one among few and among many replicas, in a round; 100 a second")
	flags.IntVar(&p.EnqueueRows, "enqueue", 100_000, "rows enqueued to see how fast that is")
	flags.DurationVar(&p.MaxWait, "patience", 5*time.Second, "how long to wait, before each measurement, for others on the machine to become calm")
	p.IdleSettle, p.IdleWatch, p.EnqueueTimes = 5*time.Second, 20*time.Second, 3
	p.HerdSettle = 15 * time.Second
}

// makeQuick makes everything small.
func (p *plan) makeQuick() {
	p.Rounds, p.Warm, p.Tasks, p.NaiveTasks = 2, 500, 4_000, 500
	p.Shallow, p.Deep, p.Vast, p.Finished = 1_000, 50_000, 100_000, 50_000
	p.HerdFew, p.HerdMany, p.HerdTasks, p.HerdSettle = 2, 8, 100, 2*time.Second
	p.PickupTasks, p.EnqueueRows, p.EnqueueTimes = 20, 10_000, 1
	p.IdleSettle, p.IdleWatch = 2*time.Second, 3*time.Second
}

// benchCases are what is measured in every round. The plain run of onejob is what
// most others are compared with.
func (p *plan) benchCases() []benchCase {
	all := []benchCase{
		{name: "onejob", subject: onejobSubject, replicas: 1, tasks: p.Tasks},
		{name: "river", subject: riverSubject, replicas: 1, tasks: p.Tasks},
		{name: "river-advisory", subject: riverAdvisorySubject, replicas: 1, tasks: p.Tasks},
		{name: "river-consul", subject: riverConsulSubject, replicas: 1, tasks: p.NaiveTasks},
		{name: "held-row", subject: heldRowSubject, replicas: 1, tasks: p.Tasks / 2},
		{name: "naive", subject: naiveSubject, replicas: 1, tasks: p.NaiveTasks},
		{name: "floor", subject: baselineSubject, replicas: 1, tasks: p.Tasks},
		{name: "shallow", subject: onejobSubject, replicas: 1, tasks: p.Tasks, template: "shallow", behind: p.Shallow},
		{name: "deep", subject: onejobSubject, replicas: 1, tasks: p.Tasks, template: "deep", behind: p.Deep},
		{name: "vast", subject: onejobSubject, replicas: 1, tasks: p.Tasks, template: "vast", behind: p.Vast},
		{name: "finished", subject: onejobSubject, replicas: 1, tasks: p.Tasks, template: "finished", before: p.Finished},
		{name: "replicas3", subject: onejobSubject, replicas: 3, tasks: p.Tasks},
		{name: "replicas8", subject: onejobSubject, replicas: 8, tasks: p.Tasks},
	}
	for i := range all {
		all[i].warm, all[i].maxWait = p.Warm, p.MaxWait
	}
	if p.Subjects == "" {
		return all
	}
	only := strings.Split(p.Subjects, ",")
	return slices.DeleteFunc(all, func(c benchCase) bool { return !slices.Contains(only, c.name) })
}

// asked reports whether a contest is measured that is no case.
func (p *plan) asked(contest string) bool {
	return p.Subjects == "" || slices.Contains(strings.Split(p.Subjects, ","), contest)
}

// measured is all that a run has found.
type measured struct {
	benchCases map[string][]outcome // by name, one for each round
	pickups    map[string][]pickupRound
	few, many  []herdRound
	enqueue    []figure
	idle       *idleness
	locks      map[string]lockCount // by case
}

// runBench measures all that the plan asks for, and writes it down.
func runBench(ctx context.Context, p plan) (err error) {
	began := time.Now()
	benchCases := p.benchCases()
	if len(benchCases) == 0 && !p.asked("pickup") && !p.asked("herd") {
		return fmt.Errorf("there are no contests named %q", p.Subjects)
	}
	say("building onejob, starting Postgres")
	g, err := prepareEnvironment(ctx, p.Dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.close()) }()
	m := &machine{}
	if err := m.look(ctx, g); err != nil {
		return err
	}
	if err := p.templates(ctx, g, benchCases); err != nil {
		return err
	}
	found := &measured{benchCases: map[string][]outcome{}, pickups: map[string][]pickupRound{}, locks: map[string]lockCount{}}
	for round := range p.Rounds {
		if err := p.round(ctx, g, found, round, benchCases); err != nil {
			return err
		}
	}
	if p.Subjects == "" {
		if err := p.rest(ctx, g, found, benchCases); err != nil {
			return err
		}
	}
	r := found.report()
	r["machine"], r["plan"], r["settings"] = m, p, settings()
	r["measured_at"], r["took_s"] = began.UTC().Format(time.RFC3339), int(time.Since(began).Seconds())
	printReport(r)
	return writeJSON(p.Out, r)
}

// templates makes the databases that the runs copy.
func (p *plan) templates(ctx context.Context, g *environment, benchCases []benchCase) error {
	fills := map[string]func(context.Context, string) error{
		onejobTable.template: migrateOnejob,
		riverTable.template:  riverjobs.Migrate,
		"shallow":            waiting(p.Warm + p.Tasks + p.Shallow),
		"deep":               waiting(p.Warm + p.Tasks + p.Deep),
		"vast":               waiting(p.Warm + p.Tasks + p.Vast),
		"finished":           finished(p.Finished),
	}
	made := map[string]bool{}
	make := func(name string) error {
		if made[name] {
			return nil
		}
		made[name] = true
		say("preparing database %s", name)
		return g.template(ctx, name, fills[name])
	}
	for _, name := range []string{onejobTable.template, riverTable.template} {
		if err := make(name); err != nil {
			return err
		}
	}
	for _, c := range benchCases {
		if c.template != "" {
			if err := make(c.template); err != nil {
				return err
			}
		}
	}
	return nil
}

// round measures every case once, and pick-up.
func (p *plan) round(ctx context.Context, g *environment, found *measured, round int, benchCases []benchCase) error {
	for _, c := range rotated(benchCases, round) {
		o, err := g.measure(ctx, c, nil)
		if err != nil {
			return err
		}
		found.benchCases[c.name] = append(found.benchCases[c.name], o)
		say("round %d of %d: %-9s %7.0f tasks/s, others used %2.0f %% of the machine", round+1, p.Rounds, c.name, o.Rate, 100*o.Others)
	}
	if p.asked("herd") {
		if err := p.herds(ctx, g, found, round); err != nil {
			return err
		}
	}
	if !p.asked("pickup") {
		return nil
	}
	for _, k := range rotated(pickups, round) {
		got, err := g.measurePickup(ctx, k, p.PickupTasks, p.MaxWait)
		if err != nil {
			return err
		}
		found.pickups[k.name] = append(found.pickups[k.name], got)
		say("round %d of %d: pick-up of %s %.1f ms, others used %2.0f %% of the machine", round+1, p.Rounds, k.name, median(got.delays), 100*got.others)
	}
	return nil
}

// herds measures what single tasks cost among few replicas and among many.
func (p *plan) herds(ctx context.Context, g *environment, found *measured, round int) error {
	for _, n := range rotated([]int{p.HerdFew, p.HerdMany}, round) {
		h, err := g.measureHerd(ctx, n, p)
		if err != nil {
			return err
		}
		if n == p.HerdFew {
			found.few = append(found.few, h)
		} else {
			found.many = append(found.many, h)
		}
		say("round %d of %d: %d replicas: %.0f us of Postgres for a single task, others used %2.0f %% of the machine", round+1, p.Rounds, n, h.PostgresUS, 100*h.Others)
	}
	return nil
}

// rest measures what needs no comparison.
func (p *plan) rest(ctx context.Context, g *environment, found *measured, benchCases []benchCase) error {
	for _, c := range benchCases {
		if c.replicas == 1 {
			continue
		}
		// Apart, as counting takes time: the ratios are not made of these runs.
		var locks lockCounter
		if _, err := g.measure(ctx, c, &locks); err != nil {
			return err
		}
		found.locks[c.name] = locks.lockCount
		say("%s: %d of %d locks refused", c.name, locks.Refused, locks.Attempts)
	}
	for range p.EnqueueTimes {
		rate, err := g.measureEnqueue(ctx, p.EnqueueRows, p.MaxWait)
		if err != nil {
			return err
		}
		found.enqueue = append(found.enqueue, rate)
	}
	say("watching an idle replica for %v", p.IdleWatch)
	idle, err := g.measureIdle(ctx, p.IdleSettle, p.IdleWatch, p.MaxWait)
	found.idle = &idle
	return err
}
