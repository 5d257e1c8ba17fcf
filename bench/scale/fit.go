package scale

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
)

// requests is what the model takes from measurements of single things. Requests:
// BenchmarkRequests, less what an item costs; that is with nothing else to do, which
// is the upper end. Empty and Limits: BenchmarkEmptyClaim. Disk: what
// BenchmarkSchedules says of one commit, less its processor time; ten times more or
// less of it moves no processor time by more than a tenth.
var requests = Costs{Replica: Cost{Request: 170}, Postgres: Cost{Request: 365}, Consul: Cost{Request: 385}, Empty: 120, Limits: 45, Disk: 300}

// cpus is how many processors the bench's machine has.
const cpus = 2

// Measured is what the file of results says of a contest: medians of its rounds.
type Measured struct {
	Rate, Replica, Postgres, Consul, Entries float64
}

// Read returns what a file of results says, by contest.
func Read(path string) (map[string]Measured, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var file struct {
		Machine struct{ Cores int }
		Rounds  map[string][]struct {
			Rate float64            `json:"tasks_per_second"`
			CPU  map[string]float64 `json:"cpu_us_per_task"`
			KV   float64            `json:"consul_writes_per_task"`
		} `json:"rounds"`
	}
	if err := json.Unmarshal(text, &file); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if file.Machine.Cores != cpus {
		return nil, fmt.Errorf("%s is of a machine with %d processors; the figures by hand are of one with %d", path, file.Machine.Cores, cpus)
	}
	all := map[string]Measured{}
	for _, name := range []string{"onejob", "replicas3", "replicas8"} {
		rounds := file.Rounds[name]
		if len(rounds) == 0 {
			return nil, fmt.Errorf("%s has no rounds of %s", path, name)
		}
		median := func(figure func(i int) float64) float64 {
			list := make([]float64, len(rounds))
			for i := range rounds {
				list[i] = figure(i)
			}
			slices.Sort(list)
			return (list[len(list)/2] + list[(len(list)-1)/2]) / 2
		}
		all[name] = Measured{
			Rate:     median(func(i int) float64 { return rounds[i].Rate }),
			Replica:  median(func(i int) float64 { return rounds[i].CPU["subject"] }),
			Postgres: median(func(i int) float64 { return rounds[i].CPU["postgres"] }),
			Consul:   median(func(i int) float64 { return rounds[i].CPU["consul"] }),
			Entries:  median(func(i int) float64 { return rounds[i].KV }),
		}
	}
	return all, nil
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
func Fit(one Measured) Fitted {
	f := Fitted{requests, cpus, 1}
	for range 12 {
		f.Replica.Request, f.Postgres.Request, f.Consul.Request = f.Alone*requests.Replica.Request, f.Alone*requests.Postgres.Request, f.Alone*requests.Consul.Request
		r := f.bench(1, 2_000)
		f.Replica.Item = max(0, f.Replica.Item+(one.Replica-r.Replica)/4)
		f.Postgres.Item = max(0, f.Postgres.Item+(one.Postgres-r.Postgres)/2)
		f.Consul.Item = max(0, f.Consul.Item+(one.Consul-r.Consul)/2)
		f.Machine = min(cpus, f.Machine*one.Rate/r.Rate)
		f.Alone *= math.Sqrt(byHand[128] / f.bench(1, 128).All())
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

// byHand are figures that are not in the file of results: µs of processor time a
// task, by "go run . -only onejob -concurrency N" in bench, noted in one sitting.
var byHand = map[int]float64{128: 186, 256: 150, 512: 116, 4000: 96}

// Check returns all points.
func (f Fitted) Check(measured map[string]Measured) (points []Point) {
	for _, s := range []struct {
		name     string
		replicas int
	}{{"onejob", 1}, {"replicas3", 3}, {"replicas8", 8}} {
		m, r := measured[s.name], f.bench(s.replicas, 2_000)
		setup, fitted := fmt.Sprintf("%d x 2,000", s.replicas), s.replicas == 1
		points = append(points,
			Point{setup, "us/task, replicas", fitted, m.Replica, r.Replica},
			Point{setup, "us/task, Postgres", fitted, m.Postgres, r.Postgres},
			Point{setup, "us/task, Consul", fitted, m.Consul, r.Consul},
			Point{setup, allProcesses, fitted, m.Replica + m.Postgres + m.Consul, r.All()},
			Point{setup, rate, fitted, m.Rate, r.Rate},
			Point{setup, entries, false, m.Entries, r.Entries})
	}
	for n, all := range byHand {
		points = append(points, Point{fmt.Sprintf("1 x %5d", n), allProcesses, n == 128, all, f.bench(1, n).All()})
	}
	slices.SortStableFunc(points[18:], func(a, b Point) int { return cmp.Compare(a.Setup, b.Setup) })
	return points
}
