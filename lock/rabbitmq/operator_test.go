package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"onejob/internal/servers"
	"onejob/internal/testenv"
	"onejob/lock"
)

// TestHole: an A queue deleted by hand ends the semaphore there for those who
// come, and throws nobody out. The next change of the limit repairs it.
func TestHole(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	s := start(t, patient(t, v))
	createLimit(t, s, "k", 4)
	leases := takeAll(t, s, "k", 4, nil)
	deleteQueue(t, v, "onejob/k/2-A")
	var sem lock.Semaphore
	err := persist(func() (err error) {
		sem, err = s.Inspect(t.Context(), "k")
		return err
	})
	if err != nil || sem.Slots != 1 || len(sem.Holders) != 4 {
		t.Errorf("with a hole: %+v, %v; want 1 slot and 4 holders", sem, err)
	}
	// However far the slots behind a hole reach, a change finds them.
	began := time.Now()
	createLimit(t, s, "far", 200)
	t.Logf("to make 200 slots took %v", time.Since(began).Round(time.Millisecond))
	deleteQueue(t, v, "onejob/far/1-A")
	for i, lease := range leases {
		if err := lease.Context().Err(); err != nil {
			t.Errorf("a holder was thrown out: %v", context.Cause(lease.Context()))
		}
		wantFull(t, s, "k", fmt.Sprintf("with %d inside", len(leases)-i))
		if err := lease.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	began = time.Now()
	destroyLimit(t, s, "far")
	t.Logf("to destroy 199 slots behind a hole took %v", time.Since(began).Round(time.Millisecond))
	for _, slots := range []int{2, 1, 5, 0} { // 3 and 4 were leaked locks until now
		if err := persist(func() error { return s.Resize(t.Context(), "k", slots) }); err != nil {
			t.Fatal(err)
		}
		var want []string
		for slot := range slots {
			want = append(want, s.cfg.names("k").a(slot+1))
		}
		if got := aQueues(t, v); !slices.Equal(got, want) {
			t.Errorf("with %d slots there are %q, want %q", slots, got, want)
		}
	}
}

// TestLeftFarAway: what others have left is found on any slot when a limit is made or destroyed.
func TestLeftFarAway(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	s, err := New(patient(t, v))
	if err != nil {
		t.Fatal(err)
	}
	s.farthest = 5000 // a busy broker has no time for more
	run(t, s)
	n, other := s.cfg.names("k"), channel(t, plain(t, v))
	slot := func(number int) {
		t.Helper()
		if err := declareDurable(other, n.a(number)); err != nil {
			t.Fatal(err)
		}
	}
	slot(s.farthest) // of a limit whose creation was cut short
	if _, err := other.QueueDeclare(n.b(s.farthest-1), false, false, true, false, nil); err != nil {
		t.Fatal(err)
	}
	createLimit(t, s, "k", 2)
	if got := aQueues(t, v); !slices.Equal(got, n.as(1, 2)) {
		t.Errorf("with 2 slots there are %q", got)
	}
	lease := take(t, s, "k")
	wantFull(t, s, "k", "beside a holder far away")
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := other.QueueDelete(n.b(s.farthest-1), false, false, false); err != nil {
		t.Fatal(err)
	}
	slot(s.farthest)
	destroyLimit(t, s, "k")
	if got := aQueues(t, v); len(got) > 0 {
		t.Errorf("after the end there are %q", got)
	}
}

func aQueues(t testing.TB, v *testenv.Vhost) []string {
	return slices.DeleteFunc(v.Queues(t), func(queue string) bool { return !strings.HasSuffix(queue, "-A") })
}

// TestDeletedHolder: a B queue deleted by hand ends its lease. Nobody has the slot
// before the holder lets go, except clients that do not know of delay queues: they
// keep it when the holder lets go.
func TestDeletedHolder(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	a, z := start(t, config(t, v)), start(t, config(t, v))
	if err := a.Create(t.Context(), "k", 1); err != nil {
		t.Fatal(err)
	}
	first := take(t, a, "k")
	deleteQueue(t, v, first.queue)
	ended(t, first, lock.ErrRevoked)
	if _, err := z.Take(t.Context(), "k", 1, nil); !errors.Is(err, lock.ErrDelayed) {
		t.Errorf("take before the holder has let go: got error %v, want %v", err, lock.ErrDelayed)
	}
	other := newSeed(t, v, "k")
	if l := other.acquire(); l != 1 {
		t.Errorf("the other client was granted slot %d, want 1", l)
	}
	if err := first.Release(t.Context()); !errors.Is(err, lock.ErrRevoked) {
		t.Errorf("release: got error %v, want %v", err, lock.ErrRevoked)
	}
	if !other.exists(first.queue) {
		t.Error("the other client's queue is gone")
	}
	other.relinquish(1)
	second := take(t, z, "k")
	if _, err := a.Take(t.Context(), "k", 1, nil); !errors.Is(err, lock.ErrFull) {
		t.Errorf("take: got error %v, want %v", err, lock.ErrFull)
	}
	if err := second.Context().Err(); err != nil {
		t.Errorf("the second lease ended: %v", context.Cause(second.Context()))
	}
	// The session's own queue is of no consequence.
	deleteQueue(t, v, "onejob/.session/"+z.Session())
	before := second.Deadline()
	testenv.Eventually(t, maxWait, "the lease goes on", func() bool { return second.Deadline() > before.Add(time.Second) })
	if err := second.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestClosedConnection: the broker closes the connection, and the leases end at
// once, not when they would have run out.
func TestClosedConnection(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	cfg := config(t, v)
	cfg.Heartbeat, cfg.Verify = time.Minute, 10*time.Second
	s := start(t, cfg)
	if err := s.Create(t.Context(), "k", 1); err != nil {
		t.Fatal(err)
	}
	lease := take(t, s, "k")
	endSession(t, v, s.Session())
	ended(t, lease, lock.ErrLost)
	if cause := context.Cause(lease.Context()); !strings.Contains(cause.Error(), "the operator said so") {
		t.Errorf("the cause does not tell the broker's reason: %v", cause)
	}
}

// TestTwoAdministrators: many administrators at once leave what one of them made.
func TestTwoAdministrators(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	s := create(t, config(t, v))
	created := 0
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			err := s.Create(t.Context(), "k", 3)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				created++
			case !errors.Is(err, lock.ErrExists):
				t.Errorf("create: %v", err)
			}
		})
	}
	wg.Wait()
	if created != 1 {
		t.Errorf("%d of 4 created it", created)
	}
	for i := range 4 {
		wg.Go(func() {
			for _, slots := range []int{i * 3, 9 - i, i} {
				if err := s.Resize(t.Context(), "k", slots); err != nil {
					t.Errorf("resize: %v", err)
				}
			}
		})
	}
	wg.Wait()
	sem, err := s.Inspect(t.Context(), "k")
	if err != nil {
		t.Fatal(err)
	}
	if got := aQueues(t, v); len(got) != sem.Slots || sem.Slots > 9 {
		t.Errorf("with %d slots there are %q", sem.Slots, got)
	}
	if err := s.Destroy(t.Context(), "k", false); err != nil {
		t.Error(err)
	}
	if queues := v.Queues(t); len(queues) != 0 {
		t.Errorf("after the end there are %q", queues)
	}
}

