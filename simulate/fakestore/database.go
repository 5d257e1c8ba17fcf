// Package fakestore is the database of onejob in memory: what store asks of Postgres, behind
// the worker's Store.
//
// It has the columns of onejob.tasks, onejob.attempts, onejob.replicas and onejob.cluster that
// a worker without schedules changes, and changes them as the statements of store
// do. conformance_test.go compares the two: what calls answer, the history, and of rows all but the
// times, of which it compares whether they are there. Every call is one transaction. Nothing is said
// about locks on rows, plans or speed: a call sees what the one before has left.
package fakestore

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"onejob/lock"
	"onejob/tasks"
)

// A Row is one of onejob.tasks.
type Row struct {
	ID          int64
	Kind        string
	Queue       string
	LockKey     string // empty means the row's own
	Limit       string // empty means none
	Priority    int16
	RunAt       time.Time
	Status      tasks.Status
	Attempt     int
	MaxAttempts int
	Crashes     int
	Stalls      int
	Fence       int64
	Session     string
	Replica     string
	CreatedAt   time.Time
	StartedAt   time.Time
	BegunAt     time.Time
	FinishedAt  time.Time
	Cancel      bool
	Error       string

	key string // Key, of a row that is in a database
}

// Key returns what must not overlap.
func (r *Row) Key() string {
	switch {
	case r.key != "":
		return r.key
	case r.LockKey != "":
		return r.LockKey
	}
	return number(r.ID)
}

// An Attempt is one of onejob.attempts.
type Attempt struct {
	Task    int64
	Fence   int64
	Session string
	Outcome tasks.Outcome
}

// A Member is one of onejob.replicas.
type Member struct {
	tasks.Replica
	BeganAt     time.Time
	EndedAt     time.Time // zero if it has not
	transaction uint32    // that wrote its last heartbeat
}

// Database is one server's, and what its copies have.
type Database struct {
	mu       sync.Mutex
	state    state
	server   tasks.Server
	sequence int64 // onejob.fences
	claims   int

	// Step is the distance of the ids of successive rows; zero means 1.
	Step int64

	// FailCommit makes one of so many claims fail at its commit; zero means none.
	FailCommit int

	// Changed, if not nil, is called with every change of a row, and which statement made
	// it. It must not call the database.
	Changed func(before, after Row, by string)
}

type state struct {
	rows       []*Row // by their ids; a row that changes is replaced by another one
	next       int64
	attempts   map[[2]int64]Attempt // by task and fence
	members    map[string]Member    // by session
	cluster    string
	clusters   int
	fencesFrom int64
	heartbeats uint32
}

// New returns an empty database.
func New() *Database {
	return &Database{
		state:  state{attempts: map[[2]int64]Attempt{}, members: map[string]Member{}, fencesFrom: -1},
		server: tasks.Server{System: "7000000000000000000", Timeline: 1, Started: now(), Address: "simulated"},
	}
}

// now is the server's clock, to the microsecond.
func now() time.Time { return time.Now().Truncate(time.Microsecond) }

// Insert adds a row, and returns its id.
func (d *Database) Insert(r Row) int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.state.next += max(1, d.Step)
	r.ID = d.state.next
	r.Status = tasks.StatusPending
	r.CreatedAt = now()
	if r.RunAt.IsZero() {
		r.RunAt = r.CreatedAt
	}
	r.MaxAttempts = cmp.Or(r.MaxAttempts, 5)
	r.Queue = cmp.Or(r.Queue, "default")
	r.key = r.Key()
	d.put(r, "insert")
	return r.ID
}

// Rows returns all rows, by their ids.
func (d *Database) Rows() []Row {
	d.mu.Lock()
	defer d.mu.Unlock()
	rows := make([]Row, len(d.state.rows))
	for i, r := range d.state.rows {
		rows[i] = *r
	}
	return rows
}

// Attempts returns the history, by tasks and fences.
func (d *Database) Attempts() []Attempt {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.SortedFunc(maps.Values(d.state.attempts), func(a, b Attempt) int {
		return cmp.Or(cmp.Compare(a.Task, b.Task), cmp.Compare(a.Fence, b.Fence))
	})
}

