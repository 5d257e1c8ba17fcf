package scale

import (
	"cmp"
	"math"
	"slices"
)

// A Load is how much there is of everything that may grow.
type Load struct {
	Replicas    float64
	Concurrency float64 // tasks that run in each
	Rate        float64 // tasks a second, each by an INSERT of its own
	Limits      float64 // that are full while rows wait for them
	Slots       float64 // of one limit
	Schedules   float64 // all of them every minute
}

// ordinary is the load whose growth is asked about.
var ordinary = Load{Replicas: 8, Concurrency: 32, Rate: 100, Limits: 3, Slots: 3, Schedules: 100}

// directions are what grows, one at a time.
var directions = []struct {
	Name string
	Grow func(l *Load, times float64)
}{
	{"replicas", func(l *Load, times float64) { l.Replicas *= times }},
	{"tasks/s, one an INSERT", func(l *Load, times float64) { l.Rate *= times }},
	{"limits that are full", func(l *Load, times float64) { l.Limits *= times }},
	{"slots of one limit", func(l *Load, times float64) { l.Slots *= times }},
	{"schedules", func(l *Load, times float64) { l.Schedules *= times }},
}

// What is taken for granted of the machines, and what is a default.
const (
	postgresCores  = 8
	consulMemory   = 16e9 // bytes, of each server
	postgresDisk   = 1e12 // bytes
	retention      = 7 * 24 * 3600.0
	maxConnections = 100 - 3 // Postgres' default, less those of superusers
	poolAndListen  = 8 + 1   // postgres.max_conns and LISTEN
	agentConns     = 200     // http_max_conns_per_client of an agent, by address
	onTime         = 60.0    // seconds by which a due time may be late
)

// What the benchmarks of this package measured, on 2 processors.
const (
	sessionsRow  = 0.46e-6 // s of Postgres for each running row: what sessions hold tasks (BenchmarkRunning)
	heldRow      = 0.10e-6 // the same: which of them are mine
	dueTime      = 0.5e-3  // s, to make one due time (BenchmarkSchedules)
	scheduleRow  = 0.22e-6 // s, for each schedule that a leader looks at
	insertsLimit = 3_400.0 // single INSERTs a second that notify, of 8 clients (BenchmarkInserts)
	finishedRow  = 375.0   // bytes of a task that has ended, its attempt and their indexes (BenchmarkRows)
	deletion     = 3.6e-3  // s, to delete 1,000 of those
	rest         = 50e-3   // s, between two deletions: worker
	tombstone    = 1_500.0 // bytes of Consul's memory for a key that was locked and deleted (BenchmarkTombstones)
	tombstoneTTL = 15 * 60 // s, Consul
	reapEvery    = 30.0    // s, Consul, rounded up for each tombstone
	reapOne      = 0.87e-6 // s in which no lock is granted, for each tombstone there is: docs/why/performance.md, half an hour
	kept         = 6.0     // connections to its agent that a replica keeps, limits apart (BenchmarkFullLimits)
	semaphore    = 250.0   // slots of one limit that are granted in a second: docs/decisions/limits.md
)

// A Demand is something that a load uses up.
type Demand struct {
	Name  string
	Share func(l Load) float64 // of what there is; above 1 it breaks
}

// demands are what grows with something else than the processor time of tasks.
var demands = []Demand{
	{"Postgres: max_connections", func(l Load) float64 { return l.Replicas * poolAndListen / maxConnections }},
	{"Postgres: looks at running rows, 8 cores", func(l Load) float64 { // each replica's at all rows, every 10 and 5 s
		return l.Replicas * (sessionsRow/10 + heldRow/5) * l.Replicas * l.Concurrency / postgresCores
	}},
	{"Postgres: INSERTs that notify", func(l Load) float64 { return l.Rate / insertsLimit }},
	{"Postgres: disk for 7 days, 1 TB", func(l Load) float64 { return l.Rate * retention * finishedRow / postgresDisk }},
	{"leader: deleting", func(l Load) float64 { return l.Rate * (rest + deletion) / 1000 }},
	{"leader: a minute's due times in a minute", func(l Load) float64 { return l.Schedules * dueTime / onTime }},
	{"leader: looking at schedules", func(l Load) float64 { return l.Schedules * scheduleRow }},
	{"Consul: tombstones, 16 GB", func(l Load) float64 { return l.Rate * tombstoneTTL * tombstone / consulMemory }},
	{"Consul: removing tombstones", func(l Load) float64 { return l.Rate * (tombstoneTTL + reapEvery) * reapOne / reapEvery }},
	{"agent: connections of one address", func(l Load) float64 { return (kept + l.Limits) / agentConns }},
	{"Consul: slots of one limit that change hands", func(l Load) float64 { return l.Slots / semaphore }}, // each once a second
}

// A Growth is one demand that grows when something is multiplied.
type Growth struct {
	Direction, Demand string
	Shares            [3]float64 // of what there is, at 1, 10 and 100 times
	Breaks            float64    // at how many times the share comes to 1
}

// Grow returns what grows with what, and of each direction what breaks first, first.
func Grow() (list []Growth) {
	for _, d := range directions {
		begin := len(list)
		for _, demand := range demands {
			share := func(times float64) float64 {
				l := ordinary
				d.Grow(&l, times)
				return demand.Share(l)
			}
			g := Growth{Direction: d.Name, Demand: demand.Name, Shares: [3]float64{share(1), share(10), share(100)}}
			if g.Shares[2] == g.Shares[0] {
				continue
			}
			low, high := 1e-6, 1e9
			for range 200 {
				if g.Breaks = math.Sqrt(low * high); share(g.Breaks) < 1 {
					low = g.Breaks
				} else {
					high = g.Breaks
				}
			}
			list = append(list, g)
		}
		slices.SortFunc(list[begin:], func(a, b Growth) int { return cmp.Compare(a.Breaks, b.Breaks) })
	}
	return list
}
