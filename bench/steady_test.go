package main

import (
	"context"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestRateBetween(t *testing.T) {
	samples := []sample{{At: 0, Done: 0}, {At: 10.1, Done: 1010}, {At: 20.2, Done: 3030}, {At: 30, Done: 3030}}
	for _, c := range []struct {
		from, to time.Duration
		want     float64
	}{
		{0, 10 * time.Second, 100},
		{0, 20 * time.Second, 150},
		{10 * time.Second, 20 * time.Second, 200},
		{0, 30 * time.Second, 101},
		{21 * time.Second, 30 * time.Second, 0}, // one sample is no rate
		{40 * time.Second, 50 * time.Second, 0},
	} {
		if got := rateBetween(samples, c.from, c.to); got < c.want-0.01 || got > c.want+0.01 {
			t.Errorf("between %v and %v: got %v, want %v", c.from, c.to, got, c.want)
		}
	}
}

func TestCalibrationBetween(t *testing.T) {
	samples := []sample{{At: 0}, {At: 10, CalibrationMS: 100}, {At: 20, CalibrationMS: 200}, {At: 30, CalibrationMS: 400}}
	for to, want := range map[time.Duration]float64{10 * time.Second: 100, 20 * time.Second: 150, 5 * time.Second: 0} {
		if got := calibrationBetween(samples, 0, to); got != want {
			t.Errorf("until %v: got %v, want %v", to, got, want)
		}
	}
	if got := calibrationBetween(samples, 20*time.Second, 30*time.Second); got != 400 {
		t.Errorf("at the end: got %v, want 400", got)
	}
}

// A short steady run with a rate and one without, on real servers.
func TestSteady(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		rate     float64
		lockKeys int
		holdXmin bool
	}{
		"as fast as it can": {}, "at a rate": {rate: 500}, "with lock keys": {lockKeys: 5_000}, "with a snapshot held": {rate: 500, holdXmin: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rate := c.rate
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute) // it builds the subject first
			defer cancel()
			var s steadyPlan
			s.flags(flag.NewFlagSet("", flag.ContinueOnError))
			s.Out, s.Rate, s.LockKeys = filepath.Join(t.TempDir(), "steady.json"), rate, c.lockKeys
			s.HoldXmin = c.holdXmin
			s.Warm = 5 * time.Second // a busy machine may take as long to begin
			s.For, s.Window, s.Every, s.Waiting, s.Retention = 6*time.Second, 3*time.Second, time.Second, 2_000, time.Second
			if err := runSteady(ctx, s); err != nil {
				t.Fatal(err)
			}
			text, err := os.ReadFile(s.Out)
			if err != nil {
				t.Fatal(err)
			}
			var got struct {
				First   float64  `json:"first_tasks_per_second"`
				Last    float64  `json:"last_tasks_per_second"`
				Ratio   float64  `json:"steady_ratio"`
				Samples []sample `json:"samples"`
				P99     float64  `json:"last_pickup_p99_ms"`
				Plan    struct {
					HoldXmin bool `json:"hold_xmin"`
				} `json:"plan"`
			}
			if err := json.Unmarshal(text, &got); err != nil {
				t.Fatal(err)
			}
			if len(got.Samples) < 4 || got.First <= 0 || got.Last <= 0 || got.Ratio <= 0 {
				t.Fatalf("got %+v", got)
			}
			last := got.Samples[len(got.Samples)-1]
			if last.CalibrationMS <= 0 || last.CalibrationMS > 5_000 {
				t.Errorf("the calibration took %v ms", last.CalibrationMS)
			}
			if last.Done <= 0 || last.Bytes["tasks"] <= 0 || last.ReplicaMB <= 0 || last.ConsulMB <= 0 {
				t.Errorf("the last sample is %+v", last)
			}
			if rate > 0 != (got.P99 > 0) {
				t.Errorf("with %v tasks a second the last p99 of pick-up is %v ms", rate, got.P99)
			}
			if got.Plan.HoldXmin != c.holdXmin {
				t.Errorf("a snapshot was held: %v, want %v", got.Plan.HoldXmin, c.holdXmin)
			}
			// Some of the warm-up may have been waiting when it ended.
			if rate > 0 && last.Done > int64(rate*(last.At+s.Warm.Seconds()))+1 {
				t.Errorf("%d tasks were done in %.1f s, more than were enqueued", last.Done, last.At)
			}
		})
	}
}