// Any reports whether there is a row of which f is true.
func (d *Database) Any(f func(*Row) bool) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.ContainsFunc(d.state.rows, f)
}

// Members returns all sessions that were ever on the list.
func (d *Database) Members() []Member {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.members()
}

// A Backup is what a standby has that follows at a distance, or what somebody has kept.
type Backup struct {
	state    state
	sequence int64
}

// Backup returns what is there now.
func (d *Database) Backup() Backup {
	d.mu.Lock()
	defer d.mu.Unlock()
	st := d.state
	st.rows, st.attempts, st.members = slices.Clone(st.rows), maps.Clone(st.attempts), maps.Clone(st.members)
	return Backup{st, d.sequence}
}

// Failover makes a standby the primary, which has what the backup has, and no more.
func (d *Database) Failover(b Backup) {
	d.mu.Lock()
	defer d.mu.Unlock()
	st := b.state
	st.rows, st.attempts, st.members = slices.Clone(st.rows), maps.Clone(st.attempts), maps.Clone(st.members)
	d.state, d.sequence = st, b.sequence
	d.server.Timeline++
	d.server.Started = now()
}

// Restart restarts the server.
func (d *Database) Restart() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.server.Started = now()
}

// row returns a row, or nil if there is none with that id.
func (d *Database) row(id int64) *Row {
	if i, found := d.find(id); found {
		return d.state.rows[i]
	}
	return nil
}

func (d *Database) find(id int64) (i int, found bool) {
	return slices.BinarySearchFunc(d.state.rows, id, func(r *Row, id int64) int { return cmp.Compare(r.ID, id) })
}

func (d *Database) members() []Member {
	return slices.SortedFunc(maps.Values(d.state.members), func(a, b Member) int {
		return cmp.Or(a.BeganAt.Compare(b.BeganAt), cmp.Compare(a.Session, b.Session))
	})
}

func (d *Database) put(r Row, by string) {
	var before Row
	if i, found := d.find(r.ID); found {
		before, d.state.rows[i] = *d.state.rows[i], &r
	} else {
		d.state.rows = slices.Insert(d.state.rows, i, &r)
	}
	if d.Changed != nil {
		d.Changed(before, r, by)
	}
}

func (d *Database) note(a Attempt) {
	key := [2]int64{a.Task, a.Fence}
	if _, known := d.state.attempts[key]; !known {
		d.state.attempts[key] = a
	}
}

// held returns a row if it is running under that fence and session.
func (d *Database) held(id, fence int64, session string) (Row, bool) {
	r := d.row(id)
	if r == nil || r.Status != tasks.StatusRunning || r.Fence != fence || r.Session != session {
		return Row{}, false
	}
	return *r, true
}

var errCommit = errors.New("the commit has failed")

// claim is store.Claim. It announces what it has taken before it commits.
func (d *Database) claim(c tasks.Claim, announce func([]tasks.Taken)) (claimed tasks.Claimed, err error) {
	if !c.Server.IsZero() && !c.Server.Equal(d.server.Started) {
		return claimed, tasks.ErrOtherServer
	}
	now := now()
	var running []string // lock keys
	var due []*Row
	for _, r := range d.state.rows {
		switch {
		case r.Status == tasks.StatusRunning:
			running = append(running, r.key)
		case r.Limit == c.Limit && r.Status == tasks.StatusPending && !r.RunAt.After(now) && slices.Contains(c.Kinds, r.Kind) && (len(c.Queues) == 0 || slices.Contains(c.Queues, r.Queue)):
			due = append(due, r)
		}
	}
	slices.SortStableFunc(due, func(a, b *Row) int {
		return cmp.Or(cmp.Compare(b.Priority, a.Priority), a.RunAt.Compare(b.RunAt), cmp.Compare(a.ID, b.ID))
	})
	var chosen []*Row
	for _, r := range due {
		if len(chosen) == c.Max {
			claimed.More = true
			break
		}
		if !slices.Contains(running, r.key) {
			running = append(running, r.key)
			chosen = append(chosen, r)
		}
	}
	// Postgres makes them running in the order of their ids, and returns the most urgent first.
	taken := map[int64]*tasks.Task{}
	var rows []Row
	var announced []tasks.Taken
	for _, old := range slices.SortedFunc(slices.Values(chosen), func(a, b *Row) int { return cmp.Compare(a.ID, b.ID) }) {
		r := *old
		d.sequence++
		r.Status, r.Attempt, r.Fence = tasks.StatusRunning, r.Attempt+1, c.FencesFrom+d.sequence
		r.Session, r.Replica, r.StartedAt = c.Session, c.Replica, now
		rows = append(rows, r)
		if r.LockKey == "" && r.Crashes+r.Stalls == 0 {
			announced = append(announced, tasks.Taken{ID: r.ID, Fence: r.Fence})
		}
		taken[r.ID] = &tasks.Task{
			ID: r.ID, Kind: r.Kind, Payload: []byte("{}"), Queue: r.Queue, Priority: r.Priority, LockKey: r.Key(), LockShared: r.LockKey != "",
			Attempt: r.Attempt, MaxAttempts: r.MaxAttempts, Crashes: r.Crashes, Stalls: r.Stalls, Fence: r.Fence, Server: c.Server,
			Session: r.Session, Replica: r.Replica, CreatedAt: r.CreatedAt, StartedAt: r.StartedAt,
		}
	}
	announce(announced)
	if d.claims++; d.FailCommit > 0 && d.claims%d.FailCommit == 0 {
		return claimed, errCommit
	}
	for _, r := range rows {
		d.put(r, "claim")
	}
	for _, r := range chosen {
		claimed.Tasks = append(claimed.Tasks, taken[r.ID])
	}
	return claimed, nil
}

