package rabbitmq

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"onejob/boottime"
	"onejob/internal/servers"
	"onejob/internal/testenv"
	"onejob/lock"
)

func TestUnavailable(t *testing.T) {
	for _, test := range []struct {
		err  error
		want bool
	}{
		{nil, false},
		{&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, true},
		{context.DeadlineExceeded, true},
		{io.EOF, true},
		{unanswered(time.Second), true},
		{ErrUnconfirmed, true},
		{amqp.ErrClosed, true},
		{&amqp.Error{Code: amqp.ConnectionForced, Reason: "broker forced connection closure with reason 'shutdown'"}, true},
		{&amqp.Error{Code: amqp.FrameError, Reason: "EOF"}, true},
		{&amqp.Error{Code: amqp.NotFound, Reason: "home node 'rabbit@a' of durable queue 'q' in vhost '/' is down or inaccessible"}, true},
		{&amqp.Error{Code: amqp.NotFound, Reason: "no queue 'q' in vhost '/'"}, false},
		{amqp.ErrCredentials, false},
		{amqp.ErrVhost, false},
		{amqp.ErrChannelMax, false},
		{&amqp.Error{Code: amqp.AccessRefused, Reason: "access to queue 'q' refused"}, false},
		{&net.OpError{Op: "remote error", Err: errors.New("tls: bad certificate")}, false},
		{lock.ErrNoSemaphore, false},
		{context.Canceled, false},
	} {
		if got := Unavailable(test.err); got != test.want {
			t.Errorf("%v: %v, want %v", test.err, got, test.want)
		}
		if got := Unavailable(explain("try", test.err)); got != test.want {
			t.Errorf("%v, explained: %v, want %v", test.err, got, test.want)
		}
	}
}

// A muffler leads TCP to the broker until it is told to be silent: then it
// forwards nothing, not even that a side has hung up.
type muffler struct {
	listener net.Listener
	target   string
	mu       sync.Mutex
	silent   bool
	conns    []net.Conn
	wg       sync.WaitGroup
}

func newMuffler(t testing.TB, target string) *muffler {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := &muffler{listener: listener, target: target}
	m.wg.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", target)
			if err != nil {
				client.Close()
				continue
			}
			m.mu.Lock()
			m.conns = append(m.conns, client, server)
			m.mu.Unlock()
			m.wg.Go(func() { m.pump(client, server) })
			m.wg.Go(func() { m.pump(server, client) })
		}
	})
	t.Cleanup(func() {
		listener.Close()
		m.cut()
		m.wg.Wait()
	})
	return m
}

func (m *muffler) pump(from, to net.Conn) {
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		if m.quiet() {
			if err != nil {
				return
			}
			continue
		}
		if _, writeErr := to.Write(buffer[:n]); err != nil || writeErr != nil {
			to.Close()
			return
		}
	}
}

// cut ends all connections.
func (m *muffler) cut() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.conns {
		c.Close()
	}
}

func (m *muffler) quiet() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.silent
}

func (m *muffler) silence() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.silent = true
}

// TestSilence: a holder that does not hear from the broker any more stops before
// the broker gives its slot to another.
func TestSilence(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	m := newMuffler(t, v.Server.Addr())
	cfg := config(t, v)
	cfg.Heartbeat, cfg.Verify, cfg.Margin = 2*time.Second, 200*time.Millisecond, 500*time.Millisecond
	far := cfg
	far.URL = strings.Replace(cfg.URL, v.Server.Addr(), m.listener.Addr().String(), 1)
	a, z := start(t, far), start(t, cfg)
	if err := z.Create(t.Context(), "k", 1); err != nil {
		t.Fatal(err)
	}
	lease := take(t, a, "k")
	m.silence()
	silent := boottime.Now()
	type grant struct {
		at  boottime.Instant
		err error
	}
	granted := make(chan grant, 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		taken, err := awaitSlot(t.Context(), z, "k")
		at := boottime.Now()
		if err == nil {
			if lease.Context().Err() == nil {
				t.Error("the slot was granted again before its holder stopped")
			}
			_ = taken.Release(context.Background())
		}
		granted <- grant{at, err}
	})
	ended(t, lease, lock.ErrLost)
	stopped := boottime.Now().Sub(silent)
	// It did so by its own clock, before the library noticed anything.
	if why := context.Cause(lease.Context()); !strings.Contains(why.Error(), "has not answered for too long") {
		t.Errorf("the lease ended with: %v", why)
	}
	// The last request that the broker has answered was sent before the silence.
	asked := lease.Deadline().Add(cfg.Margin - cfg.Heartbeat)
	if silent.Before(asked) {
		t.Errorf("the lease was good for %v after the silence began, longer than the heartbeat without the margin", lease.Deadline().Sub(silent))
	}
	if a.Session() != "" {
		t.Error("there still is a session")
	}
	again := <-granted
	if again.err != nil {
		t.Fatalf("the slot was not granted again: %v", again.err)
	}
	t.Logf("with a heartbeat of %v the holder stopped %v after the silence began, and the slot was granted again after %v",
		cfg.Heartbeat, stopped.Round(time.Millisecond), again.at.Sub(silent).Round(time.Millisecond))
	if after := again.at.Sub(asked); after < 2*cfg.Heartbeat {
		t.Errorf("the broker gave up %v after the last request that it answered, earlier than two heartbeats", after)
	}
	if err := lease.Release(t.Context()); !errors.Is(err, lock.ErrLost) {
		t.Errorf("release: got error %v, want %v", err, lock.ErrLost)
	}
}

