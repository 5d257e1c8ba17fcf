package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"onejob/chaos/checker"
	"onejob/chaos/observer"
	"onejob/internal/retry"
	"onejob/internal/servers"
)

// A kind of fault. Its run does harm, goes on for as long as the step says or
// until ctx ends, and repairs what it broke before it returns: without an error,
// unless that did not work. errNothing means that there was nothing to hit.
type kind struct {
	name        string
	what        string // for the summary
	weight      int
	least, most time.Duration
	rabbitmq    bool // it is of RabbitMQ, which is there only if limits use it
	consulSlots bool // it is of slots in Consul, which are there only if limits do not use RabbitMQ
	standby     bool // it needs a standby of Postgres
	versions    bool // it needs replicas of another version
	needs       need // what not every machine lets the harness do
	forgets     bool // Postgres forgets what it had acknowledged
	gentle      bool // it ends no attempt at a task that it does not touch
	daemons     bool // it need not meet Go handlers: those who run them claim no large rows, and have no commands and no other version
	outsiders   bool // it is aimed at outsiders, and meets no tasks
	run         func(ctx context.Context, h *fault) error
}

// works are the kinds of work that it must meet in a long run.
func (k *kind) works() []string {
	if k.outsiders {
		return []string{checker.OfOutsiders}
	}
	if !k.daemons {
		return works
	}
	return slices.DeleteFunc(slices.Clone(works), func(work string) bool { return work == "go" })
}

// need is what only root may do, and not on every machine.
type need string

const (
	partitions need = "Consul's servers are never cut off from each other"
	disks      need = "no disk is ever full"
	memory     need = "memory is never short"
)

// unable says which needs cannot be had on this machine, and why.
func unable() map[need]error {
	return map[need]error{partitions: servers.CanPartition(), disks: servers.CanFillDisks(), memory: canSqueeze()}
}

var errNothing = errors.New("there is nothing to hit just now")

// kinds are all that there are.
var kinds = slices.Concat(replicaFaults, clusterFaults, linkFaults, consulFaults, hostFaults, aclFaults, postgresFaults, resourceFaults, standbyFaults, rowFaults, scheduleFaults, processFaults, outsiderFaults, rabbitmqFaults)

// chooseKinds returns the kinds of these names; "all" and "none" are names too.
func chooseKinds(names []string, s settings) ([]*kind, error) {
	// lacks says what a kind needs that is not there, and may be empty.
	lacks := func(k *kind) string {
		switch {
		case k.consulSlots && s.RabbitMQ:
			return "there are no slots in Consul with LIMITS=rabbitmq"
		case k.rabbitmq && !s.RabbitMQ:
			return "there is no RabbitMQ without LIMITS=rabbitmq"
		case k.standby && s.Standby == "":
			return "there is no standby without STANDBY=async or STANDBY=sync"
		case k.versions && s.Old == "":
			return "there is no other version without OLD=<commit>"
		case s.Unable[k.needs] != nil:
			return s.Unable[k.needs].Error()
		case k.forgets && s.Standby != async:
			return "Postgres may forget what it has acknowledged only with STANDBY=async"
		}
		return ""
	}
	var chosen []*kind
	for _, name := range names {
		name = strings.TrimSpace(name)
		i := slices.IndexFunc(kinds, func(k *kind) bool { return k.name == name })
		switch {
		case name == "all":
			for _, k := range kinds {
				if lacks(k) == "" {
					chosen = append(chosen, k)
				}
			}
		case name == "none":
		case i < 0:
			var known []string
			for _, k := range kinds {
				known = append(known, k.name)
			}
			return nil, fmt.Errorf("there is no fault %q; there are: all, none, %s", name, strings.Join(known, ", "))
		case lacks(kinds[i]) != "":
			return nil, fmt.Errorf("fault %s: %s", name, lacks(kinds[i]))
		default:
			chosen = append(chosen, kinds[i])
		}
	}
	return chosen, nil
}

// gentle reports whether all kinds are.
func gentle(kinds []*kind) bool {
	return !slices.ContainsFunc(kinds, func(k *kind) bool { return !k.gentle })
}

// fault is one fault that is being done.
type fault struct {
	step
	c    *cluster
	rand *rand.Rand

	about   string   // more about the target, for who reads along
	keys    []string // of Consul, that it deletes
	mark    observer.Mark
	victims *victims
}

