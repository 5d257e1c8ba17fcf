package worker

import (
	"context"
	"maps"
	"slices"
	"sync"

	"onejob/tasks"
)

// running is what is under way: how much of the room is taken, and by what.
type running struct {
	mu     sync.Mutex
	taken  int
	bytes  int               // of payloads, held or reserved
	fences map[int64]int     // of all attempts, from claim to release, and the bytes of their payloads
	tasks  map[int64]handler // by fence, those whose handler runs
	ended  bool              // no handler may run on: a shutdown's grace is over
	why    error
	idle   chan struct{} // closed when nothing is under way; nil while nobody waits
}

type handler struct {
	attempt *tasks.Attempt
	cancel  context.CancelCauseFunc
}

// take takes room for up to n attempts, as long as no more than most is taken,
// and returns for how many.
func (r *running) take(n, most int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n = max(0, min(n, most-r.taken))
	r.taken += n
	return n
}

// leave returns room for n attempts.
func (r *running) leave(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.taken -= n; r.taken == 0 && r.idle != nil {
		close(r.idle)
		r.idle = nil
	}
}

// count returns how much room is taken.
func (r *running) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.taken
}

// attempts returns how many attempts are under way: less than the room that is taken
// while a claim or a wait for a slot keeps some.
func (r *running) attempts() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.fences)
}

// load returns how many attempts are under way, and the bytes of payloads.
func (r *running) load() (attempts, bytes int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.fences), r.bytes
}

// reserve reserves memory for payloads: up to n bytes, as long as no more than most
// is held, and nothing at all if that leaves less than least. It returns how much.
func (r *running) reserve(n, least, most int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n = min(n, most-r.bytes); n < least {
		return 0
	}
	r.bytes += n
	return n
}

// unreserve gives back what reserve returned. What was read meanwhile is counted by
// begin.
func (r *running) unreserve(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.bytes -= n
}

// start runs f as the attempt with this fence, in a goroutine that done waits
// for. The caller has taken room for it, which is given back before left is called, with
// what f has returned.
func (r *running) start(fence int64, bytes int, f func() bool, left func(bool)) {
	r.begin(fence, bytes)
	go func() {
		awaited := true
		defer func() { left(awaited) }()
		defer r.leave(1)
		defer r.end(fence)
		awaited = f()
	}()
}

// begin notes an attempt, and the bytes of its payload, until end. It is called
// before anybody can ask for it.
func (r *running) begin(fence int64, bytes int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fences[fence] = bytes
	r.bytes += bytes
}

func (r *running) end(fence int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.bytes -= r.fences[fence]
	delete(r.fences, fence)
}

// has reports whether the attempt with this fence is under way.
func (r *running) has(fence int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, is := r.fences[fence]
	return is
}

// known returns the fences of all attempts that are under way.
func (r *running) known() map[int64]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.fences)
}

// done returns a channel that is closed when nothing is under way. Nothing may
// be started after it was called.
func (r *running) done() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := make(chan struct{})
	if r.taken == 0 {
		close(c)
	} else {
		r.idle = c
	}
	return c
}

// enter makes a handler's context one that can be cancelled by the task's id, and its
// progress one that heartbeats carry, until exit is called. A task may have two handlers
// here for a while: one whose lease was lost and that ignores its context, and its successor.
func (r *running) enter(a *tasks.Attempt, cancel context.CancelCauseFunc) (exit func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		cancel(r.why)
	}
	r.tasks[a.Fence] = handler{a, cancel}
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.tasks, a.Fence)
	}
}

func (r *running) cancel(id int64, cause error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, h := range r.tasks {
		if h.attempt.ID == id {
			h.cancel(cause)
		}
	}
}

// cancelAll cancels all handlers, and those that begin from now on.
func (r *running) cancelAll(cause error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended, r.why = true, cause
	for _, h := range r.tasks {
		h.cancel(cause)
	}
}

// maxProgress is of how many handlers, the oldest, a heartbeat says how far they are. Leases
// depend on heartbeats, so they stay below 100 KB.
const maxProgress = 200

// progress returns what handlers have said of how far they are, by fence; empty if none has.
func (r *running) progress() map[int64]tasks.ProgressAt {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := map[int64]tasks.ProgressAt{}
	for fence, h := range r.tasks {
		p, said := h.attempt.Progress()
		if !said {
			continue
		}
		at := tasks.ProgressAt{Text: p.Text, At: h.attempt.StartedAt.Add(p.At.Sub(h.attempt.HeardAt)).UTC()}
		if p.Percent >= 0 {
			at.Percent = &p.Percent
		}
		all[fence] = at
	}
	if len(all) > maxProgress {
		fences := slices.Sorted(maps.Keys(all))
		for _, fence := range fences[maxProgress:] {
			delete(all, fence)
		}
	}
	return all
}
