package worker

import (
	"context"
	"hash/fnv"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"onejob/boottime"
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
)

// wakeups are claims that will be triggered, for what was heard.
type wakeups struct {
	second, other atomic.Bool // one is to come
}

// heard triggers a claim for tasks that were enqueued, at once if it is this replica's turn.
func (w *Worker) heard(word string) {
	place := 0
	if word != "" {
		place = w.members.place(w.cfg.Locks.Session(), word)
	}
	later := func(pending *atomic.Bool, after time.Duration) {
		if !pending.Swap(true) {
			time.AfterFunc(after, func() {
				pending.Store(false)
				w.claimSoon()
			})
		}
	}
	switch place {
	case 0:
		w.claimSoon()
	case 1:
		later(&w.wakeups.second, secondClaims)
	default:
		later(&w.wakeups.other, othersClaim)
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
		sleep(ctx, wakeEvery)
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

// room reports whether another replica has free slots.
func (m *members) room(session string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for s, r := range m.seen {
		if s != session && r.live() && r.Running < r.Concurrency {
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
