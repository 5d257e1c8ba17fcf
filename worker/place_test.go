package worker

import (
	"fmt"
	"testing"
	"time"

	"onejob/boottime"
	"onejob/tasks"
)

// All replicas agree on who claims first, and each does so as often as it has free slots.
func TestPlace(t *testing.T) {
	now := boottime.Now()
	replica := func(session string, change func(*member)) member {
		r := member{tasks.Replica{Session: session, State: tasks.ReplicaWorking, Kinds: []string{"noop"}, Concurrency: 10}, now.Add(time.Minute)} // so that none is silent before the test ends
		if change != nil {
			change(&r)
		}
		return r
	}
	m := &members{seen: map[string]member{}}
	for _, r := range []member{
		replica("a", nil), replica("b", nil),
		replica("half full", func(r *member) { r.Running = 5 }),
		replica("full", func(r *member) { r.Running = 10 }),
		replica("more than full", func(r *member) { r.Running = 12 }),
		replica("silent", func(r *member) { r.since = now.Add(-2 * doubt) }),
		replica("stopping", func(r *member) { r.State = tasks.ReplicaStopping }),
		replica("dead", func(r *member) { r.State = tasks.ReplicaDead }),
		replica("other kinds", func(r *member) { r.Kinds = []string{"http"} }),
		replica("other queues", func(r *member) { r.Queues = []string{"mail"} }),
	} {
		m.seen[r.Session] = r
	}
	first := map[string]int{}
	const words = 10_000
	for i := range words {
		word := fmt.Sprint(100_000 + i) // numbers of transactions, one after the other
		places := map[int]string{}
		for _, s := range []string{"a", "b", "half full", "full", "more than full"} {
			p := m.place(s, word)
			if other, taken := places[p]; taken {
				t.Fatalf("word %s: %s and %s have place %d", word, s, other, p)
			}
			places[p] = s
		}
		if len(places) != 5 || places[0] == "full" || places[0] == "more than full" || places[3] != "full" || places[4] != "more than full" {
			t.Fatalf("word %s: the places are %v", word, places)
		}
		first[places[0]]++
	}
	for s, want := range map[string]int{"a": words * 2 / 5, "b": words * 2 / 5, "half full": words / 5} {
		if n := first[s]; n < want*9/10 || n > want*11/10 {
			t.Errorf("%s came first %d times of %d, want about %d", s, n, words, want)
		}
	}
	for _, s := range []string{"unknown", "stopping", "dead", "other kinds", "other queues"} {
		if p := m.place(s, "1"); p != 0 {
			t.Errorf("%s has place %d, want 0: it cannot count on others", s, p)
		}
	}
}

// A full replica wakes others only if one with free slots claims some of what it has left.
func TestRoom(t *testing.T) {
	for name, c := range map[string]struct {
		other member
		want  bool
	}{
		"the same":            {member{Replica: tasks.Replica{Kinds: []string{"a"}, Queues: []string{"q"}}}, true},
		"it is full":          {member{Replica: tasks.Replica{Kinds: []string{"a"}, Queues: []string{"q"}, Running: 10}}, false},
		"all queues":          {member{Replica: tasks.Replica{Kinds: []string{"a", "b"}}}, true},
		"another queue":       {member{Replica: tasks.Replica{Kinds: []string{"a"}, Queues: []string{"r"}}}, false},
		"one queue in common": {member{Replica: tasks.Replica{Kinds: []string{"a"}, Queues: []string{"r", "q"}}}, true},
		"another kind":        {member{Replica: tasks.Replica{Kinds: []string{"b"}, Queues: []string{"q"}}}, false},
	} {
		c.other.State, c.other.Concurrency, c.other.since = tasks.ReplicaWorking, 10, boottime.Now().Add(time.Minute)
		me := member{Replica: tasks.Replica{Kinds: []string{"a"}, Queues: []string{"q"}, Running: 10, Concurrency: 10}}
		m := &members{seen: map[string]member{"me": me, "other": c.other}}
		if got := m.room("me"); got != c.want {
			t.Errorf("%s: room %v", name, got)
		}
	}
}
