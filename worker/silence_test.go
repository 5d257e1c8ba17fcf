package worker

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"onejob/boottime"
	"onejob/lock"
	"onejob/tasks"
)

// deathLocks is a Consul that has heard nothing of anybody. Real ones do not say when another
// replica's heartbeat comes, between two requests.
type deathLocks struct {
	beatLocks
	ended []string
	end   func(ctx context.Context, session string)
}

func (l *deathLocks) Dead(context.Context, []string) ([]string, error) { return nil, nil }
func (l *deathLocks) End(ctx context.Context, session string, _ time.Duration) (lock.End, error) {
	l.ended = append(l.ended, session)
	l.end(ctx, session)
	return lock.Alive, nil
}

// deathStore has the list that a test gives it.
type deathStore struct {
	beatStore
	list []tasks.Replica
	err  error
}

func (s *deathStore) Replicas(context.Context) ([]tasks.Replica, error) {
	return slices.Clone(s.list), s.err
}

// silence returns a worker that has heard nothing of two others for ten seconds.
func silence(t *testing.T) (*Worker, *deathLocks, *deathStore) {
	t.Helper()
	server := tasks.Server{System: "1", Timeline: 1, Started: time.Unix(1_700_000_000, 0)}
	kept := &recordKept{session: "session", report: tasks.ServerReport{Server: server, Now: time.Now(), FencesFrom: -1}}
	locks := &deathLocks{beatLocks: beatLocks{kept: kept}}
	store := &deathStore{beatStore: beatStore{kept: kept}}
	w, err := New(Config{Store: store, Locks: locks, Kinds: tasks.Kinds{"noop": tasks.Noop{}}, Replica: "r"})
	if err != nil {
		t.Fatal(err)
	}
	w.database.look(t.Context())
	for _, session := range []string{"a", "b"} {
		store.list = append(store.list, tasks.Replica{Session: session, State: tasks.ReplicaWorking, Here: true, Server: server.Started, HeartbeatAt: time.Unix(1, 0)})
	}
	w.members.saw(slices.Clone(store.list), boottime.Now())
	for s, m := range w.members.seen {
		m.since = m.since.Add(-10 * time.Second)
		w.members.seen[s] = m
	}
	return w, locks, store
}

// A replica whose heartbeat comes while the session of another one is ended keeps its own: it
// does not speak to Consul any more, and the silence there means nothing.
func TestAHeartbeatMeanwhileSavesASession(t *testing.T) {
	w, locks, store := silence(t)
	locks.end = func(_ context.Context, session string) {
		for i := range store.list {
			if store.list[i].Session != session {
				store.list[i].HeartbeatAt = time.Unix(2, 0)
			}
		}
		w.members.saw(slices.Clone(store.list), boottime.Now())
	}
	w.lookForDeaths(t.Context())
	if len(locks.ended) != 1 {
		t.Errorf("the sessions %v were ended, though one of them gave a sign of life", locks.ended)
	}
}

// The silence in Consul must lie within that on the list. So the list is asked anew when Consul
// has been silent for long: a replica that was silent in both, one after the other, may have a
// lease from the heartbeat in between, and no lease but from such a one.
func TestTheListIsAskedAfterConsul(t *testing.T) {
	w, _, store := silence(t)
	silent := func(session string) bool {
		t.Helper()
		is, err := peers{w.members, w}.Silent(t.Context(), session)
		if err != nil {
			t.Fatal(err)
		}
		return is
	}
	if !silent("a") || !silent("b") {
		t.Error("nobody has heard of them, and they are not silent")
	}
	store.list[0].HeartbeatAt = time.Unix(2, 0)
	if silent("a") || !silent("b") {
		t.Error("it has sent a heartbeat, and is silent")
	}
	store.list[1].Server = time.Unix(1_700_000_001, 0)
	if silent("b") {
		t.Error("its heartbeat went to a server that is not on record, and it is silent")
	}
	store.list = store.list[:1]
	if silent("b") {
		t.Error("it is not on the list, and is silent")
	}
	store.err = errors.New("no answer")
	if _, err := (peers{w.members, w}).Silent(t.Context(), "a"); !errors.Is(err, store.err) {
		t.Errorf("the list cannot be had: %v", err)
	}
}

// What nobody has looked at is no silence.
func TestSilenceThatNobodyLookedAt(t *testing.T) {
	w, locks, _ := silence(t)
	locks.end = func(context.Context, string) {}
	now := boottime.Now()
	look := func(silent, ago time.Duration) int {
		locks.ended = nil
		w.members.heard = now.Add(-ago)
		for s, m := range w.members.seen {
			m.since = w.members.heard.Add(-silent)
			w.members.seen[s] = m
		}
		w.lookForDeaths(t.Context())
		return len(locks.ended)
	}
	if n := look(lock.Silence-time.Second, 3*time.Second); n != 0 {
		t.Errorf("%d sessions were ended that had been silent for 6 s when somebody looked, 3 s ago", n)
	}
	if n := look(20*time.Second, 0); n != 2 {
		t.Errorf("%d sessions of two were ended that are silent", n)
	}
}
