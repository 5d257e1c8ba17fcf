package checker

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"onejob/chaos/observer"
	"onejob/internal/testenv/lifecycle"
)

// What replicas of a run are set to: the defaults.
const (
	maxCrashes = 3
	retryBase  = time.Second
	retryMax   = time.Hour
	lockDelay  = 3 * time.Second
	retention  = 168 * time.Hour // the shortest
	grace      = 5 * time.Second // between SIGTERM and SIGKILL of a command
	locking    = 5 * time.Second // for which a replica asks for a lock that is held, on a machine that is busy: it takes eight requests to Consul
	heeding    = time.Second     // after which a replica has heard of a cancel at the latest
)

// maxWait is what a bound of the documentation is exceeded by on a machine that is busy.
// What the harness itself was late by comes to that.
const maxWait = 3 * time.Second

// takeOverBounds are after how long a row must have left the hands of a replica that a fault
// killed while nothing else went on, without patience.
var takeOverBounds = map[string]time.Duration{
	WorkerKill: 3 * time.Second,  // its supervisor tells
	Kill:       15 * time.Second, // nobody tells: session and heartbeat have to expire
	HostLoss:   15 * time.Second,
}

// Faults that may cost a task an attempt: those by which a replica ends, or by which all
// others hear nothing of it in Postgres and Consul. A replica that loses its session, or
// Postgres, or both with all others, must give its tasks back. So must one that is stopped: one that
// did not end in time has a mark of Kill.
var deadly = []string{Kill, WorkerKill, HostLoss, Frozen, ClaimFreeze, "freeze", "oom",
	"cut-postgres", PoolerKill, "cut-both", "cut-up", "cut-down", "slow", "reset", "postgres-kill", "postgres-blackhole", "postgres-failover", "split-brain",
	"postgres-disk-full", "postgres-memory", "replica-memory"}

// Faults that may make a handler of a kind fail.
var failing = map[string][]string{
	kindExec: {"child-kill", "guard-kill", "oom", "replica-memory", Frozen},
	kindHTTP: {Frozen},
	kindSQL:  {OutcomeRefused, "postgres-memory"}, // memory that a statement lacks is its own failure, see docs/reference/kinds.md
	"go":     {Frozen, "replica-memory"},          // it may find no memory for a connection to the observer
	"capped": {Frozen, "replica-memory"},
}

// tenure is a replica's hold on a row: from the claim to the step that ended it.
type tenure struct {
	task    int64
	replica string
	claim   *lifecycle.Step
	end     *lifecycle.Step // nil if there was none
	rule    string          // by which it ended
	pardon  bool            // it was charged, and the charge was taken back
}

func (t *tenure) span() span {
	s := span{moment(t.claim.At), never}
	if t.end != nil {
		s.end = moment(t.end.At)
	}
	return s
}

func (t *tenure) String() string {
	end := "it goes on"
	if t.end != nil {
		end = fmt.Sprintf("%s, %s: %s", clock(moment(t.end.At)), t.rule, t.end.Is.Error)
	}
	return fmt.Sprintf("task %d (%s) attempt %d of %d fence %d on %s, from %s to %s", t.task, t.claim.Is.Kind, t.claim.Is.Attempt, t.claim.Is.MaxAttempts,
		t.claim.Is.Fence, t.replica, clock(moment(t.claim.At)), end)
}

// charged reports whether the attempt was used up without a success.
func (t *tenure) charged() bool { return t.end != nil && lifecycle.Charges(t.rule) && !t.pardon }

// moment is a lifecycle.Time as the observer has it.
func moment(t lifecycle.Time) observer.Time { return observer.Time(int64(t) * 1000) }

// function is what the rows say of what became of the tasks.
type function struct {
	*history
	tenures []*tenure
	byTask  map[int64][]*tenure
	byHand  map[int64]bool // somebody changed the row, otherwise than by a cancel
}

