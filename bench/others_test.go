package main

import (
	"runtime"
	"testing"
	"time"
)

func TestParseBusy(t *testing.T) {
	got, err := parseBusy("cpu  100 20 30 9000 800 4 5 6 99 7\ncpu0 1 2 3\n")
	if err != nil || got != 165*tick {
		t.Errorf("got %v, %v; want %v", got, err, 165*tick)
	}
	for _, text := range []string{"", "cpu 1 2 3", "intr 1 2 3 4 5 6 7 8 9", "cpu a 20 30 9000 800 4 5 6"} {
		if _, err := parseBusy(text); err == nil {
			t.Errorf("%q was accepted", text)
		}
	}
}

func TestOthersShare(t *testing.T) {
	began := time.Now()
	from := processorUse{at: began, all: time.Hour, own: time.Minute}
	second := time.Duration(runtime.NumCPU()) * time.Second // of all processors together
	for _, c := range []struct {
		all, own time.Duration
		want     float64
	}{
		{second / 2, 0, 0.5},
		{second / 2, second / 4, 0.25},
		{second / 2, second / 2, 0},
		{second / 4, second / 2, 0}, // ticks that were counted late
	} {
		to := processorUse{at: began.Add(time.Second), all: from.all + c.all, own: from.own + c.own}
		if got := othersShare(from, to); got != c.want {
			t.Errorf("all %v, own %v: got %v, want %v", c.all, c.own, got, c.want)
		}
	}
}
