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

// A small run on real servers: each phase has its INSERTs, and everything was retried.
func TestBeside(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	var p besidePlan
	p.flags(flag.NewFlagSet("", flag.ContinueOnError))
	p.Out = filepath.Join(t.TempDir(), "beside.json")
	p.Finished, p.Due, p.Retried, p.Inserts, p.Rounds, p.Tasks = 3000, 2000, 5000, 20, 2, 300
	if err := runBeside(ctx, p); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(p.Out)
	if err != nil {
		t.Fatal(err)
	}
	var r besideResult
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	for name, phase := range map[string]besidePhase{"alone": r.Alone, "watched": r.Watched, "retry": r.Retry} {
		if want := map[bool]int{true: 1, false: p.Inserts}[name == "retry"]; phase.N < want || phase.P50 <= 0 || phase.P99 < phase.P50 || phase.Max < phase.P99 {
			t.Errorf("%s: %+v", name, phase)
		}
	}
	if r.OverviewP50MS <= 0 || r.RetryS <= 0 || r.RetryMB <= 0 || r.RetryRatio <= 0 || r.WatchedThroughput <= 0 || len(r.AloneRates) != 2 || len(r.WatchedRates) != 2 || r.WatchedRatio <= 0 {
		t.Errorf("the result is %+v", r)
	}
}
