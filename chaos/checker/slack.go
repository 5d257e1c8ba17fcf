package checker

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"time"

	"onejob/chaos/observer"
)

// What replicas of a run are set to: the defaults.
const (
	// longestLease is how long a lease may go on when heartbeats reach Consul's agent, and its
	// servers hear of none: the session's TTL less the margin.
	longestLease = 14 * time.Second

	// killing is how long after the deadline of its lease a command may still be there: a
	// guard kills it after half a second at most. The rest is for a machine that is busy.
	killing = 500*time.Millisecond + time.Second
)

// Excuse is a time that is not held against anybody: how often it was used, the longest, and
// from which length on it is a violation.
type Excuse struct {
	Count int     `json:"count"`
	Max   float64 `json:"max_s"`
	Bound float64 `json:"bound_s"`
}

// measure notes that an excuse was used.
func (v *Report) measure(name string, used, bound time.Duration) {
	e := v.Excuses[name]
	if e == nil {
		e = &Excuse{Bound: bound.Seconds()}
		v.Excuses[name] = e
	}
	e.Count++
	e.Max = max(e.Max, inSeconds(used))
}

func inSeconds(d time.Duration) float64 {
	return float64(d.Round(time.Millisecond).Milliseconds()) / 1000
}

// thaws notes how long after the thaw of its replica an attempt went on, until a moment.
func (h *history) thaws(v *Report, a *attempt, until observer.Time) {
	used := time.Duration(0)
	for _, f := range h.frozen[a.Replica] {
		if thaw := f.end.Add(-thawing); f.begin < until && thaw < until && until <= f.end {
			used = max(used, until.Sub(thaw))
		}
	}
	v.measure("thawing", used, thawing)
}

// Lateness is how late work ended after the deadline of its lease.
type Lateness struct {
	Told  int     `json:"told"`    // attempts whose replica said when the lease ended
	After int     `json:"after"`   // those of them that ended after that
	P50   float64 `json:"p50_s"`   // of those, how much later
	Max   float64 `json:"max_s"`   // the same
	Bound float64 `json:"bound_s"` // from which on it is a violation

	// Silenced are the attempts whose replica a fault had kept from every heartbeat for as
	// long as a lease lasts, or had killed, and that had not ended by themselves before.
	Silenced    int     `json:"silenced"`
	CutsJudged  int     `json:"cuts_judged"`    // faults that went on for longer than any lease, while which nothing may begin
	SilencedMax float64 `json:"silenced_max_s"` // how long after the last possible deadline one ended; negative if none did
}

// lateEnds compares the end of every attempt of which that is known with the deadline of its
// lease. Handlers and requests of a replica that was frozen are excused, commands never.
func (h *history) lateEnds(v *Report) {
	v.Lateness.Bound = killing.Seconds()
	var all []time.Duration
	for _, a := range h.attempts {
		l, ok := h.Leases[a.Fence]
		if !ok || a.Outsider != "" || a.Kind == kindSQL {
			continue
		}
		v.Lateness.Told++
		over := l.Over()
		late := a.end.Sub(over)
		if late <= 0 {
			continue
		}
		if h.frozenDuring(a, span{over, a.end}) {
			h.thaws(v, a, a.end)
			continue
		}
		all = append(all, late)
		if late > killing+h.late(span{over, a.end}) {
			v.violation(&v.LateEnds, "late end: %v after the lease of %v had ended, at %s", late, a, clock(over))
		}
	}
	v.Lateness.After = len(all)
	v.Lateness.P50, v.Lateness.Max = inSeconds(Quantile(all, 0.5)), inSeconds(Quantile(all, 1))
}

// silencing are the faults after which no heartbeat of the target is acknowledged: for good,
// or as long as they go on.
var silencing = map[string]bool{Kill: true, HostLoss: true, OutsiderKill: true, Frozen: false, OutsiderFreeze: false, OutsiderCut: false, "cut-consul": false, "cut-both": false}

// opening is how long before the end of its mark a fault's ways may be open again: they are opened first, and the
// replica then needs a moment for a new session at least.
const opening = time.Second

// silenced looks for work that goes on, or begins, although its replica cannot have had a lease any
// more, whatever the replica says: nobody has heard of it for too long.
func (h *history) silenced(v *Report) {
	if h.Lease == 0 {
		return
	}
	var after []time.Duration // of those that did not end by themselves
	for _, m := range h.Marks {
		forGood, ok := silencing[m.Kind]
		deadline := m.Begin.Add(h.Lease)
		if !ok || !forGood && m.End != 0 && m.End < deadline {
			continue
		}
		over := m.End.Add(-opening)
		switch {
		case forGood:
			over = m.Begin // what was started again has a lease of its own
		case m.End == 0:
			over = never
		}
		if over > deadline {
			v.Lateness.CutsJudged++
		}
		targets := strings.Split(m.Target, ",")
		for _, a := range h.attempts {
			if a.Kind == kindSQL || !slices.Contains(targets, a.Replica) || a.begin >= over || a.end <= m.Begin {
				continue
			}
			if a.end > deadline && h.frozenDuring(a, span{max(deadline, a.begin), a.end}) {
				continue
			}
			if a.how != observer.Succeeded && a.how != observer.Failed {
				after = append(after, a.end.Sub(deadline))
			}
			if late := a.begin.Sub(deadline); late > killing+h.late(span{m.Begin, a.begin}) {
				v.violation(&v.LateEnds, "late end: it began %v after %s at %s, which leaves a lease of %v: %v", a.begin.Sub(m.Begin), m.Kind, clock(m.Begin), h.Lease, a)
				continue
			}
			if late := a.end.Sub(deadline); late > killing+h.late(span{m.Begin, a.end}) {
				v.violation(&v.LateEnds, "late end: %v after %s at %s, which leaves a lease of %v: %v", a.end.Sub(m.Begin), m.Kind, clock(m.Begin), h.Lease, a)
			}
		}
	}
	v.Lateness.Silenced, v.Lateness.SilencedMax = len(after), inSeconds(Quantile(after, 1))
}

