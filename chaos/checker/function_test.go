package checker

import (
	"maps"
	"strings"
	"testing"
	"time"

	"onejob/chaos/observer"
	"onejob/internal/testenv/lifecycle"
)

// life tells the steps of one task's row.
type life struct {
	*story
	task int64
	row  lifecycle.Row
}

// tick is a moment of a history as the row has it.
func tick(seconds float64) lifecycle.Time { return lifecycle.Time(int64(at(seconds)) / 1000) }

// live begins the life of a task that is due at 50.
func (s *story) live(q Enqueued) *life {
	if q.MaxAttempts == 0 {
		q.MaxAttempts = 5
	}
	s.Enqueued = append(s.Enqueued, q)
	s.Final[q.Task] = Final{Status: pending}
	return &life{s, q.Task, lifecycle.Row{Status: pending, Kind: q.Kind, RunAt: tick(50), CreatedAt: tick(50), MaxAttempts: q.MaxAttempts}}
}

// step is a step at a moment.
func (l *life) step(when float64, by string, change func(r *lifecycle.Row)) *life {
	was, now := l.row, tick(when)
	change(&l.row)
	step := lifecycle.Step{Task: l.task, By: by, At: now, Began: now, Statement: now, Noted: now, Was: was, Is: l.row}
	l.Steps = append(l.Steps, step)
	more, _ := TransitionsOf([]lifecycle.Step{step})
	l.Transitions = append(l.Transitions, more...)
	l.Final[l.task] = Final{Status: l.row.Status}
	return l
}

var lastFence int64 = 1000

// claim is the claim of a replica.
func (l *life) claim(when float64, replica string) *life {
	lastFence++
	return l.step(when, replica, func(r *lifecycle.Row) {
		r.Status, r.Fence, r.Session, r.Replica, r.StartedAt = running, lastFence, "session of "+replica, replica, tick(when)
		r.Attempt++
	})
}

// ends is the end of an attempt.
func (l *life) ends(when float64, by, status, why string, more ...func(r *lifecycle.Row)) *life {
	return l.step(when, by, func(r *lifecycle.Row) {
		r.Status, r.Session, r.Replica, r.Error = status, "", "", why
		if r.Final() {
			r.FinishedAt = tick(when)
		}
		for _, f := range more {
			f(r)
		}
	})
}

// again lets a pending row wait.
func again(when float64) func(r *lifecycle.Row) {
	return func(r *lifecycle.Row) { r.RunAt = tick(when) }
}

func notCharged(r *lifecycle.Row) { r.Attempt-- }

func crash(r *lifecycle.Row) { r.Crashes++ }

// taken is a takeover that charges the attempt and a crash.
func (l *life) taken(when float64, by string) *life {
	return l.ends(when, by, pending, "replica "+l.row.Replica+" died during attempt 1 of 5", crash)
}

// mark adds a fault.
func (s *story) mark(kind, target string, begin, end float64, alone bool) {
	s.Marks = append(s.Marks, observer.Mark{ID: 500 + len(s.Marks), Kind: kind, Target: target, Alone: alone, Begin: at(begin), End: at(end)})
}

// seen adds what the observer saw of the attempt that goes on.
func (l *life) seen(begin, end float64, how string) *life {
	l.stay(observer.Claim{Task: l.task, Attempt: l.row.Attempt, Fence: l.row.Fence, Kind: l.row.Kind, Key: "f", Replica: l.row.Replica}, begin, end, how)
	return l
}

