package checker

import (
	"maps"
	"testing"
	"time"
)

// A working process that ends is a violation, unless a fault ended it.
func TestCrashes(t *testing.T) {
	for name, c := range map[string]struct {
		how    func(s *story) // of daemon-1, at 60
		excuse string         // none: a violation
	}{
		"nothing goes on":                       {func(*story) {}, ""},
		"another replica is killed":             {func(s *story) { s.harm(WorkerKill, "daemon-2", 59, 59.1) }, ""},
		"it was killed long before":             {func(s *story) { s.harm(WorkerKill, "daemon-1", 40, 40.1) }, ""},
		"it is killed later":                    {func(s *story) { s.harm(WorkerKill, "daemon-1", 63, 63.1) }, ""},
		"the replica ends":                      {func(s *story) { s.Crashes[0].Whole = true }, ""},
		"the replica ends as another is killed": {func(s *story) { s.Crashes[0].Whole = true; s.harm("oom", "daemon-2", 59, 59.1) }, ""},
		"it is stopped":                         {func(s *story) { s.harm(GracefulRestart, "daemon-1", 55, 65) }, ""},
		"Postgres is not there":                 {func(s *story) { s.harm("postgres-kill", "the server", 55, 65) }, ""},
		"its host is another one":               {func(s *story) { s.harm(HostLoss, "daemon-2,go-1", 59, 70) }, ""},
		"it panics at its start":                {func(s *story) { s.Crashes[0].Said = "panic: nil map" }, ""},
		"it gives up, and nothing goes on":      {func(s *story) { s.Crashes[0].Said = "onejob: no Postgres within start_timeout (1m0s)" }, ""},
		"it gives up, as a row was edited":      {func(s *story) { gaveUp(s, RowTouched, 1, 20) }, ""},
		"it gives up, after a fault was over":   {func(s *story) { gaveUp(s, "consul-away", -40, -20) }, ""},

		"it gives up, as another replica is killed": {func(s *story) { gaveUp(s, Kill, 1, 20); s.Marks[0].Target = "daemon-2" }, ""},
		"it gives up, as it was killed before":      {func(s *story) { gaveUp(s, Kill, 1, 2); s.Marks[0].Target = "daemon-1" }, ""},
		"it gives up, as a command is killed":       {func(s *story) { gaveUp(s, "child-kill", 1, 20); s.Marks[0].Target = "daemon-1, task 7, pid 5" }, ""},
		"it gives up, as an outsider is cut off":    {func(s *story) { gaveUp(s, OutsiderCut, 1, 20); s.Marks[0].Target = "outsider-1" }, ""},
		"it gives up, as another one is cut off":    {func(s *story) { gaveUp(s, "cut-both", 1, 20); s.Marks[0].Target = "daemon-2" }, ""},
		"it knows an older schema, and is the new version": {func(s *story) {
			s.Old = false
			s.Crashes[0].Said = "onejob: upgrade this binary, a newer one has migrated the database"
		}, ""},

		"its working process is killed, by another clock": {func(s *story) { s.harm(WorkerKill, "daemon-1", 60.5, 60.6) }, "working processes that ended by worker-kill"},
		"its working process is killed":                   {func(s *story) { s.harm(WorkerKill, "daemon-1", 59, 59.1) }, "working processes that ended by worker-kill"},
		"the replica is killed":                           {func(s *story) { s.harm(Kill, "daemon-1", 59, 59.1) }, "working processes that ended by kill"},
		"the largest process is killed":                   {func(s *story) { s.harm("oom", "daemon-1", 59, 59.1) }, "working processes that ended by oom"},
		"the replica ends, as its process is killed":      {func(s *story) { s.Crashes[0].Whole = true; s.harm("oom", "daemon-1", 59.9, 60) }, "replicas that ended by oom"},
		"the replica ends, as Consul is not there":        {func(s *story) { s.Crashes[0].Whole = true; gaveUp(s, "consul-away", 1, 20) }, "replicas that found no Postgres, or got no session, in start_timeout"},
		"it has no memory":                                {func(s *story) { s.harm("replica-memory", "daemon-1", 45, 65) }, "working processes that ended by replica-memory"},
		"its host is lost":                                {func(s *story) { s.harm(HostLoss, "go-1,daemon-1", 55, 65) }, "working processes that ended by host-loss"},
		"it is asked for its stacks":                      {func(s *story) { s.harm(Stacks, "daemon-1", 59, 59.1) }, "working processes that ended by stacks"},
		"the supervisor is frozen as well":                {func(s *story) { s.harm(WorkerKill, "daemon-1", 30, 30.1); s.froze("daemon-1", 29, 58) }, "working processes that ended by worker-kill"},
		"the machine stands still": {func(s *story) {
			s.harm(WorkerKill, "daemon-1", 40, 40.1)
			s.Delays = []Delay{{at(45), 15 * time.Second}}
		}, "working processes that ended by worker-kill"},
		"it gives up, as Consul is not there":  {func(s *story) { gaveUp(s, "consul-away", 1, 20) }, "working processes that found no Postgres, or got no session, in start_timeout"},
		"it gives up, as a person has to help": {func(s *story) { gaveUp(s, Helpless, 1, 20) }, "working processes that found no Postgres, or got no session, in start_timeout"},
		"it gives up, as it is cut off":        {func(s *story) { gaveUp(s, "cut-both", 1, 20); s.Marks[0].Target = "daemon-1" }, "working processes that found no Postgres, or got no session, in start_timeout"},
		"it gives up, as it was frozen":        {func(s *story) { gaveUp(s, Frozen, 1, 55); s.Marks[0].Target = "daemon-1" }, "working processes that found no Postgres, or got no session, in start_timeout"},
		"it knows an older schema alone": {func(s *story) {
			s.Crashes[0].Said = "onejob: upgrade this binary, a newer one has migrated the database"
		},
			"working processes of an old version that found a newer schema"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStory()
			s.Hosts, s.Old = map[string][]string{"host-1": {"daemon-1", "daemon-2"}, "host-2": {"go-1"}}, true
			s.Crashes = []Crash{{Replica: "daemon-1", At: at(60), How: "SIGKILL"}}
			c.how(s)
			v := Check(s.Evidence)
			violations, excused := map[string]int{"worker_crashes": 1}, map[string]int{}
			if c.excuse != "" {
				violations, excused = map[string]int{}, map[string]int{c.excuse: 1}
			}
			if got := numbers(t, v); !maps.Equal(got, violations) || !maps.Equal(v.Excused, excused) || v.Violated() != (c.excuse == "") {
				t.Errorf("the checker found %v, excused %v, want %v and %v: %v", got, v.Excused, violations, excused, v.Violations)
			}
		})
	}
}

