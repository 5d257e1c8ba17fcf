package main

import (
	"bytes"
	"testing"
)

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

// Two contests have a ratio only if both took place.
func TestReportOfProcessorTime(t *testing.T) {
	contests := map[string][]outcome{
		"onejob": {{CPU: map[string]float64{"subject": 20, "postgres": 30, "consul": 10}}},
		"river":  {{CPU: map[string]float64{"subject": 10, "postgres": 30}}},
	}
	r := (&measured{benchCases: contests}).report()
	if with, without := r["river_cpu_ratio"], r["river_cpu_ratio_without_consul"]; with != 1.5 || without != 1.25 {
		t.Errorf("the ratios are %v and %v, not 1.5 and 1.25", with, without)
	}
	for name, rounds := range contests {
		r := (&measured{benchCases: map[string][]outcome{name: rounds}}).report()
		for _, key := range []string{"river_cpu_ratio", "river_cpu_ratio_without_consul"} {
			if got, ok := r[key]; ok {
				t.Errorf("of %s alone: %s is %v", name, key, got)
			}
		}
	}
}

func TestLayOut(t *testing.T) {
	const compact = `{"a":{"b":[1,2]},"list":[{"c":"x, [y"},{"c":1}],"n":1.50,"s":"{\"}"}`
	for _, test := range []struct {
		width int
		want  string
	}{
		{1000, compact},
		{20, `{
  "a": {"b":[1,2]},
  "list": [
    {"c":"x, [y"},
    {"c":1}
  ],
  "n": 1.50,
  "s": "{\"}"
}`},
	} {
		var out bytes.Buffer
		if err := layOut(&out, []byte(compact), "", test.width); err != nil || out.String() != test.want {
			t.Errorf("width %d: %v\n%s", test.width, err, out.String())
		}
	}
}

func TestSome(t *testing.T) {
	for _, n := range []int{1, 5, 30, 31, 59, 60, 61, 181} {
		list := make([]int, n)
		for i := range list {
			list[i] = i
		}
		got := some(list, 30)
		if len(got) > 31 || len(got) < min(n, 16) || got[len(got)-1] != n-1 {
			t.Errorf("of %d: %v", n, got)
		}
	}
}
