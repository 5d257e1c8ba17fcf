package rabbitmq

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"onejob/internal/servers"
	"onejob/internal/testenv"
)

// stall suspends the database of a broker of the test's own until resume, or the end of the test. The
// broker goes on with heartbeats, passive declarations and messages; it finishes no request that makes
// or deletes a queue.
func stall(t *testing.T, broker *servers.RabbitMQ) (resume func()) {
	t.Helper()
	const database = "D = case whereis(mnesia_tm) of undefined -> rabbitmq_metadata; _ -> mnesia_tm end, " // Khepri has the former
	if _, err := broker.Eval(t.Context(), database+"ok = sys:suspend(D)."); err != nil {
		t.Fatal(err)
	}
	resume = sync.OnceFunc(func() {
		if _, err := broker.Eval(context.Background(), database+"ok = sys:resume(D)."); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(resume)
	return resume
}

// TestSlowReleaseKeepsOtherLeases: a release that the broker takes long to finish keeps no other lease
// from being renewed.
func TestSlowReleaseKeepsOtherLeases(t *testing.T) {
	t.Parallel()
	broker, v := testenv.OwnRabbitMQ(t, servers.RabbitMQConfig{})
	cfg := config(t, v)
	s := start(t, cfg)
	if err := s.Create(t.Context(), "k", 2); err != nil {
		t.Fatal(err)
	}
	one, two := take(t, s, "k"), take(t, s, "k")
	resume := stall(t, broker)
	before := two.Deadline()
	released := make(chan error, 1)
	go func() { released <- one.Release(context.Background()) }()
	// Longer than a lease, and shorter than a request may take.
	testenv.Eventually(t, maxWait, "the lease has outlived a heartbeat and a half", func() bool {
		return two.Context().Err() != nil || two.Deadline().Sub(before) > cfg.Heartbeat*3/2
	})
	select {
	case err := <-released:
		if two.Context().Err() == nil {
			t.Fatalf("the release did not wait for the broker (%v), so the test shows nothing", err)
		}
		released <- err
	default:
	}
	resume()
	if err := <-released; err != nil {
		t.Errorf("release the first: %v", err)
	}
	if err := two.Context().Err(); err != nil {
		t.Errorf("the second lease has ended: %v", context.Cause(two.Context()))
	}
	if err := two.Release(t.Context()); err != nil {
		t.Errorf("release the second: %v", err)
	}
}

// TestNobodyWaitsForAStalledBroker: those who take a slot, or wait for one, return although the broker
// does not answer. No lease ends for it, and what the broker makes of their requests is given back.
func TestNobodyWaitsForAStalledBroker(t *testing.T) {
	t.Parallel()
	broker, v := testenv.OwnRabbitMQ(t, servers.RabbitMQConfig{})
	s := start(t, config(t, v))
	for _, name := range []string{"full", "hurried", "patient"} {
		if err := s.Create(t.Context(), name, 1); err != nil {
			t.Fatal(err)
		}
	}
	held, session := take(t, s, "full"), s.current()
	resume := stall(t, broker)
	hurried, cancel := context.WithTimeout(t.Context(), requestTimeout*2/3) // the first requests are answered
	defer cancel()
	returned := map[string]chan error{"take": make(chan error, 1), "await": make(chan error, 1), "take without a time limit": make(chan error, 1)}
	go func() {
		_, err := s.Take(hurried, "hurried", 1, nil)
		returned["take"] <- err
	}()
	go func() { returned["await"] <- s.Await(hurried, "full") }()
	go func() {
		_, err := s.Take(t.Context(), "patient", 1, nil)
		returned["take without a time limit"] <- err
	}()
	for what, want := range map[string]error{
		"take": context.DeadlineExceeded, "await": context.DeadlineExceeded, "take without a time limit": ErrUnanswered,
	} {
		select {
		case err := <-returned[what]:
			if !errors.Is(err, want) {
				t.Errorf("%s: got error %v, want %v", what, err, want)
			}
		case <-time.After(6 * requestTimeout):
			t.Errorf("%s has waited for %v", what, 6*requestTimeout)
		}
	}
	if n := len(session.list()); n != 3 {
		t.Errorf("%d slots are reserved, want that which is held and those that may be ours yet", n)
	}
	resume()
	testenv.Eventually(t, maxWait, "what nobody waits for any more is given back", func() bool {
		return len(session.list()) == 1 && session.consumers.Load() == 0
	})
	if err := held.Context().Err(); err != nil {
		t.Errorf("the lease that was held has ended: %v", context.Cause(held.Context()))
	}
	if err := held.Release(t.Context()); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"full", "hurried", "patient"} {
		if err := takeSoon(t, s, name).Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
}
