package checker

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"onejob/chaos/observer"
	"onejob/internal/testenv/lifecycle"
)

// outsider is a command of an outsider.
func outsider(name, key string) observer.Claim {
	starter, _, _ := strings.Cut(name, "/")
	return observer.Claim{Outsider: name, Kind: "exec", Key: key, Replica: starter}
}

// leased is an attempt at a new task from 50 on, whose lease ends at 60, as its replica says
// at a moment.
func leased(s *story, kind string, said, end float64) {
	c := claim(7, 20, kind, "7", "a")
	s.enqueue(7, kind)
	s.claim(c, 49.9)
	s.stay(c, 50, end, observer.Gone)
	s.change(c, running, pending, end+0.1, "")
	s.Final[7] = Final{Status: failed}
	s.Leases = map[int64]observer.Lease{20: {Deadline: at(60), Told: at(said)}}
}

// harm is a fault beside which others go on.
func (s *story) harm(kind, target string, begin, end float64) {
	s.Marks = append(s.Marks, observer.Mark{ID: 300 + len(s.Marks), Kind: kind, Target: target, Begin: at(begin), End: at(end)})
}

// deleteKeys lets an operator delete keys of Consul.
func (s *story) deleteKeys(when float64, keys ...string) {
	s.harm(KeyDelete, "service/onejob/", when, when+0.1)
	for _, key := range keys {
		s.Marks[len(s.Marks)-1].Keys = append(s.Marks[len(s.Marks)-1].Keys, "service/onejob/"+key)
	}
}

// silent is an attempt at a new task from 50 on; from 52 on a fault keeps its replica from
// every heartbeat.
func silent(s *story, kind, fault string, over, end float64) {
	s.Lease = 9 * time.Second
	c := claim(7, 20, kind, "7", "a")
	s.enqueue(7, kind)
	s.claim(c, 49.9)
	s.stay(c, 50, end, observer.Gone)
	s.change(c, running, pending, end+0.1, "")
	s.Final[7] = Final{Status: failed}
	s.harm(fault, "a", 52, over)
}

// beginsLate is an attempt at a new task from a moment on, as a fault that keeps its replica from every heartbeat
// has gone on since 52.
func beginsLate(s *story, kind, fault string, over, begin float64) {
	s.Lease = 9 * time.Second
	s.enqueue(7, kind)
	s.works(claim(7, 20, kind, "7", "a"), begin, begin+0.5, observer.Stopped, pending)
	s.Final[7] = Final{Status: failed}
	s.harm(fault, "a", 52, over)
}

// beside is a command of an outsider on the lock key of a task's command, from 55 on, when
// that goes on until 60.
func beside(s *story) {
	s.enqueue(7, "exec")
	s.works(claim(7, 20, "exec", "shared", "a"), 50, 60, observer.Stopped, pending)
	s.Final[7] = Final{Status: failed}
	s.stay(outsider("o/1", "shared"), 55, 61, observer.Succeeded)
}

// unique adds a row with a unique key, and ends it at a moment.
func (s *story) unique(task int64, key string, begin, end float64) {
	l := s.live(Enqueued{Task: task, Kind: "noop"})
	l.row.UniqueKey, l.row.RunAt, l.row.CreatedAt = key, tick(begin), tick(begin)
	row := l.row
	l.row = lifecycle.Row{}
	l.step(begin, Operator, func(r *lifecycle.Row) { *r = row })
	l.claim(begin+0.5, "a").ends(end, "a", succeeded, "")
}

// kept adds a row that is to be kept for 5 s, ends at 52, and is deleted.
func (s *story) kept(deleted float64, by string) {
	l := s.live(Enqueued{Task: 7, Kind: "noop", KeepFor: 5 * time.Second})
	l.row.KeepFor = "00:00:05"
	l.claim(50, "a").ends(52, "a", succeeded, "")
	l.step(deleted, by, func(r *lifecycle.Row) { *r = lifecycle.Row{} })
	delete(s.Final, 7)
}

