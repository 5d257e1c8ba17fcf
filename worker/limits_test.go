package worker_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"

	"onejob/internal/testenv"
	"onejob/lock"
	"onejob/lock/consul"
	"onejob/lock/rabbitmq"
	"onejob/tasks"
	"onejob/worker"
)

// semaphores are the cluster's limits, for a test to look at and to change.
func (c *cluster) limited(t *testing.T, name string, k tasks.Kinds, change func(*worker.Config)) *replica {
	t.Helper()
	return c.replica(t, name, k, func(w *worker.Config) {
		w.Limits = w.Locks.(*consul.Locker).Semaphores()
		if change != nil {
			change(w)
		}
	})
}

// inside counts who is inside of a limit, and remembers the most. Nobody leaves
// before as many were inside at once as hold says.
type inside struct{ now, most, hold atomic.Int32 }

func (i *inside) visit(d time.Duration) {
	n := i.now.Add(1)
	for m := i.most.Load(); n > m && !i.most.CompareAndSwap(m, n); m = i.most.Load() {
	}
	for time.Sleep(d); i.most.Load() < i.hold.Load(); {
		time.Sleep(time.Millisecond)
	}
	i.now.Add(-1)
}

func TestLimitHolds(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	var in inside
	k := tasks.Kinds{"noop": tasks.Noop{}}
	tasks.Handle(k, "visit", func(context.Context, *tasks.Attempt, none) (none, error) {
		in.visit(5 * time.Millisecond)
		return none{}, nil
	})
	var replicas []*replica
	for i := range 3 {
		replicas = append(replicas, c.limited(t, fmt.Sprint("r", i), k, func(w *worker.Config) { w.LimitSlots = map[string]int{"three": 3} }))
	}
	const n = 2000
	unlimited := func() time.Duration {
		before := get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE kind = 'noop'")
		c.exec(t, `INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, $1)`, n)
		began := time.Now()
		testenv.Eventually(t, maxWait, "those without a limit are done", func() bool {
			return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE kind = 'noop' AND status = 'succeeded'") == before+n
		})
		return time.Since(began)
	}
	median := func(took []time.Duration) time.Duration {
		slices.Sort(took)
		return took[len(took)/2]
	}
	unlimited() // to warm up
	var alone, waiting, running []time.Duration
	for range 3 {
		alone = append(alone, unlimited())
	}
	// Those with a limit are there, and take turns at waiting and running, so that
	// whatever else this machine does falls on both.
	in.hold.Store(3)
	limits := replicas[0].config.Limits
	if err := limits.Create(t.Context(), "three", 0); err != nil {
		t.Fatal(err)
	}
	c.exec(t, `INSERT INTO onejob.tasks (kind, limit_name) SELECT 'visit', 'three' FROM generate_series(1, $1)`, n)
	for range 3 {
		waiting = append(waiting, unlimited())
		if err := limits.Resize(t.Context(), "three", 3); err != nil {
			t.Fatal(err)
		}
		running = append(running, unlimited())
		if err := limits.Resize(t.Context(), "three", 0); err != nil {
			t.Fatal(err)
		}
		if err := limits.Drain(t.Context(), "three"); err != nil {
			t.Fatal(err)
		}
	}
	left := get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE kind = 'visit' AND status <> 'succeeded'")
	if err := limits.Resize(t.Context(), "three", 3); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	c.awaitAll(t, 10*maxWait)
	base := median(alone)
	t.Logf("%d tasks without a limit took %v alone; while as many with a limit wait beside them %.2f times as long, while 3 of those run %.2f times; the last %d of those took %v",
		n, base, median(waiting).Seconds()/base.Seconds(), median(running).Seconds()/base.Seconds(), left, time.Since(began))
	if most := in.most.Load(); most != 3 {
		t.Errorf("%d were inside at once, with a limit of 3", most)
	}
	testenv.Eventually(t, maxWait, "all slots are free again", func() bool {
		s, err := replicas[0].config.Limits.Inspect(t.Context(), "three")
		return err == nil && len(s.Holders) == 0
	})
	c.noOverlaps(t)
}

func TestLimitThatIsNotThere(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	id := c.insert(t, "kind, limit_name", "noop", "later")
	r := c.limited(t, "a", kinds(nil), nil)
	if got := r.logged(t, "limit_unknown")["limit"]; got != "later" {
		t.Errorf("reported limit %v", got)
	}
	c.await(t, c.insert(t, "kind", "noop"), "succeeded") // the others go on
	if err := r.config.Limits.Create(t.Context(), "later", 0); err != nil {
		t.Fatal(err)
	}
	c.await(t, c.insert(t, "kind", "noop"), "succeeded")
	if got := get[string](t, c, "SELECT status FROM onejob.tasks WHERE id = $1", id); got != "pending" {
		t.Errorf("with 0 slots the task is %s", got)
	}
	if err := r.config.Limits.Resize(t.Context(), "later", 1); err != nil {
		t.Fatal(err)
	}
	c.await(t, id, "succeeded")
	if n := r.events.FilterMessage("limit_unknown").Len(); n != 1 {
		t.Errorf("reported %d times", n)
	}
}

