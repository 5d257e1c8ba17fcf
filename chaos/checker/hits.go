package checker

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"onejob/chaos/observer"
)

// OfOutsiders is the kind of work that commands of outsiders are, in Report.Hits.
const OfOutsiders = "onejob lock"

// work is something that was going on.
type work struct {
	span
	kind, replica string // or who starts commands of outsiders
}

// hits counts the faults that met work of each kind: something that was at work when the fault
// began, of a replica that it was aimed at, or of anybody if it was aimed at no replica.
func (h *history) hits(v *Report) {
	v.Hits = map[string]map[string]int{}
	replicas := maps.Clone(h.replicas)
	var all []work
	for _, a := range h.attempts {
		switch {
		case a.Outsider != "":
			all = append(all, work{a.span, OfOutsiders, a.Replica})
		case a.Kind != kindSQL: // of which only effects are seen, after the fact
			all = append(all, work{a.span, a.Kind, a.Replica})
		}
	}
	over := map[int64]observer.Time{} // when attempts at rows were, by fence
	for _, t := range h.Transitions {
		if t.From == running {
			over[shortFence(t.Fence)] = t.At
		}
	}
	for _, s := range h.Statements {
		last := max(s.Last, min(over[s.Fence], s.Last.Add(statementLook)))
		all = append(all, work{span{s.First, last}, kindSQL, s.Replica})
		replicas[s.Replica] = true
	}
	slices.SortFunc(all, func(a, b work) int { return cmp.Compare(a.begin, b.begin) })
	for _, m := range h.Marks {
		if m.Kind == Helpless || m.Kind == Stacks || slices.Contains(h.Missed, m.ID) {
			continue
		}
		targets := h.targets(m, replicas)
		kinds := v.Hits[m.Kind]
		if kinds == nil {
			kinds = map[string]int{}
			v.Hits[m.Kind] = kinds
		}
		met := map[string]bool{}
		for _, w := range all {
			if w.begin > m.Begin {
				break
			}
			if m.Begin < w.end && (targets == nil || slices.Contains(targets, w.replica)) {
				met[w.kind] = true
			}
		}
		for kind := range met {
			kinds[kind]++
		}
	}
}

// statementLook is how long ago a statement may have been seen that is at work. What a fault ends
// is not there when somebody looks again; its attempt at the row was not over, though.
const statementLook = 300 * time.Millisecond

// targets returns the replicas that a fault was aimed at, or who starts commands of outsiders; nil if it was none of
// them. A stranger is there for all others.
func (h *history) targets(m observer.Mark, replicas map[string]bool) (all []string) {
	switch m.Kind {
	case Stranger:
		return nil
	case OutsiderKill, OutsiderFreeze, OutsiderCut:
		return []string{m.Target}
	}
	for _, name := range strings.FieldsFunc(m.Target, func(r rune) bool { return r == ',' || r == ' ' }) {
		if replicas[name] {
			all = append(all, name)
		}
		all = append(all, h.Hosts[name]...)
	}
	return all
}
