package main

import (
	"context"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"onejob/internal/mutants"
	"onejob/internal/procfs"
)

func TestSteps(t *testing.T) {
	fence, err := mutants.Named("fence")
	if err != nil {
		t.Fatal(err)
	}
	deadline, err := mutants.Named("no-deadline")
	if err != nil {
		t.Fatal(err)
	}
	count := func(p plan, m mutants.Mutant) map[string]int {
		n := map[string]int{}
		for _, s := range p.steps(m) {
			n[s.By]++
		}
		return n
	}
	all := plan{all: true, by: []string{byTests, bySimulation, byChaos}, seeds: 3}
	for _, test := range []struct {
		name string
		plan plan
		of   mutants.Mutant
		want map[string]int
	}{
		{"who must", plan{}, fence, map[string]int{byTests: 1, byChaos: 1}},
		{"who must, of one that is simulated", plan{}, deadline, map[string]int{byTests: 1, bySimulation: 1, byChaos: 1}},
		{"all, of one in SQL, which is not simulated", all, fence, map[string]int{byTests: 1, byChaos: 3}},
		{"all", all, deadline, map[string]int{byTests: 1, bySimulation: 3, byChaos: 3}},
	} {
		if got := count(test.plan, test.of); !reflect.DeepEqual(got, test.want) {
			t.Errorf("%s: %v, not %v", test.name, got, test.want)
		}
	}
}

// A test catches a mutant if it fails with it, and passes without it.
func TestOnlyTestsThatPassWithoutAMutantCatchIt(t *testing.T) {
	const overlay = "overlay.json"
	broken := errors.New("it does not compile")
	for _, test := range []struct {
		with, without bool // it fails
		err           error
		want          result
		runs          []string // with which overlays
	}{
		{true, false, nil, result{Caught: true, How: "store.TestX"}, []string{overlay, ""}},
		{true, true, nil, result{How: "store.TestX fails without it, too"}, []string{overlay, ""}},
		{false, true, nil, result{How: "store.TestX"}, []string{overlay}},
		{true, false, broken, result{}, []string{overlay}},
	} {
		var runs []string
		got := result{}
		err := got.named(t.Context(), overlay, "store.TestX", func(_ context.Context, with, name string) (bool, error) {
			runs = append(runs, with)
			if with == "" {
				return test.without, nil
			}
			return test.with, test.err
		})
		if got != test.want || !errors.Is(err, test.err) || !slices.Equal(runs, test.runs) {
			t.Errorf("fails with it %v, without it %v, %v: %+v, %v, after runs with %q", test.with, test.without, test.err, got, err, runs)
		}
	}
}

// A table that is continued has what it had.
func TestTableIsKept(t *testing.T) {
	path := filepath.Join(t.TempDir(), "table.json")
	if empty, err := load(path); err != nil || len(empty.Results) > 0 {
		t.Errorf("of no file: %v, %v", empty, err)
	}
	was := table{Results: []result{{Mutant: "a", By: byTests, Caught: true, How: `store.TestX says "no"`, Seconds: 1.5, Commit: "c"}, {Mutant: "a", By: byChaos, Seed: 2, Seconds: 60}}}
	if err := was.save(path); err != nil {
		t.Fatal(err)
	}
	if is, err := load(path); err != nil || !reflect.DeepEqual(is, was) {
		t.Errorf("it is %v, %v", is, err)
	}
	if err := os.WriteFile(path, []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := load(path); err == nil {
		t.Error("half a file is taken for a table")
	}
}

func TestMarkdown(t *testing.T) {
	table := table{Results: []result{
		{Mutant: "fence", By: byTests, Caught: true, How: "store.TestX", Seconds: 3},
		{Mutant: "fence", By: byChaos, Seed: 1, Caught: true, How: "stale_accepted: 4", Seconds: 70},
		{Mutant: "fence", By: byChaos, Seed: 2, Seconds: 90},
		{Mutant: "fence", By: byChaos, Seed: 3, Caught: true, How: "double_success: 1", Seconds: 80},
		{Mutant: "no-deadline", By: bySimulation, Seed: 1, Caught: true, How: "seed 7: I2 two inside at 18.983s: replicas 1 and 2", Seconds: 1},
		{Mutant: "no-deadline", By: byTests},
	}}
	var out strings.Builder
	table.markdown(&out)
	for _, want := range []string{
		"| `fence` | the status is written under any fence | `store.TestX`, 3 s | — | 2 of 3: `stale_accepted`, 80 s |\n",
		"| `no-deadline` | a lease has no deadline of its own | not caught | `I2 two inside`, 1 s | — |\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("it lacks %q:\n%s", want, &out)
		}
	}
}

var update = flag.Bool("update", false, "write the table of docs/why/mutants.md instead of comparing it")

// The page has the table of the results that are kept, and those are of mutants that there are.
func TestPage(t *testing.T) {
	const page, begin = "../../../docs/why/mutants.md", "| mutant | "
	kept, err := load("../results.json")
	if err != nil {
		t.Fatal(err)
	}
	if len(kept.Results) == 0 {
		t.Fatal("there are no results")
	}
	for _, r := range kept.Results {
		if _, err := mutants.Named(r.Mutant); err != nil {
			t.Error(err)
		}
	}
	var table strings.Builder
	kept.markdown(&table)
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, _, found := strings.Cut(string(text), begin)
	if !found {
		t.Fatalf("%s has no table", page)
	}
	if want := before + table.String(); *update {
		if err := os.WriteFile(page, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if string(text) != want {
		t.Errorf("%s does not end with the table of results.json: go test ./internal/mutants/run -run TestPage -update", page)
	}
}

// Neither a process of a session of its own nor what that has started outlives a look.
func TestNothingIsLeftOfALook(t *testing.T) {
	if err := adopt(); err != nil {
		t.Fatal(err)
	}
	out, err := command(t.Context(), "", "sh", "-c", `setsid sh -c 'trap "" TERM; setsid sleep 1000 & sleep 1000' >/dev/null 2>&1 & echo begun`).Output()
	if string(out) != "begun\n" || err != nil {
		t.Fatalf("%q, %v", out, err)
	}
	if len(procfs.Children(os.Getpid())) == 0 {
		t.Fatal("there is nothing to kill")
	}
	killLeftovers()
	if left := procfs.Children(os.Getpid()); len(left) > 0 {
		t.Errorf("it left %v", left)
	}
}
