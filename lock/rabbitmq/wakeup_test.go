package rabbitmq

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"onejob/internal/retry"
	"onejob/internal/testenv"
)

// TestWakeup: one of those who wait, on whatever connection, hears of each slot
// that is given back, or that a raise adds.
func TestWakeup(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	a, y, z := start(t, patient(t, v)), start(t, patient(t, v)), start(t, patient(t, v))
	createLimit(t, a, "k", 1)
	wakeup := a.cfg.names("k").wakeup()
	first, stopFirst := y.current().listen(t.Context(), wakeup)
	second, stopSecond := z.current().listen(t.Context(), wakeup)
	heard := func(what string, n int) {
		t.Helper()
		for range n {
			select {
			case <-first:
			case <-second:
			case <-time.After(maxWait):
				t.Fatalf("nobody heard of %s", what)
			}
		}
		select {
		case <-first:
			t.Errorf("too many heard of %s", what)
		case <-second:
			t.Errorf("too many heard of %s", what)
		case <-time.After(50 * time.Millisecond):
		}
	}
	for range 5 {
		if err := take(t, a, "k").Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		heard("a slot that was given back", 1)
	}
	if err := a.Resize(t.Context(), "k", 4); err != nil {
		t.Fatal(err)
	}
	heard("a raise by three", 3)
	stopFirst()
	stopSecond()
	if err := a.Destroy(t.Context(), "k", false); err != nil {
		t.Fatal(err)
	}
	if queues := v.Queues(t); len(queues) != 3 { // of the sessions
		t.Errorf("left are %q", queues)
	}
}

// What comes just before one stops listening is passed on to another one.
func TestWakeupIsPassedOn(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	a, y, z := start(t, patient(t, v)), start(t, patient(t, v)), start(t, patient(t, v))
	createLimit(t, a, "k", 1)
	for _, s := range []*Semaphores{a, y} { // which can notify once they have looked for slots
		if err := take(t, s, "k").Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	wakeup := a.cfg.names("k").wakeup()
	hears := func(who string, wakeups <-chan amqp.Delivery, slot int) {
		t.Helper()
		select {
		case message := <-wakeups:
			if got := slotOf(message); got != slot {
				t.Errorf("%s heard of slot %d, want %d", who, got, slot)
			}
		case <-time.After(maxWait):
			t.Fatalf("%s has not heard of slot %d", who, slot)
		}
	}
	first, stopFirst := y.current().listen(t.Context(), wakeup)
	for slot := 1; slot <= 3; slot++ {
		if !a.probeSession.notify(wakeup, slot) {
			t.Fatal("nobody was notified")
		}
	}
	hears("the first", first, 1)
	second, stopSecond := z.current().listen(t.Context(), wakeup)
	defer stopSecond()
	stopFirst()
	hears("the second", second, 2)
	hears("the second", second, 3)
}

// The wake-up queue of a limit goes with its last listener, so that it may be missing for a moment, or
// be somebody else's. Who could not listen tries again.
func TestListensAgain(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	a, z := start(t, patient(t, v)), start(t, patient(t, v))
	createLimit(t, a, "k", 1)
	take(t, a, "k")
	wakeup := a.cfg.names("k").wakeup()
	stranger := channel(t, plain(t, v))
	if _, err := stranger.QueueDeclare(wakeup, true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- z.Await(ctx, "k") }()
	retry.Pause(ctx, time.Second) // it has looked at once, and could not listen
	if _, err := stranger.QueueDelete(wakeup, false, false, false); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 3*maxWait, "a wake-up queue", func() bool { return slices.Contains(v.Queues(t), wakeup) })
	stop()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("await: got error %v", err)
	}
}
