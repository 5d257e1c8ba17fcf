// Package batch is group commit: what several callers want done at the same
// time is done in one round trip.
//
// A caller that finds nobody at work commits at once, alone; at low load that
// adds no delay. What arrives while a commit is under way waits and goes
// together in the next one. There is no timer and no goroutine: one of the
// waiting callers commits for all.
package batch

import (
	"runtime"
	"sync"
)

// A Group commits values of type T together. Set its fields before the first
// call of Do, and do not copy it afterwards.
type Group[T any] struct {
	// Commit does what the values ask for, and stores each one's answer in it:
	// T is a pointer, or holds one. It must return in bounded time.
	Commit func([]T)

	// Max is the most values that one commit may carry.
	Max int

	// Parallel is how many commits may be under way at once; zero means one.
	Parallel int

	mu      sync.Mutex
	active  int
	waiting []*waiter[T]
	unused  sync.Pool // of *waiter[T]
}

type waiter[T any] struct {
	value T
	turn  chan bool // receives true: lead the next commit; false: yours is done
}

// Do returns when a commit that carried v has returned.
func (g *Group[T]) Do(v T) {
	g.mu.Lock()
	if g.active < max(1, g.Parallel) {
		g.active++
		g.mu.Unlock()
		g.lead(v)
		return
	}
	w, _ := g.unused.Get().(*waiter[T])
	if w == nil {
		w = &waiter[T]{turn: make(chan bool, 1)}
	}
	w.value = v
	g.waiting = append(g.waiting, w)
	g.mu.Unlock()

	lead := <-w.turn
	*w = waiter[T]{turn: w.turn} // nobody else has it any more
	g.unused.Put(w)
	if lead {
		g.lead(v)
	}
}

// lead commits v and what waits, then hands the lead to the caller that has waited
// longest.
//
// It lets the goroutines that are ready to run go first: those that were started
// or woken together with this one are about to arrive, and alone it costs
// nothing.
func (g *Group[T]) lead(v T) {
	runtime.Gosched()
	g.mu.Lock()
	mates := g.take(g.Max - 1)
	g.mu.Unlock()
	values := make([]T, 0, 1+len(mates))
	values = append(values, v)
	for _, m := range mates {
		values = append(values, m.value)
	}
	// A Commit that panics takes its own caller down, not those who wait.
	defer func() {
		for _, m := range mates {
			m.turn <- false
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		if next := g.take(1); len(next) == 1 {
			next[0].turn <- true
		} else {
			g.active--
		}
	}()
	g.Commit(values)
}

// take removes up to n waiters. g.mu is held.
func (g *Group[T]) take(n int) []*waiter[T] {
	n = min(n, len(g.waiting))
	taken := g.waiting[:n:n]
	g.waiting = g.waiting[n:]
	if len(g.waiting) == 0 {
		g.waiting = nil
	}
	return taken
}
