package scale

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
)

// requests is what the model takes from measurements of single things. Requests:
// BenchmarkRequests, less what an item costs; that is with nothing else to do, which
// is the upper end. Empty and Limits: BenchmarkEmptyClaim. Disk: what
// BenchmarkSchedules says of one commit, less its processor time; ten times more or
// less of it moves no processor time by more than a tenth.
var requests = Costs{Replica: Cost{Request: 170}, Postgres: Cost{Request: 365}, Consul: Cost{Request: 385}, Empty: 120, Limits: 45, Disk: 300}

// cpus is how many processors the machines of the bench have.
const cpus = 2

// measuredFile is what the model is held against: rounds of "go run ." in bench, as
// they stand in its file of results, and beside them the processor time of a task,
// in µs, that "go run . -only onejob -concurrency N" printed on the same machine,
// one after the other. Where the machine is not quiet, those are not comparable.
//
//go:embed measured.json
var measuredFile []byte

// A Bench is what one machine said.
type Bench struct {
	Name          string
	Quiet         bool // the machine kept its speed meanwhile
	Contests      map[string]Measured
	ByConcurrency map[int]float64 // µs of processor time of a task: one replica
}

// Measured is what was measured of a case: medians of its rounds.
type Measured struct {
	Rate, Replica, Postgres, Consul, Entries float64
}

// Benches returns what was measured, on one machine after the other.
func Benches() ([]Bench, error) {
	var file []struct {
		Name          string          `json:"name"`
		Measured      string          `json:"measured_at"`
		Code          string          `json:"onejob_commit"`
		Quiet         bool            `json:"quiet"`
		ByConcurrency map[int]float64 `json:"us_by_concurrency"`
		Rounds        map[string][]struct {
			Rate float64            `json:"tasks_per_second"`
			CPU  map[string]float64 `json:"cpu_us_per_task"`
			KV   float64            `json:"consul_writes_per_task"`
		} `json:"rounds"`
	}
	if err := json.Unmarshal(measuredFile, &file); err != nil {
		return nil, fmt.Errorf("measured.json: %w", err)
	}
	var benches []Bench
	for _, m := range file {
		b := Bench{fmt.Sprintf("%s, %s, at commit %s", m.Name, m.Measured[:10], m.Code), m.Quiet, map[string]Measured{}, m.ByConcurrency}
		for _, name := range []string{"onejob", "replicas3", "replicas8"} {
			rounds := m.Rounds[name]
			if len(rounds) == 0 {
				return nil, fmt.Errorf("measured.json: %s has no rounds of %s", m.Name, name)
			}
			median := func(figure func(i int) float64) float64 {
				list := make([]float64, len(rounds))
				for i := range rounds {
					list[i] = figure(i)
				}
				slices.Sort(list)
				return (list[len(list)/2] + list[(len(list)-1)/2]) / 2
			}
			b.Contests[name] = Measured{
				Rate:     median(func(i int) float64 { return rounds[i].Rate }),
				Replica:  median(func(i int) float64 { return rounds[i].CPU["subject"] }),
				Postgres: median(func(i int) float64 { return rounds[i].CPU["postgres"] }),
				Consul:   median(func(i int) float64 { return rounds[i].CPU["consul"] }),
				Entries:  median(func(i int) float64 { return rounds[i].KV }),
			}
		}
		benches = append(benches, b)
	}
	return benches, nil
}

// A Fitted model agrees with the bench in a few figures.
type Fitted struct {
	Costs

	// Machine is how many of the bench's 2 processors were in use: the rest of
	// them waited.
	Machine float64

	// Alone is what part of a lone request's cost a request has that comes while
	// others do.
	Alone float64
}

// Fit makes it agree with one replica that works on 2,000 tasks at once (what items
// cost with the processor time of each process, Machine with the rate) and with one
// that works on 128, whose groups are small: Alone.
func Fit(b Bench) Fitted {
	one := b.Contests["onejob"]
	f := Fitted{requests, cpus, 1}
	for range 12 {
		f.Replica.Request, f.Postgres.Request, f.Consul.Request = f.Alone*requests.Replica.Request, f.Alone*requests.Postgres.Request, f.Alone*requests.Consul.Request
		r := f.bench(1, 2_000)
		f.Replica.Item = max(0, f.Replica.Item+(one.Replica-r.Replica)/4)
		f.Postgres.Item = max(0, f.Postgres.Item+(one.Postgres-r.Postgres)/2)
		f.Consul.Item = max(0, f.Consul.Item+(one.Consul-r.Consul)/2)
		f.Machine = min(cpus, f.Machine*one.Rate/r.Rate)
		f.Alone *= math.Sqrt(b.ByConcurrency[128] / f.bench(1, 128).All())
	}
	return f
}

// bench runs what the bench does: 40,000 tasks, everything on one machine.
func (f Fitted) bench(replicas, concurrency int) Result {
	return Run(f.Costs, Setup{Replicas: replicas, Concurrency: concurrency, Tasks: 40_000, Machine: f.Machine})
}

// A Point is a measured figure and what the model says.
type Point struct {
	Setup, Figure   string
	Fitted          bool // the model was made to agree
	Measured, Model float64
}

// Deviation is by what part the model is above what was measured.
func (p Point) Deviation() float64 { return p.Model/p.Measured - 1 }

// Figures that a Point may be about, besides the processor time of one process.
const (
	allProcesses = "us/task, all"
	rate         = "tasks/s"
	entries      = "Raft entries/task"
)

// Check returns all points.
func (f Fitted) Check(b Bench) (points []Point) {
	for _, s := range []struct {
		name     string
		replicas int
	}{{"onejob", 1}, {"replicas3", 3}, {"replicas8", 8}} {
		m, r := b.Contests[s.name], f.bench(s.replicas, 2_000)
		setup, fitted := fmt.Sprintf("%d x 2,000", s.replicas), s.replicas == 1
		points = append(points,
			Point{setup, "us/task, replicas", fitted, m.Replica, r.Replica},
			Point{setup, "us/task, Postgres", fitted, m.Postgres, r.Postgres},
			Point{setup, "us/task, Consul", fitted, m.Consul, r.Consul},
			Point{setup, allProcesses, fitted, m.Replica + m.Postgres + m.Consul, r.All()},
			Point{setup, rate, fitted, m.Rate, r.Rate},
			Point{setup, entries, false, m.Entries, r.Entries})
	}
	for _, n := range slices.Sorted(maps.Keys(b.ByConcurrency)) {
		all := b.ByConcurrency[n]
		points = append(points, Point{fmt.Sprintf("1 x %5d", n), allProcesses, n == 128, all, f.bench(1, n).All()})
	}
	return points
}
