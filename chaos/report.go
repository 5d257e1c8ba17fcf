package main

import (
	"cmp"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"time"

	"onejob/chaos/checker"
	"onejob/chaos/harness"
)

// report is what is left of a run.
type report struct {
	Seed       uint64            `json:"seed"`
	Settings   map[string]string `json:"settings"` // variables, whether they were set or not
	Build      harness.Build     `json:"build"`
	Conditions []string          `json:"conditions"` // of replicas, that are not as those of the others
	Started    time.Time         `json:"started"`
	DurationS  float64           `json:"duration_s"` // of enqueueing and breaking
	TotalS     float64           `json:"total_s"`
	CPUs       int               `json:"cpus"`

	Faults       int            `json:"faults"`
	FaultKinds   map[string]int `json:"fault_kinds"`
	FaultsMissed int            `json:"faults_missed"` // there was nothing to hit
	Tasks        int            `json:"tasks"`
	Statuses     map[string]int `json:"statuses"`
	Errors       map[string]int `json:"errors"` // of failed tasks, by their beginnings

	*checker.Report

	TakeOvers        int     `json:"takeovers"`
	TakeOverP50      float64 `json:"takeover_p50_s"`
	TakeOverP99      float64 `json:"takeover_p99_s"`
	TakeOverMax      float64 `json:"takeover_max_s"`
	KillTakeOvers    int     `json:"takeovers_kill_alone"` // after a kill -9 while nothing else was going on
	KillTakeOverP50  float64 `json:"takeover_kill_p50_s"`
	KillTakeOverMax  float64 `json:"takeover_kill_max_s"`
	HostTakeOvers    int     `json:"takeovers_host_alone"` // the same after the loss of a host
	HostTakeOverP50  float64 `json:"takeover_host_p50_s"`
	HostTakeOverMax  float64 `json:"takeover_host_max_s"`
	OccurrencesFound int     `json:"occurrences"`

	Edits      int `json:"edits"`       // of schedules
	ClockSteps int `json:"clock_steps"` // of Postgres

	HostileRows int            `json:"hostile_rows"` // that the table admitted
	Touched     map[string]int `json:"touched"`      // changes of rows by hand, and rows locked by open transactions

	Inserts       int      `json:"inserts"` // of the workload, by batches
	InsertsFailed int      `json:"inserts_failed"`
	Helped        int      `json:"helped"`           // how often a person ran onejob adopt-consul because no replica had a session
	Exits         int      `json:"exits"`            // of replicas, by themselves
	PoolerExits   int      `json:"pooler_exits"`     // that no fault caused
	Crashes       int      `json:"postgres_crashes"` // that no fault caused
	Unstopped     []string `json:"unstopped"`
	Thin          []string `json:"thin"` // why the run proves too little

	Leaks  []string `json:"leaks"`  // what grew, and what was left over
	Growth []growth `json:"growth"` // of working processes, and supervisors, that ran all the time
	// GrowthJudged is of how many of these processes it was judged whether they use more and more: none in a short run.
	GrowthJudged int               `json:"growth_judged"`
	Goroutines   map[string][2]int `json:"goroutines,omitempty"` // of idle replicas, before all work and after it
}

// Violated reports whether something happened that must not.
func (r *report) Violated() bool { return r.Report.Violated() || len(r.Leaks) > 0 }

func newReport(s settings, began time.Time, h *faultRun, e *checker.Evidence, v *checker.Report) *report {
	r := &report{Seed: s.Seed, Settings: s.variables(), Started: began.UTC(), DurationS: s.Duration.Seconds(), TotalS: time.Since(began).Round(100 * time.Millisecond).Seconds(),
		CPUs: runtime.NumCPU(), FaultKinds: h.counts, FaultsMissed: h.missed, Statuses: map[string]int{}, Errors: map[string]int{},
		Report: v, TakeOvers: len(v.TakeOvers), OccurrencesFound: len(e.Occurrences), HostileRows: len(e.Hostile), Edits: len(e.Edits), ClockSteps: len(e.ClockSteps), Touched: map[string]int{}}
	for _, t := range e.Touched {
		r.Touched[t.What]++
	}
	for _, n := range h.counts {
		r.Faults += n
	}
	hostile := map[int64]bool{}
	for _, id := range e.Hostile {
		hostile[id] = true
	}
	for id, f := range e.Final {
		if hostile[id] {
			continue
		}
		r.Tasks++
		r.Statuses[f.Status]++
		if f.Status == "failed" {
			r.Errors[beginning(f.Error)]++
		}
	}
	var all, kills, hosts []time.Duration
	for _, t := range v.TakeOvers {
		all = append(all, t.Took)
		if t.Cause == checker.Kill && t.Alone {
			kills = append(kills, t.Took)
		}
		if t.Cause == checker.HostLoss && t.Alone {
			hosts = append(hosts, t.Took)
		}
	}
	seconds := func(d time.Duration) float64 { return float64(d.Milliseconds()) / 1000 }
	r.TakeOverP50, r.TakeOverP99, r.TakeOverMax = seconds(checker.Quantile(all, 0.5)), seconds(checker.Quantile(all, 0.99)), seconds(checker.Quantile(all, 1))
	r.KillTakeOvers = len(kills)
	r.KillTakeOverP50, r.KillTakeOverMax = seconds(checker.Quantile(kills, 0.5)), seconds(checker.Quantile(kills, 1))
	r.HostTakeOvers = len(hosts)
	r.HostTakeOverP50, r.HostTakeOverMax = seconds(checker.Quantile(hosts, 0.5)), seconds(checker.Quantile(hosts, 1))
	return r
}

