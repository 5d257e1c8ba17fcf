package snapshot_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"onejob/internal/retry"
	"onejob/internal/snapshot"
	"onejob/lock"
	"onejob/store"
	"onejob/tasks"
)

// cluster is a store whose overview a test decides.
type cluster struct {
	mu       sync.Mutex
	overview store.Overview
	err      error
	takes    time.Duration

	asked atomic.Int64
}

func (c *cluster) Overview(ctx context.Context) (store.Overview, error) {
	c.asked.Add(1)
	select {
	case <-time.After(c.takes):
	case <-ctx.Done():
		return store.Overview{}, ctx.Err()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	o := c.overview
	if c.err != nil {
		return store.Overview{}, c.err // as the store, which has not seen Postgres' clock either
	}
	if o.Now.IsZero() {
		o.Now = time.Now()
	}
	return o, nil
}

func (c *cluster) change(do func(o *store.Overview)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	do(&c.overview)
}

// However many look, one snapshot is taken every two seconds, all get the same one, and when
// nobody looks none is taken.
func TestSnapshotsAreShared(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &cluster{takes: 300 * time.Millisecond}
		source := snapshot.New(snapshot.Config{Store: c})
		ctx, stop := context.WithCancel(t.Context())
		var viewers sync.WaitGroup
		var mu sync.Mutex
		seen := map[*snapshot.Snapshot]int{}
		for i := range 20 {
			viewers.Go(func() {
				time.Sleep(time.Duration(i) * 37 * time.Millisecond)
				var last *snapshot.Snapshot
				for {
					s, err := source.After(ctx, last)
					if err != nil {
						return
					}
					if s == last {
						t.Error("the same snapshot twice")
					}
					last = s
					mu.Lock()
					seen[s]++
					mu.Unlock()
				}
			})
		}
		time.Sleep(20*time.Second + time.Millisecond)
		stop()
		viewers.Wait()
		if n := c.asked.Load(); n < 8 || n > 11 {
			t.Errorf("in 20 s, %d snapshots were taken", n)
		}
		whole := 0
		for _, n := range seen {
			if n == 20 {
				whole++
			}
		}
		if whole < len(seen)-1 { // the last one may be cut short
			t.Errorf("of %d snapshots, %d were seen by all", len(seen), whole)
		}
		before := c.asked.Load()
		time.Sleep(time.Minute)
		if n := c.asked.Load(); n != before {
			t.Errorf("nobody looks, and %d were taken", n-before)
		}
	})
}

// A snapshot that takes longer than Every, as with a Postgres that hardly answers, is for all who
// wait for it: the last of them does not wait for one snapshot after the other.
func TestSlowSnapshotsAreShared(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &cluster{takes: 5 * time.Second}
		source := snapshot.New(snapshot.Config{Store: c})
		for round, look := range []func() (*snapshot.Snapshot, error){
			func() (*snapshot.Snapshot, error) { return source.Get(t.Context()) },
			func() (*snapshot.Snapshot, error) { return source.Renew(t.Context()) },
		} {
			began := time.Now()
			var viewers sync.WaitGroup
			for range 10 {
				viewers.Go(func() {
					if _, err := look(); err != nil {
						t.Error(err)
					}
				})
			}
			viewers.Wait()
			if took := time.Since(began); took != c.takes {
				t.Errorf("round %d: the last of ten waited %v for a snapshot that takes %v", round, took, c.takes)
			}
			if n := c.asked.Load(); n != int64(round+1) {
				t.Errorf("round %d: %d snapshots were taken", round, n)
			}
			time.Sleep(time.Minute)
		}
	})
}

