package consul

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"onejob/internal/retry"
)

// Await implements lock.Semaphores. Of all who wait for one semaphore in this
// replica, one watches. Waiting goes on through Consul's absence. It waits for
// one slot. A caller that wants several retries until that many are free at once.
func (s semaphores) Await(ctx context.Context, name string) error {
	sem, err := s.check(name, 0)
	if err != nil {
		return err
	}
	defer sem.done()
	select {
	case <-ctx.Done():
	case <-sem.freed.Next():
	case sem.watching <- struct{}{}:
		err := sem.watch(ctx, 1)
		if err == nil {
			sem.freed.Send()
		}
		<-sem.watching // the next one watches, from a look of its own
		if err != nil {
			return err
		}
	}
	return ctx.Err()
}

// Drain implements lock.Semaphores. It fails if Consul is unavailable at first; later it waits
// for its return.
func (s semaphores) Drain(ctx context.Context, name string) error {
	sem, err := s.check(name, 0)
	if err != nil {
		return err
	}
	defer sem.done()
	if _, err := sem.look(ctx); err != nil {
		return fmt.Errorf("drain limit %s: %w", name, s.explain(err))
	}
	return sem.watch(ctx, 0)
}

// jitter returns how long to leave a free slot to others: waiters in other
// replicas were woken by the same change. So they ask one after the other, some
// milliseconds apart, and most of them see that the slot is gone without asking.
func (s *semaphore) jitter() time.Duration {
	c := s.members
	c.mu.Lock()
	replicas := len(c.alive)
	c.mu.Unlock()
	return rand.N(time.Duration(min(max(replicas, 1), 30)) * 3 * time.Millisecond)
}

// watch returns nil when so many slots are free and it is our turn.
func (s *semaphore) watch(ctx context.Context, spare int) error {
	for failures := 0; ; {
		changed := s.in.changed.Next()
		v, err := s.look(ctx)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case classify(err) == wrong:
			return fmt.Errorf("wait for limit %s: %w", s.name, s.explain(err))
		case err != nil:
			failures++
			retry.Pause(ctx, retry.Backoff(failures))
		case v.usable() != nil:
			return v.usable()
		case v.full(v.held(), spare) == nil:
			retry.Pause(ctx, s.jitter())
			return ctx.Err()
		default:
			failures = 0
			if s.follow(ctx, v, spare, changed) {
				return nil
			}
		}
	}
}

// follow reports whether the .lock, which alone it watches, has had so many slots
// free until our turn came. If not, it returns when the whole should be looked at
// again. A holder who dies leaves it as it was; that the replica died shows in
// the membership, and what does not show there is found by looking again every few
// seconds.
func (s *semaphore) follow(ctx context.Context, v *view, spare int, changed <-chan struct{}) bool {
	wait := lookAgain - rand.N(lookAgain/4)
	if v.lock == nil { // there is nothing to watch, but one can be made
		wait = time.Second - rand.N(time.Second/4)
	}
	if v.next > 0 {
		wait = min(wait, v.next)
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		select {
		case <-changed:
			cancel()
		case <-ctx.Done():
		}
	})
	if v.lock == nil {
		<-ctx.Done()
		return false
	}
	room := false // when we looked last
	for at := v.lock.ModifyIndex; ctx.Err() == nil; {
		pair, next, err := s.client.watch(ctx, v.lock.Key, at)
		switch {
		case err != nil:
			retry.Pause(ctx, retry.Backoff(3))
			return false
		case pair == nil:
			return false
		}
		c, err := decodeLock(pair)
		if err != nil || c.Limit != v.content.Limit {
			return false
		}
		before := room
		room = len(c.Holders.set)+spare <= v.limit
		switch {
		case room && before:
			return true
		case room:
			retry.Pause(ctx, s.jitter())
			at = 0 // what stands there now, changed or not
		default:
			at = next
		}
	}
	return false
}
