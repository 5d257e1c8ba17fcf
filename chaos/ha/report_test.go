package main

import (
	"testing"
	"time"

	"onejob/chaos/observer"
)

// The new primary accepts its first write after 18 s, and its first task begins 1 s later.
// Before, there is work that the old primary gave out.
func TestFigures(t *testing.T) {
	began := time.Now()
	after := func(s float64) time.Time { return began.Add(time.Duration(s * float64(time.Second))) }
	stay := func(fence int64, s float64) observer.Stay {
		return observer.Stay{Claim: observer.Claim{Fence: fence}, Begin: observer.At(after(s))}
	}
	w := writers{accepted: []accepted{
		{host: 1, token: "before", timeline: 1, at: after(-1)},
		{host: 1, token: "old", timeline: 1, at: after(2)},
		{host: 3, token: "second", timeline: 2, at: after(19)},
		{host: 2, token: "first", timeline: 2, at: after(18)},
	}}
	f := &figures{began: began, over: after(30)}
	var ok bool
	if f.first, ok = w.first(began, 1); !ok || f.first.token != "first" {
		t.Fatalf("the first write is %+v", f.first)
	}
	f.measure([]observer.Stay{stay(5, -1), stay(6, 3), stay(7, 18.5), stay(101, 19), stay(102, 29), stay(103, 60)},
		[]event{{Time: after(-3), FencesFrom: 1}, {Time: after(18.2), FencesFrom: 100}, {Time: after(70), FencesFrom: 200}},
		w.accepted, map[string]bool{"before": true, "first": true, "second": true}, after(65))
	if f.events != 1 || f.resumed != time.Second || f.gap != 15500*time.Millisecond || f.forgotten != 1 {
		t.Errorf("the figures are %+v", f)
	}
}

func TestOneFollowsAnother(t *testing.T) {
	leader := member{Name: "host2", Role: "leader", State: "running", Timeline: 3}
	standby := member{Name: "host1", Role: "replica", State: "streaming", Timeline: 3}
	behind, down := standby, standby
	behind.Timeline, down.State = 2, "start failed"
	for what, c := range map[string]struct {
		members []member
		want    string
	}{
		"both follow":           {[]member{standby, leader, standby}, "host2"},
		"one is missing":        {[]member{standby, leader}, ""},
		"one is behind":         {[]member{standby, leader, behind}, ""},
		"one is down":           {[]member{down, leader, standby}, ""},
		"there is no primary":   {[]member{standby, standby, standby}, ""},
		"nobody says something": {nil, ""},
	} {
		if got, err := primary(c.members); got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%s: %q, %v", what, got, err)
		}
	}
}
