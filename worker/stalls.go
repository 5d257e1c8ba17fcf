package worker

import (
	"context"
	"sync"
	"time"

	"onejob/internal/retry"
)

const (
	// stallTime is how late this process must be to call it a stall. Other replicas
	// call it dead after some times as long.
	stallTime = 2 * time.Second

	// stallMemory is for how long a stall explains the loss of a lease.
	stallMemory = 15 * time.Second

	stallTick = 200 * time.Millisecond
)

// stalls knows when this process did not run although it wanted to: it was frozen, or
// something took all processors or all memory. The clock stands still while the machine
// is suspended, which is no task's fault. The zero value is ready.
type stalls struct {
	mu   sync.Mutex
	tick time.Time // when it was last seen to run
	at   time.Time // the end of the last stall
}

// watch notes stalls until ctx ends, and reports how late each of its timers was.
func (s *stalls) watch(ctx context.Context, report func(late time.Duration)) {
	for ctx.Err() == nil {
		began := time.Now()
		s.look()
		retry.Pause(ctx, stallTick)
		if ctx.Err() == nil {
			report(max(0, time.Since(began)-stallTick))
		}
	}
}

func (s *stalls) look() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if !s.tick.IsZero() && now.Sub(s.tick) > stallTime {
		s.at = now
	}
	s.tick = now
}

// lately reports whether there was a stall that may have cost a lease that has just
// been lost. It does not rely on watch having run since.
func (s *stalls) lately() bool {
	s.look()
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.at.IsZero() && time.Since(s.at) < stallMemory
}
