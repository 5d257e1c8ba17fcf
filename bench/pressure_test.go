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

// A short run under every pressure, on real servers: nothing is lost, and there is a figure
// and a picture for everything.
func TestPressure(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	defer cancel()
	var p pressurePlan
	p.flags(flag.NewFlagSet("", flag.ContinueOnError))
	p.Out, p.Pictures = filepath.Join(t.TempDir(), "pressure.json"), t.TempDir()
	p.Before, p.During, p.After, p.Overload, p.Every, p.Burst = 2*time.Second, 3*time.Second, 2*time.Second, 3*time.Second, time.Second, 20_000
	if err := runPressure(ctx, p); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(p.Out)
	if err != nil {
		t.Fatal(err)
	}
	var r struct {
		Held      float64                              `json:"held_snapshot_ratio"`
		RiverHeld float64                              `json:"river_held_snapshot_ratio"`
		Pressures map[string]map[string]pressedOutcome `json:"pressures"`
	}
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	if r.Held <= 0 || r.RiverHeld <= 0 {
		t.Errorf("held_snapshot_ratio is %v, River's %v", r.Held, r.RiverHeld)
	}
	for _, k := range pressures {
		for _, s := range pressedSubjects {
			o, ok := r.Pressures[k.name][s.name]
			if !ok || len(o.Samples) < 3 || o.Before.Begun == 0 || o.During.Begun == 0 && k.name != "restart" || o.Before.P50 <= 0 {
				t.Errorf("%s under %s: %+v", s.name, k.name, o)
			}
			// River takes a killed worker's jobs for running for an hour.
			if o.Unfinished > 0 && (s.name == "onejob" || !k.kills) || o.Failed > 0 {
				t.Errorf("%s under %s: %d tasks unfinished, %d failed", s.name, k.name, o.Unfinished, o.Failed)
			}
		}
		picture, err := os.ReadFile(filepath.Join(p.Pictures, "pressure-"+k.name+".svg"))
		if err != nil || !strings.Contains(string(picture), "<svg") || !strings.Contains(string(picture), "river") {
			t.Errorf("the picture of %s: %v", k.name, err)
		}
	}
}
