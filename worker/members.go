package worker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"go.uber.org/zap"

	"onejob/boottime"
	"onejob/internal/procfs"
	"onejob/internal/retry"
	"onejob/lock"
	"onejob/tasks"
)

// members is the cluster's list of replicas, as this one knows it: the second witness
// of who is alive. With peers it is the [lock.Cluster] of the worker's locks.
//
// How long another replica has been silent is counted here, on our own clock, from
// when its heartbeat was first seen: late, and never early. What was not seen, because
// Postgres did not answer us, does not count.
type members struct {
	store memberStore
	me    tasks.Replica // Session, Running, State, Kinds, Choices and Progress are filled in for each heartbeat

	told announced // by the last heartbeat that was acknowledged; only beatOnce's own

	mu    sync.Mutex
	seen  map[string]member // by session
	order []string          // sessions, as they began
	heard boottime.Instant  // when the list was asked for that was had last; what came after it nobody has looked at
	looks looks
}

// announced is what a session's row says of the choices that payloads have, and of how far
// handlers are. They may be long, so heartbeats repeat them only after a change.
type announced struct {
	session  string
	serving  *serving
	progress map[int64]tasks.ProgressAt
}

// memberStore keeps the cluster's list of replicas.
type memberStore interface {
	ClusterID(context.Context) (string, error)
	AdoptConsul(ctx context.Context, id string, sessions []string, foreign bool, by string, write func(ctx context.Context, id string) error) error
	Join(ctx context.Context, id string, r tasks.Replica) error
	Beat(context.Context, tasks.Replica, tasks.Known) (tasks.Answer, error)
	Replicas(context.Context) ([]tasks.Replica, error)
	DeclareProcessDead(ctx context.Context, process string) (sessions []string, err error)
	DeclareDead(ctx context.Context, r tasks.Replica, stopped bool) (tasks.ReplicaState, error)
	EndReplica(ctx context.Context, session string, how tasks.ReplicaState) error
}

type member struct {
	tasks.Replica                  // HeartbeatAt is zero if it has changed since it was told
	since         boottime.Instant // that its heartbeat is what it is
}

// Process implements lock.Cluster.
func (m *members) Process() string { return m.me.Process }

// ID implements lock.Cluster.
func (m *members) ID(ctx context.Context) (string, error) { return m.store.ClusterID(ctx) }

// Adopt implements lock.Cluster.
func (m *members) Adopt(ctx context.Context, id string, k lock.Known, write func(ctx context.Context, id string) error) error {
	return translated(m.store.AdoptConsul(ctx, id, k.Sessions, k.Foreign, m.me.Name, write))
}

// Join implements lock.Cluster.
func (m *members) Join(ctx context.Context, id, session string) error {
	r := m.me
	r.Session, r.State = session, tasks.ReplicaWorking
	return translated(m.store.Join(ctx, id, r))
}

// Leave implements lock.Cluster.
func (m *members) Leave(ctx context.Context, session string, lost bool) error {
	how := tasks.ReplicaStopped
	if lost {
		how = tasks.ReplicaLost
	}
	return m.store.EndReplica(ctx, session, how)
}

func translated(err error) error {
	if f := (*tasks.OtherClusterError)(nil); errors.As(err, &f) {
		return fmt.Errorf("%w: %s", lock.ErrOtherCluster, f.Why)
	}
	return err
}

// saw takes in the whole list, which was asked for at sent, and reports whether a replica has
// ended since the last one.
func (m *members) saw(list []tasks.Replica, sent boottime.Instant) (ended bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.heard = max(m.heard, sent)
	m.looks.lists++ // an answer that is on its way may be newer, and the next one is to be whole
	m.looks.last.Digest = ""
	return m.sawLocked(list, boottime.Now())
}

func (m *members) sawLocked(list []tasks.Replica, now boottime.Instant) (ended bool) {
	seen := make(map[string]member, len(list))
	m.order = m.order[:0]
	for _, r := range list {
		m.order = append(m.order, r.Session)
		old, known := m.seen[r.Session]
		if !known || !old.HeartbeatAt.Equal(r.HeartbeatAt) || old.State != r.State {
			old.since = now
		}
		ended = ended || r.State.Final() && !(known && old.State.Final())
		seen[r.Session] = member{r, old.since}
	}
	m.seen = seen
	return ended
}

// blind is called when the list cannot be had: the silence is counted from now on again.
func (m *members) blind() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.looks = looks{}
	for s, r := range m.seen {
		r.since = boottime.Now()
		m.seen[s] = r
	}
}

