package checker

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"onejob/chaos/observer"
)

// Report is what went wrong. Of the first numbers every one must be zero.
type Report struct {
	Overlaps           int        `json:"overlaps"`              // pairs of attempts of one lock key inside at once
	FencesRepeated     int        `json:"fences_repeated"`       // fences that two attempts had, and attempts that began twice
	LimitExcesses      int        `json:"limit_excesses"`        // times at which more were inside a limit than it has slots
	Lost               int        `json:"lost"`                  // tasks that did not end in a final state
	DoubleSuccess      int        `json:"double_success"`        // tasks that were accepted as succeeded twice
	DoubleEffect       int        `json:"double_effect"`         // sql tasks whose effect is there twice, or without their success
	DoubleStatements   int        `json:"double_statements"`     // pairs of sql statements of one lock key at work at once, or of one and other work
	UndoneJudged       int        `json:"undone_judged"`         // sql statements that were undone, and were compared with other work of their lock keys
	DoubleRunning      int        `json:"double_running"`        // times at which two rows of one lock key were running
	StaleAccepted      int        `json:"stale_accepted"`        // writes that were accepted and were not the holder's
	OccurrencesMissing int        `json:"occurrences_missing"`   // due times without a task
	OccurrencesDoubled int        `json:"occurrences_doubled"`   // due times with several tasks
	OccurrencesWrong   int        `json:"occurrences_wrong"`     // due times that no line of an edited schedule names, and tasks that are not as it says
	Starved            int        `json:"starved"`               // tasks that nobody claimed in time, see history.starved
	StarvedJudged      int        `json:"starved_judged"`        // tasks that would have been found if nobody had claimed them for a minute
	Unlocked           int        `json:"unlocked"`              // attempts that began while no Consul server ran
	WorkerCrashes      int        `json:"worker_crashes"`        // working processes, or replicas, that ended, and no fault ends them
	StopsKilled        int        `json:"stops_killed"`          // replicas that did not end by SIGTERM
	StopsJudged        int        `json:"stops_judged"`          // replicas that had SIGTERM
	Spent              int        `json:"spent"`                 // attempts that nothing but a graceful restart used up, see history.spent
	Spoiled            int        `json:"spoiled"`               // tasks that failed without a cause: in a run whose faults give none, or by an error in their own statement
	IllegalSteps       int        `json:"illegal_steps"`         // changes of rows that package lifecycle has no rule for
	UnexpectedEnds     int        `json:"unexpected_ends"`       // attempts and tasks that ended otherwise than they were made to, and no fault explains it
	RequeuesJudged     int        `json:"requeues_judged"`       // attempts that were given back, or lost, without a charge
	UnbegunJudged      int        `json:"unbegun_judged"`        // attempts that were given back as if they had not begun
	Overstays          int        `json:"overstays"`             // attempts that went on after their timeout, or after a cancel
	CancelsJudged      int        `json:"cancels_judged"`        // cancels of running tasks that were looked at; those beside a fault are excused
	LateTakeOvers      int        `json:"late_takeovers"`        // rows that a dead replica kept for too long
	Misrouted          int        `json:"misrouted"`             // claims by replicas that do not serve the row's queue
	UniqueBroken       int        `json:"unique_broken"`         // two tasks with one unique key at once, and INSERTs that were declined without one
	OutputsWrong       int        `json:"outputs_wrong"`         // tasks whose output lacks its head or its tail
	LateEnds           int        `json:"late_ends"`             // attempts that went on after the deadline of their lease for longer than a guard takes to kill
	Refused            int        `json:"refused"`               // writes that were refused; above zero where the fence was needed
	FrozenHTTPInFlight int        `json:"frozen_http_in_flight"` // http attempts beside their successor, their replica being frozen
	FrozenGoInFlight   int        `json:"frozen_go_in_flight"`   // the same for Go handlers, which did nothing meanwhile
	SuspendedCommands  int        `json:"suspended_commands"`    // the same for commands that were stopped with their guards
	Overrides          int        `json:"two_hands"`             // overlaps that an operator made by ending a session and resetting its row, see history.overrides
	Unguarded          int        `json:"one_hand"`              // overlaps with an outsider, whose only guard a fault took away, see history.unguarded
	Repeated           int        `json:"repeated"`              // tasks that did all their work more than once, as at-least-once allows
	Expired            int        `json:"expired"`               // tasks that retention deleted, as their rows asked for
	Stays              int        `json:"stays"`                 // attempts that the observer saw, and commands of outsiders
	Outsiders          int        `json:"outsiders"`             // those of them that were commands of outsiders
	RowsOfTheDead      int        `json:"rows_of_the_dead"`      // that were in the hands of a replica when it was killed alone
	TakeOvers          []TakeOver `json:"-"`

	Slowest []SlowTakeOver `json:"slowest_takeovers"`

	Hits map[string]map[string]int `json:"hits"` // by kinds of faults and of work: how many faults met some at work

	Steps   map[string]int `json:"steps"`   // by rules of package lifecycle
	Excused map[string]int `json:"excused"` // what would be a violation but for a fault that explains it

	Lateness Lateness           `json:"lateness"` // of ends, after the deadlines of leases
	Slack    Slack              `json:"slack"`    // between one attempt and the next of its lock key
	Excuses  map[string]*Excuse `json:"excuses"`  // times that are not held against anybody, by their names

	Violations []string `json:"violations"` // the first ones, in words
}

// TakeOver is how long it took until somebody else was inside after a replica's
// death.
type TakeOver struct {
	Task  int64
	Cause string // the kind of mark
	Alone bool   // nothing else was going on
	Took  time.Duration

	mark     observer.Mark
	from, to *attempt
}