// gaveUp lets the working process have waited for its servers, and a fault go on for a while.
func gaveUp(s *story, kind string, begin, end float64) {
	s.Crashes[0].Said = "onejob: no session within start_timeout (1m0s): context deadline exceeded"
	s.harm(kind, "all", begin, end)
}

// A replica that does not end by SIGTERM is a violation, unless it could not.
func TestStops(t *testing.T) {
	for name, c := range map[string]struct {
		how    func(s *story) // of daemon-1, from 60 to 95
		want   int
		excuse string
	}{
		"it is killed":             {func(*story) {}, 1, ""},
		"it ends":                  {func(s *story) { s.Stops[0].Killed = false }, 0, ""},
		"another one is frozen":    {func(s *story) { s.froze("daemon-2", 61, 90) }, 1, ""},
		"it was frozen before":     {func(s *story) { s.froze("daemon-1", 40, 50) }, 1, ""},
		"Postgres is not there":    {func(s *story) { s.harm("postgres-kill", "the server", 55, 100) }, 1, ""},
		"another has no memory":    {func(s *story) { s.harm("replica-memory", "daemon-2", 61, 80) }, 1, ""},
		"it is frozen":             {func(s *story) { s.froze("daemon-1", 50, 90) }, 0, "replicas that were frozen when they were to stop, and were killed"},
		"it has no memory":         {func(s *story) { s.harm("replica-memory", "daemon-1", 50, 80) }, 0, "replicas that had no memory when they were to stop, and were killed"},
		"the machine stands still": {func(s *story) { s.Delays = []Delay{{at(70), 5 * time.Second}} }, 0, "replicas that were to stop on a machine that stood still, and were killed"},
	} {
		s := newStory()
		s.Stops = []Stop{{"daemon-1", at(60), at(95), true}, {"go-1", at(60), at(61), false}}
		c.how(s)
		v := Check(s.Evidence)
		if v.StopsKilled != c.want || v.StopsJudged != 2 || v.Violated() != (c.want > 0) || c.excuse != "" && v.Excused[c.excuse] != 1 || c.excuse == "" && len(v.Excused) > 0 {
			t.Errorf("%s: %d of %d stops, want %d of 2; excused are %v", name, v.StopsKilled, v.StopsJudged, c.want, v.Excused)
		}
	}
}
