package main

import (
	"fmt"
	"os"
	"text/tabwriter"
)

// bars are what the figures are to reach.
var bars = []struct {
	key, what string
	least     bool // it must be at least, not at most, the bar
	bar       float64
}{
	{"river_ratio", "throughput against River", true, 1},
	{"river_advisory_ratio", "throughput against River with an advisory lock for each job", true, 1.5},
	{"river_consul_lock_ratio", "throughput against River with a lock of Consul's client for each job", true, 10},
	{"held_row_ratio", "throughput against a row lock held while the work runs", true, 0},
	{"river_cpu_ratio_without_consul", "processor time outside Consul against River's", false, 1},
	{"naive_ratio", "throughput against a session per task", true, 8},
	{"floor_ratio", "throughput against Postgres alone", true, 0},
	{"backlog_ratio", "many waiting rows against few", true, 0.9},
	{"backlog10m_ratio", "very many waiting rows against few", true, 0.9},
	{"herd_ratio", "Postgres' time of a single task, many replicas against few", false, 2},
	{"finished_ratio", "many finished rows against none", true, 0.9},
	{"replicas3_ratio", "3 replicas against 1", true, 0.9},
	{"replicas8_ratio", "8 replicas against 1", true, 0.9},
	{"wasted_lock_ratio", "locks refused, of all asked for", false, 0.01},
	{"pickup_p50_ms", "INSERT to start, p50, ms", false, 5},
	{"pickup_p99_ms", "INSERT to start, p99, ms", false, 25},
	{"pickup_p50_ratio", "the same against River's, p50", false, 1},
	{"pickup_p99_ratio", "the same against River's, p99", false, 1},
	{"idle_cpu_percent", "idle replica, percent of a core", false, 1},
	{"idle_consul_requests_per_s", "idle replica, requests/s to Consul", false, 3},
	{"rss_mb_idle", "idle replica, MB", false, 64},
}

// printReport prints the figures for people.
func printReport(r report) {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	defer w.Flush()
	spreads := r["spread"].(map[string]spread)

	fmt.Fprintln(w, "\nthroughput\ttasks/s\tfrom\tto\tus of CPU per task: all\tsubject\tPostgres\tConsul\tothers on the machine, %")
	others := r["others_share"].(map[string]spread)
	rates, cpu := r["tasks_per_second"].(map[string]spread), r["cpu_us_per_task_by_contest"].(map[string]map[string]float64)
	for _, name := range []string{"onejob", "river", "river-advisory", "river-consul", "held-row", "naive", "floor", "shallow", "deep", "vast", "finished", "replicas3", "replicas8"} {
		if s, ok := rates[name]; ok {
			fmt.Fprintf(w, "%s\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\n", name, s.Median, s.Min, s.Max,
				cpu[name]["all"], cpu[name]["subject"], cpu[name]["postgres"], cpu[name]["consul"], 100*others[name].Median)
		}
	}
	fmt.Fprintln(w, "\nfigure\tmedian\tfrom\tto\tin calm rounds\tbar\t")
	calm := r["calm"].(map[string]spread)
	for _, b := range bars {
		value, ok := r[b.key].(float64)
		if !ok {
			continue
		}
		line := fmt.Sprintf("%s (%s)\t%.3g\t%s", b.key, b.what, value, fromTo(spreads, b.key))
		if s, ok := calm[b.key]; ok {
			line += fmt.Sprintf("\t%.3g (%d)", s.Median, len(s.Rounds))
		} else {
			line += "\t"
		}
		sign := map[bool]string{true: ">=", false: "<="}[b.least]
		reached := map[bool]string{true: "reached", false: "NOT reached"}[value >= b.bar == b.least || value == b.bar]
		if b.bar == 0 {
			fmt.Fprintln(w, line+"\tnone\t")
		} else {
			fmt.Fprintf(w, "%s\t%s %g\t%s\n", line, sign, b.bar, reached)
		}
	}
	for _, key := range []string{"river_pickup_p50_ms", "river_pickup_p99_ms", "river_default_pickup_p50_ms", "river_default_pickup_p99_ms",
		"river_cpu_ratio", "consul_writes_per_task", "rss_mb_busy", "enqueue_rows_per_s", "vain_lock_ratio", "replicas3_given_back_ratio", "replicas8_given_back_ratio"} {
		if value, ok := r[key].(float64); ok {
			fmt.Fprintf(w, "%s\t%.4g\t%s\t\t\t\n", key, value, fromTo(spreads, key))
		}
	}
}

// fromTo returns two cells: how far the rounds of a figure lie apart.
func fromTo(spreads map[string]spread, key string) string {
	s, ok := spreads[key]
	if !ok {
		return "\t"
	}
	return fmt.Sprintf("%.3g\t%.3g", s.Min, s.Max)
}