// function replays all steps, and looks for illegal ones.
func (h *history) function(v *Report) *function {
	f := &function{history: h, byTask: map[int64][]*tenure{}, byHand: map[int64]bool{}}
	if len(h.Steps) == 0 {
		return f
	}
	hostile := map[int64]bool{}
	for _, id := range h.Hostile {
		hostile[id] = true
	}
	trace := lifecycle.Config{
		Replica:        func(by string) bool { return by != Operator && by != Locker },
		Named:          true,
		HandlersDecide: func(task int64) bool { return hostile[task] },
		MaxCrashes:     maxCrashes, RetryBase: retryBase, RetryMax: retryMax, LockDelay: lockDelay, Keep: retention,
	}.Replay(h.Steps)
	for _, i := range trace.Illegal {
		if h.clockStepped(moment(i.Step.At)) {
			v.excuse("steps while the clock of Postgres was set")
			continue
		}
		v.violation(&v.IllegalSteps, "illegal step: %v", i)
	}
	open := map[int64]*tenure{}
	for i := range h.Steps {
		s, rule := &h.Steps[i], trace.Rules[i]
		v.Steps[rule]++
		if hostile[s.Task] {
			continue
		}
		if rule == lifecycle.ByHand && s.Was.Status != "" || strings.HasPrefix(rule, "retry of") {
			f.byHand[s.Task] = true
		}
		if strings.HasPrefix(rule, "pardon") {
			f.pardon(s)
		}
		if t := open[s.Task]; t != nil && s.Was.Status == running && s.Is.Status != running {
			t.end, t.rule = s, rule
			delete(open, s.Task)
		}
		if s.Was.Status != running && s.Is.Status == running {
			t := &tenure{task: s.Task, replica: s.Is.Replica, claim: s}
			open[s.Task] = t
			f.tenures, f.byTask[s.Task] = append(f.tenures, t), append(f.byTask[s.Task], t)
		}
	}
	return f
}

// clockStepped reports whether the clock of Postgres was set at a moment.
func (h *history) clockStepped(at observer.Time) bool {
	return slices.ContainsFunc(h.ClockSteps, func(c ClockStep) bool { return c.At.Add(-editing) < at && at < c.At.Add(time.Second) })
}

// pardon notes that a replica has taken back that it was called dead.
func (f *function) pardon(s *lifecycle.Step) {
	for _, t := range slices.Backward(f.byTask[s.Task]) {
		if t.replica == s.By && t.rule == lifecycle.TakeOverCharged && !t.pardon {
			t.pardon = true
			return
		}
	}
}

// excuse counts what would be a violation but for a fault that explains it.
func (v *Report) excuse(what string) { v.Excused[what]++ }

// checkAll looks at what became of the tasks.
func (f *function) checkAll(v *Report) {
	if len(f.Steps) == 0 {
		return
	}
	expected := slices.Clone(f.Enqueued)
	for id, final := range f.Final {
		if final.Schedule != "" {
			q := Enqueued{Task: id, MaxAttempts: 5}
			if all := f.byTask[id]; len(all) > 0 {
				q.Kind = all[0].claim.Is.Kind
			}
			expected = append(expected, q)
		}
	}
	for _, q := range expected {
		if q.MaxAttempts > 0 && !q.Cancelled && !f.edited(q.Task) && !f.deleted[q.Task] && !f.byHand[q.Task] {
			f.end(v, q)
		}
	}
	f.overstays(v)
	f.cancels(v)
	f.lateTakeOvers(v)
}

// end looks at how a task ended, and at what used up its attempts.
func (f *function) end(v *Report, q Enqueued) {
	for _, t := range f.byTask[q.Task] {
		if t.claim.Is.Attempt > q.MaxAttempts {
			v.violation(&v.UnexpectedEnds, "unexpected: %v, and it had %d attempts", t, q.MaxAttempts)
		}
		if t.end == nil {
			continue // lost
		}
		planned := q.Doomed || t.claim.Is.Attempt <= q.Failures
		switch {
		case t.end.Is.Status == succeeded && planned:
			if f.disturbed(t) {
				v.excuse("successes of attempts that were to fail, on a machine that stood still")
			} else {
				v.violation(&v.UnexpectedEnds, "unexpected: %v, and it was to fail: doomed %v, its first %d attempts", t, q.Doomed, q.Failures)
			}
		case t.rule == lifecycle.Requeue:
			v.UnbegunJudged++
			if a := f.byFence[t.claim.Is.Fence]; a != nil {
				v.violation(&v.UnexpectedEnds, "unexpected: %v, and it had begun: %v", t, a)
			}
		case t.rule == lifecycle.CompleteRequeue || t.rule == lifecycle.TakeOverFree:
			f.givenBack(v, t)
		case !t.charged():
		case byTakeOver(t.rule):
			f.explain(v, t, deadly)
		case !planned:
			f.explain(v, t, failing[q.Kind])
		}
	}
	if all := f.byTask[q.Task]; len(all) > 0 && all[len(all)-1].charged() && f.Final[q.Task].Status == failed && !q.Doomed {
		v.excuse("tasks that failed because faults had used up their attempts")
	}
}

