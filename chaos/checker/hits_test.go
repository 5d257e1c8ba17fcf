package checker

import (
	"maps"
	"testing"

	"onejob/chaos/observer"
)

// What faults meet: work that goes on when they begin, of those that they are aimed at.
func TestHits(t *testing.T) {
	stay := func(fence int64, kind, replica string, begin, end observer.Time) observer.Stay {
		return observer.Stay{Claim: observer.Claim{Task: fence, Fence: fence, Kind: kind, Replica: replica}, Begin: begin, End: end, How: observer.Succeeded}
	}
	outsider := observer.Stay{Claim: observer.Claim{Outsider: "o/1", Replica: "o"}, Begin: 10, End: 20, How: observer.Succeeded}
	v := Check(Evidence{
		Hosts: map[string][]string{"host-1": {"a"}, "host-2": {"b", "idle"}},
		Seen: observer.Seen{
			Stays: []observer.Stay{
				stay(1, kindExec, "a", 10, 20), stay(2, kindExec, "a", 10, 20), // two of one kind count once
				stay(3, kindHTTP, "b", 10, 20), stay(4, "go", "b", 30, 40), outsider,
			},
			Marks: []observer.Mark{
				{ID: 1, Kind: "kill", Target: "a", Begin: 15, End: 16},
				{ID: 2, Kind: "kill", Target: "a,b", Begin: 15, End: 16},
				{ID: 3, Kind: "kill", Target: "a", Begin: 20, End: 50}, // what has just ended, and what begins later, does not count
				{ID: 4, Kind: "host-loss", Target: "host-2", Begin: 12, End: 90},
				{ID: 5, Kind: "child-kill", Target: "a, task 1, pid 7", Begin: 12, End: 13},
				{ID: 11, Kind: "kill", Target: "idle", Begin: 15, End: 16}, // which does nothing
				{ID: 7, Kind: Stranger, Target: "b", Begin: 12, End: 90},   // which has begun work, too
				{ID: 8, Kind: "postgres-terminate", Target: "a", Begin: 150, End: 160},
				{ID: 9, Kind: "postgres-terminate", Target: "b", Begin: 150, End: 160},
				{ID: 10, Kind: "postgres-terminate", Target: "b", Begin: 119, End: 160},
				{ID: 12, Kind: OutsiderKill, Target: "o", Begin: 12, End: 13},
				{ID: 13, Kind: OutsiderFreeze, Target: "p", Begin: 12, End: 13}, // which does nothing
				{ID: 14, Kind: "row-reset", Target: "task 1", Begin: 12, End: 13},
				{ID: 15, Kind: "row-reset", Target: "task 2", Begin: 12, End: 13}, // it was not done
				{ID: 6, Kind: "consul-kill", Target: "127.0.0.1:8500", Begin: 12, End: 13},
			},
		},
		Missed: []int{15},
		Statements: []Statement{
			{Fence: 5, Replica: "b", First: 11, Last: 13},
			{Fence: 6, Replica: "a", First: 100, Last: 110}, // its attempt went on until 300
			{Fence: 7, Replica: "b", First: 100, Last: 110}, // its attempt ended at 120
		},
		Transitions: []Transition{
			{Task: 6, Fence: 6, From: running, To: pending, At: 300}, {Task: 7, Fence: 7, From: running, To: succeeded, At: 120},
		},
	})
	for kind, want := range map[string]map[string]int{
		"kill":               {kindExec: 2, kindHTTP: 1},
		"host-loss":          {kindHTTP: 1, kindSQL: 1},
		"child-kill":         {kindExec: 1},
		"postgres-terminate": {kindSQL: 2},
		OutsiderKill:         {OfOutsiders: 1},
		OutsiderFreeze:       {},
		"row-reset":          {kindExec: 1, kindHTTP: 1, kindSQL: 1, OfOutsiders: 1},
		Stranger:             {kindExec: 1, kindHTTP: 1, kindSQL: 1, OfOutsiders: 1},
		"consul-kill":        {kindExec: 1, kindHTTP: 1, kindSQL: 1, OfOutsiders: 1},
	} {
		if got := v.Hits[kind]; !maps.Equal(got, want) {
			t.Errorf("%s hit %v, want %v", kind, got, want)
		}
	}
}
