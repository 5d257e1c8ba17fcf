package main

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"onejob/chaos/checker"
	"onejob/internal/retry"
)

// victims counts how often faults have met work, by kinds of both.
type victims struct {
	mu  sync.Mutex
	met map[string]map[string]int // as the observer saw when they began, like checker.Report.Hits

	// tried is met, and what a fault that has not begun yet has chosen: so it does not choose the
	// same again and again in vain.
	tried map[string]map[string]int
}

// tries notes that a fault of a kind has chosen who is at work of these kinds.
func (v *victims) tries(fault string, work map[string]bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.tried = count(v.tried, fault, work)
}

// meets notes that a fault of a kind begins and meets work of these kinds.
func (v *victims) meets(fault string, work map[string]bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.met = count(v.met, fault, work)
	if v.tried == nil {
		v.tried = map[string]map[string]int{}
	}
	v.tried[fault] = maps.Clone(v.met[fault])
}

func count(n map[string]map[string]int, fault string, work map[string]bool) map[string]map[string]int {
	if n == nil {
		n = map[string]map[string]int{}
	}
	if n[fault] == nil {
		n[fault] = map[string]int{}
	}
	for kind := range work {
		n[fault][kind]++
	}
	return n
}

// least returns how often a fault of a kind has tried to meet that of these kinds of work that it
// has tried least; false if there are none.
func (v *victims) least(fault string, work map[string]bool) (n int, any bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for kind := range work {
		if tried := v.tried[fault][kind]; !any || tried < n {
			n, any = tried, true
		}
	}
	return n, any
}

// missing returns the kinds of work that a kind of fault must meet and has not met yet.
func (v *victims) missing(k *kind) []string {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(k.works()), func(work string) bool { return v.met[k.name][work] > 0 })
}

// replica chooses one.
func (h *fault) replica() *replica { return h.oneOf(h.c.replicas) }

// daemon chooses a replica that is no Go program of its own; nil if there is none.
func (h *fault) daemon() *replica {
	return h.oneOf(slices.DeleteFunc(slices.Clone(h.c.replicas), func(r *replica) bool { _, is := r.subject.(*daemon); return !is }))
}

func (h *fault) oneOf(some []*replica) *replica {
	if len(some) == 0 {
		return nil
	}
	var each [][]*replica
	for _, r := range some {
		each = append(each, []*replica{r})
	}
	return some[h.choose(each)]
}

// choose chooses one of some groups of replicas: one that is at work of a kind that this kind of
// fault has not met yet, or mostly one at work of a kind that it has met least, and else any.
func (h *fault) choose(groups [][]*replica) int {
	work := h.c.atWork()
	chosen := h.among(groups, work)
	h.victims.tries(h.Kind.name, of(groups[chosen], work))
	return chosen
}

func (h *fault) among(groups [][]*replica, work map[string][]string) (chosen int) {
	var best []int
	least := 0
	for i, g := range groups {
		n, any := h.victims.least(h.Kind.name, of(g, work))
		if !any || len(best) > 0 && n > least {
			continue
		}
		if len(best) > 0 && n < least {
			best = nil
		}
		best, least = append(best, i), n
	}
	if len(best) > 0 && (least == 0 || h.rand.IntN(3) > 0) {
		return best[h.rand.IntN(len(best))]
	}
	return h.rand.IntN(len(groups))
}

// awaitWork lets tasks begin that take long, of each kind of work that this kind of fault must meet,
// has not met yet, and that is not running, and waits some seconds for them: so that it can choose
// them, or meets them if it does not choose.
func (h *fault) awaitWork(ctx context.Context) {
	missing := func() []string {
		missing := h.victims.missing(h.Kind)
		if len(missing) == 0 {
			return nil
		}
		running := of(h.c.replicas, h.c.atWork())
		return slices.DeleteFunc(missing, func(kind string) bool { return kind == checker.OfOutsiders || running[kind] || !h.c.serves(kind) })
	}
	for _, kind := range missing() {
		h.c.wants.add(kind)
	}
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end) && ctx.Err() == nil && len(missing()) > 0; {
		retry.Pause(ctx, 100*time.Millisecond)
	}
}