func TestFunction(t *testing.T) {
	noop, exec, http := Enqueued{Task: 7, Kind: "noop"}, Enqueued{Task: 7, Kind: "exec"}, Enqueued{Task: 7, Kind: "http"}
	of := func(q Enqueued, change func(q *Enqueued)) Enqueued { change(&q); return q }
	once := func(q *Enqueued) { q.MaxAttempts = 1 }
	for name, c := range map[string]struct {
		how     func(s *story)
		want    map[string]int
		excused map[string]int
	}{
		"a life without a fault": {func(s *story) {
			s.live(of(exec, func(q *Enqueued) { q.Failures = 1 })).claim(51, "a").ends(52, "a", pending, "it fails", again(53)).
				claim(54, "b").seen(54, 55, observer.Succeeded).ends(55, "b", succeeded, "")
		}, nil, nil},
		"a claim before the task is due": {func(s *story) {
			s.live(noop).claim(49, "a").ends(52, "a", succeeded, "")
		}, map[string]int{"illegal_steps": 1}, nil},
		"a claim before the task is due, as the clock is set": {func(s *story) {
			s.ClockSteps = []ClockStep{{at(49), -time.Minute}}
			s.live(noop).claim(49, "a").ends(52, "a", succeeded, "")
		}, nil, map[string]int{"steps while the clock of Postgres was set": 1}},
		"a success that another replica writes": {func(s *story) {
			s.live(noop).claim(51, "a").ends(52, "b", succeeded, "")
		}, map[string]int{"illegal_steps": 1}, nil},
		"a failure with attempts left": {func(s *story) {
			s.live(of(exec, func(q *Enqueued) { q.Failures = 1 })).claim(51, "a").ends(52, "a", failed, "it fails")
		}, map[string]int{"illegal_steps": 1}, nil},
		"a failure because the session was lost": {func(s *story) {
			s.mark("consul-away", "all", 51, 55, false)
			s.live(exec).claim(51, "a").ends(52, "a", failed, "the lock was lost")
		}, map[string]int{"illegal_steps": 1}, nil},
		"retries whose delay does not double": {func(s *story) {
			s.live(of(exec, func(q *Enqueued) { q.Failures = 2 })).claim(51, "a").ends(52, "a", pending, "it fails", again(53)).
				claim(54, "a").ends(55, "a", pending, "it fails", again(56)).
				claim(57, "a").seen(57, 58, observer.Succeeded).ends(58, "a", succeeded, "")
		}, map[string]int{"illegal_steps": 1}, nil},
		"what a hostile row says of itself": {func(s *story) {
			s.Hostile = []int64{7}
			s.live(exec).claim(51, "a").ends(52, "a", failed, "its payload is wrong")
			s.Enqueued = nil
		}, nil, nil},
		"a success of an attempt that was to fail": {func(s *story) {
			s.live(of(exec, func(q *Enqueued) { q.Failures = 1 })).claim(51, "a").seen(51, 52, observer.Succeeded).ends(52, "a", succeeded, "")
		}, map[string]int{"unexpected_ends": 1}, nil},
		"a success after the timeout": {func(s *story) {
			s.live(of(exec, func(q *Enqueued) { q.Doomed, q.Timeout = true, time.Second })).claim(51, "a").seen(51, 54, observer.Succeeded).ends(54, "a", succeeded, "")
		}, map[string]int{"unexpected_ends": 1}, nil},
		"a success after the timeout, of a replica that was frozen": {func(s *story) {
			s.froze("a", 52, 55)
			s.live(of(exec, func(q *Enqueued) { q.Doomed, q.Timeout = true, time.Second })).claim(51, "a").seen(51, 54, observer.Succeeded).ends(55, "a", succeeded, "")
		}, nil, map[string]int{"successes of attempts that were to fail, on a machine that stood still": 1}},
		"a failure that nothing explains": {func(s *story) {
			s.live(of(exec, once)).claim(51, "a").ends(52, "a", failed, "killed")
		}, map[string]int{"unexpected_ends": 1}, map[string]int{"tasks that failed because faults had used up their attempts": 1}},
		"a failure that nothing explains, of a task whose row was locked": {func(s *story) {
			s.touch(7, Locked)
			s.live(of(exec, once)).claim(51, "a").ends(52, "a", failed, "killed")
		}, map[string]int{"unexpected_ends": 1}, map[string]int{"tasks that failed because faults had used up their attempts": 1}},
		"a command that goes on after its timeout, and its row was locked": {func(s *story) {
			s.touch(7, Locked)
			s.live(of(exec, func(q *Enqueued) { q.Doomed, q.Timeout, q.MaxAttempts = true, time.Second, 1 })).claim(51, "a").seen(51, 61, observer.Stopped).ends(61, "a", failed, "timeout")
		}, map[string]int{"overstays": 1}, nil},
		"a failure of a task that was edited": {func(s *story) {
			s.touch(7, Edited)
			s.touch(7, Locked)
			s.live(of(exec, once)).claim(51, "a").ends(52, "a", failed, "killed")
		}, nil, nil},
		"a failure of a command that was killed": {func(s *story) {
			s.mark("child-kill", "a, task 7, pid 5", 51.5, 52, false)
			s.live(of(exec, once)).claim(51, "a").ends(52, "a", failed, "killed")
		}, nil, map[string]int{"attempts used up by child-kill": 1, "tasks that failed because faults had used up their attempts": 1}},
		"a failure while a command of another replica was killed": {func(s *story) {
			s.mark("child-kill", "b, task 8, pid 5", 51.5, 52, false)
			s.live(noop).claim(51, "b").ends(52, "b", succeeded, "")
			s.live(of(exec, func(q *Enqueued) { q.Task, q.MaxAttempts = 8, 1 })).claim(51, "a").ends(52, "a", failed, "killed")
		}, map[string]int{"unexpected_ends": 1}, map[string]int{"tasks that failed because faults had used up their attempts": 1}},
		"a request that failed while a command was killed": {func(s *story) {
			s.mark("child-kill", "a, task 9, pid 5", 51.5, 52, false)
			s.live(of(http, once)).claim(51, "a").ends(52, "a", failed, "killed")
		}, map[string]int{"unexpected_ends": 1}, map[string]int{"tasks that failed because faults had used up their attempts": 1}},
		"a statement that failed while Postgres had no memory": {func(s *story) {
			s.mark("postgres-memory", "all", 51.5, 52, false)
			s.live(of(Enqueued{Task: 7, Kind: kindSQL}, once)).claim(51, "a").ends(52, "a", failed, "out of memory")
		}, nil, map[string]int{"attempts used up by postgres-memory": 1, "tasks that failed because faults had used up their attempts": 1}},
		"a request that failed while Postgres had no memory": {func(s *story) {
			s.mark("postgres-memory", "all", 51.5, 52, false)
			s.live(of(http, once)).claim(51, "a").ends(52, "a", failed, "killed")
		}, map[string]int{"unexpected_ends": 1}, map[string]int{"tasks that failed because faults had used up their attempts": 1}},
		"a takeover after a kill": {func(s *story) {
			s.mark(Kill, "a", 52, 53, true)
			s.live(noop).claim(51, "a").taken(60, "b").claim(61, "b").ends(62, "b", succeeded, "")
		}, nil, map[string]int{"attempts used up by kill": 1}},
		"a takeover that charges although Consul alone was wiped": {func(s *story) {
			s.mark(ConsulWiped, "all", 52, 55, false)
			s.live(noop).claim(51, "a").taken(60, "b").claim(61, "b").ends(62, "b", succeeded, "")
		}, map[string]int{"unexpected_ends": 1}, nil},
		"a takeover after Consul was wiped and the replica killed": {func(s *story) {
			s.mark(ConsulWiped, "all", 52, 55, false)
			s.mark(Kill, "a", 52, 55, false)
			s.live(noop).claim(51, "a").taken(60, "b").claim(61, "b").ends(62, "b", succeeded, "")
		}, nil, map[string]int{"attempts used up by kill": 1}},
		"a takeover after the pooler of the host was killed": {func(s *story) {
			s.Hosts = map[string][]string{"host-1": {"b"}, "host-2": {"c", "a"}}
			s.mark(PoolerKill, "host-2", 52, 55, false)
			s.live(noop).claim(51, "a").taken(60, "b").claim(61, "b").ends(62, "b", succeeded, "")
		}, nil, map[string]int{"attempts used up by pooler-kill": 1}},
		"a takeover after the pooler of another host was killed": {func(s *story) {
			s.Hosts = map[string][]string{"host-1": {"b"}, "host-2": {"c", "a"}}
			s.mark(PoolerKill, "host-1", 52, 55, false)
			s.live(noop).claim(51, "a").taken(60, "b").claim(61, "b").ends(62, "b", succeeded, "")
		}, map[string]int{"unexpected_ends": 1}, nil},
		"a takeover after the replica's way to Consul was cut in one direction": {func(s *story) {
			s.mark("cut-up", "a consul", 50, 55, false)
			s.live(noop).claim(51, "a").taken(60, "b").claim(61, "b").ends(62, "b", succeeded, "")
		}, map[string]int{"unexpected_ends": 1}, nil},
		"a takeover after the replica's way to Postgres was cut in one direction": {func(s *story) {
			s.mark("cut-up", "a postgres", 50, 55, false)
			s.live(noop).claim(51, "a").taken(60, "b").claim(61, "b").ends(62, "b", succeeded, "")
		}, nil, map[string]int{"attempts used up by cut-up": 1}},
		"a takeover after both ways of the replica were reset": {func(s *story) {
			s.mark("reset", "a both", 50, 55, false)
			s.live(noop).claim(51, "a").taken(60, "b").claim(61, "b").ends(62, "b", succeeded, "")
		}, nil, map[string]int{"attempts used up by reset": 1}},
		"a takeover 2 s after the replica was frozen": {func(s *story) {
			s.froze("a", 52, 56)
			s.mark("freeze", "a", 52, 56, false)
			s.live(noop).claim(51, "a").taken(54, "b").claim(61, "b").ends(62, "b", succeeded, "")
		}, map[string]int{"unexpected_ends": 1}, nil},
		"a takeover 2 s after the replica was frozen for a moment": {func(s *story) {
			s.froze("a", 52, 53)
			s.live(noop).claim(51, "a").taken(54, "b").claim(61, "b").ends(62, "b", succeeded, "")
		}, map[string]int{"unexpected_ends": 1}, nil},
		"a takeover 5 s after the replica was frozen": {func(s *story) {
			s.froze("a", 52, 56)
			s.live(noop).claim(51, "a").taken(57, "b").claim(61, "b").ends(62, "b", succeeded, "")
		}, nil, map[string]int{"attempts used up by frozen": 1}},
		"a takeover 2 s after the replica was frozen, which was cut off before": {func(s *story) {
			s.mark("cut-postgres", "a", 47, 52, false)
			s.froze("a", 52, 56)
			s.live(noop).claim(51, "a").taken(54, "b").claim(61, "b").ends(62, "b", succeeded, "")
		}, nil, map[string]int{"attempts used up by cut-postgres": 1}},
		"a takeover 2 s after the replica was frozen, on a machine that stood still": {func(s *story) {
			s.froze("a", 52, 56)
			s.Delays = []Delay{{at(52.5), 2 * time.Second}}
			s.live(noop).claim(51, "a").taken(54.5, "b").claim(61, "b").ends(62, "b", succeeded, "")
		}, nil, map[string]int{"attempts used up by frozen": 1}},
		"a takeover after a replica that never worked was killed": {func(s *story) {
			s.mark(Kill, "idle", 52, 55, false)
			s.live(noop).claim(51, "a").taken(60, "b").claim(61, "b").ends(62, "b", succeeded, "")
		}, map[string]int{"unexpected_ends": 1}, nil},
		"a takeover after all lost Postgres": {func(s *story) {
			s.mark("postgres-failover", "the primary", 52, 55, false)
			s.live(noop).claim(51, "a").taken(60, "b").claim(61, "b").ends(62, "b", succeeded, "")
		}, nil, map[string]int{"attempts used up by postgres-failover": 1}},
		"a takeover that charges for a graceful restart": {func(s *story) {
			gracefully(s, GracefulRestart, "a")
		}, map[string]int{"unexpected_ends": 1}, nil},
		"a takeover that charges for a SIGTERM": {func(s *story) {
			gracefully(s, "term", "a")
		}, map[string]int{"unexpected_ends": 1}, nil},
		"a takeover that charges for a rolling restart": {func(s *story) {
			gracefully(s, "rolling", "all")
		}, map[string]int{"unexpected_ends": 1}, nil},
		"a takeover that charges for an upgrade": {func(s *story) {
			gracefully(s, "upgrade", "a")
		}, map[string]int{"unexpected_ends": 1}, nil},
		"a takeover that charges for a restart in which the replica had to be killed": {func(s *story) {
			gracefully(s, GracefulRestart, "a")
			s.mark(Kill, "a", 54, 54.1, false)
		}, nil, map[string]int{"attempts used up by kill": 1}},
		"a takeover that charges for a restart in which another replica had to be killed": {func(s *story) {
			gracefully(s, "rolling", "all")
			s.mark(Kill, "b", 54, 54.1, false)
		}, map[string]int{"unexpected_ends": 1}, nil},
		"a takeover that charges for a session that was destroyed": {func(s *story) {
			s.mark(SessionDestroy, "a", 52, 53, false)
			s.live(noop).claim(51, "a").taken(60, "b").claim(61, "b").ends(62, "b", succeeded, "")
		}, map[string]int{"unexpected_ends": 1}, nil},
		"a takeover that charges for a session that was destroyed, and is taken back": {func(s *story) {
			s.mark(SessionDestroy, "a", 52, 53, false)
			s.live(noop).claim(51, "a").taken(60, "b").step(60.5, "a", func(r *lifecycle.Row) { r.Crashes--; r.Attempt-- }).claim(61, "b").ends(62, "b", succeeded, "")
		}, nil, nil},
		"a takeover that does not charge for a session that was destroyed": {func(s *story) {
			s.mark(SessionDestroy, "a", 52, 53, false)
			s.live(noop).claim(51, "a").ends(60, "b", pending, "replica a lost its session during attempt 1 of 5", notCharged).claim(61, "b").ends(62, "b", succeeded, "")
		}, nil, nil},
		"a takeover that does not charge, and no fault": {func(s *story) {
			lostFreely(s)
		}, map[string]int{"unexpected_ends": 1}, nil},
		"a takeover that does not charge, long after a session was destroyed": {func(s *story) {
			s.mark(SessionDestroy, "a", 20, 21, false)
			lostFreely(s)
		}, map[string]int{"unexpected_ends": 1}, nil},
		"a takeover that does not charge, and another replica's session was destroyed": {func(s *story) {
			s.Hosts = map[string][]string{"host-1": {"a", "b"}}
			s.mark(SessionDestroy, "b", 52, 53, false)
			lostFreely(s)
		}, map[string]int{"unexpected_ends": 1}, nil},
		"a takeover that does not charge, and there was another Consul": {func(s *story) {
			s.mark(Stranger, "stranger", 52, 53, false)
			lostFreely(s)
		}, map[string]int{"unexpected_ends": 1}, nil},
		"a takeover that does not charge, as all lost Consul": {func(s *story) {
			s.mark("consul-away", "all", 40, 45, false)
			lostFreely(s)
		}, nil, nil},
		"a takeover that does not charge, and a key was deleted": {func(s *story) {
			s.mark(KeyDelete, "service/onejob/tasks/", 52, 53, false)
			lostFreely(s)
		}, nil, nil},
		"a takeover that does not charge, when the run is over": {func(s *story) {
			s.Stopped = at(55)
			lostFreely(s)
		}, nil, nil},
		"a takeover that does not charge, before the run is over": {func(s *story) {
			s.Stopped = at(65)
			lostFreely(s)
		}, map[string]int{"unexpected_ends": 1}, nil},
		"a takeover that does not charge, on a machine that stood still": {func(s *story) {
			s.Delays = []Delay{{at(52), 2 * time.Second}}
			lostFreely(s)
		}, nil, map[string]int{"attempts that were given back on a machine that stood still": 1}},
		"a replica that gives an attempt back, and no fault": {func(s *story) {
			s.mark(RowTouched, "rows", 40, 60, false)
			s.mark(OutsiderKill, "outsider-1", 52, 53, false)
			s.mark("child-kill", "a, task 9, pid 5", 51.5, 52, false)
			gaveBack(s)
		}, map[string]int{"unexpected_ends": 1}, nil},
		"a replica that gives an attempt back as it is stopped": {func(s *story) {
			s.mark("rolling", "all", 51.5, 60, false)
			gaveBack(s)
		}, nil, nil},
		"a replica that gives an attempt back after it was frozen": {func(s *story) {
			s.froze("a", 51.5, 52)
			gaveBack(s)
		}, nil, nil},
		"a replica that gives an attempt back which had not begun": {func(s *story) {
			s.live(exec).claim(51, "a").ends(52, "a", pending, "", notCharged, func(r *lifecycle.Row) { r.StartedAt = 0 }).claim(53, "a").seen(53, 54, observer.Succeeded).ends(54, "a", succeeded, "")
		}, nil, nil},
		"a replica that gives an attempt back as not begun, and it had succeeded": {func(s *story) {
			s.mark(GracefulRestart, "a", 51, 53, false)
			unbegun(s, observer.Succeeded)
		}, map[string]int{"unexpected_ends": 1, "repeated": 1}, nil},
		"a replica that gives an attempt back as not begun, and it had been stopped": {func(s *story) {
			s.mark(GracefulRestart, "a", 51, 53, false)
			unbegun(s, observer.Stopped)
		}, map[string]int{"unexpected_ends": 1}, nil},
		"a task of a schedule whose attempt nothing used up": {func(s *story) {
			l := s.live(Enqueued{Task: 52, Kind: "noop"})
			s.Enqueued = s.Enqueued[:len(s.Enqueued)-1]
			l.claim(51, "a").taken(60, "b").claim(61, "b").ends(62, "b", succeeded, "")
			s.Final[52] = Final{Status: succeeded, Schedule: "s"}
		}, map[string]int{"unexpected_ends": 1}, nil},
		"an attempt more than the task had": {func(s *story) {
			l := s.live(of(noop, func(q *Enqueued) { q.MaxAttempts = 6 }))
			s.Enqueued[len(s.Enqueued)-1].MaxAttempts = 1
			s.mark(Kill, "a", 52, 53, true)
			l.claim(51, "a").taken(60, "b").claim(61, "b").ends(62, "b", succeeded, "")
		}, map[string]int{"unexpected_ends": 1}, map[string]int{"attempts used up by kill": 1}},
		"what an operator has done to a row": {func(s *story) {
			s.live(of(exec, once)).claim(51, "a").step(51.5, Operator, func(r *lifecycle.Row) { r.Status, r.Session, r.Replica = pending, "", "" }).
				claim(52, "a").ends(53, "a", failed, "no")
		}, nil, nil},
		"a command that goes on after its timeout": {func(s *story) {
			s.live(of(exec, func(q *Enqueued) { q.Doomed, q.Timeout, q.MaxAttempts = true, time.Second, 1 })).claim(51, "a").seen(51, 61, observer.Stopped).ends(61, "a", failed, "timeout")
		}, map[string]int{"overstays": 1}, nil},
		"a request that goes on after its timeout": {func(s *story) {
			s.live(of(http, func(q *Enqueued) { q.Doomed, q.Timeout, q.MaxAttempts = true, time.Second, 1 })).claim(51, "a").seen(51, 56, observer.Stopped).ends(56, "a", failed, "timeout")
		}, map[string]int{"overstays": 1}, nil},
		"a command that is killed in time": {func(s *story) {
			s.live(of(exec, func(q *Enqueued) { q.Doomed, q.Timeout, q.MaxAttempts = true, time.Second, 1 })).claim(51, "a").seen(51, 57.5, observer.Gone).ends(57.5, "a", failed, "timeout")
		}, nil, nil},
		"a request that goes on as its replica is frozen": {func(s *story) {
			s.froze("a", 51.5, 56)
			s.live(of(http, func(q *Enqueued) { q.Doomed, q.Timeout, q.MaxAttempts = true, time.Second, 1 })).claim(51, "a").seen(51, 56, observer.Stopped).ends(56, "a", failed, "timeout")
		}, nil, map[string]int{"timeouts of a replica that was frozen": 1}},
		"a request that goes on as the machine stands still": {func(s *story) {
			s.Delays = []Delay{{at(52), 2 * time.Second}}
			s.live(of(http, func(q *Enqueued) { q.Doomed, q.Timeout, q.MaxAttempts = true, time.Second, 1 })).claim(51, "a").seen(51, 56, observer.Stopped).ends(56, "a", failed, "timeout")
		}, nil, nil},
		"a cancel that nobody hears": {func(s *story) {
			cancelledAt(s, exec, 52, 62)
		}, map[string]int{"overstays": 1}, nil},
		"a cancel of a request that nobody hears": {func(s *story) {
			cancelledAt(s, http, 52, 57)
		}, map[string]int{"overstays": 1}, nil},
		"a cancel that is heard": {func(s *story) {
			cancelledAt(s, exec, 52, 57)
		}, nil, nil},
		"a cancel of a request that waits for its lock": {func(s *story) {
			waitsForItsLock(s, 58)
		}, nil, map[string]int{"cancels of tasks that waited for their locks": 1}},
		"a cancel of a request that waits for its lock for too long": {func(s *story) {
			waitsForItsLock(s, 62)
		}, map[string]int{"overstays": 1}, nil},
		"a cancel beside another fault": {func(s *story) {
			s.mark("cut-postgres", "b", 45, 46, false)
			cancelledAt(s, exec, 52, 62)
		}, nil, map[string]int{"cancels of running tasks beside a fault": 1}},
		"a takeover that is late after a kill": {func(s *story) {
			s.mark(Kill, "a", 52, 53, true)
			s.live(noop).claim(51, "a").taken(71, "b").claim(72, "b").ends(73, "b", succeeded, "")
		}, map[string]int{"late_takeovers": 1}, map[string]int{"attempts used up by kill": 1}},
		"a takeover that is late for a supervisor that lives": {func(s *story) {
			s.mark(WorkerKill, "a", 52, 53, true)
			s.live(noop).claim(51, "a").taken(59, "b").claim(60, "b").ends(61, "b", succeeded, "")
		}, map[string]int{"late_takeovers": 1}, map[string]int{"attempts used up by worker-kill": 1}},
		"a takeover that never comes": {func(s *story) {
			s.mark(HostLoss, "a,b", 52, 53, true)
			s.live(noop).claim(51, "b")
		}, map[string]int{"late_takeovers": 1, "lost": 1}, nil},
		"a takeover that is late, on a machine that stood still": {func(s *story) {
			s.Delays = []Delay{{at(55), 3 * time.Second}}
			s.mark(Kill, "a", 52, 53, true)
			s.live(noop).claim(51, "a").taken(71, "b").claim(72, "b").ends(73, "b", succeeded, "")
		}, nil, map[string]int{"attempts used up by kill": 1}},
		"a takeover that is late among other faults": {func(s *story) {
			s.mark(Kill, "a", 52, 53, false)
			s.live(noop).claim(51, "a").taken(71, "b").claim(72, "b").ends(73, "b", succeeded, "")
		}, nil, map[string]int{"attempts used up by kill": 1}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStory()
			if strings.Contains(name, "schedule") {
				s = good()
			}
			c.how(s)
			v := Check(s.Evidence)
			got := numbers(t, v)
			delete(got, "rows_of_the_dead")
			if !maps.Equal(got, c.want) {
				t.Errorf("the checker found %v, want %v; it says\n\t%s", got, c.want, strings.Join(v.Violations, "\n\t"))
			}
			if !maps.Equal(v.Excused, c.excused) {
				t.Errorf("excused are %v, want %v", v.Excused, c.excused)
			}
			if v.Violated() != (len(c.want) > 0) {
				t.Errorf("guilty %v", v.Violated())
			}
		})
	}
}

