package main

import (
	"reflect"
	"testing"
)

func TestPercentile(t *testing.T) {
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(100 - i) // 100 down to 1
	}
	for _, c := range []struct {
		values []float64
		p      float64
		want   float64
	}{
		{hundred, 50, 50},
		{hundred, 99, 99},
		{hundred, 100, 100},
		{hundred, 0, 1},
		{hundred, 0.5, 1},
		{[]float64{7}, 99, 7},
		{[]float64{3, 1, 2}, 50, 2},
		{[]float64{3, 1, 2, 4}, 50, 2},
		{[]float64{3, 1, 2, 4}, 51, 3},
	} {
		if got := percentile(c.values, c.p); got != c.want {
			t.Errorf("percentile %v of %v is %v, want %v", c.p, c.values, got, c.want)
		}
	}
	if hundred[0] != 100 {
		t.Error("percentile sorted the caller's values")
	}
}

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   float64
	}{
		{[]float64{5}, 5},
		{[]float64{9, 1}, 5},
		{[]float64{9, 1, 2}, 2},
		{[]float64{4, 1, 3, 2}, 2.5},
	} {
		if got := median(c.values); got != c.want {
			t.Errorf("the median of %v is %v, want %v", c.values, got, c.want)
		}
	}
}

func TestSpreadOf(t *testing.T) {
	rounds := []float64{2, 8, 4}
	want := spread{Median: 4, Min: 2, Max: 8, Rounds: rounds}
	if got := spreadOf(rounds); !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got := spreadOf(nil); !reflect.DeepEqual(got, spread{}) {
		t.Errorf("of nothing: got %+v", got)
	}
}

// A ratio is made within each round: the median of the ratios of a machine that
// was slow for one round is not the ratio of the medians.
func TestRatios(t *testing.T) {
	got := ratios([]float64{10, 4, 30}, []float64{5, 4, 10, 99})
	if want := []float64{2, 1, 3}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := ratios([]float64{3, 4}, []float64{0, 2}); !reflect.DeepEqual(got, []float64{2}) {
		t.Errorf("got %v with a denominator of zero", got)
	}
	if got := ratios(nil, []float64{1}); got != nil {
		t.Errorf("got %v of nothing", got)
	}
}

func TestRotated(t *testing.T) {
	list := []string{"a", "b", "c"}
	for round, want := range [][]string{{"a", "b", "c"}, {"b", "c", "a"}, {"c", "a", "b"}, {"a", "b", "c"}} {
		if got := rotated(list, round); !reflect.DeepEqual(got, want) {
			t.Errorf("round %d: got %v, want %v", round, got, want)
		}
	}
	if got := rotated([]string(nil), 3); len(got) != 0 {
		t.Errorf("got %v of nothing", got)
	}
}