// SlowTakeOver is one of the slowest takeovers.
type SlowTakeOver struct {
	Took   float64  `json:"took_s"`
	Key    string   `json:"key"`
	After  string   `json:"after"` // the fault that ended the predecessor's hold
	From   string   `json:"from"`
	To     string   `json:"to"`
	Faults []string `json:"faults"` // that went on until the successor began
}

// Violated reports whether something happened that must not.
func (v *Report) Violated() bool {
	return v.Overlaps+v.FencesRepeated+v.LimitExcesses+v.Lost+v.DoubleSuccess+v.DoubleEffect+v.DoubleStatements+v.DoubleRunning+
		v.IllegalSteps+v.UnexpectedEnds+v.Overstays+v.LateTakeOvers+v.LateEnds+v.Misrouted+v.UniqueBroken+v.OutputsWrong+
		v.StaleAccepted+v.OccurrencesMissing+v.OccurrencesDoubled+v.OccurrencesWrong+v.Starved+v.Unlocked+v.WorkerCrashes+v.StopsKilled+v.Spent+v.Spoiled > 0
}

const maxViolations = 200

func (v *Report) violation(count *int, format string, a ...any) {
	*count++
	if len(v.Violations) < maxViolations {
		v.Violations = append(v.Violations, fmt.Sprintf(format, a...))
	}
}

// Checker says what the evidence says.
func Check(e Evidence) *Report {
	h := newHistory(e.withoutHostile())
	v := &Report{Refused: e.Refused, Stays: len(h.attempts), Outsiders: len(h.outsiders),
		Violations: []string{}, Steps: map[string]int{}, Excused: map[string]int{}, Excuses: map[string]*Excuse{}}
	h.overlaps(v)
	h.lateEnds(v)
	h.silenced(v)
	h.slack(v)
	h.fences(v)
	h.stale(v)
	h.limits(v)
	h.ends(v)
	if !e.Forgetful {
		h.statuses(v)
		h.effects(v)
		h.statementsAtOnce(v)
		h.statementsBeside(v)
		h.spent(v)
		h.function(v).checkAll(v)
		h.misrouted(v)
		h.uniqueKeys(v)
		h.retention(v)
	}
	for _, task := range h.BadOutputs {
		v.violation(&v.OutputsWrong, "output: task %d succeeded, and its output lacks the head or the tail", task)
	}
	h.unlocked(v)
	h.crashes(v)
	h.stops(v)
	h.occurrences(v)
	h.starved(v)
	h.takeOvers(v)
	h.hits(v)
	return v
}

// history is the evidence, in the order in which it is needed.
type history struct {
	Evidence
	attempts  []*attempt          // by when they began
	byFence   map[int64]*attempt  // of those that the observer, or an effect, shows
	outsiders map[string]*attempt // commands that are no tasks', by name
	byTask    map[int64][]*attempt
	byKey     map[string][]*attempt
	holder    map[int64]string // replica, by fence
	replicas  map[string]bool  // that are known by name
	frozen    map[string][]span
	suspended map[string][]span         // with guards and commands
	touched   map[int64]map[string]bool // what was done to a task's row by hand
	deleted   map[int64]bool            // rows that an operator deleted
	again     map[int64]int             // how often an operator made a row pending that had succeeded
}

// attempt is one attempt's time inside, in one piece: from when the first of its
// processes came until the last had left.
type attempt struct {
	observer.Claim
	span
	how string // of the attempt's own process
}

type span struct{ begin, end observer.Time }

func (s span) meets(o span) bool { return s.begin < o.end && o.begin < s.end }

func (s span) covers(o span) bool { return s.begin <= o.begin && o.end <= s.end }

func newHistory(e Evidence) *history {
	h := &history{Evidence: e, byFence: map[int64]*attempt{}, outsiders: map[string]*attempt{}, byTask: map[int64][]*attempt{}, byKey: map[string][]*attempt{},
		holder: map[int64]string{}, replicas: map[string]bool{}, frozen: map[string][]span{}, suspended: map[string][]span{},
		touched: map[int64]map[string]bool{}, deleted: map[int64]bool{}, again: map[int64]int{}}
	for _, t := range e.Touched {
		if h.touched[t.Task] == nil {
			h.touched[t.Task] = map[string]bool{}
		}
		h.touched[t.Task][t.What] = true
	}
	for _, b := range e.Begun {
		h.holder[b.Fence] = b.Replica
	}
	success := map[int64]Transition{} // by fence
	for _, t := range e.Transitions {
		if t.To == running {
			h.holder[t.Fence] = t.Replica
		}
		if t.To == succeeded {
			success[t.Fence] = t
		}
		if t.By != Operator {
			continue
		}
		if t.To == Deleted {
			h.deleted[t.Task] = true
		}
		if t.From == succeeded && t.To == pending {
			h.again[t.Task]++
		}
	}
	for _, m := range e.Marks {
		end := m.End
		if end == 0 {
			end = never
		}
		switch s := (span{m.Begin, end.Add(thawing)}); m.Kind {
		case Frozen:
			h.frozen[m.Target] = append(h.frozen[m.Target], s)
		case Suspended:
			h.suspended[m.Target] = append(h.suspended[m.Target], s)
		}
	}
	for _, s := range e.Stays {
		h.add(s)
	}
	for _, f := range e.Effects {
		t, ok := success[f.Fence]
		if !ok {
			continue
		}
		end := t.At
		if t.From != running { // the status was written apart from the effect
			end = f.Ended
		}
		begin := min(f.Began.Add(cutOff), end)
		h.add(observer.Stay{Claim: observer.Claim{Task: f.Task, Fence: f.Fence, Key: f.Key, Kind: kindSQL}, Begin: begin, End: end, How: observer.Succeeded})
	}
	for _, names := range h.Hosts {
		for _, name := range names {
			h.replicas[name] = true
		}
	}
	for _, a := range h.byFence {
		a.Replica = cmp.Or(a.Replica, h.holder[a.Fence])
		h.replicas[a.Replica] = true
		h.attempts = append(h.attempts, a)
	}
	for _, a := range h.outsiders {
		h.attempts = append(h.attempts, a)
	}
	slices.SortFunc(h.attempts, func(a, b *attempt) int {
		return cmp.Or(cmp.Compare(a.begin, b.begin), cmp.Compare(a.Fence, b.Fence), cmp.Compare(a.Outsider, b.Outsider))
	})
	for _, a := range h.attempts {
		if a.Outsider == "" {
			h.byTask[a.Task] = append(h.byTask[a.Task], a)
		}
		h.byKey[a.Key] = append(h.byKey[a.Key], a)
	}
	return h
}