func TestKindWithALimit(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	var in inside
	k := tasks.Kinds{}
	tasks.Handle(k, "visit", func(context.Context, *tasks.Attempt, none) (none, error) {
		in.visit(20 * time.Millisecond)
		return none{}, nil
	})
	change := func(w *worker.Config) {
		w.LimitSlots, w.KindLimits = map[string]int{"one": 1}, map[string]string{"visit": "one"}
	}
	c.limited(t, "a", k, change)
	c.limited(t, "b", k, change)
	c.exec(t, `INSERT INTO onejob.tasks (kind) SELECT 'visit' FROM generate_series(1, 30)`)
	c.awaitAll(t, 5*maxWait)
	if most := in.most.Load(); most != 1 {
		t.Errorf("%d were inside at once, with a limit of 1", most)
	}
}

// sessionless are limits whose backend has no session, so that none of its slots can be had. It is a fake: a
// replica whose session is lost has none for seconds, and this one has its tasks locked meanwhile.
type sessionless struct{ takes }

func (s sessionless) Take(context.Context, string, int, []byte) ([]lock.Lease, error) {
	s.n.Add(1)
	return nil, lock.ErrLost
}

// Several kinds have one limit, and a row names it as well. While its slots cannot be had, nobody is asked
// without a pause.
func TestALimitOfSeveralKindsRests(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	var n atomic.Int64
	var a asked
	k := kinds(nil)
	k["other"] = tasks.Noop{}
	c.limited(t, "a", k, func(w *worker.Config) {
		a.Store, w.Store = w.Store, &a
		w.Limits = sessionless{takes{w.Limits, &n}}
		w.LimitSlots, w.KindLimits = map[string]int{"one": 1}, map[string]string{"noop": "one", "other": "one"}
	})
	c.insert(t, "kind", "noop")
	c.insert(t, "kind", "other")
	c.insert(t, "kind, limit_name", "greet", "one")
	testenv.Eventually(t, maxWait, "a slot is asked for", func() bool { return n.Load() > 0 })
	began, slots, looks := time.Now(), n.Load(), a.limits.Load()
	time.Sleep(2 * time.Second)
	rounds := int64(time.Since(began)/(40*time.Millisecond)) + 2 // a pause is 50 ms at least
	if got := n.Load() - slots; got > rounds {
		t.Errorf("%d slots were asked for in %v", got, time.Since(began))
	}
	if got := int64(a.limits.Load() - looks); got > rounds {
		t.Errorf("Postgres was asked %d times for limits in %v", got, time.Since(began))
	}
}

// Rows that name a limit do not keep those waiting that have it by their kind, nor these them.
func TestRowsOfALimitTakeTurns(t *testing.T) {
	t.Parallel()
	for _, named := range []bool{true, false} {
		t.Run(fmt.Sprintf("named is %v", named), func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			begin := make(chan struct{})
			k := tasks.Kinds{}
			tasks.Handle(k, "visit", func(ctx context.Context, _ *tasks.Attempt, _ none) (none, error) {
				select {
				case <-begin:
				case <-ctx.Done():
				}
				return none{}, nil
			})
			many, one := new("one"), (*string)(nil)
			if !named {
				many, one = one, many
			}
			c.exec(t, `INSERT INTO onejob.tasks (kind, priority, limit_name) SELECT 'visit', 9, $1 FROM generate_series(1, 100)`, many)
			c.limited(t, "a", k, func(w *worker.Config) {
				w.LimitSlots, w.KindLimits = map[string]int{"one": 1}, map[string]string{"visit": "one"}
			})
			testenv.Eventually(t, maxWait, "one runs", func() bool {
				return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'running'") == 1
			})
			other := c.insert(t, "kind, limit_name", "visit", one)
			close(begin)
			c.awaitAll(t, 5*maxWait)
			if before := get[int](t, c, "SELECT count(*) FROM onejob.attempts WHERE fence < (SELECT fence FROM onejob.tasks WHERE id = $1)", other); before > 10 {
				t.Errorf("%d of 100 were before it", before)
			}
		})
	}
}

// unlisted is a backend that cannot tell which limits there are.
type unlisted struct{ lock.Semaphores }

func (unlisted) List(context.Context) ([]string, error) { return nil, nil }

