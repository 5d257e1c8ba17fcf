package locktest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"onejob/boottime"
	"onejob/internal/retry"
	"onejob/lock"
)

// A History is what callers asked of a lock or a semaphore, and from when to when. The
// answers are right if there is a moment within each call at which it could have been
// carried out, one after the other, by something that follows the rules: porcupine looks
// for those moments. What has an unknown end, because its caller died, may be carried
// out at any time after its beginning, or never.
//
// A lock is a semaphore with one slot.
type History struct {
	Slots int  // at the beginning
	Exact bool // "full" is answered only when it is

	mu    sync.Mutex
	calls []porcupine.Operation
	pairs int
}

// Never is the end of a call of which nobody knows it.
const Never = math.MaxInt64

// A pair is 0, or the same for a take and a release that belong together, and may both
// never happen.
type (
	takeSlots    struct{ n, pair int }
	releaseSlots struct{ n, pair int }
	resizeTo     struct{ slots int }
	isFull       struct{} // an answer
	isDone       struct{} // the other one
)

func (h *History) add(in any, call int64, out any, end int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.calls = append(h.calls, porcupine.Operation{Input: in, Call: call, Output: out, Return: end})
}

// Taken notes that n slots were granted.
func (h *History) Taken(n int, call, end int64) { h.add(takeSlots{n: n}, call, isDone{}, end) }

// Full notes that n slots were asked for and not granted.
func (h *History) Full(n int, call, end int64) { h.add(takeSlots{n: n}, call, isFull{}, end) }

// Released notes that n slots were given back, not before call.
func (h *History) Released(n int, call, end int64) { h.add(releaseSlots{n: n}, call, isDone{}, end) }

// Unanswered notes a request for n slots of which nobody knows whether they were granted:
// the slots are taken and released at any two moments after call, or never. They are noted
// as a pair, because a search that may let the release stand for that of another holder
// grows exponentially with the number of such requests.
func (h *History) Unanswered(n int, call int64) {
	h.mu.Lock()
	h.pairs++
	pair := h.pairs
	h.mu.Unlock()
	h.add(takeSlots{n, pair}, call, isDone{}, Never)
	h.add(releaseSlots{n, pair}, call, isDone{}, Never)
}

// Resized notes that the limit was changed.
func (h *History) Resized(slots int, call, end int64) { h.add(resizeTo{slots}, call, isDone{}, end) }

// maxPairs is how many requests without an answer a history may have.
const maxPairs = 64

// Check fails the test if the answers cannot be those of a semaphore. It takes three
// minutes at most, and fails too if that is not enough.
func (h *History) Check(t *testing.T) {
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.pairs > maxPairs {
		t.Fatalf("%d requests have no answer; a history may have %d", h.pairs, maxPairs)
	}
	got := porcupine.CheckOperationsTimeout(h.model(), h.calls, 3*time.Minute)
	if got == porcupine.Ok {
		return
	}
	t.Errorf("%d calls: %v, want %v: no order of them is one of a semaphore", len(h.calls), got, porcupine.Ok)
	if h.Exact {
		h.Exact = false
		t.Logf("if it may be called full while it is not: %v", porcupine.CheckOperationsTimeout(h.model(), h.calls, time.Minute))
	}
}

// pairBit returns the bit of a pair, and 0 for what belongs to none.
func pairBit(pair int) uint64 {
	if pair == 0 {
		return 0
	}
	return 1 << (pair - 1)
}

func (h *History) model() porcupine.Model {
	type state struct {
		slots, held   int
		tried, within uint64 // a bit for each pair: its take was carried out, and was granted
	}
	return porcupine.Model{
		Init: func() any { return state{slots: h.Slots} },
		Step: func(before, in, out any) (bool, any) {
			s := before.(state)
			switch in := in.(type) {
			case takeSlots:
				fits := s.held+in.n <= s.slots
				if _, full := out.(isFull); full {
					return !fits || !h.Exact, s
				}
				s.tried |= pairBit(in.pair)
				if fits {
					s.held += in.n
					s.within |= pairBit(in.pair)
				}
				return fits || in.pair > 0, s
			case releaseSlots:
				if in.pair > 0 && s.within&pairBit(in.pair) == 0 {
					return s.tried&pairBit(in.pair) != 0, s
				}
				s.held -= in.n
				return s.held >= 0, s
			case resizeTo:
				s.slots = in.slots
				return true, s
			}
			panic(fmt.Sprintf("a call of %T", in))
		},
	}
}