// begins tells the observer, and everybody who reads along, that harm is about to
// be done to target. What was not begun does not count.
func (h *fault) begins(target string) error {
	h.meets(target)
	h.mark = observer.Mark{ID: h.c.nextMark(), Kind: h.Kind.name, Target: target, Alone: h.Alone, Keys: h.keys}
	line := fmt.Sprintf("%s: %s%s", h.Kind.name, target, h.about)
	if h.Kind.most > 0 {
		line += fmt.Sprintf(", for %.1f s", h.For.Seconds())
	}
	if h.Alone {
		line += ", alone"
	}
	h.c.say("%s", line)
	return h.c.observer.Begin(h.mark)
}

// also tells the observer what else is so while a fault goes on, until the func that it
// returns is called.
func (c *cluster) also(kind, target string) (over func() error, err error) {
	m := observer.Mark{ID: c.nextMark(), Kind: kind, Target: target}
	return func() error { return c.observer.End(m) }, c.observer.Begin(m)
}

// lasts waits for as long as the fault goes on.
func (h *fault) lasts(ctx context.Context) { retry.Pause(ctx, h.For) }

// fault run does what the plan says until ctx ends, and returns when everything has
// been mended. It fails as soon as something cannot be mended.
type faultRun struct {
	c       *cluster
	plan    []step
	again   []*kind   // that must meet work of all kinds
	from    time.Time // when those that have not are tried again
	victims victims

	mu     sync.Mutex
	counts map[string]int // of what was done, by kind
	missed int            // because there was nothing to hit
	vain   []int          // of these, the IDs of marks of those that had begun
	unmet  []*kind        // the kinds of those that have hit nothing at all
}

// second returns a second try of a kind that has hit nothing yet, or not all that it must,
// while nothing else goes on: what takes all hosts finds one of them busy in most storms. It
// comes before s.
func (v *faultRun) second(s step) (again step, is bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	switch {
	case len(v.unmet) > 0:
		s.Kind, v.unmet = v.unmet[0], v.unmet[1:]
	case time.Now().After(v.from):
		i := slices.IndexFunc(v.again, func(k *kind) bool { return len(v.victims.missing(k)) > 0 })
		if i < 0 {
			return s, false
		}
		s.Kind = v.again[i]
		v.again = append(slices.Delete(slices.Clone(v.again), i, i+1), s.Kind) // the others first
	default:
		return s, false
	}
	s.For = min(max(s.For, s.Kind.least), s.Kind.most)
	return s, true
}

func (v *faultRun) run(ctx context.Context) error {
	v.counts = map[string]int{}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var going sync.WaitGroup
	begin := func(s step) {
		if s.Alone {
			going.Wait()
			retry.Pause(ctx, calm)
		} else {
			retry.Pause(ctx, s.After)
		}
		if ctx.Err() != nil {
			return
		}
		going.Go(func() {
			if err := v.do(ctx, s); err != nil {
				cancel(fmt.Errorf("fault %s: %w", s.Kind.name, err))
			}
		})
		if s.Alone {
			going.Wait()
			retry.Pause(ctx, aftermath)
		}
	}
	for _, s := range v.plan {
		if s.Alone {
			going.Wait()
			if again, is := v.second(s); is {
				begin(again)
			}
		}
		begin(s)
	}
	if ctx.Err() == nil {
		<-ctx.Done() // the plan is longer than the run, unless it has no faults
	}
	going.Wait()
	if cause := context.Cause(ctx); cause != ctx.Err() {
		return cause
	}
	return nil
}

// do does one fault and counts it.
func (v *faultRun) do(ctx context.Context, s step) error {
	h := &fault{step: s, c: v.c, rand: rand.New(rand.NewPCG(s.Pick, 3)), victims: &v.victims}
	h.awaitWork(ctx)
	err := s.Kind.run(ctx, h)
	if h.mark.ID != 0 {
		err = errors.Join(err, v.c.observer.End(h.mark))
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if errors.Is(err, errNothing) {
		v.missed++
		if h.mark.ID != 0 {
			v.vain = append(v.vain, h.mark.ID)
		}
		if v.counts[s.Kind.name] == 0 && !s.Alone && !slices.Contains(v.unmet, s.Kind) {
			v.unmet = append(v.unmet, s.Kind)
		}
		return nil
	}
	v.counts[s.Kind.name]++
	v.unmet = slices.DeleteFunc(v.unmet, func(k *kind) bool { return k == s.Kind })
	return err
}

// stopped returns the error of stopping a server. One that had to be killed is gone as well, which
// is no reason to end the run.
func (h *fault) stopped(err error) error {
	if errors.Is(err, servers.ErrKilled) {
		h.c.say("%s: it did not stop in time and was killed", h.Kind.name)
		return nil
	}
	return err
}
