package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"onejob/lock"
	"onejob/tasks"
)

// namedRows are rows that name limits.
type namedRows struct{ names []string }

func (r *namedRows) Limited(context.Context) (bool, error) { return len(r.names) > 0, nil }
func (r *namedRows) DueLimits(context.Context, tasks.Claim, []string) ([]string, error) {
	return nil, nil
}
func (r *namedRows) DueKinds(context.Context, tasks.Claim) ([]string, error) { return nil, nil }
func (r *namedRows) UnknownLimits(_ context.Context, known []string, n int) (unknown []string, err error) {
	for _, name := range r.names {
		if len(unknown) < n && !slices.Contains(known, name) {
			unknown = append(unknown, name)
		}
	}
	return unknown, nil
}

// countedLimits are limits that are there, and how often was asked for all of them.
type countedLimits struct {
	lock.Semaphores
	there []string
	lists int
}

func (c *countedLimits) List(context.Context) ([]string, error) { c.lists++; return c.there, nil }
func (c *countedLimits) Inspect(_ context.Context, name string) (lock.Semaphore, error) {
	if !slices.Contains(c.there, name) {
		return lock.Semaphore{}, lock.ErrNoSemaphore
	}
	return lock.Semaphore{}, nil
}

func newFinder(rows *namedRows, there *countedLimits) (*limits, *observer.ObservedLogs) {
	core, events := observer.New(zap.DebugLevel)
	w, err := New(Config{Store: struct{ Store }{}, Locks: struct{ lock.Locker }{}, Limits: there, Kinds: tasks.Kinds{"noop": tasks.Noop{}}, Log: zap.New(core), Replica: "r"})
	if err != nil {
		panic(err)
	}
	w.limits.store = rows
	return w.limits, events
}

// Rows that name a limit which is not there do not let a replica ask for all limits each second. Once
// the limit is there, it is found.
func TestMissingLimitIsLookedForByName(t *testing.T) {
	t.Parallel()
	rows, there := &namedRows{}, &countedLimits{there: []string{"other"}}
	for i := range 50 {
		rows.names = append(rows.names, fmt.Sprint("misspelt", i))
	}
	l, _ := newFinder(rows, there)
	for range 10 {
		l.findSome(t.Context())
	}
	if most := 50/findFew + 1; there.lists > most {
		t.Errorf("in ten looks all limits were asked for %d times, want %d at most", there.lists, most)
	}
	there.there = append(there.there, "misspelt7")
	for range 3 {
		l.findSome(t.Context())
	}
	if got := l.names(); !slices.Contains(got, "misspelt7") {
		t.Errorf("the limits that are known: %v", got)
	}
}

// Why a limit cannot be served is logged once, however many others can be, and rests stay long.
func TestManyLimitsAreServed(t *testing.T) {
	t.Parallel()
	l, events := newFinder(&namedRows{}, &countedLimits{})
	var names []string
	for i := range 3 * maxTold {
		names = append(names, fmt.Sprint("limit", i))
		l.note(names[i], true)
	}
	for range 5 {
		for _, name := range names {
			l.logOnce(name, "", nil)
		}
		l.logOnce("limit0", "limit_failed", errors.New("it is full of bees"))
		for _, name := range names {
			l.failed(name)
		}
	}
	if n := len(l.told); n != 1 {
		t.Errorf("what is wrong with %d limits is remembered, want one", n)
	}
	if n := events.FilterMessage("limit_failed").Len(); n != 5 {
		t.Errorf("limit_failed was logged %d times, want once after each success", n)
	}
	for range 5 {
		for _, name := range names {
			l.logOnce(name, "limit_failed", errors.New("the backend is gone"))
		}
	}
	if n := events.FilterMessage("limit_failed").Len() - 5; n != len(names)-1 {
		t.Errorf("limit_failed was logged %d times for %d limits, of which it was known of one", n, len(names))
	}
	if got := l.rests["limit1"]; got < mostRest/2 {
		t.Errorf("after five failures a limit rests for %v", got)
	}
}
