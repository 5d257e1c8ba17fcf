package worker

import (
	"context"
	"errors"
	"maps"
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"onejob/boottime"
	"onejob/tasks"
)

// A handler that ignores its context may still run when its task is claimed again by the
// same replica: there are two handlers of one task then, with different fences. When the
// first one exits, the second can still be cancelled.
func TestExitOfAZombieLeavesItsSuccessor(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		cancel func(r *running)
		want   error
	}{
		"cancel":    {func(r *running) { r.cancel(7, tasks.ErrCancelled) }, tasks.ErrCancelled},
		"cancelAll": {func(r *running) { r.cancelAll(tasks.ErrShutdown) }, tasks.ErrShutdown},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRunning()
			enter := func(id, fence int64) (ctx context.Context, exit func()) {
				ctx, cancel := context.WithCancelCause(t.Context())
				return ctx, r.enter(&tasks.Task{ID: id, Fence: fence}, &tasks.Attempt{}, cancel)
			}
			_, exitZombie := enter(7, 1)
			successor, exitSuccessor := enter(7, 2)
			exitZombie()
			test.cancel(&r)
			if cause := context.Cause(successor); !errors.Is(cause, test.want) {
				t.Errorf("the successor was cancelled with %v, want %v", cause, test.want)
			}
			exitSuccessor()
			if len(r.tasks) > 0 {
				t.Errorf("%d handlers are left", len(r.tasks))
			}
		})
	}
}

// Both handlers of one task are cancelled, and no handler of another.
func TestCancelReachesAllHandlersOfATask(t *testing.T) {
	t.Parallel()
	r := newRunning()
	enter := func(id, fence int64) context.Context {
		ctx, cancel := context.WithCancelCause(t.Context())
		r.enter(&tasks.Task{ID: id, Fence: fence}, &tasks.Attempt{}, cancel)
		return ctx
	}
	zombie, other, successor := enter(7, 1), enter(8, 2), enter(7, 3)
	r.cancel(7, tasks.ErrCancelled)
	for name, ctx := range map[string]context.Context{"the zombie": zombie, "the successor": successor} {
		if cause := context.Cause(ctx); !errors.Is(cause, tasks.ErrCancelled) {
			t.Errorf("%s was cancelled with %v, want %v", name, cause, tasks.ErrCancelled)
		}
	}
	if other.Err() != nil {
		t.Errorf("the handler of another task was cancelled: %v", context.Cause(other))
	}
	r.cancelAll(tasks.ErrShutdown)
	late := enter(9, 4)
	for name, ctx := range map[string]context.Context{"one that ran": other, "one that began later": late} {
		if cause := context.Cause(ctx); !errors.Is(cause, tasks.ErrShutdown) {
			t.Errorf("%s was cancelled with %v, want %v", name, cause, tasks.ErrShutdown)
		}
	}
}

// Room that a claim keeps for what it may find is not work under way.
func TestRoomOfAClaimIsNoAttempt(t *testing.T) {
	t.Parallel()
	r := newRunning()
	attempts := func() int { n, _ := r.load(32); return n }
	if r.take(32, 32) != 32 || attempts() != 0 {
		t.Errorf("a claim has room for %d attempts, and %d are under way", r.count(), attempts())
	}
	r.begin(1, 0)
	if attempts() != 1 {
		t.Errorf("%d attempts are under way, want 1", attempts())
	}
	r.end(1)
	if attempts() != 0 {
		t.Errorf("%d attempts are under way, want none", attempts())
	}
}