// Rows that name limits which do not exist keep those of a limit that does from
// nothing, however many they are, and do not fill the log: with a backend that lists
// its limits, and with one that must be asked for each name.
func TestUnknownLimitsStarveNobody(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name    string
		unknown int
		lists   bool
	}{
		{"Listed", 3000, true},
		{"AskedForByName", 900, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			c.exec(t, `INSERT INTO onejob.tasks (kind, limit_name) SELECT 'noop', 'unknown-' || i FROM generate_series(1, $1) i`, test.unknown)
			r := c.limited(t, "a", kinds(nil), func(w *worker.Config) {
				if !test.lists {
					w.Limits = unlisted{w.Limits}
				}
			})
			r.logged(t, "limit_unknown")
			if err := r.config.Limits.Create(t.Context(), "zzz", 1); err != nil {
				t.Fatal(err)
			}
			id := c.insert(t, "kind, limit_name", "noop", "zzz")
			testenv.Eventually(t, 4*maxWait, "the task of the limit that is there is done", func() bool {
				return get[string](t, c, "SELECT status FROM onejob.tasks WHERE id = $1", id) == "succeeded"
			})
			if n := get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'pending'"); n != test.unknown {
				t.Errorf("%d tasks are waiting, want the %d of limits that do not exist", n, test.unknown)
			}
			if n := r.events.FilterMessage("limit_unknown").Len(); n > 256 {
				t.Errorf("limit_unknown was logged %d times", n)
			}
			if !test.lists { // so many names have been looked for by now
				if n := r.events.FilterMessage("limits_unknown").Len(); n != 1 {
					t.Errorf("limits_unknown was logged %d times", n)
				}
			}
		})
	}
}

// away are limits whose server cannot be asked, until back is closed.
type away struct {
	lock.Semaphores
	back         chan struct{}
	asked, taken atomic.Int32
}

func (l *away) List(context.Context) ([]string, error) { return nil, errors.New("away") }

func (l *away) Inspect(context.Context, string) (lock.Semaphore, error) {
	l.asked.Add(1)
	select {
	case <-l.back:
		return lock.Semaphore{}, lock.ErrNoSemaphore
	default:
		return lock.Semaphore{}, errors.New("away")
	}
}

func (l *away) Take(context.Context, string, int, []byte) ([]lock.Lease, error) {
	l.taken.Add(1)
	return nil, errors.New("away")
}

// A name does not become that of a limit because nobody can be asked whether it is one.
func TestUnknownLimitsWhileNobodyAnswers(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.exec(t, `INSERT INTO onejob.tasks (kind, limit_name) SELECT 'noop', 'unknown-' || i FROM generate_series(1, 20) i`)
	limits := &away{back: make(chan struct{})}
	r := c.replica(t, "a", kinds(nil), func(w *worker.Config) { w.Limits = limits })
	testenv.Eventually(t, maxWait, "it was asked some times", func() bool { return limits.asked.Load() >= 2 })
	close(limits.back)
	r.logged(t, "limit_unknown")
	if n := limits.taken.Load(); n > 0 {
		t.Errorf("slots were asked for %d times", n)
	}
}

// A replica that holds a slot dies: its slot and its task are taken over.
func TestSlotOfADeadReplicaComesFree(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	began := make(chan string, 10)
	change := func(w *worker.Config) { w.LimitSlots = map[string]int{"one": 1} }
	a := c.limited(t, "a", kinds(began), change)
	id := c.insert(t, "kind, limit_name", "wait", "one")
	<-began
	b := c.limited(t, "b", kinds(began), change)
	behind := c.insert(t, "kind, limit_name", "noop", "one")
	c.endSession(t, a)
	<-began // by either of them
	c.exec(t, "SELECT onejob.cancel($1)", id)
	c.await(t, id, "cancelled")
	c.await(t, behind, "succeeded")
	_ = b
}

// Rows with a limit that were due while there was no room are begun when there
// is, though nothing new is heard of them.
func TestLimitWaitsForRoom(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	began := make(chan string, 10)
	c.limited(t, "a", kinds(began), func(w *worker.Config) {
		w.Concurrency, w.Poll, w.LimitSlots = 2, "@every 1h", map[string]int{"many": 5}
	})
	plain := c.insert(t, "kind", "wait")
	<-began
	c.exec(t, `INSERT INTO onejob.tasks (kind, limit_name, priority) VALUES ('wait', 'many', 1), ('noop', 'many', 0)`)
	<-began // and now there is no room
	behind := get[int64](t, c, "SELECT id FROM onejob.tasks WHERE kind = 'noop'")
	if got := get[string](t, c, "SELECT status FROM onejob.tasks WHERE id = $1", behind); got != "pending" {
		t.Errorf("with no room the task is %s", got)
	}
	c.exec(t, "SELECT onejob.cancel($1)", plain)
	c.await(t, behind, "succeeded")

	plain = c.insert(t, "kind", "wait")
	<-began
	late := c.insert(t, "kind, limit_name", "noop", "many")
	c.exec(t, "SELECT onejob.cancel($1)", plain)
	c.await(t, late, "succeeded")
	c.exec(t, "SELECT onejob.cancel(id) FROM onejob.tasks WHERE status = 'running'")
	c.awaitAll(t, 5*maxWait)
}