// gracefully adds a task of replica a that is taken over and charged, as replicas are stopped.
func gracefully(s *story, kind, target string) {
	s.mark(kind, target, 52, 55, false)
	s.live(Enqueued{Task: 7, Kind: "noop"}).claim(51, "a").taken(60, "b").claim(61, "b").ends(62, "b", succeeded, "")
}

// lostFreely adds a task that is taken from replica a without a charge.
func lostFreely(s *story) {
	s.live(Enqueued{Task: 7, Kind: "noop"}).claim(51, "a").ends(60, "b", pending, "replica a lost its session during attempt 1 of 5", notCharged).claim(61, "b").ends(62, "b", succeeded, "")
}

// unbegun adds a task whose attempt was seen, and was given back as if it had not begun.
func unbegun(s *story, how string) {
	s.live(Enqueued{Task: 7, Kind: "exec"}).claim(51, "a").seen(51.2, 51.8, how).ends(52, "a", pending, "", notCharged, func(r *lifecycle.Row) { r.StartedAt = 0 }).
		claim(53, "a").seen(53.2, 53.8, observer.Succeeded).ends(54, "a", succeeded, "")
}

// gaveBack adds a task that replica a gives back without a charge.
func gaveBack(s *story) {
	s.live(Enqueued{Task: 7, Kind: "noop"}).claim(51, "a").ends(52, "a", pending, "the lease ran out", notCharged, again(55)).claim(56, "b").ends(57, "b", succeeded, "")
}

