// Package scale is a model of how onejob's work travels in groups, for sizes that
// nobody has measured. It lets replicas claim, lock, end and release no-op tasks,
// with the same groups, turns and bounds as packages worker, store, lock/consul and
// internal/batch have, on processors whose time they share. What a request and an
// item in it cost is fitted to some of the figures in results/latest.json; the
// others are there to see whether the model is any good.
//
// What it does not know: sizes of payloads and tables, garbage collection,
// vacuum, caches, a processor that is slower for being shared, and a claim that
// goes without its turn because it has waited for 100 ms. See docs/operate/sizing.md.
package scale

import "math/rand/v2"

// A Cost is processor time in µs: of a request, and of each item in it.
type Cost struct{ Request, Item float64 }

func (c Cost) of(n int) float64 { return c.Request + float64(n)*c.Item }

// Costs is what the parts of a task cost. A task is an item of two requests to
// Postgres, a claim and a statement of completions, and of two to Consul, a
// transaction of locks and one of releases; the replica has its own share in all
// four.
type Costs struct {
	Replica, Postgres, Consul Cost

	// Empty is a claim that finds nothing, and Limits the question for due
	// limits that a replica asks when it is woken: µs of Postgres' processor time.
	Empty, Limits float64

	// Disk is the µs that a commit in Postgres, or of Consul's log, waits.
	Disk float64
}

// applied is the share of Consul's processor time that its leader spends applying
// one transaction after the other: a profile, see docs/why/performance.md.
const applied = 0.43

// The bounds in the code.
const (
	maxClaim   = 512 // worker
	maxEndings = 512 // store
	maxBatch   = 128 // lock/consul
	parallel   = 2   // transactions of locks at once, and of releases
)

// A Setup is how many work on what. The zero value of a number of processors means
// that they are on the machine that all share.
type Setup struct {
	Replicas, Concurrency int
	Tasks                 int // how many there are

	// Arrivals are tasks a second, at random moments, each by an INSERT of its
	// own that wakes all replicas. Zero means that all are due from the beginning.
	Arrivals float64

	Machine                        float64 // processors that are shared
	ReplicaCPU, PostgresCPU, KVCPU float64 // processors of each replica, of Postgres and of Consul's leader

	RoundTrip float64 // µs, between machines

	Seed uint64 // the same seed, the same result
}

// A Result is what a run gave.
type Result struct {
	Rate                      float64 // tasks a second
	Replica, Postgres, Consul float64 // µs of processor time a task
	Entries                   float64 // of Consul's Raft log a task
	Claim, Completion         float64 // items in one statement, on average
	EmptyClaims               float64 // a task
	TurnWait                  float64 // ms, the longest wait for the claims' turn
	Behind                    float64 // ms that the last task was done after it had come

	// Shares of the time in which something was busy. What is near 1 is what
	// holds the others up.
	Turn, Apply                       float64 // the claims' turn, and Consul's applying
	ReplicaBusy, PostgresBusy, KVBusy float64 // processors
}

// All is the processor time of a task.
func (r Result) All() float64 { return r.Replica + r.Postgres + r.Consul }

type model struct {
	*clock
	Costs
	Setup
	random       *rand.Rand
	postgres, kv *cores
	turn, apply  *turns

	requeuedClaims, done                  int
	entries, claims, empty, completions   int
	lastCame, longestTurn                 float64
	usedReplica, usedPostgres, usedConsul float64
}

type replica struct {
	*model
	cores           *cores
	room            int
	woken, claiming bool
	asked           bool // for due limits, since an INSERT woke us
	locks           group
	completions     group
	releases        group
}

// Run lets a setup do its tasks.
func Run(c Costs, s Setup) Result {
	m := &model{clock: &clock{}, Costs: c, Setup: s, requeuedClaims: s.Tasks, random: rand.New(rand.NewPCG(1, s.Seed))}
	if s.Arrivals > 0 {
		m.requeuedClaims = 0
	}
	machine := &cores{clock: m.clock, n: s.Machine}
	own := func(n float64) *cores {
		if n == 0 {
			return machine
		}
		return &cores{clock: m.clock, n: n}
	}
	m.postgres, m.kv = own(s.PostgresCPU), own(s.KVCPU)
	m.turn, m.apply = &turns{clock: m.clock}, &turns{clock: m.clock}
	replicas := make([]*replica, s.Replicas)
	for i := range replicas {
		r := &replica{model: m, cores: own(s.ReplicaCPU), room: s.Concurrency}
		r.locks = group{clock: m.clock, most: maxBatch, parallel: parallel, commit: r.transaction(func(n int) { r.completions.add(n) })}
		r.completions = group{clock: m.clock, most: maxEndings, parallel: 1, commit: r.end}
		r.releases = group{clock: m.clock, most: maxBatch, parallel: parallel, commit: r.transaction(r.leave)}
		replicas[i] = r
		r.wake()
	}
	if s.Arrivals > 0 {
		m.arrive(replicas, s.Tasks)
	}
	m.run(func() bool { return m.done == s.Tasks })

	took, tasks := m.now, float64(s.Tasks)
	r := Result{
		Rate:    tasks / took * 1e6,
		Replica: m.usedReplica / tasks, Postgres: m.usedPostgres / tasks, Consul: m.usedConsul / tasks,
		Entries: float64(m.entries) / tasks,
		Claim:   tasks / float64(m.claims), Completion: tasks / float64(m.completions),
		EmptyClaims: float64(m.empty) / tasks, TurnWait: m.longestTurn / 1000, Behind: (took - m.lastCame) / 1000,
		Turn: m.turn.busy / took, Apply: m.apply.busy / took,
	}
	busy := func(c *cores) float64 { return c.used / took / max(1e-9, c.n) }
	r.PostgresBusy, r.KVBusy = busy(m.postgres), busy(m.kv)
	for _, x := range replicas {
		r.ReplicaBusy = max(r.ReplicaBusy, busy(x.cores))
	}
	return r
}

