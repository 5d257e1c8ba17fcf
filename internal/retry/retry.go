// Package retry waits, and says for how long before what has failed is tried again.
package retry

import (
	"context"
	"math/rand/v2"
	"time"
)

// Backoff returns how long to wait after so many failures: 100 ms doubling up to 2 s, with
// jitter, so that replicas do not come back in step.
func Backoff(failures int) time.Duration {
	d := min(2*time.Second, 100*time.Millisecond<<min(failures-1, 5))
	return d/2 + rand.N(d/2+1)
}

// Pause waits for d, or for ctx to end.
func Pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
