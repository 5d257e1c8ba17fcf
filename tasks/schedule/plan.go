package schedule

import (
	"errors"
	"time"
)

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
	OverlapQueue = "queue" // another, which waits for the first, as they share a lock key; none if queue_cap wait
)

// SkipReason says why a due time made no task.
type SkipReason string

// The reasons.
const (
	NotSkipped     SkipReason = ""
	SkippedMissed  SkipReason = "missed"  // nobody was there in time, and on_missed is skip or one
	SkippedCapped  SkipReason = "capped"  // on_missed is all, and there were more than missed_cap
	SkippedOverlap SkipReason = "overlap" // a task of the schedule was waiting or running, or queue_cap of them were waiting
)

// OnTime is how late a due time may be made and still count as made in time: a
// leader's death takes some seconds to be noticed.
const OnTime = time.Minute

// maxPlanned bounds one plan. A schedule of every second comes to that in a day. What has passed beyond
// that is not recorded: after a clock that was years behind it would take hours, and fill the disk.
const maxPlanned = 100_000

// Due is a row of onejob.schedules that has come due, or whose next due
// time has yet to be worked out, or that was edited when due times had not been
// made.
type Due struct {
	ID        int64
	Name      string
	Cron      string
	Zone      string
	OnMissed  string
	MissedCap int
	OnOverlap string
	Next      *time.Time // nil if it has yet to be worked out; by the rules of the zone at that time
	Begin     *time.Time // then it is the first one after this; nil means after now
	Paused    *time.Time // and not before this; nil if it was not paused
	Changed   *time.Time // the last edit of when it comes due
	Former    []Former
	Off       bool // only what is due of Former is made: the schedule is disabled, not due, or cannot be understood here
	Busy      bool // a task of it waits or runs; told only if OnOverlap is skip
	Waiting   int  // so many tasks of it wait, QueueCap at most; told only if OnOverlap is queue
	QueueCap  int  // so many may

	Most int  // due times that one plan has at most; 0 means as many as fit into it
	Part Part // of the plan before, if it was cut short because of Most
}

// Part is what plans that were cut short because of Due.Most have had of the due times that
// would have fitted into one plan. It is zero if none was.
type Part struct {
	Planned int // due times
	Missed  int // those of them that count for MissedCap
}

// Former is what a schedule was before an edit, with due times that have
// not been made. They end with the edit; those of the edited schedule are after it.
type Former struct {
	ID    int64
	Cron  string
	Zone  string
	Next  *time.Time // nil if it has yet to be worked out
	Begin time.Time  // then it is the first one after this
	Until time.Time  // the edit
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
	Keep        bool      // the schedule's next due time stays as it is, whatever Next says

	Done    []int64   // the former schedules of which nothing is left to make
	Cut     int64     // one of which there is more than fits into a plan; 0 if there is none
	CutNext time.Time // its first due time that is left
	More    bool      // due times are left for the next plan

	// Due times from PassedFrom on, and before PassedTo, get neither a task nor a record: there are too
	// many. Both are zero if there are none.
	PassedFrom, PassedTo time.Time

	Part Part // and this is for it

	UnknownZones []string // those of former schedules that this process does not know; they are left as they are
}

// Plan works out what to do at the time now. A schedule whose next due time is not
// known begins with the first one after its last edit, and the due times before the
// edit are those that it had then. So no due time is lost or invented by an edit,
// whenever the leader sees it.
//
// The rules of the zone may have changed since the next due time was worked out, or another
// leader may have other ones. Plan believes it only if it is a due time by the rules here. Nor does it
// believe one from which on more due times than fit into a plan had passed when the schedule was last
// edited, or a due time last made: no leader worked that out.
//
// Of the due times that have passed the last one is made in time if it is not older
// than OnTime, and so is the last one before each edit; all others were missed.
//
// If more due times have passed than fit into a plan, those of the line that fills it are passed
// over, except its last one, with which the next plan begins.
//
// With Most, several plans make of the due times what one plan would have made: each begins
// where the one before ended, and with its Part.
func (d Due) Plan(c Cron, now time.Time) Plan {
	p := Plan{Keep: d.Off}
	most := maxPlanned - d.Part.Planned
	if d.Most > 0 {
		most = min(most, d.Most)
	}
	var dues []time.Time
	lasts := map[int]bool{} // the last due time before each edit, and before now
	collect := func(c Cron, next, until time.Time) time.Time {
		began := len(dues)
		for !next.IsZero() && !next.After(until) && len(dues) < most {
			dues = append(dues, next)
			next = c.Next(next)
		}
		switch {
		case next.IsZero() || next.After(until):
			if len(dues) > began {
				lasts[len(dues)-1] = true
			}
		case d.Part.Planned+len(dues) >= maxPlanned:
			if last := c.last(next, until); last.After(next) {
				p.PassedFrom, p.PassedTo = next, last
				next = last
			}
		}
		return next
	}
	for _, f := range d.Former {
		c, err := Parse(f.Cron, f.Zone)
		if errors.Is(err, ErrUnknownZone) {
			p.UnknownZones = append(p.UnknownZones, f.Zone)
			continue
		}
		if err == nil {
			var next time.Time
			if f.Next != nil && !c.tooMany(*f.Next, f.Begin) {
				next = c.believed(*f.Next, &f.Begin)
			} else {
				next = c.Next(f.Begin)
			}
			if next = collect(c, next, f.Until); !next.IsZero() && !next.After(f.Until) {
				p.Cut, p.CutNext, p.Keep = f.ID, next, true
				break
			}
		} // or else nobody ever understood it: it had no due times
		p.Done = append(p.Done, f.ID)
	}
	if !p.Keep {
		var next time.Time
		switch {
		case d.Next != nil && (d.Begin == nil || !c.tooMany(*d.Next, *d.Begin)):
			if next = c.believed(*d.Next, d.Begin); !next.Equal(*d.Next) {
				next = c.notBefore(next, d.Paused)
			}
		case d.Begin != nil:
			next = c.after(*d.Begin, d.Paused)
		default:
			next = c.after(now, d.Paused)
		}
		p.Next = collect(c, next, now)
	}
	p.Occurrences = make([]Occurrence, len(dues))
	p.More = p.Cut != 0 || !p.Keep && !p.Next.IsZero() && !p.Next.After(now)
	missed, busy, waiting := d.Part.Missed, d.Busy, d.Waiting
	for i, due := range dues {
		o := Occurrence{Due: due}
		inTime := lasts[i] && now.Sub(due) <= OnTime
		switch {
		case inTime:
		case d.OnMissed == MissedAll:
			if missed++; missed > d.MissedCap {
				o.Skipped = SkippedCapped
			}
		case d.OnMissed == MissedOne && i == len(dues)-1 && !p.More:
		default:
			o.Skipped = SkippedMissed
		}
		if o.Skipped == NotSkipped && d.OnOverlap == OverlapSkip {
			if busy {
				o.Skipped = SkippedOverlap
			}
			busy = true
		}
		if o.Skipped == NotSkipped && d.OnOverlap == OverlapQueue {
			if waiting >= d.QueueCap {
				o.Skipped = SkippedOverlap
			} else {
				waiting++
			}
		}
		p.Occurrences[i] = o
	}
	if planned := d.Part.Planned + len(dues); p.More && planned < maxPlanned {
		p.Part = Part{planned, missed}
	}
	return p
}
