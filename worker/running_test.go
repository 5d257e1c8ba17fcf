package worker

import (
	"context"
	"errors"
	"maps"
	"testing"
	"time"

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
			r := running{fences: map[int64]int{}, tasks: map[int64]handler{}}
			enter := func(id, fence int64) (ctx context.Context, exit func()) {
				ctx, cancel := context.WithCancelCause(t.Context())
				return ctx, r.enter(&tasks.Attempt{Task: tasks.Task{ID: id, Fence: fence}}, cancel)
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
	r := running{fences: map[int64]int{}, tasks: map[int64]handler{}}
	enter := func(id, fence int64) context.Context {
		ctx, cancel := context.WithCancelCause(t.Context())
		r.enter(&tasks.Attempt{Task: tasks.Task{ID: id, Fence: fence}}, cancel)
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
	r := running{fences: map[int64]int{}, tasks: map[int64]handler{}}
	if r.take(32, 32) != 32 || r.attempts() != 0 {
		t.Errorf("a claim has room for %d attempts, and %d are under way", r.count(), r.attempts())
	}
	r.begin(1, 0)
	if r.attempts() != 1 {
		t.Errorf("%d attempts are under way, want 1", r.attempts())
	}
	r.end(1)
	if r.attempts() != 0 {
		t.Errorf("%d attempts are under way, want none", r.attempts())
	}
}

// A heartbeat says how far the oldest handlers are, by Postgres' clock, and nothing of those
// that have said nothing.
func TestProgressOfHandlers(t *testing.T) {
	t.Parallel()
	r := running{fences: map[int64]int{}, tasks: map[int64]handler{}}
	if p := r.progress(); p == nil || len(p) > 0 {
		t.Errorf("without handlers: %v", p)
	}
	started := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	var exits []func()
	for fence := range int64(maxProgress + 10) {
		a := &tasks.Attempt{Task: tasks.Task{ID: 1000 + fence, Fence: fence, StartedAt: started, HeardAt: boottime.Now()}}
		exits = append(exits, r.enter(a, func(error) {}))
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
