package main

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// A kind of fault goes for work that it has met least, but not always.
func TestVictims(t *testing.T) {
	t.Parallel()
	var met victims
	h := &fault{step: step{Kind: &kind{name: "kill"}}, rand: rand.New(rand.NewPCG(1, 1)), victims: &met}
	named := func(name string) *replica { return &replica{place: place{name: name}} }
	groups := [][]*replica{{named("idle")}, {named("a"), named("b")}, {named("c")}}
	work := map[string][]string{"a": {"exec"}, "b": {"http"}, "c": {"exec", "go"}}
	chosen := func() (n [3]int) {
		for range 3000 {
			n[h.among(groups, work)]++
		}
		return n
	}
	if n := chosen(); n[0] > 0 || n[1] < 1000 || n[2] < 1000 {
		t.Errorf("at first: %v", n)
	}
	met.meets("kill", map[string]bool{"exec": true, "http": true})
	met.meets("freeze", map[string]bool{"go": true})
	if n := chosen(); n[2] != 3000 {
		t.Errorf("when it has met no Go handler: %v", n)
	}
	met.tries("kill", map[string]bool{"go": true})
	if n := chosen(); n[1] < 1000 || n[2] < 1000 {
		t.Errorf("when it has tried all: %v", n)
	}
	met.meets("kill", nil)
	if n := chosen(); n[2] != 3000 {
		t.Errorf("when it has tried in vain to meet a Go handler: %v", n)
	}
	if missing := met.missing(&kind{name: "kill"}); !slices.Equal(missing, []string{"go", "sql"}) {
		t.Errorf("missing: %v", missing)
	}
	met.meets("kill", map[string]bool{"go": true})
	if n := chosen(); n[1] < 1000 || n[2] < 1000 {
		t.Errorf("when it has met all: %v", n)
	}
	work = nil // Postgres does not answer
	if n := chosen(); n[0] < 800 || n[1] < 800 || n[2] < 800 {
		t.Errorf("when nobody knows: %v", n)
	}
}

// From some moment on, kinds that have not met all that they must are tried again, one after the other.
func TestSecond(t *testing.T) {
	t.Parallel()
	a, b, c := &kind{name: "a"}, &kind{name: "b", least: time.Second, most: 2 * time.Second}, &kind{name: "c"}
	v := faultRun{again: []*kind{a, b, c}, from: time.Now().Add(time.Hour)}
	all := map[string]bool{"exec": true, "http": true, "go": true, "sql": true}
	v.victims.meets("a", all)
	step := step{Kind: a, Alone: true}
	if again, is := v.second(step); is {
		t.Errorf("too early: %s", again.Kind.name)
	}
	v.from = time.Now().Add(-time.Second)
	for _, want := range []*kind{b, c, b} {
		if again, is := v.second(step); !is || again.Kind != want || again.For != want.least || !again.Alone {
			t.Errorf("%v, want %s", again, want.name)
		}
	}
	v.unmet = []*kind{a}
	if again, is := v.second(step); !is || again.Kind != a {
		t.Errorf("%v, want what has hit nothing", again)
	}
	v.victims.meets("b", all)
	v.victims.meets("c", all)
	if again, is := v.second(step); is {
		t.Errorf("%s, which has met all", again.Kind.name)
	}
}

// What a fault waits for is enqueued once, and takes long enough to be met.
func TestWanted(t *testing.T) {
	t.Parallel()
	c := &cluster{}
	w := &workload{c: c, kinds: []string{"exec", "go"}, rand: rand.New(rand.NewPCG(1, 1))}
	c.wants.add("go")
	c.wants.add("go")
	c.wants.add("http") // which nobody here can run
	var made []row
	for _, kind := range c.wants.take() {
		made = append(made, w.wanted(kind)...)
	}
	if len(made) != wantedAtOnce || len(c.wants.take()) > 0 {
		t.Errorf("%d tasks, want %d", len(made), wantedAtOnce)
	}
	tokens := map[string]bool{}
	for _, row := range made {
		tokens[row.token] = true
		var d work
		if err := json.Unmarshal([]byte(row.payload), &d); err != nil || row.kind != "go" || d.MS < 5000 {
			t.Errorf("a task of kind %s with %s", row.kind, row.payload)
		}
	}
	if len(tokens) != len(made) {
		t.Errorf("%d tokens of %d tasks", len(tokens), len(made))
	}
}
