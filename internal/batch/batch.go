// Package batch is group commit: what several callers want done at the same
// time is done in one round trip.
//
// A caller that finds nobody at work commits at once, alone; at low load that
// adds no delay. What arrives while a commit is under way waits and goes
// together in the next one. There is no timer and no goroutine: one of the
// waiting callers commits for all.
package batch

import "sync"

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
}

type waiter[T any] struct {
	value T
	turn  chan bool // receives true: lead the next commit; false: yours is done
}

// Do returns when a commit that carried v has returned.
func (g *Group[T]) Do(v T) {
	w := &waiter[T]{value: v}
	g.mu.Lock()
	if g.active < max(1, g.Parallel) {
		g.active++
		mates := g.take(g.Max - 1)
		g.mu.Unlock()
		g.lead(w, mates)
		return
	}
	w.turn = make(chan bool, 1)
	g.waiting = append(g.waiting, w)
	g.mu.Unlock()

	if lead := <-w.turn; lead {
		g.mu.Lock()
		mates := g.take(g.Max - 1)
		g.mu.Unlock()
		g.lead(w, mates)
	}
}

// lead commits for w and its mates, then hands the lead to who waits longest.
func (g *Group[T]) lead(w *waiter[T], mates []*waiter[T]) {
	values := make([]T, 0, 1+len(mates))
	values = append(values, w.value)
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