// asked counts what a replica asks the database for.
type asked struct {
	worker.Store
	claims, limits atomic.Int32
}

func (a *asked) Limited(ctx context.Context) (bool, error) {
	a.limits.Add(1)
	return a.Store.Limited(ctx)
}

func (a *asked) UnknownLimits(ctx context.Context, known []string, n int) ([]string, error) {
	a.limits.Add(1)
	return a.Store.UnknownLimits(ctx, known, n)
}

func (a *asked) DueKinds(ctx context.Context, c tasks.Claim) ([]string, error) {
	a.limits.Add(1)
	return a.Store.DueKinds(ctx, c)
}

func (a *asked) Claim(ctx context.Context, c tasks.Claim) (tasks.Claimed, error) {
	a.claims.Add(1)
	return a.Store.Claim(ctx, c)
}

func (a *asked) DueLimits(ctx context.Context, c tasks.Claim, names []string) ([]string, error) {
	a.limits.Add(1)
	return a.Store.DueLimits(ctx, c, names)
}

// slowLimits takes long to say which limits have due rows.
type slowLimits struct {
	worker.Store
	looks *atomic.Int32
}

const slowLimit = 300 * time.Millisecond

func (s slowLimits) DueLimits(ctx context.Context, c tasks.Claim, names []string) ([]string, error) {
	s.looks.Add(1)
	time.Sleep(slowLimit)
	return s.Store.DueLimits(ctx, c, names)
}

// I8: where the look for due limits takes long, tasks without a limit do not wait for one each time.
func TestSlowLooksForLimitsRest(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	var looks atomic.Int32
	c.limited(t, "a", kinds(nil), func(w *worker.Config) {
		w.Store, w.LimitSlots = slowLimits{w.Store, &looks}, map[string]int{"l": 1}
	})
	began := time.Now()
	for range 60 {
		c.await(t, c.insert(t, "kind", "noop"), "succeeded")
	}
	took := time.Since(began)
	if n, most := int(looks.Load()), 2+int(took/(20*slowLimit)); n > most {
		t.Errorf("within %v limits were looked for %d times, want at most %d", took, n, most)
	}
	c.await(t, c.insert(t, "kind, limit_name", "noop", "l"), "succeeded")
}

// slow answers limited claims late, and fails the others that find nothing, so that
// there is an audit at every look.
type slow struct{ worker.Store }

func (s slow) Claim(ctx context.Context, c tasks.Claim) (tasks.Claimed, error) {
	claimed, err := s.Store.Claim(ctx, c)
	if c.Limit != "" {
		time.Sleep(5 * time.Millisecond)
	} else if err == nil && len(claimed.Tasks) == 0 {
		err = errors.New("made up by the test")
	}
	return claimed, err
}

// The audit takes no task for unheard whose claim is under way.
func TestAuditBesideLimitedClaims(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	var runs atomic.Int32
	k := tasks.Kinds{}
	tasks.Handle(k, "count", func(context.Context, *tasks.Attempt, none) (none, error) {
		runs.Add(1)
		return none{}, nil
	})
	r := c.limited(t, "a", k, func(w *worker.Config) { w.Store, w.LimitSlots = slow{w.Store}, map[string]int{"four": 4} })
	const n = 400
	for range n / 10 {
		c.exec(t, `INSERT INTO onejob.tasks (kind, limit_name) SELECT 'count', 'four' FROM generate_series(1, 10)`)
	}
	c.awaitAll(t, 10*maxWait)
	if got := runs.Load(); got != n {
		t.Errorf("%d tasks ran %d times", n, got)
	}
	for _, event := range []string{"claim_reply_lost", "completion_refused"} {
		if got := r.events.FilterMessage(event).Len(); got > 0 {
			t.Errorf("%d x %s", got, event)
		}
	}
	if r.events.FilterMessage("claim_failed").Len() == 0 {
		t.Error("there was no reason for an audit")
	}
}

