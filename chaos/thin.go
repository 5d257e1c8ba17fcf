package main

import (
	"fmt"
	"time"
)

// What a run must have met at least if its zeros are to mean something. It is asked of
// runs that go on for long enough, with all faults.
const (
	thinRefused   = 1  // writes that only the fence kept out
	thinTakeOvers = 10 // that were measured
	thinFailed    = 20 // percent of INSERTs that may fail
	thinShort     = 60 // percent that may in a short run, in which one outage is a third of the time
	thinExits     = 3  // of replicas, by themselves
	thinOutsiders = 50 // commands of outsiders

	// What is asked of a run of an hour.
	thinMet     = 1  // faults of each kind that met work of each kind, where that is possible
	thinMetWork = 50 // faults that met work of each kind
)

// works are the kinds of work that faults must meet.
var works = []string{"exec", "http", "go", "sql"}

// meetsAll reports whether a run's faults must meet all kinds of work.
func (s settings) meetsAll() bool { return s.All && s.Duration >= time.Hour }

// thin says in what a run was too thin to prove anything. The first ones may be asked of
// any run, the others of one that is long and has all faults.
func (r *report) thin(s settings) (why []string) {
	add := func(wrong bool, format string, a ...any) {
		if wrong {
			why = append(why, fmt.Sprintf(format, a...))
		}
	}
	add(len(r.Unstopped) > 0, "replicas that did not stop: %v", r.Unstopped)
	add(r.Exits > thinExits, "replicas ended by themselves %d times, more than %d", r.Exits, thinExits)
	add(r.Crashes > 0, "processes of Postgres ended %d times by a signal that no fault sent: what waited for its recovery counts as late", r.Crashes)
	failed := thinFailed
	if s.Duration < longEnough {
		failed = thinShort
	}
	add(r.InsertsFailed*100 > r.Inserts*failed, "%d of %d INSERTs failed, more than %d %%", r.InsertsFailed, r.Inserts, failed)
	if s.Duration < longEnough {
		return why
	}
	add(len(s.Kinds) == 0 && r.GrowthJudged == 0, "of no replica it was judged whether it uses more and more")
	for _, k := range s.Kinds {
		add(r.FaultKinds[k.name] == 0, "fault %s hit nothing in %v", k.name, s.Duration.Round(time.Second))
	}
	if !s.All {
		return why
	}
	add(r.Refused < thinRefused, "no write was refused: nothing shows that the fence was needed")
	add(r.Outsiders < thinOutsiders, "%d commands of outsiders were seen, fewer than %d", r.Outsiders, thinOutsiders)
	add(r.Expired == 0 && s.Standby != async, "retention deleted no task")
	add(r.StarvedJudged == 0, "no task came due with 8 s without faults within a minute: nothing shows that claims pass over none")
	add(r.Lateness.Told == 0, "no replica said when its leases end")
	add(r.Lateness.After+r.Lateness.Silenced == 0, "no work was at work when its lease ended")
	if s.meetsAll() {
		met := map[string]int{}
		for _, k := range s.Kinds {
			for _, work := range works {
				met[work] += r.Hits[k.name][work]
			}
			for _, work := range k.works() {
				n := r.Hits[k.name][work]
				add(n < thinMet, "faults %s met work of %s %d times, fewer than %d", k.name, work, n, thinMet)
			}
		}
		for _, work := range works {
			add(met[work] < thinMetWork, "%d faults met work of %s, fewer than %d", met[work], work, thinMetWork)
		}
	}
	add(r.TakeOvers < thinTakeOvers, "%d takeovers were measured, fewer than %d", r.TakeOvers, thinTakeOvers)
	return why
}
