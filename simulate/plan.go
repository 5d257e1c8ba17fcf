//go:build simulate

package simulate

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// A Plan is what happens in one run of the world. All of it follows from the seed, and so does
// what nobody plans: how long a request takes, which key a replica wants next.
type Plan struct {
	Seed     uint64
	Mode     Mode
	Replicas int
	Tasks    int // with workers
	Keys     int
	Workers  int // of a replica
	Timing   int // which of the timings
	Length   time.Duration
	Sweep    bool // wait for leaked locks in the end
	Poison   Kind // what one of the tasks does to each process that works on it; empty for none
	Faults   []Fault
}

// Mode is what runs.
type Mode string

// The modes.
const (
	Leases  Mode = "leases"  // lock/consul alone
	Workers Mode = "workers" // worker above it
)

// A Fault is one thing that happens.
type Fault struct {
	Kind Kind
	At   time.Duration
	For  time.Duration // zero for what takes no time
	Who  int           // the replica, or the key
	Size time.Duration // how long requests are delayed at most
	Part int           // how many requests of a hundred
}

// Kind is a kind of fault.
type Kind string

// The kinds of faults.
const (
	Slow          Kind = "slow"           // requests and answers take up to Size
	SlowAnswers   Kind = "slow-answers"   // answers do
	DropRequests  Kind = "drop-requests"  // they are not heard
	DropAnswers   Kind = "drop-answers"   // they are heard, and nobody hears the answer
	Repeat        Kind = "repeat"         // they are heard twice, the second time up to Size later
	Cut           Kind = "cut"            // nothing comes through
	Refuse        Kind = "refuse"         // the agent restarts
	Doubt         Kind = "doubt"          // writes are answered with an error, applied or not
	Blind         Kind = "blind"          // the token may see no session
	Freeze        Kind = "freeze"         // the process stands still
	Pause         Kind = "pause"          // so does its machine's clock
	Crash         Kind = "crash"          // the process dies, and starts again after the time
	Restart       Kind = "restart"        // it stops in order, and starts again
	NoLeader      Kind = "no-leader"      // of Consul's servers
	Election      Kind = "election"       // a leader follows at once
	Restore       Kind = "restore"        // of a snapshot that is as old as the fault takes
	DestroyByHand Kind = "destroy"        // the session of a replica
	DeleteByHand  Kind = "delete"         // a key
	DeleteReplica Kind = "delete-replica" // the key of a replica
	AgentForgets  Kind = "agent-forgets"  // somebody deregisters the service

	// With workers:
	HostLoss Kind = "host-loss"   // process and agent die, and start again after the time
	Buried   Kind = "buried"      // the process dies, and its supervisor makes that known
	Stranger Kind = "stranger"    // the replica is started again with another cluster's Consul
	PlantKey Kind = "plant-key"   // somebody writes the key of a replica that died
	CutDB    Kind = "cut-db"      // nothing comes through to Postgres
	CutBoth  Kind = "cut-both"    // nor to Consul
	SlowDB   Kind = "slow-db"     // statements and answers take up to Size
	DropDB   Kind = "drop-db"     // answers of Postgres are lost
	DBDown   Kind = "db-down"     // connections are refused
	DBStart  Kind = "db-restart"  // Postgres restarts
	Failover Kind = "db-failover" // a standby takes over that has what was there before the time
)

func (f Fault) String() string {
	s := fmt.Sprintf("%6.2fs %-14s %d", f.At.Seconds(), f.Kind, f.Who)
	if f.For > 0 {
		s += fmt.Sprintf(" for %.2fs", f.For.Seconds())
	}
	if f.Size > 0 {
		s += fmt.Sprintf(" up to %.2fs", f.Size.Seconds())
	}
	if f.Part > 0 {
		s += fmt.Sprintf(" %d%%", f.Part)
	}
	return s
}

func (p Plan) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d: %s: %d replicas, %d tasks, %d workers each, %d keys, timing %d, %v\n", p.Seed, p.Mode, p.Replicas, p.Tasks, p.Workers, p.Keys, p.Timing, p.Length)
	if p.Poison != "" {
		fmt.Fprintf(&b, "  a task brings a %s\n", p.Poison)
	}
	for _, f := range p.Faults {
		fmt.Fprintf(&b, "  %v\n", f)
	}
	return b.String()
}

// without returns the plan without one of its faults.
func (p Plan) without(i int) Plan {
	p.Faults = slices.Delete(slices.Clone(p.Faults), i, i+1)
	return p
}

