package main

import (
	"context"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"testing"
	"time"

	"onejob/internal/procfs"
)

// keys are those that readers of the results rely on.
var keys = []string{
	"river_ratio", "river_advisory_ratio", "river_consul_lock_ratio", "held_row_ratio", "naive_ratio", "floor_ratio", "pickup_p50_ms", "pickup_p99_ms", "river_pickup_p50_ms", "river_pickup_p99_ms",
	"backlog_ratio", "backlog10m_ratio", "herd_ratio", "finished_ratio", "replicas3_ratio", "replicas8_ratio", "wasted_lock_ratio", "cpu_us_per_task",
	"consul_writes_per_task", "idle_cpu_percent", "idle_consul_requests_per_s", "rss_mb_idle", "rss_mb_busy", "enqueue_rows_per_s",
	"spread", "machine", "settings", "plan",
}

// A whole run with tiny numbers: real servers, real subjects. What the figures
// are says nothing; that they are there, and that every task ended well, does.
func TestBench(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	defer cancel()
	var p plan
	p.flags(flag.NewFlagSet("", flag.ContinueOnError))
	p.Out = filepath.Join(t.TempDir(), "latest.json")
	p.Rounds, p.Warm, p.Tasks, p.NaiveTasks, p.Shallow, p.Deep, p.Vast, p.Finished = 1, 100, 2_000, 50, 1_000, 3_000, 4_000, 1_000
	p.PickupTasks, p.EnqueueRows, p.EnqueueTimes = 3, 2_000, 1
	p.HerdFew, p.HerdMany, p.HerdTasks, p.HerdSettle = 2, 4, 20, 100*time.Millisecond
	p.IdleSettle, p.IdleWatch = 100*time.Millisecond, time.Second
	if err := runBench(ctx, p); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(p.Out)
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	for _, key := range keys {
		if _, ok := got[key]; !ok {
			t.Errorf("the results have no %s", key)
		}
	}
	for _, key := range []string{"river_ratio", "river_advisory_ratio", "river_consul_lock_ratio", "held_row_ratio", "river_cpu_ratio_without_consul", "naive_ratio", "herd_ratio", "pickup_p50_ms", "rss_mb_idle", "enqueue_rows_per_s"} {
		if n, _ := got[key].(float64); n <= 0 {
			t.Errorf("%s is %v", key, got[key])
		}
	}
	locks, _ := got["locks"].(map[string]any)
	for _, name := range []string{"replicas3", "replicas8"} {
		of, _ := locks[name].(map[string]any)
		if n, _ := of["attempts"].(float64); n < float64(p.Warm+p.Tasks) {
			t.Errorf("%s asked for %v locks, for %d tasks", name, n, p.Warm+p.Tasks)
		}
	}
	if ratio, _ := got["wasted_lock_ratio"].(float64); ratio < 0 || ratio > 1 {
		t.Errorf("wasted_lock_ratio is %v", ratio)
	}
	if cpu, _ := got["cpu_us_per_task"].(map[string]any); len(cpu) != 3 {
		t.Errorf("cpu_us_per_task is %v", cpu)
	}
}

// A run that is told to stop ends soon and leaves nothing behind.
func TestBenchStops(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var p plan
	p.flags(flag.NewFlagSet("", flag.ContinueOnError))
	p.Subjects, p.Warm, p.Tasks = "floor", 10, 100_000_000
	var err error
	if p.Dir, err = os.MkdirTemp(p.Dir, "bench-test-"); err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(p.Dir)
	if err := os.Chmod(p.Dir, 0o755); err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(2*time.Second, cancel)
	done := make(chan error, 1)
	go func() { done <- runBench(ctx, p) }()
	select {
	case err := <-done:
		if err == nil {
			t.Error("it says that it has measured everything")
		}
	case <-time.After(2 * time.Minute):
		t.Fatal("it did not stop")
	}
	left, err := filepath.Glob(filepath.Join(p.Dir, "*"))
	if err != nil || len(left) > 0 {
		t.Errorf("it left %v (%v)", left, err)
	}
	if children := procfs.Children(os.Getpid()); len(children) > 0 {
		t.Errorf("it left processes %v", children)
	}
}