func TestListCannotGuess(t *testing.T) {
	t.Parallel()
	if _, err := create(t, Config{}).List(t.Context()); !errors.Is(err, lock.ErrCannotList) {
		t.Errorf("got error %v, want %v", err, lock.ErrCannotList)
	}
}

// TestDefaultTypeQuorum: in a virtual host where queues are quorum queues unless
// said otherwise.
func TestDefaultTypeQuorum(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	err := v.Server.Manage(t.Context(), http.MethodPut, "/vhosts/"+v.Name, map[string]string{"default_queue_type": "quorum"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	s := start(t, config(t, v))
	if err := s.Create(t.Context(), "k", 1); err != nil {
		t.Fatal(err)
	}
	lease := take(t, s, "k")
	if sem, err := s.Inspect(t.Context(), "k"); err != nil || len(sem.Holders) != 1 || string(sem.Holders[0].Value) != t.Name() {
		t.Errorf("inspect: %+v, %v", sem, err)
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// newUser makes a user with the password "secret" and no rights, and returns what manages the broker.
func newUser(t *testing.T, v *testenv.Vhost) (user string, manage func(method, path string, body any)) {
	user = "user-" + v.Name
	manage = func(method, path string, body any) {
		t.Helper()
		if err := v.Server.Manage(context.Background(), method, path, body, nil); err != nil {
			t.Fatal(err)
		}
	}
	manage(http.MethodPut, "/users/"+user, map[string]string{"password": "secret", "tags": ""})
	t.Cleanup(func() { manage(http.MethodDelete, "/users/"+user, nil) })
	return user, manage
}

// TestErrorsSayWhatToFix: each mistake of an operator.
func TestErrorsSayWhatToFix(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	user, manage := newUser(t, v)
	as := func(password, vhost string) Config {
		cfg := config(t, v)
		cfg.URL = "amqp://" + user + ":" + password + "@" + v.Server.Addr() + "/" + url.PathEscape(vhost)
		return cfg
	}
	allow := func(configure, write, read string) func() {
		return func() {
			manage(http.MethodPut, "/permissions/"+v.Name+"/"+user, map[string]string{"configure": configure, "write": write, "read": read})
		}
	}
	guest := create(t, config(t, v))
	if err := guest.Create(t.Context(), "there", 1); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name   string
		cfg    Config
		before func()
		want   string
	}{
		{"password", as("wrong", v.Name), nil, "look at the user and the password"},
		{"no such vhost", as("secret", "nowhere"), nil, "does the virtual host exist"},
		{"vhost not allowed", as("secret", v.Name), nil, "may the user enter it"},
		{"nothing allowed", as("secret", v.Name), allow("", "", ""), "must be allowed to configure and to read queues"},
		{"write not allowed", as("secret", v.Name), allow(".*", "", ".*"), "to write to amq.default"},
	} {
		if test.before != nil {
			test.before()
		}
		s := create(t, test.cfg)
		err := s.Create(t.Context(), "k", 1)
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got error %v, want one with %q", test.name, err, test.want)
		} else if strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the password is in the error: %v", test.name, err)
		}
	}

	// What Config says is needed is enough.
	allow("^onejob/", `^amq\.default$`, "^onejob/")()
	s := start(t, as("secret", v.Name))
	if err := s.Create(t.Context(), "k", 1); err != nil {
		t.Error(err)
	}
	if err := take(t, s, "k").Release(t.Context()); err != nil {
		t.Error(err)
	}
	allow("^onejob/", `^amq\.default$`, "")()
	noRead := start(t, as("secret", v.Name))
	if _, err := noRead.Take(t.Context(), "k", 1, nil); err == nil || !strings.Contains(err.Error(), "must be allowed") {
		t.Errorf("without the right to read: %v", err)
	}
	if sem, err := guest.Inspect(t.Context(), "k"); err != nil || len(sem.Holders) != 0 {
		t.Errorf("a slot that could not be taken is held: %+v, %v", sem, err)
	}
	if err := guest.Destroy(t.Context(), "k", false); err != nil {
		t.Error(err)
	}

	// One name that the user may not use costs the others nothing.
	if err := guest.Create(t.Context(), "denied", 2); err != nil {
		t.Fatal(err)
	}
	allow("^onejob/(?!.*denied)", `^amq\.default$`, "^onejob/(?!.*denied)")()
	some := start(t, as("secret", v.Name))
	if err := some.Create(t.Context(), "other", 2); err != nil {
		t.Fatal(err)
	}
	lease, session := take(t, some, "other"), some.Session()
	for range 5 {
		if _, err := some.Take(t.Context(), "denied", 1, nil); err == nil || !strings.Contains(err.Error(), "must be allowed") {
			t.Errorf("a name that may not be used: %v", err)
		}
		if err := take(t, some, "other").Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if lease.Context().Err() != nil || some.Session() != session {
		t.Errorf("another slot is lost: %v", context.Cause(lease.Context()))
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestShortHeartbeat: a broker that gives up on us earlier than we count on.
func TestShortHeartbeat(t *testing.T) {
	t.Parallel()
	_, v := testenv.OwnRabbitMQ(t, servers.RabbitMQConfig{Extra: "heartbeat = 1"})
	s := create(t, config(t, v))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	testenv.Eventually(t, maxWait, "the reason is told", func() bool {
		short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		defer cancel()
		err := s.Ready(short)
		return err != nil && strings.Contains(err.Error(), "insists on a heartbeat of 1s, shorter than the 5s that leases are counted by: set heartbeat = 5")
	})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestMoreChannelsThanTheUserMayHave: RabbitMQ closes the connection of who opens one more. From then on
// this process takes no more slots than it may have channels for, and keeps those that it has.
func TestMoreChannelsThanTheUserMayHave(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	user, manage := newUser(t, v)
	manage(http.MethodPut, "/permissions/"+v.Name+"/"+user, map[string]string{"configure": ".*", "write": ".*", "read": ".*"})
	err := v.Server.Manage(t.Context(), http.MethodPut, "/user-limits/"+user+"/max-channels", map[string]int{"value": 24}, nil)
	if err != nil && strings.Contains(err.Error(), "405") {
		t.Skip("this broker has no limits of users: they came with 3.8.10")
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := create(t, config(t, v)).Create(t.Context(), "k", 40); err != nil {
		t.Fatal(err)
	}
	cfg := config(t, v)
	cfg.URL = "amqp://" + user + ":secret@" + v.Server.Addr() + "/" + url.PathEscape(v.Name)
	s := start(t, cfg)
	if err := s.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	first := take(t, s, "k")
	for i := 0; first.Context().Err() == nil; i++ {
		if _, err := s.Take(t.Context(), "k", 1, nil); err != nil && first.Context().Err() == nil {
			t.Fatalf("slot %d is refused: %v", i, err)
		}
	}
	if err := context.Cause(first.Context()); !strings.Contains(err.Error(), "raise max-channels of the user") {
		t.Errorf("the lease has ended: %v", err)
	}
	second := takeSoon(t, s, "k")
	if _, err := s.Take(t.Context(), "k", 1, nil); err == nil || !strings.Contains(err.Error(), "as many as its connection has channels for") {
		t.Errorf("one more slot: %v", err)
	}
	if err := second.Release(t.Context()); err != nil {
		t.Errorf("the slot that is held: %v", err)
	}
}