// A zero of cancels that nobody heard says of how many.
func TestCancelsAreCounted(t *testing.T) {
	for name, c := range map[string]struct {
		ended float64
		harm  bool
		want  int
	}{
		"heard":                       {57, false, 1},
		"heard, beside another fault": {57, true, 1},
		"not heard":                   {62, false, 1},
		"not heard, beside another":   {62, true, 0},
	} {
		s := newStory()
		if c.harm {
			s.mark("cut-postgres", "b", 45, 46, false)
		}
		cancelledAt(s, Enqueued{Task: 7, Kind: "exec"}, 52, c.ended)
		if got := Check(s.Evidence).CancelsJudged; got != c.want {
			t.Errorf("%s: %d were judged, want %d", name, got, c.want)
		}
	}
}

// cancelledAt adds a task that somebody cancels at a moment, and that ends at another.
func cancelledAt(s *story, q Enqueued, asked, ended float64) {
	q.Cancelled = true
	l := s.live(q).claim(51, "a").step(asked, Operator, func(r *lifecycle.Row) { r.CancelRequested = true })
	l.seen(51, ended, observer.Stopped).ends(ended, "a", cancelled, "cancelled")
}

// waitsForItsLock adds a request that somebody cancels at 52 before it has begun, and whose row ends at a moment.
func waitsForItsLock(s *story, ended float64) {
	s.live(Enqueued{Task: 7, Kind: "http", Cancelled: true}).claim(51, "a").step(52, Operator, func(r *lifecycle.Row) { r.CancelRequested = true }).
		ends(ended, "a", cancelled, "", notCharged, func(r *lifecycle.Row) { r.StartedAt = 0 })
}

