package main

import (
	"testing"
	"time"

	"onejob/chaos/checker"
)

// What makes a run inconclusive, one thing at a time; and the short run, of which less is asked.
func TestThin(t *testing.T) {
	kill := &kind{name: "kill"}
	short := settings{Duration: time.Minute, Kinds: []*kind{kill}}
	some := settings{Duration: longEnough, Kinds: []*kind{kill}}
	all := settings{Duration: longEnough, Kinds: []*kind{kill}, All: true}
	hour := settings{Duration: time.Hour, Kinds: []*kind{kill}, All: true}
	upgrades := settings{Duration: time.Hour, Kinds: []*kind{kill, {name: "upgrade", daemons: true}}, All: true}
	outsiders := settings{Duration: time.Hour, Kinds: []*kind{kill, {name: "outsider-kill", outsiders: true}}, All: true}
	for _, test := range []struct {
		name   string
		of     settings
		change func(*report)
		want   int // reasons
	}{
		{"all is there", all, func(*report) {}, 0},
		{"unstopped", short, func(r *report) { r.Unstopped = []string{"daemon-1"} }, 1},
		{"exits", short, func(r *report) { r.Exits = thinExits + 1 }, 1},
		{"a crash of Postgres", short, func(r *report) { r.Crashes = 1 }, 1},
		{"half of the INSERTs failed, in a short run", short, func(r *report) { r.InsertsFailed = 50 }, 0},
		{"half of the INSERTs failed", some, func(r *report) { r.InsertsFailed = 50 }, 1},
		{"most INSERTs failed, in a short run", short, func(r *report) { r.InsertsFailed = 61 }, 1},
		{"a fault hit nothing, in a short run", short, func(r *report) { r.FaultKinds = nil }, 0},
		{"a fault hit nothing", some, func(r *report) { r.FaultKinds = nil }, 1},
		{"nothing refused, with some faults", some, func(r *report) { r.Refused = 0 }, 0},
		{"nothing refused", all, func(r *report) { r.Refused = 0 }, 1},
		{"few outsiders", all, func(r *report) { r.Outsiders = thinOutsiders - 1 }, 1},
		{"nothing expired", all, func(r *report) { r.Expired = 0 }, 1},
		{"no lease ended during work", all, func(r *report) { r.Lateness = checker.Lateness{Told: 1} }, 1},
		{"nobody said when leases end", all, func(r *report) { r.Lateness = checker.Lateness{Silenced: 1} }, 1},
		{"no task that could be starved", all, func(r *report) { r.StarvedJudged = 0 }, 1},
		{"few takeovers", all, func(r *report) { r.TakeOvers = thinTakeOvers - 1 }, 1},
		{"an hour", hour, func(*report) {}, 0},
		{"work that no fault met, in less than an hour", all, func(r *report) { r.Hits = nil }, 0},
		{"a fault met no work", hour, func(r *report) { r.Hits["freeze"] = r.Hits["kill"]; delete(r.Hits, "kill") }, 8},
		{"no fault met a statement", hour, func(r *report) { delete(r.Hits["kill"], "sql") }, 2},
		{"a fault of daemons met no Go handler", upgrades, func(r *report) { r.Hits["upgrade"] = map[string]int{"exec": 1, "http": 1, "sql": 1} }, 0},
		{"a fault of daemons met no statement", upgrades, func(r *report) { r.Hits["upgrade"] = map[string]int{"exec": 1, "http": 1} }, 1},
		{"a fault of outsiders met one", outsiders, func(r *report) { r.Hits["outsider-kill"] = map[string]int{checker.OfOutsiders: 1} }, 0},
		{"a fault of outsiders met tasks alone", outsiders, func(r *report) { r.Hits["outsider-kill"] = r.Hits["kill"] }, 1},
		{"no faults, and growth was judged", settings{Duration: longEnough}, func(r *report) { r.GrowthJudged = 3 }, 0},
		{"no faults, and growth was not judged", settings{Duration: longEnough}, func(*report) {}, 1},
		{"two things", all, func(r *report) { r.Refused, r.TakeOvers = 0, 0 }, 2},
	} {
		r := &report{FaultKinds: map[string]int{"kill": 5, "upgrade": 5, "outsider-kill": 5}, Inserts: 100, TakeOvers: thinTakeOvers,
			Report: &checker.Report{Hits: map[string]map[string]int{"kill": {"exec": thinMetWork, "http": thinMetWork, "go": thinMetWork, "sql": thinMetWork}}, Refused: thinRefused, Outsiders: thinOutsiders, Expired: 1, StarvedJudged: 1, Lateness: checker.Lateness{Told: 1, After: 1}}}
		test.change(r)
		if why := r.thin(test.of); len(why) != test.want {
			t.Errorf("%s: %q", test.name, why)
		}
	}
}
