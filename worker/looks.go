package worker

import (
	"time"

	"onejob/boottime"
	"onejob/tasks"
)

// A heartbeat is answered with the whole list of replicas only if that is another one than
// before. Otherwise the answer has those alone that have sent no heartbeat since the last look
// but one, two seconds ago: most often none. All others have sent one since.
//
// A dead replica is named two looks later than a whole list would show it, and that costs no
// time: its silence counts from that earlier look, which is when its last heartbeat would have
// been seen on a whole list. Only after an outage, or where another server answers, it may
// count from the first answer that comes then.

// looks are the last two answers to heartbeats, the older one first. A zero value is none.
type looks struct {
	before, last look
	lists        int // whole lists that did not come with an answer
}

// look is one answer to a heartbeat.
type look struct {
	tasks.Answer
	at boottime.Instant // when it was there
}

// known returns what this replica may say that it knows in its next heartbeat: nothing before
// two answers in a row have come from one server.
func (m *members) known() (k tasks.Known, lists int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before, last := m.looks.before, m.looks.last
	if before.at != 0 && before.Server.Equal(last.Server) {
		k = tasks.Known{Server: last.Server, Digest: last.Digest, Since: before.Transaction}
	}
	return k, m.looks.lists
}

// answered takes in the answer to the heartbeat for which known was called, and which was sent
// then. It reports whether a replica has ended since the last answer.
func (m *members) answered(a tasks.Answer, lists int, sent boottime.Instant) (ended bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := boottime.Now()
	since := m.looks.before.at
	if a.Server.IsZero() || !a.Whole && since == 0 {
		m.looks = looks{} // it is no answer, or to another question
		return false
	}
	m.heard = max(m.heard, sent)
	if a.Whole {
		ended = m.sawLocked(a.Replicas, now)
	}
	told := make(map[string]bool, len(a.Replicas))
	for _, r := range a.Replicas {
		told[r.Session] = true
		if !r.Quiet || since == 0 {
			continue
		}
		old, known := m.seen[r.Session]
		if !known || !old.HeartbeatAt.Equal(r.HeartbeatAt) || since < old.since {
			old.since = since
		}
		m.seen[r.Session] = member{r, old.since}
	}
	for s, r := range m.seen {
		if !told[s] && !r.State.Final() {
			r.since, r.HeartbeatAt = now, time.Time{}
			m.seen[s] = r
		}
	}
	if lists != m.looks.lists {
		a.Digest = "" // what is seen may be older
	}
	a.Replicas = nil
	m.looks.before, m.looks.last = m.looks.last, look{a, now}
	return ended
}
