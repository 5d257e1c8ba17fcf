package snapshot

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"onejob/internal/plaintext"
	"onejob/store"
	"onejob/tasks"
)

// view is a snapshot while it is judged.
type view struct {
	*Snapshot
	waiting    []store.Waiting
	nameless   []store.Nameless
	overlaps   []tasks.Overlap
	held       []tasks.HeldSnapshot
	slots      map[string]int
	asksLeader bool
	missing    map[string]bool // limits that due tasks wait for and that do not exist
}

// From when on waiting is worth a warning. A replica looks for due tasks every second.
const (
	behindWarning = 10 * time.Second
	behindBad     = time.Minute
)

func (v *view) need(level Level, task int64, do, format string, args ...any) {
	v.Needs = append(v.Needs, Need{Level: level, Text: fmt.Sprintf(format, args...), Do: do, Task: task})
}

// needs lists what needs somebody, the worst first.
func (v *view) needs() {
	v.needsOfReplicas()
	v.needsOfWaiting()
	for _, s := range v.Schedules {
		switch {
		case s.Error != "":
			v.need(Bad, 0, "correct the schedule, or what refuses its tasks", "schedule %s creates no tasks: %s", s.Name, s.Error)
		case s.Behind:
			v.need(Warning, 0, "see the log of the leader", "schedule %s was due more than a minute ago, and nobody has dealt with that", s.Name)
		}
	}
	for _, o := range v.overlaps {
		v.need(Bad, o.Task, "SELECT * FROM onejob.overlaps", "attempts at the tasks %d (on %s) and %d (on %s) overlapped on the lock key %s", o.Task, o.Replica, o.OtherTask, o.OtherReplica, o.LockKey)
	}
	for _, h := range v.held {
		v.need(Warning, 0, "end it if it is not needed", "%s, holds back vacuum, so claims get slower", h)
	}
	for _, f := range v.Failures {
		if strings.HasPrefix(f.Error, "quarantined:") {
			v.need(Bad, f.Sample, "see what it does to replicas before it is tried again", "%s of kind %s: replicas died or stalled while they worked on it", quarantined(f.Count), f.Kind)
		}
	}
	slices.SortStableFunc(v.Needs, func(a, b Need) int { return worse(b.Level) - worse(a.Level) })
}

func quarantined(n int64) string {
	if n == 1 {
		return "a task was quarantined"
	}
	return fmt.Sprintf("%d tasks were quarantined", n)
}

func worse(l Level) int { return slices.Index([]Level{Good, Warning, Bad}, l) }

func (v *view) live() (n int) {
	for _, r := range v.Replicas {
		if r.Live() {
			n++
		}
	}
	return n
}

func (v *view) needsOfReplicas() {
	if v.StaleBlock(BlockReplicas) != nil {
		return
	}
	if v.live() == 0 {
		v.needReplicas()
	}
	for _, r := range v.Replicas {
		switch {
		case r.Silent():
			v.need(Warning, 0, "see its log; if it is gone, others take over its tasks", "replica %s has sent no heartbeat for %v", r.Name, r.Heartbeat)
		case r.State == tasks.ReplicaDead:
			v.need(Warning, 0, "see its log, and that of its host", "replica %s died; others take over its tasks", r.Name)
		}
	}
	if v.asksLeader && v.Leader == nil && v.live() > 0 {
		v.need(Warning, 0, "onejob leader", "there is no leader: schedules and retention wait")
	}
}

// needReplicas says that there is no live replica. One that has lost its session counts as none, but its
// process lives on: while Consul does not answer, it does not help to start another one.
func (v *view) needReplicas() {
	var last *Replica // that was heard
	for i := range v.Replicas {
		if r := &v.Replicas[i]; last == nil || r.Heartbeat < last.Heartbeat {
			last = r
		}
	}
	leader := v.StaleBlock(BlockLeader)
	switch {
	case last != nil && last.State == tasks.ReplicaLost:
		v.need(Bad, 0, "see consul_unavailable in its log; if no process of a replica is left: onejob serve", "no replica has a session in Consul: replica %s lost its own", last.Name)
	case leader != nil:
		v.need(Bad, 0, "onejob check says what is wrong with Consul; if no process of a replica is left: onejob serve", "no replica has a session in Consul, and Consul cannot be asked who leads: %s", leader.Error)
	default:
		v.need(Bad, 0, "onejob serve", "no replica is running")
	}
}

