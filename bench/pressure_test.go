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
			p.Before, p.During, p.After, p.Every, p.Burst = 2*time.Second, 2*time.Second, time.Second, 500*time.Millisecond, 20_000
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
					if !ok || len(o.Samples) < 3 || o.Before.Begun == 0 || o.Before.P50 <= 0 || o.CPU["postgres"] <= 0 || o.EndedAt <= o.BeganAt || o.Unfinished > 0 || o.Failed > 0 {
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