// Who has no limits does not pay for them with a question at every claim.
func TestLimitsCostNothingUnused(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	var a asked
	c.limited(t, "a", kinds(nil), func(w *worker.Config) {
		a.Store, w.Store = w.Store, &a
		w.Concurrency, w.LimitSlots = 2, map[string]int{"idle": 1} // each claim takes few, and each end of an attempt is followed by one
	})
	began := time.Now()
	c.exec(t, `INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, 1000)`)
	c.awaitAll(t, 5*maxWait)
	claims, limits, seconds := a.claims.Load(), a.limits.Load(), int32(time.Since(began).Seconds())
	t.Logf("1000 tasks took %d claims in %d s, and %d questions for limits", claims, seconds, limits)
	if limits > claims/4+3*seconds { // there are some each second, however slow the machine is
		t.Error("that is too many")
	}
}

// takes counts how often slots are asked for.
type takes struct {
	lock.Semaphores
	n *atomic.Int64
}

func (s takes) Take(ctx context.Context, name string, n int, value []byte) ([]lock.Lease, error) {
	s.n.Add(1)
	return s.Semaphores.Take(ctx, name, n, value)
}

// broken counts how often slots are asked for of a backend that is not able to give any. It is a
// fake: a real one is broken like that while a part of it is down.
type broken struct {
	takes
	repaired *atomic.Bool
}

func (s broken) Take(ctx context.Context, name string, n int, value []byte) ([]lock.Lease, error) {
	if !s.repaired.Load() {
		s.n.Add(1)
		return nil, errors.New("the node is down")
	}
	return s.takes.Take(ctx, name, n, value)
}

// A limit whose backend fails is not asked for again with each task that comes.
func TestFailingLimitRests(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	var n atomic.Int64
	var repaired atomic.Bool
	c.limited(t, "a", kinds(nil), func(w *worker.Config) {
		w.Limits, w.LimitSlots = broken{takes{w.Limits, &n}, &repaired}, map[string]int{"one": 1}
	})
	waiting := c.insert(t, "kind, limit_name", "noop", "one")
	testenv.Eventually(t, maxWait, "a slot is asked for", func() bool { return n.Load() > 0 })
	began, before := time.Now(), n.Load()
	for range 50 {
		c.await(t, c.insert(t, "kind", "noop"), "succeeded")
	}
	most := int64(time.Since(began)/(700*time.Millisecond)) + 2 // a rest lasts for 0.8 s at least
	if got := n.Load() - before; got > most {
		t.Errorf("a slot was asked for %d times beside 50 tasks, want %d at most", got, most)
	}
	repaired.Store(true)
	c.await(t, waiting, "succeeded")
}

// A task whose lock key is held elsewhere does not take a slot again and again, and begins soon
// when the key comes free; another task begins at once.
func TestLimitWaitsForALockKey(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	release := make(chan struct{})
	hold := tasks.Kinds{}
	tasks.Handle(hold, "hold", func(ctx context.Context, _ *tasks.Attempt, _ none) (none, error) {
		select {
		case <-release:
		case <-ctx.Done():
		}
		return none{}, nil
	})
	c.replica(t, "holder", hold, nil)
	holder := c.insert(t, "kind, lock_key", "hold", "k")
	c.await(t, holder, "running")
	var n atomic.Int64
	c.limited(t, "waiter", kinds(nil), func(w *worker.Config) {
		w.Limits, w.LimitSlots = takes{w.Limits, &n}, map[string]int{"two": 2}
	})
	waiting := c.insert(t, "kind, lock_key, limit_name", "noop", "k", "two")
	testenv.Eventually(t, maxWait, "a slot is taken for it", func() bool { return n.Load() > 0 })
	before, began := n.Load(), time.Now()
	time.Sleep(4 * time.Second)
	testenv.Eventually(t, maxWait, "a slot is taken again, and again", func() bool { return n.Load() >= before+2 })
	if got, most := n.Load()-before, int64(5*time.Since(began).Seconds()); got > most {
		t.Errorf("a slot was taken %d times in %v, want %d at most", got, time.Since(began), most)
	}
	began = time.Now()
	c.await(t, c.insert(t, "kind, limit_name", "noop", "two"), "succeeded")
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("a task with a free key took %v", took)
	}
	before = n.Load()
	testenv.Eventually(t, maxWait, "the pause has grown again", func() bool { return n.Load() >= before+2 })
	close(release)
	c.await(t, holder, "succeeded")
	began = time.Now()
	c.await(t, waiting, "succeeded")
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("it began %v after its key came free", took)
	}
}

