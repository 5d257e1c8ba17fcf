package main

import "testing"

func TestReportOfCalmRounds(t *testing.T) {
	m := &measured{benchCases: map[string][]outcome{
		"onejob": {{Rate: 10, Others: 0.01}, {Rate: 4, Others: 0.5}, {Rate: 30, Others: 0.02}},
		"river":  {{Rate: 20, Others: 0.01}, {Rate: 40, Others: 0.01}, {Rate: 20, Others: 0.03}},
	}}
	r := m.report()
	if got := r["river_ratio"]; got != 0.5 {
		t.Errorf("river_ratio is %v, not the median of 0.5, 0.1 and 1.5", got)
	}
	calm := r["calm"].(map[string]spread)["river_ratio"]
	if calm.Median != 1 || len(calm.Rounds) != 2 {
		t.Errorf("of the calm rounds it is %+v, not the median of 0.5 and 1.5", calm)
	}
	if _, ok := r["naive_ratio"]; ok {
		t.Error("there is a ratio to a contest that did not take place")
	}
}
