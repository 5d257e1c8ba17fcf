package worker

import (
	"context"
	"sync"
	"testing"
	"time"

	"onejob/boottime"
	"onejob/lock"
	"onejob/tasks"
)

// beatLocks and beatStore are what heartbeats ask. Real ones do not tell when a heartbeat
// arrived, by the clock of who sent it.
type beatLocks struct {
	lock.Locker // what is not overridden is not called
	kept        *recordKept
	heard       boottime.Instant
}

func (l *beatLocks) Session() string                       { return l.kept.session }
func (l *beatLocks) Heard(_ string, sent boottime.Instant) { l.heard = sent }
func (l *beatLocks) Dead(ctx context.Context, _ []string) ([]string, error) {
	<-ctx.Done() // as a Consul that does not answer
	return nil, ctx.Err()
}
func (l *beatLocks) Database(ctx context.Context) ([]byte, uint64, error) {
	return l.kept.Database(ctx)
}
func (l *beatLocks) SetDatabase(ctx context.Context, record []byte, version uint64) (uint64, error) {
	return l.kept.SetDatabase(ctx, record, version)
}

type beatStore struct {
	Store   // what is not overridden is not called
	kept    *recordKept
	arrived boottime.Instant
	beats   chan struct{} // has each heartbeat, or is nil
}

func (s *beatStore) Server(ctx context.Context) (tasks.ServerReport, error) {
	return s.kept.Server(ctx)
}
func (s *beatStore) Recorded(ctx context.Context, from int64) error {
	return s.kept.Recorded(ctx, from)
}
func (s *beatStore) Refuse(tasks.Server) {}
func (s *beatStore) Beat(_ context.Context, r tasks.Replica, _ tasks.Known) (tasks.Answer, error) {
	select {
	case s.beats <- struct{}{}:
	default:
	}
	for s.arrived = boottime.Now(); boottime.Now() <= s.arrived; { // the answer comes later, if by a moment
	}
	return tasks.Answer{Server: s.kept.report.Started, Whole: true, Replicas: []tasks.Replica{r}}, nil
}

// Other replicas count silence from when Postgres has taken a heartbeat, which is before its
// answer. So the lease counts from before it was sent.
func TestSilenceCountsFromTheHeartbeat(t *testing.T) {
	server := tasks.Server{System: "1", Timeline: 1, Started: time.Unix(1_700_000_000, 0)}
	kept := &recordKept{session: "session", report: tasks.ServerReport{Server: server, Now: time.Now(), FencesFrom: -1}}
	locks, store := &beatLocks{kept: kept}, &beatStore{kept: kept}
	w, err := New(Config{Store: store, Locks: locks, Kinds: tasks.Kinds{"noop": tasks.Noop{}}, Replica: "r"})
	if err != nil {
		t.Fatal(err)
	}
	w.database.look(t.Context())
	before := boottime.Now()
	w.beatOnce(t.Context())
	switch {
	case locks.heard < before:
		t.Error("the heartbeat was not acknowledged")
	case locks.heard > store.arrived:
		t.Errorf("the lease counts from %v after Postgres had the heartbeat", locks.heard.Sub(store.arrived))
	}
}

// A heartbeat does not wait until Consul has said what it knows of other replicas: others would
// hear nothing of this one meanwhile.
func TestHeartbeatsDoNotWaitForConsul(t *testing.T) {
	t.Parallel()
	server := tasks.Server{System: "1", Timeline: 1, Started: time.Unix(1_700_000_000, 0)}
	kept := &recordKept{session: "session", report: tasks.ServerReport{Server: server, Now: time.Now(), FencesFrom: -1}}
	store := &beatStore{kept: kept, beats: make(chan struct{}, 1)}
	w, err := New(Config{Store: store, Locks: &beatLocks{kept: kept}, Kinds: tasks.Kinds{"noop": tasks.Noop{}}, Replica: "r"})
	if err != nil {
		t.Fatal(err)
	}
	w.database.look(t.Context())
	ctx, cancel := context.WithCancel(t.Context())
	var both sync.WaitGroup
	both.Go(func() { w.beat(ctx) })
	both.Go(func() { w.watchSilence(ctx) })
	defer both.Wait()
	defer cancel()
	limit := time.After(time.Minute)
	for n := range 4 {
		select {
		case <-store.beats:
		case <-limit:
			t.Fatalf("%d heartbeats in a minute", n)
		}
	}
}
