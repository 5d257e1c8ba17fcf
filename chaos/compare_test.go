package main

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"onejob/chaos/checker"
)

func TestChooseSubjects(t *testing.T) {
	chosen, err := chooseSubjects("onejob, naive,apilock")
	if err != nil || !slices.Equal(chosen, subjectNames) {
		t.Errorf("chosen were %v, %v", chosen, err)
	}
	for _, text := range []string{"", "onejob,", "two jobs", "naive,naive"} {
		if chosen, err := chooseSubjects(text); err == nil {
			t.Errorf("%q: chosen were %v", text, chosen)
		}
	}
}

// onejob's report stays as it is beside the comparison, only onejob can be
// guilty, and what cannot be known of the others is not there.
func TestOutcome(t *testing.T) {
	ours := &report{Report: &checker.Report{Refused: 3}, Seed: 7}
	theirs := &report{Report: &checker.Report{Overlaps: 2, Violations: []string{"overlap: a", "overlap: b"}}, Seed: 7}
	o := outcome{report: ours, Comparison: []column{newColumn(onejobName, ours), newColumn("naive", theirs)}}
	if o.violated() || (outcome{Comparison: o.Comparison}).violated() {
		t.Error("a violation for what another did")
	}
	if !(outcome{report: theirs}).violated() {
		t.Error("no violation")
	}
	b, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Seed       int
		Overlaps   *int
		Comparison []map[string]any
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if got.Seed != 7 || got.Overlaps == nil || *got.Overlaps != 0 || len(got.Comparison) != 2 {
		t.Errorf("it says %s", b)
	}
	if got.Comparison[0]["refused"] != 3.0 || got.Comparison[1]["overlaps"] != 2.0 {
		t.Errorf("it compares %v", got.Comparison)
	}
	if n, ok := got.Comparison[1]["refused"]; ok {
		t.Errorf("what has no fence refused %v writes", n)
	}
	if table := o.table(); !strings.Contains(table, "overlap: b") || !strings.Contains(table, "naive") {
		t.Errorf("the table is\n%s", table)
	}
}