func (d *Database) begin(t *tasks.Task) error {
	r, ok := d.held(t.ID, t.Fence, t.Session)
	if !ok {
		return tasks.ErrRefused
	}
	r.BegunAt = now()
	d.put(r, "begin")
	return nil
}

func (d *Database) requeue(t *tasks.Task, delay time.Duration) {
	r, ok := d.held(t.ID, t.Fence, t.Session)
	if !ok {
		return
	}
	r.Status = tasks.StatusPending
	if r.Cancel {
		r.Status, r.FinishedAt = tasks.StatusCancelled, now()
	}
	if delay > 0 {
		r.RunAt = now().Add(delay)
	}
	r.Attempt, r.Session, r.Replica, r.StartedAt = max(r.Attempt-1, 0), "", "", time.Time{}
	d.put(r, "requeue")
}

func (d *Database) complete(e tasks.Completion) error {
	r, ok := d.held(e.ID, e.Fence, e.Session)
	if !ok {
		return d.settle(e)
	}
	r.Status = e.Next
	if e.Next == tasks.StatusPending && r.Cancel {
		r.Status = tasks.StatusCancelled
	}
	if r.Status != tasks.StatusPending {
		r.FinishedAt = now()
	}
	if e.Next == tasks.StatusPending && e.Delay > 0 {
		r.RunAt = now().Add(e.Delay.Truncate(time.Microsecond))
	}
	if e.Requeue {
		r.Attempt = max(r.Attempt-1, 0)
	}
	if e.Stalled {
		r.Stalls++
	}
	d.note(Attempt{r.ID, r.Fence, r.Session, e.Outcome})
	r.Error, r.Session, r.Replica = e.Error, "", ""
	d.put(r, "complete")
	return nil
}

// settle is what becomes of a completion whose row is not running under its fence.
func (d *Database) settle(e tasks.Completion) error {
	key := [2]int64{e.ID, e.Fence}
	a, known := d.state.attempts[key]
	if known && a.Outcome == e.Outcome && a.Session == e.Session && e.Outcome != tasks.Crashed && e.Outcome != tasks.Refused {
		return nil // an earlier try was accepted, though its answer was lost
	}
	old := d.row(e.ID)
	switch {
	case old == nil:
	case !known:
		d.note(Attempt{e.ID, e.Fence, "", tasks.Refused})
	case a.Outcome == tasks.Crashed: // the replica lives, after all
		a.Outcome = tasks.LeaseLost
		d.state.attempts[key] = a
		if r := *old; (r.Status == tasks.StatusPending || r.Status == tasks.StatusRunning) && r.Crashes > 0 {
			r.Crashes--
			least := 0
			if r.Status == tasks.StatusRunning {
				least = 1
			}
			r.Attempt = max(r.Attempt-1, least)
			if e.Stalled {
				r.Stalls++
			}
			d.put(r, "settle")
		}
	}
	return tasks.ErrRefused
}