const never = observer.Time(1 << 62)

// add puts a stay to the others of its attempt.
func (h *history) add(s observer.Stay) {
	if s.How == observer.Open {
		s.End = never
	}
	a := h.byFence[s.Fence]
	if s.Outsider != "" {
		a = h.outsiders[s.Outsider]
	}
	if a == nil {
		a = &attempt{Claim: s.Claim, span: span{s.Begin, s.End}}
		if s.Outsider != "" {
			h.outsiders[s.Outsider] = a
		} else {
			h.byFence[s.Fence] = a
		}
	}
	a.begin, a.end = min(a.begin, s.Begin), max(a.end, s.End)
	if s.Part == "" {
		a.how, a.Limit, a.Replica = s.How, s.Limit, s.Replica
	}
}

// frozenDuring reports whether an attempt was one of those that a frozen replica
// cannot end, for all of a span.
func (h *history) frozenDuring(a *attempt, s span) bool {
	return slices.ContainsFunc(h.excused(a), func(f span) bool { return f.covers(s) })
}

// excused are the times for which nobody can end an attempt of a frozen replica. The guard
// ends a command, unless it is frozen too, and the fence keeps a statement out.
func (h *history) excused(a *attempt) []span {
	switch a.Kind {
	case kindSQL:
		return nil
	case kindExec:
		return h.suspended[a.Replica]
	default:
		return h.frozen[a.Replica]
	}
}

// unheard is for how long a replica is frozen at least before another one may take its locks, if
// nothing else went on: others count 7 s from the last heartbeat, and there is one each second.
const unheard = 4 * time.Second

// lastHeard is how long before a freeze the last heartbeat may have been sent: what the harness was late by since
// then may have kept the next one back.
const lastHeard = 2 * time.Second

// lostWhileFrozen reports whether an attempt of a frozen replica may have lost its lock when an overlap
// began: the replica had been frozen for long enough, less what the harness was late by, or something
// else may have taken the lock.
func (h *history) lostWhileFrozen(a *attempt, both span) bool {
	return slices.ContainsFunc(h.excused(a), func(f span) bool {
		before := span{f.begin.Add(-longestLease - killing), both.begin}
		late := h.late(span{f.begin.Add(-lastHeard), both.begin})
		return f.covers(both) && (both.begin >= f.begin.Add(unheard-late) || h.mayLose(a.Replica, f, before))
	})
}

// harmless are the faults after which every lock is held for as long as before. Of a freeze there is a
// mark of Frozen beside.
var harmless = append([]string{"freeze", "suspend", Suspended, "child-kill", "guard-kill", "token-rotated", "schedule-edit", "clock-jump", OutsiderKill, OutsiderFreeze, OutsiderCut, Stacks, Helpless}, mild...)

// mayLose reports whether a fault within a span may have taken a replica's locks, besides a freeze that
// goes on: one that was aimed at the replica, or at none.
func (h *history) mayLose(replica string, freeze, s span) bool {
	return slices.ContainsFunc(h.Marks, func(m observer.Mark) bool {
		end := m.End
		if end == 0 {
			end = never
		}
		if slices.Contains(harmless, m.Kind) || m.Kind == Frozen && end > freeze.begin || !s.meets(span{m.Begin, max(end, m.Begin+1)}) {
			return false
		}
		targets := h.targets(m, h.replicas)
		return len(targets) == 0 || slices.Contains(targets, replica)
	})
}

func (v *Report) countFrozen(a *attempt) {
	switch a.Kind {
	case kindHTTP:
		v.FrozenHTTPInFlight++
	case kindExec:
		v.SuspendedCommands++
	default:
		v.FrozenGoInFlight++
	}
}

// overlaps looks for two of one lock key inside at once. What a frozen replica
// had begun is counted apart, if its fence was lower than its successor's.
func (h *history) overlaps(v *Report) {
	for key, all := range h.byKey {
		var inside []*attempt
		for _, b := range all {
			inside = slices.DeleteFunc(inside, func(a *attempt) bool { return a.end <= b.begin })
			for _, a := range inside {
				both := span{b.begin, min(a.end, b.end)}
				switch {
				case (a.Fence < b.Fence || b.Outsider != "") && h.lostWhileFrozen(a, both):
					v.countFrozen(a)
					h.thaws(v, a, both.end)
				case h.overrides(v, a, b, both):
					v.Overrides++
				case h.unguarded(v, a, b, both):
					v.Unguarded++
				case h.sharesAnID(v, key, a.Task, b.Task, a.Fence, b.begin):
				default:
					v.violation(&v.Overlaps, "overlap: lock key %s: %s and %s were inside at once for %v", key, a, b, both.end.Sub(both.begin))
				}
			}
			inside = append(inside, b)
		}
	}
}

