package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"
	"testing"
	"time"

	"onejob/internal/guard"
	"onejob/internal/servers"
	"onejob/internal/testenv"
	"onejob/lock"
)

// The test binary becomes a holder if holderEnv has the broker's URL, and a stubborn
// command if stubbornEnv has the tally's address. leaseEnv has the TTL of a holder's
// lease.
const (
	holderEnv   = "ONEJOB_TEST_HOLDER"
	leaseEnv    = "ONEJOB_TEST_LEASE"
	stubbornEnv = "ONEJOB_TEST_STUBBORN"
)

// holdUntilKilled takes the slot of the limit "k" and runs a stubborn command under it, as
// onejob lock does, again and again.
func holdUntilKilled() {
	fail := func(err error) {
		fmt.Fprintln(os.Stderr, "holder:", err)
		os.Exit(1)
	}
	ttl, err := time.ParseDuration(os.Getenv(leaseEnv))
	if err != nil {
		fail(err)
	}
	s, err := New(Config{URL: os.Getenv(holderEnv), Heartbeat: ttl, Verify: 500 * time.Millisecond, Margin: time.Second})
	if err != nil {
		fail(err)
	}
	ctx := context.Background()
	go func() { _ = s.Run(ctx) }()
	for {
		if err := s.Ready(ctx); err != nil {
			fail(err)
		}
		leases, err := s.Take(ctx, "k", 1, nil)
		if err != nil {
			_ = s.Await(ctx, "k")
			continue
		}
		p, err := guard.Start(guard.Spec{
			Path: os.Args[0], Env: []string{stubbornEnv + "=" + os.Getenv(stubbornEnv)},
			Grace: time.Minute, Deadline: leases[0].Deadline(),
		})
		if err != nil {
			fail(err)
		}
		for lost := leases[0].Context().Done(); ; {
			select {
			case <-time.After(50 * time.Millisecond):
				p.Extend(leases[0].Deadline())
				continue
			case <-lost:
				p.Extend(leases[0].Deadline())
				lost = nil
				continue
			case <-p.Done():
			}
			break
		}
		_ = leases[0].Release(ctx)
	}
}

// resist is a command that ignores SIGTERM. It is connected to the tally as long
// as it lives, and exits by itself only when the tally closes the connection.
func resist() {
	signal.Ignore(syscall.SIGTERM)
	conn, err := net.Dial("tcp", os.Getenv(stubbornEnv))
	if err != nil {
		os.Exit(1)
	}
	_, _ = conn.Read(make([]byte, 1))
	os.Exit(0)
}

// A tally counts the stubborn commands that live.
type tally struct {
	listener net.Listener
	wg       sync.WaitGroup
	mu       sync.Mutex
	living   map[net.Conn]bool
	entries  int
	most     int
}

func newTally(t *testing.T) *tally {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &tally{listener: listener, living: map[net.Conn]bool{}}
	c.wg.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			c.mu.Lock()
			c.living[conn] = true
			c.entries++
			c.most = max(c.most, len(c.living))
			c.mu.Unlock()
			c.wg.Go(func() {
				_, _ = conn.Read(make([]byte, 1)) // until it is dead
				conn.Close()
				c.mu.Lock()
				defer c.mu.Unlock()
				delete(c.living, conn)
			})
		}
	})
	t.Cleanup(func() {
		listener.Close()
		c.mu.Lock()
		for conn := range c.living {
			conn.Close()
		}
		c.mu.Unlock()
		c.wg.Wait()
	})
	return c
}

func (c *tally) counts() (living, entries, most int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.living), c.entries, c.most
}

// TestNeverBesideADyingCommand: whatever ends a holder, nobody enters before the
// command is dead that it ran, although the command ignores SIGTERM. Where the holder
// would kill it fast, the holder is frozen first: then the guard does when the lease is
// over.
func TestNeverBesideADyingCommand(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name string
		own  bool          // broker
		ttl  time.Duration // of the lease
		end  func(t *testing.T, v *testenv.Vhost, holder *exec.Cmd)
	}{
		{"HolderKilled", false, 5 * time.Second, func(t *testing.T, _ *testenv.Vhost, holder *exec.Cmd) {
			if err := holder.Process.Kill(); err != nil {
				t.Error(err)
			}
		}},
		{"ConnectionClosed", false, 5 * time.Second, func(t *testing.T, v *testenv.Vhost, _ *exec.Cmd) {
			closeConnections(t, v, "")
		}},
		{"QueueDeleted", false, 5 * time.Second, func(t *testing.T, v *testenv.Vhost, holder *exec.Cmd) {
			testenv.Freeze(t, holder.Process.Pid)
			deleteQueue(t, v, "onejob/k/1-B")
		}},
		{"BrokerKilled", true, 15 * time.Second, func(t *testing.T, v *testenv.Vhost, holder *exec.Cmd) {
			testenv.Freeze(t, holder.Process.Pid)
			v.Server.Kill()
			if err := v.Server.Start(t.Context()); err != nil {
				t.Error(err)
			}
		}},
		{"BrokerStopped", true, 15 * time.Second, func(t *testing.T, v *testenv.Vhost, holder *exec.Cmd) {
			testenv.Freeze(t, holder.Process.Pid)
			if err := v.Server.Stop(); err != nil {
				t.Error(err)
			}
			if err := v.Server.Start(t.Context()); err != nil {
				t.Error(err)
			}
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			var v *testenv.Vhost
			if test.own {
				_, v = testenv.OwnRabbitMQ(t, servers.RabbitMQConfig{})
			} else {
				v = testenv.RabbitMQ(t)
			}
			c := newTally(t)
			admin := create(t, config(t, v))
			if err := admin.Create(t.Context(), "k", 1); err != nil {
				t.Fatal(err)
			}
			holders := make([]*exec.Cmd, 3)
			for i := range holders {
				h := exec.Command(os.Args[0])
				h.Env = append(os.Environ(), holderEnv+"="+v.URL, leaseEnv+"="+test.ttl.String(), stubbornEnv+"="+c.listener.Addr().String())
				h.Stderr = os.Stderr
				if err := h.Start(); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = h.Process.Kill(); _ = h.Wait() })
				holders[i] = h
				// The first one has the slot.
				testenv.Eventually(t, maxWait, "one is inside", func() bool { _, entries, _ := c.counts(); return entries == 1 })
			}
			probe := newSeed(t, v, "k")
			testenv.Eventually(t, 2*maxWait, "the others wait", func() bool { return probe.consumers("onejob/k/bell") == 2 })
			began := time.Now()
			test.end(t, v, holders[0])
			testenv.Eventually(t, 2*maxWait, "another one is inside", func() bool { _, entries, _ := c.counts(); return entries == 2 })
			_, _, most := c.counts()
			t.Logf("the next command ran %v after the end began; at most %d ran at once", time.Since(began).Round(time.Millisecond), most)
			if most != 1 {
				t.Errorf("%d ran at once under a limit of 1", most)
			}
		})
	}
}

