package checker

import (
	"slices"
	"strings"
	"time"

	"onejob/chaos/observer"
	"onejob/internal/testenv/lifecycle"
)

// Rules about what rows ask for: a queue, a unique key, how long they are kept, slots of a
// limit that is changed.

// misrouted looks for claims by replicas that do not serve the queue of the row.
func (h *history) misrouted(v *Report) {
	for i := range h.Steps {
		s := &h.Steps[i]
		queues, some := h.Queues[s.Is.Replica]
		if some && s.Was.Status != running && s.Is.Status == running && !slices.Contains(queues, s.Is.Queue) && !h.hostile(s.Task) {
			v.violation(&v.Misrouted, "misrouted: task %d of queue %q was claimed by %s at %s, which serves %v", s.Task, s.Is.Queue, s.Is.Replica, clock(moment(s.At)), queues)
		}
	}
}

func (h *history) hostile(task int64) bool { return slices.Contains(h.Hostile, task) }

// uniqueKeys looks for two tasks with one unique key of which neither has ended, and for
// INSERTs that were declined although there was none.
func (h *history) uniqueKeys(v *Report) {
	active := map[string]map[int64]bool{}
	spans := map[string][]span{} // in which a key was taken
	open := map[int64]int{}      // where in spans
	begins := func(s *lifecycle.Step, key string, since observer.Time) {
		if active[key] == nil {
			active[key] = map[int64]bool{}
		}
		active[key][s.Task] = true
		open[s.Task] = len(spans[key])
		spans[key] = append(spans[key], span{since, never})
		if len(active[key]) > 1 {
			v.violation(&v.UniqueBroken, "unique key: %q has %d tasks that have not ended, task %d among them, at %s", key, len(active[key]), s.Task, clock(moment(s.At)))
		}
	}
	for i := range h.Steps {
		s := &h.Steps[i]
		was, is := s.Was.UniqueKey != "" && isActive(s.Was.Status), s.Is.UniqueKey != "" && isActive(s.Is.Status)
		if was && !active[s.Was.UniqueKey][s.Task] { // most INSERTs are not noted
			begins(s, s.Was.UniqueKey, 0)
		}
		if was && (!is || s.Is.UniqueKey != s.Was.UniqueKey) {
			key := s.Was.UniqueKey
			delete(active[key], s.Task)
			spans[key][open[s.Task]].end = moment(s.At)
		}
		if is && (!was || s.Is.UniqueKey != s.Was.UniqueKey) {
			begins(s, s.Is.UniqueKey, moment(s.At))
		}
	}
	for _, f := range h.Final {
		if isActive(f.Status) { // it is lost, and perhaps nothing of it was noted
			return
		}
	}
	for _, d := range h.Declined {
		asked := span{d.From.Add(-skew), d.To.Add(skew)}
		if !slices.ContainsFunc(spans[d.UniqueKey], asked.meets) {
			v.violation(&v.UniqueBroken, "unique key: no task with %q was pending or running from %s to %s, and an INSERT was declined", d.UniqueKey, clock(d.From), clock(d.To))
		}
	}
}

func isActive(status string) bool { return status == pending || status == running }

// retention looks for tasks that were deleted before their time. Those of which the row says
// for how long it is kept are judged by that, and package lifecycle does the others.
func (h *history) retention(v *Report) {
	keep := map[int64]time.Duration{}
	for _, q := range h.Enqueued {
		keep[q.Task] = q.KeepFor
	}
	for i := range h.Steps {
		s := &h.Steps[i]
		if s.Was.Status == "" || s.Is.Status != "" || s.By == Operator || keep[s.Task] == 0 {
			continue
		}
		v.Expired++
		deleted := s.At
		if len(h.ClockSteps) > 0 { // by the same clock as its end, as retention goes by
			deleted = s.Began
		}
		if kept := moment(deleted).Sub(moment(s.Was.FinishedAt)); kept < keep[s.Task]-skew {
			v.violation(&v.Lost, "lost: task %d was deleted %v after its end, at %s, and is to be kept for %v", s.Task, kept, clock(moment(s.At)), keep[s.Task])
		}
	}
}

// expired returns the tasks that retention deleted.
func (h *history) expired() map[int64]bool {
	all := map[int64]bool{}
	for _, q := range h.Enqueued {
		if q.KeepFor > 0 {
			all[q.Task] = false
		}
	}
	for _, t := range h.Transitions {
		if _, ours := all[t.Task]; ours && t.To == Deleted && (t.From == succeeded || t.From == failed || t.From == cancelled) {
			all[t.Task] = true
		}
	}
	return all
}

// slotsAt returns how many slots a limit had at most when an attempt got one that began at a
// moment. Lowering a limit stops nobody.
func (h *history) slotsAt(name string, slots int, at observer.Time) int {
	asked := span{at.Add(-arriving), at.Add(skew)}
	most := slots
	var last observer.Time // when the last change was made for certain
	var changes []Resize
	for _, r := range h.Resizes {
		if r.Limit != name {
			continue
		}
		if r.Done && r.To <= asked.begin {
			// What was asked for before is over, unless it was never answered.
			last, most, changes = r.To, r.Slots, slices.DeleteFunc(changes, func(r Resize) bool { return r.Done })
			continue
		}
		changes = append(changes, r)
	}
	for _, r := range changes {
		if r.From < asked.end && (r.Done || r.To.Add(unanswered) > last) {
			most = max(most, r.Slots)
		}
	}
	// The state of before may be back, or the limit was made again.
	below := func(key string) bool { return strings.Contains(key, "/limits/"+name+"/") }
	if slices.ContainsFunc(h.Marks, func(m observer.Mark) bool {
		return !h.RabbitMQ && lostKey(m, below) && m.Begin < asked.end && (m.End == 0 || m.End.Add(remaking) > last)
	}) {
		most = max(most, slots)
		for _, r := range h.Resizes {
			if r.Limit == name && r.From < asked.end {
				most = max(most, r.Slots)
			}
		}
	}
	return most
}

const (
	// unanswered is for how long a change that was not answered may yet be made.
	unanswered = 30 * time.Second

	// remaking is for how long after a loss of keys a limit may yet be made again, with the
	// slots of the configuration.
	remaking = 30 * time.Second
)