// Slack is how long it took from the end of one attempt to the beginning of the next with
// the same lock key.
type Slack struct {
	All  Spread            `json:"all"`
	Lost Spread            `json:"lost"` // where the first ended neither by itself nor by a timeout or a cancel, and the next was another replica's
	Keys map[string]Spread `json:"keys"` // by lock key, of those with many; "one task" is a task's own, "others" the rest

	Tightest     []Handover `json:"tightest"`
	TightestLost []Handover `json:"tightest_lost"`
}

// Spread is a distribution of times, in seconds.
type Spread struct {
	N   int     `json:"n"`
	Min float64 `json:"min_s"`
	P1  float64 `json:"p1_s"`
	P50 float64 `json:"p50_s"`
}

func newSpread(all []time.Duration) Spread {
	return Spread{len(all), inSeconds(Quantile(all, 0)), inSeconds(Quantile(all, 0.01)), inSeconds(Quantile(all, 0.5))}
}

// Handover is one attempt after another of the same lock key.
type Handover struct {
	Key    string   `json:"key"`
	Slack  float64  `json:"slack_s"`
	From   string   `json:"from"`
	To     string   `json:"to"`
	Faults []string `json:"faults"` // that went on at that time, or up to 15 s before the first ended

	from, to *attempt
	took     time.Duration
}

const (
	tightest  = 10               // hand-overs that are reported
	manyTimes = 20               // hand-overs that make a lock key worth a line
	before    = 15 * time.Second // the end of the first, a fault may matter for the hand-over
)

// slack measures hand-overs. Those that overlap are not among them.
func (h *history) slack(v *Report) {
	var all, lost []Handover
	keys := map[string][]time.Duration{}
	told := map[int64]bool{} // tasks that are told to end
	for _, q := range h.Enqueued {
		told[q.Task] = q.Doomed || q.Cancelled
	}
	for key, attempts := range h.byKey {
		var last *attempt // of those before, the one that ended last
		for _, b := range attempts {
			if a := last; a != nil && a.end <= b.begin {
				o := Handover{Key: key, from: a, to: b, took: b.begin.Sub(a.end)}
				all = append(all, o)
				if a.how != observer.Succeeded && a.how != observer.Failed && a.Replica != b.Replica && !told[a.Task] && (a.Outsider == "" || a.how == observer.Gone) {
					lost = append(lost, o)
				}
				name := key
				if _, err := strconv.ParseInt(key, 10, 64); err == nil {
					name = "one task"
				}
				keys[name] = append(keys[name], o.took)
			}
			if last == nil || b.end > last.end {
				last = b
			}
		}
	}
	v.Slack = Slack{All: newSpread(times(all)), Lost: newSpread(times(lost)), Keys: map[string]Spread{},
		Tightest: h.tightest(all), TightestLost: h.tightest(lost)}
	var others []time.Duration
	for name, took := range keys {
		if len(took) < manyTimes {
			others = append(others, took...)
			continue
		}
		v.Slack.Keys[name] = newSpread(took)
	}
	if len(others) > 0 {
		v.Slack.Keys["others"] = newSpread(others)
	}
}

func times(all []Handover) (took []time.Duration) {
	for _, o := range all {
		took = append(took, o.took)
	}
	return took
}

// tightest returns the tightest of some hand-overs, with the faults around them.
func (h *history) tightest(all []Handover) []Handover {
	slices.SortFunc(all, func(a, b Handover) int {
		return cmp.Or(cmp.Compare(a.took, b.took), cmp.Compare(a.to.begin, b.to.begin))
	})
	some := slices.Clone(all[:min(tightest, len(all))])
	for i := range some {
		o := &some[i]
		o.Slack, o.From, o.To = inSeconds(o.took), o.from.String(), o.to.String()
		o.Faults = h.faultsAround(span{o.from.end.Add(-before), o.to.begin})
	}
	return some
}

// faultsAround returns the kinds of the faults that went on within a span.
func (h *history) faultsAround(s span) []string {
	kinds := []string{}
	for _, m := range h.Marks {
		end := m.End
		if end == 0 {
			end = never
		}
		if s.meets(span{m.Begin, max(end, m.Begin+1)}) {
			kinds = append(kinds, m.Kind+" of "+m.Target)
		}
	}
	slices.Sort(kinds)
	return slices.Compact(kinds)
}