// deck is how often a kind comes, in comparison with the others.
var deck = map[Kind]int{
	Slow: 8, SlowAnswers: 8, DropRequests: 6, DropAnswers: 6, Repeat: 5, Cut: 8, Refuse: 4, Doubt: 4, Blind: 2,
	Freeze: 8, Pause: 2, Crash: 4, Restart: 3, NoLeader: 3, Election: 3, Restore: 3,
	DestroyByHand: 4, DeleteByHand: 3, DeleteReplica: 2, AgentForgets: 2,
}

// more is what comes besides with workers.
var more = map[Kind]int{
	HostLoss: 4, Buried: 4, Stranger: 2, PlantKey: 3, CutDB: 5, CutBoth: 5, SlowDB: 8, DropDB: 6, DBDown: 3, DBStart: 2, Failover: 4, Restart: 6,
}

// NewPlan makes the plan of a seed.
func NewPlan(seed uint64) Plan {
	r := rand.New(rand.NewPCG(seed, 1))
	p := Plan{
		Seed:     seed,
		Replicas: 2 + r.IntN(3),
		Keys:     1 + r.IntN(4),
		Workers:  1 + r.IntN(2),
		Timing:   r.IntN(len(timings)),
		Length:   time.Duration(20+r.IntN(25)) * time.Second,
		Sweep:    r.IntN(6) == 0,
		Mode:     Leases,
	}
	if r.IntN(2) == 0 {
		p.Mode, p.Tasks = Workers, 4+r.IntN(25)
	}
	var kinds []Kind
	for kind, n := range deck {
		for range n {
			kinds = append(kinds, kind)
		}
	}
	for kind, n := range more {
		for range n {
			if p.Mode == Workers {
				kinds = append(kinds, kind)
			}
		}
	}
	slices.Sort(kinds)
	if r.IntN(3) == 0 { // one kind alone, or two
		some := []Kind{kinds[r.IntN(len(kinds))], kinds[r.IntN(len(kinds))]}
		kinds = some
	}
	// Faults come in storms, most of one storm on the same replica: what protects against one
	// of them is often another thing than what protects against both.
	var at time.Duration
	victim := 0
	for i := range 1 + r.IntN(9) {
		if i == 0 || r.IntN(3) == 0 {
			at, victim = between(r, time.Second, p.Length), r.IntN(p.Replicas)
		}
		f := Fault{Kind: kinds[r.IntN(len(kinds))], At: min(at+short(r, 8*time.Second), p.Length-time.Millisecond), Who: victim}
		if r.IntN(4) == 0 {
			f.Who = r.IntN(p.Replicas)
		}
		f.For = short(r, 14*time.Second)
		switch f.Kind {
		case Slow, SlowAnswers, Repeat:
			f.Size = short(r, 12*time.Second)
			f.Part = 20 + r.IntN(81)
		case DropRequests, DropAnswers, Doubt:
			f.Part = 20 + r.IntN(81)
		case SlowDB:
			f.Size = short(r, 8*time.Second)
			f.Part = 20 + r.IntN(81)
		case DropDB:
			f.Part = 20 + r.IntN(81)
		case CutDB, CutBoth, DBDown:
			f.For = short(r, 20*time.Second)
		case Failover:
			f.For = short(r, 6*time.Second)
		case Refuse:
			f.For = short(r, 12*time.Second)
		case NoLeader:
			f.For = short(r, 12*time.Second)
		case Freeze, Pause:
			f.For = short(r, 25*time.Second)
		case Election, DestroyByHand, DeleteReplica, AgentForgets, PlantKey, DBStart:
			f.For = 0
		case DeleteByHand:
			f.For, f.Who = 0, r.IntN(p.Keys)
		}
		p.Faults = append(p.Faults, f)
	}
	special := rand.New(rand.NewPCG(seed, 3))
	kind := special.IntN(12)
	switch {
	case p.Mode == Workers && kind == 0:
		p.quieten(special)
	case r.IntN(4) > 0:
		p.Faults = append(p.Faults, death(r, p)...)
	}
	switch {
	case p.Mode == Workers && kind == 1:
		p.Faults = append(p.Faults, vanish(special, p)...)
	case p.Mode == Workers && kind == 2:
		p.Faults = append(p.Faults, plant(special, p)...)
	case p.Mode == Workers && kind == 3:
		p.poison(special)
	}
	slices.SortStableFunc(p.Faults, func(a, b Fault) int { return int(a.At - b.At) })
	return p
}

// calmDelay is how long a statement, or its answer, takes at most in a calm plan.
const calmDelay = 200 * time.Millisecond

