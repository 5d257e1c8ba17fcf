package rabbitmq

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"onejob/internal/testenv"
	"onejob/lock"
	"onejob/lock/locktest"
)

// The tests run on Debian's RabbitMQ, 3.10. What later versions do differently
// is not seen here, and is avoided instead: 4.3 refuses transient queues that
// are not exclusive (all of ours that outlive a connection are durable), 4.0 has
// no mirrored queues (none are asked for), and a default queue type of quorum
// cannot be exclusive (the type is always spelled out; 3.10 has the setting too,
// and TestDefaultTypeQuorum uses it).

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(fighterEnv) != "":
		fight()
	case os.Getenv(holderEnv) != "":
		holdUntilKilled()
	case os.Getenv(stubbornEnv) != "":
		resist()
	}
	// Most of these tests wait most of the time.
	flag.Parse()
	if err := flag.Set("test.parallel", "4"); err != nil {
		panic(err)
	}
	testenv.Main(m)
}

const maxWait = 90 * time.Second

// config is a configuration for a test's own virtual host.
func config(t testing.TB, v *testenv.Vhost) Config {
	log, _ := testenv.Logger(t)
	return Config{
		URL: v.URL, Log: log,
		Heartbeat: 5 * time.Second, Verify: 500 * time.Millisecond, Margin: time.Second,
	}
}

// patient is config for tests in which nothing fails, and which make the broker work so hard that a slow
// one is silent for seconds.
func patient(t testing.TB, v *testenv.Vhost) Config {
	cfg := config(t, v)
	cfg.Heartbeat, cfg.Verify = time.Minute, 5*time.Second
	return cfg
}

// create is New, but what others have left is looked for among so few slots that a test may make many
// limits.
func create(t testing.TB, cfg Config) *Semaphores {
	t.Helper()
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	s.farthest = 400
	return s
}

// run runs s until the end of the test, or until stop.
func run(t testing.TB, s *Semaphores) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(stop)
	ready, cancelReady := context.WithTimeout(t.Context(), maxWait)
	defer cancelReady()
	if err := s.Ready(ready); err != nil {
		t.Fatal(err)
	}
	return stop
}

// start creates and runs.
func start(t testing.TB, cfg Config) *Semaphores {
	t.Helper()
	s := create(t, cfg)
	run(t, s)
	return s
}

func take(t testing.TB, s *Semaphores, name string) *slot {
	t.Helper()
	return takeAll(t, s, name, 1, []byte(t.Name()))[0].(*slot)
}

// takeAll takes slots, again if the broker does not answer in time. What it answers later is given back.
func takeAll(t testing.TB, s *Semaphores, name string, n int, value []byte) (leases []lock.Lease) {
	t.Helper()
	late := false
	testenv.Eventually(t, maxWait, "the broker answers", func() bool {
		var err error
		leases, err = s.Take(context.Background(), name, n, value)
		if late = late || err != nil && Unavailable(err); err != nil && !late {
			t.Fatal(err)
		}
		return err == nil
	})
	return leases
}

// persist calls f again while the broker does not answer in time: one that stands still for a while may
// need longer for a request than that may take.
func persist(f func() error) (err error) {
	for range testenv.Tries(maxWait) {
		if err = f(); err == nil || !Unavailable(err) {
			break
		}
	}
	return err
}