// What Postgres has forgotten cannot be replayed, and of others than onejob nothing is asked.
func TestFunctionIsNotAlwaysChecked(t *testing.T) {
	s := newStory()
	s.live(Enqueued{Task: 7, Kind: "noop"}).claim(49, "a").ends(52, "b", succeeded, "")
	s.Forgetful = true
	if v := Check(s.Evidence); v.Violated() {
		t.Errorf("it is guilty after a loss: %v", v.Violations)
	}
	s.Forgetful, s.Steps = false, nil
	if v := Check(s.Evidence); v.Violated() {
		t.Errorf("it is guilty without steps: %v", v.Violations)
	}
}

func TestTransitionsOf(t *testing.T) {
	s := newStory()
	l := s.live(Enqueued{Task: 7, Kind: "noop"}).claim(51, "a").ends(52, "a", succeeded, "")
	l.step(53, Operator, func(r *lifecycle.Row) { r.Priority = 3 })                                                   // no transition
	l.step(54, "a", func(r *lifecycle.Row) { r.FinishedAt = tick(54) })                                               // a second success
	l.step(55, "x", func(r *lifecycle.Row) { r.Fence, r.Replica = 77, "x" })                                          // an attempt at a row that stays as it is
	l.step(56, Operator, func(r *lifecycle.Row) { *r = lifecycle.Row{} })                                             // a deletion
	l.step(57, Operator, func(r *lifecycle.Row) { *r = lifecycle.Row{Status: running, Kind: "noop", ScheduleID: 1} }) // an INSERT
	all, begun := TransitionsOf(s.Steps)
	var got []string
	for _, tr := range all {
		got = append(got, tr.From+" "+tr.To+" "+tr.Replica+" "+tr.Key)
	}
	if want := "pending running a 7, running succeeded a 7, succeeded succeeded  7, succeeded deleted x 7"; strings.Join(got, ", ") != want {
		t.Errorf("transitions %q, want %q", strings.Join(got, ", "), want)
	}
	if len(begun) != 1 || begun[0] != (Begun{77, "x"}) {
		t.Errorf("begun %v", begun)
	}
}