// Failures of hours ago do not become recent ones when Postgres does not answer.
func TestOldFailuresWithoutPostgres(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		at := store.Time{At: time.Now().Add(-2 * time.Hour)}
		c := &cluster{}
		c.change(func(o *store.Overview) {
			o.Failures.Rows = []store.Failure{{Kind: "report", Error: "no", Count: 1, First: at, Last: at, Sample: 7}}
		})
		source := snapshot.New(snapshot.Config{Store: c})
		for _, down := range []error{nil, errors.New("connection refused")} {
			c.mu.Lock()
			c.err = down
			c.mu.Unlock()
			s, err := source.Renew(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if s.Err != down || len(s.Failures) != 1 || s.Failures[0].Recent {
				t.Errorf("with the error %v the failures are %+v", down, s.Failures)
			}
		}
	})
}

// Renew does not wait until the last one is old, and shares one that is being taken.
func TestRenewTakesASnapshotNow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &cluster{takes: 100 * time.Millisecond}
		source := snapshot.New(snapshot.Config{Store: c})
		first, err := source.Get(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var readers sync.WaitGroup
		for range 3 {
			readers.Go(func() {
				if s, err := source.Renew(t.Context()); err != nil || s == first {
					t.Errorf("it is the same one, %v", err)
				}
			})
		}
		readers.Wait()
		if n := c.asked.Load(); n != 2 {
			t.Errorf("%d were taken", n)
		}
	})
}

// Who comes while the last one is fresh gets that one; a viewer who leaves does not take the
// snapshot away from the others.
func TestSnapshotsOutliveTheViewerThatAsked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &cluster{takes: time.Second}
		source := snapshot.New(snapshot.Config{Store: c})
		leaves, leave := context.WithCancel(t.Context())
		var first sync.WaitGroup
		first.Go(func() { _, _ = source.Get(leaves) })
		time.Sleep(100 * time.Millisecond)
		leave()
		a, err := source.Get(t.Context())
		if err != nil || a.Err != nil {
			t.Fatal(err, a.Err)
		}
		time.Sleep(500 * time.Millisecond)
		if b, err := source.Get(t.Context()); err != nil || a != b {
			t.Errorf("half a second later there is another one (%v)", err)
		}
		first.Wait()
		if n := c.asked.Load(); n != 1 {
			t.Errorf("%d were taken", n)
		}
	})
}

// A block that cannot be read shows what it showed, and since when.
func TestABlockThatCannotBeReadIsOld(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &cluster{}
		c.overview.Replicas.Rows = []store.ReplicaGlance{{Name: "a", State: tasks.ReplicaWorking}}
		c.overview.Running.Rows = []store.Running{{ID: 7, All: 3}}
		source := snapshot.New(snapshot.Config{Store: c})
		first, err := source.Get(t.Context())
		if err != nil || len(first.Stale) > 0 || first.Running.Count.N != 3 {
			t.Fatalf("%+v, %v", first, err)
		}
		c.change(func(o *store.Overview) {
			o.Running = store.Part[store.Running]{Err: errors.New("too slow")}
			o.Schedules = store.Part[store.ScheduleGlance]{Err: errors.New("too slow")}
			o.Replicas.Rows[0].Name = "b"
		})
		for range 3 {
			time.Sleep(3 * time.Second)
			s, err := source.Get(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if len(s.Running.Tasks) != 1 || s.Running.Tasks[0].ID != 7 || s.Replicas[0].Name != "b" {
				t.Errorf("%+v", s)
			}
			r, u := s.StaleBlock(snapshot.BlockRunning), s.StaleBlock(snapshot.BlockSchedules)
			if r == nil || r.Error != "too slow" || r.AsOf == nil || !r.AsOf.Equal(first.At) {
				t.Errorf("of what runs: %+v", r)
			}
			if u == nil || u.AsOf != nil && !u.AsOf.Equal(first.At) {
				t.Errorf("of schedules: %+v", u)
			}
			if s.Level != snapshot.Warning || !strings.Contains(s.Verdict, "3 running (not current)") {
				t.Errorf("%s: %s", s.Level, s.Verdict)
			}
		}
		c.err = errors.New("no route to host")
		time.Sleep(3 * time.Second)
		s, _ := source.Get(t.Context())
		if s.Err == nil || s.Level != snapshot.Bad || s.Verdict != "Postgres does not answer" || len(s.Replicas) != 1 || s.StaleBlock(snapshot.BlockReplicas) == nil {
			t.Errorf("without Postgres: %+v", s)
		}
		c.err = fmt.Errorf("read the overview: %w", store.ErrSchema)
		time.Sleep(3 * time.Second)
		if s, _ := source.Get(t.Context()); s.Err == nil || s.Level != snapshot.Bad || s.Verdict != "the database has no onejob schema" {
			t.Errorf("without the schema: %+v", s)
		}
	})
}