// of returns what is known of a session, and for how long it has been silent, as far as
// anybody has looked.
func (m *members) of(session string) (r tasks.Replica, silent time.Duration, known bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s, known := m.seen[session]
	return s.Replica, m.heard.Sub(s.since), known
}

// silent returns those that have not ended and have been silent for so long. Those whose
// last heartbeat another server took are among them: they may be talking to that one.
func (m *members) silent(long time.Duration) (list []tasks.Replica) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range m.seen {
		if !r.State.Final() && m.heard.Sub(r.since) >= long {
			list = append(list, r.Replica)
		}
	}
	return list
}

// errUnlisted says that the list has not been had yet in this session.
var errUnlisted = errors.New("the list of replicas is not known yet")

// sameBackend returns an error if a replica that began before session keeps limits elsewhere, or if
// nobody can tell yet. Of two that could wait for each other, one always began first.
func (m *members) sameBackend(session string) error {
	if m.me.LimitsBackend == "" {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.order {
		r := m.seen[s]
		switch {
		case s == session:
			return nil
		case !r.State.Final() && r.Process != m.me.Process && r.LimitsBackend != "" && r.LimitsBackend != m.me.LimitsBackend:
			return fmt.Errorf("replica %s keeps limits in %s, and this one in %s (limits.backend): rows with a limit wait here until it has ended", r.Name, r.LimitsBackend, m.me.LimitsBackend)
		}
	}
	return errUnlisted
}

// stillSilent reports whether a session has been silent for lock.Silence, as the list said when it
// was had last.
func (m *members) stillSilent(session string) bool {
	r, silent, known := m.of(session)
	return known && !r.State.Final() && silent >= lock.Silence
}

// peers is the members as the worker's locks see them.
type peers struct {
	*members
	w *Worker
}

// Silent implements lock.Cluster. A list of another server than the record's may lack heartbeats.
func (c peers) Silent(ctx context.Context, session string) (bool, error) {
	sent := boottime.Now()
	list, err := c.store.Replicas(ctx)
	if err != nil {
		return false, err
	}
	if c.saw(list, sent) {
		notify(c.w.bereaved)
	}
	r, _, _ := c.of(session)
	return c.stillSilent(session) && c.w.database.unchanged(ctx, r.Server), nil
}

// ended notes how a session has ended.
func (m *members) ended(session string, how tasks.ReplicaState) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.seen[session]
	r.State = how
	m.seen[session] = r
}

// doubt is after how much silence Consul is asked about a replica.
const doubt = 2 * time.Second

// beat writes heartbeats of the present session until ctx ends. A heartbeat waits for Postgres
// and for nothing else: one that is late is silence for the others.
func (w *Worker) beat(ctx context.Context) {
	for ctx.Err() == nil {
		began := time.Now()
		w.beatOnce(ctx)
		retry.Pause(ctx, time.Second-time.Since(began))
	}
}

func (w *Worker) beatOnce(ctx context.Context) {
	session := w.cfg.Locks.Session()
	if session == "" {
		w.watchReplicas(ctx)
		return
	}
	s := w.serving.Load()
	r := w.members.me
	r.Session, r.State, r.Kinds = session, tasks.ReplicaWorking, s.kinds.Names()
	r.Running, _ = w.running.load(w.cfg.Concurrency)
	told, tell := w.members.told, announced{session, s, w.running.progress()}
	if r.Choices = nil; tell.session != told.session || tell.serving != told.serving {
		r.Choices = s.choices
	}
	if tell.session != told.session || !maps.EqualFunc(tell.progress, told.progress, tasks.ProgressAt.Equal) {
		r.Progress = tell.progress
	}
	if w.shutdown.stopping.Load() {
		r.State = tasks.ReplicaStopping
	}
	known, lists := w.members.known()
	sent := boottime.Now()
	answer, err := w.cfg.Store.Beat(ctx, r, known)
	w.lookups.saw("heartbeat", err)
	if err != nil {
		w.members.blind()
		w.cfg.Log.Debug("heartbeat_unlisted", zap.String("session", session), zap.Error(err))
		return
	}
	w.members.told = tell
	if w.members.answered(answer, lists, sent) {
		notify(w.bereaved)
	}
	w.limits.again()
	if answer.Ended {
		w.cfg.Log.Warn("declared_dead", zap.String("session", session))
		w.cfg.Locks.Lose(session, errors.New("other replicas have declared this one dead: they heard no heartbeat"))
		return
	}
	if !w.database.serves(answer.Server) {
		w.database.doubt() // others may look at another server
		return
	}
	w.measure(Measurement{What: MeasureHeartbeat, Took: boottime.Now().Sub(sent)})
	w.cfg.Locks.Heard(session, sent)
	notify(w.listed)
}