// serves reports whether a replica runs that serves a kind of work: Go programs begin last where all
// daemons are of an old version at first.
func (c *cluster) serves(kind string) bool {
	return slices.ContainsFunc(c.replicas, func(r *replica) bool {
		_, is := r.subject.(*daemon)
		return is != (kind == "go") && r.process().Running()
	})
}

// wants are the kinds of work that faults wait for.
type wants struct {
	mu    sync.Mutex
	kinds []string
}

func (w *wants) add(kind string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !slices.Contains(w.kinds, kind) {
		w.kinds = append(w.kinds, kind)
	}
}

// take returns them, and forgets them.
func (w *wants) take() (kinds []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	kinds, w.kinds = w.kinds, nil
	return kinds
}

// meets counts what is at work on the replicas that the target names, itself or as their host; on all if
// it names none.
func (h *fault) meets(target string) {
	if h.Kind.outsiders {
		h.victims.meets(h.Kind.name, map[string]bool{checker.OfOutsiders: true}) // it waits for that before it begins
		return
	}
	names := strings.FieldsFunc(target, func(r rune) bool { return r == ',' || r == ' ' })
	hit := slices.DeleteFunc(slices.Clone(h.c.replicas), func(r *replica) bool {
		return !slices.Contains(names, r.name) && (r.host == nil || !slices.Contains(names, r.host.name))
	})
	if len(hit) == 0 {
		hit = h.c.replicas
	}
	h.victims.meets(h.Kind.name, of(hit, h.c.atWork()))
}

// awaits waits some seconds until a group is at work of a kind that this kind of fault has not
// met yet, for faults that cannot choose.
func (h *fault) awaits(ctx context.Context, group []*replica) {
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end) && ctx.Err() == nil; retry.Pause(ctx, 100*time.Millisecond) {
		if n, any := h.victims.least(h.Kind.name, of(group, h.c.atWork())); any && n == 0 {
			break
		}
	}
}

// unmet returns the names of the replicas at work of a kind that this kind of fault must meet and has
// not met yet.
func (h *fault) unmet() (names []string) {
	missing, work := h.victims.missing(h.Kind), h.c.atWork()
	for _, r := range h.c.replicas {
		if slices.ContainsFunc(work[r.name], func(kind string) bool { return slices.Contains(missing, kind) }) {
			names = append(names, r.name)
		}
	}
	return names
}

// of returns the kinds of work of a group.
func of(group []*replica, work map[string][]string) map[string]bool {
	kinds := map[string]bool{}
	for _, r := range group {
		for _, kind := range work[r.name] {
			kinds[kind] = true
		}
	}
	return kinds
}

// atWork returns which of the kinds of work that faults must meet are going on, by the names of their
// replicas: as the observer sees it, and Postgres for what the observer does not. A row that is
// running is not asked: its replica may have ended the work, and be unable to say so.
func (c *cluster) atWork() map[string][]string {
	work := map[string][]string{}
	add := func(replica, kind string) {
		if slices.Contains(works, kind) && !slices.Contains(work[replica], kind) {
			work[replica] = append(work[replica], kind)
		}
	}
	inside, err := c.observer.Inside()
	if err != nil {
		return nil
	}
	fences := []int64{} // of HTTP calls, whose target does not know who calls
	for _, s := range inside {
		switch {
		case s.Outsider != "":
		case s.Replica != "":
			add(s.Replica, s.Kind)
		case s.Kind == "http":
			fences = append(fences, s.Fence)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	callers, err := rows(ctx, c, `SELECT DISTINCT replica FROM onejob.tasks WHERE kind = 'http' AND fence = ANY ($1) AND replica IS NOT NULL`, pgx.RowTo[string], fences)
	if err != nil {
		return work
	}
	for _, replica := range callers {
		add(replica, "http")
	}
	for replica := range c.working(ctx) {
		add(replica, "sql")
	}
	return work
}