// claimers returns how many live replicas serve the queue, know the kind, and both; and of the last
// how many claim: the others are stopping, or have sent no heartbeat for long.
func (v *view) claimers(w store.Waiting) (queue, kind, both, claim int) {
	for _, r := range v.Replicas {
		if !r.Live() {
			continue
		}
		serves, knows := len(r.Queues) == 0 || slices.Contains(r.Queues, w.Queue), slices.Contains(r.Kinds, w.Kind)
		if serves {
			queue++
		}
		if knows {
			kind++
		}
		if serves && knows {
			both++
			if r.State != tasks.ReplicaStopping && !r.Silent() {
				claim++
			}
		}
	}
	return queue, kind, both, claim
}

// needsOfWaiting finds tasks that are due and that no replica will claim.
func (v *view) needsOfWaiting() {
	v.needsOfLimits()
	v.needsOfPaused()
	if v.StaleBlock(BlockReplicas) != nil || v.live() == 0 || v.live() >= store.MostReplicas { // of more, nobody knows what the others serve
		return
	}
	seen := map[string]bool{}
	for _, w := range v.waiting {
		queue, kind, both, claim := v.claimers(w)
		var text, do string
		level := Bad
		switch {
		case w.Due == 0 || claim > 0 || v.paused(w.Queue) != nil:
			continue
		case both > 0:
			level = Warning
			text, do = fmt.Sprintf("tasks of kind %s wait in queue %s: the replicas that could claim them are stopping, or are silent", w.Kind, w.Queue), "start another replica if none starts by itself"
		case queue == 0:
			text, do = fmt.Sprintf("tasks wait in queue %s: no replica serves it", w.Queue), "add the queue to worker.queues of a replica"
		case kind == 0:
			text, do = fmt.Sprintf("tasks of kind %s wait: no replica knows the kind", w.Kind), "configure the kind on a replica, or cancel the tasks"
		default:
			text, do = fmt.Sprintf("tasks of kind %s wait in queue %s: no replica that serves the queue knows the kind", w.Kind, w.Queue), "configure the kind on such a replica"
		}
		if !seen[text] && len(seen) < 20 {
			seen[text] = true
			v.need(level, 0, do, "%s", text)
		}
	}
	for _, n := range v.nameless {
		v.need(Bad, n.Sample, "configure it on a replica, or cancel the tasks", "tasks of kind %s wait: no live replica that serves their queue has the %s %q in its configuration", n.Kind, n.Field, n.Name)
		need := &v.Needs[len(v.Needs)-1]
		need.Kind, need.Without = n.Kind, fmt.Sprintf("tasks of kind %s wait: no live replica that serves their queue has their %s in its configuration", n.Kind, n.Field)
	}
}

// paused returns the pause of a queue, or nil.
func (v *view) paused(queue string) *Pause {
	if i := slices.IndexFunc(v.Queues, func(q Queue) bool { return q.Name == queue }); i >= 0 {
		return v.Queues[i].Paused
	}
	return nil
}

// needsOfPaused reminds of queues that somebody has paused, while tasks wait for that.
func (v *view) needsOfPaused() {
	for _, q := range v.Queues {
		if q.Paused != nil && q.Due.N > 0 {
			reason := ""
			if q.Paused.Reason != "" {
				reason = ": " + q.Paused.Reason
			}
			v.need(Warning, 0, "onejob queues resume "+plaintext.Argument(q.Name), "%s in queue %s, which %s has paused%s", dueTasks(q.Due), q.Name, q.Paused.By, reason)
		}
	}
}