// inElastic lets so many work under a limit of two, from 50 on, one second after the other,
// until 70.
func inElastic(s *story, n int64) {
	for i := range n {
		c := claim(7+i, 20+i, "exec", "x"+string('0'+rune(i)), "a")
		c.Limit = "narrow"
		s.enqueue(c.Task, "exec")
		s.works(c, 50+float64(i), 70, observer.Succeeded, succeeded)
	}
}

func (s *story) resize(slots int, when float64, done bool) {
	s.Resizes = append(s.Resizes, Resize{Limit: "narrow", Slots: slots, From: at(when), To: at(when + 0.1), Done: done})
}

// Each case has one thing more than the good history, and the checker must count it as it
// should: as a violation, or as what it is instead.
func TestSlack(t *testing.T) {
	for name, c := range map[string]struct {
		how  func(s *story)
		want map[string]int
	}{
		"a command that ends with its lease":                   {func(s *story) { leased(s, "exec", 51, 60.4) }, map[string]int{}},
		"a command that ends 3 s after its lease":              {func(s *story) { leased(s, "exec", 51, 63) }, map[string]int{"late_ends": 1}},
		"a handler that ends 3 s after its lease":              {func(s *story) { leased(s, "go", 51, 63) }, map[string]int{"late_ends": 1}},
		"a command whose lease is said to have ended long ago": {func(s *story) { leased(s, "exec", 61, 64) }, map[string]int{"late_ends": 1}},
		"a command whose lease was said to end a moment ago":   {func(s *story) { leased(s, "exec", 62.5, 63) }, map[string]int{}},
		"a command that ends 3 s after its lease while the machine stands still": {func(s *story) {
			leased(s, "exec", 51, 63)
			s.Delays = []Delay{{at(60.5), 2 * time.Second}}
		}, map[string]int{}},
		"a command of a frozen replica, 3 s after its lease": {func(s *story) {
			leased(s, "exec", 51, 63)
			s.froze("a", 55, 70)
		}, map[string]int{"late_ends": 1}},
		"a handler of a frozen replica, 3 s after its lease": {func(s *story) {
			leased(s, "go", 51, 63)
			s.froze("a", 55, 62)
		}, map[string]int{}},
		"a handler that was frozen after its lease had ended": {func(s *story) {
			leased(s, "go", 51, 63)
			s.froze("a", 60.5, 70)
		}, map[string]int{"late_ends": 1}},

		"a command of a replica that was killed":                               {func(s *story) { silent(s, "exec", Kill, 53, 57) }, map[string]int{"takeovers": 0}},
		"a command that outlives its killed replica by 12 s":                   {func(s *story) { silent(s, "exec", Kill, 53, 64) }, map[string]int{"late_ends": 1}},
		"a command that outlives its host by 12 s":                             {func(s *story) { silent(s, "exec", HostLoss, 80, 64) }, map[string]int{"late_ends": 1}},
		"a command whose replica has been frozen for 12 s":                     {func(s *story) { silent(s, "exec", Frozen, 80, 64) }, map[string]int{"late_ends": 1}},
		"a handler whose replica has been frozen for 12 s":                     {func(s *story) { silent(s, "go", Frozen, 80, 64) }, map[string]int{}},
		"a command whose replica was frozen for 8 s":                           {func(s *story) { silent(s, "exec", Frozen, 60, 64) }, map[string]int{}},
		"a request whose replica has been black-holed for 12 s":                {func(s *story) { silent(s, "http", "cut-consul", 80, 64) }, map[string]int{"late_ends": 1}},
		"a handler whose replica has been black-holed for 12 s":                {func(s *story) { silent(s, "go", "cut-both", 80, 64) }, map[string]int{"late_ends": 1}},
		"a handler that begins when its replica has been black-holed for 12 s": {func(s *story) { beginsLate(s, "go", "cut-consul", 80, 64) }, map[string]int{"late_ends": 1}},
		"a command that begins when its replica has been frozen for 12 s":      {func(s *story) { beginsLate(s, "exec", Frozen, 80, 64) }, map[string]int{"late_ends": 1}},
		"a command of an outsider that begins when it has been black-holed for 12 s": {func(s *story) {
			s.Lease = 9 * time.Second
			s.harm(OutsiderCut, "o", 52, 80)
			s.stay(outsider("o/1", "shared"), 64, 65, observer.Succeeded)
		}, map[string]int{"late_ends": 1, "outsiders": 1}},
		"a handler that begins as its replica is black-holed, and goes on for 12 s": {func(s *story) {
			beginsLate(s, "go", "cut-consul", 80, 53)
			s.Stays[len(s.Stays)-1].End = at(64)
			s.Transitions[len(s.Transitions)-1].At = at(64.1)
		}, map[string]int{"late_ends": 1}},
		"a handler that begins when its replica has been black-holed for 5 s":     {func(s *story) { beginsLate(s, "go", "cut-consul", 80, 57) }, map[string]int{}},
		"a handler that begins as its replica is connected again":                 {func(s *story) { beginsLate(s, "go", "cut-consul", 64.3, 64) }, map[string]int{}},
		"a handler that begins after its replica was connected again":             {func(s *story) { beginsLate(s, "go", "cut-consul", 63, 64) }, map[string]int{}},
		"a command of a replica that was started again":                           {func(s *story) { beginsLate(s, "exec", Kill, 53, 64) }, map[string]int{}},
		"a handler that begins in the place of another replica's that is cut off": {func(s *story) { beginsLate(s, "go", "cut-consul", 80, 64); s.Marks[len(s.Marks)-1].Target = "b" }, map[string]int{}},
		"a handler whose replica is black-holed, and another fault of its links ends earlier": {func(s *story) {
			silent(s, "go", "cut-both", 80, 64)
			s.harm("slow", "a", 53, 55)
		}, map[string]int{"late_ends": 1}},

		"an outsider after a task":                        {func(s *story) { s.stay(outsider("o/1", "k"), 50, 51, observer.Succeeded) }, map[string]int{"outsiders": 1}},
		"an outsider beside a task":                       {beside, map[string]int{"overlaps": 1, "outsiders": 1}},
		"an outsider beside a task whose key was deleted": {func(s *story) { beside(s); s.deleteKeys(52, "tasks/shared") }, map[string]int{"one_hand": 1, "outsiders": 1}},
		"an outsider beside a task, when other keys were deleted": {func(s *story) {
			beside(s)
			s.deleteKeys(52, "tasks/shared-1", "tasks/s", "limits/shared/.lock", "running/shared", "leader")
			s.harm(KeyDelete, "service/onejob/tasks/", 52, 52.1)
		}, map[string]int{"overlaps": 1, "outsiders": 1}},
		"an outsider beside a task, before a key was deleted": {func(s *story) { beside(s); s.deleteKeys(56, "tasks/shared") }, map[string]int{"overlaps": 1, "outsiders": 1}},
		"an outsider beside a task whose session was ended":   {func(s *story) { beside(s); s.harm(SessionUnheard, "a", 52, 70) }, map[string]int{"one_hand": 1, "outsiders": 1}},
		"an outsider beside a task, where another session was ended": {func(s *story) { beside(s); s.harm(SessionUnheard, "b", 52, 70) },
			map[string]int{"overlaps": 1, "outsiders": 1}},
		"an outsider beside a task whose key was deleted long ago": {func(s *story) {
			s.enqueue(7, "exec")
			s.works(claim(7, 20, "exec", "shared", "a"), 50, 80, observer.Stopped, pending)
			s.Final[7] = Final{Status: failed}
			s.deleteKeys(52, "tasks/shared")
			s.stay(outsider("o/1", "shared"), 55, 61, observer.Succeeded)
			s.stay(outsider("o/2", "shared"), 75, 76, observer.Succeeded)
		}, map[string]int{"one_hand": 1, "overlaps": 1, "outsiders": 2}},
		"two outsiders at once": {func(s *story) {
			s.stay(outsider("o/1", "shared"), 50, 55, observer.Succeeded)
			s.stay(outsider("p/1", "shared"), 54, 56, observer.Succeeded)
		}, map[string]int{"overlaps": 1, "outsiders": 2}},
		"an outsider beside a handler that is frozen": {func(s *story) {
			s.froze("a", 51, 70)
			s.enqueue(7, "go")
			s.works(claim(7, 20, "go", "shared", "a"), 50, 71, observer.Stopped, pending)
			s.Final[7] = Final{Status: failed}
			s.stay(outsider("o/1", "shared"), 65, 66, observer.Succeeded)
		}, map[string]int{"frozen_go_in_flight": 1, "outsiders": 1}},
		"an outsider that began while no Consul server ran": {func(s *story) {
			s.harm(NoConsul, "all", 50, 60)
			s.stay(outsider("o/1", "shared"), 55, 56, observer.Succeeded)
		}, map[string]int{"unlocked": 1, "outsiders": 1}},
		"an outsider that outlives onejob lock by 12 s": {func(s *story) {
			s.Lease = 9 * time.Second
			s.harm(OutsiderKill, "o", 52, 52.1)
			s.stay(outsider("o/1", "shared"), 50, 64, observer.Gone)
		}, map[string]int{"late_ends": 1, "outsiders": 1}},

		"a task that was starved while the machine stood still": {func(s *story) {
			starve(s, HostileRows)
			s.works(claim(7, 20, "exec", "7", "a"), 63, 64, observer.Succeeded, succeeded)
			s.Delays = []Delay{{at(55), 2 * time.Second}}
		}, map[string]int{}},
		"a task that was starved for longer than the machine stood still": {func(s *story) {
			starve(s, HostileRows)
			s.works(claim(7, 20, "exec", "7", "a"), 69, 70, observer.Succeeded, succeeded)
			s.Delays = []Delay{{at(55), 2 * time.Second}}
		}, map[string]int{"starved": 1}},

		"a row that was reset, beside its successor, long after the session ended": {func(s *story) {
			handsOn(s, SessionUnheard, "b")
			late(s)
		}, map[string]int{"overlaps": 1}},

		"a row of a queue that the replica serves": {func(s *story) {
			s.Queues = map[string][]string{"a": {"default", "other"}}
			s.queued("other")
		}, map[string]int{}},
		"a row of a queue that the replica does not serve": {func(s *story) {
			s.Queues = map[string][]string{"a": {"default"}}
			s.queued("other")
		}, map[string]int{"misrouted": 1}},

		"two tasks with one unique key, one after the other": {func(s *story) {
			s.unique(7, "u", 50, 52)
			s.unique(8, "u", 53, 54)
			s.Declined = []Declined{{"u", at(51), at(51.2)}}
		}, map[string]int{}},
		"two tasks with one unique key at once": {func(s *story) {
			s.unique(7, "u", 50, 52)
			s.unique(8, "u", 51, 54)
			s.sortSteps()
		}, map[string]int{"unique_broken": 1}},
		"two tasks with one unique key at once, whose INSERTs nobody noted": {func(s *story) {
			s.unique(7, "u", 50, 52)
			s.unique(8, "u", 51, 54)
			s.sortSteps()
			s.Steps = slices.DeleteFunc(s.Steps, func(s lifecycle.Step) bool { return s.Was.Status == "" })
		}, map[string]int{"unique_broken": 1}},
		"a unique key that was refused though no task had it": {func(s *story) {
			s.unique(7, "u", 50, 52)
			s.Declined = []Declined{{"u", at(53), at(53.2)}}
		}, map[string]int{"unique_broken": 1}},

		"a task that was kept for long enough":     {func(s *story) { s.kept(58, "b") }, map[string]int{"expired": 1}},
		"a task that was not kept for long enough": {func(s *story) { s.kept(55, "b") }, map[string]int{"expired": 1, "lost": 1}},
		"a task that was not kept for long enough, with another clock": {func(s *story) {
			s.kept(55, "b")
			s.ClockSteps = []ClockStep{{at(99), time.Minute}}
		}, map[string]int{"expired": 1, "lost": 1}},
		"a task that the clock of Postgres says was kept for long enough": {func(s *story) {
			s.kept(55, "b")
			s.ClockSteps = []ClockStep{{at(53), time.Minute}}
			deletion := &s.Steps[len(s.Steps)-1]
			deletion.Began, deletion.Statement, deletion.Noted = tick(115), tick(115), tick(115)
		}, map[string]int{"expired": 1}},
		"a task that was kept for long enough, when the clock was set back during its deletion": {func(s *story) {
			s.kept(58, "b")
			s.ClockSteps = []ClockStep{{at(58), -27 * time.Second}}
			deletion := &s.Steps[len(s.Steps)-1]
			deletion.Began, deletion.Statement, deletion.Noted = tick(58), tick(31), tick(31)
		}, map[string]int{"expired": 1}},
		"a task that was not kept for long enough, when the clock was set forward during its deletion": {func(s *story) {
			s.kept(55, "b")
			s.ClockSteps = []ClockStep{{at(55), time.Minute}}
			deletion := &s.Steps[len(s.Steps)-1]
			deletion.Began, deletion.Statement, deletion.Noted = tick(55), tick(115), tick(115)
		}, map[string]int{"expired": 1, "lost": 1}},
		"a task without keep_for that a replica deleted":          {func(s *story) { s.kept(58, "b"); s.Enqueued[len(s.Enqueued)-1].KeepFor = 0 }, map[string]int{"lost": 1}},
		"an output without its tail":                              {func(s *story) { s.BadOutputs = []int64{1} }, map[string]int{"outputs_wrong": 1}},
		"four under a limit that was raised before":               {func(s *story) { s.resize(4, 45, true); inElastic(s, 4) }, map[string]int{}},
		"four under a limit that was raised to three":             {func(s *story) { s.resize(3, 45, true); inElastic(s, 4) }, map[string]int{"limit_excesses": 1}},
		"four under a limit that was raised too late":             {func(s *story) { s.resize(4, 54, true); inElastic(s, 4) }, map[string]int{"limit_excesses": 2}},
		"two under a limit that was lowered long before":          {func(s *story) { s.resize(1, 40, true); inElastic(s, 2) }, map[string]int{"limit_excesses": 1}},
		"two under a limit that was lowered a moment ago":         {func(s *story) { s.resize(1, 49.5, true); inElastic(s, 2) }, map[string]int{}},
		"four under a limit that may have been raised":            {func(s *story) { s.resize(4, 45, false); inElastic(s, 4) }, map[string]int{}},
		"two, when Consul forgot that a limit was lowered":        {func(s *story) { s.resize(1, 40, true); s.harm(ConsulRestore, "of before", 45, 46); inElastic(s, 2) }, map[string]int{}},
		"two, when a key of a limit that was lowered was deleted": {func(s *story) { s.resize(1, 40, true); s.deleteKeys(45, "limits/narrow/.lock"); inElastic(s, 2) }, map[string]int{}},
		"two, when keys of others than the lowered limit were deleted": {func(s *story) {
			s.resize(1, 40, true)
			s.deleteKeys(45, "limits/wide/.lock", "tasks/x0", "limits/narrow-2/.lock")
			inElastic(s, 2)
		}, map[string]int{"limit_excesses": 1}},
		"two, long after a restored limit was lowered":                  {func(s *story) { s.harm(ConsulRestore, "of before", 1, 2); s.resize(1, 40, true); inElastic(s, 2) }, map[string]int{"limit_excesses": 1}},
		"three inside of two, when Consul may have forgotten one":       {func(s *story) { s.harm(ConsulRestore, "of before", 50.5, 51); inElastic(s, 3) }, map[string]int{}},
		"three inside of two, when Consul was wiped, and has no limits": {func(s *story) { s.RabbitMQ = true; s.harm(ConsulWiped, "all", 50.5, 51); inElastic(s, 3) }, map[string]int{"limit_excesses": 1}},
		"two, when Consul forgot, and had not the limit that was lowered": {func(s *story) {
			s.RabbitMQ = true
			s.resize(1, 40, true)
			s.harm(ConsulRestore, "of before", 45, 46)
			s.deleteKeys(45, "limits/narrow/.lock")
			inElastic(s, 2)
		}, map[string]int{"limit_excesses": 1}},
		"three inside of two, long after a restore":          {func(s *story) { s.harm(ConsulRestore, "of before", 30, 31); inElastic(s, 3) }, map[string]int{"limit_excesses": 1}},
		"three inside of two, just before a restore":         {func(s *story) { s.harm(ConsulRestore, "of before", 53, 54); inElastic(s, 3) }, map[string]int{"limit_excesses": 1}},
		"two, when a limit that was lowered may not be":      {func(s *story) { s.resize(1, 40, false); inElastic(s, 2) }, map[string]int{}},
		"three under a limit that was lowered to what it is": {func(s *story) { s.resize(2, 40, true); inElastic(s, 3) }, map[string]int{"limit_excesses": 1}},
	} {
		t.Run(name, func(t *testing.T) {
			s := good()
			c.how(s)
			v := Check(s.Evidence)
			want := maps.Clone(c.want)
			maps.DeleteFunc(want, func(_ string, n int) bool { return n == 0 })
			if got := numbers(t, v); !maps.Equal(got, want) {
				t.Errorf("the checker found %v, want %v; it says\n\t%s", got, want, strings.Join(v.Violations, "\n\t"))
			}
		})
	}
}

