package main

import (
	"maps"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestParseBusy(t *testing.T) {
	const text = `cpu  111 22 33 9900 880 5 7 9 99 7
cpu0 10 1 2 800 70 0 1 2 0 0
cpu1 100 20 30 9000 800 4 5 6 99 7
cpu12 1 1 1 100 10 1 1 1 0 0
intr 1 2 3 4 5 6 7 8 9
`
	got, err := parseBusy(text)
	if want := map[int]time.Duration{0: 16 * tick, 1: 165 * tick, 12: 6 * tick}; err != nil || !maps.Equal(got, want) {
		t.Errorf("got %v, %v; want %v", got, err, want)
	}
	for _, text := range []string{"cpu0 1 2 3", "cpu0 a 20 30 9000 800 4 5 6", "cpux 1 2 3 4 5 6 7 8"} {
		if _, err := parseBusy(text); err == nil {
			t.Errorf("%q was accepted", text)
		}
	}
}

func TestOnlyOurProcessorsCount(t *testing.T) {
	busy := map[int]time.Duration{0: 16, 1: 165, 12: 6}
	for _, c := range []struct {
		ours       []int
		all        time.Duration
		processors int
	}{
		{[]int{1}, 165, 1},
		{[]int{1, 12}, 171, 2},
		{[]int{1, 2, 3, 12}, 171, 2}, // two are offline
		{[]int{4, 5, 6}, 187, 3},     // of a container that numbers them anew
		{[]int{4}, 0, 0},
	} {
		var ours unix.CPUSet
		for _, processor := range c.ours {
			ours.Set(processor)
		}
		all, processors, err := ofOurs(busy, &ours)
		if all != c.all || processors != c.processors || (err == nil) != (processors > 0) {
			t.Errorf("of %v: got %d of %d, %v; want %d of %d", c.ours, all, processors, err, c.all, c.processors)
		}
	}
}

func TestOthersShare(t *testing.T) {
	began := time.Now()
	from := processorUse{at: began, all: time.Hour, own: time.Minute}
	second := 3 * time.Second // of all processors together
	for _, c := range []struct {
		all, own time.Duration
		want     float64
	}{
		{second / 2, 0, 0.5},
		{second / 2, second / 4, 0.25},
		{second / 2, second / 2, 0},
		{second / 4, second / 2, 0}, // ticks that were counted late
	} {
		to := processorUse{at: began.Add(time.Second), processors: 3, all: from.all + c.all, own: from.own + c.own}
		if got := othersShare(from, to); got != c.want {
			t.Errorf("all %v, own %v: got %v, want %v", c.all, c.own, got, c.want)
		}
	}
}

func TestProcessorUseIsOfOurProcessors(t *testing.T) {
	u, err := readProcessorUse()
	if err != nil || u.processors != runtime.NumCPU() || u.all <= 0 {
		t.Errorf("got %+v, %v; this program may run on %d processors", u, err, runtime.NumCPU())
	}
}