func byTakeOver(rule string) bool { return strings.HasPrefix(rule, "takeover:") }

// coarse is by how much the database's note of a moment may be early: it is rounded down to
// hundredths of a second.
const coarse = 20 * time.Millisecond

// byWay are the faults of some of a replica's ways, which their targets name. "consul" alone is no
// reason to charge an attempt: the replica must give its tasks back.
var byWay = []string{"cut-up", "cut-down", "slow", "reset"}

// muting are the faults by which others hear nothing of a replica while they go on. Nobody may take its rows
// before it has been silent for a while, see unheard.
var muting = []string{Frozen, "freeze", ClaimFreeze, "cut-postgres", "cut-both", "cut-up", "cut-down"}

// explain looks for a fault of one of these kinds that can have ended an attempt.
func (f *function) explain(v *Report, t *tenure, kinds []string) {
	for _, m := range f.Marks {
		end := m.End
		if end == 0 {
			end = never
		}
		if slices.Contains(byWay, m.Kind) && strings.HasSuffix(m.Target, " consul") {
			continue
		}
		if byTakeOver(t.rule) && slices.Contains(muting, m.Kind) {
			over := t.span().end
			if least := m.Begin.Add(unheard); over < least.Add(-f.late(span{m.Begin, over})) {
				continue
			}
		}
		if slices.Contains(kinds, m.Kind) && f.aimed(m, t.replica) && (span{m.Begin.Add(-coarse), end.Add(thawing)}).meets(t.span()) {
			v.excuse("attempts used up by " + m.Kind)
			return
		}
	}
	v.violation(&v.UnexpectedEnds, "unexpected: no fault explains that an attempt was used up: %v", t)
}

// givenBack looks for a fault that can have made a replica give an attempt back, or lose it, without a charge:
// any that may end a lease or stop a replica, that was aimed at it or at what all use, and that went on up to
// 15 s before the claim or later.
func (f *function) givenBack(v *Report, t *tenure) {
	s := t.span()
	if f.touched[t.task] != nil || f.Stopped != 0 && s.end >= f.Stopped { // its row was locked, and the replica could not write it; or the run is over
		return
	}
	v.RequeuesJudged++
	s.begin = s.begin.Add(-before)
	if slices.ContainsFunc(f.Marks, func(m observer.Mark) bool {
		end := m.End
		if end == 0 {
			end = never
		}
		if m.Kind != Stacks && slices.Contains(harmless, m.Kind) || !s.meets(span{m.Begin.Add(-coarse), max(end, m.Begin+1)}) {
			return false
		}
		return f.aimed(m, t.replica) || m.Kind != Stranger && len(f.targets(m, f.replicas)) == 0
	}) {
		return
	}
	if f.late(s) >= time.Second {
		v.excuse("attempts that were given back on a machine that stood still")
		return
	}
	v.violation(&v.UnexpectedEnds, "unexpected: no fault explains that an attempt was given back: %v", t)
}

// ofAll are the targets of faults that hit all replicas: what they use. With a standby, ends are judged
// only where commits wait for it.
var ofAll = []string{"all", "the primary", "the server", "the standby"}

// aimed reports whether a fault hit a replica, its host, or what all of them use.
func (h *history) aimed(m observer.Mark, replica string) bool {
	return slices.Contains(ofAll, m.Target) || slices.ContainsFunc(strings.FieldsFunc(m.Target, func(r rune) bool { return r == ',' || r == ' ' }), func(target string) bool {
		return target == replica || slices.Contains(h.Hosts[target], replica)
	})
}