// historyOfSlots lets several replicas take slots of two semaphores, one or two at a time,
// while limits are changed and sessions are ended. Who loses slots notes when the work
// under them was over: from then on others may have them, and not before.
func historyOfSlots(t *testing.T, b SemaphoreBackend) {
	const workers = 4
	names := []string{"reports", "reports2"}
	var replicas []replica
	for range 3 {
		replicas = append(replicas, b.start(t))
	}
	began := time.Now()
	now := func() int64 { return int64(time.Since(began)) }
	histories := map[string]*History{}
	for _, name := range names {
		create(t, replicas[0], name, 3)
		histories[name] = &History{Slots: 3, Exact: b.Exact}
	}
	var granted, full, lost, unanswered int
	var counts sync.Mutex
	count := func(n *int) {
		counts.Lock()
		defer counts.Unlock()
		*n++
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	enough := func() bool {
		counts.Lock()
		defer counts.Unlock()
		return time.Since(began) > 8*time.Second && granted > 50 && full > 0 && lost > 0
	}
	var wg sync.WaitGroup
	for i := range workers * len(replicas) {
		r, name, n := replicas[i%len(replicas)], names[i%len(names)], 1+i%4/3
		h, longest := histories[name], 20*time.Millisecond
		if i < len(replicas) { // somebody who is there when the session ends
			longest = 300 * time.Millisecond
		}
		wg.Go(func() {
			over := "" // a session that has ended
			for ctx.Err() == nil {
				session, call := r.Session(), now()
				if session == "" {
					time.Sleep(10 * time.Millisecond)
					continue
				}
				leases, err := r.Take(ctx, name, n, nil)
				switch {
				case err == nil:
				case errors.Is(err, lock.ErrFull):
					h.Full(n, call, now())
					count(&full)
					time.Sleep(rand.N(30 * time.Millisecond))
					continue
				case ctx.Err() != nil: // it may have got in, and left again
					h.Unanswered(n, call)
					return
				case errors.Is(err, lock.ErrDelayed):
					time.Sleep(10 * time.Millisecond)
					continue
				case errors.Is(err, lock.ErrLost):
					if session != over { // it may have got in before the session ended
						h.Unanswered(n, call)
						count(&unanswered)
						over = session
					}
					time.Sleep(10 * time.Millisecond)
					continue
				case late(err): // it may have got in for a while
					h.Unanswered(n, call)
					count(&unanswered)
					continue
				default:
					t.Errorf("take: %v", err)
					return
				}
				h.Taken(n, call, now())
				count(&granted)
				work := time.NewTimer(rand.N(longest))
				for _, lease := range leases {
					select {
					case <-work.C:
						work.Reset(0)
					case <-lease.Context().Done():
					}
				}
				for _, lease := range leases { // each for itself: one may be lost alone
					ended, call := lease.Context().Err() != nil, now()
					if ended {
						call -= int64(boottime.Now().Sub(lease.Deadline()))
					}
					switch err := lease.Release(context.Background()); {
					case err == nil && !ended:
						h.Released(1, call, now())
					default:
						count(&lost)
						h.Released(1, call, Never) // when others may have it, nobody says
					}
				}
			}
		})
	}
	for i := 0; ctx.Err() == nil && !enough(); i++ {
		name, slots, call := names[i%len(names)], 1+rand.IntN(4), now()
		if err := replicas[i%len(replicas)].Resize(ctx, name, slots); err == nil {
			histories[name].Resized(slots, call, now())
		} else if ctx.Err() == nil && !late(err) {
			t.Errorf("resize: %v", err)
		} else {
			histories[name].Resized(slots, call, Never)
		}
		// Each call whose end is unknown makes the search longer.
		if counts.Lock(); i%6 == 5 && (lost == 0 || lost < 3 && unanswered < 8) {
			if session := replicas[i/6%len(replicas)].Session(); session != "" {
				b.EndSession(t, session)
			}
		}
		counts.Unlock()
		retry.Pause(ctx, 200*time.Millisecond)
	}
	cancel()
	wg.Wait()
	t.Logf("%d times granted, %d times full, %d slots lost", granted, full, lost)
	if granted <= 50 || full == 0 || lost == 0 {
		t.Errorf("%d times granted, %d times full, %d slots lost: too little happened", granted, full, lost)
	}
	for _, h := range histories {
		h.Check(t)
	}
}
