package checker

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"onejob/chaos/observer"
)

// ends are the kinds of marks that end a replica's hold on its tasks if they go
// on for long enough. What is shorter may pass unnoticed, as it should.
var ends = map[string]time.Duration{
	Kill:              0,
	HostLoss:          0,
	Frozen:            6 * time.Second,
	"cut-consul":      6 * time.Second,
	"cut-both":        6 * time.Second,
	"session-destroy": 0,
}

// slowest is how many of the slowest takeovers are reported.
const slowest = 5

// takeOvers measures how long it took, when a replica's hold ended, until
// somebody else was inside in the place of a task of its own: from the beginning
// of the harm until the same task began again, or another that had waited for
// its lock key. Whoever ended by itself before that does not count, nor who works
// under a limit, whose slots are waited for as well.
func (h *history) takeOvers(v *Report) {
	for _, m := range h.Marks {
		least, ok := ends[m.Kind]
		if !ok || m.End != 0 && m.End.Sub(m.Begin) < least {
			continue
		}
		targets := strings.Split(m.Target, ",")
		for _, a := range h.attempts {
			if !slices.Contains(targets, a.Replica) || a.Limit != "" || a.begin >= m.Begin || a.end <= m.Begin {
				continue
			}
			if a.how == observer.Succeeded || a.how == observer.Failed {
				continue
			}
			if b := h.next(a); b != nil {
				v.TakeOvers = append(v.TakeOvers, TakeOver{Task: a.Task, Cause: m.Kind, Alone: m.Alone, Took: b.begin.Sub(m.Begin), mark: m, from: a, to: b})
			}
		}
	}
	v.Slowest = h.slowest(v.TakeOvers)
}

// slowest returns the slowest takeovers, with what else was broken meanwhile.
func (h *history) slowest(all []TakeOver) []SlowTakeOver {
	sorted := slices.SortedStableFunc(slices.Values(all), func(a, b TakeOver) int { return cmp.Compare(b.Took, a.Took) })
	some := []SlowTakeOver{}
	for _, t := range sorted[:min(slowest, len(sorted))] {
		some = append(some, SlowTakeOver{
			Took: inSeconds(t.Took), Key: t.from.Key, From: t.from.String(), To: t.to.String(),
			After:  t.mark.Kind + " of " + t.mark.Target + " at " + clock(t.mark.Begin),
			Faults: h.faultsAround(span{t.mark.Begin, t.to.begin}),
		})
	}
	return some
}

// next returns the attempt that came after a under its lock key.
func (h *history) next(a *attempt) *attempt {
	all := h.byKey[a.Key]
	if i := slices.Index(all, a); i+1 < len(all) {
		return all[i+1]
	}
	return nil
}

// Quantile returns the shortest of the times that a part q of them do not
// exceed; zero if there are none.
func Quantile(times []time.Duration, q float64) time.Duration {
	if len(times) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(times))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}
