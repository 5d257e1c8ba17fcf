package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"onejob/internal/testenv"
	"onejob/lock"
)

// A seed is a client of amqp-locks' persistent semaphore, written from its
// description and from nothing else: it shares no code with the package. It polls
// with passive declarations where the package publishes, numbers slots from 1,
// and leaves all arguments of queues at their defaults.
type seed struct {
	t    *testing.T
	conn *amqp.Connection
	name string // all but the numbers
}

func newSeed(t *testing.T, v *testenv.Vhost, name string) *seed {
	t.Helper()
	return &seed{t: t, conn: plain(t, v), name: "onejob/" + name + "/"}
}

func (s *seed) a(l int) string { return fmt.Sprintf("%s%d-A", s.name, l) }
func (s *seed) b(l int) string { return fmt.Sprintf("%s%d-B", s.name, l) }

// on does one thing on a channel that may break of it.
func (s *seed) on(thing func(ch *amqp.Channel) error) error {
	ch, err := s.conn.Channel()
	if err != nil {
		return err
	}
	defer ch.Close()
	return thing(ch)
}

func (s *seed) exists(queue string) bool {
	err := s.on(func(ch *amqp.Channel) error {
		_, err := ch.QueueDeclarePassive(queue, false, false, false, false, nil)
		return err
	})
	var refusal *amqp.Error
	if err != nil && !errors.As(err, &refusal) {
		s.t.Errorf("seed: %v", err)
	}
	// One that is locked exists.
	return err == nil || refusal != nil && refusal.Code == amqp.ResourceLocked
}

// consumers returns how many consume from a queue, which may not be there.
func (s *seed) consumers(queue string) (n int) {
	_ = s.on(func(ch *amqp.Channel) error {
		q, err := ch.QueueDeclarePassive(queue, false, false, false, false, nil)
		n = q.Consumers
		return err
	})
	return n
}

// acquire returns the slot, or 0.
func (s *seed) acquire() int {
	for range 20 {
		l := 1
		for ; s.exists(s.a(l)); l++ {
			if s.exists(s.b(l)) {
				continue
			}
			err := s.on(func(ch *amqp.Channel) error {
				_, err := ch.QueueDeclare(s.b(l), false, false, true, false, nil)
				return err
			})
			if err != nil {
				time.Sleep(rand.N(10 * time.Millisecond)) // the skew
				l = 0
				break
			}
			if !s.exists(s.a(l)) { // verify
				s.relinquish(l)
				return 0
			}
			return l
		}
		if l > 0 {
			return 0
		}
	}
	return 0
}

func (s *seed) relinquish(l int) {
	err := s.on(func(ch *amqp.Channel) error {
		_, err := ch.QueueDelete(s.b(l), false, false, false)
		return err
	})
	if err != nil {
		s.t.Errorf("seed: relinquish: %v", err)
	}
}

func (s *seed) maximum() int {
	c := 0
	for s.exists(s.a(c + 1)) {
		c++
	}
	return c
}

// administer returns false if another administrator has the mutex.
func (s *seed) administer(to int) bool {
	err := s.on(func(ch *amqp.Channel) error {
		_, err := ch.QueueDeclare(s.name+"admin", false, false, true, false, nil)
		return err
	})
	if err != nil {
		return false
	}
	c := s.maximum()
	err = s.on(func(ch *amqp.Channel) error {
		for ; c < to; c++ {
			if _, err := ch.QueueDeclare(s.a(c+1), true, false, false, false, nil); err != nil {
				return err
			}
		}
		for ; c > to; c-- {
			if _, err := ch.QueueDelete(s.a(c), false, false, false); err != nil {
				return err
			}
		}
		_, err := ch.QueueDelete(s.name+"admin", false, false, false)
		return err
	})
	if err != nil {
		s.t.Errorf("seed: administer: %v", err)
	}
	return true
}