// arrive lets another so many tasks come, one by one.
func (m *model) arrive(replicas []*replica, left int) {
	m.after(m.random.ExpFloat64()/m.Arrivals*1e6, func() {
		m.requeuedClaims++
		m.lastCame = m.now
		m.after(m.RoundTrip/2, func() {
			for _, r := range replicas {
				r.asked = false
				r.wake()
			}
		})
		if left > 1 {
			m.arrive(replicas, left-1)
		}
	})
}

// wake lets the replica claim as long as there is room and something is due.
func (r *replica) wake() {
	r.woken = true
	if r.claiming {
		return
	}
	r.claiming = true
	r.after(0, r.claim)
}

func (r *replica) claim() {
	n := min(maxClaim, r.room)
	switch {
	case r.Arrivals == 0 && r.requeuedClaims == 0, n == 0: // the end of the bench does not count; room wakes us
		r.claiming, r.woken = false, false
		return
	case !r.woken && r.asked:
		r.claiming = false
		return
	case !r.woken:
		r.asked = true
		r.usedPostgres += r.Limits
		r.after(r.RoundTrip/2, func() {
			r.postgres.do(r.Limits, func() { r.after(r.RoundTrip/2, r.claim) })
		})
		return
	}
	r.room -= n
	r.woken = false
	r.after(r.RoundTrip/2, func() {
		asked := r.now
		r.turn.take(func() {
			r.longestTurn = max(r.longestTurn, r.now-asked)
			r.take(n)
		})
	})
}

// take claims up to n tasks; it is our turn.
func (r *replica) take(n int) {
	got := min(n, r.requeuedClaims)
	r.requeuedClaims -= got
	work, wait := r.Postgres.of(got), r.Disk
	if got == 0 {
		r.empty++
		work, wait = r.Empty, 0
	} else {
		r.claims++
	}
	r.usedPostgres += work
	r.postgres.do(work, func() {
		r.after(wait, func() {
			r.turn.leave()
			r.after(r.RoundTrip/2, func() {
				r.woken = r.woken || got == n // all that were wanted: there may be more
				r.room += n - got
				r.after(0, r.claim)
				r.handle(got, r.locks.add)
			})
		})
	})
}

// handle is the replica's own work on the answer to a request of n items, which
// then go on. The goroutines that waited for it are run by several processors, and
// are not all ready when the first of them leads the next group: a random part of
// the items is quicker than the others.
func (r *replica) handle(n int, then func(n int)) {
	r.usedReplica += r.Replica.of(n)
	if n == 0 {
		r.cores.do(r.Replica.Request, func() {})
		return
	}
	quick := n
	if n > 1 {
		quick = 1 + r.random.IntN(n-1)
	}
	for _, part := range []int{quick, n - quick} {
		if part > 0 {
			r.cores.do(r.Replica.of(n)*float64(part)/float64(n), func() { then(part) })
		}
	}
}

// transaction returns a commit of n locks or releases, after which they go on.
func (r *replica) transaction(next func(n int)) func(n int, done func()) {
	return func(n int, done func()) {
		r.entries++
		work := r.Consul.of(n)
		r.usedConsul += work
		r.after(r.RoundTrip/2, func() {
			r.kv.do(work*(1-applied), func() {
				r.after(r.Disk, func() {
					r.apply.take(func() {
						r.kv.do(work*applied, func() {
							r.apply.leave()
							r.after(r.RoundTrip/2, func() {
								r.handle(n, next)
								done()
							})
						})
					})
				})
			})
		})
	}
}

// end writes n completions.
func (r *replica) end(n int, done func()) {
	r.model.completions++
	work := r.Postgres.of(n)
	r.usedPostgres += work
	r.after(r.RoundTrip/2, func() {
		r.postgres.do(work, func() {
			r.after(r.Disk+r.RoundTrip/2, func() {
				r.handle(n, r.releases.add)
				done()
			})
		})
	})
}

// leave returns the room of n tasks that are done.
func (r *replica) leave(n int) {
	r.done += n
	r.room += n
	r.wake()
}