// queued adds a row of a queue that replica a claims.
func (s *story) queued(queue string) {
	l := s.live(Enqueued{Task: 7, Kind: "noop"})
	l.row.Queue = queue
	l.claim(50, "a").ends(51, "a", succeeded, "")
}

// sortSteps puts the steps into the order in which they were made.
func (s *story) sortSteps() {
	// Bubbles are enough for four.
	for range s.Steps {
		for i := 1; i < len(s.Steps); i++ {
			if s.Steps[i].At < s.Steps[i-1].At {
				s.Steps[i], s.Steps[i-1] = s.Steps[i-1], s.Steps[i]
			}
		}
	}
}

// late lets all that goes on beside its successor do so for half a minute more.
func late(s *story) {
	for i := range s.Stays {
		if s.Stays[i].Fence >= 20 {
			s.Stays[i].End = s.Stays[i].End.Add(30 * time.Second)
		}
	}
	for i := range s.Transitions {
		if s.Transitions[i].Fence >= 20 && s.Transitions[i].From == running && s.Transitions[i].By != Operator {
			s.Transitions[i].At = s.Transitions[i].At.Add(30 * time.Second)
		}
	}
}

func TestHandovers(t *testing.T) {
	v := Check(good().Evidence)
	if got, want := v.Slack.All, (Spread{N: 5, Min: 0.5, P1: 0.5, P50: 4}); got != want {
		t.Errorf("all hand-overs: %+v, want %+v", got, want)
	}
	if got, want := v.Slack.Lost, (Spread{N: 2, Min: 4, P1: 4, P50: 7}); got != want {
		t.Errorf("those after a lost lease: %+v, want %+v", got, want)
	}
	if got := v.Slack.Keys["one task"]; got.N != 0 {
		t.Errorf("hand-overs of a task's own key have a line, though they are few: %+v", got)
	}
	if got := v.Slack.Keys["others"]; got.N != 5 {
		t.Errorf("hand-overs of all keys that have few: %+v", got)
	}
	if len(v.Slack.Tightest) != 5 || v.Slack.Tightest[0].Slack != 0.5 || v.Slack.Tightest[0].Key != "k" {
		t.Errorf("the tightest are %+v", v.Slack.Tightest)
	}
	lost := v.Slack.TightestLost
	if len(lost) != 2 || lost[0].Slack != 4 || lost[0].Key != "6" || !slices.Contains(lost[0].Faults, "frozen of a") {
		t.Errorf("the tightest after a lost lease are %+v", lost)
	}
	s := good()
	for i := range 30 {
		s.stay(claim(6, int64(100+i), "exec", "6", "b"), 100+float64(i), 100.9+float64(i), observer.Stopped)
	}
	if got := Check(s.Evidence).Slack.Keys["one task"]; got.N != 32 || got.Min != 0.1 {
		t.Errorf("many hand-overs of a task's own key: %+v", got)
	}
}