// fences looks for a fence that two attempts had, or one attempt that began twice: its own process or
// its handler. A request may be sent again, as its idempotency key says.
func (h *history) fences(v *Report) {
	first, own := map[int64]observer.Claim{}, map[int64]bool{}
	for _, s := range h.Stays {
		if s.Outsider != "" {
			continue
		}
		was, known := first[s.Fence]
		if !known {
			first[s.Fence], was = s.Claim, s.Claim
		}
		switch {
		case was.Task != s.Task || was.Key != s.Key || was.Attempt != s.Attempt || was.Kind != s.Kind:
			v.violation(&v.FencesRepeated, "fence %d was used twice: by %s and %s", s.Fence, &attempt{Claim: was}, &attempt{Claim: s.Claim})
		case own[s.Fence] && s.Part == "" && s.Kind != kindHTTP:
			v.violation(&v.FencesRepeated, "fence %d was used twice: its attempt began again at %s: %s", s.Fence, clock(s.Begin), &attempt{Claim: s.Claim})
		}
		own[s.Fence] = own[s.Fence] || s.Part == ""
	}
}

// overrides reports whether an operator, while a was inside and before b of another
// replica began, both ended the session of a's replica and made a's row pending
// by hand. The session's end frees the key after the lock-delay, which is shorter
// than the lease of a replica that cannot hear of it; the running row keeps
// others out until that is over, and he has taken it away. It is no excuse after the
// time that the lease had left.
func (h *history) overrides(v *Report, a, b *attempt, both span) bool {
	if a.Replica == b.Replica || a.Fence > b.Fence || a.Outsider != "" || b.Outsider != "" {
		return false
	}
	reset := slices.ContainsFunc(h.Transitions, func(t Transition) bool { // or deleted
		return t.Fence == a.Fence && t.From == running && t.By == Operator && t.At < b.begin
	})
	if !reset {
		return false
	}
	for _, m := range h.Marks {
		if slices.Contains(completions, m.Kind) && m.Target == a.Replica && a.begin < m.Begin && m.Begin < b.begin && h.restOfLease(v, "two_hands", sessionLost(m), both) {
			return true
		}
	}
	return false
}

// sharesAnID reports whether two tasks have one lock key because it is the ID of the one,
// which has no lock_key, and the lock_key of the other, and an operator had made the row of
// the first attempt pending by hand before the other one began. Consul does not know that
// these two share a key (docs/decisions/names.md): the row was all that kept them apart.
func (h *history) sharesAnID(v *Report, key string, a, b, fence int64, before observer.Time) bool {
	if a == b || key != strconv.FormatInt(a, 10) && key != strconv.FormatInt(b, 10) {
		return false
	}
	reset := slices.ContainsFunc(h.Transitions, func(t Transition) bool {
		return t.Task == a && shortFence(t.Fence) == shortFence(fence) && t.From == running && t.By == Operator && t.At < before
	})
	if reset {
		v.excuse("a lock_key that is the ID of another task, whose row was reset by hand")
	}
	return reset
}

// lostKey reports whether a fault may have taken keys of Consul away, some of which are meant, although
// their holders do not know yet. Tasks have their rows beside them.
func lostKey(m observer.Mark, meant func(key string) bool) bool {
	return m.Kind == ConsulRestore || m.Kind == ConsulWiped || m.Kind == KeyDelete && slices.ContainsFunc(m.Keys, meant)
}

// unguarded reports whether a fault took the key of a away before b began, where one of them
// has no row: the key was all that kept them apart. It is no excuse after the time that the
// lease had left.
func (h *history) unguarded(v *Report, a, b *attempt, both span) bool {
	if a.Outsider == "" && b.Outsider == "" {
		return false
	}
	own := func(key string) bool { return strings.HasSuffix(key, "/tasks/"+a.Key) }
	for _, m := range h.Marks {
		if !lostKey(m, own) && !(slices.Contains(completions, m.Kind) && m.Target == a.Replica) {
			continue
		}
		end := sessionLost(m)
		if a.begin < end && m.Begin < b.begin && h.restOfLease(v, "one_hand", end, both) {
			return true
		}
	}
	return false
}

// sessionLost returns when a fault had done what takes a lock from its holder. A replica that
// cannot hear of that is black-holed before the mark begins, and until it ends.
func sessionLost(m observer.Mark) observer.Time {
	switch {
	case m.Kind == SessionUnheard:
		return m.Begin
	case m.End == 0:
		return never
	}
	return m.End
}

// restOfLease reports whether an overlap was over when a lease had ended that nobody could
// keep alive after a moment, and notes how long it took.
func (h *history) restOfLease(v *Report, name string, lost observer.Time, both span) bool {
	bound := longestLease + killing
	if lost == never || both.end > lost.Add(bound+h.late(span{lost, both.end})) {
		return lost == never
	}
	v.measure(name, max(0, both.end.Sub(lost)), bound)
	return true
}

