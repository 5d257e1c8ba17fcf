package consul

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

// TestPause pauses the machine, as far as a locker can see it: the wall clock jumps
// ahead of the time since the boot.
func TestPause(t *testing.T) {
	t.Parallel()
	// begin starts a locker that holds a lock and a slot, and returns how to move its wall clock.
	begin := func(t *testing.T, cfg Config) (l *Locker, both []lock.Lease, move func(time.Duration)) {
		t.Helper()
		var ahead atomic.Int64
		l = create(t, cfg)
		l.ahead = func() (time.Duration, bool) { return time.Duration(ahead.Load()), true }
		run(t, l)
		ready(t, l)
		if err := l.Semaphores().Create(t.Context(), "s", 2); err != nil {
			t.Fatal(err)
		}
		return l, []lock.Lease{acquire(t, l, "k"), takeOne(t, l, "s")}, func(d time.Duration) { ahead.Add(int64(d)) }
	}
	for name, liveness := range map[string]Liveness{"check": Check, "ttl": TTL} {
		t.Run("longer than a lease: it ends/"+name, func(t *testing.T) {
			t.Parallel()
			kv := testenv.Consul(t)
			cfg := config(t, kv)
			events := logged(t, &cfg)
			cfg.Liveness = liveness
			cfg.Renew, cfg.Heartbeat = 3*time.Second, time.Second // no answer ends it first
			l, both, move := begin(t, cfg)
			session := l.Session()
			move(time.Hour)
			for _, lease := range both {
				ended(t, lease, lock.ErrLost)
			}
			if cause := context.Cause(both[0].Context()); !strings.Contains(cause.Error(), "the wall clock has jumped ahead by 1h0m0s: this machine was paused, or its clock was set") {
				t.Errorf("it ended with %v", cause)
			}
			for _, lease := range both {
				_ = lease.Release(t.Context())
			}
			again(t, l, session)
			if n := events("clock_jumped"); n != 1 {
				t.Errorf("clock_jumped was logged %d times, want once", n)
			}
			// Nothing more comes of it.
			session = l.Session()
			release(t, acquire(t, l, "another"))
			if l.Session() != session || events("session_lost") != 1 {
				t.Error("the next session was lost as well")
			}
		})
	}
	t.Run("shorter: it goes on", func(t *testing.T) {
		t.Parallel()
		cfg := config(t, testenv.Consul(t))
		cfg.CheckTTL, cfg.SessionTTL = 10*time.Minute, 10*time.Minute
		events := logged(t, &cfg)
		l, both, move := begin(t, cfg)
		session := l.Session()
		before := both[0].Deadline()
		move(5 * time.Minute)
		testenv.Eventually(t, maxWait, "the deadline is nearer", func() bool { return both[0].Deadline().Before(before.Add(-4 * time.Minute)) })
		testenv.Eventually(t, maxWait, "the leases are extended again", func() bool {
			return before.Before(both[0].Deadline()) && before.Before(both[1].Deadline())
		})
		move(-time.Hour) // nothing was paused
		release(t, acquire(t, l, "another"))
		for _, lease := range both {
			if lease.Context().Err() != nil {
				t.Errorf("a lease has ended: %v", context.Cause(lease.Context()))
			}
			release(t, lease)
		}
		if l.Session() != session || events("session_lost") != 0 || events("clock_jumped") != 1 {
			t.Errorf("the session was lost %d times, and the clock jumped %d times", events("session_lost"), events("clock_jumped"))
		}
	})
	t.Run("what was sent before it extends nothing", func(t *testing.T) {
		t.Parallel()
		cfg := config(t, testenv.Consul(t))
		events := logged(t, &cfg)
		l, both, move := begin(t, cfg)
		live := l.current()
		sent := boottime.Now()
		move(time.Second)
		testenv.Eventually(t, maxWait, "the jump is noticed", func() bool {
			live.Deadline()
			return events("clock_jumped") == 1
		})
		far := lock.Timing{TTL: time.Hour, Margin: time.Second}
		if live.extend(hold.Check, far, sent); live.Silent(hold.Check, far) < 30*time.Minute {
			t.Error("it did")
		}
		if live.extend(hold.Check, far, boottime.Now()); live.Silent(hold.Check, far) > 30*time.Minute {
			t.Error("what was sent after it does not, either")
		}
		for _, lease := range both {
			release(t, lease)
		}
	})
}

// logged lets a configuration log, and returns how often an event was.
func logged(t *testing.T, cfg *Config) (count func(event string) int) {
	log, entries := testenv.Logger(t)
	cfg.Log = log
	return func(event string) int { return entries.FilterMessage(event).Len() }
}