// sessions returns those of running rows, but for mine.
func (d *Database) sessions(mine string) (list []string) {
	for _, r := range d.state.rows {
		if r.Status == tasks.StatusRunning && r.Session != mine && !slices.Contains(list, r.Session) {
			list = append(list, r.Session)
		}
	}
	return list
}

func (d *Database) takeOver(dead []string, maxCrashes int) (abandoned []tasks.Abandoned) {
	type answer struct {
		row    Row
		died   bool
		usedUp bool
		blame  bool
		proven bool
		last   bool
	}
	var answers []answer
	list := d.state.rows
	for _, r := range list {
		m, listed := d.state.members[r.Session]
		if r.Status != tasks.StatusRunning || !slices.Contains(dead, r.Session) || listed && m.EndedAt.IsZero() {
			continue
		}
		v := answer{row: *r, died: !listed || m.State == tasks.ReplicaDead, last: r.Crashes+r.Stalls+1 >= maxCrashes}
		heard := !listed || !r.StartedAt.After(m.HeartbeatAt.Add(lock.Silence))
		begun := r.Crashes+r.Stalls == 0 && maxCrashes > 1 && heard || !r.BegunAt.IsZero() && !r.BegunAt.Before(r.StartedAt)
		v.usedUp = v.died && begun
		v.blame = v.usedUp && !(listed && d.othersDied(*r, m))
		if v.proven = maxCrashes == 1; !v.proven && v.last {
			suspects, mine := 0, false
			for _, s := range list {
				if s.Status != tasks.StatusRunning || s.Session != r.Session || s.Crashes+s.Stalls+1 < maxCrashes || s.BegunAt.IsZero() || s.BegunAt.Before(s.StartedAt) {
					continue
				}
				if listed && m.HeartbeatAt.Sub(s.BegunAt) >= tasks.SuspectTime {
					continue
				}
				suspects++
				mine = mine || s.ID == r.ID
			}
			v.proven = suspects == 1 && mine
		}
		if v.last && v.blame && v.proven && listed && d.othersUnheard(*r, m) {
			continue // until it is known who else died
		}
		answers = append(answers, v)
	}
	for _, v := range answers {
		r := v.row
		outcome := tasks.Crashed
		if !v.died {
			outcome = tasks.LeaseLost
		}
		d.note(Attempt{r.ID, r.Fence, r.Session, outcome})
		o := tasks.Abandoned{ID: r.ID, Kind: r.Kind, LockKey: r.Key(), Attempt: r.Attempt, Stalls: r.Stalls, Fence: r.Fence, Replica: r.Replica, Since: now().Sub(r.StartedAt)}
		guilty := v.last && v.blame && v.proven
		switch {
		case !v.died:
			r.Error = fmt.Sprintf("replica %s lost its session during attempt %d of %d", r.Replica, r.Attempt, r.MaxAttempts)
		case guilty:
			stalled := ""
			if r.Stalls > 0 {
				stalled = " or stalled"
			}
			r.Error = fmt.Sprintf("quarantined: %d replicas died%s while they worked on it, the last was %s; see what it does to them, then onejob tasks retry %d",
				r.Crashes+r.Stalls+1, stalled, r.Replica, r.ID)
		default:
			r.Error = fmt.Sprintf("replica %s died during attempt %d of %d", r.Replica, r.Attempt, r.MaxAttempts)
		}
		switch {
		case r.Cancel:
			r.Status = tasks.StatusCancelled
		case !v.usedUp:
			r.Status = tasks.StatusPending
		case guilty:
			r.Status = tasks.StatusFailed
			o.Quarantined = true
		case r.Attempt >= r.MaxAttempts:
			r.Status = tasks.StatusFailed
		default:
			r.Status = tasks.StatusPending
		}
		if v.blame {
			r.Crashes++
		}
		if !v.usedUp {
			r.Attempt--
		}
		r.Session, r.Replica = "", ""
		if r.Status != tasks.StatusPending {
			r.FinishedAt = now()
		}
		d.put(r, "takeover")
		o.Crashes, o.Next = r.Crashes, r.Status
		abandoned = append(abandoned, o)
	}
	return abandoned
}

