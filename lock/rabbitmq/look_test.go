package rabbitmq

import (
	"context"
	"errors"
	"slices"
	"testing"
)

// queues is an observer of queues that are only thought of.
type queues map[string]bool

func (q queues) send(_ context.Context, messages []message) ([]bool, error) {
	found := make([]bool, len(messages))
	for i, m := range messages {
		found[i] = q[m.to]
	}
	return found, nil
}

func (q queues) add(names ...string) queues {
	for _, name := range names {
		q[name] = true
	}
	return q
}

var ring = Config{Prefix: "p"}.names("ring")

func TestCountStopsAtTheFirstGap(t *testing.T) {
	t.Parallel()
	for _, slots := range []int{0, 1, 31, 32, 33, 32 + window - 1, 32 + window, 32 + window + 1, 10_000} {
		q := queues{}.add(ring.as(1, slots)...).add(ring.a(slots+2), ring.reach(reachFor(slots)), ring.reach(0))
		v, err := count(t.Context(), q, ring)
		if err != nil || v.slots != slots || v.reach != reachFor(slots) {
			t.Errorf("%d slots: got %+v, %v", slots, v, err)
		}
	}
	if v, _ := count(t.Context(), queues{}, ring); v.there() {
		t.Errorf("nothing: got %+v", v)
	}
	if v, _ := count(t.Context(), queues{}.add(ring.reach(0)), ring); !v.there() {
		t.Errorf("no slots: got %+v", v)
	}
}

func TestLookFindsHoldersAboveTheLimit(t *testing.T) {
	t.Parallel()
	for name, q := range map[string]queues{
		"ours":                 queues{}.add(ring.reach(64), ring.b(50)).add(ring.as(1, 2)...),
		"another client's":     queues{}.add(ring.b(50)).add(ring.as(1, 2)...),
		"raised by the others": queues{}.add(ring.reach(1), ring.b(50)).add(ring.as(1, 2)...),
	} {
		v, err := look(t.Context(), q, ring)
		if err != nil || v.slots != 2 || !slices.Equal(v.taken, []int{50}) || v.room() != 1 || !slices.Equal(v.free(), []int{1, 2}) {
			t.Errorf("%s: got %+v, %v", name, v, err)
		}
	}
}

func TestLookCountsTheDead(t *testing.T) {
	t.Parallel()
	q := queues{}.add(ring.reach(4), ring.b(1), ring.d(1), ring.d(3)).add(ring.as(1, 3)...)
	v, err := look(t.Context(), q, ring)
	if err != nil || !slices.Equal(v.taken, []int{1, 3}) || !slices.Equal(v.shut, []int{3}) || v.room() != 1 || !slices.Equal(v.free(), []int{2}) {
		t.Errorf("got %+v, %v", v, err)
	}
}

func TestSettled(t *testing.T) {
	t.Parallel()
	before := func(names ...string) queues { // the limit fell to 2 while somebody had slot 4
		return queues{}.add(ring.reach(4), ring.a(1), ring.a(2), ring.b(4)).add(names...)
	}
	seen := view{slots: 2, reach: 4, top: 4, taken: []int{4}}
	for _, test := range []struct {
		name   string
		now    queues
		mine   []int
		inside bool
	}{
		{"one enters", before(ring.b(1)), []int{1}, true},
		{"two enter at once, having seen room for one", before(ring.b(1), ring.b(2)), []int{1}, false},
		{"likewise, seen by the other", before(ring.b(1), ring.b(2)), []int{2}, false},
		{"one wants two", before(ring.b(1), ring.b(2)), []int{1, 2}, false},
		{"the slot was removed meanwhile", queues{}.add(ring.a(1), ring.b(2)), []int{2}, false},
		{"it was raised meanwhile, and fell again", before(ring.b(1), ring.b(20), ring.reach(32)), []int{1}, false},
		{"somebody took the slot meanwhile, and died", before(ring.b(1), ring.d(1)), []int{1}, false},
		{"a holder died, and the limit is used up by what it left", before(ring.b(1), ring.d(2)), []int{1}, false},
		{"the holder above the limit died", queues{}.add(ring.reach(4), ring.a(1), ring.a(2), ring.d(4), ring.b(1)), []int{1}, true},
		{"the limit fell, but not below the slot", queues{}.add(ring.a(1), ring.b(1)), []int{1}, false},
	} {
		inside, err := settled(t.Context(), test.now, ring, seen, test.mine)
		if err != nil || inside != test.inside {
			t.Errorf("%s: got %v, %v", test.name, inside, err)
		}
	}
	if inside, err := settled(t.Context(), before(ring.b(2)), ring, seen, []int{1}); inside || !errors.Is(err, errElsewhere) {
		t.Errorf("what was declared is not there: got %v, %v", inside, err)
	}
}
