//go:build simulate

package simulate

import (
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
)

// A Result is what came of a plan.
type Result struct {
	Violations []Violation
	Simulated  time.Duration
	Digest     uint64 // of everything that was noted: the same for the same plan
	Requests   int
	Begun      int // handlers
}

var runs int

// Run runs a plan. The trace may be nil. There must be no garbage collection but its own.
func Run(t *testing.T, plan Plan, trace io.Writer) (result Result) {
	if runs++; runs%4 == 0 {
		runtime.GC() // it is done when this returns
	}
	defer func() {
		// What has not stopped is a violation already, and blocks the end of the bubble.
		if p := recover(); p != nil && len(result.Violations) == 0 {
			panic(p)
		}
	}()
	synctest.Test(t, func(*testing.T) {
		runtime.Simulate(plan.Seed)
		uuid.SetRand(newReader(plan.Seed))
		w := newWorld(plan, trace)
		w.run()
		result = Result{w.violations, w.now(), w.digest.Sum64(), w.requests, w.handovers}
	})
	return result
}

// run runs the plan.
func (w *world) run() {
	for range w.plan.Replicas {
		m := w.newMachine()
		w.replicas = append(w.replicas, w.start(m))
	}
	if w.plan.Mode == Workers {
		w.addTasks(w.plan.Tasks, w.plan.Length)
	}
	for i := range w.plan.Faults {
		f := w.plan.Faults[i]
		time.AfterFunc(f.At, func() {
			if !w.settled {
				w.begin(&f)
			}
		})
	}
	w.watch(w.plan.Length)

	// Nothing is broken any more. Everybody gets what they want.
	for len(w.active) > 0 {
		w.end(w.active[0])
	}
	for _, m := range w.machines {
		w.comeBack(m)
	}
	w.settled = true
	w.note("everything is well again")
	if w.plan.Mode == Workers {
		w.settleWorkers()
	} else {
		w.settleLeases()
	}

	// All stop.
	w.over = true
	for _, r := range w.replicas {
		r.stop()
	}
	w.watch(15 * time.Second)
	for _, r := range w.replicas {
		select {
		case <-r.done:
		default:
			w.violate("stop", "replica %d has not stopped within 15 s", r.m.id)
		}
		r.kill()
	}
	time.Sleep(time.Minute) // for what is left of processes that died
	for _, r := range w.started {
		select {
		case <-r.done:
		default: // nothing has answered it since
			w.violate("stop", "process %d of replica %d, which died, has not stopped a minute after it was told to", r.life, r.m.id)
		}
	}
	w.checkSteps()
}

func (w *world) settleLeases() {
	cfg := w.timing()
	w.watch(2*cfg.SessionTTL + cfg.CheckTTL)
	for _, r := range w.replicas {
		r.begun = 0
	}
	w.watch(10 * time.Second)
	for _, r := range w.replicas {
		if r.begun == 0 {
			w.violate("progress", "replica %d has locked nothing for 10 s, long after the last fault", r.m.id)
		}
	}
	if w.plan.Sweep {
		w.sweep()
	}
}

// settleWorkers waits until all tasks have ended.
func (w *world) settleWorkers() {
	for until := w.now() + 4*time.Minute; w.now() < until; {
		w.watch(time.Second)
		w.adopt()
		if !w.db.Any(open) {
			break
		}
	}
	w.checkTasks()
	if w.plan.Sweep {
		w.sweep()
	}
}

// watch lets time pass, and looks.
func (w *world) watch(d time.Duration) {
	for until := w.now() + d; w.now() < until; {
		time.Sleep(100 * time.Millisecond)
		w.check()
		w.checkHandlers()
		w.checkLimit()
		w.checkAbandoned()
		w.checkBusy()
	}
}

// sweep waits until leaked locks must have been found, and looks for locks, and slots of limits,
// that nobody works under.
func (w *world) sweep() {
	w.watch(20*w.timing().Verify + 20*time.Second)
	lost := map[string]time.Duration{}
	for until := w.now() + 5*time.Second; w.now() < until; {
		w.watch(100 * time.Millisecond)
		for _, key := range slices.Concat(w.consul.Below(prefix+"/tasks/"), w.consul.Below(prefix+"/running/"), w.consul.Below(prefix+"/limits/")) {
			session, value := w.consul.Held(key)
			if session == "" && !strings.HasPrefix(key, prefix+"/tasks/") {
				continue // a name stays, for other tasks, and so does the .lock of a limit
			}
			id := key + session + string(value)
			if _, known := lost[id]; !known {
				lost[id] = w.now()
			}
			if w.now()-lost[id] > 3*time.Second {
				w.violate("leak", "%s is held by session %s as %s, and nobody works under it", strings.TrimPrefix(key, prefix), session, value)
				return
			}
		}
	}
}

// newReader returns random bytes that follow from a seed.
func newReader(seed uint64) io.Reader { return &reader{seed} }

type reader struct{ state uint64 }

func (r *reader) Read(b []byte) (int, error) {
	for i := range b {
		r.state = r.state*6364136223846793005 + 1442695040888963407
		b[i] = byte(r.state >> 56)
	}
	return len(b), nil
}

// Minimise returns a plan that breaks the same rule with fewer faults.
func Minimise(t *testing.T, plan Plan, rule string) Plan {
	fails := func(p Plan) bool {
		for _, v := range Run(t, p, nil).Violations {
			if v.Rule == rule {
				return true
			}
		}
		return false
	}
	for smaller := true; smaller; {
		smaller = false
		for i := range plan.Faults {
			if p := plan.without(i); fails(p) {
				plan, smaller = p, true
				break
			}
		}
	}
	for _, change := range []func(*Plan){
		func(p *Plan) { p.Workers = 1 },
		func(p *Plan) { p.Keys = 1 },
		func(p *Plan) { p.Replicas = 2 },
		func(p *Plan) { p.Sweep = false },
	} {
		p := plan
		change(&p)
		ok := true
		for _, f := range p.Faults {
			ok = ok && (f.Who < p.Replicas || f.Kind == DeleteByHand) && (f.Who < p.Keys || f.Kind != DeleteByHand)
		}
		if ok && fails(p) {
			plan = p
		}
	}
	return plan
}

// report describes a plan that has failed.
func report(t *testing.T, result Result, plan Plan) string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d fails: %v\n", plan.Seed, result.Violations[0])
	small := Minimise(t, plan, result.Violations[0].Rule)
	again := Run(t, small, nil)
	fmt.Fprintf(&b, "minimised, it fails as well:\n%v", small)
	for _, v := range again.Violations {
		fmt.Fprintf(&b, "  -> %v\n", v)
	}
	return b.String()
}