func TestExcusesAreMeasured(t *testing.T) {
	for name, c := range map[string]struct {
		how    func(s *story)
		excuse string
		want   Excuse
	}{
		"thawing":               {func(s *story) { leased(s, "go", 51, 63); s.froze("a", 55, 62) }, "thawing", Excuse{1, 1, 2}},
		"frozen, and no longer": {func(s *story) { leased(s, "go", 51, 63); s.froze("a", 55, 64) }, "thawing", Excuse{1, 0, 2}},
		"leaving": {func(s *story) {
			s.enqueue(7, "http")
			s.claim(claim(7, 20, "http", "7", "a"), 49.9)
			s.stay(claim(7, 20, "http", "7", "a"), 50, 55.5, observer.Succeeded)
			s.change(claim(7, 20, "http", "7", "a"), running, succeeded, 55, "")
		}, "leaving", Excuse{1, 0.5, 1}},
		"two hands":   {func(s *story) { handsOn(s, SessionUnheard, "b") }, "two_hands", Excuse{1, 9, 15.5}},
		"a lost slot": {func(s *story) { s.harm(ConsulRestore, "of before", 50.5, 51); inElastic(s, 3) }, "lost_slot", Excuse{1, 1.5, 15.5}},
		"one hand":    {func(s *story) { beside(s); s.deleteKeys(52, "tasks/shared") }, "one_hand", Excuse{1, 7.9, 15.5}},
	} {
		t.Run(name, func(t *testing.T) {
			s := good()
			c.how(s)
			v := Check(s.Evidence)
			if got := v.Excuses[c.excuse]; got == nil || *got != c.want {
				t.Errorf("the excuse is %+v, want %+v; all: %v", got, c.want, v.Excuses)
			}
			if v.Violated() {
				t.Errorf("violations: %v", v.Violations)
			}
		})
	}
}

func TestLatenessIsMeasured(t *testing.T) {
	s := good()
	leased(s, "exec", 51, 60.4)
	if got := Check(s.Evidence).Lateness; got != (Lateness{Told: 1, After: 1, P50: 0.4, Max: 0.4, Bound: 1.5}) {
		t.Errorf("lateness %+v", got)
	}
	s = good()
	silent(s, "exec", HostLoss, 80, 60)
	if got := Check(s.Evidence).Lateness; got.CutsJudged != 1 { // the good history has a long freeze
		t.Errorf("lateness %+v", got)
	}
	if got := Check(s.Evidence).Lateness; got.Silenced != 2 || got.SilencedMax != -1 { // one of them is in the good history
		t.Errorf("lateness %+v", got)
	}
}