func TestSeedAdministersAndWeTake(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	seed, ours := newSeed(t, v, "k"), start(t, patient(t, v))
	if !seed.administer(2) {
		t.Fatal("the mutex is taken")
	}
	if err := ours.Create(t.Context(), "k", 2); !errors.Is(err, lock.ErrExists) {
		t.Errorf("create: got error %v, want %v", err, lock.ErrExists)
	}
	one := take(t, ours, "k")
	l := seed.acquire()
	if l == 0 || l == one.number {
		t.Errorf("we have slot %d and the other client has %d", one.number, l)
	}
	if _, err := ours.Take(t.Context(), "k", 1, nil); !errors.Is(err, lock.ErrFull) {
		t.Errorf("take: got error %v, want %v", err, lock.ErrFull)
	}
	if again := seed.acquire(); again == one.number {
		t.Errorf("the other client was granted slot %d, which we have", again)
	}
	sem, err := ours.Inspect(t.Context(), "k")
	if err != nil || sem.Slots != 2 || len(sem.Holders) != 2 {
		t.Errorf("inspect: %+v, %v", sem, err)
	}
	seed.administer(4)
	three := take(t, ours, "k")
	seed.administer(1)
	if err := three.Context().Err(); err != nil {
		t.Errorf("a fall threw us out: %v", context.Cause(three.Context()))
	}
	for _, held := range []*slot{one, three} {
		if _, err := ours.Take(t.Context(), "k", 1, nil); !errors.Is(err, lock.ErrFull) {
			t.Errorf("take after the fall: got error %v, want %v", err, lock.ErrFull)
		}
		if err := held.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	seed.relinquish(l)
	if err := ours.Drain(t.Context(), "k"); err != nil {
		t.Error(err)
	}
	if err := take(t, ours, "k").Release(t.Context()); err != nil {
		t.Error(err)
	}
	if err := ours.Destroy(t.Context(), "k", false); err != nil {
		t.Error(err)
	}
	if c := seed.maximum(); c != 0 {
		t.Errorf("after the end the other client counts %d slots", c)
	}
}

func TestWeAdministerAndSeedTakes(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	seed, ours := newSeed(t, v, "k"), create(t, patient(t, v))
	createLimit(t, ours, "k", 2)
	if c := seed.maximum(); c != 2 {
		t.Errorf("the other client counts %d slots, not 2", c)
	}
	other := newSeed(t, v, "k")
	if one, two, three := seed.acquire(), other.acquire(), other.acquire(); one != 1 || two != 2 || three != 0 {
		t.Errorf("the other clients were granted slots %d, %d and %d; want 1, 2 and none", one, two, three)
	}
	if err := ours.Resize(t.Context(), "k", 0); err != nil {
		t.Error(err)
	}
	if seed.exists(seed.a(1)) {
		t.Error("the other client finds a slot on which it may verify its lock")
	}
	drained := make(chan error, 1)
	go func() { drained <- ours.Drain(t.Context(), "k") }()
	seed.relinquish(1)
	other.conn.Close()
	if err := <-drained; err != nil {
		t.Errorf("drain: %v", err)
	}

	// Each keeps out the other's administrators.
	err := ours.administer(t.Context(), "look at", "k", 0, func(*reader) error {
		if seed.administer(3) {
			t.Error("two administrators at once")
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	// The connection is closed, and a broker with Khepri may delete its queues a moment later.
	testenv.Eventually(t, maxWait, "the mutex is given back", func() bool { return seed.administer(3) })
	if err := ours.Resize(t.Context(), "k", 1); err != nil {
		t.Error(err)
	}
	if c := seed.maximum(); c != 1 {
		t.Errorf("the other client counts %d slots, not 1", c)
	}
}

// TestSeedsAmongUs lets clients of both makes fight for the same slots.
func TestSeedsAmongUs(t *testing.T) {
	t.Parallel()
	const slots, each, rounds = 3, 3, 40
	v := testenv.RabbitMQ(t)
	ours := start(t, patient(t, v))
	createLimit(t, ours, "k", slots)
	var inside, most, seeds, others atomic.Int32
	visit := func(by *atomic.Int32) {
		now := inside.Add(1)
		if now > slots {
			t.Errorf("%d of %d slots held at once", now, slots)
		}
		for m := most.Load(); now > m && !most.CompareAndSwap(m, now); m = most.Load() {
		}
		by.Add(1)
		time.Sleep(rand.N(2 * time.Millisecond)) // the longer inside, the likelier to meet somebody
		inside.Add(-1)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*maxWait)
	defer cancel()
	var wg sync.WaitGroup
	for range each {
		s := newSeed(t, v, "k")
		wg.Go(func() {
			for done := 0; done < rounds && ctx.Err() == nil; {
				if l := s.acquire(); l != 0 {
					visit(&seeds)
					s.relinquish(l)
					done++
				}
			}
		})
		wg.Go(func() {
			for done := 0; done < rounds && ctx.Err() == nil; {
				leases, err := ours.Take(ctx, "k", 1, nil)
				if errors.Is(err, lock.ErrFull) || err != nil && Unavailable(err) {
					continue
				}
				if err != nil {
					t.Errorf("take: %v", err)
					return
				}
				visit(&others)
				if err := leases[0].Release(ctx); err != nil {
					t.Errorf("release: %v", err)
				}
				done++
			}
		})
	}
	wg.Wait()
	t.Logf("the others entered %d times, we %d times; at most %d were inside", seeds.Load(), others.Load(), most.Load())
	if ctx.Err() != nil {
		t.Error("it took too long")
	}
}
