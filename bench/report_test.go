package main

import (
	"bytes"
	"slices"
	"testing"
)

func TestReportOfCalmRounds(t *testing.T) {
	m := &measured{benchCases: map[string][]outcome{
		"onejob": {{Rate: 10, Others: 0.01}, {Rate: 4, Others: 0.5}, {Rate: 30, Others: 0.02}, {Rate: 10, Others: 0.03}},
		"river":  {{Rate: 20, Others: 0.01}, {Rate: 40, Others: 0.01}, {Rate: 20, Others: 0.03}, {Rate: 20, Others: 0.09}},
	}}
	r := m.report()
	if got := r["river_ratio"]; got != 0.5 {
		t.Errorf("river_ratio is %v, not the median of 0.5, 0.1, 1.5 and 0.5", got)
	}
	calm := r["calm"].(map[string]spread)["river_ratio"]
	if calm.Median != 1 || len(calm.Rounds) != 2 {
		t.Errorf("of the calm rounds it is %+v, not the median of 0.5 and 1.5", calm)
	}
	if _, ok := r["naive_ratio"]; ok {
		t.Error("there is a ratio to a contest that did not take place")
	}
}

// A ratio of processor time is made within each round, of all processes together. Two contests
// have one only if both took place.
func TestReportOfProcessorTime(t *testing.T) {
	costs := func(subject, postgres, consul, others float64) outcome {
		return outcome{CPU: map[string]float64{"subject": subject, "postgres": postgres, "consul": consul}, Others: others}
	}
	contests := map[string][]outcome{
		"onejob": {costs(20, 30, 10, 0), costs(90, 30, 60, 0.5), costs(20, 60, 20, 0)},
		"river":  {costs(10, 30, 0, 0), costs(20, 10, 0, 0), costs(20, 20, 0, 0)},
	}
	r := (&measured{benchCases: contests}).report()
	spreads, calm := r["spread"].(map[string]spread), r["calm"].(map[string]spread)
	for key, want := range map[string][]float64{"river_cpu_ratio": {1.5, 6, 2.5}, "river_cpu_ratio_without_consul": {1.25, 4, 2}} {
		if got := spreads[key].Rounds; !slices.Equal(got, want) || r[key] != want[2] {
			t.Errorf("%s is %v, of rounds %v; not the median of %v", key, r[key], got, want)
		}
		if got := calm[key].Rounds; !slices.Equal(got, []float64{want[0], want[2]}) {
			t.Errorf("%s of the calm rounds is %v", key, got)
		}
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

// The rounds are as different as a disk can make them. What is in ms is of all together.
func TestReportOfPickup(t *testing.T) {
	m := &measured{pickups: map[string][]pickupRound{
		"onejob": {{delays: []float64{4, 4, 20}, claimed: []float64{1, 2, 3}}, {delays: []float64{4, 6, 30}}, {delays: []float64{5, 5, 50}, others: 0.2}},
		"river":  {{delays: []float64{2, 2, 10}}, {delays: []float64{2, 2, 300}, others: 0.015}, {delays: []float64{2, 5, 10}}},
	}}
	r := m.report()
	for key, want := range map[string]float64{"pickup_p50_ms": 5, "pickup_p99_ms": 50, "river_pickup_p99_ms": 300, "pickup_claimed_p50_ms": 2, "pickup_p50_ratio": 2, "pickup_p99_ratio": 2} {
		if r[key] != want {
			t.Errorf("%s is %v, not %v", key, r[key], want)
		}
	}
	if got, want := r["spread"].(map[string]spread)["pickup_p99_ratio"].Rounds, []float64{2, 0.1, 5}; !slices.Equal(got, want) {
		t.Errorf("the rounds of pickup_p99_ratio are %v, not %v", got, want)
	}
	if got, want := r["calm"].(map[string]spread)["pickup_p99_ratio"].Rounds, []float64{2, 0.1}; !slices.Equal(got, want) {
		t.Errorf("the calm rounds of pickup_p99_ratio are %v, not %v", got, want)
	}
	if got := r["others_share"].(map[string]spread)["river_pickup"].Max; got != 0.015 {
		t.Errorf("others used up to %v beside River's pick-up", got)
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