// late is by how much the harness was late within a span.
func (h *history) late(s span) (sum time.Duration) {
	for _, d := range h.Delays {
		if (span{d.Begin, d.Begin.Add(d.For)}).meets(s) {
			sum += d.For
		}
	}
	return sum
}

// disturbed reports whether the replica was frozen during a tenure, or the whole machine
// stood still for a second.
func (f *function) disturbed(t *tenure) bool {
	return slices.ContainsFunc(f.frozen[t.replica], t.span().meets) || f.late(t.span()) >= time.Second
}

// overstays looks for attempts that went on after their timeout. A replica that is frozen
// ends nothing; what it had begun is checked by its lease.
func (f *function) overstays(v *Report) {
	timeouts := map[int64]time.Duration{}
	for _, q := range f.Enqueued {
		if !f.edited(q.Task) && !f.byHand[q.Task] {
			timeouts[q.Task] = q.Timeout
		}
	}
	for _, a := range f.attempts {
		timeout := timeouts[a.Task]
		if timeout == 0 {
			continue
		}
		most := timeout + maxWait
		if a.Kind == kindExec {
			most += grace
		}
		if took := a.end.Sub(a.begin); took <= most+f.late(a.span) {
			continue
		}
		if slices.ContainsFunc(f.frozen[a.Replica], a.meets) {
			v.excuse("timeouts of a replica that was frozen")
			continue
		}
		v.violation(&v.Overstays, "overstay: its timeout is %v: %v", timeout, a)
	}
}

// cancels looks for running tasks that went on after somebody had asked for their end. It
// says nothing where another fault goes on, or has just ended: the replica may not hear.
func (f *function) cancels(v *Report) {
	for i := range f.Steps {
		s := &f.Steps[i]
		if s.Was.Status != running || s.Is.Status != running || s.Was.CancelRequested || !s.Is.CancelRequested {
			continue
		}
		asked := moment(s.At)
		all := f.byTask[s.Task]
		k := slices.IndexFunc(all, func(t *tenure) bool { return t.claim.Is.Fence == s.Is.Fence })
		if k < 0 {
			continue // a hostile row
		}
		most := heeding + maxWait
		if s.Is.Kind == kindExec {
			most += grace
		}
		wait := span{asked, asked.Add(most)}
		end := all[k].span().end
		if end <= wait.end.Add(f.late(wait)) {
			v.CancelsJudged++
			continue
		}
		// What has not begun has nothing to end. Its replica asks for the lock some times, and then reads that
		// somebody has asked for the end.
		if all[k].rule == lifecycle.RequeueCancelled && end <= wait.end.Add(locking+f.late(wait)) {
			v.excuse("cancels of tasks that waited for their locks")
			v.CancelsJudged++
			continue
		}
		if slices.ContainsFunc(f.Marks, func(m observer.Mark) bool {
			harm := span{m.Begin, m.End.Add(recovering)}
			if m.End == 0 {
				harm.end = never
			}
			return !slices.Contains(mild, m.Kind) && harm.meets(wait)
		}) {
			v.excuse("cancels of running tasks beside a fault")
			continue
		}
		v.CancelsJudged++
		v.violation(&v.Overstays, "overstay: somebody asked at %s for the end of %v", clock(asked), all[k])
	}
}

// lateTakeOvers looks for rows that were in the hands of a replica which a fault killed while
// nothing else went on, and that nobody took from it in time.
func (f *function) lateTakeOvers(v *Report) {
	for _, m := range f.Marks {
		bound, ok := takeOverBounds[m.Kind]
		if !ok || !m.Alone {
			continue
		}
		dead := strings.Split(m.Target, ",")
		for _, t := range f.tenures {
			s := t.span()
			if !slices.Contains(dead, t.replica) || s.begin >= m.Begin || s.end <= m.Begin {
				continue
			}
			v.RowsOfTheDead++
			wait := span{m.Begin, m.Begin.Add(bound + maxWait)}
			if s.end > wait.end.Add(f.late(wait)) {
				v.violation(&v.LateTakeOvers, "late takeover: %s was hit by %s at %s, alone, and it had %v", t.replica, m.Kind, clock(m.Begin), t)
			}
		}
	}
}
