//go:build simulate

package simulate

import (
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"onejob/simulate/fakeconsul"
)

// broken returns the rules that a world with one machine has seen broken.
func broken(t *testing.T, do func(w *world, m *machine)) (rules []string) {
	t.Helper()
	synctest.Test(t, func(*testing.T) {
		runtime.Simulate(1)
		w := newWorld(Plan{Seed: 1, Replicas: 1}, nil)
		m := w.newMachine()
		time.Sleep(time.Second)
		do(w, m)
		for _, v := range w.violations {
			rules = append(rules, v.Rule)
		}
	})
	return rules
}

// long is more than any replica takes to notice what was taken from it.
const long = time.Minute

// What was done by hand, or to a clock, once excuses nothing for the rest of a run.
func TestExcusesEnd(t *testing.T) {
	// three work under a limit of two.
	three := func(w *world, m *machine) {
		for range limitSlots + 1 {
			w.handlers = append(w.handlers, &handler{m: m, job: &job{limited: true}, key: w.newID(), began: w.now()})
		}
		w.checkLimit()
	}
	// session lets a session end while a deadline lies ahead that was seen under it.
	session := func(w *world, m *machine, seen func()) {
		w.believe(m, "s", m.clockAt(w.now()).Add(10*time.Second))
		seen()
		w.sessionEnded("s", fakeconsul.Expired)
	}
	for name, c := range map[string]struct {
		rule string
		do   func(w *world, m *machine)
	}{
		"three in a limit": {"limit", three},
		"three in a limit, as a session is ended by hand": {"", func(w *world, m *machine) {
			w.rob("another")
			three(w, m)
		}},
		"three in a limit, long after a session was ended by hand": {"limit", func(w *world, m *machine) {
			w.rob("another")
			time.Sleep(long)
			three(w, m)
		}},
		"three in a limit, as a snapshot is restored": {"", func(w *world, m *machine) {
			w.restored = w.now()
			three(w, m)
		}},
		"three in a limit, long after a snapshot was restored": {"limit", func(w *world, m *machine) {
			w.restored = w.now()
			three(w, m)
			w.watch(long)
		}},
		"a session that ends too early": {"margin", func(w *world, m *machine) { session(w, m, func() {}) }},
		"a session that ends too early, as a pause has moved the deadline": {"", func(w *world, m *machine) {
			session(w, m, func() { m.behind = time.Second })
		}},
		"a session that ends too early, and has begun after a pause": {"margin", func(w *world, m *machine) {
			m.behind = time.Second
			session(w, m, func() {})
		}},
		"a session that ends too early, and has just gone on after a pause": {"", func(w *world, m *machine) {
			m.behind, m.resumed = time.Second, w.now()
			session(w, m, func() { time.Sleep(5 * time.Second) })
		}},
		"a session that ends too early, and was renewed before a pause that is over": {"", func(w *world, m *machine) {
			m.behind, m.resumed = time.Second, w.now()
			time.Sleep(3 * time.Second) // of the 14 s that a deadline is ahead of its request 10 are left: it was sent 1 s before the pause ended
			session(w, m, func() {})
		}},
		"a session that ends too early, and was renewed after a pause": {"margin", func(w *world, m *machine) {
			m.behind, m.resumed = time.Second, w.now()
			time.Sleep(6 * time.Second)
			session(w, m, func() {})
		}},
		"two inside, long after a failover and a key that was deleted": {"I2 two inside", func(w *world, m *machine) {
			w.failed, w.deleted = true, map[string]time.Duration{"k": w.now()}
			w.handlers = []*handler{{m: m, job: &job{}, key: "k", began: w.now()}, {m: m, job: &job{}, key: "k", began: w.now()}}
			w.checkHandlers()
			if len(w.violations) > 0 {
				t.Errorf("at once: %v", w.violations)
			}
			time.Sleep(long)
			w.checkHandlers()
		}},
	} {
		t.Run(name, func(t *testing.T) {
			got := broken(t, c.do)
			if len(got) > 1 || len(got) == 1 && got[0] != c.rule || len(got) == 0 && c.rule != "" {
				t.Errorf("broken are %v, want %q", got, c.rule)
			}
		})
	}
}