// stale looks at those whom the observer turned away because somebody with a
// higher fence had been there before. Only who was frozen has an excuse, and only if it may have lost its lock
// when that one began.
func (h *history) stale(v *Report) {
	for _, s := range h.Stale {
		a := &attempt{Claim: s.Claim}
		a.Replica = cmp.Or(a.Replica, h.holder[a.Fence])
		both := span{s.At, s.At}
		for _, b := range h.byKey[a.Key] {
			if b.Outsider == "" && b.Fence > a.Fence {
				both.begin = min(both.begin, b.begin)
			}
		}
		if h.lostWhileFrozen(a, both) {
			v.countFrozen(a)
			h.thaws(v, a, s.At)
			continue
		}
		v.violation(&v.Overlaps, "overlap: lock key %s: %s came at %s, after somebody with a higher fence", s.Key, a, clock(s.At))
	}
}

// limits looks for more inside than there are slots.
func (h *history) limits(v *Report) {
	for name, slots := range h.Limits {
		type step struct {
			at   observer.Time
			more int
			who  *attempt
		}
		var steps []step
		for _, a := range h.attempts {
			if a.Limit != name {
				continue
			}
			for _, s := range h.awake(a) {
				steps = append(steps, step{s.begin, 1, a}, step{s.end, -1, a})
			}
		}
		slices.SortFunc(steps, func(a, b step) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.more, b.more)) })
		inside := map[*attempt]bool{}
		for _, s := range steps {
			if s.more < 0 {
				delete(inside, s.who)
				continue
			}
			inside[s.who] = true
			if len(inside) <= slots && len(h.Resizes) == 0 {
				continue
			}
			if most := h.slotsAt(name, slots, s.at); len(inside) > most && !h.slotsLost(v, inside, most, s.at) {
				v.violation(&v.LimitExcesses, "limit %s: %d inside of %d at %s: %v", name, len(inside), most, clock(s.at), slices.Collect(maps.Keys(inside)))
			}
		}
	}
}

// slotsLost reports whether no more than most are inside but for those whose slots Consul may
// have forgotten, and notes how long it took. A limit in Consul has no other guard: who had a
// slot works on until it notices.
func (h *history) slotsLost(v *Report, inside map[*attempt]bool, most int, at observer.Time) bool {
	const bound = longestLease + killing
	sure, first := len(inside), at
	for a := range inside {
		lost := slices.IndexFunc(h.Marks, func(m observer.Mark) bool {
			return !h.RabbitMQ && (m.Kind == ConsulRestore || m.Kind == ConsulWiped) && m.Begin <= at && (m.End == 0 || a.begin <= m.End && at <= m.End.Add(bound))
		})
		if lost >= 0 {
			sure, first = sure-1, min(first, max(h.Marks[lost].Begin, a.begin))
		}
	}
	if sure > most {
		return false
	}
	v.measure("lost_slot", at.Sub(first), bound)
	return true
}

// awake returns when an attempt was inside, without the times for which a frozen
// replica is excused.
func (h *history) awake(a *attempt) []span {
	left := []span{a.span}
	for _, f := range h.excused(a) {
		var next []span
		for _, s := range left {
			if s.begin >= f.begin || !s.meets(f) { // it came after the thaw, or was not touched
				next = append(next, s)
				continue
			}
			next = append(next, span{s.begin, f.begin})
			if f.end < s.end {
				next = append(next, span{f.end, s.end})
			}
		}
		left = next
	}
	return left
}

// edited reports whether somebody has changed a task's row by hand, otherwise than by a lock: that makes a task
// wait, and no attempt fail.
func (h *history) edited(task int64) bool {
	for what := range h.touched[task] {
		if what != Locked {
			return true
		}
	}
	return false
}

// ends looks for tasks that are not over, or not there any more.
func (h *history) ends(v *Report) {
	expired := h.expired()
	for _, q := range h.Enqueued {
		f, there := h.Final[q.Task]
		switch {
		case !there && expired[q.Task]:
		case !there && (h.deleted[q.Task] || h.Forgetful):
		case !there:
			v.violation(&v.Lost, "lost: task %d (%s) is not in the table", q.Task, q.Kind)
		case f.Status == cancelled && !q.Cancelled && !h.touched[q.Task][CancelRequested]:
			v.violation(&v.Lost, "lost: task %d (%s) is cancelled, and nobody asked for that", q.Task, q.Kind)
		case f.Status != succeeded && f.Status != failed && f.Status != cancelled:
			v.violation(&v.Lost, "lost: task %d (%s) is still %s", q.Task, q.Kind, f.Status)
		case f.Status == failed && !q.Doomed && !h.edited(q.Task) && (h.Gentle || ofItsOwn(f.Error)):
			v.violation(&v.Spoiled, "spoiled: task %d (%s) failed: %s", q.Task, q.Kind, f.Error)
		}
	}
	for _, all := range h.byTask {
		times := 0
		for _, a := range all {
			if a.how == observer.Succeeded {
				times++
			}
		}
		if times > 1 {
			v.Repeated++
		}
	}
}

// ofItsOwn reports whether Postgres refused a statement for what it says, which no fault
// makes it do.
func ofItsOwn(failure string) bool {
	for _, class := range []string{"22", "23", "42"} { // data, integrity, syntax and rights
		if strings.Contains(failure, "SQLSTATE "+class) {
			return true
		}
	}
	return false
}