// limits are semaphores of which only List and Inspect are asked.
type limits struct {
	lock.Semaphores
	list  map[string]lock.Semaphore
	more  map[string]lock.Semaphore // which List leaves out
	err   error
	takes time.Duration // that a look at a limit takes
}

func (l limits) List(context.Context) (names []string, err error) {
	for name := range l.list {
		names = append(names, name)
	}
	slices.Sort(names)
	return names, l.err
}

func (l limits) Inspect(ctx context.Context, name string) (lock.Semaphore, error) {
	if retry.Pause(ctx, l.takes); ctx.Err() != nil {
		return lock.Semaphore{Name: name, Slots: l.list[name].Slots}, ctx.Err()
	}
	for _, list := range []map[string]lock.Semaphore{l.list, l.more} {
		if sem, ok := list[name]; ok {
			return sem, nil
		}
	}
	return lock.Semaphore{}, lock.ErrNoSemaphore
}

func TestVerdicts(t *testing.T) {
	t.Parallel()
	now := time.Now()
	at := func(ago time.Duration) store.Time { return store.Time{At: now.Add(-ago)} }
	replica := func(name string, change ...func(*store.ReplicaGlance)) store.ReplicaGlance {
		r := store.ReplicaGlance{Name: name, Session: name, State: tasks.ReplicaWorking, Kinds: []string{"noop", "exec"}, Silent: time.Second}
		for _, c := range change {
			c(&r)
		}
		return r
	}
	healthy := func() store.Overview {
		o := store.Overview{Now: now}
		o.Replicas.Rows = []store.ReplicaGlance{replica("web-1"), replica("web-2"), replica("web-3")}
		o.Running.Rows = []store.Running{{ID: 1, All: 41}}
		o.Waiting.Rows = []store.Waiting{{Queue: "default", Kind: "noop", Due: 3, Oldest: time.Hour, Keyless: 400 * time.Millisecond}}
		return o
	}
	none := errors.New("none")
	for _, test := range []struct {
		name   string
		change func(o *store.Overview)
		level  snapshot.Level
		want   string // the verdict; empty: as if all is well
		need   string // part of the first need; empty: there is none
		leader error  // none: there is none
	}{
		{name: "AllIsWell", level: snapshot.Good, want: "3 replicas, 41 running, behind 0.4 s, nothing fails, leader web-2"},
		{name: "TwoKindsFail", level: snapshot.Warning, want: "3 replicas, 41 running, behind 0.4 s, 2 kinds fail, leader web-2", change: func(o *store.Overview) {
			o.Failures.Rows = []store.Failure{
				{Kind: "exec", Error: "exit status 1", Count: 2, First: at(time.Hour), Last: at(time.Minute), Sample: 5},
				{Kind: "http", Error: "503", Count: 1, First: at(time.Minute), Last: at(time.Minute), Sample: 6},
				{Kind: "noop", Error: "old", Count: 1, First: at(3 * time.Hour), Last: at(3 * time.Hour), Sample: 4}}
		}},
		{name: "NoReplica", level: snapshot.Bad, want: "0 replicas, 41 running, behind 0.4 s, nothing fails, leader web-2", need: "no replica is running", change: func(o *store.Overview) {
			for i := range o.Replicas.Rows {
				o.Replicas.Rows[i].State = tasks.ReplicaStopped
			}
		}},
		{name: "NoReplicaHasASession", level: snapshot.Bad, want: "0 replicas, 41 running, behind 0.4 s, nothing fails, leader unknown", need: "no replica has a session in Consul: replica web-2 lost its own", leader: errors.New("no Consul"), change: func(o *store.Overview) {
			for i := range o.Replicas.Rows {
				o.Replicas.Rows[i].State, o.Replicas.Rows[i].Silent = tasks.ReplicaLost, time.Minute
			}
			o.Replicas.Rows[0].State = tasks.ReplicaDead
			o.Replicas.Rows[1].Silent = 20 * time.Second
		}},
		{name: "NoReplicaForLongAndNoConsul", level: snapshot.Bad, want: "0 replicas, 41 running, behind 0.4 s, nothing fails, leader unknown", need: "no replica has a session in Consul, and Consul cannot be asked who leads: no Consul", leader: errors.New("no Consul"), change: func(o *store.Overview) {
			o.Replicas.Rows = nil
		}},
		{name: "ReplicaStoppedAfterOneLostItsSession", level: snapshot.Bad, want: "0 replicas, 41 running, behind 0.4 s, nothing fails, leader web-2", need: "no replica is running", change: func(o *store.Overview) {
			for i := range o.Replicas.Rows {
				o.Replicas.Rows[i].State, o.Replicas.Rows[i].Silent = tasks.ReplicaLost, time.Minute
			}
			o.Replicas.Rows[1].State, o.Replicas.Rows[1].Silent = tasks.ReplicaStopped, 20*time.Second
		}},
		{name: "SilentReplica", level: snapshot.Warning, need: "replica web-1 has sent no heartbeat for 6.0 s", change: func(o *store.Overview) { o.Replicas.Rows[0].Silent = 6 * time.Second }},
		{name: "DeadReplica", level: snapshot.Warning, want: "2 replicas, 41 running, behind 0.4 s, nothing fails, leader web-2", need: "replica web-1 died", change: func(o *store.Overview) { o.Replicas.Rows[0].State = tasks.ReplicaDead }},
		{name: "NoLeader", level: snapshot.Warning, want: "3 replicas, 41 running, behind 0.4 s, nothing fails, no leader", need: "there is no leader", leader: none},
		{name: "LeaderUnknown", level: snapshot.Warning, want: "3 replicas, 41 running, behind 0.4 s, nothing fails, leader unknown", leader: errors.New("no Consul")},
		{name: "FarBehind", level: snapshot.Bad, want: "3 replicas, 41 running, behind 2 min, nothing fails, leader web-2", change: func(o *store.Overview) { o.Waiting.Rows[0].Keyless = 2 * time.Minute }},
		{name: "MorePrioritiesThanAreLookedAt", level: snapshot.Good, want: "3 replicas, 41 running, behind at least 0.4 s, nothing fails, leader web-2", change: func(o *store.Overview) {
			o.Waiting.Rows[0].DueMore, o.Waiting.Rows[0].LeftOut = true, true
		}},
		{name: "MoreLimitsThanAreLookedAt", level: snapshot.Good, change: func(o *store.Overview) {
			o.Waiting.Rows = append(o.Waiting.Rows, store.Waiting{Queue: "default", Kind: "noop", Limit: "calls", Due: 1, DueMore: true, LeftOut: true})
		}},
		{name: "ManyReplicasOfWhichOneServesTheQueue", level: snapshot.Good, want: "261 replicas, 41 running, behind 0.4 s, nothing fails, leader web-2", change: func(o *store.Overview) {
			o.Replicas.Rows = nil
			for i := range 260 {
				o.Replicas.Rows = append(o.Replicas.Rows, replica(fmt.Sprintf("web-%d", i), func(r *store.ReplicaGlance) { r.Queues = []string{"default"} }))
			}
			o.Replicas.Rows = append(o.Replicas.Rows, replica("zeta", func(r *store.ReplicaGlance) { r.Queues = []string{"gpu"} }))
			o.Waiting.Rows = append(o.Waiting.Rows, store.Waiting{Queue: "gpu", Kind: "noop", Due: 1})
		}},
		{name: "MoreReplicasThanAreRead", level: snapshot.Good, want: "2000 replicas, 41 running, behind 0.4 s, nothing fails, leader web-2", change: func(o *store.Overview) {
			o.Replicas.Rows = nil
			for i := range store.MostReplicas {
				o.Replicas.Rows = append(o.Replicas.Rows, replica(fmt.Sprintf("web-%d", i), func(r *store.ReplicaGlance) { r.Queues = []string{"default"} }))
			}
			o.Waiting.Rows = append(o.Waiting.Rows, store.Waiting{Queue: "gpu", Kind: "noop", Due: 1})
		}},
		{name: "UnknownCommand", level: snapshot.Bad, need: `tasks of kind exec wait: no live replica that serves their queue has the command "lost" in its configuration`, change: func(o *store.Overview) {
			o.Nameless.Rows = []store.Nameless{{Kind: "exec", Field: "command", Name: "lost", Sample: 5}}
		}},
		{name: "UnknownKind", level: snapshot.Bad, need: "tasks of kind odd wait: no replica knows the kind", change: func(o *store.Overview) {
			o.Waiting.Rows = append(o.Waiting.Rows, store.Waiting{Queue: "default", Kind: "odd", Due: 1})
		}},
		{name: "UnservedQueue", level: snapshot.Bad, need: "tasks wait in queue mail: no replica serves it", change: func(o *store.Overview) {
			o.Waiting.Rows = append(o.Waiting.Rows, store.Waiting{Queue: "mail", Kind: "noop", Due: 1})
			for i := range o.Replicas.Rows {
				o.Replicas.Rows[i].Queues = []string{"default"}
			}
		}},
		{name: "AllStop", level: snapshot.Warning, want: "3 replicas, 41 running, behind 0.4 s, nothing fails, leader web-2", need: "tasks of kind noop wait in queue default: the replicas that could claim them are stopping, or are silent", change: func(o *store.Overview) {
			for i := range o.Replicas.Rows {
				o.Replicas.Rows[i].State = tasks.ReplicaStopping
			}
		}},
		{name: "OneWorksOn", level: snapshot.Good, change: func(o *store.Overview) {
			for i := range o.Replicas.Rows[1:] {
				o.Replicas.Rows[1+i].State = tasks.ReplicaStopping
			}
		}},
		{name: "QueueWithoutTheKind", level: snapshot.Bad, need: "tasks of kind http wait in queue mail: no replica that serves the queue knows the kind", change: func(o *store.Overview) {
			o.Waiting.Rows = append(o.Waiting.Rows, store.Waiting{Queue: "mail", Kind: "http", Due: 1})
			for i := range o.Replicas.Rows {
				o.Replicas.Rows[i].Queues = []string{[]string{"mail", "default", "default"}[i]}
			}
			o.Replicas.Rows[1].Kinds = []string{"noop", "http"}
		}},
		{name: "PausedQueue", level: snapshot.Warning, want: "3 replicas, 41 running, behind 0.4 s, nothing fails, leader web-2", need: "7 due tasks wait in queue mail, which alice has paused: the provider is down", change: func(o *store.Overview) {
			o.Waiting.Rows = append(o.Waiting.Rows, store.Waiting{Queue: "mail", Kind: "noop", Due: 7, Oldest: time.Hour, Keyless: time.Hour})
			o.Paused.Rows = []store.QueueRow{{Name: "mail", PausedBy: "alice", Reason: new("the provider is down")}}
		}},
		{name: "PausedQueueWithoutTasks", level: snapshot.Good, change: func(o *store.Overview) {
			o.Paused.Rows = []store.QueueRow{{Name: "mail", PausedBy: "alice"}}
		}},
		{name: "MissingLimit", level: snapshot.Bad, need: "12 due tasks wait for limit absent, which does not exist", change: func(o *store.Overview) {
			o.Waiting.Rows = append(o.Waiting.Rows, store.Waiting{Queue: "default", Kind: "noop", Limit: "absent", Due: 12})
		}},
		// With RabbitMQ the list has those of the configuration.
		{name: "LimitThatIsNotListed", level: snapshot.Good, change: func(o *store.Overview) {
			o.Waiting.Rows = append(o.Waiting.Rows, store.Waiting{Queue: "default", Kind: "noop", Limit: "unlisted", Due: 12})
		}},
		{name: "LimitThatIsCreatedWhenNeeded", level: snapshot.Good, change: func(o *store.Overview) {
			o.Waiting.Rows = append(o.Waiting.Rows, store.Waiting{Queue: "default", Kind: "noop", Limit: "created", Due: 12})
		}},
		{name: "PausedLimit", level: snapshot.Warning, need: "10,000+ due tasks wait for limit paused, which has no slots", change: func(o *store.Overview) {
			o.Waiting.Rows = append(o.Waiting.Rows, store.Waiting{Queue: "default", Kind: "noop", Limit: "paused", Due: 10001, DueMore: true})
		}},
		{name: "InvalidSchedule", level: snapshot.Bad, need: "schedule s creates no tasks: no such zone", change: func(o *store.Overview) {
			o.Schedules.Rows = []store.ScheduleGlance{{Name: "s", Error: "no such zone", Enabled: true}}
		}},
		{name: "LateSchedule", level: snapshot.Warning, need: "schedule s was due more than a minute ago", change: func(o *store.Overview) {
			o.Schedules.Rows = []store.ScheduleGlance{{Name: "s", Enabled: true, Behind: true}}
		}},
		{name: "Overlap", level: snapshot.Bad, need: "attempts at the tasks 1 (on a) and 2 (on b) overlapped on the lock key k", change: func(o *store.Overview) {
			o.Overlaps.Rows = []tasks.Overlap{{Task: 1, Replica: "a", OtherTask: 2, OtherReplica: "b", LockKey: "k"}}
		}},
		{name: "HeldSnapshot", level: snapshot.Warning, need: "transaction of pid 5", change: func(o *store.Overview) {
			o.Held.Rows = []tasks.HeldSnapshot{{What: "transaction", PID: 5, Age: time.Hour}}
		}},
		{name: "Quarantined", level: snapshot.Bad, want: "3 replicas, 41 running, behind 0.4 s, 1 kind fails, leader web-2", need: "2 tasks were quarantined of kind exec", change: func(o *store.Overview) {
			o.Failures.Rows = []store.Failure{{Kind: "exec", Error: "quarantined: 3 replicas died", Count: 2, First: at(time.Hour), Last: at(time.Minute), Sample: 5}}
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			o := healthy()
			if test.change != nil {
				test.change(&o)
			}
			source := snapshot.New(snapshot.Config{
				Store: &cluster{overview: o},
				Leader: func(context.Context) (*snapshot.Leader, error) {
					switch {
					case test.leader == none:
						return nil, nil
					case test.leader != nil:
						return nil, test.leader
					}
					return &snapshot.Leader{Name: "web-2", Session: "web-2"}, nil
				},
				Limits: func() lock.Semaphores {
					return limits{list: map[string]lock.Semaphore{"paused": {}, "calls": {Slots: 2}}, more: map[string]lock.Semaphore{"unlisted": {Slots: 3}}}
				},
				Slots: func() map[string]int { return map[string]int{"created": 1} },
			})
			s, err := source.Get(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			want := test.want
			if want == "" {
				want = "3 replicas, 41 running, behind 0.4 s, nothing fails, leader web-2"
			}
			if s.Verdict != want || s.Level != test.level {
				t.Errorf("got  %s: %s\nwant %s: %s", s.Level, s.Verdict, test.level, want)
			}
			switch {
			case test.need == "" && len(s.Needs) > 0:
				t.Errorf("it needs somebody: %+v", s.Needs)
			case test.need != "" && (len(s.Needs) == 0 || !strings.Contains(s.Needs[0].Text, test.need)):
				t.Errorf("it needs %+v, want %s", s.Needs, test.need)
			}
			if n := len(o.Replicas.Rows); len(s.Replicas) != min(n, 200) || s.ReplicasLeftOut != n-len(s.Replicas) {
				t.Errorf("of %d replicas %d are listed and %d left out", n, len(s.Replicas), s.ReplicasLeftOut)
			}
			if _, err := json.Marshal(s); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestLimitsHaveHoldersAndWhatWaits(t *testing.T) {
	t.Parallel()
	c := &cluster{}
	c.overview.Waiting.Rows = []store.Waiting{{Limit: "calls", Queue: "a", Kind: "x", Due: 3}, {Limit: "calls", Queue: "b", Kind: "x", Due: 4, DueMore: true}}
	since := time.Now()
	sem := lock.Semaphore{Name: "calls", Slots: 20, Waiting: -1}
	for i := range 12 {
		sem.Holders = append(sem.Holders, lock.SlotHolder{Value: fmt.Append(nil, i), Since: since})
	}
	source := snapshot.New(snapshot.Config{Store: c, Limits: func() lock.Semaphores { return limits{list: map[string]lock.Semaphore{"calls": sem}} },
		Holder: func(value []byte) (string, time.Time) { return "task " + string(value), time.Time{} }})
	s, err := source.Get(t.Context())
	if err != nil || len(s.Limits) != 1 {
		t.Fatal(s.Limits, err)
	}
	l := s.Limits[0]
	if l.Slots != 20 || l.Held != 12 || l.Waiting != -1 || len(l.Holders) != 10 || l.Holders[3].Who != "task 3" || l.Due.String() != "7+" {
		t.Errorf("%+v", l)
	}
}

// RabbitMQ cannot list limits that nobody has named in the configuration. Those that tasks wait for are shown.
func TestLimitsThatCannotBeListed(t *testing.T) {
	t.Parallel()
	c := &cluster{}
	c.overview.Waiting.Rows = []store.Waiting{{Limit: "calls", Queue: "a", Kind: "x", Due: 3}}
	source := snapshot.New(snapshot.Config{Store: c, Limits: func() lock.Semaphores {
		return limits{more: map[string]lock.Semaphore{"calls": {Name: "calls", Slots: 2}}, err: lock.ErrCannotList}
	}})
	s, err := source.Get(t.Context())
	if err != nil || len(s.Limits) != 1 || s.Limits[0].Slots != 2 || slices.ContainsFunc(s.Stale, func(b snapshot.Stale) bool { return b.Block == snapshot.BlockLimits }) {
		t.Errorf("limits %+v, not current %+v, %v", s.Limits, s.Stale, err)
	}
}

// In RabbitMQ a look at a limit takes more than a second if a holder does not answer, and eight
// limits are looked at at a time. One of which the holders are not known has an error.
func TestLimitsWithSilentHolders(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		backend := limits{list: map[string]lock.Semaphore{}, takes: 1300 * time.Millisecond}
		for i := range 24 {
			backend.list[fmt.Sprint("limit", i)] = lock.Semaphore{Slots: 5, Holders: make([]lock.SlotHolder, 5)}
		}
		cfg := snapshot.Config{Store: &cluster{}, Limits: func() lock.Semaphores { return backend }}
		s, err := snapshot.New(cfg).Get(t.Context())
		if err != nil || s.StaleBlock(snapshot.BlockLimits) != nil || len(s.Limits) != 24 {
			t.Fatalf("%+v, %v", s, err)
		}
		for _, l := range s.Limits {
			if l.Error != "" || l.Held != 5 {
				t.Errorf("%+v", l)
			}
		}
		backend.takes = time.Hour
		began := time.Now()
		s, err = snapshot.New(cfg).Get(t.Context())
		if took := time.Since(began); err != nil || took > 5*time.Second {
			t.Fatalf("it took %v, %v", took, err)
		}
		for _, l := range s.Limits {
			if l.Error == "" || l.Held != 0 || l.Waiting != -1 {
				t.Errorf("of one that could not be read: %+v", l)
			}
		}
	})
}

// Any program that may insert a row chooses the name of a limit, and an operator copies the command.
func TestWhatToDoIsSafeToCopy(t *testing.T) {
	t.Parallel()
	c := &cluster{}
	c.overview.Waiting.Rows = []store.Waiting{{Limit: "x; touch owned #", Queue: "a", Kind: "x", Due: 3}}
	source := snapshot.New(snapshot.Config{Store: c, Limits: func() lock.Semaphores { return limits{} }})
	s, err := source.Get(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if want := "onejob limits set 'x; touch owned #' SLOTS"; !slices.ContainsFunc(s.Needs, func(n snapshot.Need) bool { return n.Do == want }) {
		t.Errorf("nothing says %s: %+v", want, s.Needs)
	}
}

func TestErrorsWithOneCauseAreOne(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"exit status 7": "exit status N",
		"Get \"http://10.0.0.7:8080/x\": dial tcp 10.0.0.7:8080: connect: connection refused": "Get \"http://N/x\": dial tcp N: connect: connection refused",
		"no row with id 6f1ed002-ab59-42fb-a0b4-0123456789ab":                                 "no row with id UUID",
		"commit deadbeef12 of 0x1F, defaced, 1234567890":                                      "commit HEX of HEX, defaced, N",
		"": "",
	} {
		if got := snapshot.Mask(text); got != want {
			t.Errorf("Mask(%q) is %q, want %q", text, got, want)
		}
	}
	c := &cluster{}
	early, late := time.Now().Add(-2*time.Hour), time.Now().Add(-time.Minute)
	c.overview.Failures.Rows = []store.Failure{
		{Kind: "exec", Error: "exit status 1", Count: 2, First: store.Time{At: late}, Last: store.Time{At: late}, Sample: 9},
		{Kind: "exec", Error: "exit status 2", Count: 3, First: store.Time{At: early}, Last: store.Time{At: early}, Sample: 3},
		{Kind: "http", Error: "exit status 2", Count: 1, First: store.Time{At: early}, Last: store.Time{At: early}, Sample: 4},
	}
	s, err := snapshot.New(snapshot.Config{Store: c}).Get(t.Context())
	if err != nil || len(s.Failures) != 2 {
		t.Fatal(s.Failures, err)
	}
	if f := s.Failures[0]; f.Kind != "exec" || f.Count != 5 || f.Sample != 9 || !f.First.At.Equal(early) || !f.Last.At.Equal(late) || !f.Recent {
		t.Errorf("%+v", f)
	}
	if s.Failures[1].Recent {
		t.Error("what failed two hours ago is recent")
	}
}

func TestCountsAndSeconds(t *testing.T) {
	t.Parallel()
	for want, c := range map[string]snapshot.Count{
		"0": {}, "999": {N: 999}, "1,234": {N: 1234}, "10,000": {N: 10_000}, "10,000+": {N: 10_001}, "50+": {N: 50, More: true}, "10,000+ ": {N: 123_456, More: true},
	} {
		if got := c.String(); got != strings.TrimSpace(want) {
			t.Errorf("%+v is %s, want %s", c, got, want)
		}
	}
	for want, d := range map[string]time.Duration{
		"0 ms": 0, "250 ms": 250 * time.Millisecond, "4.2 s": 4200 * time.Millisecond, "59 s": 59 * time.Second, "5 min": 5 * time.Minute, "3 h": 3*time.Hour + 59*time.Minute, "12 d": 300 * time.Hour, "-2.0 s": -2 * time.Second, "-106751 d": math.MinInt64,
	} {
		if got := snapshot.Seconds(d).String(); got != want {
			t.Errorf("%v is %s, want %s", d, got, want)
		}
	}
	if b, err := json.Marshal(map[string]any{"a": snapshot.Seconds(1500 * time.Millisecond), "c": snapshot.Count{N: 10_001}}); err != nil || string(b) != `{"a":1.500,"c":{"at_least":10000,"exact":false}}` {
		t.Errorf("%s, %v", b, err)
	}
}
