package worker

import (
	"context"
	"maps"
	"slices"
	"sync"

	"onejob/lock"
	"onejob/tasks"
)

// running is what is under way: how much of the room is taken, and by what.
//
// Room is for handlers. An attempt whose handler has returned, and whose outcome or release is
// still on its way, takes none of it, so that the next task need not wait for Postgres and
// Consul. Where these are slow there is an end to that: all attempts together are twice as many
// as there is room, at most. Those that a row of theirs keeps waiting for long are not among them:
// they are parked, up to maxParked.
type running struct {
	mu       sync.Mutex
	taken    int                // of the room
	handled  int                // attempts that have given their room back
	parked   int                // attempts that have, and count no more
	bytes    int                // of payloads, held or reserved
	attempts map[int64]underWay // all, by fence, from claim to release
	tasks    map[int64]handler  // by fence, those whose handler runs
	ended    bool               // no handler may run on: a shutdown's grace is over
	why      error
	idle     chan struct{} // closed when nothing is under way; nil while nobody waits
}

// underWay is an attempt that has been claimed and whose lock is not released yet.
type underWay struct {
	bytes   int  // of its payload
	room    bool // it gives room back when it ends
	handled bool // it has given its room back
	parked  bool // and does not count

	// parks is not nil if its room is that of a slot of a limit: it is called when it is parked.
	parks func()

	lease lock.Lease // on the task; nil until there is one
}

// maxParked is how many attempts are parked at most: their outcomes are held.
const maxParked = 1024

type handler struct {
	task    *tasks.Task // as it was claimed; the attempt's is the handler's to write to
	attempt *tasks.Attempt
	cancel  context.CancelCauseFunc
}

func newRunning() running {
	return running{attempts: map[int64]underWay{}, tasks: map[int64]handler{}}
}

// free returns for how many attempts there is room if there is room for most in all.
func (r *running) free(most int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.freeLocked(most)
}

func (r *running) freeLocked(most int) int {
	free := most - r.taken
	if waiting := r.taken + r.handled - most; waiting > 0 { // most may be all that an int can be
		free = min(free, most-waiting)
	}
	return free
}

// take takes room for up to n attempts, if there is room for most in all, and returns for
// how many.
func (r *running) take(n, most int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n = max(0, min(n, r.freeLocked(most)))
	r.taken += n
	return n
}

// leave returns room for n attempts.
func (r *running) leave(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.taken -= n
	r.endLocked()
}

// count returns how many attempts are under way, and how much room is kept for more.
func (r *running) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.taken + r.handled + r.parked
}

// load returns how many attempts take room, if there is room for most in all, and the bytes of
// payloads. A claim, or a wait for a slot, that keeps room for attempts that there may be is not
// counted.
func (r *running) load(most int) (attempts, bytes int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.attempts) - r.parked - r.handled + max(0, r.handled-most), r.bytes
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
	r.note(fence, underWay{bytes: bytes, room: true})
	go func() {
		awaited := true
		defer func() { left(awaited) }()
		defer r.end(fence)
		awaited = f()
	}()
}

// begin notes an attempt, and the bytes of its payload, until end. It is called
// before anybody can ask for it. The room for it is the caller's to give back.
func (r *running) begin(fence int64, bytes int) { r.note(fence, underWay{bytes: bytes}) }

func (r *running) note(fence int64, a underWay) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.attempts[fence] = a
	r.bytes += a.bytes
}

// returned gives back the room of an attempt whose handler has returned. It reports false if
// that is its caller's to give back, or was given back already.
func (r *running) returned(fence int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	a := r.attempts[fence]
	if !a.room {
		return false
	}
	a.room, a.handled = false, true
	r.attempts[fence] = a
	r.taken--
	r.handled++
	return true
}

// underSlot says that the room of an attempt is that of a slot of a limit. parks is called when the
// attempt is parked, which gives that room back.
func (r *running) underSlot(fence int64, parks func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	a := r.attempts[fence]
	a.parks = parks
	r.attempts[fence] = a
}

// under says which lock an attempt has.
func (r *running) under(fence int64, lease lock.Lease) {
	r.mu.Lock()
	defer r.mu.Unlock()
	a := r.attempts[fence]
	a.lease = lease
	r.attempts[fence] = a
}

// leaseOf returns the lock of an attempt; nil if it has none.
func (r *running) leaseOf(fence int64) lock.Lease {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.attempts[fence].lease
}

// park lets an attempt whose handler does not run take no room and no memory, and count no more,
// however long its row keeps it waiting. It reports false if it is parked already, or cannot be.
// Its caller drops the payload.
func (r *running) park(fence int64) bool {
	r.mu.Lock()
	a := r.attempts[fence]
	if a.parked || !a.room && !a.handled && a.parks == nil || r.parked == maxParked {
		r.mu.Unlock()
		return false
	}
	if a.handled {
		r.handled--
	} else {
		r.taken--
	}
	r.bytes -= a.bytes
	a.bytes, a.room, a.handled, a.parked = 0, false, false, true
	r.attempts[fence] = a
	delete(r.tasks, fence) // which holds the payload as well
	r.parked++
	r.mu.Unlock()
	if a.parks != nil {
		a.parks()
	}
	return true
}

// end notes that the lock of an attempt is released.
func (r *running) end(fence int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	a := r.attempts[fence]
	delete(r.attempts, fence)
	r.bytes -= a.bytes
	if a.room {
		r.taken--
	}
	if a.handled {
		r.handled--
	}
	if a.parked {
		r.parked--
	}
	r.endLocked()
}

func (r *running) endLocked() {
	if r.taken+r.handled+r.parked == 0 && r.idle != nil {
		close(r.idle)
		r.idle = nil
	}
}

// has reports whether the attempt with this fence is under way.
func (r *running) has(fence int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, is := r.attempts[fence]
	return is
}

// known returns the fences of all attempts that are under way.
func (r *running) known() map[int64]underWay {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.attempts)
}

// done returns a channel that is closed when nothing is under way. Nothing may
// be started after it was called.
func (r *running) done() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := make(chan struct{})
	if r.taken+r.handled+r.parked == 0 {
		close(c)
	} else {
		r.idle = c
	}
	return c
}

// enter makes a handler's context one that can be cancelled by the task's id, and its
// progress one that heartbeats carry, until exit is called. A task may have two handlers
// here for a while: one whose lease was lost and that ignores its context, and its successor.
func (r *running) enter(t *tasks.Task, a *tasks.Attempt, cancel context.CancelCauseFunc) (exit func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		cancel(r.why)
	}
	r.tasks[t.Fence] = handler{t, a, cancel}
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.tasks, t.Fence)
	}
}

func (r *running) cancel(id int64, cause error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, h := range r.tasks {
		if h.task.ID == id {
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
		at := tasks.ProgressAt{Text: p.Text, At: h.task.StartedAt.Add(p.At.Sub(h.task.HeardAt)).UTC()}
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
