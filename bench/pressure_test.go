package main

import (
	"context"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A short run under pressure, on real servers: nothing is lost, and there is a figure and a
// picture for everything.
func TestPressure(t *testing.T) {
	t.Parallel()
	for only, subjects := range map[string][]string{"snapshot-full,restart": {"onejob", "river"}, "readers,burst,kills": {"onejob"}} {
		t.Run(only, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
			defer cancel()
			var p pressurePlan
			p.flags(flag.NewFlagSet("", flag.ContinueOnError))
			p.Out, p.Pictures, p.Only, p.Subjects = filepath.Join(t.TempDir(), "pressure.json"), t.TempDir(), only, strings.Join(subjects, ",")
			p.Warm, p.Before, p.During, p.After, p.Every, p.Burst = time.Second, 2*time.Second, 2*time.Second, time.Second, 500*time.Millisecond, 20_000
			if err := runPressure(ctx, p); err != nil {
				t.Fatal(err)
			}
			text, err := os.ReadFile(p.Out)
			if err != nil {
				t.Fatal(err)
			}
			var r struct {
				Pressures map[string]map[string]pressedOutcome `json:"pressures"`
			}
			if err := json.Unmarshal(text, &r); err != nil {
				t.Fatal(err)
			}
			for _, kind := range strings.Split(only, ",") {
				for _, subject := range subjects {
					o, ok := r.Pressures[kind][subject]
					// With a full load, tasks of the warm-up may be all that a slow machine begins before.
					before := func(p pressedPhase) bool { return p.Begun > 0 && p.P50 > 0 || kind == "snapshot-full" }
					if !ok || len(o.Samples) < 3 || o.Before == nil || o.During == nil || o.After == nil || !before(*o.Before) || o.Before.Rate <= 0 || o.During.Begun+o.After.Begun == 0 || o.CPU["postgres"] <= 0 || o.EndedAt <= o.BeganAt || o.Unfinished > 0 || o.Failed > 0 || kind == "readers" && o.Passes == 0 || kind == "burst" && (o.CaughtUp <= 0 || o.Draining <= 0) {
						t.Errorf("%s under %s: %+v", subject, kind, o)
					}
				}
				picture, err := os.ReadFile(filepath.Join(p.Pictures, "pressure-"+kind+".svg"))
				if err != nil || !strings.Contains(string(picture), "<svg") || !strings.Contains(string(picture), "onejob") {
					t.Errorf("the picture of %s: %v", kind, err)
				}
			}
			for _, key := range []string{"held_snapshot_ratio", "river_held_snapshot_ratio"} {
				if strings.Contains(only, "snapshot-full") && !strings.Contains(string(text), `"`+key+`"`) {
					t.Errorf("the results have no %s", key)
				}
			}
		})
	}
}

// Each phase has the seconds and the tasks between its own ends, however long a sample looks back.
func TestPhasesOfPressure(t *testing.T) {
	o := pressedOutcome{BeganAt: 8, EndedAt: 9, Samples: []pressedSample{
		{At: 5, Rate: 100, Others: 0.1, DeadRows: 7}, {At: 8, Rate: 20, Others: 0.5}, {At: 9, Rate: 1000, DeadRows: 3}, {At: 14, Rate: 10}, {At: 15, Rate: 70},
	}}
	began := time.Now()
	at := func(seconds, ms float64) delay {
		return delay{began.Add(time.Duration(seconds * float64(time.Second))), ms}
	}
	o.sumUp([]delay{at(-1, 9999), at(1, 10), at(7.5, 30), at(8.5, 500), at(14.5, 20), at(16, 9999)}, began, 15)
	if want := (pressedPhase{Rate: 70, P50: 10, P99: 30, Max: 30, DeadRows: 7, Begun: 2, Others: 0.25}); o.Before == nil || *o.Before != want {
		t.Errorf("before: %+v, not %+v", o.Before, want)
	}
	if want := (pressedPhase{Rate: 1000, P50: 500, P99: 500, Max: 500, DeadRows: 3, Begun: 1}); o.During == nil || *o.During != want {
		t.Errorf("during: %+v, not %+v", o.During, want)
	}
	if want := (pressedPhase{Rate: 20, P50: 20, P99: 20, Max: 20, Begun: 1}); o.After == nil || *o.After != want {
		t.Errorf("after: %+v, not %+v", o.After, want)
	}
	if o.Samples[1].P50 != 30 || o.Samples[4].P50 != 20 {
		t.Errorf("pick-up of the samples: %+v", o.Samples)
	}
	empty := pressedOutcome{BeganAt: 8, EndedAt: 9, Samples: []pressedSample{{At: 8, Rate: 1}}}
	if empty.sumUp(nil, began, 15); empty.Before == nil || empty.During != nil || empty.After != nil {
		t.Errorf("without samples: %+v", empty)
	}
}