// statuses looks at every change of a row's status.
func (h *history) statuses(v *Report) {
	successes := map[int64]int{}
	busy := map[string]map[int64]bool{} // rows that are running, by lock key
	for _, t := range h.Transitions {
		if t.To == running {
			if busy[t.Key] == nil {
				busy[t.Key] = map[int64]bool{}
			}
			if busy[t.Key][t.Task] = true; len(busy[t.Key]) > 1 {
				v.violation(&v.DoubleRunning, "double running: lock key %s: tasks %v at %s", t.Key, slices.Sorted(maps.Keys(busy[t.Key])), clock(t.At))
			}
			continue
		}
		delete(busy[t.Key], t.Task)
		if t.From == succeeded && t.To == pending && t.By == Operator {
			successes[t.Task] = 0
		}
		if t.To == succeeded {
			if successes[t.Task]++; successes[t.Task] == 2 {
				v.violation(&v.DoubleSuccess, "double success: task %d (%s), the second at %s", t.Task, t.Kind, clock(t.At))
			}
		}
		if (t.From == running || t.To == succeeded) && t.By != Operator {
			h.accepted(v, t)
		}
	}
}

// accepted looks at a write that ended a row's running, or called it succeeded:
// it must have been the holder's own, who had left, and nobody newer may have
// begun.
func (h *history) accepted(v *Report, t Transition) {
	a := h.byFence[t.Fence]
	if t.To == succeeded && t.Kind != kindNoop && (a == nil || a.how != observer.Succeeded) {
		v.violation(&v.StaleAccepted, "stale accepted: task %d (%s) succeeded at %s under fence %d, whose holder was not seen to succeed: %v", t.Task, t.Kind, clock(t.At), t.Fence, a)
		return
	}
	if a != nil && a.Kind != kindSQL && a.end > t.At.Add(skew) && a.end <= t.At.Add(leaving) {
		v.measure("leaving", a.end.Sub(t.At), leaving)
	}
	if a != nil && a.Kind != kindSQL && a.end > t.At.Add(leaving) && !h.frozenDuring(a, span{t.At, min(a.end, t.At.Add(leaving))}) {
		v.violation(&v.StaleAccepted, "stale accepted: task %d (%s) became %s at %s, while the holder of its fence was inside: %v", t.Task, t.Kind, t.To, clock(t.At), a)
		return
	}
	for _, b := range h.byKey[t.Key] {
		if b.Fence > t.Fence && b.begin.Add(skew) < t.At && t.To == succeeded {
			v.violation(&v.StaleAccepted, "stale accepted: task %d (%s) succeeded at %s under fence %d, after %v had begun", t.Task, t.Kind, clock(t.At), t.Fence, b)
			return
		}
	}
}

// effects looks for what sql tasks did twice, or did without being done. A task
// counts once, whatever it did.
func (h *history) effects(v *Report) {
	seen, reported := map[int64]int{}, map[int64]bool{}
	done := map[int64]bool{} // fences under which a row succeeded
	for _, t := range h.Transitions {
		if t.To == succeeded {
			done[t.Fence] = true
		}
	}
	for _, f := range h.Effects {
		second := seen[f.Task] > h.again[f.Task] // or one more than were asked for
		seen[f.Task]++
		if reported[f.Task] || !second && done[f.Fence] {
			continue
		}
		reported[f.Task] = true
		if second {
			v.violation(&v.DoubleEffect, "double effect: task %d, the second under fence %d", f.Task, f.Fence)
		} else {
			v.violation(&v.DoubleEffect, "double effect: task %d has an effect under fence %d, under which it did not succeed", f.Task, f.Fence)
		}
	}
}

// statementsAtOnce looks for two statements of one lock key at work at once. The
// fence undoes what the older one does, but not what others saw of it, nor the locks
// that it takes.
func (h *history) statementsAtOnce(v *Report) {
	task, key := map[int64]int64{}, map[int64]string{} // by fence
	for _, t := range h.Transitions {
		task[shortFence(t.Fence)], key[shortFence(t.Fence)] = t.Task, t.Key
	}
	say := func(s Statement) string {
		return fmt.Sprintf("task %d fence %d (backend %d of %s, %s to %s)", task[s.Fence], s.Fence, s.PID, s.Replica, clock(s.First), clock(s.Last))
	}
	byKey := map[int64][]Statement{}
	for _, b := range h.Statements {
		for _, a := range byKey[b.Key] {
			if a.First <= b.Last && b.First <= a.Last {
				first, second := a, b
				if b.First < a.First {
					first, second = b, a
				}
				if h.sharesAnID(v, key[first.Fence], task[first.Fence], task[second.Fence], first.Fence, second.First) {
					continue
				}
				v.violation(&v.DoubleStatements, "two statements at once: %s and %s", say(a), say(b))
			}
		}
		byKey[b.Key] = append(byKey[b.Key], b)
	}
}

// statementsBeside looks for sql statements at work at once with a command, an HTTP call or a Go handler of the same
// lock key. Those that succeeded are among the attempts already. Outsiders are not compared: a whole host that is
// lost may leave a statement beside one, as its key is freed before another replica ends the statement.
func (h *history) statementsBeside(v *Report) {
	claims := map[int64]Transition{} // by the lowest bits of the fence
	for _, t := range h.Transitions {
		if t.To == running {
			claims[shortFence(t.Fence)] = t
		}
	}
	for _, s := range h.Statements {
		t, known := claims[s.Fence]
		if !known || h.byFence[t.Fence] != nil {
			continue
		}
		v.UndoneJudged++
		statement := &attempt{Claim: observer.Claim{Task: t.Task, Attempt: t.Attempt, Fence: t.Fence, Kind: kindSQL, Key: t.Key, Replica: s.Replica}, span: span{s.First, s.Last}, how: "undone"}
		for _, a := range h.byKey[t.Key] {
			if a.Outsider != "" || a.Kind == kindSQL {
				continue
			}
			first, second := statement, a
			if a.begin < s.First {
				first, second = a, statement
			}
			both := span{second.begin, min(first.end, second.end)}
			if both.end.Sub(both.begin) <= skew {
				continue
			}
			switch {
			case first.Fence < second.Fence && h.lostWhileFrozen(first, both):
				v.countFrozen(first)
				h.thaws(v, first, both.end)
			case h.overrides(v, first, second, both):
				v.Overrides++
			case h.sharesAnID(v, t.Key, first.Task, second.Task, first.Fence, second.begin):
			default:
				v.violation(&v.DoubleStatements, "a statement beside other work of lock key %s: %s and %s for %v", t.Key, first, second, both.end.Sub(both.begin))
			}
		}
	}
}