// quieten makes a plan calm: what a stop may leave behind nothing else excuses. Statements take
// so long that many stops meet one.
func (p *Plan) quieten(r *rand.Rand) {
	p.Faults = nil
	for who := range p.Replicas {
		p.Faults = append(p.Faults, Fault{Kind: SlowDB, Who: who, For: p.Length, Size: between(r, time.Millisecond, calmDelay-1), Part: 100})
	}
	for range 1 + r.IntN(9) {
		p.Faults = append(p.Faults, Fault{Kind: Restart, Who: r.IntN(p.Replicas), At: between(r, time.Second, p.Length), For: short(r, 5*time.Second)})
	}
}

// poison makes a plan in which a task brings down, or freezes, each process that works on it, long enough
// for that to happen as often as it may. In half of these plans nothing else happens.
func (p *Plan) poison(r *rand.Rand) {
	p.Poison, p.Length = []Kind{Crash, Freeze}[r.IntN(2)], 75*time.Second
	if r.IntN(2) == 0 {
		p.Faults = nil
	}
}

// calm reports whether all that happens are stops, and delays of milliseconds.
func (p *Plan) calm() bool {
	if p.Poison != "" {
		return false
	}
	for _, f := range p.Faults {
		switch {
		case f.Kind == Restart, f.Kind == Election:
		case f.Kind == SlowDB && f.Size < calmDelay:
		default:
			return false
		}
	}
	return true
}

// death disturbs a replica, and then keeps Consul from hearing of it for longer than a session
// lives.
func death(r *rand.Rand, p Plan) []Fault {
	before := []Kind{Slow, SlowAnswers, SlowAnswers, SlowAnswers, DropAnswers, Doubt, Repeat, Freeze, Pause}
	after := []Kind{Cut, Cut, DropRequests, Freeze}
	if p.Mode == Workers {
		before = append(before, SlowDB, DropDB)
		after = append(after, CutBoth, CutDB, HostLoss, Buried)
	}
	at, who := between(r, time.Second, p.Length/2), r.IntN(p.Replicas)
	lasts := between(r, time.Second, 6*time.Second)
	a := Fault{Kind: before[r.IntN(len(before))], At: at, For: lasts, Who: who, Part: 50 + r.IntN(51)}
	if r.IntN(6) == 0 { // while it creates its session
		at, a.At, a.Kind = 0, 0, SlowAnswers
	}
	switch a.Kind {
	case Slow, SlowAnswers, Repeat, SlowDB:
		a.Size = between(r, 100*time.Millisecond, 4*time.Second)
	}
	b := Fault{Kind: after[r.IntN(len(after))], At: at + lasts, For: between(r, 8*time.Second, 25*time.Second), Who: who}
	if b.Kind == DropRequests {
		b.Part = 100
	}
	return []Fault{a, b}
}

// vanish lets the key of a replica that lives vanish, again and again, while the others may see
// no session. It is slow to make the key anew.
func vanish(r *rand.Rand, p Plan) (all []Fault) {
	at, who, lasts := between(r, time.Second, p.Length/2), r.IntN(p.Replicas), between(r, 5*time.Second, 14*time.Second)
	all = append(all, Fault{Kind: SlowAnswers, Who: who, At: at, For: lasts, Size: between(r, 100*time.Millisecond, 3*time.Second), Part: 50 + r.IntN(51)})
	for other := range p.Replicas {
		if other != who {
			all = append(all, Fault{Kind: Blind, Who: other, At: at, For: lasts})
		}
	}
	for end := at + lasts; at < end; at += between(r, 100*time.Millisecond, 3*time.Second) {
		all = append(all, Fault{Kind: DeleteReplica, Who: who, At: at})
	}
	return all
}

// plant lets replicas die, and somebody copy their keys back.
func plant(r *rand.Rand, p Plan) (all []Fault) {
	for who := range p.Replicas - 1 {
		at := between(r, time.Second, p.Length-time.Second)
		all = append(all, Fault{Kind: Crash, Who: who, At: at, For: between(r, time.Second, 20*time.Second)},
			Fault{Kind: PlantKey, At: at + short(r, p.Length-at-time.Millisecond)})
	}
	return all
}

func between(r *rand.Rand, from, to time.Duration) time.Duration {
	return from + time.Duration(r.Int64N(int64(to-from)+1))
}

// short returns a time up to most, more often a short one.
func short(r *rand.Rand, most time.Duration) time.Duration {
	x := r.Float64()
	return 10*time.Millisecond + time.Duration(x*x*float64(most))
}
