package main

import (
	"slices"
	"testing"
	"time"
)

// What could not be enqueued for a while was due at its own moments.
func TestTicks(t *testing.T) {
	began := time.Now()
	after := func(n int) time.Time { return began.Add(time.Duration(n) * feedEvery) }
	clock := ticks{next: began, rate: 2 / feedEvery.Seconds()}
	for _, c := range []struct {
		now  time.Time
		rate float64 // from then on; 0: as before
		want []int   // ticks
	}{
		{began.Add(-1), 0, nil},
		{began, 0, []int{0, 0}},
		{after(1).Add(-1), 0, nil},
		{after(4).Add(1), 0.5 / feedEvery.Seconds(), []int{1, 1, 2, 2, 3, 3, 4, 4}},
		{after(5), 0, nil},
		{after(8), 0, []int{6, 8}},
	} {
		var want []int64
		for _, n := range c.want {
			want = append(want, after(n).UnixNano())
		}
		if got := clock.due(c.now); !slices.Equal(got, want) {
			t.Errorf("after %v: got %v, want %v", c.now.Sub(began), got, want)
		}
		if c.rate > 0 {
			clock.rate = c.rate
		}
	}
}