// unlocked looks for attempts that began while no Consul server ran, which nobody can
// have had the lock for. An sql task may have waited for Postgres meanwhile, and what was about to begin when its
// replica was frozen begins as that thaws. A lock is asked for while the claim commits, and a commit may wait
// for as long as the lease lasts. A stranger has locks in a Consul of its own, which it adopts when
// no other replica is at work.
func (h *history) unlocked(v *Report) {
	claimed := map[int64]observer.Time{} // by fence
	for _, t := range h.Transitions {
		if t.To == running {
			claimed[t.Fence] = t.At
		}
	}
	strangers := map[string]bool{}
	for _, m := range h.Marks {
		if m.Kind == Stranger {
			strangers[m.Target] = true
		}
	}
	for _, m := range h.Marks {
		if m.Kind != NoConsul {
			continue
		}
		s := span{m.Begin.Add(arriving), m.End}
		if m.End == 0 {
			s.end = never
		}
		for _, a := range h.attempts {
			if a.Kind == kindSQL || strangers[a.Replica] || a.begin <= s.begin || a.begin >= s.end || slices.ContainsFunc(h.frozen[a.Replica], func(f span) bool { return f.begin <= a.begin && a.begin <= f.end }) {
				continue
			}
			if at, ok := claimed[a.Fence]; ok && at <= m.Begin && a.begin <= m.Begin.Add(committing) {
				v.excuse("attempts that began without Consul, after a long commit")
				continue
			}
			v.violation(&v.Unlocked, "unlocked: %v began while no Consul server ran, since %s", a, clock(m.Begin))
		}
	}
}

// spent looks for what a graceful restart takes from tasks, where no other fault went
// on: an attempt whose handler had not begun must not be used up, and a task that has
// one attempt must not fail. Of noop and sql tasks nobody sees the beginning, so for
// them there is only the second.
func (h *history) spent(v *Report) {
	enqueued := map[int64]Enqueued{}
	for _, q := range h.Enqueued {
		enqueued[q.Task] = q
	}
	claims := map[int64]Transition{} // by fence
	for _, t := range h.Transitions {
		if t.To == running {
			claims[t.Fence] = t
			continue
		}
		claim, ok := claims[t.Fence]
		if !ok || t.From != running || t.By == Operator || t.To != pending && t.To != failed {
			continue
		}
		q := enqueued[t.Task]
		if q.Doomed || h.edited(t.Task) || !h.onlyRestarted(claim, t) {
			continue
		}
		a := h.byFence[t.Fence]
		seen := t.Kind != kindNoop && t.Kind != kindSQL
		switch {
		case t.To == failed && q.Once:
			v.violation(&v.Spent, "spent: task %d (%s), which has one attempt, failed at %s by the restart of %s: %v", t.Task, t.Kind, clock(t.At), claim.Replica, a)
		case seen && a == nil && claim.Attempt > 0 && t.Attempt >= claim.Attempt:
			v.violation(&v.Spent, "spent: task %d (%s) had attempt %d used up at %s by the restart of %s, and its handler had not begun", t.Task, t.Kind, claim.Attempt, clock(t.At), claim.Replica)
		}
	}
}

// onlyRestarted reports whether a graceful restart of the claim's replica went on when
// the row was given up, or a while before, and no other fault since a while before the
// claim.
func (h *history) onlyRestarted(claim, end Transition) bool {
	restarted := false
	for _, m := range h.Marks {
		s := span{m.Begin, m.End}
		if m.End == 0 {
			s.end = never
		}
		if m.Kind == GracefulRestart {
			restarted = restarted || m.Target == claim.Replica && claim.At <= s.end && s.begin <= end.At && end.At <= s.end.Add(succeeding)
		} else if s.meets(span{claim.At.Add(-recovering), end.At}) {
			return false
		}
	}
	return restarted
}

// starved looks for tasks that were due, and free, for too long while nothing but
// mild faults went on: there were replicas to claim them. The time of other faults does not count, and
// what is left of a wait before, between and after them does. What the harness was late by
// meanwhile counts twice: a claim takes several processes, each of which is as late. What a fault itself locked
// or edited does not count. Nor does a task that waited in a queue: after an outage it takes a
// while until all that came due meanwhile is done, and tasks that were due before it are
// claimed all the time.
func (h *history) starved(v *Report) {
	claimed := map[int64]observer.Time{} // or otherwise made something else than pending
	begun := map[int64]observer.Time{}   // made running
	for _, t := range h.Transitions {
		if _, known := claimed[t.Task]; !known && t.From == pending {
			if claimed[t.Task] = t.At; t.To == running {
				begun[t.Task] = t.At
			}
		}
	}
	disturbed := h.undue()
	for _, q := range h.Enqueued {
		at, known := claimed[q.Task]
		if _, there := h.Final[q.Task]; !there && h.Forgetful || q.Due == 0 || h.touched[q.Task] != nil || h.deleted[q.Task] || h.dueByAnotherClock(q) {
			continue
		}
		if slices.ContainsFunc(calms(span{q.Due, q.Due.Add(queued)}, disturbed), func(c span) bool { return c.end.Sub(c.begin) >= starving }) {
			v.StarvedJudged++
		}
		took := "at all"
		if known {
			took = fmt.Sprintf("until %s", clock(at))
		} else {
			at = never
		}
		waits := calms(span{q.Due, at}, disturbed)
		if h.Forgetful && len(waits) > 0 && waits[0].begin > q.Due { // a claim may be forgotten, and made again later
			continue
		}
		for _, w := range waits {
			if w.end.Sub(w.begin) <= starving+2*h.late(w) {
				continue
			}
			if known && h.queued(q, w, begun) {
				v.excuse("tasks that waited in a queue")
				break
			}
			v.violation(&v.Starved, "starved: task %d (%s) was due at %s and was not claimed %s, with nothing in its way since %s", q.Task, q.Kind, clock(q.Due), took, clock(w.begin))
			break
		}
	}
}

