package main

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// victims counts, by kinds of faults and of work, how often replicas were chosen that were at
// work, as the table said, whether or not the fault could then be done: so none is chosen again
// and again in vain. The report has what the observer saw of it (checker.Report.Hits).
type victims struct {
	mu  sync.Mutex
	met map[string]map[string]int
}

// of returns how many faults of a kind have met each kind of work.
func (v *victims) of(fault string) map[string]int {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.met == nil {
		v.met = map[string]map[string]int{}
	}
	if v.met[fault] == nil {
		v.met[fault] = map[string]int{}
	}
	return v.met[fault]
}

// add notes that a fault of a kind meets work of these kinds.
func (v *victims) add(fault string, work map[string]bool) {
	met := v.of(fault)
	v.mu.Lock()
	defer v.mu.Unlock()
	for kind := range work {
		met[kind]++
	}
}

// least returns how often a fault of a kind has met that of these kinds of work that it has
// met least; false if there are none.
func (v *victims) least(fault string, work map[string]bool) (n int, any bool) {
	met := v.of(fault)
	v.mu.Lock()
	defer v.mu.Unlock()
	for kind := range work {
		if !any || met[kind] < n {
			n, any = met[kind], true
		}
	}
	return n, any
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
	h.victims.add(h.Kind.name, of(groups[chosen], work))
	h.chosen = true
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
		running := of(h.c.replicas, h.c.atWork())
		return slices.DeleteFunc(slices.Clone(h.Kind.works()), func(kind string) bool {
			n, _ := h.victims.least(h.Kind.name, map[string]bool{kind: true})
			return n > 0 || running[kind]
		})
	}
	for _, kind := range missing() {
		h.c.wants.add(kind)
	}
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end) && ctx.Err() == nil && len(missing()) > 0; {
		wait(ctx, 100*time.Millisecond)
	}
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

// meetsAll counts what is running if the fault has no replica or host for its target.
func (h *fault) meetsAll(target string) {
	if h.chosen || slices.ContainsFunc(h.c.replicas, func(r *replica) bool {
		return strings.HasPrefix(target, r.name) || r.host != nil && r.host.name == target
	}) {
		return
	}
	h.victims.add(h.Kind.name, of(h.c.replicas, h.c.atWork()))
}

// awaits waits some seconds until a group is at work of a kind that this kind of fault has not
// met yet, for faults that cannot choose.
func (h *fault) awaits(ctx context.Context, group []*replica) {
	var work map[string]bool
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end) && ctx.Err() == nil; wait(ctx, 100*time.Millisecond) {
		work = of(group, h.c.atWork())
		if n, any := h.victims.least(h.Kind.name, work); any && n == 0 {
			break
		}
	}
	h.victims.add(h.Kind.name, work)
	h.chosen = true
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

// atWork returns which of the kinds of work that faults must meet are running, by the names of their replicas: none if
// Postgres does not answer.
func (c *cluster) atWork() map[string][]string {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	type running struct{ replica, kind string }
	found, err := rows(ctx, c, `SELECT DISTINCT replica, kind FROM onejob.tasks WHERE status = 'running' AND kind = ANY ($1)`, func(r pgx.CollectableRow) (w running, err error) {
		return w, r.Scan(&w.replica, &w.kind)
	}, works)
	if err != nil {
		return nil
	}
	work := map[string][]string{}
	for _, w := range found {
		work[w.replica] = append(work[w.replica], w.kind)
	}
	return work
}
