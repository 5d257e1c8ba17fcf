package fakeconsul

import (
	"maps"
	"slices"
	"time"
)

// Agent is the agent on one node. Its TTL checks run without the servers, which learn from it of
// a change when there is a leader.
type Agent struct {
	s    *Server
	node string
	down bool

	services map[string]service // by ID
	checks   map[string]*check  // by ID
}

type service struct {
	name string
}

type check struct {
	service string
	ttl     time.Duration
	bury    time.Duration // deregister the service when the check has failed for so long; zero means never
	passing bool
	fed     time.Time
	timer   *time.Timer // of the TTL, and then of the service
}

// Agent returns a new agent on a node of its own.
func (s *Server) Agent(node string) *Agent {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := &Agent{s: s, node: node, services: map[string]service{}, checks: map[string]*check{}}
	s.agents = append(s.agents, a)
	return a
}

// Stop stops the agent; it keeps its data. What it answers then is the caller's business.
func (a *Agent) Stop() {
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	a.down = true
	for _, c := range a.checks {
		c.timer.Stop()
	}
}

// Start starts it again. A check whose TTL has passed meanwhile has failed; the time of
// every other one counts anew.
func (a *Agent) Start() {
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	a.down = false
	for _, id := range slices.Sorted(maps.Keys(a.checks)) {
		c := a.checks[id]
		if c.passing && time.Since(c.fed) < c.ttl {
			a.run(id, c)
			continue
		}
		a.fail(id, c)
	}
	a.sync()
}

// register adds a service with its check.
func (a *Agent) register(id string, sv service, checkID string, c *check) {
	if old := a.checks[checkID]; old != nil {
		old.timer.Stop()
	}
	a.services[id] = sv
	if c != nil {
		c.fed = time.Now()
		a.checks[checkID] = c
		a.run(checkID, c)
	}
	a.sync()
}

func (a *Agent) deregister(id string) {
	delete(a.services, id)
	for checkID, c := range a.checks {
		if c.service == id {
			c.timer.Stop()
			delete(a.checks, checkID)
		}
	}
	a.sync()
}

// feed takes in a heartbeat.
func (a *Agent) feed(id string, c *check, passing bool) {
	changed := c.passing != passing
	c.passing, c.fed = passing, time.Now()
	if passing {
		a.run(id, c)
	} else {
		a.fail(id, c)
	}
	if changed {
		a.sync()
	}
}

// run waits for the next heartbeat.
func (a *Agent) run(id string, c *check) {
	if c.timer != nil {
		c.timer.Stop()
	}
	var timer *time.Timer
	timer = time.AfterFunc(c.ttl, func() {
		a.s.mu.Lock()
		defer a.s.mu.Unlock()
		if a.checks[id] == c && c.timer == timer && !a.down {
			a.fail(id, c)
			a.sync()
		}
	})
	c.timer = timer
}

// fail notes that a check has failed.
func (a *Agent) fail(id string, c *check) {
	if c.timer != nil {
		c.timer.Stop()
	}
	c.passing = false
	if c.bury == 0 {
		return
	}
	c.timer = time.AfterFunc(c.bury, func() {
		a.s.mu.Lock()
		defer a.s.mu.Unlock()
		if a.checks[id] == c && !c.passing && !a.down {
			a.deregister(c.service)
		}
	})
}

// sync tells the servers what the agent knows, soon.
func (a *Agent) sync() {
	var took time.Duration
	if a.s.config.Sync != nil {
		took = a.s.config.Sync()
	}
	if took == 0 {
		a.push()
		return
	}
	time.AfterFunc(took, func() {
		a.s.mu.Lock()
		defer a.s.mu.Unlock()
		a.push()
	})
}

// push makes the catalog agree with the agent. Without a leader that is done when there is
// one again.
func (a *Agent) push() {
	if a.down || !a.s.leader {
		return
	}
	agrees := true
	for id, st := range a.s.state.checks {
		agrees = agrees && (st.node != a.node || a.checks[id] != nil)
	}
	for id, c := range a.checks {
		agrees = agrees && a.s.state.checks[id] == checkState{a.node, c.passing}
	}
	if agrees {
		return
	}
	a.s.commit(func() {
		for _, id := range slices.Sorted(maps.Keys(a.s.state.checks)) {
			if a.s.state.checks[id].node == a.node && a.checks[id] == nil {
				delete(a.s.state.checks, id)
				a.s.critical(id, Gone)
			}
		}
		for _, id := range slices.Sorted(maps.Keys(a.checks)) {
			c := a.checks[id]
			a.s.state.checks[id] = checkState{a.node, c.passing}
			if !c.passing {
				a.s.critical(id, Critical)
			}
		}
	})
}

// Forget deregisters all services, as an operator does.
func (a *Agent) Forget() {
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	clear(a.services)
	for id, c := range a.checks {
		c.timer.Stop()
		delete(a.checks, id)
	}
	a.push()
}

// Node returns the name of the agent's node.
func (a *Agent) Node() string { return a.node }