// Whatever attempts, claims and limits do, in whichever order: no more room is taken than there
// is, all attempts that are not parked are at most twice as many, what is under way is waited for,
// and when all of it has ended all room is free.
func TestRoomIsGivenBackOnce(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		most := rapid.IntRange(1, 8).Draw(t, "most")
		r := newRunning()
		kept := 0                      // room of claims, for what they may find
		var handlers, returned []int64 // by fence
		var limited []int64            // the same, under a limit
		var parked []int64             // of all of these
		var last int64
		ends := map[int64]func(){}
		over := make(chan struct{})
		defer close(over) // a run that comes to nothing is given up in the middle

		some := func(list *[]int64) int64 {
			if len(*list) == 0 {
				t.Skip()
			}
			i := rapid.IntRange(0, len(*list)-1).Draw(t, "which")
			fence := (*list)[i]
			*list = slices.Delete(*list, i, i+1)
			return fence
		}
		leave := func() {
			if kept == 0 {
				t.Skip()
			}
			kept--
			r.leave(1)
		}
		start := func(t *rapid.T) {
			if kept == 0 {
				t.Skip()
			}
			kept--
			last++
			end, left := make(chan struct{}), make(chan bool, 1)
			r.start(last, 1, func() bool {
				select {
				case <-end:
				case <-over:
				}
				return true
			}, func(awaited bool) { left <- awaited })
			ends[last] = func() { close(end); <-left }
			handlers = append(handlers, last)
		}
		endLimited := func() {
			fence := some(&limited)
			if r.returned(fence) {
				t.Fatal("room was given back that a limit keeps")
			}
			r.end(fence)
			r.leave(1)
		}
		park := func(list *[]int64) func(*rapid.T) {
			return func(*rapid.T) {
				fence := some(list)
				if !r.park(fence) || r.park(fence) || r.returned(fence) {
					t.Fatal("it was not parked, or twice, or has room to give back")
				}
				parked = append(parked, fence)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"claim": func(t *rapid.T) { kept += r.take(rapid.IntRange(1, most).Draw(t, "n"), most) },
			"start": start,
			"again": start, // or else there would be few
			"leave": func(*rapid.T) { leave() },
			"return": func(t *rapid.T) {
				fence := some(&handlers)
				if !r.returned(fence) || r.returned(fence) {
					t.Fatal("room was not given back, or twice")
				}
				returned = append(returned, fence)
			},
			"end":         func(*rapid.T) { ends[some(&returned)]() },
			"end at once": func(*rapid.T) { ends[some(&handlers)]() }, // as with a lock key
			"limit": func(t *rapid.T) {
				if r.take(1, most) == 0 {
					t.Skip()
				}
				last++
				fence := last
				r.begin(fence, 1)
				r.underSlot(fence, func() { ends[fence] = func() { r.end(fence) } })
				limited = append(limited, fence)
			},
			"end limited":   func(*rapid.T) { endLimited() },
			"park":          park(&handlers),
			"park returned": park(&returned),
			"park limited":  park(&limited),
			"end parked":    func(*rapid.T) { ends[some(&parked)]() },
			"": func(t *rapid.T) {
				taken, all := kept+len(limited)+len(handlers), len(limited)+len(handlers)+len(returned)+len(parked)
				if taken > most || taken+len(returned) > 2*most {
					t.Fatalf("room for %d is taken and %d have returned, with room for %d", taken, len(returned), most)
				}
				if free := min(most, 2*most-len(returned)) - taken; r.free(most) != free || r.count() != kept+all {
					t.Fatalf("%d free and %d under way, want %d and %d", r.free(most), r.count(), free, kept+all)
				}
				want := len(limited) + len(handlers) + max(0, len(returned)-most)
				if n, bytes := r.load(most); n != want || bytes != all-len(parked) {
					t.Fatalf("%d attempts with %d bytes, want %d with %d", n, bytes, want, all-len(parked))
				}
			},
		})
		done := r.done()
		for left := r.count(); left > 0; left-- {
			select {
			case <-done:
				t.Fatalf("done while %d are under way", left)
			default:
			}
			switch {
			case len(limited) > 0:
				endLimited()
			case kept > 0:
				leave()
			case len(handlers) > 0:
				ends[some(&handlers)]()
			case len(parked) > 0:
				ends[some(&parked)]()
			default:
				ends[some(&returned)]()
			}
		}
		<-done
		if n, bytes := r.load(most); n != 0 || bytes != 0 || r.free(most) != most {
			t.Fatalf("at the end %d attempts with %d bytes, and room for %d of %d", n, bytes, r.free(most), most)
		}
	})
}

// No more attempts are parked than may be, and each that ends makes way for another one.
func TestMostParkedAttempts(t *testing.T) {
	t.Parallel()
	r := newRunning()
	fence := int64(0)
	begin := func() int64 {
		fence++
		r.take(1, math.MaxInt)
		r.begin(fence, 0)
		r.underSlot(fence, func() {})
		return fence
	}
	for range maxParked {
		if !r.park(begin()) {
			t.Fatal("an attempt was not parked")
		}
	}
	last := begin()
	if r.park(last) {
		t.Error("more were parked than may be")
	}
	r.end(1)
	if !r.park(last) {
		t.Error("none was parked when there was room again")
	}
}

// What a claim has brought although its reply was lost is put back, however full the replica is.
func TestRoomForLostReplies(t *testing.T) {
	t.Parallel()
	r := newRunning()
	for fence := range int64(4) { // two have returned, two run
		if r.take(1, 2) != 1 {
			t.Fatal("there is no room")
		}
		r.start(fence, 0, func() bool { <-t.Context().Done(); return false }, func(bool) {})
		if fence < 2 {
			r.returned(fence)
		}
	}
	if r.take(1, 2) != 0 {
		t.Error("there is room in a replica that is full")
	}
	if r.take(1, math.MaxInt) != 1 || r.count() != 5 {
		t.Errorf("%d attempts are under way, want 5", r.count())
	}
}

// A heartbeat says how far the oldest handlers are, by Postgres' clock, and nothing of those
// that have said nothing.
func TestProgressOfHandlers(t *testing.T) {
	t.Parallel()
	r := newRunning()
	if p := r.progress(); p == nil || len(p) > 0 {
		t.Errorf("without handlers: %v", p)
	}
	started := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	var exits []func()
	for fence := range int64(maxProgress + 10) {
		a := &tasks.Attempt{Task: tasks.Task{ID: 1000 + fence, Fence: fence, StartedAt: started, HeardAt: boottime.Now()}}
		exits = append(exits, r.enter(&a.Task, a, func(error) {}))
		switch {
		case fence == 3:
			a.Report(-1, "waits")
		case fence != 1:
			a.Report(float64(fence), "")
		}
	}
	p := r.progress()
	if len(p) != maxProgress {
		t.Fatalf("of %d handlers", len(p))
	}
	if _, said := p[1]; said {
		t.Error("of one that said nothing")
	}
	if _, young := p[maxProgress+1]; young {
		t.Error("of a young one, and not of an older one")
	}
	if p[3].Percent != nil || p[3].Text != "waits" || *p[4].Percent != 4 {
		t.Errorf("3: %+v, 4: %+v", p[3], p[4])
	}
	if late := p[4].At.Sub(started); late < 0 || late > time.Minute {
		t.Errorf("said at %v, %v after it was claimed", p[4].At, late)
	}
	if again := r.progress(); !maps.EqualFunc(p, again, tasks.ProgressAt.Equal) {
		t.Error("it changed although nobody said anything")
	}
	for _, exit := range exits {
		exit()
	}
	if p := r.progress(); len(p) > 0 {
		t.Errorf("of handlers that have returned: %v", p)
	}
}
