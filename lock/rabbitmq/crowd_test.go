package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/lock"
)

// counted returns the URL of a way to the broker, and how many connections were made on it.
func counted(t *testing.T, url string) (string, *atomic.Int32) {
	t.Helper()
	_, rest, _ := strings.Cut(url, "@")
	target, _, _ := strings.Cut(rest, "/")
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	var made atomic.Int32
	go func() {
		for {
			from, err := listener.Accept()
			if err != nil {
				return
			}
			made.Add(1)
			to, err := net.Dial("tcp", target)
			if err != nil {
				from.Close()
				continue
			}
			go func() { _, _ = io.Copy(to, from); to.Close() }()
			go func() { _, _ = io.Copy(from, to); from.Close() }()
		}
	}()
	return strings.Replace(url, target, listener.Addr().String(), 1), &made
}

// Rows may have hundreds of names that are no limits. To look for one costs no connection.
func TestUnknownNamesCostNoConnection(t *testing.T) {
	t.Parallel()
	cfg := patient(t, testenv.RabbitMQ(t))
	var made *atomic.Int32
	cfg.URL, made = counted(t, cfg.URL)
	s := start(t, cfg)
	if _, err := s.Inspect(t.Context(), "first"); !errors.Is(err, lock.ErrNoSemaphore) {
		t.Fatal(err)
	}
	before := made.Load()
	if before == 0 {
		t.Fatal("nobody connects this way, so the test shows nothing")
	}
	for i := range 20 {
		if _, err := s.Inspect(t.Context(), fmt.Sprint("none-", i)); !errors.Is(err, lock.ErrNoSemaphore) {
			t.Fatal(err)
		}
	}
	if n := made.Load() - before; n > 0 {
		t.Errorf("20 names that are no limits cost %d connections", n)
	}
}

// A connection has so many channels. When slots have used up theirs, leases go on, and those who wait
// for one get it when it comes free.
func TestChannelsRunOut(t *testing.T) {
	t.Parallel()
	cfg := patient(t, testenv.RabbitMQ(t))
	other := start(t, cfg)
	cfg.URL += "?channel_max=48"
	s := start(t, cfg)
	consumers, slots := sharesOf(48)
	createLimit(t, s, "wide", slots+5)
	var held []*slot
	for range slots {
		held = append(held, takeSoon(t, s, "wide"))
	}
	if _, err := s.Take(t.Context(), "wide", 1, nil); err == nil || !strings.Contains(err.Error(), "channel_max") {
		t.Errorf("with %d slots held: %v", slots, err)
	}

	// More wait than can listen, and all of them get theirs.
	full := make([]*slot, consumers+3)
	for i := range full {
		name := fmt.Sprint("full-", i)
		createLimit(t, other, name, 1)
		full[i] = take(t, other, name)
	}
	ctx, cancel := context.WithTimeout(t.Context(), maxWait)
	defer cancel()
	var waiting sync.WaitGroup
	for i := range full {
		waiting.Go(func() {
			if err := s.Await(ctx, fmt.Sprint("full-", i)); err != nil {
				t.Errorf("full-%d: %v", i, err)
			}
		})
	}
	for int(s.current().consumers.Load()) < consumers && ctx.Err() == nil {
		time.Sleep(10 * time.Millisecond)
	}
	for _, l := range full {
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	waiting.Wait()
	if n := s.current().consumers.Load(); n != 0 {
		t.Errorf("%d wake-up queues are listened to when nobody waits", n)
	}

	for _, l := range held {
		if err := context.Cause(l.Context()); err != nil {
			t.Errorf("a lease has ended: %v", err)
		}
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if err := takeSoon(t, s, "wide").Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// Those who wait for many limits look at each of them more rarely: who takes a slot uses the same
// connection.
func TestACrowdLooksRarely(t *testing.T) {
	t.Parallel()
	s := create(t, Config{URL: "amqp://nobody@127.0.0.1/"})
	for _, all := range []int{1, 1000} {
		for i := range all {
			s.join(fmt.Sprint("full-", i))
		}
		least, most := shortestWait/2, longestWait
		if all > 1 {
			least, most = 1000*waitForEach/2, 1000*waitForEach
		}
		l := s.lookouts["full-0"]
		for range 10 {
			began := time.Now()
			l.look(t.Context())
			if next := l.next.Sub(began); next < least || time.Until(l.next) > most {
				t.Errorf("one of %d looks again after %v, want %v to %v", all, next, least, most)
			}
		}
	}
}
