package checker

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"onejob/chaos/observer"
)

// Crash is an unexpected end of a working process, as its supervisor logged. The supervisor starts
// the next one, so the replica itself goes on. Or it is one of the supervisor, or of a replica that has none.
type Crash struct {
	Replica string        `json:"replica"`
	At      observer.Time `json:"at"`              // when that was logged
	How     string        `json:"how"`             // exit code or signal
	Said    string        `json:"said,omitempty"`  // the last words of the process, on stderr
	Whole   bool          `json:"whole,omitempty"` // the replica ended
}

// What a working process says that cannot start, among other things.
const (
	noServers = "within start_timeout"     // Postgres, or a session
	newSchema = "a newer one has migrated" // this binary is of an old version
)

// ending are the faults that end working processes.
var ending = []string{Kill, WorkerKill, HostLoss, "oom", "replica-memory", Stacks}

const (
	// noticing is how long after the death of a working process its supervisor may log that: it
	// kills what is left first.
	noticing = 10 * time.Second

	// logClock is how far the clock of logs may be from the observer's, which does not follow when
	// the machine's is corrected in the course of an hour.
	logClock = 2 * time.Second

	// startTimeout is how long a working process waits for Postgres and Consul when it starts.
	startTimeout = time.Minute
)

// crashes looks for working processes, and replicas, that ended although no fault ends them. A supervisor that was
// frozen says so when it has thawed.
func (h *history) crashes(v *Report) {
	for _, c := range h.Crashes {
		i := slices.IndexFunc(h.Marks, func(m observer.Mark) bool {
			if !slices.Contains(ending, m.Kind) || !h.aimed(m, c.Replica) {
				return false
			}
			s := span{m.Begin.Add(-logClock), never}
			if m.End != 0 {
				s.end = m.End.Add(noticing)
			}
			for _, f := range h.frozen[c.Replica] {
				if f.meets(s) && f.end < never {
					s.end = max(s.end, f.end.Add(noticing))
				}
			}
			return s.begin <= c.At && (s.end == never || c.At <= s.end.Add(h.late(s)))
		})
		who := "working processes"
		if c.Whole {
			who = "replicas"
		}
		switch {
		case i >= 0:
			v.excuse(who + " that ended by " + h.Marks[i].Kind)
		case strings.Contains(c.Said, newSchema) && h.Old:
			v.excuse(who + " of an old version that found a newer schema")
		case strings.Contains(c.Said, noServers) && h.outage(c.Replica, span{c.At.Add(-startTimeout - noticing), c.At}):
			v.excuse(who + " that found no Postgres, or got no session, in start_timeout")
		default:
			what := "the working process of "
			if c.Whole {
				what = "the replica "
			}
			v.violation(&v.WorkerCrashes, "worker crash: %s%s ended at %s, and no fault explains that: %s", what, c.Replica, clock(c.At), strings.TrimSuffix(c.How+"; "+c.Said, "; "))
		}
	}
}

// outage reports whether a fault that may take a server from a replica went on within a span: one that was aimed
// at the replica, which may also be frozen for as long, or at no replica. Where a person has to help, nobody gets
// a session before that. What ends processes takes nothing from those that are started next.
func (h *history) outage(replica string, s span) bool {
	return slices.ContainsFunc(h.Marks, func(m observer.Mark) bool {
		end := cmp.Or(m.End, never)
		if m.Kind != Helpless && slices.Contains(harmless, m.Kind) || slices.Contains([]string{Kill, WorkerKill, "oom"}, m.Kind) || !s.meets(span{m.Begin, max(end, m.Begin+1)}) {
			return false
		}
		return h.aimed(m, replica) || m.Kind != Stranger && len(h.targets(m, h.replicas)) == 0
	})
}

// Stop is the stop of a replica by SIGTERM.
type Stop struct {
	Replica string        `json:"replica"`
	Asked   observer.Time `json:"asked"`
	Ended   observer.Time `json:"ended"`
	Killed  bool          `json:"killed"` // it had not ended in time, and was killed
}

// stops looks for replicas that did not end by SIGTERM. One that is frozen does not get the signal, and
// one without memory may get nothing done.
func (h *history) stops(v *Report) {
	for _, s := range h.Stops {
		v.StopsJudged++
		while := span{s.Asked, s.Ended}
		switch {
		case !s.Killed:
		case slices.ContainsFunc(h.frozen[s.Replica], while.meets):
			v.excuse("replicas that were frozen when they were to stop, and were killed")
		case slices.ContainsFunc(h.Marks, func(m observer.Mark) bool {
			return m.Kind == "replica-memory" && h.aimed(m, s.Replica) && while.meets(span{m.Begin, cmp.Or(m.End, never)})
		}):
			v.excuse("replicas that had no memory when they were to stop, and were killed")
		case h.late(while) >= maxWait:
			v.excuse("replicas that were to stop on a machine that stood still, and were killed")
		default:
			v.violation(&v.StopsKilled, "stop: %s had SIGTERM at %s, and had to be killed at %s", s.Replica, clock(s.Asked), clock(s.Ended))
		}
	}
}