// beginning is enough of an error to tell its kind.
func beginning(text string) string {
	text = strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' {
			return '#'
		}
		return r
	}, text)
	return text[:min(len(text), 60)]
}

// metAtWork says how many faults of a kind met work of each kind.
func metAtWork(hits map[string]int) string {
	var all []string
	for _, kind := range slices.Sorted(maps.Keys(hits)) {
		all = append(all, fmt.Sprintf("%d %s", hits[kind], kind))
	}
	if len(all) == 0 {
		return "no work"
	}
	return "at work: " + strings.Join(all, ", ")
}

func (r *report) summary() string {
	var b strings.Builder
	line := func(name string, value any, note string) { fmt.Fprintf(&b, "  %-26s %8v  %s\n", name, value, note) }
	fmt.Fprintf(&b, "\n%d faults of %d kinds in %.0f s, seed %d, %s\n", r.Faults, len(r.FaultKinds), r.DurationS, r.Seed, r.Build)
	for _, k := range slices.Sorted(maps.Keys(r.FaultKinds)) {
		fmt.Fprintf(&b, "  %4d %-20s%s\n", r.FaultKinds[k], k, metAtWork(r.Hits[k]))
	}
	fmt.Fprintf(&b, "\n%d tasks: %v; %d attempts seen by the observer\n\nmust be zero:\n", r.Tasks, r.Statuses, r.Stays)
	line("overlaps", r.Overlaps, "two attempts of one lock key inside at once")
	line("fences_repeated", r.FencesRepeated, "fences that two attempts had, or one that began twice")
	line("limit_excesses", r.LimitExcesses, "more inside a limit than it has slots")
	line("lost", r.Lost, "tasks without an end")
	line("double_success", r.DoubleSuccess, "tasks accepted as succeeded twice")
	line("double_effect", r.DoubleEffect, "sql tasks that took effect twice")
	line("double_statements", r.DoubleStatements, fmt.Sprintf("two sql statements of one lock key at work at once, or one and other work; %d that were undone were compared", r.UndoneJudged))
	line("double_running", r.DoubleRunning, "two rows of one lock key running at once")
	line("stale_accepted", r.StaleAccepted, "accepted writes that were not the holder's")
	line("occurrences_missing", r.OccurrencesMissing, fmt.Sprintf("of %d due times", r.OccurrencesFound))
	line("occurrences_doubled", r.OccurrencesDoubled, "")
	line("occurrences_wrong", r.OccurrencesWrong, fmt.Sprintf("due times that no line named, after %d edits", r.Edits))
	line("starved", r.Starved, fmt.Sprintf("due tasks that nobody claimed for 8 s, with all servers and most replicas in order; a wait of a minute would have been found of %d", r.StarvedJudged))
	line("unlocked", r.Unlocked, "attempts that began while no Consul server ran")
	line("worker_crashes", r.WorkerCrashes, "working processes, or replicas, that ended, and no fault ends them")
	line("stops_killed", r.StopsKilled, fmt.Sprintf("replicas that did not end by SIGTERM, of %d that had it", r.StopsJudged))
	line("spent", r.Spent, "attempts that nothing but a graceful restart used up")
	line("spoiled", r.Spoiled, "tasks that failed although no fault ends attempts")
	line("illegal_steps", r.IllegalSteps, "changes of rows that the state machine does not know")
	line("unexpected_ends", r.UnexpectedEnds, fmt.Sprintf("ends of attempts and tasks that neither the task nor a fault explains; %d attempts that were given back were judged, and %d that had not begun", r.RequeuesJudged, r.UnbegunJudged))
	line("overstays", r.Overstays, fmt.Sprintf("attempts that went on after their timeout, or a cancel; %d cancels of running tasks were judged", r.CancelsJudged))
	line("late_takeovers", r.LateTakeOvers, fmt.Sprintf("of %d rows of replicas that were killed alone", r.RowsOfTheDead))
	line("late_ends", r.LateEnds, fmt.Sprintf("attempts at work for more than %.1f s after their lease: %d of %d ended after it, p50 %.3f s, max %.3f s", r.Lateness.Bound, r.Lateness.After, r.Lateness.Told, r.Lateness.P50, r.Lateness.Max))
	line("misrouted", r.Misrouted, "claims by replicas that do not serve the queue")
	line("unique_broken", r.UniqueBroken, "unique keys that two tasks had, or that nobody had and were refused")
	line("outputs_wrong", r.OutputsWrong, "outputs without their head or tail")
	line("leaks", len(r.Leaks), fmt.Sprintf("what grew, judged of %d processes, or was left over when everything had ended", r.GrowthJudged))
	fmt.Fprintln(&b, "to know:")
	line("hostile_rows", r.HostileRows, fmt.Sprintf("that the table admitted; rows touched by hand: %v", r.Touched))
	line("faults_missed", r.FaultsMissed, "there was nothing to hit")
	line("refused", r.Refused, "writes that the fence kept out")
	line("frozen_http_in_flight", r.FrozenHTTPInFlight, "requests of frozen replicas beside their successors'")
	line("frozen_go_in_flight", r.FrozenGoInFlight, "Go handlers that were frozen beside their successors")
	line("suspended_commands", r.SuspendedCommands, "commands that were stopped with their guards, beside their successors")
	line("two_hands", r.Overrides, "overlaps made by ending a session and resetting its row")
	line("one_hand", r.Unguarded, "overlaps with an outsider whose key a fault took away")
	line("outsiders", r.Outsiders, "commands under onejob lock")
	line("expired", r.Expired, "tasks that retention deleted as their rows asked for")
	line("silenced", r.Lateness.Silenced, fmt.Sprintf("attempts of replicas that nobody could hear of; the last one ended %.1f s after the last possible deadline; in %d times for which nobody could, nothing was to begin", r.Lateness.SilencedMax, r.Lateness.CutsJudged))
	for _, name := range slices.Sorted(maps.Keys(r.Excuses)) {
		line("excuse", r.Excuses[name].Count, fmt.Sprintf("%s: max %.3f s, and from %.1f s on a violation", name, r.Excuses[name].Max, r.Excuses[name].Bound))
	}
	slack := func(name string, s checker.Spread) {
		line("slack", s.N, fmt.Sprintf("%s: min %.3f s, p1 %.3f s, p50 %.3f s", name, s.Min, s.P1, s.P50))
	}
	slack("from one attempt to the next of its lock key", r.Slack.All)
	slack("where a replica had lost the lease", r.Slack.Lost)
	line("repeated", r.Repeated, "tasks that did their work more than once")
	line("takeover_p50_s", r.TakeOverP50, fmt.Sprintf("of %d", r.TakeOvers))
	line("takeover_p99_s", r.TakeOverP99, "")
	line("takeover_max_s", r.TakeOverMax, "")
	line("takeover_kill_p50_s", r.KillTakeOverP50, fmt.Sprintf("of %d after a kill -9 alone", r.KillTakeOvers))
	line("takeover_kill_max_s", r.KillTakeOverMax, "")
	line("takeover_host_p50_s", r.HostTakeOverP50, fmt.Sprintf("of %d after a host-loss alone", r.HostTakeOvers))
	line("takeover_host_max_s", r.HostTakeOverMax, "")
	line("inserts_failed", r.InsertsFailed, fmt.Sprintf("of %d", r.Inserts))
	line("helped", r.Helped, "times a person ran adopt-consul, as no replica had a session")
	line("exits", r.Exits, "of replicas, by themselves")
	line("pooler_exits", r.PoolerExits, "of pgbouncer, without a fault")
	line("postgres_crashes", r.Crashes, "processes of Postgres that a signal ended, without a fault")
	for _, what := range slices.Sorted(maps.Keys(r.Excused)) {
		line("excused", r.Excused[what], what)
	}
	for _, rule := range slices.Sorted(maps.Keys(r.Steps)) {
		line("steps", r.Steps[rule], cmp.Or(rule, "illegal"))
	}
	for _, why := range r.Thin {
		fmt.Fprintln(&b, "\ninconclusive:", why)
	}
	for _, leak := range r.Leaks {
		fmt.Fprintln(&b, "\nleak:", leak)
	}
	if len(r.Violations) > 0 {
		fmt.Fprintln(&b, "\nviolations:")
		for _, v := range r.Violations[:min(30, len(r.Violations))] {
			fmt.Fprintln(&b, " ", v)
		}
	}
	return b.String()
}