// othersDied reports whether other replicas died together with this one, of which the task
// had nothing.
func (d *Database) othersDied(r Row, m Member) bool {
	const together = 5 * time.Second
	return d.anyOther(r, m, func(o Member) bool {
		return o.HeartbeatAt.Sub(m.HeartbeatAt).Abs() <= together &&
			(o.State == tasks.ReplicaDead || o.EndedAt.IsZero() && now().Sub(o.HeartbeatAt) > 3*time.Second)
	})
}

// othersUnheard reports whether others may have died together with this one, which nobody
// knows yet.
func (d *Database) othersUnheard(r Row, m Member) bool {
	return d.anyOther(r, m, func(o Member) bool {
		later := o.HeartbeatAt.Sub(m.HeartbeatAt)
		return later >= -5*time.Second && later <= 1500*time.Millisecond && o.EndedAt.IsZero() && now().Sub(o.HeartbeatAt) <= 3*time.Second
	})
}

// anyOther reports whether there is such a replica, other than m, that has had nothing of
// the task.
func (d *Database) anyOther(r Row, m Member, such func(Member) bool) bool {
	for _, o := range d.state.members {
		if o.Process == m.Process || !such(o) {
			continue
		}
		had := false
		for _, a := range d.state.attempts {
			had = had || a.Task == r.ID && a.Session == o.Session
		}
		if !had {
			return true
		}
	}
	return false
}

func (d *Database) heldBy(session string) (list []*tasks.Task) {
	for _, r := range d.state.rows {
		if r.Status == tasks.StatusRunning && r.Session == session {
			list = append(list, &tasks.Task{ID: r.ID, Kind: r.Kind, LockKey: r.Key(), Attempt: r.Attempt, Fence: r.Fence, Session: session})
		}
	}
	return list
}

func (d *Database) cancelRequests(session string) (ids []int64) {
	for _, r := range d.state.rows {
		if r.Status == tasks.StatusRunning && r.Session == session && r.Cancel {
			ids = append(ids, r.ID)
		}
	}
	return ids
}

// replicas is what a heartbeat returns.
func (d *Database) replicas() (list []tasks.Replica) {
	for _, m := range d.members() {
		if !m.EndedAt.IsZero() && now().Sub(m.EndedAt) >= 10*time.Minute {
			continue
		}
		r := m.Replica
		r.Here, r.Server = m.Server.Equal(d.server.Started), d.server.Started
		list = append(list, r)
	}
	return list
}

func (d *Database) join(id string, r tasks.Replica) error {
	if id != d.state.cluster || id == "" {
		return &tasks.OtherClusterError{Why: "the cluster has another id than " + id + " by now"}
	}
	r.HeartbeatAt, r.Server = now(), d.server.Started
	d.state.heartbeats++
	d.state.members[r.Session] = Member{Replica: r, BeganAt: r.HeartbeatAt, transaction: d.state.heartbeats}
	return nil
}

func (d *Database) beat(r tasks.Replica, known tasks.Known) tasks.Answer {
	list := d.replicas() // as it was before, as the statement of store has it
	var digest strings.Builder
	for _, m := range list {
		fmt.Fprintln(&digest, m.Session, m.State, m.Running, m.Kinds)
	}
	d.state.heartbeats++
	a := tasks.Answer{Ended: true, Server: d.server.Started, Digest: digest.String(), Transaction: d.state.heartbeats}
	a.Whole = a.Digest != known.Digest || !a.Server.Equal(known.Server)
	for _, m := range list {
		m.Quiet = !m.State.Final() && a.Server.Equal(known.Server) && d.state.members[m.Session].transaction < known.Since
		if a.Whole || m.Quiet && m.Session != r.Session {
			a.Replicas = append(a.Replicas, m)
		}
	}
	if m, ok := d.state.members[r.Session]; ok && m.EndedAt.IsZero() {
		a.Ended = false
		m.HeartbeatAt, m.Running, m.State, m.Kinds, m.Server = now(), r.Running, r.State, r.Kinds, d.server.Started
		m.transaction = d.state.heartbeats
		d.state.members[r.Session] = m
	}
	return a
}