// TestStopInSilence: a broker that does not answer does not keep Run from
// returning.
func TestStopInSilence(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	m := newMuffler(t, v.Server.Addr())
	cfg := config(t, v)
	cfg.URL = strings.Replace(cfg.URL, v.Server.Addr(), m.listener.Addr().String(), 1)
	cfg.Heartbeat, cfg.Verify = time.Minute, 50*time.Millisecond
	s := create(t, cfg)
	stop := run(t, s)
	if err := s.Create(t.Context(), "k", 1); err != nil {
		t.Fatal(err)
	}
	lease := take(t, s, "k")
	m.silence()
	last := lease.Deadline()
	testenv.Eventually(t, maxWait, "an unanswered request", func() bool {
		now := lease.Deadline()
		still := now == last && time.Minute-now.Until() > 2*cfg.Margin
		last = now
		return still
	})
	began := time.Now()
	released := make(chan error, 1)
	go func() { released <- lease.Release(context.Background()) }()
	stop()
	if took := time.Since(began); took > cfg.Heartbeat/2 {
		t.Errorf("Run took %v to return", took)
	}
	if err := <-released; !errors.Is(err, lock.ErrLost) {
		t.Errorf("release: got error %v, want %v", err, lock.ErrLost)
	}
}

// TestBroker does to a broker what other tests would not like: it stops and dies,
// and it has an alarm.
func TestBroker(t *testing.T) {
	t.Parallel()
	broker, v := testenv.OwnRabbitMQ(t, servers.RabbitMQConfig{})
	cfg := config(t, v)
	// The broker counts the delay of a slot from when it has read its queues, and a slow
	// machine lets nobody in for seconds after that.
	cfg.Heartbeat = 15 * time.Second
	s := create(t, cfg)
	if err := s.Create(t.Context(), "k", 2); err != nil {
		t.Fatal(err)
	}
	run(t, s)

	t.Run("AlarmKeepsHolders", func(t *testing.T) {
		lease := takeSoon(t, s, "k")
		before := lease.Deadline()
		if _, err := broker.Eval(t.Context(), "ok = vm_memory_monitor:set_vm_memory_high_watermark(0.000001)."); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := s.Take(ctx, "k", 1, nil); err == nil {
			t.Error("a slot was taken during the alarm")
		} else {
			t.Logf("during the alarm: %v", err)
		}
		testenv.Eventually(t, maxWait, "the lease has outlived a heartbeat of silence", func() bool {
			return lease.Context().Err() != nil || lease.Deadline().Sub(before) > cfg.Heartbeat
		})
		if err := lease.Context().Err(); err != nil {
			t.Errorf("the lease ended: %v", context.Cause(lease.Context()))
		}
		if _, err := broker.Eval(t.Context(), "ok = vm_memory_monitor:set_vm_memory_high_watermark(0.6)."); err != nil {
			t.Fatal(err)
		}
		second := takeSoon(t, s, "k")
		for _, l := range []lock.Lease{lease, second} {
			if err := l.Release(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})

	for _, end := range []struct {
		name string
		how  func() error
	}{
		{"Stop", broker.Stop},
		{"Kill", func() error { broker.Kill(); return nil }},
	} {
		t.Run(end.name, func(t *testing.T) {
			lease, session := takeSoon(t, s, "k"), s.Session()
			// A broker that is killed forgets durable queues that it has not written to its
			// disk yet, and nothing says when it has: without this pause some are gone.
			time.Sleep(5 * time.Second)
			if err := end.how(); err != nil {
				t.Fatal(err)
			}
			ended(t, lease, lock.ErrLost)
			if _, err := s.Take(t.Context(), "k", 1, nil); !errors.Is(err, lock.ErrLost) {
				t.Errorf("take without a broker: got error %v, want %v", err, lock.ErrLost)
			}
			if err := broker.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), maxWait)
			defer cancel()
			if err := s.Ready(ctx); err != nil {
				t.Fatal(err)
			}
			if s.Session() == session {
				t.Error("the session is the same as before")
			}
			sem, err := s.Inspect(t.Context(), "k")
			if err != nil || sem.Slots != 2 || len(sem.Holders) != 1 || sem.Holders[0].Session != lease.delay {
				t.Errorf("after the start: %+v, %v; want 2 slots, one of them shut", sem, err)
			}
			other := take(t, s, "k")
			if _, err := s.Take(t.Context(), "k", 1, nil); !errors.Is(err, lock.ErrDelayed) {
				t.Errorf("take the slot that was held: got error %v, want %v", err, lock.ErrDelayed)
			}
			leases := []*slot{other, takeSoon(t, s, "k")}
			for _, l := range leases {
				if err := l.Release(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// TestCutConnectionSaysWhatEndedIt: a connection that worked has the right URL.
func TestCutConnectionSaysWhatEndedIt(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	m := newMuffler(t, v.Server.Addr())
	cfg := config(t, v)
	cfg.URL = strings.Replace(cfg.URL, v.Server.Addr(), m.listener.Addr().String(), 1)
	s := start(t, cfg)
	if err := s.Create(t.Context(), "k", 1); err != nil {
		t.Fatal(err)
	}
	lease := take(t, s, "k")
	m.cut()
	<-lease.Context().Done()
	if cause := context.Cause(lease.Context()); !errors.Is(cause, lock.ErrLost) || strings.Contains(cause.Error(), "amqps") {
		t.Errorf("the slot was lost with the cause %v", cause)
	}
}

// TestNobodyListens: what does not answer does not keep anybody waiting for long.
func TestNobodyListens(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	m := newMuffler(t, v.Server.Addr())
	m.silence()
	cfg := config(t, v)
	cfg.URL = strings.Replace(cfg.URL, v.Server.Addr(), m.listener.Addr().String(), 1)
	s := create(t, cfg)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	began := time.Now()
	if _, err := s.Inspect(ctx, "k"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("inspect: got error %v, want %v", err, context.DeadlineExceeded)
	}
	done := make(chan error, 1)
	stopCtx, stop := context.WithCancel(t.Context())
	go func() { done <- s.Run(stopCtx) }()
	stop()
	if err := <-done; err != nil {
		t.Errorf("Run: %v", err)
	}
	t.Logf("that took %v", time.Since(began))
}

// TestBrokerThatDoesNotAnswer: a broker that goes on with heartbeats and answers no requests, because it
// waits for its own database, keeps nobody waiting for ever, and the log says what is wrong.
func TestBrokerThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	broker, v := testenv.OwnRabbitMQ(t, servers.RabbitMQConfig{})
	cfg := config(t, v)
	log, entries := testenv.Logger(t)
	cfg.Log = log
	s := create(t, cfg)
	resume := stall(t, broker)
	ctx, stop := context.WithCancel(t.Context())
	created, ended := make(chan error, 1), make(chan error, 1)
	go func() { created <- s.Create(ctx, "k", 1) }()
	go func() { ended <- s.Run(ctx) }()
	defer func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	}()
	select {
	case err := <-created:
		if !errors.Is(err, ErrUnanswered) {
			t.Errorf("create: got error %v, want %v", err, ErrUnanswered)
		}
	case <-time.After(6 * requestTimeout):
		t.Fatalf("create has waited for %v", 6*requestTimeout)
	}
	testenv.Eventually(t, 6*requestTimeout, "the log says that RabbitMQ is unavailable", func() bool {
		return entries.FilterMessage("rabbitmq_unavailable").Len() > 0
	})
	resume()
	ready, cancel := context.WithTimeout(t.Context(), 2*maxWait)
	defer cancel()
	if err := s.Ready(ready); err != nil {
		t.Fatal(err)
	}
	if err := s.Create(t.Context(), "k", 1); err != nil && !errors.Is(err, lock.ErrExists) {
		t.Fatal(err)
	}
	if err := takeSoon(t, s, "k").Release(t.Context()); err != nil {
		t.Error(err)
	}
}
