package rabbitmq

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"onejob/internal/servers"
	"onejob/internal/testenv"
)

// stall suspends the database of a broker of the test's own until resume, or the end of the test. The
// broker goes on with heartbeats, passive declarations and messages; it finishes no request that makes
// or deletes a queue.
func stall(t *testing.T, broker *servers.RabbitMQ) (resume func()) {
	t.Helper()
	dir := t.TempDir()
	suspended, wanted := filepath.Join(dir, "suspended"), filepath.Join(dir, "wanted")
	// The broker looks for the file by itself: rabbitmqctl may take seconds to start.
	expression := fmt.Sprintf(`sys:suspend(mnesia_tm), ok = file:write_file("%s", ""),
		Await = fun F() -> case filelib:is_file("%s") of true -> ok; false -> timer:sleep(20), F() end end,
		Await(), sys:resume(mnesia_tm).`, suspended, wanted)
	ended := make(chan error, 1)
	go func() {
		output, err := broker.Ctl(context.Background(), "eval", expression)
		if err != nil {
			err = fmt.Errorf("%w: %s", err, output)
		}
		ended <- err
	}()
	resume = sync.OnceFunc(func() {
		if err := os.WriteFile(wanted, nil, 0o600); err != nil {
			t.Error(err)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(resume)
	testenv.Eventually(t, 2*maxWait, "the broker's database is suspended", func() bool {
		_, err := os.Stat(suspended)
		return err == nil
	})
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