// inRabbitMQ returns limits that are kept there, of a connection of their own.
func inRabbitMQ(t *testing.T, url string) lock.Semaphores {
	t.Helper()
	log, _ := testenv.Logger(t)
	limits, err := rabbitmq.New(rabbitmq.Config{URL: url, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- limits.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return limits
}

// While limits.backend is changed at one replica after the other, a limit is no sum of two.
func TestLimitInTwoBackends(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	limits := inRabbitMQ(t, testenv.RabbitMQ(t).URL)
	began, leave := make(chan struct{}, 10), make(chan struct{})
	k := tasks.Kinds{}
	tasks.Handle(k, "visit", func(ctx context.Context, _ *tasks.Attempt, _ none) (none, error) {
		began <- struct{}{}
		select {
		case <-leave:
		case <-ctx.Done():
		}
		return none{}, ctx.Err()
	})
	slots := func(w *worker.Config) { w.LimitSlots = map[string]int{"one": 1} }
	a := c.limited(t, "a", k, func(w *worker.Config) { slots(w); w.LimitsBackend, w.ShutdownGrace = "consul", 10*time.Millisecond })
	c.exec(t, `INSERT INTO onejob.tasks (kind, limit_name) SELECT 'visit', 'one' FROM generate_series(1, 4)`)
	<-began
	b := c.replica(t, "b", k, func(w *worker.Config) { slots(w); w.Limits, w.LimitsBackend = limits, "rabbitmq" })
	if said := fmt.Sprint(b.logged(t, "limit_failed")["error"]); !strings.Contains(said, "replica a keeps limits in consul, and this one in rabbitmq") {
		t.Errorf("b says: %s", said)
	}
	c.await(t, c.insert(t, "kind", "visit"), "running") // rows without a limit run at both
	if n := get[int](t, c, "SELECT count(*)::int FROM onejob.tasks WHERE status = 'running' AND limit_name IS NOT NULL"); n != 1 {
		t.Errorf("%d run under a limit of 1", n)
	}
	if err := a.stop(); err != nil { // its tasks are requeued
		t.Error(err)
	}
	close(leave)
	c.awaitAll(t, 5*maxWait) // b makes the limit, and looks at 10,000 slots before
	c.noOverlaps(t)
	if n := get[int](t, c, "SELECT count(*)::int FROM onejob.attempts WHERE replica = 'b' AND task_id <= 4"); n == 0 {
		t.Error("b worked on nothing with a limit")
	}
}

func TestLimitHoldsOnRabbitMQ(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	vhost := testenv.RabbitMQ(t)
	var in inside
	k := tasks.Kinds{}
	tasks.Handle(k, "visit", func(context.Context, *tasks.Attempt, none) (none, error) {
		in.visit(5 * time.Millisecond)
		return none{}, nil
	})
	for i := range 2 {
		limits := inRabbitMQ(t, vhost.URL)
		c.replica(t, fmt.Sprint("r", i), k, func(w *worker.Config) {
			w.Limits, w.LimitSlots = limits, map[string]int{"two": 2}
		})
	}
	in.hold.Store(2)
	c.exec(t, `INSERT INTO onejob.tasks (kind, limit_name) SELECT 'visit', 'two' FROM generate_series(1, 60)`)
	c.awaitAll(t, 5*maxWait)
	if most := in.most.Load(); most != 2 {
		t.Errorf("%d were inside at once, with a limit of 2", most)
	}
	c.noOverlaps(t)
}

// Nobody can stop a handler in Go that ignores its context. Run returns nevertheless, and
// says so; its session has ended by then, and another replica takes the task over.
func TestHandlerThatNeverReturns(t *testing.T) {
	t.Parallel()
	for name, limit := range map[string]any{"without a limit": nil, "with a limit": "one"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			slots := func(w *worker.Config) {
				w.ShutdownGrace, w.LimitSlots = 10*time.Millisecond, map[string]int{"one": 1}
			}
			began, end := make(chan struct{}), make(chan struct{})
			k := tasks.Kinds{}
			tasks.Handle(k, "deaf", func(context.Context, *tasks.Attempt, none) (none, error) {
				close(began)
				<-end
				return none{}, nil
			})
			a := c.limited(t, "a", k, slots)
			stop := a.stop
			a.stop = func() error { close(end); return nil } // what is left to do in the end
			session := a.locks.Session()
			id := c.insert(t, "kind, lock_key, limit_name", "deaf", "shared", limit)
			<-began

			stopped := make(chan error, 1)
			go func() { stopped <- stop() }()
			select {
			case err := <-stopped:
				if err == nil || !strings.Contains(err.Error(), "1 tasks were still running") {
					t.Errorf("Run returned %v", err)
				}
			case <-time.After(maxWait):
				t.Fatalf("Run has not returned within %v", maxWait)
			}
			if entry, _, err := c.kv.Client.Session().Info(session, nil); entry != nil || err != nil {
				t.Errorf("its session is %+v, %v; want none", entry, err)
			}
			c.limited(t, "b", tasks.Kinds{"deaf": tasks.Noop{}}, slots)
			c.await(t, id, "succeeded")
			if got := c.outcomes(t, id); got != "lease_lost succeeded" {
				t.Errorf("outcomes: %s", got)
			}
			// A stop uses up no attempt, and is no crash.
			if got := get[string](t, c, "SELECT format('%s %s', attempt, crashes) FROM onejob.tasks WHERE id = $1", id); got != "1 0" {
				t.Errorf("attempts and crashes: %s, want 1 and 0", got)
			}
			c.noOverlaps(t)
		})
	}
}