// dueByAnotherClock reports whether a task came due while the clock of Postgres was wrong, or a while after: its
// run_at is by that clock, so the task may have to wait until the right one shows that time.
func (h *history) dueByAnotherClock(q Enqueued) bool {
	for i, c := range h.ClockSteps {
		wrong := span{c.At.Add(-skew), never}
		if i+1 < len(h.ClockSteps) {
			wrong.end = h.ClockSteps[i+1].At.Add(longestDelay)
		}
		if c.Ahead != 0 && wrong.begin < q.Due && q.Due < wrong.end {
			return true
		}
	}
	return false
}

// undue are the times in which tasks may wait for longer, in order, and none meets the next: those of
// faults that are not mild, and a while after them, and those in which too many replicas are frozen in their claims.
func (h *history) undue() (all []span) {
	type step struct {
		at   observer.Time
		more int
	}
	var disturbed []span
	var frozen []step
	for _, m := range h.Marks {
		s := span{m.Begin, m.End}
		if m.End == 0 {
			s.end = never
		}
		switch {
		case m.Kind == ClaimFreeze:
			frozen = append(frozen, step{s.begin, 1}, step{s.end, -1})
		case m.Kind != Frozen && !slices.Contains(mild, m.Kind): // who is frozen has another mark as well
			disturbed = append(disturbed, span{s.begin, s.end.Add(recovering)})
		}
	}
	slices.SortFunc(frozen, func(a, b step) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.more, b.more)) })
	n := 0
	var since observer.Time
	for _, s := range frozen {
		if n += s.more; n == mostFrozen+1 && s.more > 0 {
			since = s.at
		} else if n == mostFrozen && s.more < 0 {
			disturbed = append(disturbed, span{since, s.at})
		}
	}
	slices.SortFunc(disturbed, func(a, b span) int { return cmp.Compare(a.begin, b.begin) })
	for _, s := range disturbed {
		if last := len(all) - 1; last >= 0 && s.begin <= all[last].end {
			all[last].end = max(all[last].end, s.end)
			continue
		}
		all = append(all, s)
	}
	return all
}

// calms returns what is left of a span without others, which are in order.
func calms(s span, without []span) (all []span) {
	for _, w := range without {
		if w.end <= s.begin {
			continue
		}
		if w.begin >= s.end {
			break
		}
		if s.begin < w.begin {
			all = append(all, span{s.begin, w.begin})
		}
		s.begin = w.end
	}
	if s.begin < s.end {
		all = append(all, s)
	}
	return all
}

// queued reports whether a task waited behind others for all of a time in which no fault went on, until it
// was claimed, or cancelled, or the next fault began: all the while some were claimed for the first time that
// were more urgent, or as urgent and due before it. It
// may wait for as long as the first of them had waited when that time began: if nobody has served a kind for
// a while, it takes about as long until those that serve it have caught up.
func (h *history) queued(q Enqueued, wait span, begun map[int64]observer.Time) bool {
	moments, head := []observer.Time{wait.end}, wait.begin
	for _, o := range h.Enqueued {
		before := o.Priority > q.Priority || o.Priority == q.Priority && o.Due < q.Due
		if at, known := begun[o.Task]; known && o.Due != 0 && before && h.touched[o.Task] == nil && at > wait.begin && at < wait.end {
			moments, head = append(moments, at), min(head, o.Due)
		}
	}
	if len(moments) == 1 || wait.end.Sub(wait.begin) > max(queued, wait.begin.Sub(head)) {
		return false
	}
	slices.Sort(moments)
	last := wait.begin
	for _, at := range moments {
		if gap := (span{last, at}); at.Sub(last) > queueing+h.late(gap) {
			return false
		}
		last = at
	}
	return true
}

func (a *attempt) String() string {
	if a == nil {
		return "nobody"
	}
	who := fmt.Sprintf("task %d attempt %d fence %d (%s on %s", a.Task, a.Attempt, a.Fence, a.Kind, a.Replica)
	if a.Outsider != "" {
		who = fmt.Sprintf("outsider %s (of %s", a.Outsider, a.Replica)
	}
	if a.begin == 0 { // it was turned away
		return who + ")"
	}
	end := "now"
	if a.end < never {
		end = clock(a.end)
	}
	return fmt.Sprintf("%s, %s to %s, %s)", who, clock(a.begin), end, cmp.Or(a.how, "unknown"))
}

// clock is how a moment is written in a violation, as it is in the logs.
func clock(t observer.Time) string { return time.Unix(0, int64(t)).UTC().Format("15:04:05.000") }
