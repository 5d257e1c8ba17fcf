package checker

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"onejob/chaos/observer"
)

// Schedule is due at every multiple of Every, from the first due time to the
// last, both included.
type Schedule struct {
	Name  string        `json:"name"`
	Every time.Duration `json:"every"`
	First observer.Time `json:"first"`
	Last  observer.Time `json:"last"`

	// What it says of due times that were missed or overlap; nil if it asks for a task for
	// each.
	Policy *Policy `json:"policy,omitempty"`
}

// Occurrence is what became of a due time.
type Occurrence struct {
	Schedule string        `json:"schedule"`
	Due      observer.Time `json:"due"`
	Task     int64         `json:"task"`    // zero if none was made
	Skipped  string        `json:"skipped"` // why not
	Made     observer.Time `json:"made"`    // when the leader's transaction began, by the clock of Postgres
}

// Edit is what a schedule says from a moment on, noted in the transaction of the INSERT
// or the UPDATE.
type Edit struct {
	Schedule string        `json:"schedule"`
	Cron     string        `json:"cron"` // see names
	Zone     string        `json:"zone"`
	Enabled  bool          `json:"enabled"` // and not paused without an end
	Paused   observer.Time `json:"paused"`  // it names no due time before this, by the clock of Postgres
	At       observer.Time `json:"at"`
}

// Odd is a task of a schedule whose payload was not the schedule's.
type Odd struct {
	Task int64
	Was  string
	Want string
}

// ClockStep is a setting of Postgres' clock.
type ClockStep struct {
	At    observer.Time `json:"at"`
	Ahead time.Duration `json:"ahead"` // of the machine's, from then on
}

// editing is how far a note of an edit may be from the moment that counts, and that of a
// step from when all processes of Postgres have it. What is due so close to one may be
// the old line's or the new one's.
const editing = 200 * time.Millisecond

// occurrences looks for due times of which nothing became.
func (h *history) occurrences(v *Report) {
	b := newBook(h)
	for _, s := range h.Schedules {
		if s.Policy != nil {
			h.policy(v, b, s)
			b.doubled(v, s.Name)
			continue
		}
		for at := s.First; at <= s.Last; at = at.Add(s.Every) {
			b.want(v, s.Name, at)
		}
		b.doubled(v, s.Name)
	}
	edits := map[string][]Edit{}
	for _, d := range h.Edits {
		edits[d.Schedule] = append(edits[d.Schedule], d)
	}
	for _, s := range h.Schedules { // they are never edited
		delete(edits, s.Name)
	}
	for name, lines := range edits {
		t := timetable{lines, h.ClockSteps}
		for at := wholeSecond(lines[0].At); at <= h.Until; at = at.Add(time.Second) {
			must, may := t.owes(at)
			if must {
				b.want(v, name, at)
			}
			if o, made := b.found[due{name, at}]; made && !may {
				v.violation(&v.OccurrencesWrong, "occurrence wrong: schedule %s, due %s: no line of it names that: %+v", name, clock(at), o)
			}
		}
		b.doubled(v, name)
	}
	for _, o := range h.Odd {
		v.violation(&v.OccurrencesWrong, "occurrence wrong: task %d was made with payload %s, and its schedule had %s", o.Task, o.Was, o.Want)
	}
}

// book is what became of due times.
type book struct {
	h     *history
	found map[due]Occurrence
	made  map[int64]bool     // tasks of occurrences
	rows  map[string][]int64 // tasks in the table
}

type due struct {
	schedule string
	at       observer.Time
}

func newBook(h *history) *book {
	b := &book{h, map[due]Occurrence{}, map[int64]bool{}, map[string][]int64{}}
	for _, o := range h.Occurrences {
		b.found[due{o.Schedule, o.Due}] = o
		b.made[o.Task] = true
	}
	for id, f := range h.Final {
		if f.Schedule != "" {
			b.rows[f.Schedule] = append(b.rows[f.Schedule], id)
		}
	}
	return b
}

