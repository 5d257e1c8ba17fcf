package rabbitmq

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/lock"
)

// TestStrangersQueues: queues of other programs where ours should be are told from
// ours, and nobody waits for them.
func TestStrangersQueues(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	s := start(t, config(t, v))
	stranger := channel(t, plain(t, v))
	for _, queue := range []string{"onejob/locked/admin", "onejob/k/1-B"} {
		if _, err := stranger.QueueDeclare(queue, true, false, false, false, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Create(t.Context(), "locked", 1); !errors.Is(err, lock.ErrForeign) || !strings.Contains(err.Error(), "onejob/locked/admin") {
		t.Errorf("create: got error %v, want %v", err, lock.ErrForeign)
	}
	if err := s.Create(t.Context(), "k", 2); err != nil {
		t.Fatal(err)
	}
	lease := take(t, s, "k")
	sem, err := s.Inspect(t.Context(), "k")
	if err != nil || len(sem.Holders) != 2 {
		t.Fatalf("inspect: %+v, %v; want 2 holders", sem, err)
	}
	if h := sem.Holders[0]; h.Session != "onejob/k/1-B" || string(h.Value) != notOurs {
		t.Errorf("the stranger's queue is shown as %s: %s", h.Session, h.Value)
	}
	if h := sem.Holders[1]; h.Session != lease.queue || string(h.Value) != t.Name() {
		t.Errorf("the holder is shown as %s: %s", h.Session, h.Value)
	}
}

// TestTooManyQueues: the broker has the same code for that as for a queue of another
// kind.
func TestTooManyQueues(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	s := start(t, config(t, v))
	allow := func(queues int) {
		t.Helper()
		if err := v.Server.Manage(t.Context(), http.MethodPut, "/vhost-limits/"+v.Name+"/max-queues", map[string]int{"value": queues}, nil); err != nil {
			t.Fatal(err)
		}
	}
	refused := func(what string, err error) {
		t.Helper()
		if err == nil || errors.Is(err, lock.ErrForeign) || !strings.Contains(err.Error(), "raise max-queues") {
			t.Errorf("%s: got error %v", what, err)
		}
	}
	allow(4) // the session, a mutex, and two more
	refused("create", s.Create(t.Context(), "many", 5))
	// What was made of it is no limit, of however many slots, and in nobody's way.
	if l, err := s.Inspect(t.Context(), "many"); !errors.Is(err, lock.ErrNoSemaphore) {
		t.Errorf("after it there is %+v (%v)", l, err)
	}
	allow(-1)
	if err := s.Create(t.Context(), "many", 2); err != nil {
		t.Fatal(err)
	}
	if l, err := s.Inspect(t.Context(), "many"); err != nil || l.Slots != 2 {
		t.Errorf("it has %+v (%v), want 2 slots", l, err)
	}
	if err := s.Create(t.Context(), "k", 1); err != nil {
		t.Fatal(err)
	}
	for _, more := range []int{0, 1} { // neither B nor the delay queue, or B alone
		allow(len(v.Queues(t)) + more)
		_, err := s.Take(t.Context(), "k", 1, nil)
		refused("take", err)
	}
	allow(-1)
	if err := take(t, s, "k").Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestPortThatSpeaksTLS: a URL that begins with amqp:// leads to it.
func TestPortThatSpeaksTLS(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Read(make([]byte, 8))
			_, _ = conn.Write([]byte{0x15, 3, 1, 0, 2, 2, 0x46}) // TLS: unexpected message
			conn.Close()
		}
	}()
	s := create(t, Config{URL: "amqp://" + listener.Addr().String()})
	if _, err := s.Inspect(t.Context(), "k"); err == nil || !strings.Contains(err.Error(), "must begin with amqps://") {
		t.Errorf("got error %v", err)
	}
}

// TestBrokerThatIsSilentInTheHandshake: the library takes whatever ends a connection there for
// a wrong password.
func TestBrokerThatIsSilentInTheHandshake(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			// connection.start of AMQP 0-9-1: no properties, PLAIN, en_US. No other answer follows.
			_, _ = conn.Write([]byte("\x01\x00\x00\x00\x00\x00\x1c\x00\x0a\x00\x0a\x00\x09\x00\x00\x00\x00" +
				"\x00\x00\x00\x05PLAIN\x00\x00\x00\x05en_US\xce"))
			go func() {
				_, _ = io.Copy(io.Discard, conn)
				conn.Close()
			}()
		}
	}()
	cfg := Config{URL: "amqp://" + listener.Addr().String()}
	for name, test := range map[string]struct {
		limit time.Duration
		is    error
	}{
		"the caller waits no longer": {200 * time.Millisecond, context.DeadlineExceeded},
		"nor do we":                  {2 * dialTimeout, os.ErrDeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := create(t, cfg)
			ctx, cancel := context.WithTimeout(t.Context(), test.limit)
			defer cancel()
			_, err := s.Inspect(ctx, "k")
			if !errors.Is(err, test.is) || strings.Contains(err.Error(), "password") {
				t.Errorf("got error %v, want %v", err, test.is)
			}
			if !Unavailable(err) {
				t.Errorf("the broker counts as available: %v", err)
			}
		})
	}
}

// TestTwoBrokers: each process has a connection that holds slots and one that looks. If an address
// leads them to different brokers, those count different holders, and nothing is taken.
func TestTwoBrokers(t *testing.T) {
	t.Parallel()
	one, other := testenv.RabbitMQ(t), testenv.RabbitMQ(t) // virtual hosts, which know nothing of each other
	for _, v := range []*testenv.Vhost{one, other} {
		if err := create(t, config(t, v)).Create(t.Context(), "k", 1); err != nil {
			t.Fatal(err)
		}
	}
	s := create(t, config(t, one))
	s.probeSession = create(t, config(t, other)).probeSession
	run(t, s)
	leases, err := s.Take(t.Context(), "k", 1, nil)
	if !errors.Is(err, errElsewhere) {
		t.Errorf("got %d slots and error %v, want %v", len(leases), err, errElsewhere)
	}
}