func (v *view) needsOfLimits() {
	due := map[string]Count{}
	var names []string
	for _, w := range v.waiting {
		if w.Limit == "" || w.Due == 0 {
			continue
		}
		c, ok := due[w.Limit]
		if !ok {
			names = append(names, w.Limit)
		}
		due[w.Limit] = Count{c.N + w.Due, c.More || w.DueMore}
	}
	for _, name := range names {
		i := slices.IndexFunc(v.Limits, func(l Limit) bool { return l.Name == name })
		switch _, created := v.slots[name]; {
		case i >= 0 && v.Limits[i].Slots == 0 && v.Limits[i].Error == "":
			v.need(Warning, 0, "onejob limits set "+plaintext.Argument(name)+" SLOTS", "%s for limit %s, which has no slots", dueTasks(due[name]), name)
		case i < 0 && v.missing[name] && !created:
			v.need(Bad, 0, "onejob limits set "+plaintext.Argument(name)+" SLOTS", "%s for limit %s, which does not exist", dueTasks(due[name]), name)
		}
	}
	for _, l := range v.Limits {
		if l.Error != "" {
			v.need(Warning, 0, "onejob limits show "+plaintext.Argument(l.Name), "limit %s: %s", l.Name, l.Error)
		}
	}
}

func dueTasks(c Count) string {
	if c.N == 1 && !c.More {
		return "a due task waits"
	}
	return c.String() + " due tasks wait"
}

// behind is for how long the task waits that could be claimed and waits for longest: it has no
// limit and no lock key, and a replica would claim it, if there were any.
func (v *view) behind() (behind time.Duration) {
	for _, w := range v.waiting {
		if _, _, claimers, _ := v.claimers(w); w.Limit == "" && v.paused(w.Queue) == nil && (claimers > 0 || v.live() == 0) {
			behind = max(behind, w.Keyless)
		}
	}
	return behind
}

// leftOut reports whether there are so many priorities, queues and kinds that not all were looked at.
func (v *view) leftOut() bool {
	return slices.ContainsFunc(v.waiting, func(w store.Waiting) bool { return w.LeftOut && w.Limit == "" })
}

// shownReplicas is how many replicas a snapshot lists.
const shownReplicas = 200

// verdict says in one line how things are. It is the last to look at all replicas, and leaves in the
// snapshot those that are shown.
func (v *view) verdict() {
	defer func() {
		if n := len(v.Replicas); n > shownReplicas {
			v.Replicas, v.ReplicasLeftOut = v.Replicas[:shownReplicas], n-shownReplicas
		}
	}()
	v.Level = Good
	atLeast := func(l Level) {
		if worse(l) > worse(v.Level) {
			v.Level = l
		}
	}
	if v.Err != nil {
		v.Level = Bad
		if v.Verdict = "Postgres does not answer"; errors.Is(v.Err, store.ErrSchema) {
			v.Verdict = "the database has no onejob schema"
		}
		return
	}
	var parts []string
	unread := func(block string) bool { return v.StaleBlock(block) != nil }
	add := func(block, text string) {
		if unread(block) {
			text += " (not current)"
			atLeast(Warning)
		}
		parts = append(parts, text)
	}
	add(BlockReplicas, plaintext.Plural(v.live(), "replica"))
	add(BlockRunning, fmt.Sprintf("%v running", v.Running.Count))
	behind := v.behind()
	if v.leftOut() {
		add(BlockQueues, "behind at least "+behindText(behind))
	} else {
		add(BlockQueues, "behind "+behindText(behind))
	}
	switch {
	case behind >= behindBad:
		atLeast(Bad)
	case behind >= behindWarning:
		atLeast(Warning)
	}
	failing := map[string]bool{}
	for _, f := range v.Failures {
		if f.Recent {
			failing[f.Kind] = true
		}
	}
	switch len(failing) {
	case 0:
		add(BlockFailures, "nothing fails")
	case 1:
		add(BlockFailures, "1 kind fails")
	default:
		add(BlockFailures, fmt.Sprintf("%d kinds fail", len(failing)))
	}
	if len(failing) > 0 {
		atLeast(Warning)
	}
	switch {
	case v.Leader != nil && v.Leader.Name == "":
		parts = append(parts, "another program leads")
	case v.Leader != nil:
		parts = append(parts, "leader "+v.Leader.Name)
	case v.asksLeader:
		parts = append(parts, "no leader")
	case unread(BlockLeader):
		parts = append(parts, "leader unknown")
		atLeast(Warning)
	}
	for _, n := range v.Needs {
		atLeast(n.Level)
	}
	v.Verdict = strings.Join(parts, ", ")
}

// behindText shows a tenth of a second at least.
func behindText(d time.Duration) string {
	if d < 10*time.Second {
		return fmt.Sprintf("%.1f s", d.Seconds())
	}
	return Seconds(d).String()
}
