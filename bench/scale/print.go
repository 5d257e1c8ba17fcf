package scale

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// Print checks the model against what was measured, and tells what it says of
// sizes that nobody has measured: fitted to the first machine.
func Print(out io.Writer) error {
	benches, err := Benches()
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	line := func(format string, a ...any) { fmt.Fprintf(w, format+"\n", a...) }

	for _, b := range benches {
		f := Fit(b)
		line("The model against what was measured on %s:\n", b.Name)
		line("replicas x concurrency\tfigure\tmeasured\tmodel\tdeviation")
		for _, p := range f.Check(b) {
			deviation := fmt.Sprintf("%+.0f %%", 100*p.Deviation())
			if p.Fitted {
				deviation = "fitted"
			}
			line("%s\t%s\t%.4g\t%.4g\t%s", p.Setup, p.Figure, p.Measured, p.Model, deviation)
		}
		line("\nµs of a request and of an item in it: replica %.0f + %.1f, Postgres %.0f + %.1f, Consul %.0f + %.1f; %.2f of the 2 processors in use\n",
			f.Replica.Request, f.Replica.Item, f.Postgres.Request, f.Postgres.Item, f.Consul.Request, f.Consul.Item, f.Machine)
	}

	f := Fit(benches[0])
	line("On machines of their own (%s), as many tasks as they do:\n", assumed)
	line("replicas\tconcurrency\ttasks/s\tin a claim\tin an ending\tin a transaction\tbusy: claims' turn\tConsul's applying\tPostgres\tConsul\treplica\tlongest wait for the turn, ms")
	for _, s := range [][2]int{{1, 32}, {1, 256}, {1, 2000}, {8, 32}, {8, 256}, {8, 2000}, {80, 32}, {80, 256}, {800, 32}} {
		r := Run(f.Costs, f.apart(s[0], s[1], 0))
		line("%d\t%d\t%.0f\t%.0f\t%.0f\t%.0f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.0f", s[0], s[1], r.Rate, r.Claim, r.Completion, 2/r.Entries,
			r.Turn, r.Apply, r.PostgresBusy, r.KVBusy, r.ReplicaBusy, r.TurnWait)
	}
	line("\nThe same machines, so many INSERTs of one task a second, concurrency 32:\n")
	line("replicas\ttasks/s\tdone\tin a claim\tempty claims a task\tµs a task: replicas\tPostgres\tConsul\tlongest wait for the turn, ms\tlast task done after, ms")
	for _, s := range [][2]int{{8, 100}, {8, 1000}, {8, 10_000}, {80, 100}, {80, 1000}, {80, 10_000}, {800, 100}, {800, 1000}} {
		r := Run(f.Costs, f.apart(s[0], 32, float64(s[1])))
		line("%d\t%d\t%.0f\t%.1f\t%.1f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f", s[0], s[1], r.Rate, r.Claim, r.EmptyClaims, r.Replica, r.Postgres, r.Consul, r.TurnWait, r.Behind)
	}
	line("\nWhat is used up by %g replicas with a concurrency of %g, %g tasks/s, %g full limits, a limit of %g slots, %g schedules of every minute, and by more of each.", ordinary.Replicas,
		ordinary.Concurrency, ordinary.Rate, ordinary.Limits, ordinary.Slots, ordinary.Schedules)
	line("Above 100 %% it breaks. Arithmetic, from figures of the benchmarks in this package:\n")
	line("more\tof\t1 x\t10 x\t100 x\tbreaks at")
	for _, g := range Grow() {
		line("%s\t%s\t%.2g %%\t%.3g %%\t%.4g %%\t%.2g x", g.Direction, g.Demand, 100*g.Shares[0], 100*g.Shares[1], 100*g.Shares[2], g.Breaks)
	}
	return w.Flush()
}

const assumed = "Postgres and Consul's leader 8 processors each, a replica 2, 0.3 ms between them, 1 ms for a commit"

// apart returns a setup on machines of their own. Without arrivals there are
// enough tasks for all slots several times over; with them, five seconds of tasks.
func (f *Fitted) apart(replicas, concurrency int, arrivals float64) Setup {
	f.Disk = 1_000
	s := Setup{Replicas: replicas, Concurrency: concurrency, Tasks: max(40_000, 6*replicas*concurrency),
		ReplicaCPU: 2, PostgresCPU: postgresCores, KVCPU: 8, RoundTrip: 300, Arrivals: arrivals}
	if arrivals > 0 {
		s.Tasks = int(5 * arrivals)
	}
	return s
}