// want looks at a due time of which something must have become.
func (b *book) want(v *Report, name string, at observer.Time) {
	h := b.h
	o, ok := b.found[due{name, at}]
	switch {
	case !ok:
		v.violation(&v.OccurrencesMissing, "occurrence missing: schedule %s, due %s", name, clock(at))
	case o.Task == 0: // all schedules ask for a task for each due time, and nothing keeps one from being made
		v.violation(&v.OccurrencesMissing, "occurrence missing: schedule %s, due %s, has no task: %q", name, clock(at), o.Skipped)
	case o.Task != 0 && (h.deleted[o.Task] || h.Final[o.Task].Status == cancelled && h.touched[o.Task][CancelRequested]):
	case o.Task != 0 && h.Final[o.Task].Status == "":
		v.violation(&v.OccurrencesMissing, "occurrence missing: schedule %s, due %s: its task %d is not there", name, clock(at), o.Task)
	case o.Task != 0 && h.Final[o.Task].Status != succeeded && h.Final[o.Task].Status != failed:
		v.violation(&v.Lost, "lost: task %d of schedule %s is still %s", o.Task, name, h.Final[o.Task].Status)
	}
}

// doubled looks for tasks that no due time has: another one is in their place. Tasks are compared by
// their IDs, as some of a schedule's may have been deleted.
func (b *book) doubled(v *Report, name string) {
	for _, id := range slices.Sorted(slices.Values(b.rows[name])) {
		if !b.made[id] {
			v.violation(&v.OccurrencesDoubled, "occurrences doubled: task %d is of schedule %s, and of none of its due times", id, name)
		}
	}
}

// timetable says what a schedule owes, from its lines in the order of their edits and
// the steps of Postgres' clock.
type timetable struct {
	lines []Edit
	steps []ClockStep
}

// owes reports whether something must become of a due time, and whether it may.
//
// Postgres' clock passes a due time as often as it is set back beyond it, and once more
// if it is set forward over it. At each pass one line is in force. It must come due if
// all of them name it, or if the last one does and the clock was not set between that
// line's edit and the pass: an edit at a time that the clock has yet to reach again
// counts from when the leader has noticed that.
func (t timetable) owes(at observer.Time) (must, may bool) {
	passes := t.passes(at)
	must = len(passes) > 0
	for i, p := range passes {
		all, some, since := t.names(at, p.at)
		may = may || some
		last := i == len(passes)-1
		if last && all && since.Add(-editing) > p.set {
			return true, true
		}
		must = must && all
	}
	return must, may
}

// pass is a moment at which Postgres' clock showed a time, or was set forward over it.
type pass struct {
	at  observer.Time
	set observer.Time // when the clock had been set last; zero if never
}

func (t timetable) passes(due observer.Time) (all []pass) {
	begin, ahead := observer.Time(0), time.Duration(0)
	for i := 0; i <= len(t.steps); i++ {
		end := never
		if i < len(t.steps) {
			end = t.steps[i].At
		}
		if at := due.Add(-ahead); begin.Add(-editing) < at && at < end.Add(editing) {
			all = append(all, pass{at, begin})
		}
		if i < len(t.steps) {
			if next := t.steps[i].Ahead; end.Add(ahead) < due && due <= end.Add(next) {
				all = append(all, pass{end, end})
			}
			begin, ahead = end, t.steps[i].Ahead
		}
	}
	return all
}

// names reports whether all lines, or some, that may be in force at a moment name a due
// time, and since when the last one of them may be.
func (t timetable) names(due, at observer.Time) (all, some bool, since observer.Time) {
	var now []Edit
	for _, d := range t.lines {
		if d.At <= at.Add(-editing) {
			now = now[:0]
		}
		if d.At <= at.Add(editing) {
			now = append(now, d)
		}
	}
	all = len(now) > 0 && now[0].At <= at.Add(-editing)
	for _, d := range now {
		named := d.names(due)
		all, some, since = all && named, some || named, d.At
	}
	return all, some, since
}

// names reports whether a line names a time. It understands lines of every few seconds,
// of all minutes, the even or the odd ones: worked out here, and not by what onejob does
// it with.
func (d Edit) names(due observer.Time) bool {
	var seconds int
	var minutes string
	if _, err := fmt.Sscanf(d.Cron, "*/%d %s ", &seconds, &minutes); err != nil || !d.Enabled || due < d.Paused || !strings.HasSuffix(d.Cron, " * * * *") {
		return false
	}
	zone, err := time.LoadLocation(d.Zone)
	if err != nil {
		return false
	}
	at := time.Unix(0, int64(due)).In(zone)
	parity := map[string][]int{"*": {0, 1}, "*/2": {0}, "1-59/2": {1}}[minutes]
	return at.Second()%seconds == 0 && slices.Contains(parity, at.Minute()%2)
}

// wholeSecond returns the first one after a moment.
func wholeSecond(t observer.Time) observer.Time {
	second := observer.Time(time.Second)
	return (t/second + 1) * second
}