// watchSilence looks for replicas that give no sign of life, each time that the list was had,
// until ctx ends.
func (w *Worker) watchSilence(ctx context.Context) {
	for {
		select {
		case <-w.listed:
			w.lookForDeaths(ctx)
		case <-ctx.Done():
			return
		}
	}
}

func (w *Worker) lookForDeaths(ctx context.Context) {
	// Consul's silence counts from when we first asked: not after that of the list.
	looked := w.lookAtDoubtful(ctx)
	for _, r := range w.members.silent(lock.Silence) {
		if time.Since(looked) > time.Second { // the others may have taken long
			looked = w.lookAtDoubtful(ctx)
		}
		switch {
		case r.Session == w.cfg.Locks.Session():
		case r.Here:
			w.reportDeath(ctx, r)
		default:
			w.reportDeathElsewhere(ctx, r)
		}
	}
}

// lookAtDoubtful looks at those that the list has not heard of for a while, and returns when.
func (w *Worker) lookAtDoubtful(ctx context.Context) time.Time {
	now := time.Now()
	var doubtful []string
	for _, r := range w.members.silent(doubt) {
		doubtful = append(doubtful, r.Session)
	}
	_, _ = w.cfg.Locks.Dead(ctx, doubtful)
	return now
}

// watchReplicas declares replicas dead whose process has ended on this machine and that have been
// silent for long. It is for when there is no session, and nobody to ask: a Consul that
// was wiped is adopted only if no replica can be at work elsewhere.
func (w *Worker) watchReplicas(ctx context.Context) {
	sent := boottime.Now()
	list, err := w.cfg.Store.Replicas(ctx)
	if err != nil {
		w.members.blind()
		return
	}
	w.members.saw(list, sent)
	for _, r := range w.members.silent(lock.Silence) {
		if r.Machine != "" && r.Machine == w.members.me.Machine && procfs.Gone(r.PID, r.Started) {
			w.declareDead(ctx, r, lock.Dead)
		}
	}
}

// reportDeath declares a replica dead that gives no sign of life, neither here nor in Consul.
// Its leases have ended by its own clock, wherever it is.
func (w *Worker) reportDeath(ctx context.Context, r tasks.Replica) {
	if !w.members.stillSilent(r.Session) {
		return // the others that were silent may have taken long
	}
	how, err := w.cfg.Locks.End(ctx, r.Session, lock.Silence)
	if err != nil {
		w.cfg.Log.Debug("replica_lookup_failed", zap.String("other", r.Name), zap.String("session", r.Session), zap.Error(err))
	}
	if err == nil && how != lock.Alive {
		w.declareDead(ctx, r, how)
	}
}

// reportDeathElsewhere declares a replica dead whose last heartbeat went to another server than
// the present one, as that of a replica that did not live to see the failover. Its silence
// here says nothing: it may be alive, and heard by an old primary. Consul alone must have
// ended its session, by its own clock.
func (w *Worker) reportDeathElsewhere(ctx context.Context, r tasks.Replica) {
	dead, err := w.cfg.Locks.Dead(ctx, []string{r.Session})
	if err != nil || len(dead) == 0 || !w.database.unchanged(ctx, r.Server) {
		return
	}
	// It may have stopped in order, and have said so in Consul as it could not reach Postgres.
	how, err := w.cfg.Locks.End(ctx, r.Session, lock.Silence)
	if err == nil && how != lock.Alive {
		w.declareDead(ctx, r, how)
	}
}

// declareDead notes a death on the list, unless there was a heartbeat meanwhile.
func (w *Worker) declareDead(ctx context.Context, r tasks.Replica, end lock.End) {
	how, err := w.cfg.Store.DeclareDead(ctx, r, end == lock.Stopped)
	w.lookups.saw("deaths", err)
	if err != nil || how == "" {
		return // the next heartbeat tells
	}
	w.members.ended(r.Session, how)
	if end == lock.Stopped {
		_, _ = w.cfg.Locks.End(ctx, r.Session, 0) // what it said in Consul is on the list now
	}
	if how == tasks.ReplicaDead {
		w.cfg.Log.Warn("replica_dead", zap.String("other", r.Name), zap.String("session", r.Session), zap.String("host", r.Host), zap.Int("running", r.Running))
	}
	notify(w.bereaved)
}