// I8: rows with a limit are served in their turn beside a backlog of rows without one.
func TestLimitsBesideABacklog(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.limited(t, "r", tasks.Kinds{"noop": tasks.Noop{}}, func(w *worker.Config) {
		w.LimitSlots, w.Concurrency, w.Log = map[string]int{"idle": 1}, 1000, zap.NewNop()
	})
	const n = 20_000
	c.await(t, c.insert(t, "kind, limit_name", "noop", "idle"), "succeeded") // the limit is made
	c.exec(t, `INSERT INTO onejob.tasks (kind) SELECT 'noop' FROM generate_series(1, $1)`, n)
	testenv.Eventually(t, maxWait, "some are done", func() bool {
		return get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'succeeded'") > 300
	})
	for range 3 {
		id := c.insert(t, "kind, priority, limit_name", "noop", 1000, "idle")
		c.await(t, id, "succeeded")
	}
	if left := get[int](t, c, "SELECT count(*) FROM onejob.tasks WHERE status = 'pending'"); left == 0 {
		t.Errorf("three urgent rows with a limit were done after %d others", n)
	}
	c.exec(t, "DELETE FROM onejob.tasks WHERE status = 'pending'")
	c.awaitAll(t, maxWait)
}

// I8: a limit with more slots than a replica has room does not take all that comes free, neither
// from tasks without one nor from another limit.
func TestManySlotsBesideOthers(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	k := tasks.Kinds{"noop": tasks.Noop{}}
	tasks.Handle(k, "long", func(ctx context.Context, _ *tasks.Attempt, _ none) (none, error) {
		sleep := time.NewTimer(100*time.Millisecond + rand.N(200*time.Millisecond))
		defer sleep.Stop()
		select {
		case <-sleep.C:
		case <-ctx.Done():
		}
		return none{}, nil
	})
	c.limited(t, "r", k, func(w *worker.Config) {
		w.LimitSlots, w.Concurrency = map[string]int{"many": 10, "more": 10}, 3
	})
	const n = 2000
	c.exec(t, `INSERT INTO onejob.tasks (kind, limit_name) SELECT 'long', 'many' FROM generate_series(1, $1)`, n)
	done := func(limit string) int {
		return get[int](t, c, `SELECT count(*) FROM onejob.tasks WHERE limit_name = '`+limit+`' AND status = 'succeeded'`)
	}
	testenv.Eventually(t, maxWait, "some are done", func() bool { return done("many") > 10 })
	c.exec(t, `INSERT INTO onejob.tasks (kind, limit_name) SELECT 'long', 'more' FROM generate_series(1, $1)`, n)
	for range 5 {
		c.await(t, c.insert(t, "kind", "noop"), "succeeded")
	}
	testenv.Eventually(t, maxWait, "some of the other limit are done", func() bool { return done("more") > 10 })
	if all := done("many"); all > n/2 {
		t.Errorf("%d tasks of the first limit were done meanwhile", all)
	}
	c.exec(t, "DELETE FROM onejob.tasks WHERE status = 'pending'")
	c.awaitAll(t, maxWait)
}

// Tasks that come and end, and have nothing to do with it, do not let slots be taken in vain more
// often.
func TestLimitWaitsForALockKeyBesideOthers(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	release := make(chan struct{})
	hold := tasks.Kinds{}
	tasks.Handle(hold, "hold", func(ctx context.Context, _ *tasks.Attempt, _ none) (none, error) {
		select {
		case <-release:
		case <-ctx.Done():
		}
		return none{}, nil
	})
	c.replica(t, "holder", hold, nil)
	holder := c.insert(t, "kind, lock_key", "hold", "k")
	c.await(t, holder, "running")
	var n atomic.Int64
	c.limited(t, "waiter", kinds(nil), func(w *worker.Config) {
		w.Limits, w.LimitSlots = takes{w.Limits, &n}, map[string]int{"two": 2}
	})
	waiting := c.insert(t, "kind, lock_key, limit_name", "noop", "k", "two")
	testenv.Eventually(t, maxWait, "a slot is taken for it", func() bool { return n.Load() > 0 })
	before, began := n.Load(), time.Now()
	others := 0
	for ; time.Since(began) < 5*time.Second; others++ {
		c.insert(t, "kind", "noop")
	}
	if got, most := n.Load()-before, 10+2*int64(time.Since(began).Seconds()); got > most {
		t.Errorf("a slot was taken %d times in %v beside %d other tasks, want at most %d", got, time.Since(began), others, most)
	}
	close(release)
	c.await(t, holder, "succeeded")
	c.await(t, waiting, "succeeded")
	c.awaitAll(t, maxWait)
}

