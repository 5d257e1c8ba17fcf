package rabbitmq

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"onejob/boottime"
	"onejob/internal/testenv"
	"onejob/lock"
	"onejob/lock/internal/hold"
)

// TestPause pauses the machine, as far as holders can see it: the wall clock jumps ahead
// of the time since the boot.
func TestPause(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	cfg := config(t, v)
	cfg.Verify, cfg.Heartbeat = time.Second, 30*time.Second // no silence ends it first
	log, events := testenv.Logger(t)
	cfg.Log = log
	var ahead atomic.Int64
	s := create(t, cfg)
	s.ahead = func() (time.Duration, bool) { return time.Duration(ahead.Load()), true }
	run(t, s)
	if err := s.Create(t.Context(), "k", 2); err != nil {
		t.Fatal(err)
	}
	live := s.current()

	// A short one: what was sent before it extends nothing.
	lease := take(t, s, "k")
	sent, before := boottime.Now(), lease.Deadline()
	ahead.Add(int64(2 * time.Second))
	testenv.Eventually(t, maxWait, "the jump is noticed", func() bool {
		lease.Deadline()
		return events.FilterMessage("clock_jumped").Len() == 1
	})
	far := lock.Timing{TTL: time.Hour, Margin: time.Second}
	if live.Extend(hold.TTL, far, sent); lease.Deadline().Until() > 30*time.Minute {
		t.Error("a request from before the jump has extended the lease")
	}
	testenv.Eventually(t, maxWait, "the lease is extended again", func() bool { return before.Before(lease.Deadline()) })
	ahead.Add(-int64(time.Hour)) // nothing was paused
	time.Sleep(100 * time.Millisecond)
	if lease.Context().Err() != nil || s.current() != live {
		t.Fatalf("the lease has ended: %v", context.Cause(lease.Context()))
	}

	// One that is longer than a lease.
	ahead.Add(int64(time.Hour))
	ended(t, lease, lock.ErrLost)
	if why := context.Cause(lease.Context()); !strings.Contains(why.Error(), "the wall clock has jumped ahead") {
		t.Errorf("the lease ended with: %v", why)
	}
	_ = lease.Release(t.Context())
	testenv.Eventually(t, maxWait, "there is another session", func() bool { now := s.current(); return now != nil && now != live })
	if n := events.FilterMessage("clock_jumped").Len(); n != 2 {
		t.Errorf("clock_jumped was logged %d times, want twice", n)
	}
}
