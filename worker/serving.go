package worker

import (
	"errors"
	"maps"
	"slices"

	"onejob/tasks"
)

// serving is what a replica serves. It does not change; Reload replaces it.
type serving struct {
	kinds   tasks.Kinds
	choices map[string]map[string][]string // what their payloads can choose
	slots   map[string]int                 // of limits that are made when they are not there
	limitOf map[string]string              // of kinds whose rows have one without naming it
	none    []string                       // kinds whose rows have no limit unless they name one
	under   map[string][]string            // kinds by the limit that their rows have unless they name one
}

func newServing(kinds tasks.Kinds, slots map[string]int, limitOf map[string]string) *serving {
	s := &serving{maps.Clone(kinds), kinds.Choices(), maps.Clone(slots), maps.Clone(limitOf), nil, map[string][]string{}}
	for _, kind := range kinds.Names() {
		if name := limitOf[kind]; name == "" {
			s.none = append(s.none, kind)
		} else {
			s.under[name] = append(s.under[name], kind)
		}
	}
	return s
}

// ready returns those of kinds of which tasks can begin here now, and how many tasks to claim of
// these, up to most. A kind may have room for so many and no more, as sql has connections. Only where
// that has kept tasks waiting lately it counts.
func (s *serving) ready(kinds []string, most int) (some []string, n int) {
	some = kinds
	for _, name := range kinds {
		k, ok := s.kinds[name].(interface{ Room() (n int, scarce bool) })
		if !ok {
			continue
		}
		switch room, scarce := k.Room(); {
		case !scarce:
		case room <= 0:
			some = slices.DeleteFunc(slices.Clone(some), func(other string) bool { return other == name })
		default:
			most = min(most, room)
		}
	}
	return some, most
}

// Reload replaces Kinds, LimitSlots and KindLimits while the worker runs. Attempts
// that have begun are not touched. A task that was claimed for a kind that is gone is
// requeued without using up an attempt. Reload returns an error, and changes nothing,
// if there are no kinds, one of them is nil, or one cannot run here.
func (w *Worker) Reload(kinds tasks.Kinds, slots map[string]int, kindLimits map[string]string) error {
	if len(kinds) == 0 {
		return errors.New("worker: at least one of Kinds is required")
	}
	if err := noneIsNil(kinds); err != nil {
		return err
	}
	if err := w.cfg.enableKinds(kinds); err != nil {
		return err
	}
	w.serving.Store(newServing(kinds, slots, kindLimits))
	w.limits.know(slots)
	w.claimSoon()
	return nil
}
