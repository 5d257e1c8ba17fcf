//go:build simulate

package simulate

import (
	"fmt"
	"slices"
	"time"
)

// begin begins a fault. All times are the world's.
func (w *world) begin(f *Fault) {
	w.note("fault begins: %v", *f)
	m := (*machine)(nil)
	if f.Who < len(w.machines) {
		m = w.machines[f.Who]
	}
	switch f.Kind {
	case DeleteByHand:
		if w.deleted == nil {
			w.deleted = map[string]time.Duration{}
		}
		key := fmt.Sprintf("k%d", f.Who)
		w.deleted[key] = w.now()
		w.consul.Delete(prefix + "/tasks/" + key)
	case Restore:
		snapshot := w.consul.Snapshot()
		time.AfterFunc(f.For, func() {
			if w.settled {
				return
			}
			w.note("a snapshot is restored")
			w.restored = w.now()
			w.consul.Restore(snapshot)
		})
	case NoLeader, Election:
		w.consul.SetLeader(false)
		if f.Kind == Election {
			w.consul.SetLeader(true)
		}
	}
	switch f.Kind {
	case DBStart:
		w.db.Restart()
	case Failover:
		backup, failovers := w.db.Backup(), w.failovers
		w.addTasks(6, f.For) // or else nothing may be claimed that the standby will not know
		time.AfterFunc(f.For, func() {
			// A standby of a timeline that was left has rows whose ids were given out again
			// since, to other tasks: it cannot follow, and nobody makes it the primary.
			if w.settled || w.failovers != failovers {
				return
			}
			w.failovers++
			w.note("a standby takes over")
			w.failed = true
			w.failOver(backup)
		})
	case PlantKey:
		if n := len(w.died); n > 0 {
			w.consul.Put(prefix+"/replicas/"+w.died[n-1], []byte("{}"))
		}
	}
	if m == nil {
		return
	}
	r := w.replicas[m.id]
	switch f.Kind {
	case Freeze:
		m.freeze()
	case Pause:
		m.freeze()
		if m.paused < 0 {
			m.paused = w.now()
		}
	case Crash, HostLoss, Buried:
		if session := w.sessionOf(m); session != "" {
			w.died = append(w.died, session)
		}
		w.crash(m)
		if f.Kind == HostLoss {
			m.agent.Stop()
		}
		if f.Kind == Buried {
			w.reportDeath(m, r.process)
		}
	case Restart, Stranger:
		r.stop()
	case Refuse:
		m.agent.Stop()
	case DestroyByHand, DeleteReplica:
		if session := w.sessionOf(m); session != "" {
			if f.Kind == DeleteReplica {
				w.consul.Delete(prefix + "/replicas/" + session)
				return
			}
			w.hand(func() { w.consul.Destroy(session) })
		}
	case AgentForgets:
		for _, session := range w.consul.Checked(m.agent.Node()) { // its key may have been deleted
			w.rob(session) // a little later, in truth
		}
		m.agent.Forget()
	}
	if f.For > 0 {
		w.active = append(w.active, f)
		time.AfterFunc(f.For, func() { w.end(f) })
		return
	}
	w.past = append(w.past, *f)
}

// hand does something by hand.
func (w *world) hand(f func()) {
	w.byHand = true
	f()
	w.byHand = false
}

// sessionOf returns the session of the machine's replica, as Consul knows it.
func (w *world) sessionOf(m *machine) string {
	for _, key := range w.consul.Below(prefix + "/replicas/") {
		if session, _ := w.consul.Held(key); session != "" && w.consul.Node(session) == m.agent.Node() {
			return session
		}
	}
	return ""
}

// end ends a fault.
func (w *world) end(f *Fault) {
	i := slices.Index(w.active, f)
	if i < 0 {
		return
	}
	w.note("fault ends: %v", *f)
	w.active = slices.Delete(w.active, i, i+1)
	past := *f
	past.For = w.now() - f.At
	w.past = append(w.past, past)
	still := func(kinds ...Kind) bool {
		return slices.ContainsFunc(w.active, func(o *Fault) bool { return slices.Contains(kinds, o.Kind) && (o.Who == f.Who || o.Kind == NoLeader) })
	}
	m := w.machines[f.Who%len(w.machines)]
	switch f.Kind {
	case Pause, Freeze:
		if f.Kind == Pause && !still(Pause) && m.paused >= 0 {
			m.behind += w.now() - m.paused
			m.paused, m.resumed = -1, w.now()
		}
		if !still(Freeze, Pause) {
			m.thaw()
		}
	case Crash, Restart, HostLoss, Buried, Stranger:
		if f.Kind == HostLoss && !still(Refuse, HostLoss) {
			m.agent.Start()
		}
		if !still(Crash, Restart, HostLoss, Buried, Stranger) {
			w.restart(m)
		}
		if f.Kind == Stranger {
			w.visit(m)
		}
	case Refuse:
		if !still(Refuse, HostLoss) {
			m.agent.Start()
		}
	case NoLeader:
		if !still(NoLeader) {
			w.consul.SetLeader(true)
		}
	}
}

// restart starts a replica on a machine when the one before has stopped; if that has crashed,
// at once.
func (w *world) restart(m *machine) {
	old := w.replicas[m.id]
	old.stop()
	go func() {
		patience := 20 * time.Second // it may be frozen
		if old.life != m.life {
			patience = 0
		}
		select {
		case <-old.done:
		case <-time.After(patience):
		}
		w.holders = slices.DeleteFunc(w.holders, func(h *holder) bool { return h.r == old })
		if w.replicas[m.id] == old && !w.over {
			w.replicas[m.id] = w.start(m)
		}
	}()
}

// visit lets the next process of a machine talk to another cluster's Consul, for a while.
func (w *world) visit(m *machine) {
	if w.settled {
		return
	}
	if m.stranger == nil {
		m.stranger = w.other.Agent(m.agent.Node())
	}
	time.AfterFunc(between(w.rand, time.Second, 15*time.Second), func() { w.comeBack(m) })
}

// comeBack starts it again with its own.
func (w *world) comeBack(m *machine) {
	if m.stranger == nil || w.over {
		return
	}
	w.crash(m)
	m.stranger = nil
	w.replicas[m.id] = w.start(m)
}

// adopt does what an operator does when no replica may work with this Consul, because one
// that was there alone has adopted another, and then died: onejob adopt-consul. It is for when
// all who may be alive elsewhere have died for certain.
func (w *world) adopt() {
	if _, id := w.consul.Held(prefix + "/cluster"); string(id) == w.db.Cluster() {
		return
	}
	var known []string
	for _, key := range w.consul.Below(prefix + "/replicas/") {
		if session, _ := w.consul.Held(key); key == prefix+"/replicas/"+session {
			known = append(known, session)
		}
	}
	for _, m := range w.db.Members() {
		present := slices.ContainsFunc(w.replicas, func(r *replica) bool { return r.process == m.Process })
		if m.EndedAt.IsZero() && present && !slices.Contains(known, m.Session) {
			return // it will say so itself, or have a session here
		}
	}
	if names := w.db.ForgetReplicas(known); len(names) > 0 {
		w.note("an operator has called dead: %v", names)
	}
}