func createLimit(t testing.TB, s *Semaphores, name string, slots int) {
	t.Helper()
	again := false
	err := persist(func() error {
		err := s.Create(t.Context(), name, slots)
		if again && errors.Is(err, lock.ErrExists) { // by the request before
			err = s.Resize(t.Context(), name, slots)
		}
		again = true
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func destroyLimit(t testing.TB, s *Semaphores, name string) {
	t.Helper()
	again := false
	err := persist(func() error {
		err := s.Destroy(t.Context(), name, false)
		if again && errors.Is(err, lock.ErrNoSemaphore) { // by the request before
			err = nil
		}
		again = true
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// wantFull fails the test unless there is no free slot.
func wantFull(t testing.TB, s *Semaphores, name, when string) {
	t.Helper()
	err := persist(func() error {
		_, err := s.Take(t.Context(), name, 1, nil)
		return err
	})
	if !errors.Is(err, lock.ErrFull) {
		t.Errorf("take %s: got error %v, want %v", when, err, lock.ErrFull)
	}
}

// takeSoon takes a slot as soon as there is one.
func takeSoon(t testing.TB, s *Semaphores, name string) *slot {
	t.Helper()
	taken, err := awaitSlot(t.Context(), s, name)
	if err != nil {
		t.Fatal(err)
	}
	return taken
}

// awaitSlot is takeSoon for any goroutine.
func awaitSlot(ctx context.Context, s *Semaphores, name string) (*slot, error) {
	ctx, cancel := context.WithTimeout(ctx, maxWait)
	defer cancel()
	for {
		leases, err := s.Take(ctx, name, 1, nil)
		switch {
		case err == nil:
			return leases[0].(*slot), nil
		case ctx.Err() != nil || !errors.Is(err, lock.ErrFull) && !errors.Is(err, lock.ErrDelayed) && !errors.Is(err, lock.ErrLost):
			return nil, err
		}
		_ = s.Await(ctx, name)
	}
}

func ended(t testing.TB, l lock.Lease, want error) {
	t.Helper()
	select {
	case <-l.Context().Done():
	case <-time.After(maxWait):
		t.Fatalf("the lease did not end within %v", maxWait)
	}
	if cause := context.Cause(l.Context()); !errors.Is(cause, want) {
		t.Errorf("the lease ended with %v, want %v", cause, want)
	}
	if !l.Deadline().Passed() {
		t.Errorf("the deadline of a lease that has ended lies %v ahead", l.Deadline().Until())
	}
}

// plain is a connection that shares nothing with the package.
func plain(t testing.TB, v *testenv.Vhost) *amqp.Connection {
	t.Helper()
	conn, err := amqp.DialConfig(v.URL, amqp.Config{Heartbeat: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func channel(t testing.TB, conn *amqp.Connection) *amqp.Channel {
	t.Helper()
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	return ch
}

// endSession closes the connection of a session as an operator would.
func endSession(t testing.TB, v *testenv.Vhost, session string) {
	t.Helper()
	if n := closeConnections(t, v, session); n != 1 {
		t.Fatalf("%d connections are of session %s", n, session)
	}
}

// closeConnections closes connections of the virtual host as an operator would: those whose client
// has said what contains, or all if that is empty. It returns how many.
func closeConnections(t testing.TB, v *testenv.Vhost, contains string) (n int) {
	t.Helper()
	closed, err := v.Server.Eval(t.Context(), fmt.Sprintf(`
		Is = fun(Pid) ->
			try rabbit_networking:connection_info(Pid, [vhost, client_properties]) of
				[{vhost, <<"%s">>}, Said] -> string:find(io_lib:format("~0p", [Said]), "%s") =/= nomatch;
				_ -> false
			catch _:_ -> false end
		end,
		These = lists:filter(Is, rabbit_networking:connections()),
		[ok = rabbit_networking:close_connection(Pid, <<"the operator said so">>) || Pid <- These],
		length(These).`, v.Name, contains))
	if err == nil {
		n, err = strconv.Atoi(closed)
	}
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// deleteQueue deletes a queue, no matter whose it is, as an operator would.
func deleteQueue(t testing.TB, v *testenv.Vhost, queue string) {
	t.Helper()
	_, err := v.Server.Eval(t.Context(), `{ok, Q} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"`+v.Name+`">>, queue, <<"`+queue+`">>)),
		rabbit_amqqueue:delete(Q, false, false, <<"operator">>).`)
	if err != nil {
		t.Fatal(err)
	}
}

// holder makes of Semaphores what the suite wants of a locker, which is but the
// session.
type holder struct {
	lock.Locker
	*Semaphores
}

func (h holder) Run(ctx context.Context, _ lock.Cluster) error { return h.Semaphores.Run(ctx) }
func (h holder) Session() string                               { return h.Semaphores.Session() }
func (h holder) Changed() <-chan struct{}                      { return h.Semaphores.Changed() }

func TestSemaphores(t *testing.T) {
	t.Parallel()
	locktest.RunSemaphores(t, func(t *testing.T) locktest.SemaphoreBackend {
		v := testenv.RabbitMQ(t)
		return locktest.SemaphoreBackend{
			New: func(t *testing.T) (lock.Locker, lock.Semaphores) {
				cfg := config(t, v)
				cfg.Names = []string{"reports", "reports2", "a.b", "Zoë✓", "a?b#c%2F", strings.Repeat("x", 100)}
				s := create(t, cfg)
				return holder{Semaphores: s}, s
			},
			LockDelay:  config(t, v).Heartbeat,
			EndSession: func(t *testing.T, session string) { endSession(t, v, session) },
			Revoke:     func(t *testing.T, name string, h lock.SlotHolder) { deleteQueue(t, v, h.Session) },
			Spoil: func(t *testing.T, name string) {
				_, err := channel(t, plain(t, v)).QueueDeclare(Config{}.WithDefaults().names(name).a(1), false, false, true, false, nil)
				if err != nil {
					t.Fatal(err)
				}
			},
			Damaged: func(t *testing.T, name string) bool {
				var queue struct {
					Exclusive bool
					Arguments map[string]any
				}
				path := "/queues/" + v.Name + "/" + url.PathEscape(Config{}.WithDefaults().names(name).a(1))
				if err := v.Server.Manage(t.Context(), http.MethodGet, path, nil, &queue); err != nil {
					t.Error(err)
				}
				delete(queue.Arguments, "x-queue-type") // 4.x shows it
				return queue.Exclusive && len(queue.Arguments) == 0
			},
		}
	})
}
