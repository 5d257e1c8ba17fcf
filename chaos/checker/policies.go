package checker

import (
	"cmp"
	"slices"
	"time"

	"onejob/chaos/observer"
)

// Policy is what a schedule says of due times for which it may have no task.
type Policy struct {
	OnMissed  string `json:"on_missed"`
	Cap       int    `json:"cap"`
	OnOverlap string `json:"on_overlap"`
	QueueCap  int    `json:"queue_cap"`
}

const (
	missed  = "missed"
	capped  = "capped"
	overlap = "overlap"

	// onTime is how old a due time may be to get its task whatever on_missed says. So close
	// to it nothing is asked: the leader looked a moment before it wrote.
	onTime      = time.Minute
	aboutOnTime = 10 * time.Second

	// looking is how long before that a task must have been there to be seen for certain: on
	// a busy machine, or behind a slow link, a leader writes seconds after it looked.
	looking = 3 * time.Second

	// planning is how long it may take from when the leader looked which tasks there are
	// until it wrote what it made of that: its statements have so long each. It may take longer
	// where its way to Postgres is cut, and the statement comes through in the end; but it did not
	// look before the last due time of those that it dealt with.
	planning = 20 * time.Second
)

// policy looks at each due time of a schedule: whether it has a task, or is skipped for the
// reason that its policy gives. What the leader dealt with together, in one transaction, has
// one moment: the last due time of that is in time, and all others were missed.
//
// While the clock of Postgres is wrong, due times are dealt with too early, or that have been
// already. Of those only that each is there is asked.
func (h *history) policy(v *Report, b *book, s Schedule) {
	plans := map[observer.Time][]Occurrence{}
	for at := s.First; at <= s.Last; at = at.Add(s.Every) {
		o, ok := b.found[due{s.Name, at}]
		if !ok {
			v.violation(&v.OccurrencesMissing, "occurrence missing: schedule %s, due %s", s.Name, clock(at))
			continue
		}
		if o.Task != 0 {
			b.want(v, s.Name, at) // it is there, and has ended
		}
		plans[o.Made] = append(plans[o.Made], o)
	}
	if h.Forgetful {
		return
	}
	// What is dealt with together may go on after the last one that is asked for.
	for at := s.Last.Add(s.Every); ; at = at.Add(s.Every) {
		o, ok := b.found[due{s.Name, at}]
		if !ok || plans[o.Made] == nil {
			break
		}
		plans[o.Made] = append(plans[o.Made], o)
	}
	tasks := h.activeTasks(s)
	for made, plan := range plans {
		slices.SortFunc(plan, func(a, b Occurrence) int { return cmp.Compare(a.Due, b.Due) })
		if h.clockWasWrong(span{plan[0].Due.Add(-onTime - aboutOnTime), made.Add(planning)}, made) {
			continue
		}
		plan := planned{h, s, made, plan, tasks}
		plan.checkAll(v)
	}
}

// clockWasWrong reports whether the clock of Postgres was wrong within a span, or when it
// showed a moment.
func (h *history) clockWasWrong(s span, shown observer.Time) bool {
	for i, c := range h.ClockSteps {
		if c.Ahead == 0 {
			continue
		}
		wrong := span{c.At.Add(-editing), never}
		if i+1 < len(h.ClockSteps) {
			wrong.end = h.ClockSteps[i+1].At.Add(time.Second)
		}
		at := shown.Add(-c.Ahead)
		if wrong.meets(s) || wrong.begin <= at && at < wrong.end {
			return true
		}
	}
	return false
}

// planned is what the leader made of some due times at once.
type planned struct {
	h     *history
	s     Schedule
	made  observer.Time
	dues  []Occurrence
	tasks map[int64][]activity
}

// activity is a time in which a task stood in the way of others: it was pending, or running
// where others are skipped for that, too.
type activity struct {
	span
	byHand bool // somebody changed the task, which may have come back
}

