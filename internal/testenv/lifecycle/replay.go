package lifecycle

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Config says what is known of the replicas whose steps are replayed. What is zero is not
// checked.
type Config struct {
	// Replica reports whether the application name is that of a replica. Steps of others are
	// made by hand.
	Replica func(by string) bool

	// Named says that the application name of a replica is the name that it writes into rows,
	// and that no person works under it. Then a completion must be the holder's own.
	Named bool

	// HandlersDecide reports whether the handler of a task may call a failure final, ask for a
	// delay of its own, or requeue the task, or if its payload may be one that no handler
	// takes. Nil means of none.
	HandlersDecide func(task int64) bool

	// NoWorker says that completions are what a test made up. Then only what the store sees to
	// is checked.
	NoWorker bool

	MaxCrashes          int
	RetryBase, RetryMax time.Duration
	LockDelay           time.Duration
	Keep                time.Duration // the shortest retention
}

func (c *Config) handlersDecide(task int64) bool {
	return c.HandlersDecide != nil && c.HandlersDecide(task)
}

// Trace is what a replay found.
type Trace struct {
	Rules   []string  // by which each step went; empty where it is illegal
	Illegal []Illegal // in order
}

// Illegal is a step for which there is no rule.
type Illegal struct {
	Step Step
	Why  string
}

func (i Illegal) String() string { return fmt.Sprintf("%v: %s", i.Step, i.Why) }

// past is what a row has behind it.
type past struct {
	last     *Row            // as the last step left it
	byHand   bool            // a hand has written counts that replicas go by
	fence    int64           // the highest that was given out for the task
	keyFence *int64          // the same for its lock key
	claims   map[int64]claim // by fence: a failover or a hand may bring an earlier one back
	charged  map[string]int  // how many crashes are held against a replica
}

// claim is what a replica read when it claimed a row.
type claim struct {
	row Row
	low bool // its fence was not above all others: nothing may begin under it
}

// read returns the row that its holder goes by: as it was when it was claimed, if that was seen.
func (p *past) read(s *Step) Row {
	if c, ok := p.claims[s.Was.Fence]; ok {
		return c.row
	}
	return s.Was
}

// Replay looks for a rule for each step, in the order in which they were noted.
func (c Config) Replay(steps []Step) Trace {
	t := Trace{Rules: make([]string, len(steps))}
	pasts := map[int64]*past{}
	keys := map[string]*int64{}
	for i := range steps {
		s := &steps[i]
		if s.Task == 0 && s.Was == s.Is {
			if t.Rules[i] = ByHand; c.Replica(s.By) {
				t.Rules[i] = ""
				t.Illegal = append(t.Illegal, Illegal{*s, "a replica does not do that"})
			}
			clear(pasts)
			continue
		}
		p := pasts[s.Task]
		if p == nil {
			p = &past{claims: map[int64]claim{}, charged: map[string]int{}}
			pasts[s.Task] = p
		}
		key := s.Is.LockKey
		if key == "" {
			key = fmt.Sprint(s.Task)
		}
		if keys[key] == nil {
			keys[key] = new(int64)
		}
		p.keyFence = keys[key]
		rule, why := c.rule(s, p)
		if t.Rules[i] = rule; rule == "" {
			t.Illegal = append(t.Illegal, Illegal{*s, why})
		}
		p.step(s, rule)
	}
	return t
}

// step takes in that a step was made.
func (p *past) step(s *Step, rule string) {
	p.last = &s.Is
	switch {
	case rule == ByHand:
		if s.Was.Status == none || slices.ContainsFunc(changed(s.Was, s.Is), func(name string) bool {
			return slices.Contains([]string{"status", "attempt", "max_attempts", "crashes", "stalls", "fence", "session", "replica"}, name)
		}) {
			p.byHand = true
		}
	case s.Is.Status == Running && s.Was.Status != Running: // also by no rule: others go by what it was then
		if _, ok := p.claims[s.Is.Fence]; !ok || rule != ByHand { // a hand that writes a fence again changes nothing for its holder
			p.claims[s.Is.Fence] = claim{s.Is, rule == ClaimLow}
		}
		p.fence, *p.keyFence = max(p.fence, s.Is.Fence), max(*p.keyFence, s.Is.Fence)
	}
	if rule == TakeOverCharged && s.Is.Crashes > s.Was.Crashes {
		p.charged[s.Was.Replica]++
	}
	if strings.HasPrefix(rule, "pardon") {
		p.charged[s.By]--
	}
	if strings.HasPrefix(rule, "retry of") {
		p.charged = map[string]int{}
	}
}

// rule returns the name of the rule for a step, or why there is none.
func (c *Config) rule(s *Step, p *past) (name, why string) {
	if p.last != nil && *p.last != s.Was {
		return "", fmt.Sprintf("it was changed before, and nobody noted that: %v", changed(*p.last, s.Was))
	}
	byReplica := c.Replica(s.By)
	mayEnd := func(rule string) bool {
		return strings.HasPrefix(rule, "requeue:") || strings.HasPrefix(rule, "takeover:")
	}
	var whys []string
	for i := range Rules {
		r := &Rules[i]
		if r.From != s.Was.Status || r.To != s.Is.Status {
			continue
		}
		if !byReplica && r.Who != person {
			continue
		}
		if why := r.forbids(s, p, c); why != "" {
			whys = append(whys, fmt.Sprintf("%s: %s", r.Name, why))
			continue
		}
		if p.claims[s.Was.Fence].low && r.From == Running && r.Who == holder && !mayEnd(r.Name) {
			whys = append(whys, fmt.Sprintf("%s: it was claimed under a fence that was not above all others for its lock key", r.Name))
			continue
		}
		return r.Name, ""
	}
	switch {
	case !byReplica:
		return ByHand, ""
	case len(whys) == 0:
		return "", "no rule leads there"
	}
	return "", "no rule fits: " + strings.Join(whys, "; ")
}

// forbids says why a step cannot have gone by the rule; empty if it can.
func (r *Rule) forbids(s *Step, p *past, c *Config) string {
	switch {
	case c.Named && r.Who == person && c.Replica(s.By):
		return "a replica does not do that"
	case c.Named && r.Who == holder && s.By != s.Was.Replica:
		return fmt.Sprintf("the row was held by %s", s.Was.Replica)
	}
	may := strings.Fields(r.May)
	for _, name := range changed(s.Was, s.Is) {
		if name != "status" && !slices.Contains(may, name) {
			return fmt.Sprintf("it changed %s", name)
		}
	}
	for _, conditions := range [][]condition{r.Guard, r.Effect} {
		for _, k := range conditions {
			if c.NoWorker && slices.Contains(judged, k.what) {
				continue
			}
			if !k.holds(s, p, c) {
				return "it is not so that " + k.what
			}
		}
	}
	return ""
}
