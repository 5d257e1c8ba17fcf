package tasks

import "time"

// What becomes of due times that nobody made in time.
const (
	MissedSkip = "skip" // nothing
	MissedOne  = "one"  // one task for all of them
	MissedAll  = "all"  // a task each, the oldest first, up to the cap
)

// What happens at a due time while a task of the schedule waits or runs.
const (
	OverlapAllow = "allow" // another task
	OverlapSkip  = "skip"  // none
	OverlapQueue = "queue" // another, which waits for the first: they share a lock key
)

// SkipReason says why a due time made no task.
type SkipReason string

// The reasons.
const (
	NotSkipped     SkipReason = ""
	SkippedMissed  SkipReason = "missed"  // nobody was there in time, and on_missed is skip or one
	SkippedCapped  SkipReason = "capped"  // on_missed is all, and there were more than missed_cap
	SkippedOverlap SkipReason = "overlap" // a task of the schedule was waiting or running
)

// OnTime is how late a due time may be made and still count as made in time: a
// leader's death takes some seconds to be noticed.
const OnTime = time.Minute

// maxPlanned bounds one plan. A schedule of every second comes to that in a day.
const maxPlanned = 100_000

// DueSchedule is a row of onejob.schedules that has come due, or whose next due
// time has yet to be worked out.
type DueSchedule struct {
	ID        int64
	Name      string
	Cron      string
	Zone      string
	OnMissed  string
	MissedCap int
	OnOverlap string
	Next      *time.Time // nil if it has yet to be worked out
	Busy      bool       // a task of it waits or runs; told only if OnOverlap is skip
}

// An Occurrence is one due time, and what becomes of it.
type Occurrence struct {
	Due     time.Time
	Skipped SkipReason
}

// A Plan is what is to be done about a due schedule.
type Plan struct {
	Occurrences []Occurrence
	Next        time.Time // the next due time; zero if there is none
}

// Plan works out what to do at the time now. Of the due times that have passed
// the last one is made in time if it is not older than OnTime; all others were
// missed. A schedule whose next due time is not known begins with the first one
// after now, so that nothing is ever made for the past of a change.
func (d DueSchedule) Plan(s Schedule, now time.Time) Plan {
	if d.Next == nil {
		return Plan{Next: s.Next(now)}
	}
	var dues []time.Time
	next := *d.Next
	for !next.IsZero() && !next.After(now) && len(dues) < maxPlanned {
		dues = append(dues, next)
		next = s.Next(next)
	}
	p := Plan{Next: next, Occurrences: make([]Occurrence, len(dues))}
	missed, busy := 0, d.Busy
	for i, due := range dues {
		o := Occurrence{Due: due}
		last := i == len(dues)-1
		inTime := last && now.Sub(due) <= OnTime
		switch {
		case inTime:
		case d.OnMissed == MissedAll:
			if missed++; missed > d.MissedCap {
				o.Skipped = SkippedCapped
			}
		case d.OnMissed == MissedOne && last:
		default:
			o.Skipped = SkippedMissed
		}
		if o.Skipped == NotSkipped && d.OnOverlap == OverlapSkip {
			if busy {
				o.Skipped = SkippedOverlap
			}
			busy = true
		}
		p.Occurrences[i] = o
	}
	return p
}