func (p planned) checkAll(v *Report) {
	count := 0 // of those missed
	for i, o := range p.dues {
		last := i == len(p.dues)-1
		late := p.made.Sub(o.Due)
		if last && late > onTime-aboutOnTime && late < onTime+aboutOnTime {
			continue
		}
		want := ""
		switch {
		case last && late <= onTime:
		case p.s.Policy.OnMissed == "all":
			if count++; count > p.s.Policy.Cap {
				want = capped
			}
		case p.s.Policy.OnMissed == "one" && last:
		default:
			want = missed
		}
		switch {
		case o.Skipped == want && o.Task == 0:
		case want == "" && o.Task != 0 && p.s.Policy.OnOverlap == "allow":
		case want == "" && o.Task != 0:
			// It was so before the leader looked, and still when it wrote.
			if waiting := p.others(o, func(a activity) bool { return !a.byHand && a.covers(span{p.made.Add(-looking), p.made.Add(skew)}) }); p.tooMany(waiting) {
				v.violation(&v.OccurrencesWrong, "occurrence wrong: schedule %s, due %s has task %d, made at %s beside %d others: %+v", p.s.Name, clock(o.Due), o.Task, clock(p.made), waiting, *p.s.Policy)
			}
		case want == "" && o.Skipped == overlap && p.s.Policy.OnOverlap != "allow":
			looked := min(p.made.Add(-planning), p.dues[len(p.dues)-1].Due.Add(-skew))
			if waiting := p.others(o, func(a activity) bool { return a.meets(span{looked, p.made.Add(skew)}) }); !p.tooMany(waiting) {
				v.violation(&v.OccurrencesWrong, "occurrence wrong: schedule %s, due %s was skipped as overlap at %s, with %d others since %s: %+v", p.s.Name, clock(o.Due), clock(p.made), waiting, clock(looked), *p.s.Policy)
			}
		default:
			v.violation(&v.OccurrencesWrong, "occurrence wrong: schedule %s, due %s, %v late, %d of %d dealt with at %s: it has task %d, skipped %q, and was to be skipped %q: %+v",
				p.s.Name, clock(o.Due), late, i+1, len(p.dues), clock(p.made), o.Task, o.Skipped, want, *p.s.Policy)
		}
	}
}

// tooMany reports whether there are so many other tasks that none may be made.
func (p planned) tooMany(others int) bool {
	if p.s.Policy.OnOverlap == "queue" {
		return others >= p.s.Policy.QueueCap
	}
	return others > 0
}

// others counts the tasks that stand in the way of one for a due time: those that were there
// at the time in question, and those that the same plan makes before it.
func (p planned) others(o Occurrence, then func(activity) bool) (n int) {
	for _, earlier := range p.dues {
		if earlier.Due < o.Due && earlier.Task != 0 {
			n++
		}
	}
	for id, times := range p.tasks {
		if slices.ContainsFunc(p.dues, func(o Occurrence) bool { return o.Task == id }) {
			continue
		}
		if slices.ContainsFunc(times, then) {
			n++
		}
	}
	return n
}

// activeTasks returns when each task of a schedule stood in the way of others.
func (h *history) activeTasks(s Schedule) map[int64][]activity {
	all := map[int64][]activity{}
	for _, o := range h.Occurrences {
		if o.Schedule == s.Name && o.Task != 0 {
			all[o.Task] = nil
		}
	}
	inTheWay := func(status string) bool {
		return status == pending || status == running && s.Policy.OnOverlap == "skip"
	}
	for _, step := range h.Steps {
		times, ours := all[step.Task]
		if !ours {
			continue
		}
		was, is := inTheWay(step.Was.Status), inTheWay(step.Is.Status)
		switch n := len(times) - 1; {
		case was && !is && n >= 0:
			times[n].end = moment(step.At)
		case is && !was:
			times = append(times, activity{span{moment(step.At), never}, h.touched[step.Task] != nil || h.deleted[step.Task]})
		}
		all[step.Task] = times
	}
	return all
}