// TestDelayQueue: it is there exactly while the slot is held, and for the delay after
// a holder that was lost.
func TestDelayQueue(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	cfg := config(t, v)
	cfg.Heartbeat = 15 * time.Second // the delay, of which rabbitmqctl may take seconds to end
	a, z := start(t, cfg), start(t, cfg)
	if err := a.Create(t.Context(), "k", 2); err != nil {
		t.Fatal(err)
	}
	probe := newSeed(t, v, "k")
	lease := take(t, a, "k")
	if !probe.exists(lease.delay) {
		t.Error("it is not there while the slot is held")
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if probe.exists(lease.delay) {
		t.Error("it is there after the slot was given back")
	}

	// Deleted by an operator, it comes back.
	lease = take(t, a, "k")
	deleteQueue(t, v, lease.delay)
	testenv.Eventually(t, maxWait, "it is there again", func() bool { return probe.exists(lease.delay) })
	if err := lease.Context().Err(); err != nil {
		t.Errorf("the lease ended: %v", context.Cause(lease.Context()))
	}

	// Deleted together with B, it does not: the slot is lost.
	deleteQueue(t, v, lease.queue)
	deleteQueue(t, v, lease.delay)
	ended(t, lease, lock.ErrRevoked)
	if err := lease.Release(t.Context()); !errors.Is(err, lock.ErrRevoked) {
		t.Errorf("release: got error %v, want %v", err, lock.ErrRevoked)
	}
	if probe.exists(lease.delay) {
		t.Error("it is there although the slot was lost")
	}

	// A holder that is lost leaves it for the delay. The others go on.
	lost, other := take(t, a, "k"), take(t, z, "k")
	began := time.Now()
	delayed := func(what string) {
		t.Helper()
		leases, err := z.Take(t.Context(), "k", 1, nil)
		if !errors.Is(err, lock.ErrDelayed) && time.Since(began) < cfg.Heartbeat { // it may be over on a busy machine
			t.Errorf("%s: got error %v, want %v", what, err, lock.ErrDelayed)
		}
		if err == nil {
			_ = leases[0].Release(t.Context())
		}
	}
	endSession(t, v, a.Session())
	ended(t, lost, lock.ErrLost)
	_ = lost.Release(t.Context())
	delayed("take")
	if err := z.Destroy(t.Context(), "k", false); !errors.Is(err, lock.ErrInUse) {
		t.Errorf("destroy: got error %v, want %v", err, lock.ErrInUse)
	}
	if err := z.Resize(t.Context(), "k", 1); err != nil {
		t.Error(err)
	}
	if err := other.Release(t.Context()); err != nil {
		t.Error(err)
	}
	delayed("take after a fall")
	again := takeSoon(t, z, "k")
	if probe.exists(lost.delay) && again.delay != lost.delay {
		t.Error("it is still there")
	}
	if err := again.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if err := z.Destroy(t.Context(), "k", false); err != nil {
		t.Error(err)
	}
	if left := v.Queues(t); len(left) != 2 { // the sessions'
		t.Errorf("left are %q", left)
	}
}

// TestTwoAtOneDelayQueue: of two who believe that B is theirs, because somebody
// deleted it between, one is refused.
func TestTwoAtOneDelayQueue(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	a, z := start(t, config(t, v)), start(t, config(t, v))
	n := a.cfg.names("k")
	one, err := a.current().declare("k", n, 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	deleteQueue(t, v, one.queue)
	two, err := z.current().declare("k", n, 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := one.shield(); err != nil {
		t.Errorf("the first: %v", err)
	}
	if err := two.shield(); !errors.Is(err, errRace) {
		t.Errorf("the second: got error %v, want %v", err, errRace)
	}
	two.Abandon(errRace)
	if err := two.leave(); err != nil {
		t.Error(err)
	}
	if !newSeed(t, v, "k").exists(one.delay) {
		t.Error("the one who left deleted the other's queue")
	}
}
