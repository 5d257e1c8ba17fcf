package worker

import (
	"context"
	"hash/fnv"
	"math"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"onejob/boottime"
	"onejob/internal/retry"
	"onejob/tasks"
)

// All replicas hear that tasks were enqueued. If each of them claimed, a task would cost as
// many claims as there are replicas. So one claims at once, chosen by the list of replicas and
// by what the notification says, in favour of those with many free slots. A second one looks
// soon after: the first may be dead, or full by now. The others look within a second, once for
// all that they heard meanwhile. A replica that leaves tasks because it is full wakes all.
const (
	secondClaims = 10 * time.Millisecond
	othersClaim  = time.Second
	wakeEvery    = 100 * time.Millisecond // at most, by one replica

	// A replica that has nothing to do polls at least once in pollAnyway, whichever others do.
	pollAnyway = 5 * time.Second
)

// wakeups are claims that will be triggered, for what was heard.
type wakeups struct {
	second, other atomic.Bool // one is to come

	hears  atomic.Bool  // notifications come
	idle   atomic.Int64 // the boottime.Instant of the last claim, if that left nothing; or zero
	polled atomic.Bool  // the next claim is one that others leave to this replica
}

// poll triggers a claim at the time of a poll. All replicas that poll then would find the same:
// what has come due without a notification. So two of them claim, others each time, as if they
// had heard of a task. A replica claims in any case if its last claim left something or is long
// ago, or if it does not hear when it is needed.
func (w *Worker) poll(at time.Time) {
	session := w.cfg.Locks.Session()
	place := w.members.place(session, "poll "+strconv.FormatInt(at.Unix(), 10))
	w.wakeups.polled.Store(place < 2 && session != "")
	idle := boottime.Instant(w.wakeups.idle.Load())
	switch {
	case place == 0, idle == 0, !w.wakeups.hears.Load(), boottime.Now().Sub(idle) >= pollAnyway:
		w.claimAgain()
	case place == 1:
		w.claimLater(&w.wakeups.second, secondClaims)
	}
}

// looked notes that a claim has ended, whether it left nothing that is due, and whether tasks
// with a limit were due before and are now. If others leave the claim to this replica, it wakes
// them for what is left: all that know of a task with a limit look at every poll.
func (w *Worker) looked(nothing, limited, stillLimited bool) {
	idle := boottime.Instant(0)
	if nothing && !stillLimited {
		idle = boottime.Now()
	}
	w.wakeups.idle.Store(int64(idle))
	if w.wakeups.polled.Swap(false) && (!nothing || stillLimited && !limited) {
		notify(w.full)
	}
}

// heard triggers a claim for tasks that were enqueued, at once if it is this replica's turn.
func (w *Worker) heard(word string) {
	place := 0
	if word != "" {
		place = w.members.place(w.cfg.Locks.Session(), word)
	}
	switch place {
	case 0:
		w.claimSoon()
	case 1:
		w.claimLater(&w.wakeups.second, secondClaims)
	default:
		w.claimLater(&w.wakeups.other, othersClaim)
	}
}

// claimSoon triggers a claim, also of tasks with a limit, because there is news.
func (w *Worker) claimSoon() {
	w.limits.stir()
	w.claimAgain()
}

// claimAgain triggers a claim, also of tasks with a limit, without news.
func (w *Worker) claimAgain() {
	w.limits.soon()
	notify(w.wake)
}

// left is called when an attempt has ended: its slot is free, and its lock key. It triggers a
// claim if something may wait for one of them: not for the slot if the last claim left nothing
// that is due, and notifications tell of what has come after that. Otherwise a replica that is
// busy, and keeps up, would claim in vain after each attempt.
func (w *Worker) left(awaited bool) {
	w.limits.attempted(awaited)
	if awaited || w.wakeups.idle.Load() == 0 || !w.wakeups.hears.Load() {
		notify(w.wake)
	}
}

// claimLater triggers a claim after a while, unless one is to come.
func (w *Worker) claimLater(pending *atomic.Bool, after time.Duration) {
	if !pending.Swap(true) {
		time.AfterFunc(after, func() {
			pending.Store(false)
			w.claimSoon()
		})
	}
}

// wakeOthers wakes the other replicas when this one has left tasks because it is full, and
// one of them has free slots, until ctx ends.
func (w *Worker) wakeOthers(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.full:
		}
		if w.members.room(w.cfg.Locks.Session()) {
			_ = w.cfg.Store.WakeAll(ctx) // their next poll finds the tasks as well
		}
		retry.Pause(ctx, wakeEvery)
	}
}

// place returns how many replicas claim before this one, for a word that all of them hear. It
// is zero if this replica is not on the list: then others do not count on it, and it cannot
// tell whether they are there.
func (m *members) place(session, word string) (place int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	me, known := m.seen[session]
	if !known || me.State != tasks.ReplicaWorking {
		return 0
	}
	mine := me.draw(word)
	for s, r := range m.seen {
		if s != session && r.claims(me) && (r.draw(word) > mine || r.draw(word) == mine && s < session) {
			place++
		}
	}
	return place
}

// room reports whether another replica has free slots, for some of what this one claims.
func (m *members) room(session string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	me, known := m.seen[session]
	for s, r := range m.seen {
		if s != session && r.live() && r.Running < r.Concurrency && (!known || r.shares(me)) {
			return true
		}
	}
	return false
}

// live reports whether a replica claims, as far as is known.
func (r member) live() bool {
	return r.State == tasks.ReplicaWorking && boottime.Now().Sub(r.since) < doubt
}

// claims reports whether a replica claims what another one claims.
func (r member) claims(of member) bool {
	return r.live() && slices.Equal(r.Kinds, of.Kinds) && slices.Equal(r.Queues, of.Queues)
}

// shares reports whether a replica claims some of what another one claims.
func (r member) shares(of member) bool {
	meet := func(a, b []string) bool {
		return slices.ContainsFunc(a, func(name string) bool { return slices.Contains(b, name) })
	}
	return meet(r.Kinds, of.Kinds) && (len(r.Queues) == 0 || len(of.Queues) == 0 || meet(r.Queues, of.Queues))
}

// draw is a number that all replicas know of each other, for each word another one; among
// replicas, the highest one is as likely to be each one's as it has free slots (weighted
// rendezvous hashing). Without any it is zero.
func (r member) draw(word string) float64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(r.Session))
	_, _ = h.Write([]byte{0})
	_, _ = h.Write([]byte(word))
	x := h.Sum64() // its lower bits say little: words differ at their ends
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	x ^= x >> 33
	return float64(max(0, r.Concurrency-r.Running)) / -math.Log((float64(x>>11)+0.5)/(1<<53))
}
