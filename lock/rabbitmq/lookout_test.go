package rabbitmq

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"onejob/internal/testenv"
	"onejob/lock"
)

// TestManyWaiters: many processes with many waiters each want few slots, once. It
// logs how much longer that takes than the work alone.
func TestManyWaiters(t *testing.T) {
	t.Parallel()
	const processes, each, slots, work = 30, 10, 3, 100 * time.Millisecond
	v := testenv.RabbitMQ(t)
	var all []*Semaphores
	for range processes {
		all = append(all, start(t, patient(t, v)))
	}
	createLimit(t, all[0], "k", slots)
	ctx, cancel := context.WithTimeout(t.Context(), 8*maxWait)
	defer cancel()
	var inside, most, entries atomic.Int32
	began := time.Now()
	var wg sync.WaitGroup
	for i := range processes * each {
		s := all[i%processes]
		wg.Go(func() {
			for {
				leases, err := s.Take(ctx, "k", 1, nil)
				if err == nil {
					now := inside.Add(1)
					for m := most.Load(); now > m && !most.CompareAndSwap(m, now); m = most.Load() {
					}
					entries.Add(1)
					time.Sleep(work)
					inside.Add(-1)
					if err := leases[0].Release(ctx); err != nil {
						t.Errorf("release: %v", err)
					}
					return
				}
				if !errors.Is(err, lock.ErrFull) && !errors.Is(err, lock.ErrDelayed) && !errors.Is(err, lock.ErrLost) && !Unavailable(err) || ctx.Err() != nil {
					t.Errorf("take: %v", err)
					return
				}
				_ = s.Await(ctx, "k")
			}
		})
	}
	wg.Wait()
	took, ideal := time.Since(began), processes*each*work/slots
	t.Logf("%d waiters had %d slots for %v each after %v, %.2f times as long as the work takes",
		processes*each, slots, work, took.Round(time.Millisecond), float64(took)/float64(ideal))
	if entries.Load() != processes*each || most.Load() > slots {
		t.Errorf("%d of %d got in; at most %d were inside at once, where %d may be", entries.Load(), processes*each, most.Load(), slots)
	}
}

// TestOneLooksForAll: those who wait in one process are woken in the order in which
// they came, also when the one on duty leaves.
func TestOneLooksForAll(t *testing.T) {
	t.Parallel()
	v := testenv.RabbitMQ(t)
	a, z := start(t, patient(t, v)), start(t, patient(t, v))
	createLimit(t, a, "k", 1)
	lease := take(t, a, "k")
	const waiters = 5
	woken := make(chan int, waiters)
	var cancels []context.CancelFunc
	for i := range waiters {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		cancels = append(cancels, cancel)
		testenv.Go(t, func() {
			err := z.Await(ctx, "k")
			switch {
			case ctx.Err() != nil:
				i = -1
			case err != nil:
				t.Errorf("await: %v", err)
			}
			woken <- i
		})
		testenv.Eventually(t, maxWait, "it waits", func() bool {
			z.waiting.Lock()
			defer z.waiting.Unlock()
			return z.lookouts["k"] != nil && z.lookouts["k"].users == i+1
		})
		time.Sleep(time.Millisecond)
	}
	cancels[0]() // likely on duty
	if i := <-woken; i != -1 {
		t.Fatalf("waiter %d was woken, where the first has left", i)
	}
	for want := 1; want < waiters; want++ {
		if err := lease.Release(t.Context()); err != nil {
			t.Error(err)
		}
		select {
		case i := <-woken:
			if i != want {
				t.Errorf("waiter %d was woken, want %d", i, want)
			}
		case <-time.After(maxWait):
			t.Fatal("nobody was woken")
		}
		lease = take(t, z, "k")
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
	testenv.Eventually(t, maxWait, "nobody waits", func() bool {
		z.waiting.Lock()
		defer z.waiting.Unlock()
		return len(z.lookouts) == 0
	})

	// All learn that there is nothing to wait for.
	lease = take(t, a, "k")
	errs := make(chan error, waiters)
	for range waiters {
		go func() { errs <- z.Await(t.Context(), "k") }()
	}
	testenv.Eventually(t, maxWait, "all wait", func() bool {
		z.waiting.Lock()
		l := z.lookouts["k"]
		z.waiting.Unlock()
		if l == nil {
			return false
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.waiters) == waiters
	})
	if err := a.Destroy(t.Context(), "k", true); err != nil {
		t.Error(err)
	}
	for range waiters {
		if err := <-errs; !errors.Is(err, lock.ErrNoSemaphore) {
			t.Errorf("await: got error %v, want %v", err, lock.ErrNoSemaphore)
		}
	}
	_ = lease.Release(t.Context())
}
