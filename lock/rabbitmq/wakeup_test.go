package rabbitmq

import (
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"onejob/internal/testenv"
)

// TestWakeup: one of those who wait, on whatever connection, hears of each slot
// that is given back, or that a raise adds.
func TestWakeup(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	a, y, z := start(t, config(t, v)), start(t, config(t, v)), start(t, config(t, v))
	if err := a.Create(t.Context(), "k", 1); err != nil {
		t.Fatal(err)
	}
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
	a, y, z := start(t, config(t, v)), start(t, config(t, v)), start(t, config(t, v))
	if err := a.Create(t.Context(), "k", 1); err != nil {
		t.Fatal(err)
	}
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