func (d *Database) endReplica(session string, how tasks.ReplicaState) {
	if m, ok := d.state.members[session]; ok && m.EndedAt.IsZero() {
		m.State, m.Running, m.EndedAt = how, 0, now()
		d.state.members[session] = m
	}
}

func (d *Database) declareDead(r tasks.Replica, stopped bool) tasks.ReplicaState {
	m, ok := d.state.members[r.Session]
	if !ok || !m.EndedAt.IsZero() || !m.HeartbeatAt.Equal(r.HeartbeatAt) {
		return ""
	}
	m.State = tasks.ReplicaDead
	for _, o := range d.state.members {
		if o.Process == m.Process && o.EndedAt.IsZero() && o.BeganAt.After(m.BeganAt) {
			m.State = tasks.ReplicaLost
		}
	}
	if stopped {
		m.State = tasks.ReplicaStopped
	}
	m.EndedAt = now()
	d.state.members[r.Session] = m
	return m.State
}

func (d *Database) declareProcessDead(process string) (sessions []string) {
	for _, m := range d.members() {
		if m.Process == process && m.EndedAt.IsZero() {
			m.State, m.EndedAt = tasks.ReplicaDead, now()
			d.state.members[m.Session] = m
			sessions = append(sessions, m.Session)
		}
	}
	return sessions
}

// mayAdopt returns why a Consul may not be made the cluster's own.
func (d *Database) mayAdopt(sessions []string, foreign bool) error {
	ours := map[string]bool{}
	for _, m := range d.state.members {
		if m.EndedAt.IsZero() {
			ours[m.Session] = true
		}
	}
	if d.state.cluster != "" {
		for _, r := range d.state.rows {
			m, listed := d.state.members[r.Session]
			if r.Status == tasks.StatusRunning && !(listed && !m.EndedAt.IsZero()) {
				ours[r.Session] = true
			}
		}
	}
	for s := range ours {
		if !slices.Contains(sessions, s) {
			return &tasks.OtherClusterError{Why: "a replica that may be at work has no session here"}
		}
	}
	for _, s := range sessions {
		if foreign && !ours[s] {
			return &tasks.OtherClusterError{Why: "replicas of another database are at work here"}
		}
	}
	return nil
}

// Cluster returns the id of the cluster; empty if there is none.
func (d *Database) Cluster() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.state.cluster
}

// ForgetReplicas calls all replicas dead that may be alive and are not among known, as
// Store.ForgetReplicas of store does, and returns their names.
func (d *Database) ForgetReplicas(known []string) (names []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	gone := map[string]string{}
	for _, r := range d.state.rows {
		if r.Status == tasks.StatusRunning {
			gone[r.Session] = r.Replica
		}
	}
	for s, m := range d.state.members {
		if m.EndedAt.IsZero() {
			gone[s] = m.Name
		}
	}
	for _, s := range slices.Sorted(maps.Keys(gone)) {
		m, listed := d.state.members[s]
		if slices.Contains(known, s) || listed && !m.EndedAt.IsZero() {
			continue
		}
		if !listed {
			m.Session, m.Process, m.Name, m.BeganAt, m.HeartbeatAt = s, s, gone[s], now(), now()
		}
		m.State, m.EndedAt = tasks.ReplicaDead, now()
		d.state.members[s] = m
		names = append(names, gone[s])
	}
	return names
}

// Cancel asks for a running task to be cancelled.
func (d *Database) Cancel(id int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if r := d.row(id); r != nil && r.Status == tasks.StatusRunning {
		cancelled := *r
		cancelled.Cancel = true
		d.put(cancelled, "cancel")
	}
}

// limits returns those of names that have due rows.
func (d *Database) limits(names, kinds []string) (due []string) {
	for _, r := range d.state.rows {
		if r.Limit != "" && r.Status == tasks.StatusPending && !r.RunAt.After(now()) && slices.Contains(names, r.Limit) && slices.Contains(kinds, r.Kind) && !slices.Contains(due, r.Limit) {
			due = append(due, r.Limit)
		}
	}
	return due
}

// limited reports whether a row with a limit waits.
func (d *Database) limited() bool {
	for _, r := range d.state.rows {
		if r.Limit != "" && r.Status == tasks.StatusPending {
			return true
		}
	}
	return false
}