// stalledLimits are limits whose server grants slots, and does not answer those who give one back until it
// may. It is a fake: RabbitMQ does that while it waits for its store.
type stalledLimits struct {
	lock.Semaphores
	may chan struct{}
}

type stalledSlot struct {
	lock.Lease
	may chan struct{}
}

func (l stalledLimits) Take(ctx context.Context, name string, n int, value []byte) ([]lock.Lease, error) {
	leases, err := l.Semaphores.Take(ctx, name, n, value)
	for i := range leases {
		leases[i] = stalledSlot{leases[i], l.may}
	}
	return leases, err
}

func (s stalledSlot) Release(ctx context.Context) error {
	<-s.may
	return s.Lease.Release(ctx)
}

// A stop during which the slot of a task that has ended cannot be given back is no stop during which a task runs on.
func TestStopWhileASlotCannotBeGivenBack(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	began := make(chan string, 1)
	may := make(chan struct{})
	r := c.limited(t, "a", kinds(began), func(w *worker.Config) {
		w.Limits, w.LimitSlots, w.ShutdownGrace = stalledLimits{w.Limits, may}, map[string]int{"one": 1}, time.Second
	})
	id := c.insert(t, "kind, limit_name", "wait", "one")
	<-began
	r.cancel()
	c.await(t, id, "pending")
	time.AfterFunc(14*time.Second, func() { close(may) })
	if err := r.stop(); err != nil {
		t.Errorf("the stop: %v", err)
	}
	if n := r.events.FilterMessage("drain_incomplete").Len(); n != 0 {
		t.Error("it is reported that a task still ran")
	}
}

// silentLimits are limits whose server does not answer. No real one is silent for one
// request alone, and quick for all others.
type silentLimits struct {
	lock.Semaphores
	asked atomic.Int32
}

func (l *silentLimits) List(context.Context) ([]string, error) {
	return []string{"a", "b", "c", "d"}, nil
}

func (l *silentLimits) Take(ctx context.Context, _ string, _ int, _ []byte) ([]lock.Lease, error) {
	l.asked.Add(1)
	<-ctx.Done()
	return nil, ctx.Err()
}

// I8: limits whose server does not answer keep no room from rows without one.
func TestLimitsThatDoNotAnswer(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	silent := &silentLimits{}
	c.replica(t, "r", tasks.Kinds{"noop": tasks.Noop{}}, func(w *worker.Config) { w.Limits, w.Concurrency = silent, 2 })
	for _, name := range []string{"a", "b", "c", "d"} {
		c.insert(t, "kind, limit_name", "noop", name)
	}
	testenv.Eventually(t, maxWait, "slots of all limits were asked for", func() bool { return silent.asked.Load() >= 4 })
	for range 5 {
		c.await(t, c.insert(t, "kind", "noop"), "succeeded")
	}
}

// denied refuses every lock, as a Consul does whose token lost a right; slots can be had.
type denied struct{ lock.Locker }

func (denied) Acquire(context.Context, lock.Request) (lock.Lease, error) {
	return nil, errors.New("permission denied")
}

// While no lock can be had, tasks under a limit are claimed as seldom as others.
func TestLimitsWithoutLocks(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	began := time.Now()
	c.limited(t, "r", tasks.Kinds{"noop": tasks.Noop{}}, func(w *worker.Config) {
		w.Locks, w.LimitSlots = denied{w.Locks}, map[string]int{"few": 3}
	})
	if _, err := c.pool.Exec(t.Context(), `INSERT INTO onejob.tasks (kind, limit_name) SELECT 'noop', 'few' FROM generate_series(1, 500)`); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, maxWait, "some were tried", func() bool {
		return get[int](t, c, `SELECT count(*) FROM onejob.tasks WHERE fence IS NOT NULL`) >= 5
	})
	// One at a time passes the gate in a second; before it closed, three slots had one each.
	if tried, most := get[int](t, c, `SELECT count(*) FROM onejob.tasks WHERE fence IS NOT NULL`), 10+int(time.Since(began).Seconds()); tried > most {
		t.Errorf("%d tasks were claimed in %v", tried, time.Since(began))
	}
}
