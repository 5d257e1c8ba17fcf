package worker

import (
	"context"
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

// silence returns a worker that has heard nothing of two others for ten seconds.
func silence(t *testing.T) (*Worker, *deathLocks, []tasks.Replica) {
	t.Helper()
	server := tasks.Server{System: "1", Timeline: 1, Started: time.Unix(1_700_000_000, 0)}
	kept := &recordKept{session: "session", report: tasks.ServerReport{Server: server, Now: time.Now(), FencesFrom: -1}}
	locks := &deathLocks{beatLocks: beatLocks{kept: kept}}
	w, err := New(Config{Store: &beatStore{kept: kept}, Locks: locks, Kinds: tasks.Kinds{"noop": tasks.Noop{}}, Replica: "r"})
	if err != nil {
		t.Fatal(err)
	}
	w.database.look(t.Context())
	var list []tasks.Replica
	for _, session := range []string{"a", "b"} {
		list = append(list, tasks.Replica{Session: session, State: tasks.ReplicaWorking, Here: true, Server: server.Started, HeartbeatAt: time.Unix(1, 0)})
	}
	w.members.saw(list, boottime.Now())
	for s, m := range w.members.seen {
		m.since = m.since.Add(-10 * time.Second)
		w.members.seen[s] = m
	}
	return w, locks, list
}

// A replica whose heartbeat comes while the session of another one is ended keeps its own: it
// does not speak to Consul any more, and the silence there means nothing.
func TestAHeartbeatMeanwhileSavesASession(t *testing.T) {
	w, locks, list := silence(t)
	locks.end = func(ctx context.Context, session string) {
		if deadline, ok := ctx.Deadline(); !ok || time.Until(deadline) > sameMoment {
			t.Errorf("the list's word is used until %v", deadline)
		}
		for i := range list {
			if list[i].Session != session {
				list[i].HeartbeatAt = time.Unix(2, 0)
			}
		}
		w.members.saw(list, boottime.Now())
	}
	w.lookForDeaths(t.Context())
	if len(locks.ended) != 1 {
		t.Errorf("the sessions %v were ended, though one of them gave a sign of life", locks.ended)
	}
}

// What nobody has looked at is no silence, and the list's word is used for some seconds only.
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
	if n := look(20*time.Second, sameMoment+time.Second); n != 0 {
		t.Errorf("%d sessions were ended that had been silent some time ago", n)
	}
	if n := look(20*time.Second, 0); n != 2 {
		t.Errorf("%d sessions of two were ended that are silent", n)
	}
}
